//! A call that is a part of a larger one: a range of queries, keys, sequences and heads.

use crate::dropout::{DropoutSeed, KeepMask};
use crate::error::{ProblemError, Refusal, ensure};
use crate::mask::{MaskAlign, MaskBand, MaskBounds};
use crate::problem::{FwdProblem, MAX_SEQLEN};

/// Position of a call's first query, key, sequence and head in a larger whole. Mask, ALiBi and dropout use the
/// positions of the whole, so a part has the same results as inside the whole. By default a call is the whole.
///
/// An elementwise bias and the keep mask cover only the call: the caller passes slices of the whole. Masks as data have
/// rows, sequences and heads of the call, and name keys of the whole: endpoints of intervals, indices of block lists
/// and places of bits count from its first key. Functions read the call's own places; [`Code::of_part`](crate::Code)
/// makes the whole's functions a part's.
///
/// ```
/// use fmha_core::{DType, Dims, FwdProblem, MaskSpec, Part};
///
/// // Queries 6..8 and keys 0..4 of a causal sequence of 8: every one of these queries sees every one of these keys.
/// let dims = Dims::batch(1).seqlens(2, 4).heads(1, 1).head_dim(8);
/// let part = Part { position_q: 6, seqlens: Some([8, 8]), ..Part::default() };
/// let problem = FwdProblem::batch(DType::F32, dims).mask(MaskSpec::CAUSAL).part(part);
/// assert!(problem.band(2, 4).visible(0, 3));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Part {
    /// Position in the whole of the call's first query; one number for all sequences.
    pub position_q: u32,
    /// Position in the whole of the call's first key; one number for all sequences.
    pub position_k: u32,
    /// Numbers of queries and keys of each whole sequence, for the diagonal of a bottom-right mask; `None`: the
    /// whole ends where the part ends.
    pub seqlens: Option<[u32; 2]>,
    /// Index of the first sequence, for dropout.
    pub batch: u32,
    /// Index of the first query head, for dropout.
    pub head: u32,
    /// Query heads of the whole, for dropout; `None`: the call's own number.
    pub num_heads_q: Option<u32>,
}

impl Part {
    /// Whether the call is the whole.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        *self == Self::default()
    }

    /// Key position less query position, both counted within this part, on the diagonal that `align` gives the whole
    /// problem.
    fn diagonal(&self, align: MaskAlign, seqlen_q: u32, seqlen_k: u32) -> i64 {
        let [q, k] = [self.position_q, self.position_k].map(i64::from);
        let [whole_q, whole_k] = match self.seqlens {
            Some(seqlens) => seqlens.map(i64::from),
            None => [q + i64::from(seqlen_q), k + i64::from(seqlen_k)],
        };
        match align {
            MaskAlign::TopLeft => q - k,
            MaskAlign::BottomRight => whole_k - whole_q + q - k,
        }
    }

    /// Diagonal of `align` in the form that a device resolves for each sequence: a reference diagonal of the
    /// call, and the distance from it.
    pub(crate) fn diagonal_on_device(&self, align: MaskAlign) -> (MaskAlign, i64) {
        match (align, self.seqlens) {
            // The whole ends where the part ends, so the part's last query is on the diagonal with its last key.
            (MaskAlign::BottomRight, None) => (MaskAlign::BottomRight, 0),
            _ => (MaskAlign::TopLeft, self.diagonal(align, 0, 0)),
        }
    }
}

impl FwdProblem {
    /// The mask's band for `seqlen_q` queries and `seqlen_k` keys of the call, positions counted from its first ones.
    #[must_use]
    pub fn band(&self, seqlen_q: u32, seqlen_k: u32) -> MaskBand {
        let MaskBounds { lo, hi, align } = self.mask.bounds();
        let diag = self.part.diagonal(align, seqlen_q, seqlen_k);
        let (least, most) = (-i64::from(seqlen_q), i64::from(seqlen_k));
        let sinks = i64::from(self.mask.sink_columns) - i64::from(self.part.position_k);
        MaskBand {
            lo: lo.map_or(least, |lo| (lo + diag).clamp(least, most)),
            hi: hi.map_or(most, |hi| (hi + diag).clamp(least, most)),
            // Without a lower bound the band hides no key that a sink column could show, so sink columns are dropped.
            sink_columns: lo.map_or(0, |_| sinks.clamp(0, most)),
        }
    }

    /// Diagonal from which `ALiBi` measures its distance: its term is `-slope * |i + diagonal - j|` for the call's
    /// i and j.
    #[must_use]
    pub fn alibi_diagonal(&self, seqlen_q: u32, seqlen_k: u32) -> i64 {
        self.part.diagonal(self.mask.alibi_align(), seqlen_q, seqlen_k)
    }

    /// The keep decisions of sequence `i_batch` and query head `i_head` of the call, for the call's i and j.
    #[must_use]
    pub fn keep(&self, at: DropoutSeed, i_batch: u32, i_head: u32) -> KeepMask {
        let Part { position_q, position_k, batch, head, num_heads_q, .. } = self.part;
        let heads = num_heads_q.unwrap_or(self.dims.num_heads_q);
        KeepMask::new(self.dropout.p_drop, at, batch.wrapping_add(i_batch), head.wrapping_add(i_head), heads)
            .from(position_q, position_k)
    }

    /// The mask as a device resolves it for each sequence: its bounds, and the sink columns that are among
    /// the call's keys.
    pub(crate) fn device_mask(&self) -> (MaskBounds, u32) {
        let MaskBounds { lo, hi, align } = self.mask.bounds();
        let sinks = self.mask.sink_columns.saturating_sub(self.part.position_k);
        let (align, shift) = self.part.diagonal_on_device(align);
        (MaskBounds { lo: lo.map(|lo| lo + shift), hi: hi.map(|hi| hi + shift), align }, sinks)
    }

    /// Refuses a part that starts inside a group of four keys, for kernels that draw dropout for four keys at
    /// once with one call of the generator.
    ///
    /// # Errors
    /// Dropout in a part whose first key's position in the whole is not a multiple of four.
    pub fn refuse_dropout_between_quads(&self, kernel: &str) -> Result<(), Refusal> {
        let position_k = self.part.position_k;
        if !(self.drops() || self.dropout.write_keep_mask) || position_k.is_multiple_of(4) {
            return Ok(());
        }
        let p_drop = self.dropout.p_drop;
        let reason = format!("position_k {position_k} is not a multiple of 4, with p_drop {p_drop}");
        Err(Refusal::new(kernel, reason))
    }

    pub(crate) fn check_part(&self) -> Result<(), ProblemError> {
        let Part { position_q, position_k, seqlens, batch, head, num_heads_q } = self.part;
        let dims = self.dims;
        let most = u64::from(MAX_SEQLEN);
        let sides =
            [("position_q", position_q, dims.seqlen_q, 0), ("position_k", position_k, dims.seqlen_k, 1)];
        for (field, position, seqlen, side) in sides {
            let end = u64::from(position) + u64::from(seqlen);
            let whole = seqlens.map_or(most, |seqlens| u64::from(seqlens[side]));
            ensure!(
                end <= whole,
                field,
                "{field} {position} and {seqlen} rows end at {end}, beyond the whole's {whole}"
            );
            ensure!(whole <= most, "seqlens", "seqlens {whole} is larger than {MAX_SEQLEN}");
        }
        let (end, heads) =
            (u64::from(head) + u64::from(dims.num_heads_q), num_heads_q.unwrap_or(dims.num_heads_q));
        ensure!(
            end <= u64::from(heads),
            "head",
            "head {head} and num_heads_q {} end at {end}, beyond the whole's {heads}",
            dims.num_heads_q
        );
        ensure!(
            u32::try_from((u64::from(batch) + u64::from(dims.batch)) * u64::from(heads)).is_ok(),
            "batch",
            "batch {batch} and {} sequences of {heads} heads are more than 2^32 - 1",
            dims.batch
        );
        // Positions in the cache are positions in the whole: appended and rotated rows and a tree mask are at its
        // end.
        let cache = &self.cache;
        ensure!(
            self.part.is_whole() || cache.append.is_none() && cache.rotary.is_none() && !cache.tree_mask,
            "part",
            "part: position_q {position_q} and position_k {position_k} go with no append, rotary embedding or tree_mask"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::Dims;
    use crate::score::Bias;

    const WHOLE: [u32; 2] = [7, 9];

    fn problem(mask: &str, seqlen_q: u32, seqlen_k: u32) -> FwdProblem {
        let dims = Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(4, 2).head_dim(8);
        FwdProblem::batch(DType::F32, dims)
            .mask(mask.parse().unwrap())
            .bias(Bias::Alibi { per_batch: false })
            .p_drop(0.5)
    }

    /// The band as device code computes it.
    fn on_a_device(problem: &FwdProblem, seqlen_q: u32, seqlen_k: u32) -> MaskBand {
        let (bounds, sinks) = problem.device_mask();
        let diag = bounds.align.diagonal(seqlen_q, seqlen_k);
        let (least, most) = (-i64::from(seqlen_q), i64::from(seqlen_k));
        MaskBand {
            lo: bounds.lo.map_or(least, |lo| (lo + diag).clamp(least, most)),
            hi: bounds.hi.map_or(most, |hi| (hi + diag).clamp(least, most)),
            sink_columns: bounds.lo.map_or(0, |_| i64::from(sinks).min(most)),
        }
    }

    #[test]
    fn a_part_sees_what_it_sees_inside_the_whole() {
        let at = DropoutSeed { seed: 3, offset: 1 };
        for mask in ["0", "t", "b", "t:2,1", "b:3,0,2", "b:1,-1,4", "g:3,2", "g:-1,4,1", "g:3,-1"] {
            let whole = problem(mask, WHOLE[0], WHOLE[1]);
            let (band, diag) = (whole.band(7, 9), whole.alibi_diagonal(7, 9));
            assert_eq!(band, whole.mask.band(7, 9), "{mask}");
            assert_eq!(on_a_device(&whole, 7, 9), band, "{mask}");
            for (q, k) in (0..7).flat_map(|q| (0..9).map(move |k| (q, k))) {
                // Parts that end inside the whole, and parts that end with it, which need not give its lengths.
                for (rows, keys, seqlens) in [(1, 2.min(9 - k), Some(WHOLE)), (7 - q, 9 - k, None)] {
                    let part = Part { position_q: q, position_k: k, seqlens, ..Part::default() };
                    let part = problem(mask, rows, keys).part(part);
                    part.clone().validate().unwrap();
                    let own = part.band(rows, keys);
                    assert_eq!(on_a_device(&part, rows, keys), own, "{mask} at {q},{k}");
                    for (i, j) in (0..rows).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                        assert_eq!(
                            own.visible(i, j),
                            band.visible(q + i, k + j),
                            "{mask} at {q},{k}: {i},{j}"
                        );
                        let (x, y) = (i64::from(i) - i64::from(j), i64::from(q + i) - i64::from(k + j));
                        assert_eq!(
                            x + part.alibi_diagonal(rows, keys),
                            y + diag,
                            "{mask} at {q},{k}: {i},{j}"
                        );
                        let (own, all) = (part.keep(at, 1, 2), whole.keep(at, 1, 2));
                        assert_eq!(own.keep(i, j), all.keep(q + i, k + j), "{q},{k}: {i},{j}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_part_of_the_batch_and_of_the_heads_drops_what_the_whole_does() {
        let at = DropoutSeed { seed: 3, offset: 1 };
        let whole = problem("0", 7, 9);
        let part = Part { batch: 1, head: 2, num_heads_q: Some(4), ..Part::default() };
        let mut some = problem("0", 7, 9).part(part);
        (some.dims.batch, some.dims.num_heads_q) = (1, 2);
        for j in 0..9 {
            assert_eq!(some.keep(at, 0, 1).keep(5, j), whole.keep(at, 1, 3).keep(5, j));
        }
    }

    #[test]
    fn a_part_that_leaves_its_whole_is_refused_by_its_number() {
        let refused = |part: Part| problem("b", 3, 4).part(part).validate().unwrap_err();
        let seqlens = Some(WHOLE);
        for (part, field, text) in [
            (
                Part { position_q: 5, seqlens, ..Part::default() },
                "position_q",
                "position_q 5 and 3 rows end at 8",
            ),
            (Part { position_k: 6, seqlens, ..Part::default() }, "position_k", "beyond the whole's 9"),
            (Part { position_k: u32::MAX, ..Part::default() }, "position_k", "position_k 4294967295"),
            (Part { head: 1, ..Part::default() }, "head", "head 1 and num_heads_q 4 end at 5"),
            (Part { batch: u32::MAX / 4, ..Part::default() }, "batch", "batch 1073741823"),
        ] {
            let error = refused(part);
            assert!(error.field == field && error.text.contains(text), "{error}");
        }
        let tree = problem("b", 3, 4).bias(Bias::None).p_drop(0.0).tree_mask(true);
        assert!(tree.clone().validate().is_ok());
        let error = tree.part(Part { position_q: 1, ..Part::default() }).validate().unwrap_err();
        assert_eq!(error.field, "part");
    }

    #[test]
    fn dropout_that_begins_between_two_fours_of_keys_is_refused_by_the_kernels_that_decide_four() {
        let at = |position_k| {
            problem("b", 3, 4).part(Part { position_k, seqlens: Some(WHOLE), ..Part::default() })
        };
        assert!(at(4).refuse_dropout_between_quads("tiles").is_ok());
        let refusal = at(5).refuse_dropout_between_quads("tiles").unwrap_err().to_string();
        assert!(refusal.contains("position_k 5 is not a multiple of 4, with p_drop 0.5"), "{refusal}");
        assert!(at(5).p_drop(0.0).refuse_dropout_between_quads("tiles").is_ok());
    }
}
