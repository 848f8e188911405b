//! The CPU backend of `fmha`: the whole contract on any machine, forward, backward and combine.
//!
//! ```text
//! CpuBackend      what core meets: plans, and launches checked calls          lib, plan
//!   Engine        the instruction set chosen at run time                      isa
//!     Forward     a task is a tile of queries of one head                     forward
//!     Backward    a task is a kv head, or tiles of it                         backward
//!     Combine     rows of partial results                                     combine
//!       blocks    the kernels of a tile: gather, scores, softmax, products    blocks, score
//!         tile    the micro-tile that every product is made of                tile
//!           simd  vectors of f32, one trait, seven instruction sets          simd
//! ```
//!
//! Arithmetic is f32 with f32 sums, whatever the tensors' types: f16, bf16 and the four FP8 types are converted as
//! tiles are copied into panels. If the processor multiplies pairs of bf16 faster than f32, a bf16 forward without
//! dropout uses these products, with f32 sums. Memory is O(seqlen): each thread has only one tile of scores.
//!
//! ```
//! use fmha_core::{DType, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem, PlanOptions};
//!
//! let dims = Dims::batch(1).seqlens(3, 5).heads(2, 1).head_dim(4);
//! let (q, k, v, mut o) = ([0.5f32; 24], [0.1f32; 20], [2.0f32; 20], [0f32; 24]);
//! let device = Device::new(fmha_cpu::CpuBackend::new()?);
//! let problem = FwdProblem::batch(DType::F32, dims).validate()?;
//! let plan = device.plan_fwd(&problem, &PlanOptions::default())?;
//! let (q, k, v) = (DevSlice::host(&q), DevSlice::host(&k), DevSlice::host(&v));
//! let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o));
//! plan.run(&mut args, &device.default_stream())?;
//! // Averages of a constant V are that constant.
//! assert!(o.iter().all(|&x| (x - 2.0).abs() < 1e-6));
//! # Ok::<(), fmha_core::Error>(())
//! ```

#![cfg_attr(
    baseline_alone,
    allow(dead_code, unused_imports, reason = "other sets' vectors have no kernels then")
)]

mod backward;
mod blocks;
mod choose;
mod code;
mod combine;
mod forward;
mod index_loss;
mod isa;
mod lists;
mod memory;
mod plan;
mod quantize;
mod roofline;
mod score;
mod simd;
#[cfg(test)]
mod soft;
mod sparse;
mod tasks;
mod tensor;
mod tile;

use std::sync::Arc;

use fmha_core::fork::PerProcess;
use fmha_core::quantize::ValidQuantize;
use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::{
    DType, DeviceMemory, Error, FmhaBackend, PlanOptions, Planned, ProblemError, Result, Roofline, ValidBwd,
    ValidCombine, ValidFwd, env,
};

use isa::Engine;
pub use isa::Isa;
use memory::HostMemory;
use tasks::{Pool, Threads};

/// Most threads per core, whatever the caller requests: idle threads of a pool search each other's queues, and 1024
/// threads on two processors took 4 s to start and 0.5 s for an empty call; 256 took 20 ms, 16 took 30 us
/// (2026-11-27).
const MAX_THREADS_A_PROCESSOR: usize = 8;

/// How a [`CpuBackend`] runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Number of threads, 1 to 4096; `None` = `FMHA_NUM_THREADS`, or one for each core. At most eight per core are
    /// created.
    pub threads: Option<usize>,
    /// The highest instruction set to use; `None` = `FMHA_CPU_ISA`, or the best that the processor has.
    pub isa: Option<Isa>,
}

/// Attention on this machine's processor.
pub struct CpuBackend {
    name: String,
    isa: Isa,
    engine: Engine,
    threads: Arc<Pool>,
    roofline: PerProcess<roofline::Measured>,
}

impl CpuBackend {
    /// Opens the backend with the environment's configuration.
    ///
    /// # Errors
    /// An environment variable with an invalid value, or threads that the system cannot create.
    pub fn new() -> Result<Self> {
        Self::with(Config::default())
    }

    /// Opens the backend with this configuration; environment variables fill in fields that the configuration
    /// leaves open.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(config: Config) -> Result<Self> {
        let threads = match (config.threads, env::NUM_THREADS.get()?) {
            (Some(threads), _) => threads,
            (None, Some(text)) => {
                text.parse().map_err(|_| misset(env::NUM_THREADS, format!("`{text}` is no number")))?
            }
            (None, None) => std::thread::available_parallelism().map_or(1, usize::from),
        };
        if !(1..=4096).contains(&threads) {
            return Err(misset(env::NUM_THREADS, format!("{threads} threads are not in 1..=4096")));
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(processors.saturating_mul(MAX_THREADS_A_PROCESSOR));
        let cap = match (config.isa, env::CPU_ISA.get()?) {
            (Some(isa), _) => Some(isa),
            (None, Some(text)) => {
                Some(text.parse().map_err(|error: ProblemError| misset(env::CPU_ISA, error.text))?)
            }
            (None, None) => None,
        };
        let (isa, engine) = Engine::best(cap)?;
        let threads = Threads::new(threads)?;
        let plural = if threads.count() == 1 { "thread" } else { "threads" };
        let name = format!("cpu ({}, {} {plural}, {isa})", roofline::processor(), threads.count());
        Ok(Self {
            name,
            isa,
            engine,
            threads: Arc::new(Pool::of(threads)),
            roofline: PerProcess::new(roofline::Measured::default()),
        })
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.count()
    }
}

fn misset(variable: env::EnvVar, text: String) -> Error {
    Error::System { what: variable.name.to_owned(), text }
}

// SAFETY: a plan's tile is one of this processor's, and its kernels keep to the sequences that core has checked.
unsafe impl FmhaBackend for CpuBackend {
    fn kind(&self) -> &'static str {
        "cpu"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn roofline(&self, _dtype: DType) -> Roofline {
        let measured = self.roofline.get(roofline::Measured::default);
        self.threads.get().map_or_else(|_| Roofline::default(), |threads| measured.get(self.engine, threads))
    }

    fn kernels(&self) -> Vec<&'static str> {
        plan::KERNELS.to_vec()
    }

    fn takes_code(&self) -> bool {
        true
    }

    fn takes_lists(&self) -> bool {
        true
    }

    fn takes_second(&self) -> bool {
        true
    }

    fn takes_cache_rows(&self) -> bool {
        true
    }

    fn takes_masks(&self) -> bool {
        true
    }

    fn takes_outputs(&self) -> bool {
        true
    }

    fn takes_block_scales(&self) -> bool {
        true
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &HostMemory
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<Planned<ValidFwd>> {
        plan::takes(problem, "cpu-fwd")?;
        plan::takes_code(problem, "cpu-fwd")?;
        plan::takes_outputs(problem, "cpu-fwd")?;
        plan::forward(self, self.engine, problem, options)
    }

    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<Planned<ValidBwd>> {
        plan::takes(problem, "cpu-bwd")?;
        plan::takes_code(problem, "cpu-bwd")?;
        plan::backward(self, problem, options)
    }

    fn plan_combine(&self, _: &ValidCombine, options: &PlanOptions) -> Result<Planned<ValidCombine>> {
        plan::combine(self, options)
    }

    fn plan_choose(&self, _: &ValidChoose, options: &PlanOptions) -> Result<Planned<ValidChoose>> {
        plan::choose(self, options)
    }

    fn plan_quantize(&self, _: &ValidQuantize, options: &PlanOptions) -> Result<Planned<ValidQuantize>> {
        plan::quantize(self, options)
    }

    fn plan_index_loss(&self, _: &ValidIndexLoss, options: &PlanOptions) -> Result<Planned<ValidIndexLoss>> {
        plan::index_loss(self, options)
    }
}
