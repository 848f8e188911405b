//! The Hopper forward kernel: its tile, its schedule, its entry.

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::{BiasKind, FwdSpec};
use fmha_core::{DType, MaskKind, Refusal, VLayout, abi_enum, abi_spec, abi_struct};

use crate::wgmma::{self, OperandA, WgmmaShape};

/// How CTAs come by their tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileOrder {
    /// One tile a CTA, in the hardware's order.
    Single,
    /// A CTA per SM; tile t goes to CTA t mod CTAs, every second round backwards.
    Static,
    /// A CTA per SM; tiles are drawn from a counter: 4 zero bytes of workspace, left zero again.
    Dynamic,
}

abi_enum!(TileOrder { Single, Static, Dynamic });

abi_spec! {
    /// How the kernel computes.
    pub struct Sm90Tile {
        /// Query rows of a CTA: 64, 128 or 192, 64 to a consumer warpgroup.
        pub block_m: i32,
        /// Keys of a block: a multiple of 16 up to 256.
        pub block_n: i32,
        /// Blocks of K, and of V, in shared memory at a time.
        pub stages: i32,
        /// How CTAs come by their tiles.
        pub order: TileOrder,
        /// Consumer warpgroups take turns at the tensor cores.
        pub ping_pong: bool,
        /// The next tile's first scores are started with this tile's last output; Q has two buffers.
        pub lookahead: bool,
        /// O is rescaled only when a maximum grew by more than this, in log2; 0: when it grew.
        pub lazy_rescale_log2: i32,
        /// How many of a thread's `block_n / 2` exponentials ptxas must place before the wait for
        /// `P V`; 0: where it likes.
        pub wait_anchor: i32,
        /// Every n-th exponential is a polynomial on the multiply-add pipe; 0: none.
        pub exp2_polynomial_every: i32,
        /// Rows are (query, head of a kv head's group) pairs, so that a short query fills a tile.
        pub pack_gqa: bool,
        /// O is stored 16 bytes at a time; else element by element.
        pub vector_store: bool,
    }
}

abi_struct! {
    /// The order of tiles, as the kernel's third argument.
    pub struct Sm90Schedule {
        /// `num_heads * num_m_blocks`.
        pub num_tiles: i32,
        /// Row blocks of the longest sequence.
        pub num_m_blocks: i32,
        /// Sequences times heads: query heads, or kv heads when they are packed.
        pub num_heads: i32,
        /// Of these, how many share the L2 at a time.
        pub heads_per_section: i32,
    }
}

/// Shared memory that one CTA can have, bytes.
pub const MAX_SMEM_BYTES: i32 = 232_448;

/// Bytes that a section's K and V may take of the L2. 60 MiB are there in two halves, and what one
/// half has the other copies.
pub const SECTION_BYTES: i64 = 32 << 20;

impl Sm90Tile {
    /// Consumer warpgroups.
    #[must_use]
    pub const fn num_consumers(&self) -> i32 {
        self.block_m / 64
    }

    /// Threads of a CTA.
    #[must_use]
    pub const fn num_threads(&self) -> i32 {
        128 * (1 + self.num_consumers())
    }

    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    #[must_use]
    pub const fn smem_bytes(&self, spec: &FwdSpec) -> i32 {
        let (qk, v) = (padded_dim(spec.head_dim_qk), padded_dim(spec.head_dim_v));
        let q_buffers = if self.lookahead { 2 } else { 1 };
        let q = q_buffers * tile_bytes(self.block_m, qk);
        let kv = self.stages * (tile_bytes(self.block_n, qk) + tile_bytes(self.block_n, v));
        let barriers = 8 * (2 * q_buffers + 4 * self.stages + 4);
        let work = 2 * 16 * 4;
        (q + kv + barriers + work + 1023) / 1024 * 1024
    }

    /// The order of tiles for a problem's maximal lengths.
    #[must_use]
    pub fn schedule(&self, problem: &fmha_core::FwdProblem) -> Sm90Schedule {
        let dims = problem.dims;
        let ratio = if self.pack_gqa { i64::from(problem.gqa_ratio()) } else { 1 };
        let rows = i64::from(dims.seqlen_q) * ratio;
        let num_m_blocks = rows.div_euclid(i64::from(self.block_m))
            + i64::from(rows.rem_euclid(i64::from(self.block_m)) != 0);
        let num_heads = i64::from(dims.batch) * i64::from(dims.num_heads_q) / ratio;
        let kv_bytes = i64::from(dims.seqlen_k)
            * i64::from(dims.head_dim_qk + dims.head_dim_v)
            * problem.dtype_qk.size_bytes() as i64;
        // Adjacent query heads of one kv head share its K and V.
        let sharing = if self.pack_gqa { 1 } else { i64::from(problem.gqa_ratio()) };
        let heads_per_section = heads_per_section(num_heads, kv_bytes, sharing);
        Sm90Schedule {
            num_tiles: (num_heads * num_m_blocks).try_into().unwrap_or(i32::MAX),
            num_m_blocks: num_m_blocks as i32,
            num_heads: num_heads as i32,
            heads_per_section: heads_per_section as i32,
        }
    }

    /// CTAs to launch.
    #[must_use]
    pub fn grid(&self, schedule: &Sm90Schedule, num_sms: u32) -> u32 {
        let tiles = schedule.num_tiles.max(1).unsigned_abs();
        if self.order == TileOrder::Single { tiles } else { tiles.min(num_sms) }
    }

    /// Workspace bytes, zero before the first launch.
    #[must_use]
    pub const fn workspace_bytes(&self) -> u64 {
        match self.order {
            TileOrder::Dynamic => 4,
            TileOrder::Single | TileOrder::Static => 0,
        }
    }

    /// The inner box of the tensor maps of Q and K (`head_dim_qk`) or V (`head_dim_v`), elements; twice
    /// that is the swizzle in bytes.
    #[must_use]
    pub const fn box_dim(head_dim: i32) -> i32 {
        swizzle_span(padded_dim(head_dim))
    }
}

/// The largest count of heads whose K and V fit a section, a multiple of `sharing` where possible and
/// as even over the sections as can be: a short last section leaves SMs idle.
fn heads_per_section(num_heads: i64, kv_bytes: i64, sharing: i64) -> i64 {
    let fitting = (SECTION_BYTES / kv_bytes.max(1)).max(1).saturating_mul(sharing).min(num_heads).max(1);
    let sections = (num_heads + fitting - 1) / fitting;
    let even = (num_heads + sections - 1) / sections;
    (even + sharing - 1) / sharing * sharing
}

/// A head dimension as the tiles have it; the copy engine fills the rest with zeros.
#[must_use]
pub const fn padded_dim(head_dim: i32) -> i32 {
    if head_dim <= 64 { 64 } else { (head_dim + 31) / 32 * 32 }
}

const fn swizzle_span(padded: i32) -> i32 {
    if padded % 64 == 0 { 64 } else { 32 }
}

const fn tile_bytes(rows: i32, padded: i32) -> i32 {
    (rows * padded * 2 + 1023) / 1024 * 1024
}

/// Whether the kernel computes this, and if not, why.
///
/// # Errors
/// The first fact that it does not take.
pub fn accepts(spec: &FwdSpec) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new("sm90", reason));
    if !matches!(spec.dtype_qk, DType::F16 | DType::Bf16) || spec.dtype_v != spec.dtype_qk {
        return refuse(format!(
            "dtype_qk {} with dtype_v {} is not f16 or bf16 twice",
            spec.dtype_qk, spec.dtype_v
        ));
    }
    if spec.dtype_o.is_fp8() {
        return refuse(format!("dtype_o {} is not f16, bf16 or f32", spec.dtype_o));
    }
    for (field, dim) in [("head_dim_qk", spec.head_dim_qk), ("head_dim_v", spec.head_dim_v)] {
        if dim > 256 {
            return refuse(format!("{field} {dim} is larger than 256"));
        }
    }
    if spec.v_layout != VLayout::RowMajor {
        return refuse("v_layout is column-major".to_owned());
    }
    if spec.dropout || spec.write_keep_mask {
        return refuse("p_drop is not 0: dropout is not compiled in".to_owned());
    }
    Ok(())
}

/// The tile for a spec, measured on an H200 where a figure stands.
///
/// `decode`: whether the query heads of a group fit into fewer tiles packed than apart.
#[must_use]
pub fn default_tile(spec: &FwdSpec) -> Sm90Tile {
    let (qk, v) = (padded_dim(spec.head_dim_qk), padded_dim(spec.head_dim_v));
    let full = spec.mask == MaskKind::Full;
    // (block_m, block_n, lookahead)
    let (block_m, block_n, lookahead) = match qk.max(v) {
        64 => (192, 128, true),
        96 => (128, 128, true),
        128 => (128, if full { 160 } else { 128 }, true),
        160 => (128, 112, false),
        192 if v <= 128 => (128, 128, false),
        192 => (128, 112, false),
        _ => (128, 80, false),
    };
    // The modifiers take registers.
    let modified = spec.softcap || spec.bias != BiasKind::None;
    Sm90Tile {
        block_m,
        block_n: if modified { block_n.min(if qk.max(v) > 192 { 64 } else { 96 }) } else { block_n },
        stages: 2,
        order: TileOrder::Static,
        ping_pong: qk.max(v) <= 128,
        lookahead: lookahead && !modified,
        lazy_rescale_log2: 8,
        wait_anchor: if full && qk == 128 && v == 128 && !modified { 40 } else { 0 },
        exp2_polynomial_every: 0,
        pack_gqa: false,
        vector_store: spec.dtype_o != DType::F32,
    }
}

/// The kernel for a spec and a tile. What it binds is in the crate's README.
#[must_use]
pub fn fwd(spec: &FwdSpec, tile: &Sm90Tile) -> KernelSource {
    let smem_assert = format!(
        "static_assert(sizeof(sm90::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); \
         sm90::fwd<kSpec, kTile>(p, maps, schedule);",
        tile.smem_bytes(spec)
    );
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: "fmha/sm90/fwd.cuh",
        constants: &constants,
        bounds: "__launch_bounds__(sm90::num_threads(kTile), 1)",
        params: "const __grid_constant__ FwdParams p, const __grid_constant__ sm90::Maps maps, \
                 const __grid_constant__ Sm90Schedule schedule",
        call: &smem_assert,
    };
    let shapes = [
        WgmmaShape { n: tile.block_n, a: OperandA::Shared },
        WgmmaShape { n: padded_dim(spec.head_dim_v), a: OperandA::Registers },
    ];
    let rendered = [wgmma::header(spec.dtype_qk, &shapes), host_header()];
    crate::source(entry.render(), rendered)
}

/// `fmha/sm90_host.h`: what this file shares with the device.
fn host_header() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha {{\n\n{}\n{}\n{}\n}}  // namespace fmha\n",
        TileOrder::c_definition(),
        Sm90Tile::c_definition(),
        Sm90Schedule::c_definition()
    );
    Header::rendered("fmha/sm90_host.h", text)
}
