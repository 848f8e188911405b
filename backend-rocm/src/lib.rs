//! The AMD backend: HIP found at run time, kernels on MFMA compiled at first use.
//!
//! Verified in emulation, never on hardware.
//!
//! [`RocmBackend::open`] takes a device of the machine, or an emulated one;
//! [`RocmBackend::pretend`] plans and compiles for an architecture without any.

mod compile;
mod driver;
mod kernels;
mod memory;
mod modules;
mod resources;

use std::sync::Arc;

use fmha_core::args::{check_bwd, check_combine, check_fwd};
use fmha_core::backend::unsupported;
use fmha_core::bind;
use fmha_core::cache::{CompiledKernel, KernelJob};
use fmha_core::emulators::Double;
use fmha_core::lengths::check_lengths;
use fmha_core::source::KernelSource;
use fmha_core::{
    Accuracy, AnyProblem, BackendId, BwdArgs, BwdPlan, CombineArgs, CombinePlan, DType, DeviceMemory, Error,
    Explain, FmhaBackend, FwdArgs, FwdPlan, FwdProblem, LaunchShape, MemorySpace, PlanOptions, PlanParts,
    Precompile, Promises, Queues, Refusal, ResourceUsage, Result, Roofline, ScoreSums, SeqArgs, Step, Stream,
    ValidBwd, ValidCombine, ValidFwd, Workspace,
};
use fmha_kernels_hip::simt_bwd::{self, SimtBwd};
use fmha_kernels_hip::{Device, Grid, cdna, combine, simt};

pub use crate::driver::graph::{Event, Graph};
pub use crate::resources::Resources;
pub use fmha_kernels_hip::Arch;

use crate::driver::{Driver, search};
use crate::kernels::{Choice, Forward};
use crate::memory::RocmMemory;
use crate::modules::{Module, Modules, modules};

const KIND: &str = "rocm";

/// One AMD device, real, emulated or only pretended.
pub struct RocmBackend {
    id: BackendId,
    device: Device,
    name: String,
    memory: RocmMemory,
    modules: Modules,
}

/// What a forward plan holds.
struct FwdHandle {
    chosen: FwdKernel,
    /// What serves operands whose addresses the chosen kernel does not take, if the caller allows it.
    stand_in: Option<FwdKernel>,
    /// Whether each run reads the lengths back and checks them.
    checks_lengths: bool,
}

/// A forward kernel that can be launched.
struct FwdKernel {
    forward: Forward,
    ready: Ready,
}

/// What a backward plan holds.
struct BwdHandle {
    chosen: SimtBwd,
    stats: Ready,
    rows: Ready,
}

/// A kernel, or why there is none: neither a device nor a compiler.
struct Ready(std::result::Result<Arc<Module>, String>);

impl Ready {
    fn usage(&self) -> Option<&ResourceUsage> {
        self.0.as_ref().ok().map(|module| &module.compiled.resources)
    }
}

impl RocmBackend {
    /// Device `ordinal` of the machine, or with `emulate` (`gfx90a`, `gfx942`, `gfx950`) of the
    /// emulator, whose driver library lies in `FMHA_EMULATOR_DIR` or beside the program.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with every library that was tried, or the driver's words.
    pub fn open(ordinal: usize, emulate: Option<&str>) -> Result<Self> {
        let driver = match emulate {
            None => Driver::open(search::hip()?, ordinal, false)?,
            Some(arch) => emulated(Arch::from_gcn_name(arch)?, ordinal)?,
        };
        let info = driver.info()?;
        let arch = Arch::from_gcn_name(&info.gcn_arch_name)?;
        let emulated = if emulate.is_some() { ", emulated" } else { "" };
        let name = format!(
            "rocm:{ordinal} ({}, {}, {} compute units, HIP {}{emulated})",
            info.name, info.gcn_arch_name, info.num_compute_units, info.runtime_version
        );
        Self::new(arch, name, info.num_compute_units, Some(driver))
    }

    /// No device: plans for `arch` (`gfx90a`, `gfx942`, `gfx950`), compiles where there is a compiler,
    /// runs nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an architecture that the kernels do not know.
    pub fn pretend(arch: &str) -> Result<Self> {
        let arch = Arch::from_gcn_name(arch)?;
        Self::new(arch, format!("rocm ({}, no device)", arch.name()), arch.num_compute_units(), None)
    }

    fn new(arch: Arch, name: String, num_compute_units: u32, driver: Option<Driver>) -> Result<Self> {
        let device = Device { arch, num_compute_units };
        let (id, modules) = (BackendId::unique(), modules(arch, driver.clone())?);
        Ok(Self { id, device, name, modules, memory: RocmMemory(driver) })
    }

    /// The architecture that decides the code object.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.device.arch
    }

    /// A new queue of work.
    ///
    /// # Errors
    /// What the driver said.
    pub fn create_stream(&self) -> Result<Stream> {
        self.memory.driver()?.create_stream()
    }

    /// Ends a queue that [`create_stream`](Self::create_stream) made.
    ///
    /// # Errors
    /// What the driver said.
    pub fn destroy_stream(&self, stream: Stream) -> Result<()> {
        self.memory.driver()?.destroy_stream(stream)
    }

    /// A moment to record on a stream.
    ///
    /// # Errors
    /// What the driver said, or that it has no events.
    pub fn create_event(&self) -> Result<Event> {
        Event::new(self.memory.driver()?)
    }

    /// Captures what `queue` puts on `stream`, which is not the default one, instead of running it.
    ///
    /// # Errors
    /// What `queue` or the driver said, or that it has no graphs.
    pub fn capture(&self, stream: Stream, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        Graph::capture(self.memory.driver()?, stream, queue)
    }

    /// The code object of a forward plan of this backend: an ELF for `arch`.
    #[must_use]
    pub fn code_object<'a>(&self, plan: &'a FwdPlan) -> Option<&'a [u8]> {
        let module = plan.handle::<FwdHandle>(&self.id, &self.name).ok()?.chosen.ready.0.as_ref();
        module.ok().map(|module| &*module.compiled.machine)
    }

    /// Finds or compiles, and loads where there is a device. Without a device a compiler may be missing
    /// too.
    fn ready(&self, kernel: &'static str, source: KernelSource) -> Result<Ready> {
        match self.modules.load(kernel, source, 0) {
            Err(Error::NoDevice(text)) if self.memory.0.is_none() => Ok(Ready(Err(text))),
            loaded => loaded.map(|module| Ready(Ok(module))),
        }
    }

    fn unsupported(&self, refusal: Refusal) -> Error {
        unsupported(&self.name, vec![refusal])
    }
}

/// The `ordinal`-th device of `arch` among those of the emulator's library.
fn emulated(arch: Arch, ordinal: usize) -> Result<Driver> {
    let mut driver = Driver::open(search::hip_at(&[EMULATED_HIP.find()?])?, 0, true)?;
    let mut left = ordinal;
    loop {
        if driver.info()?.gcn_arch_name.split(':').next() == Some(arch.name()) {
            if left == 0 {
                return Ok(driver);
            }
            left -= 1;
        }
        driver = driver.next()?;
    }
}

/// HIP's test double.
const EMULATED_HIP: Double = Double { file: "libfmha_emu_amdhip64.so", package: "fmha-emu-hip" };

/// A row is one wave's, its keys in one order, and every tile's maxima are taken.
const PROMISES: Promises = Promises {
    deterministic: true,
    batch_invariant: true,
    graph_capturable: true,
    accuracy: Accuracy::Exact,
    score_sums: ScoreSums::F32,
};

impl FmhaBackend for RocmBackend {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn roofline(&self, dtype: DType) -> Roofline {
        self.device.arch.roofline(dtype)
    }

    fn kernels(&self) -> Vec<&'static str> {
        vec![cdna::NAME, simt::NAME, combine::NAME]
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        let Choice { forward, refusals } = self.choose_fwd(problem, options)?;
        let kernel = forward.name();
        let ready = self.ready(kernel, forward.source())?;
        let grid = forward.grid(problem, self.device, ready.usage());
        let mut details = forward.details();
        let stand_in = self.stand_in(&forward, problem, options)?;
        if let Some(stand_in) = &stand_in {
            let serves = match &stand_in.ready.0 {
                Ok(_) => "the same kernel by elements takes them: correct, not fast".to_owned(),
                Err(why) => format!("refused: {why}"),
            };
            details.push(("unaligned operands", serves));
        }
        let parts = PlanParts {
            refusals,
            details,
            is_fallback: kernel == simt::NAME,
            ..self.parts(problem.clone(), kernel, options, &ready, grid)?
        };
        let chosen = FwdKernel { forward, ready };
        Ok(parts.seal(&self.id, FwdHandle { chosen, stand_in, checks_lengths: options.check_lengths }))
    }

    fn run_fwd(&self, plan: &FwdPlan, args: &mut FwdArgs<'_>, stream: Stream) -> Result<()> {
        let handle = plan.handle::<FwdHandle>(&self.id, &self.name)?;
        let problem = plan.problem();
        check_fwd(problem, args, plan.workspace(), MemorySpace::Device)?;
        if handle.checks_lengths {
            self.check_lengths(problem, &args.seq, stream)?;
        }
        let params = bind::fwd_params(problem, args);
        let FwdKernel { forward, ready } =
            match (handle.chosen.forward.takes_addresses(problem, args), &handle.stand_in) {
                (Ok(()), _) => &handle.chosen,
                (Err(_), Some(stand_in)) => stand_in,
                (Err(unaligned), None) => return Err(unaligned.into()),
            };
        let grid = forward.grid(problem, self.device, ready.usage());
        match forward {
            Forward::Cdna(_) => self.launch(ready, grid, &cdna::Cdna::params(problem, &params), stream),
            Forward::Simt(_) => self.launch(ready, grid, &params, stream),
        }
    }

    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan> {
        let chosen = self.choose_bwd(problem, options)?;
        let handle = BwdHandle {
            stats: self.ready(simt_bwd::STATS, chosen.stats_source())?,
            rows: self.ready(simt::NAME, chosen.source_of_rows())?,
            chosen,
        };
        let [stats_grid, grid] = self.bwd_grids(&handle);
        let stats =
            Step { kernel: simt_bwd::STATS.to_owned(), explain: Self::explain(&handle.stats, stats_grid) };
        let mut parts = PlanParts {
            details: vec![("tile", "a wave to a row, 64 pairs at a time".to_owned())],
            is_fallback: true,
            workspace: Workspace { bytes: chosen.workspace.bytes, zeroed_bytes: 0 },
            ..self.parts(problem.clone(), simt::NAME, options, &handle.rows, grid)?
        };
        parts.steps.insert(0, stats);
        Ok(parts.seal(&self.id, handle))
    }

    fn run_bwd(&self, plan: &BwdPlan, args: &mut BwdArgs<'_>, stream: Stream) -> Result<()> {
        let handle = plan.handle::<BwdHandle>(&self.id, &self.name)?;
        let problem = plan.problem();
        check_bwd(problem, args, plan.workspace(), MemorySpace::Device)?;
        let address = args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let params = handle.chosen.workspace.bind(bind::bwd_params(problem, args), address);
        let [stats_grid, grid] = self.bwd_grids(handle);
        self.launch(&handle.stats, stats_grid, &params, stream)?;
        self.launch(&handle.rows, grid, &params, stream)
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        if let Some(asked) = options.kernel.as_ref().filter(|asked| *asked != combine::NAME) {
            let reason = format!("there is no such combine kernel (known: {})", combine::NAME);
            return Err(self.unsupported(Refusal::new(asked.clone(), reason)));
        }
        let spec = combine::accept(problem).map_err(|refusal| self.unsupported(refusal))?;
        let ready = self.ready(combine::NAME, combine::source(&spec))?;
        let grid = self.combine_grid(&ready, problem);
        let parts = self.parts(problem.clone(), combine::NAME, options, &ready, grid)?;
        Ok(parts.seal(&self.id, ready))
    }

    fn run_combine(&self, plan: &CombinePlan, args: &mut CombineArgs<'_>, stream: Stream) -> Result<()> {
        let ready = plan.handle::<Ready>(&self.id, &self.name)?;
        let problem = plan.problem();
        check_combine(problem, args, MemorySpace::Device)?;
        let grid = self.combine_grid(ready, problem);
        self.launch(ready, grid, &bind::combine_params(problem, args), stream)
    }

    fn precompiler(&self) -> Option<&dyn Precompile> {
        Some(self)
    }

    fn queues(&self) -> Option<&dyn Queues> {
        self.memory.0.as_ref().map(|driver| -> &dyn Queues { driver })
    }
}

impl Precompile for RocmBackend {
    fn jobs(&self, problem: AnyProblem<'_>, options: &PlanOptions) -> Result<Vec<KernelJob>> {
        let job = match problem {
            AnyProblem::Forward(problem) => {
                let forward = self.choose_fwd(problem, options)?.forward;
                self.modules.job(forward.name(), forward.source())
            }
            AnyProblem::Backward(problem) => {
                let chosen = self.choose_bwd(problem, options)?;
                return Ok(vec![
                    self.modules.job(simt_bwd::STATS, chosen.stats_source()),
                    self.modules.job(simt::NAME, chosen.source_of_rows()),
                ]);
            }
            AnyProblem::Combine(problem) => {
                let spec = combine::accept(problem).map_err(|refusal| self.unsupported(refusal))?;
                self.modules.job(combine::NAME, combine::source(&spec))
            }
        };
        Ok(vec![job])
    }

    fn precompile(&self, job: &KernelJob) -> Result<Arc<CompiledKernel>> {
        self.modules.compile(job).map(|(kernel, _)| kernel)
    }
}

impl RocmBackend {
    /// The tile kernel; where it does not take the problem and the caller allows it, the slow one.
    fn choose_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<Choice> {
        kernels::select(problem, self.device, options).map_err(|refusals| unsupported(&self.name, refusals))
    }

    /// The kernel for operands whose addresses `forward` does not take, where the caller allows a slow one.
    fn stand_in(
        &self,
        forward: &Forward,
        problem: &ValidFwd,
        options: &PlanOptions,
    ) -> Result<Option<FwdKernel>> {
        let Some(forward) = forward.for_any_address(problem).filter(|_| options.allow_fallback) else {
            return Ok(None);
        };
        let ready = match self.ready(forward.name(), forward.source()) {
            // A bundle that has the chosen kernel serves without a compiler.
            Err(Error::NoDevice(why)) => Ready(Err(why)),
            ready => ready?,
        };
        Ok(Some(FwdKernel { forward, ready }))
    }

    fn choose_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<SimtBwd> {
        simt_bwd::accept(problem, options).map_err(|refusal| self.unsupported(refusal))
    }

    fn bwd_grids(&self, handle: &BwdHandle) -> [Grid; 2] {
        let BwdHandle { chosen, stats, rows } = handle;
        [(stats, chosen.stats_workgroups()), (rows, chosen.workgroups())]
            .map(|(ready, workgroups)| self.device.grid(ready.usage(), workgroups, simt::NUM_THREADS))
    }

    /// What a plan of one launch says; details and refusals are the caller's to add.
    fn parts<P>(
        &self,
        problem: P,
        kernel: &'static str,
        options: &PlanOptions,
        ready: &Ready,
        grid: Grid,
    ) -> Result<PlanParts<P>> {
        options.check_promises(kernel, &PROMISES).map_err(|refusal| self.unsupported(refusal))?;
        let promises = Promises { graph_capturable: !options.check_lengths, ..PROMISES };
        Ok(PlanParts {
            problem,
            backend: self.name.clone(),
            kernel: kernel.to_owned(),
            details: Vec::new(),
            steps: vec![Step { kernel: kernel.to_owned(), explain: Self::explain(ready, grid) }],
            refusals: Vec::new(),
            is_fallback: false,
            workspace: Workspace::NONE,
            promises,
        })
    }

    fn combine_grid(&self, ready: &Ready, problem: &ValidCombine) -> Grid {
        self.device.grid(ready.usage(), combine::num_workgroups(problem), combine::NUM_THREADS)
    }

    fn explain(ready: &Ready, grid: Grid) -> Explain {
        let code = match &ready.0 {
            Ok(module) => module.origin.to_string(),
            Err(why) => format!("none: {why}"),
        };
        Explain {
            resources: ready.usage().copied(),
            code,
            launch: Some(LaunchShape {
                groups: grid.workgroups,
                threads: grid.threads,
                shared_bytes: 0,
                tiles: grid.tiles,
                tiles_at_once: grid.tiles_at_once,
            }),
        }
    }

    /// Waits for the stream, reads a call's lengths back and checks them.
    fn check_lengths(&self, problem: &FwdProblem, seq: &SeqArgs<'_>, stream: Stream) -> Result<()> {
        let driver = self.memory.driver()?;
        driver.synchronize(stream)?;
        check_lengths(problem, seq, |slice, bytes| {
            // SAFETY: the argument check saw that the slice covers them; its maker promised the memory.
            unsafe { driver.download(slice.as_ptr().cast_mut(), bytes) }
        })
    }

    fn launch<P: Copy>(&self, Ready(module): &Ready, grid: Grid, params: &P, stream: Stream) -> Result<()> {
        let module = module.as_ref().map_err(|why| Error::NoDevice(why.clone()))?;
        let function = module.loaded()?;
        if grid.workgroups == 0 {
            return Ok(());
        }
        // SAFETY: the kernel was compiled with this struct's definition, whose size it asserts; the
        // addresses are those of slices that passed the check, whose makers promised the memory.
        unsafe { function.launch(grid.workgroups as u32, grid.threads, params, stream) }
    }
}
