//! The CUDA backend of `fmha`: finds the driver and NVRTC at run time, chooses a kernel, compiles it,
//! queues it.
//!
//! Kernels are text in `fmha-kernels-cuda`; which one takes a problem is said in `kernels`. The
//! driver's functions are called in `driver` alone.

mod bind;
mod driver;
mod emulated;
mod kernels;
mod modules;
pub mod nvrtc;

use std::sync::Arc;

pub use emulated::emulated_launches;

use fmha_core::args::{check_combine, check_fwd, check_workspace};
use fmha_core::error::{Error, ProblemError, Refusal, Result};
use fmha_core::spec::CombineSpec;
use fmha_core::{
    BwdArgs, BwdPlan, CombineArgs, CombinePlan, DevBuffer, DeviceMemory, FmhaBackend, FwdArgs, FwdPlan,
    MemorySpace, Plan, PlanOptions, Promises, Roofline, Stream, ValidBwd, ValidCombine, ValidFwd,
};
use fmha_kernels_cuda::combine;

use driver::{Device, Grid, Kernel as Loaded};
use kernels::{Call, Choice, DeviceFacts, Kernel, Recipe as _};
use modules::Modules;

/// A GPU behind NVIDIA's driver.
pub struct CudaBackend {
    name: String,
    facts: DeviceFacts,
    modules: Modules,
    memory: CudaMemory,
}

/// The device's memory.
struct CudaMemory(Arc<Device>);

/// What a forward plan keeps of its choice.
struct FwdHandle {
    chosen: Ready,
    /// What serves operands whose addresses the chosen kernel does not take, if the caller allows it.
    stand_in: Option<Ready>,
}

/// A kernel that can be launched.
struct Ready {
    kernel: Kernel,
    loaded: Arc<Loaded>,
    grid: Grid,
}

/// What a combine plan keeps of its choice.
struct CombineHandle {
    loaded: Arc<Loaded>,
    grid: Grid,
}

impl CudaBackend {
    /// Opens device `ordinal` through the driver; with `emulate` (`sm_90a`), the test double of a
    /// device of that architecture, on which kernels are interpreted.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where there is no driver or no such device, or no double; what the driver
    /// said.
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
        let (major, minor) = device.capability;
        // Kernels for 9.0 and 10.0 use instructions of that very architecture.
        let suffix = if major >= 9 { "a" } else { "" };
        let facts = DeviceFacts {
            arch: format!("sm_{major}{minor}{suffix}"),
            num_sms: device.num_sms,
            smem_bytes: device.smem_bytes,
        };
        let emulated_words = if emulated { ", emulated" } else { "" };
        let name = format!("cuda:{ordinal} ({}, {}{emulated_words})", device.name, facts.arch);
        Ok(Self {
            name,
            facts,
            modules: Modules::new(Arc::clone(&device), emulated),
            memory: CudaMemory(device),
        })
    }
}

impl CudaBackend {
    /// Compiles and loads what was chosen.
    fn ready(&self, choice: &Choice) -> Result<Ready> {
        let kernel = choice.kernel;
        let loaded = self.modules.load(kernel.name(), &choice.source, &self.facts.arch, choice.smem_bytes)?;
        Ok(Ready { kernel, loaded, grid: choice.grid })
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

    fn roofline(&self) -> Roofline {
        let device = &self.memory.0;
        if self.modules.interprets() {
            return Roofline { source: "emulated: it has no speed".to_owned(), ..Roofline::default() };
        }
        // Dense f16/bf16 tensor work of Hopper: 4096 floating-point operations a clock and SM (NVIDIA
        // H100 Tensor Core GPU Architecture, 2022, table 2: 989 TFLOP/s at 1830 MHz with 132 SMs).
        let flops = (device.capability == (9, 0))
            .then(|| 4096.0 * f64::from(device.num_sms) * f64::from(device.clock_khz) * 1e3);
        let (memory_khz, bus_bits) = device.memory;
        // Two transfers a clock.
        let bytes = f64::from(memory_khz) * 1e3 * 2.0 * f64::from(bus_bits) / 8.0;
        Roofline {
            flops_per_second: flops,
            bytes_per_second: Some(bytes),
            source: "stated peak: tensor rate times the highest clock, memory clock times bus".to_owned(),
        }
    }

    fn kernels(&self) -> Vec<&'static str> {
        Kernel::all().map(|kernel| kernel.name()).to_vec()
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        let (choice, refusals) = kernels::select(&self.name, problem, &self.facts, options)?;
        let kernel = choice.kernel;
        let chosen = self.ready(&choice)?;
        let stand_in = if options.allow_fallback && !kernel.is_fallback() {
            let any = PlanOptions { kernel: Some("simt".to_owned()), ..PlanOptions::default() };
            let (choice, _) = kernels::select(&self.name, problem, &self.facts, &any)?;
            Some(self.ready(&choice)?)
        } else {
            None
        };
        let loaded = &chosen.loaded;
        let mut details = vec![("arch", self.facts.arch.clone())];
        details.extend(choice.details);
        details.push(("grid", format!("{} CTAs of {} threads", choice.grid.ctas, choice.grid.threads)));
        details.push((
            "registers",
            format!("{} a thread at launch, {} bytes of local memory", loaded.num_regs, loaded.local_bytes),
        ));
        if stand_in.is_some() {
            details.push(("unaligned operands", "kernel simt takes them: correct, not fast".to_owned()));
        }
        Ok(Plan {
            problem: problem.clone(),
            backend: self.name.clone(),
            kernel: kernel.name().to_owned(),
            details,
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
        ready.kernel.launch(&ready.loaded, &call)
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
        let loaded = self.modules.load("combine", &source, &self.facts.arch, 0)?;
        let grid = Grid { ctas: combine::grid(problem, self.facts.num_sms), threads: combine::NUM_THREADS };
        Ok(Plan {
            problem: problem.clone(),
            backend: self.name.clone(),
            kernel: "combine".to_owned(),
            details: vec![
                ("arch", self.facts.arch.clone()),
                ("grid", format!("{} CTAs of {} threads", grid.ctas, grid.threads)),
            ],
            refusals: Vec::new(),
            is_fallback: false,
            workspace_bytes: 0,
            promises: promises(false),
            handle: Arc::new(CombineHandle { loaded, grid }),
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
        unsafe { handle.loaded.launch(handle.grid, &mut arguments, stream.0) }
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

impl DeviceMemory for CudaMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::Device
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        let address = self.0.alloc(bytes)?;
        let device = Arc::clone(&self.0);
        let free = move |ptr: *mut u8| {
            // A buffer that cannot be freed went with its context.
            let _ = device.free(ptr as u64);
        };
        // SAFETY: the driver gave this memory to us alone, until `free`.
        Ok(unsafe { DevBuffer::from_raw(MemorySpace::Device, address as *mut u8, bytes, Box::new(free)) })
    }

    fn upload(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        fits("to", bytes.len(), to.bytes())?;
        if bytes.is_empty() { Ok(()) } else { self.0.upload(bytes, to.as_ptr() as u64) }
    }

    fn download(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        fits("from", bytes.len(), from.bytes())?;
        if bytes.is_empty() { Ok(()) } else { self.0.download(from.as_ptr() as u64, bytes) }
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.0.synchronize(stream.0)
    }
}

fn fits(name: &'static str, wanted: usize, there: u64) -> Result<()> {
    if wanted as u64 <= there {
        return Ok(());
    }
    Err(ProblemError::new(name, format!("{name} has {there} bytes, but {wanted} are to be copied")).into())
}
