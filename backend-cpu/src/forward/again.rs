//! Rows whose scores or sums overflowed f32 although their O and LSE fit: they are recomputed from memory in f64,
//! key by key. Causes are large values of V (the sum of 64 times 1e37 overflows before the division), and scores
//! that fit f32 but not with one more addition, or not times log2(e). A row that sees a NaN or an infinity is
//! correctly non-finite, and stays.

use std::ops::ControlFlow;

use super::{Scratch, Shared, Task};
use crate::score::HeadScore;

impl Shared<'_> {
    /// Writes O and LSE again for those rows of a task that overflowed f32. `factors` have replaced the rows' sums;
    /// element `d` of row `r` of the sums of P V is at `place(r, d)`, and `all_finite` says whether all of them are
    /// known to be finite.
    pub(super) fn mend_rows(
        &self,
        scratch: &Scratch,
        task: Task,
        head: &HeadScore,
        all_finite: bool,
        place: impl Fn(usize, usize) -> usize,
    ) {
        for row in 0..task.queries as usize {
            // SAFETY: a live row of the scratch.
            let (row_max, factor) =
                unsafe { (*scratch.row_max.as_ptr().add(row), *scratch.row_sum.as_ptr().add(row)) };
            if !(all_finite && row_max.is_finite()) {
                // SAFETY: an element of a live row of the scratch.
                let out = |d: usize| unsafe { *scratch.out.as_ptr().add(place(row, d)) };
                let at = (head, task.i_head, task.i + row as u32);
                self.mend_row(at, row_max, factor.is_nan(), out);
            }
        }
    }

    /// Writes a row's O and LSE again if it overflowed f32 although its inputs are finite. Decides from its
    /// maximum, whether its sum is NaN, and the elements of its sums of P V.
    pub(super) fn mend_row(
        &self,
        (head, i_head, i): (&HeadScore, u32, u32),
        row_max: f32,
        sum_is_nan: bool,
        out: impl Fn(usize) -> f32,
    ) {
        let left = if row_max == f32::INFINITY {
            true
        } else if sum_is_nan {
            // A NaN of Q or K.
            false
        } else if row_max == f32::NEG_INFINITY {
            self.some_score_is_finite(head, i)
        } else {
            let columns = 0..self.problem.dims.head_dim_v as usize;
            let strays: Vec<usize> = columns.filter(|&d| !out(d).is_finite()).collect();
            !strays.is_empty() && self.some_column_is_finite(head, i, strays)
        };
        if left {
            self.attend_again(head, i_head, i);
        }
    }

    fn visible(&self, head: &HeadScore, i: u32) -> impl Iterator<Item = u32> {
        (0..head.span.seqlen_k).filter(move |&j| match &self.tree {
            Some(tree) => tree.visible(&head.span, i, j),
            None => {
                let code = self.score.code.as_ref();
                head.band.visible(i, j) && code.is_none_or(|code| code.shows(head, i, j))
            }
        })
    }

    /// Whether some key of a row whose scores are all -inf has a bias above -inf.
    fn some_score_is_finite(&self, head: &HeadScore, i: u32) -> bool {
        // A row whose keys are all hidden by code is empty.
        !head.coded
            && head.changes()
            && self.visible(head, i).any(|j| head.modified(0.0, i, j) > f64::NEG_INFINITY)
    }

    /// Whether one of these columns of V has only numbers (no NaN or infinity) in the keys that the row sees.
    fn some_column_is_finite(&self, head: &HeadScore, i: u32, mut columns: Vec<usize>) -> bool {
        let end = self.visible(head, i).try_for_each(|j| {
            columns.retain(|&d| self.v.value(head, j, d, head.descale_v).is_finite());
            if columns.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        end.is_continue()
    }

    fn attend_again(&self, head: &HeadScore, i_head: u32, i: u32) {
        let dims = self.problem.dims;
        let q = self.q.q_rows(head.span, i_head).skip(i as usize);
        let score = |j: u32| {
            let products = (0..dims.head_dim_qk as usize).map(|d| {
                // SAFETY: the argument check measured Q, `spans` its rows.
                let q = unsafe { q.get(0, d) } * head.descale_q;
                f64::from(q) * f64::from(self.k.value(head, j, d, head.descale_k))
            });
            let scaled = products.sum::<f64>() * f64::from(head.softmax_scale);
            let scaled = match &self.score.code {
                Some(code) => code.one(head, scaled, i, j)?,
                None => scaled,
            };
            Some(head.modified(scaled, i, j))
        };
        let scores: Vec<(u32, f64)> = self.visible(head, i).filter_map(|j| Some((j, score(j)?))).collect();
        let sink = head.sink.map_or(f64::NEG_INFINITY, f64::from);
        let top = scores.iter().fold(sink, |top, (_, score)| top.max(*score));
        let weight = |score: f64| if score == f64::NEG_INFINITY { 0.0 } else { (score - top).exp() };
        let total = scores.iter().fold(weight(sink), |sum, (_, score)| sum + weight(*score));
        let mut o = vec![0.0f64; dims.head_dim_v as usize];
        for &(j, score) in scores.iter().filter(|(j, _)| !head.drops || head.keep.keep(i, *j)) {
            let p = weight(score) / total;
            for (d, o) in o.iter_mut().enumerate() {
                *o += p * f64::from(self.v.value(head, j, d, head.descale_v));
            }
        }
        let factor = f64::from(head.keep_scale) * f64::from(self.scale_o);
        let o: Vec<f32> = o.iter().map(|o| (o * factor) as f32).collect();
        // SAFETY: the row of O and of LSE is this task's.
        unsafe {
            self.o.write_row(head.span.q_batch, head.span.q_row + i, i_head, 0, &o);
            if let Some(to) = self.lse {
                to.write_f32(head.span.lse_index(self.problem, i_head, i), (top + total.ln()) as f32);
            }
        }
    }
}
