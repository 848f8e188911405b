//! The launches of a plan, in stages.

use std::ops::Deref;

use fmha_core::source::KernelSource;

/// Role of a launch within its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Writes new keys and values to the cache, and turns queries.
    UpdateCache,
    /// Writes dropout's keep mask.
    KeepMask,
    /// Converts a cache of a narrow type, or gathers its pages, into the layout that the kernel reads.
    Widen,
    /// Writes the pairs that a mask function shows as a bit mask.
    MaskBits,
    /// Lists, for each tile, the blocks that it sees under masks given as data.
    ListTiles,
    /// Gives each listed block its rank in the order of additions.
    RankTiles,
    /// Prepares inputs that only the kernel reads: V in blocks, or LSE and delta in the backward.
    Prepare,
    /// The kernel that bears the plan's name.
    Main,
    /// Merges the partial results of each row.
    Merge,
    /// Writes small outputs of the scores and probabilities.
    Small,
    /// Scores blocks by the scores of their keys.
    BlockScores,
    /// Writes lists of the keys or blocks with the greatest scores.
    Lists,
    /// Computes a loss and the gradients of the scores that it has.
    Loss,
    /// Sums the gradients that the main kernel does not sum.
    Gradients,
    /// Stores the sums of dQ as rows of dQ, and sums dSink.
    FinishDq,
    /// Adds up the parts of dK and dV that tiles of one kv head have summed.
    HeadSums,
    /// Recomputes rows whose numbers the kernel's format cannot represent.
    Repair,
    /// Sums the gradients of tensors that the score function reads (captures).
    Dbias,
    /// Sums the gradients of tensors that the score function reads (captures).
    Captured,
}

impl Stage {
    /// Whether the launch makes lists of tiles, or the bits from which lists are made.
    #[must_use]
    pub const fn makes_lists(self) -> bool {
        matches!(self, Self::MaskBits | Self::ListTiles | Self::RankTiles)
    }
}

/// How many groups of threads a launch has, and how they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of groups of threads that share memory; with 0 nothing is launched.
    pub groups: u32,
    /// Number of threads of a group.
    pub threads: u32,
    /// Whether the grid may start before the previous one in the stream has ended; the kernel then waits for it
    /// (programmatic dependent launch).
    pub dependent: bool,
}

impl Grid {
    /// A grid that starts when the previous one in the stream has ended.
    #[must_use]
    pub const fn new(groups: u32, threads: u32) -> Self {
        Self { groups, threads, dependent: false }
    }
}

/// One launch of a plan, whose kernel is not yet compiled.
#[derive(Debug)]
pub struct Launch {
    /// Role of the launch within its plan.
    pub stage: Stage,
    /// The kernel's name in the plan.
    pub kernel: &'static str,
    /// Source text of the kernel.
    pub source: KernelSource,
    /// Grid of the launch.
    pub grid: Grid,
    /// Bytes of dynamic shared memory of a group.
    pub shared_bytes: u32,
    /// Number of work items, as in [`LaunchShape`](fmha_core::LaunchShape).
    pub tiles: u64,
    /// Number of work items that the device processes at a time, as in [`LaunchShape`](fmha_core::LaunchShape).
    pub tiles_at_once: u64,
}

/// The launches of a plan, which run in order on one stream: those that prepare operands, the main kernel, whose
/// name the plan has, and those that complete its results.
#[derive(Debug)]
pub struct Launches {
    all: Vec<Launch>,
    main: usize,
}

impl Launches {
    /// Makes the list: `before`, the main kernel, `after`.
    #[must_use]
    pub fn new(
        before: impl IntoIterator<Item = Launch>,
        main: Launch,
        after: impl IntoIterator<Item = Launch>,
    ) -> Self {
        let mut all: Vec<Launch> = before.into_iter().collect();
        let index = all.len();
        all.push(main);
        all.extend(after);
        Self { all, main: index }
    }

    /// Adds a first launch, which prepares the operands, before all others.
    #[must_use]
    pub fn behind(mut self, first: Launch) -> Self {
        self.all.insert(0, first);
        Self { main: self.main + 1, ..self }
    }

    /// Moves all launches out, and returns the index of the main kernel among them.
    pub(crate) fn take(&mut self) -> (Vec<Launch>, usize) {
        (std::mem::take(&mut self.all), self.main)
    }

    /// All launches, and the index of the main kernel among them.
    pub(crate) fn into_parts(self) -> (Vec<Launch>, usize) {
        (self.all, self.main)
    }
}

impl From<Launch> for Launches {
    /// Launches of a plan that consists of the main kernel alone.
    fn from(main: Launch) -> Self {
        Self::new([], main, [])
    }
}

impl Deref for Launches {
    type Target = [Launch];

    fn deref(&self) -> &[Launch] {
        &self.all
    }
}
