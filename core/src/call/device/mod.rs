//! An open device, on which plans are made and run.

mod stream;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests;

pub use stream::{Event, Recording, Stream};

use std::fmt;
use std::sync::Arc;

use crate::args::MemorySpace;
use crate::backend::{
    DeviceMemory, FmhaBackend, refuse_block_scales, refuse_code, refuse_lists, refuse_outputs, unsupported,
};
use crate::built_in::BuiltIn;
use crate::bwd::ValidBwd;
use crate::cache::{Precompile, only_plans};
use crate::call::{Planned, Problem};
use crate::combine::ValidCombine;
use crate::dtype::DType;
use crate::error::{ProblemError, Result};
use crate::peers::Peers;
use crate::plan::{
    BwdPlan, ChoosePlan, CombinePlan, Folded, FwdPlan, IndexLossPlan, Plan, PlanOptions, QuantizePlan,
    Workspace,
};
use crate::problem::ValidFwd;
use crate::quantize::ValidQuantize;
use crate::queues::Queues;
use crate::records::{PLAN, record};
use crate::roofline::Roofline;
use crate::sparse::{ValidChoose, ValidIndexLoss};
use crate::tune::Tune;

/// A device that can run attention: an open backend with the kernels that it has loaded. A clone is cheap and
/// refers to the same device.
///
/// ```text
/// device.plan_fwd(&problem, &options)?     chooses and compiles; may take seconds the first time
///       .run(&mut args, &stream)?          checks the operands, queues, returns
/// ```
///
/// A run borrows its arguments, and so its outputs, exclusively: nobody else holds them, nor can two threads run one
/// set of arguments.
///
/// ```compile_fail,E0308
/// # use fmha_core::{FwdArgs, FwdPlan, Stream};
/// fn run(plan: &FwdPlan, args: &FwdArgs<'_>, stream: &Stream) -> fmha_core::Result<()> {
///     plan.run(args, stream)
/// }
/// ```
///
/// ```compile_fail,E0502
/// # use fmha_core::{FwdArgs, FwdPlan, Stream};
/// fn run(plan: &FwdPlan, mut args: FwdArgs<'_>, stream: &Stream) -> Option<u8> {
///     let o = args.o.as_input();
///     plan.run(&mut args, stream).ok()?;
///     o.as_host()?.first().copied()
/// }
/// ```
///
/// ```
/// # use fmha_core::{FwdArgs, FwdPlan, Stream};
/// fn run(plan: &FwdPlan, mut args: FwdArgs<'_>, stream: &Stream) -> Option<u8> {
///     plan.run(&mut args, stream).ok()?;
///     args.o.as_input().as_host()?.first().copied()
/// }
/// ```
#[derive(Clone)]
pub struct Device(Arc<dyn FmhaBackend>);

impl Device {
    /// A backend as a device.
    #[must_use]
    pub fn new(backend: impl FmhaBackend + 'static) -> Self {
        Self(Arc::new(backend))
    }

    /// The word that selects the device's backend: `cpu`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.0.kind()
    }

    /// Description of the device for people and logs: its name, cores and instructions.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Peak rates of the device for products of `dtype`.
    #[must_use]
    pub fn roofline(&self, dtype: DType) -> Roofline {
        self.0.roofline(dtype)
    }

    /// Names of all kernels of the device's backend, best first.
    #[must_use]
    pub fn kernels(&self) -> Vec<&'static str> {
        self.0.kernels()
    }

    /// The backend as a compiler of kernels, if it compiles any.
    #[must_use]
    pub fn precompiler(&self) -> Option<&dyn Precompile> {
        self.0.precompiler()
    }

    /// The device as a tuner of tiles, if its kernels have tiles to measure.
    #[must_use]
    pub fn tuner(&self) -> Option<&dyn Tune> {
        self.0.tuner()
    }

    /// The device's memory.
    #[must_use]
    pub fn memory(&self) -> &dyn DeviceMemory {
        self.0.memory()
    }

    /// The device's interface to memory that processes of one host share, if it has one.
    #[must_use]
    pub fn peers(&self) -> Option<&dyn Peers> {
        self.0.peers()
    }

    /// Chooses a forward kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) with every refusal, or what the compiler or driver said.
    pub fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        self.planned(problem, options, |problem, options| self.0.plan_fwd(problem, options))
    }

    /// Chooses a backward kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    pub fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan> {
        self.planned(problem, options, |problem, options| self.0.plan_bwd(problem, options))
    }

    /// Chooses a combine kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    pub fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        self.planned(problem, options, |problem, options| self.0.plan_combine(problem, options))
    }

    /// Chooses a kernel that chooses keys or blocks ([`sparse`](crate::sparse)).
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    pub fn plan_choose(&self, problem: &ValidChoose, options: &PlanOptions) -> Result<ChoosePlan> {
        self.planned(problem, options, |problem, options| self.0.plan_choose(problem, options))
    }

    /// Chooses a kernel that converts a tensor to a format with scales by blocks.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    pub fn plan_quantize(&self, problem: &ValidQuantize, options: &PlanOptions) -> Result<QuantizePlan> {
        self.planned(problem, options, |problem, options| self.0.plan_quantize(problem, options))
    }

    /// Chooses a kernel that computes the loss that trains an indexer, and its gradients ([`sparse`](crate::sparse)).
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    pub fn plan_index_loss(&self, problem: &ValidIndexLoss, options: &PlanOptions) -> Result<IndexLossPlan> {
        self.planned(problem, options, |problem, options| self.0.plan_index_loss(problem, options))
    }

    /// Makes a plan, and reports it to the program's logger.
    fn planned<P: Problem>(
        &self,
        problem: &P,
        options: &PlanOptions,
        plan: impl Fn(&P, &PlanOptions) -> Result<Planned<P>>,
    ) -> Result<Plan<P>> {
        let options = &options.with_contained();
        let plan = self.seal_built_in(problem, options, |problem| plan(problem, options));
        match &plan {
            Ok(plan) => plan.record(),
            Err(error) => record!(debug, PLAN, "{} on {}: no plan: {error}", P::OPERATION, self.name()),
        }
        plan
    }

    /// A plan that replaces functions by kernels' built-in features where kernels have them: bands, soft-cap, ALiBi.
    fn seal_built_in<P: Problem>(
        &self,
        problem: &P,
        options: &PlanOptions,
        plan: impl Fn(&P) -> Result<Planned<P>>,
    ) -> Result<Plan<P>> {
        let Some(BuiltIn { problem: folded, slopes, words }) = problem.built_in()? else {
            return self.seal(problem, options, None, plan);
        };
        // Kernels that were compiled ahead may exist only for the functions themselves.
        let sealed = self.seal(problem, options, Some((Folded { problem: folded, slopes }, words)), &plan);
        sealed.or_else(|_| self.seal(problem, options, None, plan))
    }

    fn seal<P: Problem>(
        &self,
        problem: &P,
        options: &PlanOptions,
        built_in: Option<(Folded<P>, String)>,
        plan: impl Fn(&P) -> Result<Planned<P>>,
    ) -> Result<Plan<P>> {
        let computed = built_in.as_ref().map_or(problem, |(folded, _)| &folded.problem);
        refuse_code(&*self.0, computed)?;
        refuse_lists(&*self.0, computed)?;
        refuse_outputs(&*self.0, computed)?;
        refuse_block_scales(&*self.0, computed)?;
        let one = computed.of_one_sequence()?;
        let mut planned = plan(one.as_ref().unwrap_or(computed))?;
        if one.is_some() {
            // A problem without sequences, planned as if it had one, launches nothing.
            planned.parts.workspace = Workspace::NONE;
            planned.parts.steps.clear();
        }
        let folded = built_in.map(|(folded, words)| {
            planned.parts.details.push(("functions", words));
            folded
        });
        let parts = &planned.parts;
        options
            .check_promises(&parts.kernel, &parts.promises)
            .map_err(|refusal| unsupported(self.name(), vec![refusal]))?;
        Ok(Plan::new(self.clone(), problem.clone(), planned, options.check_lengths, one.is_some(), folded))
    }

    /// Whether a run returns before its work is done. A device without streams computes before the run returns.
    #[must_use]
    pub fn has_streams(&self) -> bool {
        self.0.queues().is_some()
    }

    /// Whether the device has a clock of its own: an emulated device has none, and the CPU is timed by the host's
    /// clock.
    #[must_use]
    pub fn has_clock(&self) -> bool {
        self.0.queues().is_some_and(Queues::has_clock)
    }

    /// A new stream, which does not wait for the default one. On the CPU its work is done at return.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn stream(&self) -> Result<Stream> {
        let handle = self.queues()?.map(Queues::create_stream).transpose()?;
        Ok(Stream::new(self, handle.unwrap_or(0), handle.is_some()))
    }

    /// The device's default stream.
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        Stream::new(self, 0, false)
    }

    /// An event, which can be recorded on a stream.
    ///
    /// # Errors
    /// An error of the driver, or a device without events.
    pub fn event(&self) -> Result<Event> {
        let handle = self.queues()?.map(Queues::create_event).transpose()?;
        Ok(Event { device: self.clone(), handle })
    }

    /// Waits until the work of the default stream is done.
    ///
    /// # Errors
    /// An error of the driver, or a failure of that work.
    pub fn synchronize(&self) -> Result<()> {
        match self.queues()? {
            // SAFETY: the default stream is always there.
            Some(queues) => unsafe { queues.synchronize(0) },
            None => Ok(()),
        }
    }

    /// Whether both are one device, opened once.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The device's queues; `None` if a run computes before it returns.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) for a device that only plans.
    pub(crate) fn queues(&self) -> Result<Option<&dyn Queues>> {
        match self.0.queues() {
            Some(queues) => Ok(Some(queues)),
            None if self.memory().space() == MemorySpace::Host => Ok(None),
            None => Err(only_plans()),
        }
    }

    fn has_it(&self, field: &'static str, owner: &Self) -> Result<(), ProblemError> {
        if self.is(owner) {
            return Ok(());
        }
        let text = format!("{field} is of the device {}, and not of {}", owner.name(), self.name());
        Err(ProblemError::new(field, text))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}
