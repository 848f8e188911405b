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
    /// Widens or gathers a cache to the layout that the kernel reads.
    Widen,
    /// Writes what a mask as code shows as bits.
    MaskBits,
    /// Lists the blocks that each tile sees under masks as data.
    ListTiles,
    /// Gives the blocks of lists their places in the order of additions.
    RankTiles,
    /// Prepares what the kernel alone reads: a V in blocks, LSE and delta of the backward.
    Prepare,
    /// The kernel that bears the plan's name.
    Main,
    /// Merges the partial results of each row.
    Merge,
    /// Writes small outputs of the scores and probabilities.
    Small,
    /// Scores blocks by the scores of their keys.
    BlockScores,
    /// Writes the lists of the greatest scores.
    Lists,
    /// Sums gradients that the kernel itself does not.
    Gradients,
    /// Brings the sums of dQ to their rows, and sums dSink.
    FinishDq,
    /// Adds up the parts of dK and dV that tiles of one kv head have summed.
    HeadSums,
    /// Computes again the rows whose numbers the kernel cannot hold.
    Repair,
    /// Sums the bias' gradient.
    Dbias,
    /// Sums the gradients of captured tensors.
    Captured,
}

impl Stage {
    /// Whether the launch makes lists of tiles, or what lists are made from.
    #[must_use]
    pub const fn makes_lists(self) -> bool {
        matches!(self, Self::MaskBits | Self::ListTiles | Self::RankTiles)
    }
}

/// How many groups of threads a launch has, and how they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Groups of threads that share memory; 0: nothing is launched.
    pub groups: u32,
    /// Threads of a group.
    pub threads: u32,
    /// Whether the grid may start before the previous one in the stream has ended; it then waits for that
    /// itself.
    pub dependent: bool,
}

impl Grid {
    /// A grid that starts when the previous one in the stream has ended.
    #[must_use]
    pub const fn new(groups: u32, threads: u32) -> Self {
        Self { groups, threads, dependent: false }
    }
}

/// One launch of a plan, its kernel not yet compiled.
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
    /// Dynamic shared memory of a group.
    pub shared_bytes: u32,
    /// Pieces of work, as in [`LaunchShape`](fmha_core::LaunchShape).
    pub tiles: u64,
    /// Pieces of work that the device holds at a time, as in [`LaunchShape`](fmha_core::LaunchShape).
    pub tiles_at_once: u64,
}

/// The launches of a plan in stages: what prepares the operands, the kernel that bears the plan's name, what completes
/// its results. They run in this order on one stream.
#[derive(Debug)]
pub struct Launches {
    all: Vec<Launch>,
    main: usize,
}

impl Launches {
    /// `before`, the kernel itself, `after`.
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

    /// The launches behind one more, which prepares the operands.
    #[must_use]
    pub fn behind(mut self, first: Launch) -> Self {
        self.all.insert(0, first);
        Self { main: self.main + 1, ..self }
    }

    /// All of them, and which is the kernel itself; none are left.
    pub(crate) fn take(&mut self) -> (Vec<Launch>, usize) {
        (std::mem::take(&mut self.all), self.main)
    }

    /// All launches, and the index of the kernel itself among them.
    pub(crate) fn into_parts(self) -> (Vec<Launch>, usize) {
        (self.all, self.main)
    }
}

impl From<Launch> for Launches {
    /// The kernel alone.
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
