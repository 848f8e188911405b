//! A plan: which kernel, how, and what it promises. Made once, run many times.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::bwd::ValidBwd;
use crate::combine::ValidCombine;
use crate::error::Refusal;
use crate::problem::ValidFwd;

/// What the caller wants of the choice of kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// This kernel or a refusal; `None` = the backend's choice.
    pub kernel: Option<String>,
    /// `name=value` pairs for that kernel's tile, honoured or refused: `block_m=128`.
    pub tile: Vec<(String, String)>,
    /// Whether a kernel that is correct but far from fast may serve. The plan says so if it does.
    pub allow_fallback: bool,
}

/// What a kernel holds to, whatever the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promises {
    /// The same bits every run.
    pub deterministic: bool,
    /// A sequence's result has the same bits whatever else is in the batch.
    pub batch_invariant: bool,
    /// Can be captured into a graph and replayed with new lengths.
    pub graph_capturable: bool,
}

/// A chosen kernel for a problem `P`; [`FwdPlan`], [`BwdPlan`] and [`CombinePlan`] are its names.
#[derive(Clone)]
pub struct Plan<P> {
    /// What it computes.
    pub problem: P,
    /// The backend that made it, and alone can run it.
    pub backend: String,
    /// The kernel's name, as `PlanOptions::kernel` takes it.
    pub kernel: String,
    /// How: tile, stages, registers, grid, ... in the order to print them.
    pub details: Vec<(&'static str, String)>,
    /// Kernels that were considered before this one, and why they refused.
    pub refusals: Vec<Refusal>,
    /// Whether this is the slow, always-correct kernel that stands in for a refusal.
    pub is_fallback: bool,
    /// Scratch that a run needs.
    pub workspace_bytes: u64,
    /// What it holds to.
    pub promises: Promises,
    /// The backend's own: a loaded kernel, a resolved tile.
    pub handle: Arc<dyn Any + Send + Sync>,
}

/// A plan for attention forward.
pub type FwdPlan = Plan<ValidFwd>;
/// A plan for attention backward.
pub type BwdPlan = Plan<ValidBwd>;
/// A plan for merging partial results.
pub type CombinePlan = Plan<ValidCombine>;

impl<P: fmt::Debug> fmt::Debug for Plan<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("backend", &self.backend)
            .field("kernel", &self.kernel)
            .field("details", &self.details)
            .field("refusals", &self.refusals)
            .field("workspace_bytes", &self.workspace_bytes)
            .field("promises", &self.promises)
            .field("problem", &self.problem)
            .finish_non_exhaustive()
    }
}

impl<P> fmt::Display for Plan<P> {
    /// The plan for a reader: one fact a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: &dyn fmt::Display| writeln!(f, "{name:<18} {value}");
        row("backend", &self.backend)?;
        row("kernel", &self.kernel)?;
        for (name, value) in &self.details {
            row(name, value)?;
        }
        row("workspace", &format_args!("{} bytes", self.workspace_bytes))?;
        let promises = [
            ("deterministic", self.promises.deterministic),
            ("batch-invariant", self.promises.batch_invariant),
            ("graph-capturable", self.promises.graph_capturable),
        ];
        let kept: Vec<_> = promises.iter().filter(|(_, holds)| *holds).map(|(name, _)| *name).collect();
        row("promises", &if kept.is_empty() { "nothing".to_owned() } else { kept.join(", ") })?;
        if self.is_fallback {
            row("fallback", &"yes: correct, not fast")?;
        }
        for refusal in &self.refusals {
            row("refused", refusal)?;
        }
        Ok(())
    }
}
