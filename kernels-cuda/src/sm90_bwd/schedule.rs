//! Division of a problem's work into tiles, and the order in which key blocks run.

use fmha_core::abi::DevPtr;
use fmha_core::spec::BwdSpec;
use fmha_core::{Bias, BwdProblem, MaskKind, QLayout, Refusal, abi_struct};

use super::NAME;
use super::head_parts::HeadParts;
use super::ordered_parts::FEW_TILES;
use super::spec::padded_dim;
use super::tile::Sm90BwdTile;
use crate::schedule::{L2_GROUP_BYTES, heads_per_l2_group};
use crate::tile_list;

abi_struct! {
    /// How the work is divided among CTAs, as an argument of the kernels.
    pub struct Sm90BwdSchedule {
        /// Number of tiles: key blocks of all kv heads of all sequences.
        pub num_tiles: i32,
        /// Number of key blocks of the longest sequence.
        pub num_key_blocks: i32,
        /// Number of heads in the schedule: sequences times kv heads.
        pub num_heads: i32,
        /// Heads of an L2 head group. Its tiles run before the next group's, so that their Q, dO and sums of dQ
        /// stay in the L2.
        pub heads_per_l2_group: i32,
        /// Number of query blocks of the longest sequence.
        pub num_q_blocks: i32,
        /// Number of blocks of dBias, over the axes that it has; 0 if dBias is not wanted.
        pub num_bias_blocks: i32,
        /// Number of multiprocessors, and so of CTAs that run at a time.
        pub num_sms: i32,
        /// Number of parts of a kv head's query heads, if tiles share them.
        pub num_head_parts: i32,
        /// Number of parts into which the query blocks of each part of the heads are divided.
        pub num_query_parts: i32,
        /// Fewest queries of a part, for packed sequences with ordered additions, where the number of parts depends
        /// on the sequence's own queries: this number if a kv head has few tiles, otherwise four times as many.
        pub least_queries_of_part: i32,
        /// Number of a kv head's parts whose walks have one direction, with ordered additions under a mask: a
        /// divisor of its parts.
        pub parts_together: i32,
        /// Padding that aligns the address below.
        pub reserved: i32,
        /// Most key blocks, of all parts of a kv head, that count as few tiles.
        pub few_tiles_of_head: i32,
        /// Period of heads with ordered additions to dQ: of this many heads, the key blocks of one are launched
        /// together with those of other such heads, and under a mask walk their queries from the last to the first.
        /// Without a mask the period is 1 (all heads) or 0 (none).
        pub side_by_side_period: i32,
        /// Number of heads walked from the last query that are launched together under a mask.
        pub side_by_side_heads: i32,
        /// Number of key blocks (of clusters) that run at a time and begin their walks at different query blocks,
        /// with ordered additions and no mask; 0: the number follows from a packed sequence's own length.
        pub key_blocks_in_group: i32,
        /// Query heads of all sequences whose rows preprocess handles: all of them, unless the main kernel computes
        /// delta.
        pub num_first_query_heads: i32,
        /// Number of query blocks of the heads that `num_first_query_heads` counts.
        pub num_first_q_blocks: i32,
        /// Sums of dK and dV in f32, with `head_parts`; with ordered additions also the counters of each of a
        /// tile's consumer warps. Set at each run.
        pub head_sums: DevPtr<f32>,
    }
}

/// Period of heads with ordered additions under a mask, for packed and for long sequences: one head of this many
/// walks from the last query to the first.
const SIDE_BY_SIDE_PERIOD: u32 = 8;

/// Period of heads for short sequences: half of the heads walk from the last query to the first, and their longest
/// key blocks begin when the other heads' shortest ones end. Rates by a simulation of the order, relative to no
/// order, with one head of eight and one of two: B1 H40/8 S4224 D128 0.66 and 1.0 (measured with one of eight
/// 0.74), B2 H16/8 S1792 D64 0.69 and 1.0 (0.71), B1 H16/8 S2008 D256 0.69 and 1.0 (0.73).
const SHORT_PERIOD: u32 = 2;

/// Most bytes of Q, dO and the sums of dQ in half of a short sequence's heads. They must stay in the L2, since key
/// blocks of heads that run together reach a query block at very different times. B3 H48/24 packed, S 3520 to 6912,
/// D 128, an H100, with half of the heads upward 0.76 of the rate without order.
const SHORT_BYTES: i64 = 20 << 20;

/// Least number of heads side by side where half of the heads go upward, since key blocks that begin together
/// wait for each other at their first query block.
const LEAST_SIDE_BY_SIDE: i64 = 16;

/// Bytes of Q, dO and the sums of dQ for heads whose groups of ordered key blocks run together without a mask, such
/// that they fit the L2.
const ORDERED_L2_BYTES: i64 = 40 << 20;

/// Most kv heads (or parts with one direction) for which half walk upward in a row-invariant plan.
const FEW_HEADS: u32 = 8;

/// Period of heads in a row-invariant plan: the direction in which a kv head's key blocks add depends only on the
/// head's index and the number of kv heads, for calls of any lengths. If heads are few, half of them walk upward,
/// so that none of their longest key blocks runs last; otherwise a quarter of them, which share the L2. Rates by a
/// simulation of the order, relative to no order, causal, of 4096 and 8192 queries and keys of D 128: 8 heads with
/// a period of two 1.0 and 0.93, of four 0.72 and 0.94, of eight 0.72 and 0.86; 16 heads 0.93 and 0.98, 0.94 and
/// 0.97, 0.84 and 0.97.
const ROW_PERIOD: u32 = 4;

/// Number of upward heads that run together: as many of `upward` as fit the L2 with `head_bytes` of Q, dO and sums
/// of dQ each. `together`: parts of a head with one direction.
fn near_heads(upward: i64, head_bytes: i64, together: i64) -> i64 {
    let near = L2_GROUP_BYTES.checked_div(head_bytes).unwrap_or(upward).max(LEAST_SIDE_BY_SIDE);
    (near / together).max(1)
}

/// Size of the groups of equal size into which `all` heads are divided, at most `most` in each.
fn in_equal_groups(all: i64, most: i64) -> i64 {
    let groups = (all + most - 1).div_euclid(most);
    (all + groups - 1).div_euclid(groups)
}

impl Sm90BwdSchedule {
    /// Sets the order in which a row's additions depend on its head and its keys alone. `row_bytes`: bytes of a
    /// query's Q, dO and sums of dQ. Which heads run together changes no bits.
    fn take_row_order(&mut self, problem: &BwdProblem, row_bytes: i64) {
        let dims = problem.fwd.dims;
        let parts = self.num_head_parts.unsigned_abs();
        // A kv head's parts have one direction; only a single kv head has the opposite direction in the second half
        // of its parts. In packed calls parts add to dK and dV one after another, so a part that walks downward
        // must not follow one that walks upward.
        let together = if dims.num_heads_kv > 1 {
            parts
        } else if parts.is_multiple_of(2) {
            parts / 2
        } else {
            1
        };
        let heads = dims.num_heads_kv * (parts / together);
        let period = match (dims.num_heads_kv, parts) {
            (1, parts) if !parts.is_multiple_of(2) => parts,
            _ if heads <= FEW_HEADS => SHORT_PERIOD,
            _ => ROW_PERIOD,
        };
        let period = heads.clamp(1, period);
        let upward = i64::from(dims.batch) * i64::from(heads / period);
        let head_bytes = i64::from(dims.seqlen_q) * row_bytes;
        let near = near_heads(upward, head_bytes, together.into());
        self.parts_together = together as i32;
        // A sequence of any length has all parts, so no part needs a least number of queries.
        self.least_queries_of_part = 0;
        self.side_by_side_period = period as i32;
        self.side_by_side_heads = in_equal_groups(upward.max(1), near) as i32;
    }
}

/// The fields of the schedule that give the order of key blocks.
struct Order {
    heads_per_l2_group: i64,
    side_by_side_period: u32,
    side_by_side_heads: i64,
    key_blocks_in_group: u32,
}

impl Sm90BwdTile {
    /// Bytes of a query's Q and dO, and of its sums of dQ.
    pub(super) fn row_bytes(&self, spec: &BwdSpec) -> i64 {
        let dims = i64::from(spec.fwd.head_dim_qk + spec.fwd.head_dim_v);
        2 * dims + 4 * i64::from(padded_dim(spec))
    }

    /// Schedule of a problem.
    ///
    /// # Errors
    /// More tiles than a grid can have.
    pub fn schedule(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
    ) -> Result<Sm90BwdSchedule, Refusal> {
        self.schedule_in_parts(problem, spec, num_sms, self.num_parts(problem, spec, num_sms))
    }

    /// Schedule of a problem in a row-invariant plan.
    ///
    /// # Errors
    /// More tiles than a grid can have.
    pub(super) fn schedule_in_row_order(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
    ) -> Result<Sm90BwdSchedule, Refusal> {
        let heads = if self.head_parts { Self::parts_in_row_order(problem) } else { 1 };
        let mut schedule = self.schedule_in_parts(problem, spec, num_sms, HeadParts { heads, queries: 1 })?;
        schedule.take_row_order(problem, self.row_bytes(spec));
        Ok(schedule)
    }

    fn schedule_in_parts(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
        parts_of_heads: HeadParts,
    ) -> Result<Sm90BwdSchedule, Refusal> {
        let dims = problem.fwd.dims;
        let blocks = |rows: u32, block: i32| rows.div_ceil(block.unsigned_abs());
        let cluster = self.walk.cluster().unsigned_abs();
        let keys = blocks(dims.seqlen_k, self.block_n * self.walk.cluster()) * cluster;
        let queries = blocks(dims.seqlen_q, self.block_m);
        let count = |name: &str, blocks: u32, heads: u32| {
            let all = u64::from(blocks) * u64::from(heads) * u64::from(dims.batch);
            // The launches besides the main one have up to eight CTAs per block.
            i32::try_from(all).ok().filter(|&all| all < 1 << 28).ok_or_else(|| {
                Refusal::new(NAME, format!("{name}: {all} blocks of all heads are 2^28 or more"))
            })
        };
        count("seqlen_q", queries, dims.num_heads_q)?;
        let bias_shape = match (problem.dbias, problem.fwd.score.bias) {
            (Some(_), Bias::Elementwise(bias)) => Some(problem.fwd.shape_bias(bias.broadcast)),
            _ => None,
        };
        let bias_blocks = bias_shape.map_or(0, |shape| {
            u64::from(shape.batch) * u64::from(shape.head) * u64::from(keys) * u64::from(queries)
        });
        let num_bias_blocks = i32::try_from(bias_blocks)
            .map_err(|_| Refusal::new(NAME, format!("dbias: {bias_blocks} blocks of it are 2^31 or more")))?;
        let (_, least_queries_of_part) = self.parts_of_packed(problem, spec);
        let HeadParts { heads: parts, queries: query_parts } = parts_of_heads;
        let heads_of_sequence = dims.num_heads_kv * parts * query_parts;
        let num_heads = i64::from(dims.batch) * i64::from(heads_of_sequence);
        let order = self.order(problem, spec, num_sms, parts_of_heads);
        // Number of heads with which each multiprocessor has about two tiles.
        let least = i64::from(2 * num_sms).div_euclid(i64::from(keys.max(1))) + 1;
        // Number of heads that the first tiles of all CTAs belong to.
        let first_heads =
            if self.makes_delta() { order.heads_per_l2_group.max(least).min(num_heads) } else { num_heads };
        let first_query_heads =
            first_heads / i64::from(query_parts) * i64::from(problem.fwd.gqa_ratio() / parts);
        Ok(Sm90BwdSchedule {
            num_first_query_heads: first_query_heads as i32,
            num_first_q_blocks: (first_query_heads * i64::from(queries)) as i32,
            num_bias_blocks,
            num_heads: num_heads as i32,
            heads_per_l2_group: order.heads_per_l2_group as i32,
            num_tiles: count("seqlen_k", keys, heads_of_sequence)?,
            num_key_blocks: keys as i32,
            num_q_blocks: queries as i32,
            num_sms: num_sms as i32,
            num_head_parts: parts as i32,
            num_query_parts: query_parts as i32,
            // All parts of a packed sequence's kv head have one direction.
            parts_together: if spec.deterministic && problem.fwd.layout.q == QLayout::Packed {
                (parts * query_parts) as i32
            } else {
                1
            },
            reserved: 0,
            few_tiles_of_head: (FEW_TILES / dims.num_heads_kv.max(1)) as i32,
            least_queries_of_part: least_queries_of_part.min(1 << 30) as i32,
            side_by_side_period: order.side_by_side_period as i32,
            side_by_side_heads: order.side_by_side_heads as i32,
            key_blocks_in_group: order.key_blocks_in_group as i32,
            head_sums: DevPtr::NULL,
        })
    }

    /// Order in which key blocks run: by L2 head groups, and with ordered additions to dQ also by their order.
    fn order(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32, parts_of_heads: HeadParts) -> Order {
        let dims = problem.fwd.dims;
        let HeadParts { heads: parts, queries: query_parts } = parts_of_heads;
        let heads_of_sequence = dims.num_heads_kv * parts * query_parts;
        let num_heads = i64::from(dims.batch) * i64::from(heads_of_sequence);
        let cluster = self.walk.cluster().unsigned_abs();
        let key_blocks = dims.seqlen_k.div_ceil(self.block_n.unsigned_abs() * cluster);
        let queries = dims.seqlen_q.div_ceil(self.block_m.unsigned_abs());
        let in_l2 = self.heads_per_l2_group(problem, spec, num_sms, parts_of_heads);
        let is_packed = problem.fwd.layout.q == QLayout::Packed;
        // With ordered additions, the key blocks of one head that run at a time would wait for each other at each
        // of few query blocks, so key blocks of all heads run together. 64 queries over 11931 keys of D 256: 0.17
        // of the unordered rate otherwise.
        let at_a_time = (num_sms / cluster).max(1);
        let group = key_blocks.div_ceil(key_blocks.div_ceil(at_a_time).max(1));
        let is_side_by_side =
            spec.deterministic && !is_packed && spec.fwd.mask == MaskKind::Full && queries < group;
        // Same rule as the device's `place_in_order`. A part of a whole adds to dQ in the whole's order, and so has
        // equal bits.
        let [seqlen_q, seqlen_k] = lengths_of_whole(problem);
        let all_upward = !is_packed && u64::from(seqlen_q) * 2 < u64::from(seqlen_k);
        // Bytes of a query's row of Q and dO, and of the sums of dQ.
        let row_bytes = self.row_bytes(spec);
        let head_bytes = i64::from(dims.seqlen_q) * row_bytes;
        let side_by_side_bytes =
            i64::from(heads_of_sequence / SHORT_PERIOD) * i64::from(seqlen_q) * row_bytes;
        let is_short = !is_packed && side_by_side_bytes <= SHORT_BYTES;
        let side_by_side_period = match spec.fwd.mask {
            MaskKind::Full if is_side_by_side => 1,
            MaskKind::Full => SIDE_BY_SIDE_PERIOD,
            _ if all_upward => 1,
            // All parts of a packed sequence's kv head walk in the same direction.
            _ if is_packed => dims.num_heads_kv.clamp(1, SIDE_BY_SIDE_PERIOD),
            _ if is_short => heads_of_sequence.clamp(1, SHORT_PERIOD),
            _ => heads_of_sequence.clamp(1, SIDE_BY_SIDE_PERIOD),
        };
        let (mut key_blocks_in_group, mut side_by_side_heads) = (0, 0);
        let heads_per_l2_group = if is_side_by_side && self.waits_in_order(spec) {
            num_heads
        } else if !spec.deterministic {
            in_l2
        } else if spec.fwd.mask != MaskKind::Full {
            let parts_together = if is_packed { i64::from(parts) } else { 1 };
            let upward = (num_heads / parts_together / i64::from(side_by_side_period.max(1))).max(1);
            let near = near_heads(upward, head_bytes, parts_together);
            let at_a_time = if side_by_side_period <= SHORT_PERIOD { near } else { upward };
            side_by_side_heads = in_equal_groups(upward, at_a_time);
            in_l2
        } else if is_packed {
            in_l2
        } else {
            let (groups, heads) = self.ordered_groups(problem, spec, num_sms, parts);
            key_blocks_in_group = key_blocks.div_ceil(groups.max(1));
            // Number of heads that run together, which changes no bits: as many heads of the batch as fit the L2.
            let of_batch = i64::from(at_a_time) / i64::from(key_blocks_in_group.max(1));
            let near = (ORDERED_L2_BYTES / head_bytes.max(1)).max(heads.into());
            if self.waits_in_order(spec) { of_batch.min(near).clamp(1, num_heads.max(1)) } else { in_l2 }
        };
        Order { heads_per_l2_group, side_by_side_period, side_by_side_heads, key_blocks_in_group }
    }

    /// Number of heads, or of parts of heads, whose tiles run before the next ones'.
    pub(super) fn heads_per_l2_group(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
        parts: HeadParts,
    ) -> i64 {
        let dims = problem.fwd.dims;
        let cluster_keys = (self.block_n * self.walk.cluster()).unsigned_abs();
        let keys = dims.seqlen_k.div_ceil(cluster_keys) * self.walk.cluster().unsigned_abs();
        // Under a mask key blocks differ in length, and the last head's longest would end alone; ordered additions
        // need a head's key blocks in sequence. Causal on an H200, a head at a time and in groups, TFLOP/s: D 128
        // 337, 344 at 1k, 518, 542 at 4k, 575, 600 at 8k, 633, 635 at 16k; D 64 484, 493 at 4k; D 256 337, 348 at
        // 2k. D 64 at 512 207, 201.
        let has_band = tile_list::band_of_tiles(&problem.fwd).kind() != MaskKind::Full;
        // With lists, ordered additions still run heads side by side.
        let may_group = !self.waits_in_order(spec) || tile_list::serve(&problem.fwd);
        let in_groups = has_band && may_group && dims.seqlen_k >= 1024;
        let heads_of_sequence = dims.num_heads_kv * parts.heads * parts.queries;
        let row_bytes = i64::from(dims.head_dim_qk) * 6 + i64::from(dims.head_dim_v) * 2;
        let head_bytes =
            i64::from(dims.seqlen_q) * i64::from(problem.fwd.gqa_ratio() / parts.heads) * row_bytes;
        // About two tiles per multiprocessor are needed, or the launch ends with the longest tiles of a few heads.
        let least = i64::from(2 * num_sms).div_euclid(i64::from(keys.max(1))) + 1;
        let group_bytes = if in_groups { L2_GROUP_BYTES.max(least * head_bytes) } else { 0 };
        let num_heads = i64::from(dims.batch) * i64::from(heads_of_sequence);
        heads_per_l2_group(num_heads, head_bytes, 1, group_bytes)
    }

    /// Groups of a deterministic call without a mask: the number of groups into which a head's key blocks (of
    /// clusters) are divided, which run one after another, and the number of heads whose groups run together. A
    /// head's 82 key blocks leave 50 of 132 multiprocessors to the next head, whose others have yet to run, and it
    /// waits for them: two groups of 41, three heads side by side, leave nine. Both numbers depend on the heads of
    /// a sequence, `parts` to a kv head, and not on the batch.
    pub(super) fn ordered_groups(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
        parts: u32,
    ) -> (u32, u32) {
        let dims = problem.fwd.dims;
        let cluster = self.walk.cluster().unsigned_abs();
        let units = (num_sms / cluster).max(1);
        let key_blocks = dims.seqlen_k.div_ceil(self.block_n.unsigned_abs() * cluster).max(1);
        // Bytes of Q and dO and of the sums of dQ: a tile needs those of one query head at a time.
        let head_bytes = i64::from(dims.seqlen_q) * i64::from(padded_dim(spec)) * 8;
        let near = u32::try_from(ORDERED_L2_BYTES / head_bytes.max(1)).unwrap_or(u32::MAX);
        let heads = (dims.num_heads_kv * parts).min(near).max(1);
        let least = key_blocks.div_ceil(units);
        let of = |groups: u32| {
            let side_by_side = (units / key_blocks.div_ceil(groups)).clamp(1, heads);
            (groups, side_by_side)
        };
        let rounds = |(groups, heads): (u32, u32)| f64::from(groups) / f64::from(heads);
        (least + 1..=key_blocks.min(least + 7)).fold(of(least), |best, groups| {
            if rounds(of(groups)) < 0.95 * rounds(best) { of(groups) } else { best }
        })
    }
}

/// Queries and keys of the whole sequence, if the call has a part of it.
pub(super) fn lengths_of_whole(problem: &BwdProblem) -> [u32; 2] {
    let dims = problem.fwd.dims;
    problem.fwd.part.seqlens.unwrap_or([dims.seqlen_q, dims.seqlen_k])
}
