//! What the emulator reports, and where it happened.

use std::fmt;

/// What went wrong, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FaultKind {
    /// The text is no PTX.
    Syntax,
    /// PTX that this emulator does not know. Never skipped.
    Unsupported,
    /// An address outside every allocation, or in a guard page.
    OutOfBounds,
    /// An address that is no multiple of the access size.
    Misaligned,
    /// A read of bytes that nothing has written.
    Uninitialised,
    /// Two accesses to the same bytes, unordered by any wait, fence or arrival.
    Race,
    /// Generic-proxy writes read by the asynchronous proxy without `fence.proxy.async` between.
    MissingProxyFence,
    /// A register of a `wgmma` in flight was touched before `wgmma.wait_group`.
    RegisterInFlight,
    /// `wgmma` reads registers that were written after the last `wgmma.fence`.
    MissingWgmmaFence,
    /// Global memory touched before `griddepcontrol.wait` in a grid that need not wait for those before it.
    MissingGridWait,
    /// A collective instruction that not all of its threads executed.
    DivergentCollective,
    /// No warp can go on.
    Deadlock,
    /// The instruction budget is spent.
    Livelock,
    /// A barrier used against its rules (re-initialised, count overrun, transaction count off).
    Barrier,
    /// `setmaxnreg` beyond the register file, or out of its range.
    RegisterBudget,
    /// A descriptor (shared memory, instruction or tensor map) that the hardware would refuse or misread.
    Descriptor,
    /// Two shared-memory layouts disagree: written with one swizzle, read with another.
    Swizzle,
    /// Tensor memory used against its rules (not allocated, wrong warp, leaked, freed twice).
    TensorMemory,
    /// `trap` or a failed device assertion.
    Trap,
    /// A launch whose arguments contradict the kernel.
    Launch,
}

impl FaultKind {
    /// The name printed first in every report.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Syntax => "syntax",
            Self::Unsupported => "unsupported instruction",
            Self::OutOfBounds => "out of bounds",
            Self::Misaligned => "misaligned",
            Self::Uninitialised => "uninitialised read",
            Self::Race => "race",
            Self::MissingProxyFence => "missing fence.proxy.async",
            Self::RegisterInFlight => "register of a wgmma in flight",
            Self::MissingWgmmaFence => "missing wgmma.fence",
            Self::MissingGridWait => "missing griddepcontrol.wait",
            Self::DivergentCollective => "divergent collective",
            Self::Deadlock => "deadlock",
            Self::Livelock => "livelock",
            Self::Barrier => "barrier misuse",
            Self::RegisterBudget => "register budget",
            Self::Descriptor => "bad descriptor",
            Self::Swizzle => "wrong swizzle",
            Self::TensorMemory => "tensor memory misuse",
            Self::Trap => "trap",
            Self::Launch => "launch",
        }
    }
}

/// Where in the grid: block coordinates, warp of the block, lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// `%ctaid`.
    pub block: [u32; 3],
    /// Warp of the block, from 0.
    pub warp: u32,
    /// Lanes concerned, as a mask.
    pub lanes: u32,
}

/// One report: what, at which line, where in the grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What went wrong.
    pub kind: FaultKind,
    /// Line of the PTX text, from 1; 0 when no line is concerned.
    pub line: u32,
    /// Line of the CUDA source, from `.loc`; 0 when absent.
    pub source_line: u32,
    /// The details, with their numbers.
    pub text: String,
    /// Where in the grid, when a warp is concerned.
    pub place: Option<Place>,
}

impl Fault {
    pub(crate) fn new(kind: FaultKind, text: impl Into<String>) -> Self {
        Self { kind, line: 0, source_line: 0, text: text.into(), place: None }
    }

    pub(crate) fn syntax(line: u32, text: impl Into<String>) -> Self {
        Self { line, ..Self::new(FaultKind::Syntax, text) }
    }

    pub(crate) fn unsupported(text: impl Into<String>) -> Self {
        Self::new(FaultKind::Unsupported, text)
    }

    /// The same fault, at a line unless it already has one.
    pub(crate) fn at(mut self, line: u32, source_line: u32) -> Self {
        if self.line == 0 {
            self.line = line;
            self.source_line = source_line;
        }
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind.name())?;
        if self.line != 0 {
            write!(f, " at PTX line {}", self.line)?;
        }
        if self.source_line != 0 {
            write!(f, " (source line {})", self.source_line)?;
        }
        if let Some(place) = self.place {
            let [x, y, z] = place.block;
            write!(f, " in block ({x},{y},{z}) warp {} lanes {:#010x}", place.warp, place.lanes)?;
        }
        write!(f, ": {}", self.text)
    }
}

impl std::error::Error for Fault {}
