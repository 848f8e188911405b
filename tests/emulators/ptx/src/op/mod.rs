//! The decoded form of an instruction: what the interpreter executes.

mod arith;
mod matrix;
mod memory;

use crate::ast::{Space, Ty};

pub(crate) use arith::{BoolOp, Cmp, Cvt, Df, Hf, Prmt, Rare, Sf, Slow, Wf, Xf};
pub(crate) use matrix::{CpShape, Elem, Mma, MmaKind, ScaledKind, Tcgen, TmemShape, Wgmma};
pub(crate) use memory::{Access, Atom, AtomOp, Bulk, Completion, Mbar, MbarOp, Route, Shfl, Vote};

/// A row of the register file of a warp: 32 lanes of one register. Two tag bits name the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Reg(u32);

/// The files: 32-bit words (16-bit registers live here, upper half zero), 64-bit words, predicates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum File {
    Word,
    Double,
    Pred,
}

impl Reg {
    /// Rows in one file.
    pub(crate) const MAX_ROWS: u32 = 1 << 20;
    /// No register.
    pub(crate) const NONE: Self = Self(u32::MAX);

    pub(crate) fn new(file: File, row: u32) -> Self {
        Self((file as u32) << 30 | row)
    }

    pub(crate) fn row(self) -> usize {
        (self.0 & 0x3fff_ffff) as usize
    }

    pub(crate) fn file(self) -> Option<File> {
        match self.0 >> 30 {
            0 => Some(File::Word),
            1 => Some(File::Double),
            2 => Some(File::Pred),
            _ => None,
        }
    }

    pub(crate) fn is_some(self) -> bool {
        self != Self::NONE
    }

    pub(crate) fn is_double(self) -> bool {
        self.file() == Some(File::Double)
    }
}

/// Operation of an instruction. Registers stand in [`Inst`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Code {
    W {
        f: Wf,
        ftz: bool,
    },
    WSlow(Slow),
    /// Single precision of sources that are halves, but for the last.
    Mixed {
        slow: Slow,
        bf16: bool,
    },
    /// `add.cc` and friends: add or subtract with carry in and out.
    Carry {
        subtract: bool,
        carry_in: bool,
        carry_out: bool,
        wide: bool,
        /// Half of the product that is computed first, lower or upper, if there is one.
        product: Option<Wf>,
    },
    Rare(Rare),
    D(Df),
    /// Packed single precision (`.f32x2`).
    Pair32(Slow),
    X(Xf),
    Half {
        f: Hf,
        bf16: bool,
        lanes: u8,
        ftz: bool,
        sat: bool,
    },
    Short {
        f: Sf,
        signed: bool,
    },
    SetP {
        cmp: Cmp,
        ty: Ty,
        combine: Option<BoolOp>,
        ftz: bool,
    },
    /// `set`: an all-ones or 1.0 word.
    Set {
        cmp: Cmp,
        ty: Ty,
        float: bool,
        ftz: bool,
    },
    PairSetP {
        cmp: Cmp,
        bf16: bool,
    },
    Pred(BoolOp),
    Sel,
    /// `slct`: by the sign of the third source.
    Slct {
        float: bool,
    },
    Cvt(Cvt),
    /// Splits: one source row to several; joins: several to one.
    Unpack {
        unit: u8,
    },
    Pack {
        unit: u8,
    },
    Clock,
    Bra {
        target: u32,
    },
    Brx {
        table: u32,
    },
    Exit,
    Trap,
    Nop,
    Ld(Access),
    St(Access),
    Atom(Atom),
    LdMatrix {
        num: u8,
        trans: bool,
        offset: i64,
    },
    StMatrix {
        num: u8,
        trans: bool,
        offset: i64,
    },
    MovMatrix,
    Shfl(Shfl),
    Vote(Vote),
    MatchAny,
    MatchAll,
    Elect,
    Redux {
        op: AtomOp,
        ty: Ty,
        abs: bool,
        nan: bool,
    },
    ActiveMask,
    WarpSync,
    /// `bar.sync`, `bar.arrive`, `bar.red` (its predicate op).
    Bar {
        arrive: bool,
        red: Option<Vote>,
        popc: bool,
    },
    ClusterArrive {
        relaxed: bool,
    },
    ClusterWait,
    Mbar(Mbar),
    CpAsync {
        bytes: u8,
        dst_offset: i64,
        src_offset: i64,
    },
    CpAsyncCommit,
    CpAsyncWait {
        all: bool,
    },
    Bulk(Bulk),
    BulkCommit,
    BulkWait {
        read: bool,
    },
    FenceMemory,
    FenceProxyAsync,
    /// `fence.mbarrier_init`.
    FenceMbarrierInit,
    FenceTensorMap,
    TensorMapReplace {
        field: u8,
        dim: u8,
        wide: bool,
        offset: i64,
    },
    CvtaTo {
        space: Space,
    },
    CvtaFrom {
        space: Space,
    },
    IsSpace {
        space: Space,
    },
    Mapa {
        generic: bool,
        space: Space,
    },
    GetCtaRank,
    SetMaxNReg {
        increase: bool,
    },
    GridDepWait,
    GridDepLaunch,
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait,
    Wgmma(Wgmma),
    Mma(Mma),
    Tcgen {
        op: Tcgen,
        pair: bool,
    },
}

/// A decoded instruction.
#[derive(Clone, Debug)]
pub(crate) struct Inst {
    pub(crate) code: Code,
    /// Guard predicate, or [`Reg::NONE`].
    pub(crate) guard: Reg,
    pub(crate) guard_not: bool,
    /// The predicate source is negated.
    pub(crate) src_not: bool,
    /// Up to two results and four sources; longer lists stand in `list`.
    pub(crate) dst: [Reg; 2],
    pub(crate) src: [Reg; 4],
    /// Long operand lists: results first, then sources, in the program's pool.
    pub(crate) list: List,
}

/// A range of the program's register pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct List {
    pub(crate) start: u32,
    pub(crate) dst: u16,
    pub(crate) src: u16,
}

impl Inst {
    pub(crate) fn new(code: Code) -> Self {
        Self {
            code,
            guard: Reg::NONE,
            guard_not: false,
            src_not: false,
            dst: [Reg::NONE; 2],
            src: [Reg::NONE; 4],
            list: List::default(),
        }
    }
}

/// Special registers that a warp fills once, at its start.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Laneid,
    Warpid,
    Nwarpid,
    Smid,
    Nsmid,
    Gridid,
    LanemaskEq,
    LanemaskLt,
    LanemaskLe,
    LanemaskGt,
    LanemaskGe,
    ClusterId(u8),
    NclusterId(u8),
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    ClusterCtarank,
    ClusterNctarank,
    DynamicSmemSize,
    TotalSmemSize,
    AggrSmemSize,
    ReservedSmem,
    Envreg,
    /// The address of a variable in the block's own shared memory, as the cluster sees it.
    Shared {
        at: u32,
        wide: bool,
    },
}

/// A kernel ready to run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) code: Vec<Inst>,
    /// PTX line and source line of each instruction.
    pub(crate) lines: Vec<(u32, u32)>,
    pub(crate) pool: Vec<Reg>,
    pub(crate) tables: Vec<Vec<u32>>,
    /// Rows of each file.
    pub(crate) words: u32,
    pub(crate) doubles: u32,
    pub(crate) preds: u32,
    /// Rows that hold constants.
    pub(crate) const_words: Vec<(Reg, u32)>,
    pub(crate) const_doubles: Vec<(Reg, u64)>,
    pub(crate) const_preds: Vec<(Reg, bool)>,
    pub(crate) specials: Vec<(Reg, Special)>,
    pub(crate) local_bytes: u32,
    pub(crate) static_shared: u32,
    /// Start of dynamic shared memory.
    pub(crate) dynamic_base: u32,
    pub(crate) params: Vec<crate::ast::Param>,
    pub(crate) param_bytes: u32,
    pub(crate) max_threads: Option<u32>,
    pub(crate) required_block: Option<[u32; 3]>,
    pub(crate) cluster: Option<[u32; 3]>,
    pub(crate) max_registers: Option<u32>,
}

impl Program {
    /// The long operand list of `inst`: results, then sources.
    pub(crate) fn list(&self, inst: &Inst) -> (&[Reg], &[Reg]) {
        let start = inst.list.start as usize;
        let mid = start + usize::from(inst.list.dst);
        (&self.pool[start..mid], &self.pool[mid..mid + usize::from(inst.list.src)])
    }
}
