//! Problems whose functions, or parts of them, equal features that kernels have built in: a band, a scale, a soft-cap,
//! ALiBi.
//!
//! A plan computes such a problem in this form. Its arguments are the caller's: numbers stay where they are, and a
//! tensor of slopes that a score captures becomes the call's ALiBi slopes for the run.

use super::{CapturedTensor, FwdProblem};
use crate::args::ScoreArgs;
use crate::error::{ProblemError, ensure};
use crate::expr::{AlibiTerm, Distance, Limits, ScoreForm};
use crate::layout::{KvLayout, QLayout};
use crate::mask::{MaskAlign, MaskShape, MaskSpec};
use crate::score::Bias;

/// A problem in which kernels' built-in features replace equal parts of its functions.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltIn<P> {
    /// The problem.
    pub problem: P,
    /// Index of the captured tensor that holds its ALiBi slopes.
    pub slopes: Option<usize>,
    /// Text that tells people what the functions were replaced by.
    pub words: String,
}

/// Operands of a score in which one captured tensor, the first or the last of the captured ones, becomes ALiBi's
/// slopes.
///
/// # Errors
/// A number of captured tensors that differs from the functions', and slopes that the caller gives too.
pub fn with_slopes<'a>(given: &ScoreArgs<'a>, at: usize, rest: usize) -> Result<ScoreArgs<'a>, ProblemError> {
    let count = given.captured.len();
    ensure!(count == rest + 1, "captured", "captured: {count} tensors given, but {} wanted", rest + 1);
    ensure!(
        given.alibi_slopes.is_none(),
        "alibi_slopes",
        "alibi_slopes: 1 given, but the problem is without ALiBi"
    );
    let captured = if at == 0 { &given.captured[1..] } else { &given.captured[..rest] };
    Ok(ScoreArgs { alibi_slopes: Some(given.captured[at]), captured, ..*given })
}

impl FwdProblem {
    /// The problem in which kernels' built-in features replace equal parts of its functions; `None` if no part is equal
    /// to one. A score with wanted gradients of what it captures stays a function.
    #[must_use]
    pub fn built_in(&self, wants_captured: bool) -> Option<BuiltIn<Self>> {
        if self.code.is_empty()
            || !self.part.is_whole()
            || self.cache.tree_mask
            || self.lists.is_some()
            || self.second.is_some()
        {
            return None;
        }
        let mut words = vec![];
        let mut problem = self.clone();
        if let Some(word) = problem.fold_mask() {
            words.push(word);
        }
        let mut slopes = None;
        if !wants_captured && let Some((word, of_slopes)) = problem.fold_score() {
            words.push(word);
            slopes = of_slopes;
        }
        // The numbers of a call must still be those of its own functions.
        if words.is_empty() || problem.code.numbers() != self.code.numbers() {
            return None;
        }
        Some(BuiltIn { problem, slopes, words: words.join("; ") })
    }

    /// The difference `seqlen_k - seqlen_q`, if it is the same for all sequences.
    fn fixed_diagonal(&self) -> Option<i64> {
        let Self { layout, dims, cache, .. } = self;
        let is_fixed = layout.q == QLayout::Batch
            && layout.kv != KvLayout::Packed
            && !layout.seqused_q
            && !layout.seqused_k
            && cache.append.is_none();
        is_fixed.then(|| i64::from(dims.seqlen_k) - i64::from(dims.seqlen_q))
    }

    /// Replaces the mask's bounds by a band.
    fn fold_mask(&mut self) -> Option<String> {
        let function = self.code.mask.as_ref()?;
        // Full blocks show what a function hides, but not what a band hides; and a rotation depends on whether the band
        // is causal.
        let has_full = self.masks.block_lists.is_some_and(|lists| lists.full.is_some());
        if has_full || self.cache.rotary.is_some() {
            return None;
        }
        let own = self.mask.bounds();
        if own.lo.is_some() && self.mask.sink_columns > 0 {
            return None;
        }
        let diagonal = self.fixed_diagonal();
        let is_full = (own.lo, own.hi) == (None, None);
        let both = |_: MaskAlign| true;
        let all = function.bands(both, &[])?;
        let align = match (is_full, all.bottom_right.is_empty(), all.top_left.is_empty()) {
            (false, ..) => own.align,
            (true, false, true) => MaskAlign::BottomRight,
            (true, ..) => MaskAlign::TopLeft,
        };
        let bands = match diagonal {
            Some(_) => all,
            None => function.bands(|other| other == align, &[])?,
        };
        let diagonal = diagonal.unwrap_or(0);
        let (top_left, bottom_right) = match align {
            MaskAlign::TopLeft => (bands.top_left, bands.bottom_right.moved(diagonal)),
            MaskAlign::BottomRight => (bands.top_left.moved(-diagonal), bands.bottom_right),
        };
        let limits = Limits { lo: own.lo, hi: own.hi }.and(top_left).and(bottom_right);
        let other = match align {
            MaskAlign::TopLeft => (limits.moved(-diagonal), MaskAlign::BottomRight),
            MaskAlign::BottomRight => (limits.moved(diagonal), MaskAlign::TopLeft),
        };
        let is_plain = |shape: &MaskShape| !matches!(shape, MaskShape::Generic { .. });
        // A band that refers to the other diagonal may still be causal or a window; kernels would not recognise it in
        // generic coordinates.
        let shape = match self.fixed_diagonal() {
            Some(_) => {
                self.shape_of(limits, align).filter(is_plain).or_else(|| self.shape_of(other.0, other.1))
            }
            None => self.shape_of(limits, align),
        }?;
        let mask = MaskSpec { shape, sink_columns: 0 };
        if matches!(self.score.bias, Bias::Alibi { .. })
            && mask.alibi_align() != self.mask.alibi_align()
            && self.fixed_diagonal() != Some(0)
        {
            return None;
        }
        let word = match &bands.rest {
            None => format!("the mask is the band {mask}"),
            Some(rest) => format!("the mask is the band {mask} and `{rest}`"),
        };
        self.mask = mask;
        self.code.mask = bands.rest;
        Some(word)
    }

    /// The mask shape of a band; `None` if no shape describes it.
    fn shape_of(&self, limits: Limits, align: MaskAlign) -> Option<MaskShape> {
        // Limit beyond every distance that can occur.
        const FAR: i64 = i32::MAX as i64 - 1;
        let lo = limits.lo.filter(|&lo| lo > -FAR);
        let hi = limits.hi.filter(|&hi| hi < FAR);
        let before = |lo: i64| u32::try_from(-lo).ok();
        match (lo, hi) {
            (None, None) => Some(MaskShape::None),
            (None, Some(0)) => Some(MaskShape::Causal(align)),
            _ if lo.is_none_or(|lo| lo <= 0) && hi.is_none_or(|hi| hi >= 0) => Some(MaskShape::Window {
                left: lo.and_then(before),
                right: hi.and_then(|hi| u32::try_from(hi).ok()),
                align,
            }),
            _ => {
                let diagonal = match align {
                    MaskAlign::TopLeft => 0,
                    MaskAlign::BottomRight => self.fixed_diagonal()?,
                };
                let bound = |bound: Option<i64>, none: i64| {
                    let moved = bound.map_or(none, |bound| bound + diagonal);
                    i32::try_from(moved.clamp(-FAR, FAR)).ok()
                };
                Some(MaskShape::Generic { y: 1 - bound(lo, -FAR)?, x: 1 + bound(hi, FAR)? })
            }
        }
    }

    /// Replaces the score by the scale, the soft-cap and the slopes; returns the index of the slopes among the
    /// captures.
    fn fold_score(&mut self) -> Option<(String, Option<usize>)> {
        let form = self.code.score.as_ref()?.score_form(&[])?;
        let ScoreForm { factor, softcap, alibi } = form;
        let is_free = self.score.softcap.is_none() && (alibi.is_none() || self.score.bias == Bias::None);
        let scale = (f64::from(self.resolved_softmax_scale()) * factor) as f32;
        if (softcap.is_some() || alibi.is_some()) && !is_free || !scale.is_normal() {
            return None;
        }
        let mut words = vec![];
        let mut slopes = None;
        if let Some(term) = alibi {
            let at = self.slopes_of(term)?;
            let tensor = self.code.captured.remove(at);
            self.score.bias = Bias::Alibi { per_batch: term.per_batch };
            words.push(format!("ALiBi by {}", tensor.name));
            slopes = Some(at);
        }
        if factor != 1.0 {
            self.score.softmax_scale = Some(scale);
            words.push(format!("softmax_scale {scale}"));
        }
        if softcap.is_some() {
            self.score.softcap = softcap;
        }
        words.extend(softcap.map(|softcap| format!("softcap {softcap}")));
        if words.is_empty() {
            words.push("the scaled product".to_owned());
        }
        self.code.score = None;
        Some((format!("the score is {}", words.join(", ")), slopes))
    }

    /// Index of the captured tensor that a call may pass as ALiBi's slopes: the first or the last capture.
    fn slopes_of(&self, term: AlibiTerm) -> Option<usize> {
        let score = self.code.score.as_ref()?;
        let name = &score.captures()[term.capture].name;
        let is_alone =
            self.code.mask.as_ref().is_none_or(|mask| mask.captures().iter().all(|own| own.name != *name));
        let at = self.code.captured.iter().position(|tensor| tensor.name == *name)?;
        let is_at_end = at == 0 || at + 1 == self.code.captured.len();
        let heads = self.dims.num_heads_q;
        let shape = if term.per_batch { vec![self.dims.batch, heads] } else { vec![heads] };
        let dense = CapturedTensor::dense(name.clone(), &shape);
        let tensor = &self.code.captured[at];
        let is_dense = tensor.shape == shape
            && (0..shape.len()).all(|axis| shape[axis] == 1 || tensor.strides[axis] == dense.strides[axis]);
        // ALiBi takes its diagonal from the mask; it must be the one that the function uses.
        let (align, is_signed) = match term.distance {
            Distance::Signed(align) => (align, true),
            Distance::Absolute(align) => (align, false),
        };
        let has_diagonal = self.mask.alibi_align() == align || self.fixed_diagonal() == Some(0);
        // Beyond the diagonal the signed distance differs from ALiBi's, so the band must hide these pairs.
        let bounds = self.mask.bounds();
        let hides = bounds.hi.is_some_and(|hi| hi <= 0)
            && (bounds.align == align || self.fixed_diagonal() == Some(0));
        (is_alone && is_at_end && is_dense && has_diagonal && (hides || !is_signed)).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;
    use crate::expr::draw::{self, Draw, Kind};
    use crate::expr::{Function, Pair, Rounding};
    use crate::problem::Dims;

    fn dims(seqlen_q: u32, seqlen_k: u32) -> Dims {
        let heads = (2, 1);
        Dims::batch(1).seqlens(seqlen_q, seqlen_k).heads(heads.0, heads.1).head_dim(8)
    }

    fn shows(problem: &FwdProblem, [seqlen_q, seqlen_k]: [u32; 2], [q, k]: [u32; 2]) -> bool {
        let pair = Pair { score: 0.0, b: 0, h: 1, q, k, seqlen_q, seqlen_k };
        let by_function =
            problem.code.mask.as_ref().is_none_or(|mask| mask.eval(&pair, &[], Rounding::Exact).bool());
        by_function && problem.mask.band(seqlen_q, seqlen_k).visible(q, k)
    }

    proptest! {
        /// A problem shows the same pairs in both forms, whatever its band, also if the call brings the lengths.
        #[test]
        fn a_band_of_a_function_shows_the_same_pairs(
            seed: u64,
            lengths in [1u32..24, 1u32..24],
            bounds in [-30i64..30, -30i64..30],
            has_lengths: bool,
            is_drawn: bool,
        ) {
            let mut draw = Draw::new(seed);
            let bands = ["0", "t", "b", "t:5,3", "b:2,7", "g:4,6", "b:3,1,2", "g:-2,9"];
            let mask: Function = if is_drawn {
                draw::mask(seed, Kind::Bare).unwrap()
            } else {
                let [lo, hi] = bounds;
                let by = draw.of(&["", " - (seqlen_k - seqlen_q)"]);
                let rest = draw.of(&["", " and k % 3 != 1", " and k - q <= 11"]);
                let text = match draw.below(3) {
                    0 => format!("k - q{by} <= {hi}{rest}"),
                    1 => format!("k - q{by} >= {lo}{rest}"),
                    _ => format!("k - q{by} >= {lo} and k - q{by} <= {hi}{rest}"),
                };
                text.parse().unwrap()
            };
            let [seqlen_q, seqlen_k] = lengths;
            let given = FwdProblem::batch(DType::Bf16, dims(seqlen_q, seqlen_k))
                .seqused_q(has_lengths)
                .seqused_k(has_lengths)
                .mask(draw.of(&bands).parse().unwrap())
                .mask_code(mask);
            let Some(found) = given.built_in(false) else { return Ok(()) };
            prop_assert!(found.problem.clone().validate().is_ok());
            let mut of_call = vec![lengths];
            if has_lengths {
                of_call.extend((0..4).map(|_| lengths.map(|most| draw.below(most as usize + 1) as u32)));
            }
            for lengths in of_call {
                for (q, k) in (0..lengths[0]).flat_map(|q| (0..lengths[1]).map(move |k| (q, k))) {
                    prop_assert_eq!(
                        shows(&found.problem, lengths, [q, k]),
                        shows(&given, lengths, [q, k]),
                        "{} of {:?} at {}, {}: {}",
                        given.mask, lengths, q, k, found.words
                    );
                }
            }
        }
    }

    #[test]
    fn what_a_band_would_change_stays_a_function() {
        let causal =
            || FwdProblem::batch(DType::Bf16, dims(4, 6)).mask_code("k <= q".parse::<Function>().ok());
        let folds = |problem: FwdProblem| problem.built_in(false).is_some();
        assert!(folds(causal()));
        assert!(folds(causal().mask("b".parse().unwrap())));
        assert!(!folds(causal().mask("b".parse().unwrap()).seqused_k(true)));
        assert!(!folds(causal().mask("t:5,3,2".parse().unwrap())));
        assert!(!folds(causal().bias(Bias::Alibi { per_batch: false })));
        assert!(!folds(causal().tree_mask(true)));
        let score =
            |text: &str| FwdProblem::batch(DType::Bf16, dims(4, 4)).score_code(text.parse::<Function>().ok());
        assert!(folds(score("2.0 * tanh(s / 2.0)")));
        assert!(!folds(score("2.0 * tanh(s / 2.0)").softcap(3.0)));
        assert!(folds(score("s * 2.0").softcap(3.0)));
        let slopes = |text: &str, extent: u32| {
            score(text).mask("t".parse().unwrap()).captured(vec![CapturedTensor::dense("slopes", &[extent])])
        };
        let alibi = "slopes: f32[_]; s + slopes[h] * (k - q)";
        assert_eq!(slopes(alibi, 2).built_in(false).unwrap().slopes, Some(0));
        // A captured tensor with fewer slopes clamps its index; wanted gradients of a capture keep the score a
        // function.
        assert!(!folds(slopes(alibi, 3)) && slopes(alibi, 2).built_in(true).is_none());
        assert!(!folds(slopes(alibi, 2).mask(MaskSpec::NONE)));
        assert!(folds(slopes("slopes: f32[_]; s - slopes[h] * abs(k - q)", 2).mask(MaskSpec::NONE)));
        assert!(!folds(slopes(alibi, 2).softcap(2.0)));
    }
}
