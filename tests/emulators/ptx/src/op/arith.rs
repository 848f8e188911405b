//! Arithmetic instructions, which compute from registers alone.

use crate::ast::Ty;
use crate::fp::Round;

/// Functions of 32-bit rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wf {
    Mov,
    Add,
    Sub,
    Mul,
    MulHiS,
    MulHiU,
    Mul24S,
    Mul24U,
    Mad,
    MadHiS,
    MadHiU,
    SadS,
    SadU,
    DivS,
    DivU,
    RemS,
    RemU,
    AbsS,
    Neg,
    MinS,
    MinU,
    MaxS,
    MaxU,
    And,
    Or,
    Xor,
    Not,
    Cnot,
    Shl,
    ShrS,
    ShrU,
    ShfL,
    ShfR,
    ShfLWrap,
    ShfRWrap,
    Popc,
    Clz,
    Brev,
    BfindS,
    BfindU,
    /// Left shift that makes the bit that `bfind` finds the highest.
    BfindShiftS,
    BfindShiftU,
    BfeS,
    BfeU,
    Bfi,
    Prmt,
    Lop3,
    FAdd,
    FSub,
    FMul,
    FFma,
    FMin,
    FMax,
    FMinNan,
    FMaxNan,
    FMin3,
    FMax3,
    FMax3Nan,
    FAbs,
    FNeg,
    FDiv,
    FRcp,
    FSqrt,
    FRsqrt,
    FEx2,
    FLg2,
    FTanh,
    FSin,
    FCos,
    FCopysign,
}

/// Functions of 64-bit rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Df {
    Mov,
    Add,
    Sub,
    Mul,
    MulHiS,
    MulHiU,
    Mad,
    DivS,
    DivU,
    RemS,
    RemU,
    AbsS,
    Neg,
    MinS,
    MinU,
    MaxS,
    MaxU,
    And,
    Or,
    Xor,
    Not,
    Brev,
    FAdd,
    FSub,
    FMul,
    FFma,
    FDiv,
    FRcp,
    FSqrt,
    FMin,
    FMax,
    FAbs,
    FNeg,
}

/// Functions between the files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Xf {
    /// 32 x 32 -> 64, plus a 64-bit addend for `Mad…`.
    MulWideS,
    MulWideU,
    MadWideS,
    MadWideU,
    /// 64-bit value, 32-bit amount.
    ShlD,
    ShrDS,
    ShrDU,
    /// 64-bit source, 32-bit result.
    PopcD,
    ClzD,
    BfindDS,
    BfindDU,
    /// 64-bit value, 32-bit position and length.
    BfeDS,
    BfeDU,
    BfiD,
}

/// Arithmetic on 16-bit elements, alone or in pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hf {
    Add,
    Sub,
    Mul,
    Fma,
    FmaRelu,
    Min,
    Max,
    MinNan,
    MaxNan,
    Abs,
    Neg,
    Ex2,
    Tanh,
}

/// Integer functions of 16-bit registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sf {
    Add,
    Sub,
    Mul,
    MulHi,
    MulWide,
    Mad,
    MadWide,
    Div,
    Rem,
    Min,
    Max,
    Neg,
    Abs,
    Shr,
    Shl,
    Not,
}

/// Functions of words that kernels rarely use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rare {
    AddSat,
    SubSat,
    MinRelu,
    MaxRelu,
    Mul24HiS,
    Mul24HiU,
    Prmt(Prmt),
    /// Dot product of bytes, or of halves and half of the bytes, onto a sum.
    Dot {
        halves: bool,
        high: bool,
        signed: [bool; 2],
    },
    /// Two whole numbers of 16 bits.
    PairAdd,
    PairMin {
        signed: bool,
    },
    PairMax {
        signed: bool,
    },
    /// `.xorsign.abs`.
    SignMin,
    SignMax,
    /// `cvt.pack.sat`: two numbers saturated to so many bits.
    Pack {
        bits: u8,
        signed: bool,
    },
    TestFinite,
    TestSubnormal,
}

/// Modes of `prmt`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Prmt {
    Forward,
    Backward,
    Replicate8,
    ClampLeft,
    ClampRight,
    Replicate16,
}

/// Comparisons; the unordered forms are true when an operand is NaN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// Combination of predicates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BoolOp {
    And,
    Or,
    Xor,
    Not,
    Mov,
}

/// A single precision operation that rounds or saturates in an unusual way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slow {
    pub(crate) f: Wf,
    pub(crate) round: Round,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
}

/// `cvt`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cvt {
    pub(crate) to: Ty,
    pub(crate) from: Ty,
    pub(crate) round: Round,
    /// Round to an integral value in the float format (`.rni` and friends between floats).
    pub(crate) integral: bool,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
    pub(crate) satfinite: bool,
    pub(crate) relu: bool,
    /// Two sources packed into one result.
    pub(crate) packed: bool,
    /// The result's register is wider than its type: a signed result fills it.
    pub(crate) widen: bool,
}
