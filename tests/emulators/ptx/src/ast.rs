//! PTX as text says it: names, no meaning yet.

use crate::fault::{Fault, FaultKind};

/// Scalar types of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    Pred,
    B8,
    U8,
    S8,
    B16,
    U16,
    S16,
    F16,
    Bf16,
    B32,
    U32,
    S32,
    F32,
    Tf32,
    F16x2,
    Bf16x2,
    U16x2,
    S16x2,
    E4m3x2,
    E5m2x2,
    E2m1x2,
    E4m3,
    E5m2,
    B64,
    U64,
    S64,
    F64,
    F32x2,
    B128,
}

impl Ty {
    /// The type that a qualifier such as `bf16x2` names.
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "u8" => Self::U8,
            "s8" => Self::S8,
            "b16" => Self::B16,
            "u16" => Self::U16,
            "s16" => Self::S16,
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "b32" => Self::B32,
            "u32" => Self::U32,
            "s32" => Self::S32,
            "f32" => Self::F32,
            "tf32" => Self::Tf32,
            "f16x2" => Self::F16x2,
            "bf16x2" => Self::Bf16x2,
            "u16x2" => Self::U16x2,
            "s16x2" => Self::S16x2,
            "e4m3x2" => Self::E4m3x2,
            "e5m2x2" => Self::E5m2x2,
            "e2m1x2" => Self::E2m1x2,
            "e4m3" => Self::E4m3,
            "e5m2" => Self::E5m2,
            "b64" => Self::B64,
            "u64" => Self::U64,
            "s64" => Self::S64,
            "f64" => Self::F64,
            "f32x2" => Self::F32x2,
            "b128" => Self::B128,
            _ => return None,
        })
    }

    /// Size in bytes; 0 for predicates.
    pub(crate) fn bytes(self) -> u32 {
        match self {
            Self::Pred => 0,
            Self::B8 | Self::U8 | Self::S8 | Self::E4m3 | Self::E5m2 | Self::E2m1x2 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 | Self::E4m3x2 | Self::E5m2x2 => 2,
            Self::B32
            | Self::U32
            | Self::S32
            | Self::F32
            | Self::Tf32
            | Self::F16x2
            | Self::Bf16x2
            | Self::U16x2
            | Self::S16x2 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 | Self::F32x2 => 8,
            Self::B128 => 16,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16 | Self::Bf16 | Self::F32 | Self::F64 | Self::F16x2 | Self::Bf16x2 | Self::Tf32
        )
    }
}

/// State spaces that a variable or an access names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    SharedCluster,
    Local,
    Param,
    Const,
}

/// A variable: module scope or function scope.
#[derive(Clone, Debug)]
pub(crate) struct Var {
    pub(crate) space: Space,
    pub(crate) name: String,
    pub(crate) align: u32,
    pub(crate) bytes: u64,
    /// Initial bytes; shorter than `bytes` means zeros follow.
    pub(crate) init: Vec<u8>,
    /// `.extern .shared x[]`: sized by the launch.
    pub(crate) dynamic: bool,
}

/// An operand as written.
#[derive(Clone, Debug)]
pub(crate) enum Operand {
    Name(String),
    Int(u64),
    F32(u32),
    F64(u64),
    Float(f64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `[base + offset]`
    Address {
        base: Box<Operand>,
        offset: i64,
    },
    /// `[map, {c0, c1}]`
    Tensor {
        base: Box<Operand>,
        rest: Vec<Operand>,
    },
    /// `a|b`
    Pair(Box<Operand>, Box<Operand>),
    /// `!p`
    Not(Box<Operand>),
    /// `_`
    Sink,
}

/// One instruction as written.
#[derive(Clone, Debug)]
pub(crate) struct RawInst {
    /// Guard predicate: its name, and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    /// The opcode, split at its dots.
    pub(crate) words: Vec<String>,
    pub(crate) operands: Vec<Operand>,
    pub(crate) line: u32,
    pub(crate) source_line: u32,
}

impl RawInst {
    pub(crate) fn opcode(&self) -> String {
        self.words.join(".")
    }

    /// Word `i` of the opcode; empty where it has none.
    pub(crate) fn word(&self, i: usize) -> &str {
        self.words.get(i).map_or("", String::as_str)
    }

    /// Operand `i`.
    pub(crate) fn operand(&self, i: usize) -> Result<&Operand, Fault> {
        self.operands.get(i).ok_or_else(|| {
            let text =
                format!("`{}` with {} operands has no operand {}", self.opcode(), self.operands.len(), i + 1);
            Fault::new(FaultKind::Syntax, text)
        })
    }

    pub(crate) fn has(&self, word: &str) -> bool {
        self.words.iter().any(|w| w == word)
    }
}

/// Contents of a function body, in order.
#[derive(Clone, Debug)]
pub(crate) enum Stmt {
    Open,
    Close,
    /// `.reg .b32 %r<5>` (count) or `.reg .pred p, q` (names).
    Regs {
        ty: Ty,
        name: String,
        count: Option<u32>,
    },
    Var(Var),
    Label(String),
    Targets {
        name: String,
        labels: Vec<String>,
    },
    Inst(RawInst),
}

/// A kernel parameter and its place in the argument buffer.
#[derive(Clone, Debug)]
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) bytes: u32,
    pub(crate) offset: u32,
}

/// A kernel (`.entry`).
#[derive(Clone, Debug, Default)]
pub(crate) struct Func {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) body: Vec<Stmt>,
    /// `.maxntid` as a product; `None` when absent.
    pub(crate) max_threads: Option<u32>,
    /// `.reqntid`.
    pub(crate) required_block: Option<[u32; 3]>,
    /// `.reqnctapercluster`.
    pub(crate) cluster: Option<[u32; 3]>,
    pub(crate) max_registers: Option<u32>,
}

/// A parsed module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Module {
    pub(crate) version: String,
    pub(crate) target: String,
    pub(crate) vars: Vec<Var>,
    pub(crate) kernels: Vec<Func>,
}
