//! The CPU backend of `fmha`: the whole contract on any machine, forward, backward and combine.
//!
//! ```text
//! CpuBackend      what a user meets: plans, checks arguments and lengths      lib
//!   Engine        the instruction set chosen at run time                      isa
//!     Forward     a task is a tile of queries of one head                     forward
//!     Backward    a task is a kv head, or tiles of it                         backward
//!     Combine     rows of partial results                                     combine
//!       blocks    the kernels of a tile: gather, scores, softmax, products    blocks, score
//!         tile    the micro-tile that every product is made of                tile
//!           simd  vectors of f32, one trait, seven instruction sets          simd
//! ```
//!
//! Arithmetic is f32 with f32 sums, whatever the tensors' types: f16, bf16 and the four FP8 types
//! are converted as tiles are copied into panels. Where the processor multiplies pairs of bf16 faster
//! than f32, a bf16 forward without dropout does that, with f32 sums. Memory is O(seqlen): no matrix
//! of scores exists beyond a tile a thread.
//!
//! ```
//! use fmha_core::{DType, DevSlice, DevSliceMut, Dims, FmhaBackend, FwdArgs, FwdProblem, PlanOptions, Stream};
//!
//! let dims = Dims {
//!     batch: 1, seqlen_q: 3, seqlen_k: 5, num_heads_q: 2, num_heads_kv: 1, head_dim_qk: 4, head_dim_v: 4,
//! };
//! let (q, k, v, mut o) = ([0.5f32; 24], [0.1f32; 20], [2.0f32; 20], [0f32; 24]);
//! let backend = fmha_cpu::CpuBackend::new()?;
//! let problem = FwdProblem::batch(DType::F32, dims).validate()?;
//! let plan = backend.plan_fwd(&problem, &PlanOptions::default())?;
//! let (q, k, v) = (DevSlice::host(&q), DevSlice::host(&k), DevSlice::host(&v));
//! let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o));
//! backend.run_fwd(&plan, &mut args, Stream::DEFAULT)?;
//! // Averages of a constant V are that constant.
//! assert!(o.iter().all(|&x| (x - 2.0).abs() < 1e-6));
//! # Ok::<(), fmha_core::Error>(())
//! ```

mod backward;
mod blocks;
mod combine;
mod forward;
mod isa;
mod memory;
mod plan;
mod roofline;
mod score;
mod simd;
#[cfg(test)]
mod soft;
mod tasks;
mod tensor;
mod tile;

use fmha_core::args::{check_bwd, check_combine, check_fwd};
use fmha_core::seq::spans;
use fmha_core::{
    BackendId, BwdArgs, BwdPlan, CombineArgs, CombinePlan, DType, DeviceMemory, Error, FmhaBackend, FwdArgs,
    FwdPlan, MemorySpace, PlanOptions, ProblemError, Result, Roofline, Stream, ValidBwd, ValidCombine,
    ValidFwd, env,
};

pub use isa::Isa;
use isa::{Engine, Kernels};
use memory::HostMemory;
use tasks::Threads;

/// How a [`CpuBackend`] runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Threads; `None` = `FMHA_NUM_THREADS`, or one for each core.
    pub threads: Option<usize>,
    /// The highest instruction set to use; `None` = `FMHA_CPU_ISA`, or the best there is.
    pub isa: Option<Isa>,
}

/// Attention on this machine's processor.
pub struct CpuBackend {
    id: BackendId,
    name: String,
    isa: Isa,
    engine: Engine,
    threads: Threads,
    roofline: roofline::Measured,
}

impl CpuBackend {
    /// With the environment's configuration.
    ///
    /// # Errors
    /// An environment variable that says nothing sensible, or threads that the system refuses.
    pub fn new() -> Result<Self> {
        Self::with(Config::default())
    }

    /// With this configuration; what it leaves open comes from the environment.
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
            id: BackendId::unique(),
            name,
            isa,
            engine,
            threads,
            roofline: roofline::Measured::default(),
        })
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs a forward call that has been checked.
    fn checked_fwd(
        &self,
        plan: &FwdPlan,
        args: &mut FwdArgs<'_>,
        run: impl FnOnce(&forward::Forward<'_>) -> Result<()>,
    ) -> Result<()> {
        let blocks = self.blocks_of(plan)?;
        check_fwd(plan.problem(), args, plan.workspace(), MemorySpace::Host)?;
        let spans = spans(plan.problem(), &args.seq)?;
        run(&forward::Forward { problem: plan.problem(), args, spans: &spans, blocks })
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

impl FmhaBackend for CpuBackend {
    fn kind(&self) -> &'static str {
        "cpu"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn roofline(&self, _dtype: DType) -> Roofline {
        self.roofline.get(self.engine, &self.threads)
    }

    fn kernels(&self) -> Vec<&'static str> {
        plan::KERNELS.to_vec()
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &HostMemory
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        plan::forward(self, problem, options)
    }

    fn run_fwd(&self, plan: &FwdPlan, args: &mut FwdArgs<'_>, _stream: Stream) -> Result<()> {
        self.checked_fwd(plan, args, |call| self.engine.forward(call, &self.threads))
    }

    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan> {
        plan::backward(self, problem, options)
    }

    fn run_bwd(&self, plan: &BwdPlan, args: &mut BwdArgs<'_>, _stream: Stream) -> Result<()> {
        let blocks = self.blocks_of(plan)?;
        check_bwd(plan.problem(), args, plan.workspace(), MemorySpace::Host)?;
        let spans = spans(plan.problem().fwd(), &args.seq)?;
        let call = backward::Backward { problem: plan.problem(), args, spans: &spans, blocks };
        self.engine.backward(&call, &self.threads)
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        plan::combine(self, problem, options)
    }

    fn run_combine(&self, plan: &CombinePlan, args: &mut CombineArgs<'_>, _stream: Stream) -> Result<()> {
        self.blocks_of(plan)?;
        check_combine(plan.problem(), args, MemorySpace::Host)?;
        let call = combine::Combine { problem: plan.problem(), args };
        self.engine.combine(&call, &self.threads)
    }
}
