//! The decoded form of an instruction: what the interpreter executes.

use crate::ast::{Space, Ty};
use crate::fp::Round;

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
    /// How far left the bit that `bfind` finds must go to become the highest.
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

/// How predicates combine.
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

/// A load or store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    /// Bytes of one element: 1, 2, 4, 8 or 16.
    pub(crate) unit: u8,
    /// Elements.
    pub(crate) count: u8,
    pub(crate) signed: bool,
    pub(crate) offset: i64,
    /// `.acquire`, `.release`, `.volatile` and so on: synchronises, never races.
    pub(crate) strong: bool,
}

/// Atomic operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AtomOp {
    And,
    Or,
    Xor,
    Exch,
    Add,
    Inc,
    Dec,
    Min,
    Max,
    Cas,
}

/// `atom` and `red`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Atom {
    pub(crate) op: AtomOp,
    pub(crate) ty: Ty,
    pub(crate) space: Space,
    pub(crate) offset: i64,
    pub(crate) count: u8,
    pub(crate) acquire: bool,
    pub(crate) release: bool,
}

/// `shfl.sync` modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shfl {
    Up,
    Down,
    Bfly,
    Idx,
}

/// `vote.sync` modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

/// What an asynchronous copy announces its completion to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Completion {
    Mbarrier,
    BulkGroup,
}

/// Directions of `cp.async.bulk` and its tensor and reducing forms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Route {
    GlobalToShared,
    SharedToGlobal,
    SharedToCluster,
    /// L2 prefetch: checked, moves nothing.
    Prefetch,
}

/// `cp.async.bulk…`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bulk {
    pub(crate) route: Route,
    /// Tensor dimensions; 0 for the plain form.
    pub(crate) dims: u8,
    pub(crate) multicast: bool,
    pub(crate) reduce: Option<(AtomOp, Ty)>,
    pub(crate) completion: Completion,
    /// `.cta_group::2`: the barrier may live in the peer.
    pub(crate) pair: bool,
    /// Into `shared::cta`: the own block's, barrier included.
    pub(crate) own: bool,
    pub(crate) dst_offset: i64,
    pub(crate) src_offset: i64,
    pub(crate) bar_offset: i64,
}

/// mbarrier operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MbarOp {
    Init,
    Inval,
    /// `arrive`, with or without `.expect_tx`; `.drop`; `.noComplete`.
    Arrive {
        expect: bool,
        drop: bool,
        no_complete: bool,
    },
    ExpectTx,
    CompleteTx,
    Test {
        parity: bool,
        may_block: bool,
    },
    PendingCount,
    /// `cp.async.mbarrier.arrive`.
    CpAsyncArrive {
        no_inc: bool,
    },
}

/// One mbarrier instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mbar {
    pub(crate) op: MbarOp,
    pub(crate) space: Space,
    pub(crate) offset: i64,
    pub(crate) relaxed: bool,
}

/// Element types of matrix operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) enum Elem {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    S8,
    U8,
    F32,
    S32,
    E2m3,
    E3m2,
    E2m1,
}

/// `wgmma.mma_async`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wgmma {
    pub(crate) n: u16,
    pub(crate) k: u8,
    pub(crate) a: Elem,
    pub(crate) b: Elem,
    pub(crate) d: Elem,
    /// A from registers.
    pub(crate) a_regs: bool,
    pub(crate) neg_a: bool,
    pub(crate) neg_b: bool,
    pub(crate) trans_a: bool,
    pub(crate) trans_b: bool,
    /// The scale-d operand as a constant, when it is none of the registers.
    pub(crate) scale_d: Option<bool>,
}

/// `mma.sync`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mma {
    pub(crate) n: u8,
    pub(crate) k: u8,
    pub(crate) a: Elem,
    pub(crate) b: Elem,
    pub(crate) d: Elem,
    pub(crate) c: Elem,
}

/// tcgen05 data paths of `ld` and `st`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TmemShape {
    L32x32b,
    L16x64b,
    L16x128b,
    L16x256b,
    L16x32bx2,
}

/// tcgen05 instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tcgen {
    Alloc,
    Dealloc,
    Relinquish,
    Ld {
        shape: TmemShape,
        repeat: u16,
        pack16: bool,
    },
    St {
        shape: TmemShape,
        repeat: u16,
        pack16: bool,
    },
    WaitLd,
    WaitSt,
    /// `a_tmem`: A from tensor memory.
    Mma {
        a_tmem: bool,
        kind: MmaKind,
    },
    Commit {
        multicast: bool,
    },
    Cp {
        shape: CpShape,
    },
    Shift,
    FenceBefore,
    FenceAfter,
}

/// tcgen05.mma kinds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MmaKind {
    F16,
    Tf32,
    F8f6f4,
}

/// tcgen05.cp shapes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CpShape {
    L128x256b,
    L4x256b,
    L128x128b,
    L64x128bWarpx2First,
    L64x128bWarpx2Second,
    L32x128bWarpx4,
}

/// What an instruction does. Registers stand in [`Inst`].
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
        /// Of a product first: its lower or its upper half.
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
    /// Where dynamic shared memory begins.
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
