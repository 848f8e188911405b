//! Reports of the emulator: faults, and where they happened.

use std::fmt;

/// One list of the kinds for the type, the array of them all and their names.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident => $name:literal,)*) => {
        /// Kinds of faults, by name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum FaultKind {
            $($(#[$doc])* $kind,)*
        }

        impl FaultKind {
            /// Every kind.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// The name printed first in every report.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }
    };
}

kinds! {
    /// The text is no PTX.
    Syntax => "syntax",
    /// PTX that this emulator does not know. Never skipped.
    Unsupported => "unsupported instruction",
    /// An address outside every allocation, or in a guard page.
    OutOfBounds => "out of bounds",
    /// An address that is no multiple of the access size.
    Misaligned => "misaligned",
    /// A read of bytes that nothing has written.
    Uninitialised => "uninitialised read",
    /// Two accesses to the same bytes, unordered by any wait, fence or arrival.
    Race => "race",
    /// Generic-proxy writes read by the asynchronous proxy without `fence.proxy.async` between.
    MissingProxyFence => "missing fence.proxy.async",
    /// A register of a `wgmma` in flight was touched before `wgmma.wait_group`.
    RegisterInFlight => "register of a wgmma in flight",
    /// `wgmma` reads registers that were written after the last `wgmma.fence`.
    MissingWgmmaFence => "missing wgmma.fence",
    /// Global memory touched before `griddepcontrol.wait` in a grid that need not wait for those before it.
    MissingGridWait => "missing griddepcontrol.wait",
    /// A collective instruction that not all of its threads executed.
    DivergentCollective => "divergent collective",
    /// No warp can go on.
    Deadlock => "deadlock",
    /// The instruction budget is spent.
    Livelock => "livelock",
    /// A barrier used against its rules (re-initialised, count overrun, transaction count off).
    Barrier => "barrier misuse",
    /// `setmaxnreg` beyond the register file, or out of its range.
    RegisterBudget => "register budget",
    /// A descriptor (shared memory, instruction or tensor map) that the hardware would refuse or misread.
    Descriptor => "bad descriptor",
    /// Two shared-memory layouts disagree: written with one swizzle, read with another.
    Swizzle => "wrong swizzle",
    /// Tensor memory used against its rules (not allocated, wrong warp, leaked, freed twice).
    TensorMemory => "tensor memory misuse",
    /// `trap` or a failed device assertion.
    Trap => "trap",
    /// A launch whose arguments contradict the kernel.
    Launch => "launch",
}

/// Place in the grid: block coordinates, warp of the block, lanes.
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
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Line of the PTX text, from 1; 0 when no line is concerned.
    pub line: u32,
    /// Line of the CUDA source, from `.loc`; 0 when absent.
    pub source_line: u32,
    /// The details, with their numbers.
    pub text: String,
    /// Place in the grid, when a warp is concerned.
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

    /// Returns this fault, placed at a line unless it already has one.
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
