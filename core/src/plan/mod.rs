//! A plan: the chosen kernels, their settings, and their promises. It is made once and run many times.
//!
//! A plan is opaque. A backend fills [`PlanParts`], and the [`Device`] stores them together with the problem.
//! Nothing can be changed afterwards, so arguments are checked against the planned problem, and the plan runs on
//! that device alone.

mod explain;
mod options;
pub mod roofline;
mod sums;
pub mod work;

use std::fmt;
use std::sync::Arc;

pub use explain::{Explain, LaunchShape, ResourceUsage};
pub use options::{Accuracy, PlanOptions, Promises};
pub use sums::ScoreSums;
pub(crate) use sums::in_order;

use crate::args::{DevSlice, MaskArgs, MemorySpace, SeqArgs};
use crate::built_in::with_slopes;
use crate::bwd::ValidBwd;
use crate::call::{Call, Launch, Planned, Problem};
use crate::combine::ValidCombine;
use crate::device::{Device, Stream};
use crate::error::{Error, ProblemError, Refusal, Result};
use crate::expr::{CaptureKind, Function, Number};
use crate::layout::{KvLayout, QLayout, Totals};
use crate::lengths::{check_lengths, read_host};
use crate::mask_object::{ListsCall, TileLists};
use crate::masks::check_masks;
use crate::problem::ValidFwd;
use crate::quantize::ValidQuantize;
use crate::queues::Queues;
use crate::records::{Listed, PLAN, record};
use crate::second;
use crate::seq::{checked_spans, spans};
use crate::sparse::{ValidChoose, ValidIndexLoss};

/// Scratch memory of a run. Its contents between runs mean nothing: a run clears the part that must be zero itself,
/// on its own stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Bytes that a run uses, from the start; 0 if a run needs none.
    pub bytes: u64,
    /// Leading bytes that the run clears before its first step.
    pub zeroed_bytes: u64,
}

impl Workspace {
    /// A run that needs no scratch memory.
    pub const NONE: Self = Self { bytes: 0, zeroed_bytes: 0 };

    /// Required alignment of its first byte, in bytes: the alignment that a device's allocator gives.
    pub const ALIGN: usize = 256;

    /// A workspace that is cleared as a whole before each run.
    #[must_use]
    pub const fn zeroed(bytes: u64) -> Self {
        Self { bytes, zeroed_bytes: bytes }
    }

    /// A workspace that is large enough for either of two.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { bytes: self.bytes.max(other.bytes), zeroed_bytes: self.zeroed_bytes.max(other.zeroed_bytes) }
    }
}

impl fmt::Display for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes)?;
        if self.zeroed_bytes > 0 {
            write!(f, ", {} of them cleared by each run", self.zeroed_bytes)?;
        }
        Ok(())
    }
}

/// One launch of a run. A forward has one launch, split-KV two, a backward three or four.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The kernel's name.
    pub kernel: String,
    /// The kernel's resources, launch and origin of its code.
    pub explain: Explain,
}

/// A backend's description of a plan.
#[derive(Clone, Debug)]
pub struct PlanParts {
    /// The kernel's name, as `PlanOptions::kernel` takes it. One of the steps has this name.
    pub kernel: String,
    /// Settings of the kernel (tile, stages, registers, grid, ...), in the order to print them.
    pub details: Vec<(&'static str, String)>,
    /// The launches, in order; empty if kernels are not launched one by one.
    pub steps: Vec<Step>,
    /// Kernels that were considered before this one, and why they refused.
    pub refusals: Vec<Refusal>,
    /// Whether this is the slow, always correct kernel that is used because the faster kernels refused.
    pub is_fallback: bool,
    /// Scratch that a run needs. Runs that may overlap in time need scratch of their own.
    pub workspace: Workspace,
    /// Promises that the plan keeps.
    pub promises: Promises,
}

struct Sealed<P: Problem> {
    /// The caller's problem.
    problem: P,
    device: Device,
    space: MemorySpace,
    parts: PlanParts,
    launch: Box<dyn Launch<P>>,
    /// Whether each run checks the lengths, which it reads back from a device.
    checks_lengths: bool,
    /// Whether the batch is 0, so that nothing is launched.
    has_no_sequence: bool,
    /// The problem that is computed instead, if the functions equal features that kernels have built in.
    folded: Option<Folded<P>>,
}

/// A problem whose functions are replaced by features that kernels have built in.
pub(crate) struct Folded<P> {
    /// The problem that is computed.
    pub(crate) problem: P,
    /// Index of the captured tensor that holds the call's ALiBi slopes.
    pub(crate) slopes: Option<usize>,
}

/// Names the caller's captured tensor in an error about the ALiBi slopes that it stands for.
fn of_captured(error: Error) -> Error {
    match error {
        Error::Problem(mistake) if mistake.field == "alibi_slopes" => {
            ProblemError::new("captured", mistake.text.replace("alibi_slopes", "captured")).into()
        }
        other => other,
    }
}

/// Fills memory with zeros: on a stream, or at once in host memory.
///
/// # Safety
/// As [`Queues::zero`].
unsafe fn zero(queues: Option<&dyn Queues>, address: *mut u8, bytes: u64, stream: u64) -> Result<()> {
    match queues {
        // SAFETY: the caller keeps the contract of `zero`.
        Some(queues) => unsafe { queues.zero(address, bytes, stream) },
        None => {
            // SAFETY: the caller keeps the contract of `zero`; without queues the address is host memory.
            unsafe { address.write_bytes(0, bytes as usize) };
            Ok(())
        }
    }
}

/// A chosen kernel for a problem `P`, and the device that runs it; [`FwdPlan`], [`BwdPlan`], [`CombinePlan`],
/// [`ChoosePlan`], [`QuantizePlan`] and [`IndexLossPlan`] are its names for each operation. A clone is cheap.
///
/// A plan cannot be changed, so that a run's arguments are checked against the planned problem:
///
/// ```compile_fail,E0609
/// fn shrink(plan: &mut fmha_core::FwdPlan) {
///     plan.workspace.bytes = 0;
/// }
/// ```
///
/// ```compile_fail,E0594
/// fn shrink(plan: &mut fmha_core::FwdPlan) {
///     plan.problem().dims.batch = 1;
/// }
/// ```
///
/// ```
/// fn needs_no_scratch(plan: &fmha_core::FwdPlan) -> bool {
///     plan.workspace().bytes == 0 && plan.problem().dims.batch == 1
/// }
/// ```
pub struct Plan<P: Problem>(Arc<Sealed<P>>);

/// A plan for attention forward.
pub type FwdPlan = Plan<ValidFwd>;
/// A plan for attention backward.
pub type BwdPlan = Plan<ValidBwd>;
/// A plan for merging partial results.
pub type CombinePlan = Plan<ValidCombine>;
/// A plan that chooses keys or blocks.
pub type ChoosePlan = Plan<ValidChoose>;
/// A plan that converts a tensor to a format with scales by blocks.
pub type QuantizePlan = Plan<ValidQuantize>;
/// A plan for the loss that trains an indexer, and its gradients.
pub type IndexLossPlan = Plan<ValidIndexLoss>;

/// Description of a plan that has no launch of its own.
static NO_LAUNCH: Explain =
    Explain { resources: None, launch: None, code: String::new(), remarks: String::new() };

impl<P: Problem> Plan<P> {
    pub(crate) fn new(
        device: Device,
        problem: P,
        planned: Planned<P>,
        checks_lengths: bool,
        has_no_sequence: bool,
        folded: Option<Folded<P>>,
    ) -> Self {
        let Planned { mut parts, launch } = planned;
        let space = device.memory().space();
        let checks_lengths = checks_lengths && P::HAS_LENGTHS;
        if checks_lengths {
            let words = match space {
                MemorySpace::Host => "checked by each run",
                MemorySpace::Device => "read back and checked by each run, which waits for its stream",
            };
            parts.details.push(("lengths", words.to_owned()));
            parts.promises.graph_capturable &= space == MemorySpace::Host;
        }
        parts.promises.graph_capturable &= problem.dropout().is_none();
        Self(Arc::new(Sealed {
            problem,
            device,
            space,
            parts,
            launch,
            checks_lengths,
            has_no_sequence,
            folded,
        }))
    }

    /// Logs the chosen kernel to the program's logger.
    pub(crate) fn record(&self) {
        let (operation, device, kernel) = (P::OPERATION, self.backend(), self.kernel());
        let refused = Listed(self.refusals().iter(), "; ");
        if self.is_fallback() {
            record!(
                info,
                PLAN,
                "{operation} on {device}: fallback {kernel}, correct and not fast: {refused}"
            );
        }
        let steps = Listed(self.steps().iter().map(|step| &step.kernel), ", ");
        let details = Listed(self.details().iter().map(|(name, value)| format!("{name} {value}")), "; ");
        record!(
            debug,
            PLAN,
            "{operation} on {device}: kernel {kernel}; steps: {steps}; {details}; refused: {refused}"
        );
    }

    /// Queues the work on `stream` and returns; without streams the work is done at return. All of the operands are
    /// checked first, and nothing wrong is launched: an error leaves every output as it was, except
    /// [`Error::Driver`] from the device itself.
    ///
    /// # Errors
    /// [`Error::Problem`] for a stream of another device, operands that do not fit, wrong
    /// lengths if they are checked, `p_drop` above 0 while the stream is captured; what the driver said.
    #[inline]
    pub fn run(&self, args: &mut P::Args<'_>, stream: &Stream) -> Result<()> {
        let handle = stream.of(&self.0.device)?;
        if !stream.repeats_masks() {
            // SAFETY: `Stream::of` gave a live handle of this device's.
            unsafe { self.refuse_captured_dropout(handle)? };
        }
        // SAFETY: `Stream::of` gave a live handle of this device's.
        unsafe { self.checked_run(args, handle) }
    }

    /// Runs as [`run`](Self::run) does, on a stream given by its driver's handle (0: the default one), for callers
    /// such as the C library that have only the handle.
    ///
    /// # Safety
    /// As [`Stream::from_raw`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub unsafe fn run_on_raw(&self, args: &mut P::Args<'_>, stream: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `run_on_raw`.
        unsafe {
            self.refuse_captured_dropout(stream)?;
            self.checked_run(args, stream)
        }
    }

    /// Refuses a call with dropout while its stream is captured: the seed is a launch parameter, so each replay
    /// would repeat the keep mask.
    ///
    /// # Safety
    /// As [`Stream::from_raw`].
    unsafe fn refuse_captured_dropout(&self, stream: u64) -> Result<()> {
        let Some(dropout) = self.0.problem.dropout() else { return Ok(()) };
        let Some(queues) = self.0.device.queues()? else { return Ok(()) };
        // SAFETY: the caller keeps the contract of `refuse_captured_dropout`.
        if !unsafe { queues.is_capturing(stream)? } {
            return Ok(());
        }
        let p_drop = dropout.p_drop;
        let text =
            format!("p_drop {p_drop} in a call that is captured: each replay would repeat its keep mask");
        Err(ProblemError::new("p_drop", text).into())
    }

    /// Checks and runs a call. If the plan replaces a score function by ALiBi, the captured slopes become the slopes of
    /// the arguments.
    ///
    /// # Safety
    /// As [`Stream::from_raw`].
    unsafe fn checked_run(&self, args: &mut P::Args<'_>, stream: u64) -> Result<()> {
        let slopes = self.0.folded.as_ref().and_then(|folded| folded.slopes);
        let (Some(at), Some(score)) = (slopes, P::score_args(args)) else {
            // SAFETY: the caller keeps the contract of `checked_run`.
            return unsafe { self.run_as_planned(args, stream) };
        };
        let given = *score;
        *score = with_slopes(&given, at, self.computed().code().map_or(0, |code| code.captured.len()))?;
        // SAFETY: the caller keeps the contract of `checked_run`.
        let done = unsafe { self.run_as_planned(args, stream) }.map_err(of_captured);
        if let Some(score) = P::score_args(args) {
            *score = given;
        }
        done
    }

    /// Runs the call on the problem that the plan computes.
    ///
    /// # Safety
    /// As [`Stream::from_raw`].
    unsafe fn run_as_planned(&self, args: &mut P::Args<'_>, stream: u64) -> Result<()> {
        let Sealed { device, space, parts, launch, checks_lengths, has_no_sequence, .. } = &*self.0;
        let problem = self.computed();
        problem.check(args, parts.workspace, *space)?;
        let numbers = P::score_args(args).map_or(&[][..], |score| score.numbers);
        if let (Some(object), Some(fwd)) =
            (P::mask_args(args).and_then(|masks| masks.built), self.0.problem.forward())
        {
            let totals = problem.lengths(args).map_or(Totals::NONE, |(_, seq)| seq.totals);
            object.serves(fwd, totals, device, self.kernel(), &self.tile_lists(), numbers)?;
        }
        problem.tell_types(args);
        let args = P::borrowed(args);
        let queues = device.queues()?;
        let mut sequences = Vec::new();
        match (problem.lengths(args), queues) {
            (Some((problem, seq)), _) if *space == MemorySpace::Host => {
                let resolve = if *checks_lengths { checked_spans } else { spans };
                sequences = resolve(problem, seq)?;
                if let Some(second) = self.computed().second(args)? {
                    if *checks_lengths {
                        second.checked_spans()?
                    } else {
                        second.spans()?
                    };
                    if *checks_lengths {
                        check_masks(&second.problem, &second.seq, &second.masks(), read_host)
                            .map_err(second::of_second)?;
                    }
                }
                if let Some(masks) = P::mask_args(args).filter(|_| *checks_lengths) {
                    check_masks(problem, seq, masks, read_host)?;
                }
            }
            (Some((problem, seq)), Some(queues)) if *checks_lengths => {
                // SAFETY: the caller promised a live stream of the device.
                unsafe { queues.synchronize(stream)? };
                // SAFETY: the check saw that the slice covers these bytes; the maker of the slice promised valid
                // memory.
                let read =
                    |slice: DevSlice<'_>, bytes: &mut [u8]| unsafe { queues.read(slice.as_ptr(), bytes) };
                check_lengths(problem, seq, P::mask_args(args), read)?;
                if let Some(second) = self.computed().second(args)? {
                    let checked = check_lengths(&second.problem, &second.seq, Some(&second.masks()), read);
                    checked.map_err(second::of_second)?;
                }
            }
            _ => {}
        }
        if *has_no_sequence {
            let sums = problem.sums_of_no_sequence(args);
            // SAFETY: the check saw that the outputs cover these bytes; the makers of the slices promised the memory to
            // this run.
            return sums
                .into_iter()
                .try_for_each(|(address, bytes)| unsafe { zero(queues, address, bytes, stream) });
        }
        if problem.is_empty() {
            return Ok(());
        }
        let call = Call { problem, args, spans: &sequences, stream };
        launch.takes_addresses(&call)?;
        if let (Some(workspace), 1..) = (P::workspace(args), parts.workspace.zeroed_bytes) {
            let (address, bytes) = (workspace.as_mut_ptr(), parts.workspace.zeroed_bytes);
            // SAFETY: the check saw that the workspace has these bytes; the maker of the slice promised the memory to
            // this run.
            unsafe { zero(queues, address, bytes, stream)? };
        }
        // SAFETY: checked and cleared above, for the problem that the backend planned; the stream is live.
        unsafe { launch.launch(&call) }
    }

    /// Whether the plan's lists of tiles are the same in all calls: they then follow from the problem, and from numbers
    /// that the mask as code captures.
    #[must_use]
    pub fn has_lasting_lists(&self) -> bool {
        let Some(fwd) = self.0.problem.forward() else { return false };
        let mut captures = fwd.code.mask.iter().flat_map(Function::captures);
        let layout = fwd.layout;
        fwd.masks.is_empty()
            && fwd.code.mask.is_some()
            && captures.all(|capture| matches!(capture.kind, CaptureKind::Number(_)))
            && layout.q == QLayout::Batch
            && layout.kv == KvLayout::Strided
            && !layout.seqused_q
            && !layout.seqused_k
            && !self.tile_lists().is_empty()
    }

    /// Lists of each tile's visible blocks, which the plan's launches read under masks given as data.
    pub(crate) fn tile_lists(&self) -> Vec<TileLists> {
        let Sealed { launch, has_no_sequence, .. } = &*self.0;
        if *has_no_sequence { Vec::new() } else { launch.tile_lists() }
    }

    /// Queues the kernels that make one list of [`tile_lists`](Self::tile_lists).
    ///
    /// # Safety
    /// As [`Launch::build_list`], with the plan's own problem and list.
    ///
    /// # Errors
    /// An error of the driver.
    pub(crate) unsafe fn build_list(
        &self,
        seq: &SeqArgs<'_>,
        masks: &MaskArgs<'_>,
        numbers: &[Number],
        list: TileLists,
        (address, stream): (u64, u64),
    ) -> Result<()> {
        let call = ListsCall { problem: self.computed(), seq, masks, numbers, list, address, stream };
        // SAFETY: the caller keeps the contract of `build_list`.
        unsafe { self.0.launch.build_list(&call) }
    }

    /// The problem that the launches compute.
    fn computed(&self) -> &P {
        self.0.folded.as_ref().map_or(&self.0.problem, |folded| &folded.problem)
    }

    /// The problem that the plan computes.
    #[must_use]
    pub fn problem(&self) -> &P {
        &self.0.problem
    }

    /// The device that the plan runs on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The name of the plan's device.
    #[must_use]
    pub fn backend(&self) -> &str {
        self.0.device.name()
    }

    /// The kernel's name, as `PlanOptions::kernel` takes it.
    #[must_use]
    pub fn kernel(&self) -> &str {
        &self.0.parts.kernel
    }

    /// Settings of the kernel (tile, stages, registers, grid and more), in the order to print them.
    #[must_use]
    pub fn details(&self) -> &[(&'static str, String)] {
        &self.0.parts.details
    }

    /// The launches of a run, in order; empty if kernels are not launched one by one.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.0.parts.steps
    }

    /// Resources and launch of the step that has the kernel's name; empty if there is no such step.
    #[must_use]
    pub fn explain(&self) -> &Explain {
        let parts = &self.0.parts;
        parts.steps.iter().find(|step| step.kernel == parts.kernel).map_or(&NO_LAUNCH, |step| &step.explain)
    }

    /// Kernels that were considered before this one, and why they refused.
    #[must_use]
    pub fn refusals(&self) -> &[Refusal] {
        &self.0.parts.refusals
    }

    /// Whether this is the slow, always-correct kernel that stands in for a refusal.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        self.0.parts.is_fallback
    }

    /// Scratch that a run needs. Runs that may overlap in time need scratch of their own.
    #[must_use]
    pub fn workspace(&self) -> Workspace {
        self.0.parts.workspace
    }

    /// Promises that the plan keeps.
    #[must_use]
    pub fn promises(&self) -> Promises {
        self.0.parts.promises
    }
}

impl<P: Problem> Clone for Plan<P> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<P: Problem> fmt::Debug for Plan<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sealed { problem, device, parts, .. } = &*self.0;
        f.debug_struct("Plan")
            .field("problem", problem)
            .field("device", device)
            .field("parts", parts)
            .finish_non_exhaustive()
    }
}

impl<P: Problem> fmt::Display for Plan<P> {
    /// Prints the plan for a reader: one fact per line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: &dyn fmt::Display| writeln!(f, "{name:<18} {value}");
        row("backend", &self.backend())?;
        row("kernel", &self.kernel())?;
        for (name, value) in self.details() {
            row(name, value)?;
        }
        for step in self.steps() {
            if self.steps().len() > 1 {
                row("step", &step.kernel)?;
            }
            step.explain.rows(&mut row)?;
        }
        row("workspace", &self.workspace())?;
        row("promises", &self.promises())?;
        if self.is_fallback() {
            row("fallback", &"yes: correct, not fast")?;
        }
        for refusal in self.refusals() {
            row("refused", refusal)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::Toy;

    fn parts() -> PlanParts {
        let step = |kernel: &str, code: &str| Step {
            kernel: kernel.to_owned(),
            explain: Explain { code: code.to_owned(), ..Explain::default() },
        };
        PlanParts {
            kernel: "main".to_owned(),
            details: Vec::new(),
            steps: vec![step("before", "x"), step("main", "y"), step("after", "z")],
            refusals: Vec::new(),
            is_fallback: false,
            workspace: Workspace { bytes: 1024, zeroed_bytes: 4 },
            promises: Promises {
                deterministic: true,
                batch_invariant: false,
                row_invariant: false,
                graph_capturable: true,
                accuracy: Accuracy::Fast,
                score_sums: ScoreSums::F32,
            },
        }
    }

    /// A launch that does nothing.
    struct Nothing;

    impl Launch<ValidFwd> for Nothing {
        unsafe fn launch(&self, _: &Call<'_, ValidFwd>) -> Result<()> {
            Ok(())
        }
    }

    fn plan(parts: PlanParts) -> FwdPlan {
        let problem = crate::toy::problem();
        let planned = Planned { parts, launch: Box::new(Nothing) };
        Plan::new(Device::new(Toy::in_host_memory()), problem, planned, false, false, None)
    }

    #[test]
    fn a_plan_says_its_steps_and_explains_the_one_that_bears_its_name() {
        let plan = plan(parts());
        assert_eq!(plan.explain().code, "y");
        let text = plan.to_string();
        for line in
            ["step               before", "step               after", "1024 bytes, 4 of them", "fast, determ"]
        {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_sealed_plan_says_what_its_maker_said() {
        let details = vec![("tile", "64".to_owned()), ("stages", "2".to_owned())];
        let refusals = vec![Refusal::new("fast", "head_dim_qk 300 is larger than 256")];
        let stands_in = PlanParts { details, refusals, is_fallback: true, ..parts() };
        let plan = plan(stands_in.clone());
        assert_eq!((plan.backend(), plan.device().name(), plan.kernel()), ("toy:7", "toy:7", "main"));
        assert_eq!(plan.problem(), &crate::toy::problem());
        assert_eq!(plan.details(), stands_in.details);
        assert_eq!(plan.refusals(), stands_in.refusals);
        assert!(plan.is_fallback());
        let text = plan.to_string();
        for line in [
            "backend            toy:7\n",
            "stages             2\n",
            "fallback           yes",
            "refused            fast: head_dim_qk 300",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let first_choice = super::tests::plan(parts());
        assert!(!first_choice.is_fallback() && !first_choice.to_string().contains("fallback"));
    }

    #[test]
    fn what_is_known_of_a_step_is_said_and_no_more() {
        let launch = LaunchShape { groups: 4, threads: 64, shared_bytes: 1024, tiles: 6, tiles_at_once: 4 };
        let resources = ResourceUsage { registers: Some(168), ..ResourceUsage::default() };
        let said = |explain| {
            let steps = vec![Step { kernel: "main".to_owned(), explain }];
            plan(PlanParts { steps, ..parts() }).to_string()
        };
        let code = "from the bundle".to_owned();
        let remarks = "it spills\nit waits".to_owned();
        let all = said(Explain { resources: Some(resources), launch: Some(launch), code, remarks });
        for line in [
            "grid               4 of 64 threads, 1024 bytes of shared memory each\n",
            "waves              1.50: 6 tiles, 4 at a time\n",
            "resources          168 registers a thread\n",
            "code               from the bundle\n",
            "compiler           it spills\n",
            "compiler           it waits\n",
        ] {
            assert!(all.contains(line), "{line} is not in\n{all}");
        }
        let nothing = said(Explain::default());
        for name in ["grid", "waves", "resources", "code"] {
            assert!(!nothing.lines().any(|line| line.starts_with(name)), "{name} is in\n{nothing}");
        }
    }

    #[test]
    fn a_single_step_and_what_is_not_cleared_go_unsaid() {
        let one = PlanParts {
            steps: vec![Step { kernel: "main".to_owned(), explain: Explain::default() }],
            workspace: Workspace { bytes: 1024, zeroed_bytes: 0 },
            ..parts()
        };
        let text = plan(one).to_string();
        assert!(!text.contains("step ") && text.contains("1024 bytes\n"), "{text}");
    }
}
