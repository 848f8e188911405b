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

use std::path::PathBuf;
use std::sync::Arc;

pub use emulated::emulated_launches;

use fmha_core::args::{check_combine, check_fwd, check_workspace};
use fmha_core::bind;
use fmha_core::cache::{CompiledKernel, KernelJob};
use fmha_core::error::{Error, ProblemError, Refusal, Result};
use fmha_core::spec::CombineSpec;
use fmha_core::tune::{TileOptions, Tune, TunedTile, TunedTiles};
use fmha_core::{
    BwdArgs, BwdPlan, CombineArgs, CombinePlan, DType, DevBuffer, DeviceMemory, Explain, FmhaBackend,
    FwdArgs, FwdPlan, LaunchShape, MemorySpace, Plan, PlanOptions, Precompile, Promises, Queues, Roofline,
    Stream, ValidBwd, ValidCombine, ValidFwd,
};
use fmha_kernels_cuda::combine;

use driver::{Device, Grid, Kernel as Loaded};
use kernels::{Call, Choice, DeviceFacts, Kernel, Recipe as _, sm90};
use modules::{Module, Modules};

/// A GPU behind NVIDIA's driver, or only its architecture.
pub struct CudaBackend {
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

/// What a forward plan keeps of its choice.
struct FwdHandle {
    chosen: Ready,
    /// What serves operands whose addresses the chosen kernel does not take, if the caller allows it.
    stand_in: Option<Ready>,
}

/// A kernel that can be launched.
struct Ready {
    kernel: Kernel,
    /// Absent where a backend only plans and could not compile.
    module: Option<Arc<Module>>,
    /// Where it is from, or why it is absent.
    code: String,
    grid: Grid,
}

impl Ready {
    fn loaded(&self) -> Result<&Loaded> {
        self.module.as_ref().ok_or_else(modules::no_device)?.loaded()
    }
}

/// What a combine plan keeps of its choice.
struct CombineHandle {
    module: Arc<Module>,
    grid: Grid,
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
        let mut facts = DeviceFacts::of(&device);
        if emulated {
            facts.tuned = TunedTiles::default();
            facts.roofline =
                Roofline { source: "emulated: it has no speed".to_owned(), ..Roofline::default() };
        }
        let emulated_words = if emulated { ", emulated" } else { "" };
        let name = format!("cuda:{ordinal} ({}, {}{emulated_words})", device.name, facts.arch);
        Ok(Self {
            name,
            modules: Modules::new(&facts.arch, Some(Arc::clone(&device)), emulated)?,
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
            name: format!("cuda ({arch}, no device)"),
            modules: Modules::new(arch, None, false)?,
            facts,
            memory: CudaMemory { device: None, emulated: false },
        })
    }

    /// Compiles and loads what was chosen.
    fn ready(&self, choice: &mut Choice) -> Result<Ready> {
        let (kernel, grid) = (choice.kernel, choice.grid);
        let source = std::mem::take(&mut choice.source);
        match self.modules.load(kernel.name(), source, choice.smem_bytes) {
            Ok(module) => Ok(Ready { kernel, code: module.origin.to_string(), module: Some(module), grid }),
            // A plan for no device is a plan without a compiler too.
            Err(Error::NoDevice(text)) if self.memory.device.is_none() => {
                Ok(Ready { kernel, code: format!("none: {text}"), module: None, grid })
            }
            Err(error) => Err(error),
        }
    }
}

/// The same bits every run: each row is one warpgroup's or one warp's, in one order of keys. A tile
/// that is chosen for the longest sequence sets that order, so the company in a batch may matter.
const fn promises(tiled: bool) -> Promises {
    Promises { deterministic: true, batch_invariant: !tiled, graph_capturable: true }
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
        Kernel::all().map(|kernel| kernel.name()).to_vec()
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
        let (mut choice, refusals) = kernels::select(&self.name, problem, &self.facts, options)?;
        let kernel = choice.kernel;
        let chosen = self.ready(&mut choice)?;
        let stand_in = if options.allow_fallback && !kernel.is_fallback() {
            let any = PlanOptions { kernel: Some("simt".to_owned()), ..PlanOptions::default() };
            let (mut choice, _) = kernels::select(&self.name, problem, &self.facts, &any)?;
            Some(self.ready(&mut choice)?)
        } else {
            None
        };
        let mut details = vec![("arch", self.facts.arch.clone())];
        details.extend(choice.details);
        if stand_in.is_some() {
            details.push(("unaligned operands", "kernel simt takes them: correct, not fast".to_owned()));
        }
        let explain = Explain {
            resources: chosen.module.as_ref().map(|module| module.compiled.resources),
            launch: Some(LaunchShape {
                groups: choice.grid.ctas.into(),
                threads: choice.grid.threads,
                shared_bytes: choice.smem_bytes,
                tiles: choice.tiles,
                tiles_at_once: choice.tiles_at_once,
            }),
            code: chosen.code.clone(),
        };
        Ok(Plan {
            problem: problem.clone(),
            backend: self.name.clone(),
            kernel: kernel.name().to_owned(),
            details,
            explain,
            refusals,
            is_fallback: kernel.is_fallback(),
            workspace_bytes: choice.workspace_bytes,
            promises: promises(!kernel.is_fallback()),
            handle: Arc::new(FwdHandle { chosen, stand_in }),
        })
    }

    fn run_fwd(&self, plan: &FwdPlan, args: &FwdArgs<'_>, stream: Stream) -> Result<()> {
        let handle = handle::<FwdHandle, _>(plan, &self.name)?;
        check_fwd(&plan.problem, args, MemorySpace::Device)?;
        check_workspace(args.workspace.as_ref(), plan.workspace_bytes, MemorySpace::Device)?;
        if plan.problem.dims.seqlen_q == 0 {
            return Ok(());
        }
        let params = bind::fwd_params(&plan.problem, args);
        let ready = match (handle.chosen.kernel.takes_addresses(&params), &handle.stand_in) {
            (Ok(()), _) => &handle.chosen,
            (Err(_), Some(stand_in)) => stand_in,
            (Err(unaligned), None) => return Err(unaligned.into()),
        };
        let call = Call { problem: &plan.problem, args, params, grid: ready.grid, stream: stream.0 };
        ready.kernel.launch(ready.loaded()?, &call)
    }

    fn plan_bwd(&self, _: &ValidBwd, _: &PlanOptions) -> Result<BwdPlan> {
        let refusal = Refusal::new("sm90", "backward: 0 of its kernels are written");
        Err(Error::Unsupported { backend: self.name.clone(), refusals: vec![refusal] })
    }

    fn run_bwd(&self, plan: &BwdPlan, _: &BwdArgs<'_>, _: Stream) -> Result<()> {
        Err(foreign_plan(&plan.backend, &self.name))
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        let unsupported =
            |refusal| Error::Unsupported { backend: self.name.clone(), refusals: vec![refusal] };
        if let Some(name) = options.kernel.as_ref().filter(|name| *name != "combine") {
            return Err(unsupported(Refusal::new(
                name.clone(),
                "there is no such combine kernel (known: combine)",
            )));
        }
        combine::accepts(problem).map_err(unsupported)?;
        let source = combine::merge(&CombineSpec::of(problem));
        let module = self.modules.load("combine", source, 0)?;
        let grid = Grid::new(combine::grid(problem, self.facts.num_sms), combine::NUM_THREADS);
        Ok(Plan {
            problem: problem.clone(),
            backend: self.name.clone(),
            kernel: "combine".to_owned(),
            details: vec![("arch", self.facts.arch.clone())],
            explain: Explain {
                resources: Some(module.compiled.resources),
                launch: Some(LaunchShape {
                    groups: grid.ctas.into(),
                    threads: grid.threads,
                    shared_bytes: 0,
                    tiles: grid.ctas.into(),
                    tiles_at_once: u64::from(kernels::ROW_CTAS_PER_SM * self.facts.num_sms),
                }),
                code: module.origin.to_string(),
            },
            refusals: Vec::new(),
            is_fallback: false,
            workspace_bytes: 0,
            promises: promises(false),
            handle: Arc::new(CombineHandle { module, grid }),
        })
    }

    fn run_combine(&self, plan: &CombinePlan, args: &CombineArgs<'_>, stream: Stream) -> Result<()> {
        let handle = handle::<CombineHandle, _>(plan, &self.name)?;
        check_combine(&plan.problem, args, MemorySpace::Device)?;
        if plan.problem.lse_elems() == 0 {
            return Ok(());
        }
        let mut params = bind::combine_params(&plan.problem, args);
        let mut arguments = [(&raw mut params).cast()];
        // SAFETY: the kernel takes one CombineParams; `check_combine` saw that its memory covers the
        // problem.
        unsafe { handle.module.loaded()?.launch(handle.grid, &mut arguments, stream.0) }
    }
}

impl Tune for CudaBackend {
    fn default_tile(&self, problem: &ValidFwd) -> Result<TileOptions> {
        sm90::own_tile(problem, &self.facts)
            .map_err(|refusal| Error::Unsupported { backend: self.name.clone(), refusals: vec![refusal] })
    }

    fn knobs(&self) -> Vec<(&'static str, Vec<String>)> {
        sm90::knobs()
    }

    fn keep(&self, problem: &ValidFwd, tile: TunedTile) -> Result<PathBuf> {
        if self.memory.emulated {
            return Err(Error::NoDevice("the device is emulated: its times are no device's".to_owned()));
        }
        let mut tiles = self.facts.load_tuned();
        tiles.insert(problem, tile);
        tiles.save()
    }
}

impl Precompile for CudaBackend {
    fn fwd_job(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<KernelJob> {
        let (choice, _) = kernels::select(&self.name, problem, &self.facts, options)?;
        Ok(self.modules.job(choice.kernel.name(), choice.source))
    }

    fn precompile(&self, job: &KernelJob) -> Result<Arc<CompiledKernel>> {
        self.modules.compile(job).map(|(kernel, _)| kernel)
    }
}

/// The handle that this backend put into a plan.
fn handle<'a, H: 'static, P>(plan: &'a Plan<P>, backend: &str) -> Result<&'a H> {
    let ours = plan.backend == backend;
    plan.handle.downcast_ref().filter(|_| ours).ok_or_else(|| foreign_plan(&plan.backend, backend))
}

fn foreign_plan(made_by: &str, run_on: &str) -> Error {
    ProblemError::new("plan", format!("plan was made by {made_by}, not by {run_on}")).into()
}

impl CudaMemory {
    fn device(&self) -> Result<&Arc<Device>> {
        self.device.as_ref().ok_or_else(modules::no_device)
    }
}

impl DeviceMemory for CudaMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::Device
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

    fn workspace(&self, bytes: u64) -> Result<Option<DevBuffer>> {
        if bytes == 0 {
            return Ok(None);
        }
        let buffer = self.alloc(bytes)?;
        let stream = Stream::DEFAULT;
        // SAFETY: the buffer is new, so nobody else uses it.
        unsafe { self.device()?.zero(buffer.as_ptr() as u64, bytes, stream.0)? };
        // Other streams do not wait for this one.
        self.synchronize(stream)?;
        Ok(Some(buffer))
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
