//! Small outputs of forward: the greatest score of each row and of each head, and each key's sum of probabilities.
//!
//! A separate pass after O computes the small outputs: scores are recomputed in f32, as for the softmax, and a second
//! time if probabilities are summed, whose divisor is known only after the first time. A task is a head of a
//! sequence and processes its rows in order, so that sums have a fixed order for any number of threads.

use fmha_core::SeqSpan;

use super::{Forward, Scratch, Shared, Task, key_tiles};
use crate::blocks::{GatherRows, Scores};
use crate::code::Code;
use crate::memory::{Bytes, Floats, reserve};
use crate::score::{Adjust, HeadScore, Panel};
use crate::simd::Simd;
use crate::tasks::Threads;

/// Running softmax of a row in f64: its greatest score so far, and the sum of `exp(score - max)`.
#[derive(Clone, Copy)]
struct Row {
    max: f64,
    sum: f64,
}

impl Row {
    const NOTHING: Self = Self { max: f64::NEG_INFINITY, sum: 0.0 };

    fn add(&mut self, score: f32) {
        let score = f64::from(score);
        if score > self.max || score.is_nan() {
            let share = if self.sum == 0.0 { 0.0 } else { (self.max - score).exp() };
            (self.max, self.sum) = (score, self.sum * share + 1.0);
        } else if score > f64::NEG_INFINITY {
            // A NaN that is the maximum makes the sum NaN here.
            self.sum += (score - self.max).exp();
        }
    }

    /// `ln` of the sum including a sink, from which P is computed; +inf for a row without weight.
    fn lse(self, sink: Option<f32>) -> f64 {
        let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
        let top = if self.max.is_nan() { self.max } else { self.max.max(sink) };
        if top == f64::NEG_INFINITY {
            return f64::INFINITY;
        }
        let of_keys = if self.sum == 0.0 { 0.0 } else { self.sum * (self.max - top).exp() };
        top + (of_keys + (sink - top).exp()).ln()
    }
}

impl Forward<'_> {
    /// Computes the small outputs that the problem has.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses.
    pub(super) fn small_outputs<S: Simd>(
        &self,
        s: S,
        shared: &Shared<'_>,
        threads: &Threads,
    ) -> fmha_core::Result<()> {
        let args = self.args;
        if self.problem.outputs.is_empty() {
            return Ok(());
        }
        let [row_max, head_max, key_sum] =
            [&args.row_max, &args.head_max, &args.key_sum].map(|slice| slice.as_ref().map(Bytes::new));
        let heads = self.problem.dims.num_heads_q as usize;
        let tasks = self.spans.len() * heads;
        let used = if tasks == 0 { 0 } else { threads.used(tasks) };
        let mut scratch = reserve(used)?;
        for _ in 0..used {
            scratch.push(shared.scratch::<S::Plain>()?);
        }
        // The greatest score of each task, written by that task alone.
        let mut of_tasks = Floats::scratch(tasks)?;
        of_tasks.fill(f32::NEG_INFINITY);
        let greatest = Greatest(of_tasks.as_mut_ptr());
        threads.for_each(&mut scratch, tasks, |scratch, task| {
            let (span, i_head) = (self.spans[task / heads], (task % heads) as u32);
            let max = shared.small(s.plain(), scratch, span, i_head, [row_max, key_sum]);
            // SAFETY: each task writes its own element, in memory that outlives the loop.
            unsafe { greatest.at(task).write(max) };
        });
        let Some(to) = head_max else { return Ok(()) };
        for i_head in 0..heads {
            // SAFETY: all tasks are done, and each wrote its number, of which there are `tasks`.
            let of_head =
                (i_head..tasks).step_by(heads.max(1)).map(|task| unsafe { greatest.at(task).read() });
            let max = of_head.fold(f32::NEG_INFINITY, greater);
            // SAFETY: the argument check measured a number for each head.
            unsafe { to.write_f32(i_head, max) };
        }
        Ok(())
    }
}

/// Where tasks write their greatest scores.
#[derive(Clone, Copy)]
struct Greatest(*mut f32);

// SAFETY: each task has an element of its own.
unsafe impl Send for Greatest {}
// SAFETY: each task has an element of its own.
unsafe impl Sync for Greatest {}

impl Greatest {
    fn at(&self, task: usize) -> *mut f32 {
        self.0.wrapping_add(task)
    }
}

/// The greater of two numbers; NaN if one is NaN.
fn greater(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

impl Shared<'_> {
    /// Computes the small outputs of one head of a sequence; returns its greatest score.
    fn small<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        span: SeqSpan,
        i_head: u32,
        [row_max, key_sum]: [Option<Bytes>; 2],
    ) -> f32 {
        let head = self.score.head(span, i_head);
        let dims = self.problem.dims;
        let mut sums = vec![0.0f64; if key_sum.is_some() { span.seqlen_k as usize } else { 0 }];
        let mut greatest = f32::NEG_INFINITY;
        for i in (0..span.seqlen_q).step_by(self.blocks.block_m) {
            let queries = (span.seqlen_q - i).min(self.blocks.block_m as u32);
            let task = Task { span: 0, i_head, i, queries, keys: 0 };
            self.load_queries(s, scratch, task, &head, false);
            let mut rows = vec![Row::NOTHING; queries as usize];
            self.scores_of(s, scratch, task, &head, |row, _, score| rows[row].add(score));
            for (row, found) in rows.iter().enumerate() {
                let max = found.max as f32;
                greatest = greater(greatest, max);
                if let Some(to) = row_max {
                    // SAFETY: a live row, which is this task's alone.
                    unsafe { to.write_f32(span.lse_index(self.problem, i_head, i + row as u32), max) };
                }
            }
            if key_sum.is_some() {
                let lse: Vec<f64> = rows.iter().map(|row| row.lse(head.sink)).collect();
                self.scores_of(s, scratch, task, &head, |row, key, score| {
                    if score > f32::NEG_INFINITY || score.is_nan() {
                        sums[key] += (f64::from(score) - lse[row]).exp();
                    }
                });
            }
        }
        if let Some(to) = key_sum {
            let first = (span.i_batch as usize * dims.num_heads_q as usize + i_head as usize)
                * dims.seqlen_k as usize;
            for key in 0..dims.seqlen_k as usize {
                let sum = sums.get(key).copied().unwrap_or(0.0);
                // SAFETY: the argument check measured a number for each sequence, head and key.
                unsafe { to.write_f32(first + key, sum as f32) };
            }
        }
        greatest
    }

    /// Calls `each` with every score of a task, its row and its key; the score is -inf for a hidden pair. For one
    /// key rows ascend, and within a tile keys ascend.
    fn scores_of<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        task: Task,
        head: &HeadScore,
        mut each: impl FnMut(usize, usize, f32),
    ) {
        let dim = self.problem.dims.head_dim_qk as usize;
        let queries = task.queries as usize;
        let factor = if self.problem.cache.dtype.is_some() { 1.0 } else { head.descale_k };
        for (j, keys) in key_tiles(head, task.i..task.i + task.queries, self.blocks.block_n) {
            s.run(GatherRows {
                from: self.k.block(s, head, (j, keys), head.descale_k, false, &mut scratch.gathered),
                rows: keys,
                cols: dim,
                factor,
                to: scratch.keys.as_mut_ptr(),
                pairs: false,
            });
            for first in (0..queries).step_by(S::PANEL) {
                let live = S::PANEL.min(queries - first);
                let Some(panel) = head.panel(task.i + first as u32, live, j, keys) else {
                    continue;
                };
                self.panel_of_scores(s, scratch, head, panel, scratch_queries(scratch, first, dim));
                for row in panel.rows.0..panel.rows.1 {
                    for lane in 0..live {
                        // SAFETY: `row` and the lane are in use in the panel of scores, which has been filled.
                        let score = unsafe { *scratch.scores.as_ptr().add(row * S::PANEL + lane) };
                        each(first + lane, j as usize + row, score);
                    }
                }
            }
        }
    }

    /// Computes the scores of PANEL queries and a block of keys, as they are before the softmax.
    fn panel_of_scores<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        head: &HeadScore,
        panel: Panel,
        queries: *const f32,
    ) {
        let scores = scratch.scores.as_mut_ptr();
        let (keys, factor) = (scratch.keys.as_ptr(), head.softmax_scale);
        let dim = self.problem.dims.head_dim_qk as usize;
        s.run(Scores { panel, keys, queries, dim, factor, scores, pairs: false });
        if let Some(code) = &self.score.code {
            let hide = scratch.hide.as_mut_ptr();
            // SAFETY: `scores` and `hide` have PANEL numbers for each key of the panel.
            unsafe { code.score(s, &mut scratch.code, head, &panel, (scores, hide)) };
        }
        if head.adjusts(&panel) {
            let bias = scratch.extra.as_mut_ptr();
            s.plain().run(Adjust { head, panel, scores, bias, slope: None });
        }
        if head.coded {
            // SAFETY: the panel and the buffers are those of the call above, of the sizes that it takes.
            unsafe { Code::hide::<S>(&panel, scores, scratch.hide.as_ptr(), f32::NEG_INFINITY) };
        }
    }
}

/// The PANEL queries from `first` on, transposed, in scratch memory.
fn scratch_queries(scratch: &Scratch, first: usize, dim: usize) -> *const f32 {
    scratch.queries.as_ptr().wrapping_add(first * dim)
}
