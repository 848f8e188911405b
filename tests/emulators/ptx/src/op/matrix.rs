//! Matrix instructions and tensor memory.

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
    /// `a_tmem`: A from tensor memory; `shift`: whose rows are moved behind the product.
    Mma {
        a_tmem: bool,
        kind: MmaKind,
        shift: bool,
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
    Scaled(ScaledKind),
}

/// Kinds with a factor for each block of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ScaledKind {
    /// Elements of eight bits, `scale_vec::1X`.
    Mxf8f6f4,
    /// Elements of four bits, `scale_vec::2X`.
    Mxf4,
    /// Elements of four bits, `scale_vec::2X` or `4X`.
    Mxf4nvf4 { per_row: u8 },
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
