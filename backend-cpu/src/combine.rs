//! Combine: `LSE = ln sum_n exp LSE_n`, `O = sum_n exp(LSE_n - LSE) O_n`, a row at a time.
//!
//! Or, without LSE, `O = sum_n O_n` in f32.
//!
//! Weights are divided by their own sum, not taken from LSE: for equal parts with LSE −1e30 the combined LSE rounds
//! to that of each part, and weights would be 1.

use std::ops::Range;

use fmha_core::{CombineArgs, CombineProblem, Merge};

use crate::memory::{Bytes, Floats, reserve};
use crate::simd::Simd;
use crate::tasks::Threads;
use crate::tensor::{Source, Target, f32_at};

/// A combine call with its arguments checked.
pub(crate) struct Combine<'a> {
    pub(crate) problem: &'a CombineProblem,
    pub(crate) args: &'a CombineArgs<'a>,
}

/// Rows of a task.
const ROWS: usize = 64;

/// Rows of task number `task`, of `rows` in total.
fn rows_of(task: usize, rows: usize) -> Range<usize> {
    task * ROWS..rows.min((task + 1) * ROWS)
}

impl Combine<'_> {
    /// Computes it.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses, before anything is written.
    pub(crate) fn run<S: Simd>(&self, _: S, threads: &Threads) -> fmha_core::Result<()> {
        let problem = self.problem;
        let shape = problem.shape();
        let mut sources = reserve(self.args.parts.len())?;
        sources
            .extend(self.args.parts.iter().map(|part| Source::new(part.o, problem.dtype_part, problem.part)));
        let held = Source::new(self.args.o.as_input(), problem.dtype_o, problem.o);
        let target = Target::new(&self.args.o, problem.dtype_o, problem.o);
        let lse_out = self.args.lse.as_ref().map(Bytes::new);
        let rows = problem.lse_elems() as usize;
        let tasks = rows.div_ceil(ROWS);
        let (dim, parts) = (problem.head_dim_v as usize, self.args.parts);
        let used = threads.used(tasks);
        let mut scratch = reserve(used)?;
        for _ in 0..used {
            scratch.push(Floats::scratch(dim)?);
        }
        threads.for_each(&mut scratch, tasks, |scratch, task| {
            // SAFETY: `dim` zeroed numbers of this thread's.
            let out = unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr(), dim) };
            for index in rows_of(task, rows) {
                let seq = shape.seq as usize;
                let (i, head) = ((index % seq) as u32, index / seq);
                let (i_batch, i_head) = ((head / shape.head as usize) as u32, head as u32 % shape.head);
                if problem.adds() {
                    // The sum starts from -0, which leaves every first term unchanged, also -0; without terms the
                    // sum is 0.
                    out.fill(if sources.is_empty() { 0.0 } else { -0.0 });
                    if problem.merge == Merge::AddTo {
                        let before = held.matrix(i_batch, i_head, i);
                        for (d, out) in out.iter_mut().enumerate() {
                            // SAFETY: the argument check measured O; this row is read before it is written,
                            // by this task.
                            *out = unsafe { before.get(0, d) };
                        }
                    }
                    for source in &sources {
                        let part = source.matrix(i_batch, i_head, i);
                        for (d, out) in out.iter_mut().enumerate() {
                            // SAFETY: the argument check measured every part.
                            *out += unsafe { part.get(0, d) };
                        }
                    }
                    // SAFETY: this row belongs to this task.
                    unsafe { target.write_row(i_batch, i, i_head, 0, out) };
                    continue;
                }
                let lse = |n: usize| f64::from(f32_at(&parts[n].lse, index));
                let (mut top, mut any_nan) = (f64::NEG_INFINITY, false);
                for n in 0..parts.len() {
                    any_nan |= lse(n).is_nan();
                    top = top.max(lse(n));
                }
                let sum = if any_nan {
                    f64::NAN
                } else if top == f64::NEG_INFINITY {
                    0.0
                } else {
                    (0..parts.len()).map(|n| (lse(n) - top).exp()).sum()
                };
                let total = top + sum.ln();
                out.fill(0.0);
                for (n, source) in sources.iter().enumerate() {
                    let weight = ((lse(n) - top).exp() / sum) as f32;
                    // O of a part without visible keys may hold anything.
                    if lse(n) == f64::NEG_INFINITY {
                        continue;
                    }
                    let part = source.matrix(i_batch, i_head, i);
                    for (d, out) in out.iter_mut().enumerate() {
                        // SAFETY: the argument check measured every part.
                        *out += weight * unsafe { part.get(0, d) };
                    }
                }
                // SAFETY: this row belongs to this task.
                unsafe {
                    target.write_row(i_batch, i, i_head, 0, out);
                    if let Some(lse_out) = lse_out {
                        lse_out.write_f32(index, total as f32);
                    }
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_task() {
        for rows in [0, 1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 7] {
            let tasks = rows.div_ceil(ROWS);
            let found: Vec<usize> = (0..tasks).flat_map(|task| rows_of(task, rows)).collect();
            assert_eq!(found, (0..rows).collect::<Vec<_>>());
            assert!((0..tasks).all(|task| (1..=ROWS).contains(&rows_of(task, rows).len())), "{rows}");
        }
    }
}
