//! Chooses the number of tiles that share a kv head's queries, each with a part of them: by the model, or for
//! deterministic calls by `ordered_parts`.

use fmha_core::spec::BwdSpec;
use fmha_core::tune::Candidates;
use fmha_core::{BwdProblem, MaskKind, QLayout};

use super::cost;
use super::tile::Sm90BwdTile;

/// Bytes of the sums of dK and dV that all parts of a call have. MQA 32/1 of 16k tokens, D 128, in eight parts has
/// 268 MB.
const MOST_SUMS_BYTES: u64 = 1 << 30;

/// Into how many parts a kv head's queries are divided, one for each tile that shares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadParts {
    /// Number of parts of a kv head's query heads: a divisor of the GQA ratio.
    pub heads: u32,
    /// Number of parts into which the query blocks of each part of the heads are divided.
    pub queries: u32,
}

impl Sm90BwdTile {
    /// Whether tiles should share a kv head's queries: if the [model](Self::head_parts_candidates) rates that
    /// faster. Deterministic calls have a rule of their own, which does not depend on the batch.
    #[must_use]
    pub fn wants_head_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> bool {
        let parts = self.parts(problem, spec, num_sms);
        parts.heads * parts.queries > 1
    }

    pub(super) fn num_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> HeadParts {
        let one = HeadParts { heads: 1, queries: 1 };
        if !self.head_parts {
            return one;
        }
        let best = self.parts(problem, spec, num_sms);
        // A tile with `head_parts` set takes the cheapest number of parts.
        let modelled = self.head_parts_candidates(problem, spec, num_sms);
        let shared = modelled.iter().filter(|candidate| candidate.choice != one);
        let cheapest = shared.min_by(|a, b| a.micros.total_cmp(&b.micros)).map(|candidate| candidate.choice);
        if best == one { cheapest.unwrap_or(one) } else { best }
    }

    /// Number of parts by the model, or by the rule if the lengths are unknown.
    fn parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> HeadParts {
        let of_heads = |heads| HeadParts { heads, queries: 1 };
        if spec.deterministic {
            return of_heads(self.ordered_parts(problem, spec, num_sms));
        }
        let modelled = self.head_parts_candidates(problem, spec, num_sms);
        let by_rule = || of_heads(self.parts_by_rule(problem, spec, num_sms));
        modelled.cheapest(cost::least_gain(problem)).map_or_else(by_rule, |best| best.choice)
    }

    /// Candidates for the number of parts of a kv head's queries, with the model's cost of each; the first is
    /// the rule's. Empty for deterministic calls.
    #[must_use]
    pub fn head_parts_candidates(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        num_sms: u32,
    ) -> Candidates<HeadParts> {
        if spec.deterministic || num_sms == 0 {
            return Candidates::default();
        }
        let ratio = problem.fwd.gqa_ratio();
        let tiles = self.tiles_of_all_heads(problem);
        let by_rule = self.parts_by_rule(problem, spec, num_sms);
        // Many tiles fill the multiprocessors without parts. A main kernel that finishes dQ needs whole heads.
        let is_packed = problem.fwd.layout.q == QLayout::Packed;
        let share = if is_packed { cost::PACKED_SHARE } else { 1.0 };
        let with_work = share * tiles as f64 * f64::from(ratio);
        let few_tiles = tiles > 0 && with_work < 4.0 * f64::from(num_sms) && !self.finishes_dq();
        let queries: &[u32] = match problem.fwd.mask.kind() {
            _ if !few_tiles => &[1],
            // Times on an H200 with one part, two and four: B2 H2 D168 of 2734 and 8736 918, 888 and 842 us; behind a
            // mask B2 H3 D64 of 2560 and 3200 81, 78 and more, B2 H8 of 1001 and 1280 70 and 87; B8 H5/1 of 130 to 768
            // in five parts and ten 59 and 69.
            MaskKind::Full if is_packed && ratio == 1 => &[1, 4],
            _ if is_packed => &[1],
            _ => &[1, 2, 3, 4],
        };
        let heads = std::iter::once(by_rule)
            .chain((1..=ratio).filter(|&parts| parts != by_rule && ratio.is_multiple_of(parts)));
        let parts = heads
            .flat_map(|heads| queries.iter().map(move |&queries| HeadParts { heads, queries }))
            .filter(|parts| self.has_room_for_sums(problem, spec, parts));
        cost::head_parts(self, problem, spec, num_sms, parts)
    }

    /// Modelled microseconds of the main kernel if `parts` tiles share a kv head's query heads; `parts` divides the
    /// GQA ratio.
    #[must_use]
    pub fn model_of_head_parts(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32, parts: u32) -> f64 {
        cost::of_parts(self, problem, spec, num_sms, HeadParts { heads: parts, queries: 1 })
    }

    fn tiles_of_all_heads(&self, problem: &BwdProblem) -> u64 {
        let dims = problem.fwd.dims;
        let keys = u64::from(dims.seqlen_k.div_ceil(self.block_n.unsigned_abs()));
        keys * u64::from(dims.num_heads_kv) * u64::from(dims.batch)
    }

    /// Whether the separate sums of dK and dV of each part take little enough memory. One part needs no such sums.
    fn has_room_for_sums(&self, problem: &BwdProblem, spec: &BwdSpec, parts: &HeadParts) -> bool {
        let parts = u64::from(parts.heads) * u64::from(parts.queries);
        let tiles = self.tiles_of_all_heads(problem).saturating_mul(parts);
        parts == 1 || tiles.saturating_mul(self.sums_of_tile(spec)) <= MOST_SUMS_BYTES
    }

    /// Number of parts of a kv head's query heads, by a rule: equal parts, such that each multiprocessor has about
    /// three tiles, or four under a mask, where tiles differ in length. One part if a call has enough tiles, or the
    /// parts' sums take too many bytes. MQA 32/1, S 8192, causal: 2, 4 and 8 parts run at 522, 569 and 596 TFLOP/s;
    /// full, S 4096: 4 and 8 parts at 616 and 592.
    fn parts_by_rule(&self, problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> u32 {
        let ratio = problem.fwd.gqa_ratio();
        let of_call = self.tiles_of_all_heads(problem);
        if of_call >= 2 * u64::from(num_sms) {
            return 1;
        }
        let tiles = if problem.fwd.mask.kind() == MaskKind::Full { 3 } else { 4 };
        let wanted = (tiles * u64::from(num_sms)).div_ceil(of_call.max(1));
        let divides = |&parts: &u32| ratio.is_multiple_of(parts) && u64::from(parts) >= wanted;
        let heads = (1..ratio).find(divides).unwrap_or(ratio);
        let has_room = self.has_room_for_sums(problem, spec, &HeadParts { heads, queries: 1 });
        if has_room { heads } else { 1 }
    }
}
