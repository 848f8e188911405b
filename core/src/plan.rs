//! A plan: which kernel, how, and what it promises. Made once, run many times.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::backend::Roofline;
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

/// What a compiled kernel takes of a device; `None`: its compiler did not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ResourceUsage {
    /// Vector registers a thread, at launch.
    pub registers: Option<u32>,
    /// Bytes a thread that found no register: stores and loads of spills, whichever is more.
    pub spill_bytes: Option<u32>,
    /// Bytes a thread of local memory, spills included.
    pub stack_bytes: Option<u32>,
    /// Bytes of shared memory that the kernel itself declares; what a launch adds is in
    /// [`LaunchShape::shared_bytes`].
    pub shared_bytes: Option<u32>,
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = [
            (self.registers, "registers a thread"),
            (self.spill_bytes, "bytes spilled"),
            (self.stack_bytes, "bytes of stack"),
            (self.shared_bytes, "bytes of static shared memory"),
        ];
        let known: Vec<String> =
            known.iter().filter_map(|(value, what)| Some(format!("{} {what}", (*value)?))).collect();
        f.write_str(&if known.is_empty() { "not known".to_owned() } else { known.join(", ") })
    }
}

/// How a launch lies over a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Groups of threads that share memory: thread blocks, workgroups.
    pub groups: u64,
    /// Threads of a group.
    pub threads: u32,
    /// Bytes of shared memory that a group is launched with.
    pub shared_bytes: u32,
    /// Pieces of work, alike in size where no mask shortens them.
    pub tiles: u64,
    /// How many of them the device works on at a time.
    pub tiles_at_once: u64,
}

impl LaunchShape {
    /// Tiles over tiles at once: 1.1 waves take the time of 2.
    #[must_use]
    pub fn waves(&self) -> f64 {
        self.tiles as f64 / self.tiles_at_once.max(1) as f64
    }

    /// Which share of the device's time is work, were all tiles alike.
    #[must_use]
    pub fn wave_efficiency(&self) -> f64 {
        let waves = self.waves();
        if waves > 0.0 { waves / waves.ceil() } else { 1.0 }
    }
}

/// What is known of a plan before it runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explain {
    /// What the kernel takes; `None` where kernels are not compiled one by one, or could not be here.
    pub resources: Option<ResourceUsage>,
    /// Its launch; `None` where there is none.
    pub launch: Option<LaunchShape>,
}

impl Explain {
    /// The least time of some work at a device's stated peaks, in seconds, with the device's last
    /// wave as idle as it is: modelled, not measured. `None` where a peak is unknown.
    #[must_use]
    pub fn modelled_seconds(&self, roofline: &Roofline, flops: u64, bytes: u64) -> Option<f64> {
        let compute = flops as f64 / roofline.flops_per_second?;
        let memory = bytes as f64 / roofline.bytes_per_second?;
        let efficiency = self.launch.map_or(1.0, |launch| launch.wave_efficiency());
        Some((compute / efficiency).max(memory))
    }
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
    /// Resources and launch, as numbers.
    pub explain: Explain,
    /// Kernels that were considered before this one, and why they refused.
    pub refusals: Vec<Refusal>,
    /// Whether this is the slow, always-correct kernel that stands in for a refusal.
    pub is_fallback: bool,
    /// Scratch that a run needs: zeros before its first run, and left as the next run of this plan
    /// wants it. Runs that may overlap in time need scratch of their own.
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
            .field("explain", &self.explain)
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
        if let Some(launch) = self.explain.launch {
            let (groups, threads, shared) = (launch.groups, launch.threads, launch.shared_bytes);
            row(
                "grid",
                &format_args!("{groups} of {threads} threads, {shared} bytes of shared memory each"),
            )?;
            let (tiles, waves) = (launch.tiles, launch.waves());
            row("waves", &format_args!("{waves:.2}: {tiles} tiles, {} at a time", launch.tiles_at_once))?;
        }
        if let Some(resources) = self.explain.resources {
            row("resources", &resources)?;
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
