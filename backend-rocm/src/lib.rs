//! The AMD backend: HIP found at run time, kernels on MFMA compiled at first use.
//!
//! Verified in emulation, never on hardware.
//!
//! [`RocmBackend::open`] takes a device of the machine, or an emulated one;
//! [`RocmBackend::pretend`] plans and compiles for an architecture without any.

mod arch;
mod compile;
mod driver;
#[cfg(test)]
mod emulated;
mod kernels;
mod memory;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fmha_core::args::{check_combine, check_fwd};
use fmha_core::backend::unsupported;
use fmha_core::bind;
use fmha_core::cache::{Cache, CompiledKernel, KernelJob};
use fmha_core::source::KernelSource;
use fmha_core::spec::FwdSpec;
use fmha_core::{
    BwdArgs, BwdPlan, CombineArgs, CombinePlan, DeviceMemory, Error, Explain, FmhaBackend, FwdArgs, FwdPlan,
    MemorySpace, Plan, PlanOptions, Precompile, ProblemError, Promises, Queues, Refusal, Result, Roofline,
    Stream, ValidBwd, ValidCombine, ValidFwd,
};
use fmha_kernels_hip::CdnaTile;

pub use crate::arch::Arch;
pub use crate::driver::graph::{Event, Graph};

use crate::compile::Compiler;
use crate::driver::{Driver, search};
use crate::kernels::{Compiled, cdna, combine, simt};
use crate::memory::RocmMemory;

const KIND: &str = "rocm";

/// One AMD device, real, emulated or only pretended.
pub struct RocmBackend {
    arch: Arch,
    name: String,
    memory: RocmMemory,
    compiler: OnceLock<Compiler>,
    cache: Cache,
    /// By entry text: the headers are the same for all.
    compiled: Mutex<HashMap<String, Arc<Slot>>>,
}

/// A kernel, once somebody has compiled it; whoever wants the same one meanwhile waits.
type Slot = Mutex<Option<Arc<Compiled>>>;

/// What a forward plan holds.
enum FwdHandle {
    Cdna(CdnaHandle),
    Simt(Arc<Compiled>),
}

/// The tile kernel of a plan.
struct CdnaHandle {
    spec: FwdSpec,
    tile: CdnaTile,
    kernel: Arc<Compiled>,
    /// For pointers less aligned than the plan's strides promise; compiled when such a call comes.
    any_address: Mutex<HashMap<CdnaTile, Arc<Compiled>>>,
}

impl RocmBackend {
    /// Device `ordinal` of the machine, or with `emulate` (`gfx90a`, `gfx942`, `gfx950`) of the
    /// emulator, whose driver library lies in `FMHA_EMULATOR_DIR` or beside the program.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with every library that was tried, or the driver's words.
    pub fn open(ordinal: usize, emulate: Option<&str>) -> Result<Self> {
        let driver = match emulate {
            None => Driver::open(search::hip()?, ordinal)?,
            Some(arch) => emulated(Arch::from_gcn_name(arch)?, ordinal)?,
        };
        let info = driver.info()?;
        let arch = Arch::from_gcn_name(&info.gcn_arch_name)?;
        let emulated = if emulate.is_some() { ", emulated" } else { "" };
        let name = format!(
            "rocm:{ordinal} ({}, {}, {} compute units, HIP {}{emulated})",
            info.name, info.gcn_arch_name, info.num_compute_units, info.runtime_version
        );
        Self::new(arch, name, Some(driver))
    }

    /// No device: plans and compiles for `arch` (`gfx90a`, `gfx942`, `gfx950`), runs nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an architecture that the kernels do not know.
    pub fn pretend(arch: &str) -> Result<Self> {
        let arch = Arch::from_gcn_name(arch)?;
        Self::new(arch, format!("rocm ({}, no device)", arch.name()), None)
    }

    fn new(arch: Arch, name: String, driver: Option<Driver>) -> Result<Self> {
        Ok(Self {
            arch,
            name,
            memory: RocmMemory(driver),
            compiler: OnceLock::new(),
            cache: Cache::from_env()?,
            compiled: Mutex::default(),
        })
    }

    /// The architecture that decides the code object.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.arch
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
    pub fn code_object(plan: &FwdPlan) -> Option<Arc<[u8]>> {
        plan.handle.downcast_ref::<FwdHandle>().map(|handle| match handle {
            FwdHandle::Cdna(handle) => Arc::clone(&handle.kernel.code),
            FwdHandle::Simt(kernel) => Arc::clone(&kernel.code),
        })
    }

    fn compiler(&self) -> Result<&Compiler> {
        if let Some(compiler) = self.compiler.get() {
            return Ok(compiler);
        }
        let found = Compiler::find()?;
        Ok(self.compiler.get_or_init(|| found))
    }

    /// Compiles, or finds what was compiled before, and loads it where there is a device.
    fn kernel(&self, name: &'static str, source: &KernelSource) -> Result<Arc<Compiled>> {
        let slot = {
            let mut slots = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(source.entry.clone()).or_default())
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = &*slot {
            return Ok(Arc::clone(kernel));
        }
        let (compiled, origin) =
            self.cache.get(&compile::job(name, self.arch, source.clone()), || self.compiler())?;
        let code: Arc<[u8]> = compiled.machine.as_slice().into();
        let function = match &self.memory.0 {
            Some(driver) => Some(driver.load(&code, fmha_core::source::ENTRY)?),
            None => None,
        };
        Ok(Arc::clone(slot.insert(Arc::new(Compiled { code, origin, function }))))
    }

    fn unsupported(&self, refusal: Refusal) -> Error {
        unsupported(&self.name, vec![refusal])
    }

    /// # Errors
    /// A refusal when `options` ask for another kernel.
    fn asked_for(&self, kernel: &'static str, options: &PlanOptions) -> Result<()> {
        match &options.kernel {
            Some(asked) if asked != kernel => Err(self.unsupported(Refusal::new(
                asked.clone(),
                format!("kernel {asked} is not {kernel}, the one there is"),
            ))),
            _ => Ok(()),
        }
    }

    fn check_owner<P>(&self, plan: &Plan<P>) -> Result<()> {
        if plan.backend == self.name {
            return Ok(());
        }
        Err(ProblemError::new("plan", format!("plan is {}'s, not {}'s", plan.backend, self.name)).into())
    }
}

/// The `ordinal`-th device of `arch` among those of the emulator's library.
fn emulated(arch: Arch, ordinal: usize) -> Result<Driver> {
    let mut driver = Driver::open(search::hip_at(&emulator_places())?, 0)?;
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

/// Beside the program, and one and two folders up: tests lie in `deps`, examples in `examples`. Not
/// named like the real library, which a loader's path must never confuse with this one.
fn emulator_places() -> Vec<PathBuf> {
    const FILE: &str = "libfmha_emu_amdhip64.so";
    if let Some(folder) = fmha_core::env::EMULATOR_DIR.get() {
        return vec![PathBuf::from(folder).join(FILE)];
    }
    let program = std::env::current_exe().unwrap_or_default();
    program.ancestors().skip(1).take(3).map(|folder| folder.join(FILE)).collect()
}

const FWD_PROMISES: Promises =
    Promises { deterministic: true, batch_invariant: true, graph_capturable: true };

impl FmhaBackend for RocmBackend {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn roofline(&self) -> Roofline {
        self.arch.roofline()
    }

    fn kernels(&self) -> Vec<&'static str> {
        vec![cdna::NAME, simt::NAME, combine::NAME]
    }

    fn precompiler(&self) -> Option<&dyn Precompile> {
        Some(self)
    }

    fn queues(&self) -> Option<&dyn Queues> {
        self.memory.0.as_ref().map(|driver| -> &dyn Queues { driver })
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        let chosen = self.choose_fwd(problem, options)?;
        let (kernel, mut details, compiled) = match &chosen.handle {
            FwdHandle::Cdna(handle) => {
                (cdna::NAME, cdna::details(&handle.spec, &handle.tile, problem), &handle.kernel)
            }
            FwdHandle::Simt(kernel) => (simt::NAME, simt::details(problem), kernel),
        };
        let Compiled { code, origin, .. } = &**compiled;
        details.push(("code object", format!("{} bytes for {}", code.len(), self.arch.name())));
        Ok(Plan {
            problem: problem.clone(),
            backend: self.name.clone(),
            kernel: kernel.to_owned(),
            details,
            explain: Explain { code: origin.to_string(), ..Explain::default() },
            refusals: chosen.refusals,
            is_fallback: kernel == simt::NAME,
            workspace_bytes: 0,
            promises: FWD_PROMISES,
            handle: Arc::new(chosen.handle),
        })
    }

    fn run_fwd(&self, plan: &FwdPlan, args: &FwdArgs<'_>, stream: Stream) -> Result<()> {
        self.check_owner(plan)?;
        check_fwd(&plan.problem, args, MemorySpace::Device)?;
        let params = bind::fwd_params(&plan.problem, args);
        let handle = plan.handle.downcast_ref::<FwdHandle>().ok_or_else(|| {
            Error::Problem(ProblemError::new("plan", "plan has no handle of this backend's: 0 kernels"))
        })?;
        match handle {
            FwdHandle::Cdna(handle) => {
                let tile = cdna::tile_for(handle.tile, &plan.problem, args);
                let kernel = self.kernel_of(handle, tile)?;
                let workgroups = cdna::num_workgroups(&plan.problem, &tile) as u32;
                self.launch(&kernel, workgroups, cdna::num_threads(&tile) as u32, &params, stream)
            }
            FwdHandle::Simt(kernel) => {
                let workgroups = simt::num_workgroups(&plan.problem) as u32;
                self.launch(kernel, workgroups, simt::NUM_THREADS, &params, stream)
            }
        }
    }

    fn plan_bwd(&self, _problem: &ValidBwd, _options: &PlanOptions) -> Result<BwdPlan> {
        Err(self.unsupported(Refusal::new("cdna_bwd", "backward: 0 kernels of this backend compute it yet")))
    }

    fn run_bwd(&self, plan: &BwdPlan, _args: &BwdArgs<'_>, _stream: Stream) -> Result<()> {
        self.check_owner(plan)?;
        Err(self.unsupported(Refusal::new("cdna_bwd", "backward: 0 kernels of this backend compute it yet")))
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        self.asked_for(combine::NAME, options)?;
        let spec = combine::accept(problem).map_err(|refusal| self.unsupported(refusal))?;
        let kernel = self.kernel(combine::NAME, &combine::source(&spec))?;
        Ok(Plan {
            problem: problem.clone(),
            backend: self.name.clone(),
            kernel: combine::NAME.to_owned(),
            details: vec![("grid", format!("{} workgroups", combine::num_workgroups(problem)))],
            explain: Explain::default(),
            refusals: Vec::new(),
            is_fallback: false,
            workspace_bytes: 0,
            promises: FWD_PROMISES,
            handle: kernel,
        })
    }

    fn run_combine(&self, plan: &CombinePlan, args: &CombineArgs<'_>, stream: Stream) -> Result<()> {
        self.check_owner(plan)?;
        check_combine(&plan.problem, args, MemorySpace::Device)?;
        let kernel = plan.handle.downcast_ref::<Compiled>().ok_or_else(|| {
            Error::Problem(ProblemError::new("plan", "plan has no handle of this backend's: 0 kernels"))
        })?;
        let workgroups = combine::num_workgroups(&plan.problem) as u32;
        self.launch(
            kernel,
            workgroups,
            combine::NUM_THREADS,
            &bind::combine_params(&plan.problem, args),
            stream,
        )
    }
}

impl Precompile for RocmBackend {
    fn fwd_job(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<KernelJob> {
        let (spec, tile) =
            cdna::accept(problem, self.arch, options).map_err(|refusal| self.unsupported(refusal))?;
        Ok(compile::job(cdna::NAME, self.arch, cdna::source(&spec, &tile)))
    }

    fn precompile(&self, job: &KernelJob) -> Result<Arc<CompiledKernel>> {
        self.cache.get(job, || self.compiler()).map(|(kernel, _)| kernel)
    }
}

/// A forward kernel and what was passed over for it.
struct ChosenFwd {
    handle: FwdHandle,
    refusals: Vec<Refusal>,
}

impl RocmBackend {
    /// The tile kernel; where it does not take the problem and the caller allows it, the slow one.
    fn choose_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<ChosenFwd> {
        let asked = options.kernel.as_deref();
        let mut refusals = Vec::new();
        if asked.is_none_or(|name| name == cdna::NAME) {
            match cdna::accept(problem, self.arch, options) {
                Ok((spec, tile)) => {
                    let kernel = self.kernel(cdna::NAME, &cdna::source(&spec, &tile))?;
                    let handle = CdnaHandle { spec, tile, kernel, any_address: Mutex::default() };
                    return Ok(ChosenFwd { handle: FwdHandle::Cdna(handle), refusals });
                }
                Err(refusal) => refusals.push(refusal),
            }
        }
        if asked == Some(simt::NAME) || asked.is_none() && options.allow_fallback {
            match simt::accept(problem, options) {
                Ok(spec) => {
                    let kernel = self.kernel(simt::NAME, &simt::source(&spec))?;
                    return Ok(ChosenFwd { handle: FwdHandle::Simt(kernel), refusals });
                }
                Err(refusal) => refusals.push(refusal),
            }
        } else if asked.is_none() {
            let reason = "it is the slow fallback, and allow_fallback is false";
            refusals.push(Refusal::new(simt::NAME, reason));
        }
        if let (Some(name), true) = (asked, refusals.is_empty()) {
            let reason = format!("there is no such forward kernel (known: {}, {})", cdna::NAME, simt::NAME);
            refusals.push(Refusal::new(name.to_owned(), reason));
        }
        Err(unsupported(&self.name, refusals))
    }

    /// The plan's kernel with another tile, compiled when a call first needs it.
    fn kernel_of(&self, handle: &CdnaHandle, tile: CdnaTile) -> Result<Arc<Compiled>> {
        if tile == handle.tile {
            return Ok(Arc::clone(&handle.kernel));
        }
        let mut others = handle.any_address.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = others.get(&tile) {
            return Ok(Arc::clone(kernel));
        }
        let kernel = self.kernel(cdna::NAME, &cdna::source(&handle.spec, &tile))?;
        others.insert(tile, Arc::clone(&kernel));
        Ok(kernel)
    }

    fn launch<P: Copy>(
        &self,
        kernel: &Compiled,
        num_workgroups: u32,
        num_threads: u32,
        params: &P,
        stream: Stream,
    ) -> Result<()> {
        let Some(function) = &kernel.function else {
            return self.memory.driver().map(|_| ());
        };
        if num_workgroups == 0 {
            return Ok(());
        }
        // SAFETY: the kernel was compiled with this struct's definition, whose size it asserts; the
        // addresses are those of slices that passed the check, whose makers promised the memory.
        unsafe { function.launch(num_workgroups, num_threads, params, stream) }
    }
}
