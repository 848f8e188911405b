//! Number of parts of a kv head's queries in deterministic calls, by a rule that does not depend on the batch.

use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, MaskKind, QLayout};

use super::cost;
use super::schedule::lengths_of_whole;
use super::tile::Sm90BwdTile;

/// Fewest heads per sequence that a deterministic call aims at by dividing its kv heads into parts; the next
/// constants are the fewest queries and keys for it.
const ORDERED_HEADS: u32 = 8;
const LEAST_KEYS_IN_PARTS: u32 = 4096;

/// Heads that a packed one has at most, where it has fewer than [`ORDERED_HEADS`]; and the tiles up to which
/// its parts may have half of the steps that repay the sums, else twice as many. By the sequence's own
/// length, so that a batch that fills the multiprocessors loses little by it. An H200, in one part, in parts
/// of half of these steps, and of twice as many: B8 H5/1 of 130 to 768 143, 76 and 143 us, B4 H48/3 causal of
/// 105 to 376 225, 96 and 142, but B8 H48/3 causal of 384 to 1920 1138, 978 and 837, and of eight kv heads
/// B64 H64/8 of 27 to 209 352, 420 and 352.
const PACKED_HEADS: u32 = 16;
pub(super) const FEW_TILES: u32 = 64;

/// Tiles that a sequence is to have, as far as each keeps the steps that repay its sums
/// ([`cost::least_steps_of_part`]): a batch of many is slower by its sums alone, a batch of one faster by as
/// much as multiprocessors were idle. An H200, in parts whatever their steps (48 tiles for fewer than 32) and
/// so: B32 H40/8 S64 D128 169 and 77 us, B16 H40/8 S64/355 D160 349 and 127, B3 H16/1 S448 D256 in a window
/// 335 and 100, B1 H32/2 S1024 causal 167 and 113; but B16 H15/3 S1792 D64 1109 and 1185. Behind a mask twice
/// as many, whose longest is twice the average, where steps are half as many again; and of fewer than that
/// four times as many, where steps are [`MANY_STEPS`] of what repays the sums.
const ORDERED_TILES: u32 = 64;
const MANY_STEPS: u32 = 6;

impl Sm90BwdTile {
    /// Number of parts in a deterministic call. It depends on the heads and the lengths, never on the batch, so
    /// that a sequence has equal bits in any batch. For packed sequences it is that of the longest; the device uses
    /// each sequence's own (`has_own_parts`). Long sequences get enough parts for eight heads, one of which is
    /// processed in the opposite direction; equal lengths get enough for [`ORDERED_TILES`].
    pub(super) fn ordered_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> u32 {
        let dims = problem.fwd.dims;
        if problem.fwd.layout.q == QLayout::Packed {
            let (most, least) = self.parts_of_packed(problem, spec);
            return parts_of_queries(dims.seqlen_q, most, least);
        }
        let of_tiles = self.parts_for_tiles(problem, spec, [dims.seqlen_q, dims.seqlen_k]);
        let [seqlen_q, seqlen_k] = lengths_of_whole(problem);
        let is_long = seqlen_q.min(seqlen_k) >= LEAST_KEYS_IN_PARTS;
        if is_long { of_tiles.max(self.parts_of_long(problem, spec, num_sms)) } else { of_tiles }
    }

    /// The most parts of a packed sequence, and the fewest queries of a part, whatever the batch.
    pub(super) fn parts_of_packed(&self, problem: &BwdProblem, spec: &BwdSpec) -> (u32, u32) {
        let ratio = problem.fwd.gqa_ratio();
        let heads = problem.fwd.dims.num_heads_kv.max(1);
        let mut most =
            if heads < ORDERED_HEADS { divisor_from(ratio, PACKED_HEADS.div_ceil(heads)) } else { 1 };
        let rows = cost::least_steps_of_part(self, spec) * self.block_m.unsigned_abs() / 2;
        // Under a window a key is seen by at most as many queries as the window is wide.
        let bounds = problem.fwd.mask.bounds();
        if let (Some(lo), Some(hi)) = (bounds.lo, bounds.hi) {
            let width = u32::try_from((hi - lo).max(0)).unwrap_or(u32::MAX);
            most = parts_of_queries(width, most, rows.div_ceil(ratio.max(1)));
        }
        let is_full = problem.fwd.mask.kind() == MaskKind::Full;
        (most, (rows * if is_full { 1 } else { 2 }).div_ceil(ratio.max(1)))
    }

    /// Number of parts in a row-invariant plan. It depends on the number of heads alone, so it is the same for all
    /// lengths, and gives a sequence eight heads.
    #[must_use]
    pub(super) fn parts_in_row_order(problem: &BwdProblem) -> u32 {
        let kv_heads = problem.fwd.dims.num_heads_kv.max(1);
        divisor_from(problem.fwd.gqa_ratio(), ORDERED_HEADS.div_ceil(kv_heads))
    }

    /// Number of parts that gives a long sequence eight heads.
    fn parts_of_long(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> u32 {
        let ratio = problem.fwd.gqa_ratio();
        let kv_heads = problem.fwd.dims.num_heads_kv.max(1);
        let of_heads = divisor_from(ratio, ORDERED_HEADS.div_ceil(kv_heads));
        match problem.fwd.mask.kind() {
            // In a window a key has few queries, so parts would be too short.
            MaskKind::Band => 1,
            MaskKind::Upper => of_heads,
            // All key blocks are equally long, and more heads are only needed so that groups fill the
            // multiprocessors.
            MaskKind::Full => {
                let rounds = |parts: u32| {
                    let (groups, heads) = self.ordered_groups(problem, spec, num_sms, parts);
                    f64::from(groups) / f64::from(heads)
                };
                if rounds(of_heads) <= 0.85 * rounds(1) { of_heads } else { 1 }
            }
        }
    }

    /// Number of parts with which a sequence of these lengths has [`ORDERED_TILES`] tiles, each with enough steps
    /// to repay its sums.
    fn parts_for_tiles(&self, problem: &BwdProblem, spec: &BwdSpec, [seqlen_q, seqlen_k]: [u32; 2]) -> u32 {
        let ratio = problem.fwd.gqa_ratio();
        let key_blocks = seqlen_k.div_ceil(self.block_n.unsigned_abs()).max(1);
        let tiles = key_blocks.saturating_mul(problem.fwd.dims.num_heads_kv.max(1));
        let band = problem.fwd.mask.band(seqlen_q, seqlen_k);
        let (q, k) = (i64::from(seqlen_q), i64::from(seqlen_k));
        let is_full = problem.fwd.mask.kind() == MaskKind::Full;
        // Average number of queries that see a key.
        let rows = if is_full {
            q
        } else if q > k {
            k / 2
        } else {
            q - q * q / (2 * k).max(1)
        };
        let width = (band.hi - band.lo).max(0);
        let steps = rows.min(width) / i64::from(self.block_m)
            + i64::from(!is_full || q % i64::from(self.block_m) > 0);
        let least = i64::from(cost::least_steps_of_part(self, spec));
        let of = |wanted: u32, least: i64| {
            let mut parts = divisor_from(ratio, wanted.div_ceil(tiles));
            while parts > 1 && !(ratio.is_multiple_of(parts) && steps * i64::from(ratio / parts) >= least) {
                parts -= 1;
            }
            parts
        };
        let mut parts = of(ORDERED_TILES, least);
        if !is_full {
            parts = parts.max(of(2 * ORDERED_TILES, least + least / 2));
        }
        if tiles < 2 * ORDERED_TILES {
            parts = parts.max(of(4 * ORDERED_TILES, i64::from(MANY_STEPS) * least));
        }
        parts
    }
}

/// The device's rule (`num_head_parts`) if tiles are few: the most parts, halved until each has this many queries.
fn parts_of_queries(queries: u32, most: u32, least: u32) -> u32 {
    let mut parts = most;
    while parts > 1 && u64::from(queries) < u64::from(least) * u64::from(parts) {
        parts = fewer_parts(parts);
    }
    parts
}

/// Half of the parts if that divides the GQA ratio too, otherwise one.
const fn fewer_parts(parts: u32) -> u32 {
    if parts.is_multiple_of(2) { parts / 2 } else { 1 }
}

/// The smallest divisor of a GQA ratio that is at least `wanted`, or the ratio itself.
fn divisor_from(ratio: u32, wanted: u32) -> u32 {
    (1..ratio).find(|&parts| ratio.is_multiple_of(parts) && parts >= wanted).unwrap_or(ratio)
}
