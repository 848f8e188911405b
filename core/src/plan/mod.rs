//! A plan: which kernels, how, and what they promise. Made once, run many times.
//!
//! A plan is opaque. A backend fills [`PlanParts`] and seals them with its own [`BackendId`]; from then
//! on nobody can change the problem that arguments are checked against, nor run the plan elsewhere.

mod explain;
mod options;
mod sums;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use explain::{Explain, LaunchShape, ResourceUsage};
pub use options::{Accuracy, PlanOptions, Promises};
pub use sums::ScoreSums;

use crate::bwd::ValidBwd;
use crate::combine::ValidCombine;
use crate::error::{ProblemError, Refusal};
use crate::problem::ValidFwd;

/// One backend of this process: no two have the same, though they be of one device and one
/// configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct BackendId(u64);

impl BackendId {
    /// An identity that no other backend of this process has.
    #[must_use]
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Scratch memory of a run. Contents between runs mean nothing: what a run wants zero it clears itself,
/// on its own stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Bytes that a run uses, from the start. 0: it needs none.
    pub bytes: u64,
    /// Of them, the first ones: the run clears them before its first step.
    pub zeroed_bytes: u64,
}

impl Workspace {
    /// No scratch.
    pub const NONE: Self = Self { bytes: 0, zeroed_bytes: 0 };

    /// What its first byte's address is a multiple of: what a device's allocator gives.
    pub const ALIGN: usize = 256;

    /// All of it cleared before each run.
    #[must_use]
    pub const fn zeroed(bytes: u64) -> Self {
        Self { bytes, zeroed_bytes: bytes }
    }

    /// Enough for either.
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

/// One launch of a run. Forward is one; split-KV two; backward three or four.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The kernel's name.
    pub kernel: String,
    /// Its resources, launch and origin.
    pub explain: Explain,
}

/// Everything that a plan says; [`seal`](Self::seal) makes it one.
#[derive(Clone, Debug)]
pub struct PlanParts<P> {
    /// What it computes.
    pub problem: P,
    /// The backend's name, for people.
    pub backend: String,
    /// The kernel's name, as `PlanOptions::kernel` takes it; one of the steps bears it.
    pub kernel: String,
    /// How: tile, stages, registers, grid, ... in the order to print them.
    pub details: Vec<(&'static str, String)>,
    /// The launches, in order; none where kernels are not launched one by one.
    pub steps: Vec<Step>,
    /// Kernels that were considered before this one, and why they refused.
    pub refusals: Vec<Refusal>,
    /// Whether this is the slow, always-correct kernel that stands in for a refusal.
    pub is_fallback: bool,
    /// Scratch that a run needs. Runs that may overlap in time need scratch of their own.
    pub workspace: Workspace,
    /// What it holds to.
    pub promises: Promises,
}

impl<P> PlanParts<P> {
    /// The plan, which `owner` alone can run. `handle` is the backend's own: loaded kernels, a
    /// resolved tile.
    #[must_use]
    pub fn seal(self, owner: &BackendId, handle: impl Any + Send + Sync) -> Plan<P> {
        Plan(Arc::new(Sealed { parts: self, owner: owner.0, handle: Box::new(handle) }))
    }
}

struct Sealed<P> {
    parts: PlanParts<P>,
    owner: u64,
    handle: Box<dyn Any + Send + Sync>,
}

/// A chosen kernel for a problem `P`; [`FwdPlan`], [`BwdPlan`] and [`CombinePlan`] are its names. A
/// copy is cheap.
///
/// Nothing of it can be changed, so that a run's arguments are checked against what was planned:
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
pub struct Plan<P>(Arc<Sealed<P>>);

/// A plan for attention forward.
pub type FwdPlan = Plan<ValidFwd>;
/// A plan for attention backward.
pub type BwdPlan = Plan<ValidBwd>;
/// A plan for merging partial results.
pub type CombinePlan = Plan<ValidCombine>;

/// What is known of a plan without launches of its own.
static NO_LAUNCH: Explain = Explain { resources: None, launch: None, code: String::new() };

impl<P> Plan<P> {
    /// What it computes.
    #[must_use]
    pub fn problem(&self) -> &P {
        &self.0.parts.problem
    }

    /// The name of the backend that made it, and alone can run it.
    #[must_use]
    pub fn backend(&self) -> &str {
        &self.0.parts.backend
    }

    /// The kernel's name, as `PlanOptions::kernel` takes it.
    #[must_use]
    pub fn kernel(&self) -> &str {
        &self.0.parts.kernel
    }

    /// How: tile, stages, registers, grid, ... in the order to print them.
    #[must_use]
    pub fn details(&self) -> &[(&'static str, String)] {
        &self.0.parts.details
    }

    /// The launches of a run, in order; none where kernels are not launched one by one.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.0.parts.steps
    }

    /// Resources and launch of the step that bears the kernel's name; nothing where there is none.
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

    /// What it holds to.
    #[must_use]
    pub fn promises(&self) -> Promises {
        self.0.parts.promises
    }

    /// What the backend kept in it.
    ///
    /// # Errors
    /// `plan`, if another backend made it; `runner` is the name of the one that was asked to run it.
    pub fn handle<H: 'static>(&self, owner: &BackendId, runner: &str) -> Result<&H, ProblemError> {
        let foreign = || {
            let (made_by, made_in, run_in) = (self.backend(), self.0.owner, owner.0);
            ProblemError::new(
                "plan",
                format!("plan was made by backend {made_in}, {made_by}, and is not {run_in}'s, {runner}"),
            )
        };
        self.0.handle.downcast_ref().filter(|_| self.0.owner == owner.0).ok_or_else(foreign)
    }
}

impl<P> Clone for Plan<P> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<P: fmt::Debug> fmt::Debug for Plan<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.parts.fmt(f)
    }
}

impl<P> fmt::Display for Plan<P> {
    /// The plan for a reader: one fact a line.
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

    fn parts() -> PlanParts<u32> {
        let step = |kernel: &str, code: &str| Step {
            kernel: kernel.to_owned(),
            explain: Explain { code: code.to_owned(), ..Explain::default() },
        };
        PlanParts {
            problem: 7,
            backend: "b".to_owned(),
            kernel: "main".to_owned(),
            details: Vec::new(),
            steps: vec![step("before", "x"), step("main", "y"), step("after", "z")],
            refusals: Vec::new(),
            is_fallback: false,
            workspace: Workspace { bytes: 1024, zeroed_bytes: 4 },
            promises: Promises {
                deterministic: true,
                batch_invariant: false,
                graph_capturable: true,
                accuracy: Accuracy::Fast,
                score_sums: ScoreSums::F32,
            },
        }
    }

    #[test]
    fn a_plan_is_its_makers_alone_though_another_bear_its_name() {
        let (maker, twin) = (BackendId::unique(), BackendId::unique());
        let plan = parts().seal(&maker, 5u64);
        assert_eq!(plan.clone().handle::<u64>(&maker, "b"), Ok(&5));
        assert_eq!(plan.handle::<u64>(&twin, "b").unwrap_err().field, "plan");
        assert_eq!(plan.handle::<u32>(&maker, "b").unwrap_err().field, "plan");
    }

    #[test]
    fn a_plan_says_its_steps_and_explains_the_one_that_bears_its_name() {
        let plan = parts().seal(&BackendId::unique(), ());
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
        let plan = stands_in.clone().seal(&BackendId::unique(), ());
        assert_eq!((plan.backend(), plan.kernel(), *plan.problem()), ("b", "main", 7));
        assert_eq!(plan.details(), stands_in.details);
        assert_eq!(plan.refusals(), stands_in.refusals);
        assert!(plan.is_fallback());
        let text = plan.to_string();
        for line in [
            "backend            b\n",
            "stages             2\n",
            "fallback           yes",
            "refused            fast: head_dim_qk 300",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let first_choice = parts().seal(&BackendId::unique(), ());
        assert!(!first_choice.is_fallback() && !first_choice.to_string().contains("fallback"));
    }

    #[test]
    fn what_is_known_of_a_step_is_said_and_no_more() {
        let launch = LaunchShape { groups: 4, threads: 64, shared_bytes: 1024, tiles: 6, tiles_at_once: 4 };
        let resources = ResourceUsage { registers: Some(168), ..ResourceUsage::default() };
        let said = |explain| {
            let steps = vec![Step { kernel: "main".to_owned(), explain }];
            PlanParts { steps, ..parts() }.seal(&BackendId::unique(), ()).to_string()
        };
        let code = "from the bundle".to_owned();
        let all = said(Explain { resources: Some(resources), launch: Some(launch), code });
        for line in [
            "grid               4 of 64 threads, 1024 bytes of shared memory each\n",
            "waves              1.50: 6 tiles, 4 at a time\n",
            "resources          168 registers a thread\n",
            "code               from the bundle\n",
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
        let text = one.seal(&BackendId::unique(), ()).to_string();
        assert!(!text.contains("step ") && text.contains("1024 bytes\n"), "{text}");
    }
}
