//! One decoded instruction: everything the executor needs, resolved once.

use crate::op::Op;

/// Index of a vector register: v0..v255 are 0..255, a0..a255 are 256..511.
pub(crate) type VReg = u16;

/// Accumulator registers follow the vector registers.
pub(crate) const AGPR: VReg = 256;
/// Scalar operand numbers with a name of their own (CDNA3 ISA, table "SGPR and VGPR operands").
pub(crate) const VCC: u8 = 106;
pub(crate) const M0: u8 = 124;
pub(crate) const EXEC: u8 = 126;

/// A source operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Src {
    /// The operand is absent.
    None,
    /// First of the vector registers.
    V(VReg),
    /// First of the scalar registers, VCC, M0 and EXEC among them.
    S(u8),
    /// A constant, already in the operand's type; `lo`, `hi`.
    K(u32, u32),
    /// The scalar condition, 0 or 1.
    Scc,
    /// 1 where VCC is 0.
    Vccz,
    /// 1 where EXEC is 0.
    Execz,
}

/// Which executor takes the instruction; also the classes the counters count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Scalar arithmetic.
    Salu,
    /// Branches, waits, barriers, hints.
    Control,
    /// Scalar memory.
    Smem,
    /// Vector arithmetic.
    Valu,
    /// Packed vector arithmetic.
    ValuPacked,
    /// exp, log, rcp and their kind, a quarter of the rate.
    Transcendental,
    /// Matrix multiply-accumulate.
    Mfma,
    /// LDS, and the lane permutes that go through its hardware.
    Lds,
    /// Buffer, global, flat and scratch memory.
    Vmem,
}

impl Class {
    /// All, in the order of their discriminants.
    pub const ALL: [Self; 9] = [
        Self::Salu,
        Self::Control,
        Self::Smem,
        Self::Valu,
        Self::ValuPacked,
        Self::Transcendental,
        Self::Mfma,
        Self::Lds,
        Self::Vmem,
    ];
}

/// Type of an operand's element: it decides the width and what sign, absolute value and clamp mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ty {
    F16,
    F32,
    F64,
    B16,
    B32,
    B64,
    /// Two f16 in one register.
    F16x2,
    Bf16x2,
    B16x2,
    /// Two f32 in two registers.
    F32x2,
    B32x2,
    /// f32, or one half of a register as f16: `v_fma_mix`.
    Mix,
    /// 64-bit lane mask in scalar registers.
    Mask,
    /// 32-bit lane mask in a scalar register.
    Mask32,
    /// Plain registers, that many.
    Regs(u8),
}

impl Ty {
    /// A lane mask.
    pub(crate) fn is_mask(self) -> bool {
        matches!(self, Self::Mask | Self::Mask32)
    }

    /// Registers an operand of this type takes.
    pub(crate) fn dwords(self) -> u8 {
        match self {
            Self::F64 | Self::B64 | Self::F32x2 | Self::B32x2 | Self::Mask => 2,
            Self::Regs(n) => n,
            _ => 1,
        }
    }
}

/// A run of registers that an instruction reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Regs {
    /// Vector registers of the active lanes.
    V(VReg, u8),
    /// Vector registers of all lanes, whatever EXEC says.
    VAll(VReg, u8),
    S(u8, u8),
}

/// Source lane selection of DPP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dpp {
    pub(crate) ctrl: u16,
    pub(crate) bound_ctrl: bool,
    pub(crate) bank_mask: u8,
    pub(crate) row_mask: u8,
}

/// Byte and word selection of SDWA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sdwa {
    pub(crate) src_sel: [u8; 2],
    pub(crate) src_sext: [bool; 2],
    pub(crate) dst_sel: u8,
    pub(crate) dst_unused: u8,
}

/// The address space and the way an address is formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Lds,
    Flat,
    Global,
    Scratch,
    Buffer,
    Scalar,
    ScalarBuffer,
}

/// Place of a 16-bit value in a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    /// The value fills the register.
    Whole,
    Lo,
    Hi,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Sub,
    Rsub,
    Inc,
    Dec,
    Smin,
    Smax,
    Umin,
    Umax,
    And,
    Or,
    Xor,
    Swap,
    CmpSwap,
    AddF,
    MinF,
    MaxF,
    PkAddF16,
    PkAddBf16,
}

/// Kinds of memory instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemKind {
    Load {
        bytes: u8,
        sext: bool,
        half: Half,
    },
    Store {
        bytes: u8,
        half: Half,
    },
    /// Two loads or stores of `bytes`, offsets scaled by `bytes * stride`.
    Load2 {
        bytes: u8,
        stride: u8,
    },
    Store2 {
        bytes: u8,
        stride: u8,
    },
    Atomic {
        op: AtomicOp,
        bytes: u8,
        returns: bool,
    },
    /// Global or buffer memory straight into LDS.
    ToLds {
        bytes: u8,
        sext: bool,
    },
    /// Transposing LDS read of elements of that many bits.
    ReadTranspose {
        bits: u8,
    },
    Permute,
    Bpermute,
    Swizzle,
    ScalarLoad {
        dwords: u8,
    },
    /// One or two bytes, of RDNA 4, to a register.
    ScalarLoadPart {
        bytes: u8,
        sext: bool,
    },
    ScalarStore {
        dwords: u8,
    },
    /// Cache maintenance: nothing to do here.
    Cache,
    /// The clock.
    Time,
}

/// Operands of a memory instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mem {
    pub(crate) space: Space,
    pub(crate) kind: MemKind,
    /// Address register; `None` where the instruction takes none.
    pub(crate) vaddr: Option<VReg>,
    pub(crate) data: VReg,
    pub(crate) data2: VReg,
    /// Scalar base: pair for global, quad for buffers.
    pub(crate) sbase: Option<u8>,
    pub(crate) soffset: Src,
    pub(crate) offset: i32,
    pub(crate) offset2: i32,
    pub(crate) idxen: bool,
    pub(crate) offen: bool,
}

/// A decoded instruction.
#[derive(Clone, Debug)]
pub(crate) struct Inst {
    /// Address inside the code object.
    pub(crate) pc: u64,
    /// Bytes.
    pub(crate) size: u8,
    pub(crate) name: &'static str,
    pub(crate) class: Class,
    pub(crate) op: Op,
    pub(crate) vdst: VReg,
    /// Scalar destination, or destination of a lane mask.
    pub(crate) sdst: u8,
    pub(crate) dst_ty: Ty,
    pub(crate) src: [Src; 3],
    pub(crate) src_ty: [Ty; 3],
    /// Bit i: source i. VOP3P: of the low half.
    pub(crate) neg: u8,
    pub(crate) neg_hi: u8,
    pub(crate) abs: u8,
    pub(crate) op_sel: u8,
    pub(crate) op_sel_hi: u8,
    pub(crate) omod: u8,
    pub(crate) clamp: bool,
    /// Immediate of scalar instructions; `cbsz | abid << 3 | blgp << 7` of MFMA.
    pub(crate) imm: i32,
    /// Index of the instruction that a branch goes to.
    pub(crate) target: u32,
    pub(crate) dpp: Option<Dpp>,
    pub(crate) sdwa: Option<Sdwa>,
    pub(crate) mem: Option<Mem>,
    pub(crate) mfma: Option<crate::exec::mfma::Shape>,
    pub(crate) reads: Vec<Regs>,
    pub(crate) writes: Vec<Regs>,
    /// No modifier, no lane or byte selection: sources are read and results written as they are.
    pub(crate) plain: bool,
    /// A pure copy: undefined registers may pass through it.
    pub(crate) copies: bool,
    /// The halves of its 64-bit sources may be undefined one by one: compilers widen a value without defining
    /// the half whose result is not read. The low half of the result is defined by the low halves.
    pub(crate) halves: bool,
    pub(crate) words: [u32; 4],
    /// RDNA's VOPD: a second operation, whose sources are read before the first's result is written.
    pub(crate) dual: Option<Box<Inst>>,
}
