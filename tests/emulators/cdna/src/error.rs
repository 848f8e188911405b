//! Errors: a code object that cannot be loaded, a launch that is refused, a kernel that faults.

use std::fmt;

/// Why a code object was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The bytes are no 64-bit ELF file.
    #[error("not an ELF file: {0}")]
    NotElf(String),
    /// The ELF file is for another machine.
    #[error("ELF machine {0} is not AMDGPU (224)")]
    WrongMachine(u16),
    /// The ELF flags name a processor this crate does not execute.
    #[error(
        "processor 0x{0:x} in the ELF flags is none of gfx90a (3f), gfx942 (4c), gfx950 (4f), gfx1100 (41), gfx1201 (4e)"
    )]
    UnknownArch(u32),
    /// The code object is for another architecture than the device's.
    #[error("the code object is for {object}, the device is {device}")]
    OtherArch {
        /// Architecture of the code object.
        object: crate::elf::Arch,
        /// Architecture of the device.
        device: crate::elf::Arch,
    },
    /// A part every code object has is absent.
    #[error("the code object has no {0}")]
    Missing(&'static str),
    /// The metadata note is malformed.
    #[error("metadata note: {0}")]
    Metadata(String),
}

/// Why a launch gave no result.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The launch contradicts the kernel's own statement of its needs; nothing ran.
    #[error("launch refused: {0}")]
    Refused(String),
    /// The kernel did something wrong while it ran.
    #[error("{0}")]
    Fault(Box<Fault>),
}

/// The kinds of faults, the words that tests and people name them by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The decoder does not know the instruction, or no executor is written for it.
    UnknownInstruction,
    /// An access outside every allocation, or across an allocation's end.
    OutOfBounds,
    /// An address that is no multiple of what the instruction needs.
    Misaligned,
    /// A register read before anything was written to it.
    UninitRegister,
    /// LDS read before anything was written to it.
    UninitLds,
    /// Device memory read before anything was written to it.
    UninitMemory,
    /// A register used while the memory access that fills it may still be under way.
    MissingWait,
    /// LDS read while a direct-to-LDS load into it may still be under way.
    MissingLdsDmaWait,
    /// Two waves touch the same LDS, one of them writing, with no barrier between.
    LdsRace,
    /// Waves of a workgroup, or lanes of a wave, disagree about a barrier.
    DivergentBarrier,
    /// The kernel ran past the instruction limit.
    Timeout,
    /// A trap instruction.
    Trap,
}

/// A fault, and where it happened.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Name of the kernel.
    pub kernel: String,
    /// Address of the instruction inside the code object.
    pub pc: u64,
    /// The instruction.
    pub instruction: String,
    /// `file:line`, where the code object has line information.
    pub source: Option<String>,
    /// Workgroup, in x, y, z.
    pub workgroup: [u32; 3],
    /// Wave in the workgroup.
    pub wave: u32,
    /// The first lane concerned, if lanes are.
    pub lane: Option<u32>,
    /// Details of the fault.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.workgroup;
        write!(f, "{:?}: {} at pc 0x{:x} ({})", self.kind, self.detail, self.pc, self.instruction)?;
        if let Some(source) = &self.source {
            write!(f, ", {source}")?;
        }
        write!(f, ", kernel {}, workgroup ({x}, {y}, {z}), wave {}", self.kernel, self.wave)?;
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}

/// A fault as the executor meets it, before the launcher adds the place.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) kind: FaultKind,
    pub(crate) lane: Option<u32>,
    pub(crate) detail: String,
}

impl Stop {
    #[cold]
    pub(crate) fn new(kind: FaultKind, detail: impl Into<String>) -> Box<Self> {
        Box::new(Self { kind, lane: None, detail: detail.into() })
    }

    #[cold]
    pub(crate) fn lane(kind: FaultKind, lane: usize, detail: impl Into<String>) -> Box<Self> {
        Box::new(Self { kind, lane: Some(lane as u32), detail: detail.into() })
    }
}

/// Result of executing one instruction.
pub(crate) type Exec<T = ()> = Result<T, Box<Stop>>;
