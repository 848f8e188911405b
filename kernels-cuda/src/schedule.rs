//! The order of tiles in persistent kernels' schedulers, for every architecture.

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _};
use fmha_core::source::Header;
use fmha_core::{FwdProblem, MaskKind, abi_enum, abi_struct};

use crate::tile_list;

/// How tiles are assigned to CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileOrder {
    /// A CTA has one tile; the hardware starts CTAs in the order of the tiles.
    Single,
    /// One CTA runs on each SM; tile t goes to CTA t mod CTAs, in every second round in reverse order.
    Static,
    /// One CTA runs on each SM; an atomic counter gives it its next tile index: 4 bytes of workspace, zeroed before
    /// each launch.
    Dynamic,
}

abi_enum!(TileOrder { Single, Static, Dynamic });

abi_struct! {
    /// The order of tiles, a kernel argument.
    pub struct TileSchedule {
        /// `num_heads * num_m_blocks`.
        pub num_tiles: i32,
        /// Number of row blocks of the longest sequence, or of pairs of row blocks if a cluster has two.
        pub num_m_blocks: i32,
        /// First row block of the launch, if it computes only some.
        pub first_m_block: i32,
        /// Number of heads in the schedule: sequences times heads, times the parts of their keys. Heads are query heads
        /// (pairs of them if a cluster has two), or kv heads if query heads are packed.
        pub num_heads: i32,
        /// Heads of an L2 head group. Its tiles run before the next group's, so that their K and V stay in the L2.
        pub heads_per_l2_group: i32,
    }
}

/// Bytes of K and V that one L2 head group may have. The L2 has 60 MiB in two halves, each of which holds copies of the
/// other's data.
pub const L2_GROUP_BYTES: i64 = 32 << 20;

/// Query rows and heads of one unit of the schedule (a CTA, or a cluster).
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitOfWork {
    /// Query rows, of all the unit's CTAs.
    pub(crate) rows: i32,
    /// Number of neighbouring query heads that the unit computes.
    pub(crate) heads: i32,
    /// Whether rows are (query, head of a kv head's group) pairs.
    pub(crate) pack_gqa: bool,
    /// Number of parts into which a sequence's keys are divided; each is a unit's work.
    pub(crate) kv_parts: i32,
}

/// Number of tiles whose indices a CTA holds at a time: the tile being computed, its predecessor, whose O is being
/// stored, and its successor. With two, a tile of one block could wait for itself.
pub(crate) const WORK_SLOTS: i32 = 3;
/// Bytes of the scheduler's record of a tile, the device's `Work`.
pub(crate) const WORK_BYTES: i32 = 19 * 4;

/// Word of the workspace where a launch with shares records how they were assigned, for the merging launch
/// (`common/shares.cuh`); it follows the tile counter's cache line.
pub(crate) const SHARES_AT: u64 = 64;
/// Number of words at [`SHARES_AT`] before those of each sequence.
pub(crate) const SHARES_HEADER: u64 = 2;
/// Alignment of the addresses where CTAs store merged parts; they follow [`SHARES_AT`], which such a launch does
/// not use.
pub(crate) const FOLD_ALIGN: u64 = 128;

/// Most tiles of a schedule. The atomic counter runs past the last tile by one index for each CTA, and a tile
/// may be two CTAs: both stay below 2^31.
pub const MAX_TILES: i64 = (1 << 30) - (1 << 16);

impl TileSchedule {
    /// Schedule of a problem's maximal lengths.
    ///
    /// # Errors
    /// More than [`MAX_TILES`] tiles, with the fields that cause them.
    pub(crate) fn new(problem: &FwdProblem, unit: UnitOfWork) -> Result<Self, String> {
        let dims = problem.dims;
        let ratio = if unit.pack_gqa { i64::from(problem.gqa_ratio()) } else { 1 };
        let rows = i64::from(dims.seqlen_q) * ratio;
        let unit_rows = i64::from(unit.rows);
        let num_m_blocks = rows.div_euclid(unit_rows) + i64::from(rows.rem_euclid(unit_rows) != 0);
        let kv_parts = i64::from(unit.kv_parts);
        let heads = i64::from(dims.batch) * i64::from(dims.num_heads_q) / ratio / i64::from(unit.heads);
        let num_heads = heads.saturating_mul(kv_parts);
        let kv_bytes = i64::from(dims.seqlen_k).div_euclid(kv_parts)
            * i64::from(dims.head_dim_qk + dims.head_dim_v)
            * problem.dtypes.qk.size_bytes() as i64;
        // Adjacent query heads of one kv head share its K and V.
        let sharing = if unit.pack_gqa { 1 } else { i64::from(problem.gqa_ratio()) / i64::from(unit.heads) };
        // Tiles without a mask are equally long: the row blocks of a head run at the same time and share its K and V.
        let masked = tile_list::band_of_tiles(problem).kind() != MaskKind::Full;
        let group_bytes = if masked { L2_GROUP_BYTES } else { 0 };
        let heads_per_l2_group = heads_per_l2_group(num_heads, kv_bytes, sharing, group_bytes);
        let num_tiles = num_heads.saturating_mul(num_m_blocks);
        if num_tiles > MAX_TILES {
            return Err(format!(
                "seqlen_q {}, num_heads_q {} and batch {} make {num_tiles} tiles, more than {MAX_TILES}",
                dims.seqlen_q, dims.num_heads_q, dims.batch
            ));
        }
        Ok(Self {
            num_tiles: num_tiles as i32,
            num_m_blocks: num_m_blocks as i32,
            first_m_block: 0,
            num_heads: num_heads as i32,
            heads_per_l2_group: heads_per_l2_group as i32,
        })
    }
}

impl TileSchedule {
    /// Schedule of `count` row blocks from `first` on, or of all that remain if there are fewer.
    #[must_use]
    pub fn of_blocks(&self, first: i32, count: i32) -> Self {
        let num_m_blocks = count.min(self.num_m_blocks - first).max(0);
        Self { num_tiles: self.num_heads * num_m_blocks, num_m_blocks, first_m_block: first, ..*self }
    }

    /// Bytes of the counter that gives tile indices to this many CTAs (or clusters). 0 if each CTA has at most one
    /// tile: a run then has no counter to clear, which saves a step of its stream.
    #[must_use]
    pub fn counter_bytes(&self, order: TileOrder, workers: u32) -> u64 {
        let claims = order == TileOrder::Dynamic && self.num_tiles.unsigned_abs() > workers;
        if claims { 4 } else { 0 }
    }
}

/// The largest count of heads that fit `group_bytes`, where tiles of a head share `head_bytes`, a multiple of `sharing`
/// where possible and as even over the groups as can be: a short last group leaves SMs idle.
pub(crate) fn heads_per_l2_group(num_heads: i64, head_bytes: i64, sharing: i64, group_bytes: i64) -> i64 {
    // Groups of more than 32 heads make their first tiles compete for the memory: 512 causal, 337 with 128, 359 with
    // 32.
    let fitting =
        (group_bytes / head_bytes.max(1)).clamp(1, 32).saturating_mul(sharing).min(num_heads).max(1);
    // Groups that divide the heads evenly are preferred: 32 heads in groups of 5 (and one of 2) run at 757 TFLOP/s,
    // in groups of 4 or 8 at 785 (D 192 causal, 8k).
    let whole = |heads: &i64| num_heads % heads == 0 && heads % sharing == 0;
    if let Some(heads) = (fitting / 2 + 1..=fitting).rev().find(whole) {
        return heads;
    }
    let groups = (num_heads + fitting - 1) / fitting;
    let even = (num_heads + groups - 1) / groups;
    (even + sharing - 1) / sharing * sharing
}

/// `fmha/tile_schedule.h`: the types and constants that this file shares with the device.
pub(crate) fn header() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha {{\n\n{}\n{}\n\
         // Tiles that a CTA knows at a time, and the bytes of what it knows of each (Work).\n\
         constexpr int kWorkSlots = {WORK_SLOTS};\nconstexpr int kWorkBytes = {WORK_BYTES};\n\n\
         // Words of the workspace before those that say how shares were dealt, and of these before each sequence's.\n\
         constexpr int kSharesAt = {SHARES_AT};\nconstexpr int kSharesHeader = {SHARES_HEADER};\n\n\
         // Bytes of which the address behind those words is a multiple where CTAs' folds begin.\n\
         constexpr int kFoldAlign = {FOLD_ALIGN};\n\n}}  // namespace fmha\n",
        TileOrder::c_definition(),
        TileSchedule::c_definition()
    );
    Header::rendered("fmha/tile_schedule.h", text)
}
