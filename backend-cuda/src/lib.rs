//! The CUDA backend of `fmha`: finds the driver and NVRTC at run time, chooses a kernel, compiles it,
//! queues it.
//!
//! Kernels are text in `fmha-kernels-cuda`; which one takes a problem is said in `kernels`. The
//! driver's functions are called in `driver` alone.

mod driver;
mod emulated;
mod kernels;
mod modules;
pub mod nvrtc;
mod queues;
mod steps;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

pub use emulated::emulated_launches;

use fmha_core::args::{check_bwd, check_combine, check_fwd};
use fmha_core::cache::{CompiledKernel, KernelJob, only_plans};
use fmha_core::error::{Error, ProblemError, Refusal, Result};
use fmha_core::fields;
use fmha_core::tune::{TileClass, TileOptions, Tune, TunedTile, TunedTiles};
use fmha_core::{
    AnyProblem, BackendId, BwdArgs, BwdPlan, CombineArgs, CombinePlan, DType, DevBuffer, DeviceMemory,
    FmhaBackend, FwdArgs, FwdPlan, MemorySpace, Operation, PlanOptions, Precompile, Queues, Roofline, Stream,
    ValidBwd, ValidCombine, ValidFwd,
};

use fmha_kernels_cuda::sm80::Sm80Tile;
use fmha_kernels_cuda::sm90::Sm90Tile;
use fmha_kernels_cuda::sm90_bwd::Sm90BwdTile;
use fmha_kernels_cuda::sm100::Sm100Tile;

use driver::Device;
use driver::mapped::Mapped;
use kernels::{
    BwdKernel, BwdRecipe as _, Call, Choice, CombineKernel, CombineRecipe as _, DeviceFacts, FwdKernel,
    FwdRecipe as _, Launch, MatrixSums, Named as _, select, sm80, sm90, sm90_bwd, sm100,
};
use modules::Modules;
use steps::Handle;

/// A GPU behind NVIDIA's driver, or only its architecture.
pub struct CudaBackend {
    id: BackendId,
    name: String,
    facts: DeviceFacts,
    modules: Modules,
    memory: CudaMemory,
}

/// The device's memory; none where a backend only plans.
struct CudaMemory {
    device: Option<Arc<Device>>,
    emulated: bool,
}

impl CudaBackend {
    /// Opens device `ordinal` through the driver; with `emulate` (`sm_90a`), the test double of a
    /// device of that architecture, on which kernels are interpreted.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where there is no driver or no such device, or no double; what the driver
    /// said; a bundle of `FMHA_BUNDLE` that is not whole.
    pub fn open(ordinal: usize, emulate: Option<&str>) -> Result<Self> {
        let emulated = match emulate {
            Some(arch) => {
                emulated::install(arch)?;
                true
            }
            None if emulated::is_installed() => {
                return Err(Error::NoDevice("this process runs on an emulated CUDA device".to_owned()));
            }
            None => false,
        };
        let device = Arc::new(driver::open(ordinal)?);
        let mut facts = DeviceFacts::of(&device)?;
        if emulated {
            facts.tuned = TunedTiles::default();
            // The interpreter sums in f32, so the stricter bound holds there.
            facts.score_sums = MatrixSums::default();
            facts.roofline =
                Roofline { source: "emulated: it has no speed".to_owned(), ..Roofline::default() };
        }
        let emulated_words = if emulated { ", emulated" } else { "" };
        let name = format!("cuda:{ordinal} ({}, {}{emulated_words})", device.name, facts.arch);
        Ok(Self {
            id: BackendId::unique(),
            name,
            modules: modules::modules(&facts.arch, Some(Arc::clone(&device)), emulated)?,
            facts,
            memory: CudaMemory { device: Some(device), emulated },
        })
    }

    /// No device: plans, and compiles where there is a compiler, for `arch` (`sm_90a`, with an H200's
    /// numbers); runs nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an architecture that it has no numbers of; a bundle of `FMHA_BUNDLE`
    /// that is not whole.
    pub fn pretend(arch: &str) -> Result<Self> {
        let facts = DeviceFacts::stated(arch)?;
        Ok(Self {
            id: BackendId::unique(),
            name: format!("cuda ({arch}, no device)"),
            modules: modules::modules(arch, None, false)?,
            facts,
            memory: CudaMemory { device: None, emulated: false },
        })
    }

    fn has_device(&self) -> bool {
        self.memory.device.is_some()
    }

    fn choose_fwd(
        &self,
        problem: &ValidFwd,
        options: &PlanOptions,
    ) -> Result<(Choice<FwdKernel>, Vec<Refusal>)> {
        select(&self.name, &FwdKernel::all(), options, |kernel| kernel.choose(problem, &self.facts, options))
    }

    fn choose_bwd(
        &self,
        problem: &ValidBwd,
        options: &PlanOptions,
    ) -> Result<(Choice<BwdKernel>, Vec<Refusal>)> {
        select(&self.name, &BwdKernel::all(), options, |kernel| kernel.choose(problem, &self.facts, options))
    }

    fn choose_combine(
        &self,
        problem: &ValidCombine,
        options: &PlanOptions,
    ) -> Result<(Choice<CombineKernel>, Vec<Refusal>)> {
        let family = CombineKernel::all();
        select(&self.name, &family, options, |kernel| kernel.choose(problem, &self.facts, options))
    }
}

impl FmhaBackend for CudaBackend {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn roofline(&self, dtype: DType) -> Roofline {
        self.facts.roofline_of(dtype)
    }

    fn kernels(&self) -> Vec<&'static str> {
        let forward = FwdKernel::all().map(|kernel| kernel.name());
        let backward = BwdKernel::all().map(|kernel| kernel.name());
        let combine = CombineKernel::all().map(|kernel| kernel.name());
        let mut names: Vec<&'static str> = Vec::new();
        for name in [&forward[..], &backward, &combine].concat() {
            // One name, `simt` for instance, may stand for a kernel of each operation.
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    fn precompiler(&self) -> Option<&dyn Precompile> {
        Some(self)
    }

    fn tuner(&self) -> Option<&dyn Tune> {
        self.memory.device.as_ref().map(|_| -> &dyn Tune { self })
    }

    fn queues(&self) -> Option<&dyn Queues> {
        self.memory.device.as_ref().map(|_| -> &dyn Queues { &self.memory })
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        let (mut choice, refusals) = self.choose_fwd(problem, options)?;
        let (chosen, steps) = self.ready(&mut choice)?;
        let stand_in = if options.allow_fallback && !chosen.kernel.is_fallback() {
            let any = PlanOptions { kernel: Some("simt".to_owned()), tile: Vec::new(), ..options.clone() };
            let (mut other, _) = self.choose_fwd(problem, &any)?;
            choice.workspace = choice.workspace.max(other.workspace);
            choice
                .details
                .push(("unaligned operands", "kernel simt takes them: correct, not fast".to_owned()));
            Some(self.ready(&mut other)?.0)
        } else {
            None
        };
        let parts = self.parts(problem.clone(), choice, steps, refusals, options);
        Ok(parts.seal(&self.id, Handle::new(chosen, stand_in, options)))
    }

    fn run_fwd(&self, plan: &FwdPlan, args: &mut FwdArgs<'_>, stream: Stream) -> Result<()> {
        let handle = plan.handle::<Handle<FwdKernel>>(&self.id, &self.name)?;
        let problem = plan.problem();
        check_fwd(problem, args, plan.workspace(), MemorySpace::Device)?;
        // For all of the run: tensor maps are encoded in the device's context too.
        let _entered = self.memory.device()?.enter()?;
        if handle.checks_lengths {
            self.check_lengths(problem, &args.seq, stream.0)?;
        }
        if problem.dims.seqlen_q == 0 {
            return Ok(());
        }
        let call = Call { problem, args: &*args, stream: stream.0 };
        let ready = handle.for_operands(|kernel| kernel.takes_addresses(&call))?;
        self.clear(args.workspace.as_ref(), plan.workspace(), stream.0)?;
        ready.kernel.launch(&ready.steps, &call)
    }

    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan> {
        let (mut choice, refusals) = self.choose_bwd(problem, options)?;
        let (chosen, steps) = self.ready(&mut choice)?;
        let stand_in = if options.allow_fallback && !chosen.kernel.is_fallback() {
            let any = PlanOptions { kernel: Some("simt".to_owned()), tile: Vec::new(), ..options.clone() };
            let (mut other, _) = self.choose_bwd(problem, &any)?;
            choice.workspace = choice.workspace.max(other.workspace);
            choice
                .details
                .push(("unaligned operands", "kernel simt takes them: correct, not fast".to_owned()));
            Some(self.ready(&mut other)?.0)
        } else {
            None
        };
        let parts = self.parts(problem.clone(), choice, steps, refusals, options);
        Ok(parts.seal(&self.id, Handle::new(chosen, stand_in, options)))
    }

    fn run_bwd(&self, plan: &BwdPlan, args: &mut BwdArgs<'_>, stream: Stream) -> Result<()> {
        let handle = plan.handle::<Handle<BwdKernel>>(&self.id, &self.name)?;
        let problem = plan.problem();
        check_bwd(problem, args, plan.workspace(), MemorySpace::Device)?;
        let _entered = self.memory.device()?.enter()?;
        if handle.checks_lengths {
            self.check_lengths(problem.fwd(), &args.seq, stream.0)?;
        }
        let call = Call { problem, args: &*args, stream: stream.0 };
        let ready = handle.for_operands(|kernel| kernel.takes_addresses(&call))?;
        self.clear(args.workspace.as_ref(), plan.workspace(), stream.0)?;
        ready.kernel.launch(&ready.steps, &call)
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        let (mut choice, refusals) = self.choose_combine(problem, options)?;
        let (chosen, steps) = self.ready(&mut choice)?;
        let parts = self.parts(problem.clone(), choice, steps, refusals, options);
        Ok(parts.seal(&self.id, Handle::new(chosen, None, options)))
    }

    fn run_combine(&self, plan: &CombinePlan, args: &mut CombineArgs<'_>, stream: Stream) -> Result<()> {
        let handle = plan.handle::<Handle<CombineKernel>>(&self.id, &self.name)?;
        let problem = plan.problem();
        check_combine(problem, args, MemorySpace::Device)?;
        let _entered = self.memory.device()?.enter()?;
        if problem.lse_elems() == 0 {
            return Ok(());
        }
        let ready = handle.for_operands(|_| Ok(()))?;
        ready.kernel.launch(&ready.steps, &Call { problem, args, stream: stream.0 })
    }
}

impl CudaBackend {
    /// Whether the forward that is tuned here is Blackwell's.
    fn is_blackwell(&self) -> bool {
        fmha_kernels_cuda::sm100::ARCHS.contains(&self.facts.arch.as_str())
    }

    /// Whether it is Hopper's; else, where it is not Blackwell's either, that of every architecture.
    fn is_hopper(&self) -> bool {
        self.facts.sm() == 90
    }

    fn refused(&self, refusal: Refusal) -> Error {
        Error::Unsupported { backend: self.name.clone(), refusals: vec![refusal] }
    }
}

/// Of kernels that merge parts row by row, and of backward kernels whose tiles follow from the problem.
fn no_tile(operation: Operation) -> Refusal {
    let kernel = if operation == Operation::Combine { "combine" } else { fmha_kernels_cuda::sm80::NAME };
    Refusal::new(kernel, format!("{operation}: 0 of its kernels have a tile to tune"))
}

impl Tune for CudaBackend {
    fn default_tile(&self, problem: AnyProblem<'_>, options: &PlanOptions) -> Result<TileOptions> {
        let own = match problem {
            AnyProblem::Forward(problem) if self.is_blackwell() => sm100::own_tile(problem, &self.facts),
            AnyProblem::Forward(problem) if self.is_hopper() => sm90::own_tile(problem, &self.facts),
            AnyProblem::Forward(problem) => sm80::own_tile(problem, &self.facts),
            AnyProblem::Backward(problem) if self.is_hopper() => {
                sm90_bwd::own_tile(problem, &self.facts, options)
            }
            AnyProblem::Backward(_) | AnyProblem::Combine(_) => Err(no_tile(problem.operation())),
        };
        own.map_err(|refusal| self.refused(refusal))
    }

    fn knobs(&self, operation: Operation) -> Vec<(&'static str, Vec<String>)> {
        match operation {
            Operation::Forward if self.is_blackwell() => fields::knobs::<Sm100Tile>(),
            Operation::Forward if self.is_hopper() => fields::knobs::<Sm90Tile>(),
            Operation::Forward => fields::knobs::<Sm80Tile>(),
            Operation::Backward if self.is_hopper() => fields::knobs::<Sm90BwdTile>(),
            Operation::Backward | Operation::Combine => Vec::new(),
        }
    }

    fn keep(&self, problem: AnyProblem<'_>, options: &PlanOptions, tile: TunedTile) -> Result<PathBuf> {
        if self.memory.emulated {
            return Err(Error::NoDevice("the device is emulated: its times are no device's".to_owned()));
        }
        let (label, class) = match problem {
            AnyProblem::Forward(problem) if self.is_blackwell() => {
                (fmha_kernels_cuda::sm100::NAME, TileClass::of_fwd(problem))
            }
            AnyProblem::Forward(problem) if self.is_hopper() => {
                (fmha_kernels_cuda::sm90::NAME, TileClass::of_fwd(problem))
            }
            AnyProblem::Forward(problem) => (fmha_kernels_cuda::sm80::NAME, TileClass::of_fwd(problem)),
            AnyProblem::Backward(problem) if self.is_hopper() => {
                (fmha_kernels_cuda::sm90_bwd::LABEL, sm90_bwd::tile_class(problem, options))
            }
            AnyProblem::Backward(_) | AnyProblem::Combine(_) => {
                return Err(self.refused(no_tile(problem.operation())));
            }
        };
        self.facts.tuned.keep(label, &class, tile)
    }
}

impl Precompile for CudaBackend {
    fn jobs(&self, problem: AnyProblem<'_>, options: &PlanOptions) -> Result<Vec<KernelJob>> {
        let launches = match problem {
            AnyProblem::Forward(problem) => self.choose_fwd(problem, options)?.0.launches,
            AnyProblem::Backward(problem) => self.choose_bwd(problem, options)?.0.launches,
            AnyProblem::Combine(problem) => self.choose_combine(problem, options)?.0.launches,
        };
        Ok(launches
            .into_iter()
            .map(|Launch { kernel, source, .. }| self.modules.job(kernel, source))
            .collect())
    }

    fn precompile(&self, job: &KernelJob) -> Result<Arc<CompiledKernel>> {
        self.modules.compile(job).map(|(kernel, _)| kernel)
    }
}

impl CudaMemory {
    fn device(&self) -> Result<&Arc<Device>> {
        self.device.as_ref().ok_or_else(only_plans)
    }
}

impl DeviceMemory for CudaMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::Device
    }

    fn checks_bounds(&self) -> bool {
        self.emulated
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        let device = Arc::clone(self.device()?);
        let address = device.alloc(bytes)?;
        let free = move |ptr: *mut u8| {
            // A buffer that cannot be freed went with its context.
            let _ = device.free(ptr as u64);
        };
        // SAFETY: the driver gave this memory to us alone, until `free`.
        Ok(unsafe { DevBuffer::from_raw(MemorySpace::Device, address as *mut u8, bytes, Box::new(free)) })
    }

    fn alloc_at_edge(&self, bytes: u64, at_end: bool) -> Result<Option<DevBuffer>> {
        if self.emulated {
            return Ok(None);
        }
        let mapped = Mapped::new(self.device()?, bytes, at_end)?;
        let address = mapped.address as *mut u8;
        let free = Box::new(move |_| drop(mapped));
        // SAFETY: the driver gave this memory to us alone, until `mapped` is dropped.
        Ok(Some(unsafe { DevBuffer::from_raw(MemorySpace::Device, address, bytes, free) }))
    }

    fn upload(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        fits("to", bytes.len(), to.bytes())?;
        if bytes.is_empty() { Ok(()) } else { self.device()?.upload(bytes, to.as_ptr() as u64) }
    }

    fn download(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        fits("from", bytes.len(), from.bytes())?;
        if bytes.is_empty() { Ok(()) } else { self.device()?.download(from.as_ptr() as u64, bytes) }
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.device()?.synchronize(stream.0)
    }
}

fn fits(name: &'static str, wanted: usize, there: u64) -> Result<()> {
    if wanted as u64 <= there {
        return Ok(());
    }
    Err(ProblemError::new(name, format!("{name} has {there} bytes, but {wanted} are to be copied")).into())
}
