//! Rows whose LSE is so large that its rounding to f32 would change P, and the origin that is subtracted from their
//! scores.

use fmha_core::{Bias, BwdArgs, FwdProblem};

use super::Shared;
use crate::memory::{Bytes, Floats, reserve};
use crate::score::HeadScore;
use crate::tasks::Threads;
use crate::tensor::f32_at;

/// Least absolute LSE at which a row gets an origin, equal to that of the device kernels (`fmha/row_bwd.h`,
/// `sm90/bwd/preprocess.cuh`). Without a bias, scores have a rounding error like LSE's, so an origin is only needed
/// where half an ulp of LSE changes P by a hundredth.
fn least_far(fwd: &FwdProblem) -> f32 {
    if fwd.score.bias == Bias::None && fwd.code.is_empty() { 131_072.0 } else { 16384.0 }
}

/// Relative difference of a score between two orders of summation.
const ROUNDING_OF_SCORES: f64 = 1.0 / (1 << 20) as f64;

/// Origins of the rows of a call, laid out like LSE.
#[derive(Default)]
pub(super) struct FarRows {
    /// Number of rows; 0 if no row of the call has an origin.
    rows: usize,
    /// Least absolute LSE at which a row has an origin.
    least: f32,
    origin: Floats,
    /// LSE relative to the origin; plain LSE in rows without an origin.
    lse: Floats,
}

impl FarRows {
    /// Reserves room for an origin of each row, if some row's LSE is so large that the row needs one.
    pub(super) fn reserve(fwd: &FwdProblem, args: &BwdArgs<'_>) -> fmha_core::Result<Self> {
        let rows = fwd.extents(args.seq.totals).lse_elems as usize;
        let far = Self { least: least_far(fwd), ..Self::default() };
        let any = (0..rows).any(|index| far.has(f32_at(&args.lse, index)));
        let rows = if any { rows } else { 0 };
        Ok(Self { rows, origin: Floats::scratch(rows)?, lse: Floats::scratch(rows)?, ..far })
    }

    /// Whether a row with this LSE has an origin.
    fn has(&self, lse: f32) -> bool {
        lse.is_finite() && lse.abs() >= self.least
    }

    /// Whether some row of the call needs an origin, a number that is subtracted from its scores.
    pub(super) fn any(&self) -> bool {
        self.rows > 0
    }

    /// Origin of the row at this index of LSE, and LSE relative to it; `None` if no row of the call has an origin.
    pub(super) fn row(&self, index: usize) -> Option<(f32, f32)> {
        // SAFETY: `rows` numbers of each, which `measure_far_rows` has written before any row is read.
        (index < self.rows)
            .then(|| unsafe { (*self.origin.as_ptr().add(index), *self.lse.as_ptr().add(index)) })
    }
}

impl Shared<'_> {
    /// Fills `far`, once delta is known.
    pub(super) fn measure_far_rows(&mut self, threads: &Threads) -> fmha_core::Result<()> {
        if !self.far.any() {
            return Ok(());
        }
        let mut far = std::mem::take(&mut self.far);
        let (origins, lses) = (Bytes::of(&mut far.origin), Bytes::of(&mut far.lse));
        let (this, fwd) = (&*self, self.problem.fwd());
        let heads = fwd.dims.num_heads_q;
        let tasks = this.spans.len() * heads as usize;
        let used = threads.used(tasks);
        let mut states = reserve(used)?;
        states.resize(used, ());
        threads.for_each(&mut states, tasks, |(), task| {
            let (span, i_head) = (this.spans[task / heads as usize], (task % heads as usize) as u32);
            let head = this.score.head(span, i_head);
            for i in 0..span.seqlen_q {
                let index = span.lse_index(fwd, i_head, i);
                let lse = f32_at(&this.args.lse, index);
                let (origin, lse) =
                    if far.has(lse) { this.origin_of(&head, i_head, i, index, lse) } else { (0.0, lse) };
                // SAFETY: one number for each row, and this row is this task's.
                unsafe {
                    origins.write_f32(index, origin);
                    lses.write_f32(index, lse);
                }
            }
        });
        self.far = far;
        Ok(())
    }

    /// Origin of a far row, and its LSE relative to it. A row whose gradients of O and LSE are 0 contributes
    /// nothing and gets no sum: most fully masked rows are such rows. If no other score comes near the row's
    /// largest, that score must have P = 1 even if the scores for P round differently: the origin is then placed
    /// far enough below it, and P is limited to 1.
    fn origin_of(&self, head: &HeadScore, i_head: u32, i: u32, index: usize, lse: f32) -> (f32, f32) {
        let dout = self.dout.q_rows(head.span, i_head).skip(i as usize);
        // SAFETY: delta has a number for each row, dO head_dim_v.
        let adds = unsafe {
            f64::from(*self.delta.as_ptr().add(index)) != self.dlse_at(index)
                || (0..self.dims().1).any(|d| dout.get(0, d) != 0.0)
        };
        if !adds {
            return (0.0, f32::INFINITY);
        }
        let mut origin = lse;
        let (mut top, mut sum) = self.sum_from(head, i_head, i, origin);
        // LSE may be wrong by a few ulps, each up to 2e31, so the sum is computed once more from the largest score.
        if top.is_finite() && top.abs() >= 1024.0 {
            origin += top as f32;
            (top, sum) = self.sum_from(head, i_head, i, origin);
        }
        let error = f64::from(origin.abs()) * ROUNDING_OF_SCORES;
        let near = top - (2.0 * error + 24.0);
        if self.scores_from(head, i_head, i, origin).filter(|&score| score >= near).count() == 1 {
            return ((f64::from(origin) + top - error) as f32, 0.0);
        }
        (origin, if sum == 0.0 { f32::INFINITY } else { (top + sum.ln()) as f32 })
    }

    /// The scores that query `i` sees, and its sink, minus `origin`.
    fn scores_from<'a>(
        &'a self,
        head: &'a HeadScore,
        i_head: u32,
        i: u32,
        origin: f32,
    ) -> impl Iterator<Item = f64> + 'a {
        let (q, k) = (self.q.q_rows(head.span, i_head), self.k.k_rows(head.span, head.i_head_kv));
        let seqlen_k = head.span.seqlen_k;
        let factor = f64::from(head.softmax_scale) * f64::from(head.descale_q) * f64::from(head.descale_k);
        let keys = head.band.sink_range(i..i + 1, seqlen_k).chain(head.band.row_range(i, seqlen_k));
        let scores = keys.filter_map(move |j| {
            let elem = |d: usize| {
                // SAFETY: the argument check measured Q and K.
                let (q, k) = unsafe { (q.get(i as usize, d), k.get(j as usize, d)) };
                f64::from(q) * f64::from(k)
            };
            let scaled = factor * (0..self.dims().0).map(elem).sum::<f64>();
            let scaled = match &self.score.code {
                Some(code) => code.one(head, scaled, i, j)?,
                None => scaled,
            };
            let capped = head.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh());
            // SAFETY: the argument check measured the bias.
            let bias = head.bias.map_or(0.0, |bias| unsafe { bias.get(i as usize, j as usize) });
            // Rounded as the tiles' scores are.
            let score =
                (f64::from(capped as f32) + f64::from(bias) + head.alibi_exact(i, j).unwrap_or(0.0)) as f32;
            Some(f64::from(score - origin))
        });
        scores.chain(head.sink.map(|sink| f64::from(sink) - f64::from(origin)))
    }

    /// `(top, sum)`: the exponentials of these scores are `exp(top) * sum`.
    fn sum_from(&self, head: &HeadScore, i_head: u32, i: u32, origin: f32) -> (f64, f64) {
        let (mut top, mut sum) = (f64::NEG_INFINITY, 0.0);
        for score in self.scores_from(head, i_head, i, origin) {
            if score > top {
                sum = sum * (top - score).exp() + 1.0;
                top = score;
            } else if score != f64::NEG_INFINITY {
                sum += (score - top).exp();
            }
        }
        (top, sum)
    }
}
