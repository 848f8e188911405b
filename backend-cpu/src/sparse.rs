//! An indexer's scores, and the keys that they choose: what `fmha_core::sparse` says, with f32 sums on every thread.
//!
//! A task is a few tokens. Tiles of keys are copied to rows once for all of them; a token's heads are the columns of
//! the product, and their sum goes over lanes. A choice keeps the scores of its own tokens alone.

use fmha_core::sparse::{IndexCall, before};
use fmha_core::{DType, DevSlice, ProblemError, Result};

use crate::CpuBackend;
use crate::blocks::{GatherRows, GatherTransposed, Scores, row_stride};
use crate::isa::Kernels;
use crate::memory::{Bytes, Floats, reserve};
use crate::score::Panel;
use crate::simd::{Op, Simd};
use crate::tasks::Threads;
use crate::tensor::Matrix;

/// Keys of a tile: whole micro-tiles.
const TILE_KEYS: usize = 96;

/// Tokens of a task.
const TOKENS: usize = 8;

impl CpuBackend {
    /// The scores of an indexer, `[batch, seqlen_q, seqlen_k]`; -inf if a key is no candidate of a query.
    ///
    /// # Errors
    /// `scores` of another length; memory for scratch that the system refuses.
    pub fn index_scores(&self, call: &IndexCall<'_>, scores: &mut [f32]) -> Result<()> {
        let wanted = call.rows().saturating_mul(call.problem().seqlen_k as usize);
        has("scores", scores.len(), wanted)?;
        let to = IndexTo::scores(scores);
        self.engine.index(&Index { call, to }, self.threads.get()?)
    }

    /// The lists of keys with the greatest scores, `[batch, seqlen_q, topk]`: the `topk` candidates of greatest
    /// score of each query, equal ones by position, NaN last, in ascending position with -1 after them. Scores are
    /// never written.
    ///
    /// # Errors
    /// `indices` of another length; memory for scratch that the system refuses.
    pub fn index_lists(&self, call: &IndexCall<'_>, topk: u32, indices: &mut [i32]) -> Result<()> {
        has("indices", indices.len(), call.rows().saturating_mul(topk as usize))?;
        let to = IndexTo::lists(topk as usize, indices);
        self.engine.index(&Index { call, to }, self.threads.get()?)
    }
}

fn has(field: &'static str, given: usize, wanted: usize) -> Result<()> {
    if given == wanted {
        return Ok(());
    }
    let text = format!("{field} has {given} elements, but {wanted} are wanted");
    Err(ProblemError::new(field, text).into())
}

/// Destination of an indexer's scores.
#[derive(Clone, Copy)]
pub(crate) enum IndexTo {
    Scores(Bytes),
    Lists { topk: usize, indices: Bytes },
}

impl IndexTo {
    /// Makes a destination for scores, -inf where a key is no candidate.
    pub(crate) fn scores(scores: &mut [f32]) -> Self {
        scores.fill(f32::NEG_INFINITY);
        Self::Scores(Bytes::of_f32(scores))
    }

    /// Output of a list of `topk` keys for each row, in `indices`.
    pub(crate) fn lists(topk: usize, indices: &mut [i32]) -> Self {
        Self::Lists { topk, indices: Bytes::of_i32(indices) }
    }
}

/// A call of an indexer.
pub(crate) struct Index<'a> {
    pub(crate) call: &'a IndexCall<'a>,
    pub(crate) to: IndexTo,
}

/// Buffers of one thread, reused from task to task.
struct Scratch {
    /// q of a task's tokens, transposed: `[tokens][panels][head_dim][PANEL heads]`.
    queries: Floats,
    staging: Floats,
    keys: Floats,
    /// Products of q and k of PANEL heads.
    products: Floats,
    /// The scores of a task's tokens.
    scores: Floats,
    chosen: Vec<(f32, u32)>,
}

impl Index<'_> {
    /// Computes it.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses, before anything is written.
    pub(crate) fn run<S: Simd>(&self, s: S, threads: &Threads) -> Result<()> {
        let problem = self.call.problem();
        let (seqlen_q, keys) = (problem.seqlen_q as usize, problem.seqlen_k as usize);
        let blocks = seqlen_q.div_ceil(TOKENS);
        let tasks = blocks * problem.batch as usize;
        let used = threads.used(tasks);
        let mut states = reserve(used)?;
        for _ in 0..used {
            states.push(self.scratch::<S>(keys)?);
        }
        threads.for_each(&mut states, tasks, |scratch, task| {
            let (b, first) = (task / blocks, task % blocks * TOKENS);
            let rows = b * seqlen_q + first..b * seqlen_q + seqlen_q.min(first + TOKENS);
            self.score(s, scratch, rows.clone());
            for row in rows.clone() {
                self.put(scratch, row, row - rows.start);
            }
        });
        Ok(())
    }

    fn scratch<S: Simd>(&self, keys: usize) -> Result<Scratch> {
        let problem = self.call.problem();
        let (heads, dim) = (problem.num_heads as usize, problem.head_dim as usize);
        let chooses = matches!(self.to, IndexTo::Lists { .. });
        Ok(Scratch {
            queries: Floats::scratch(TOKENS * heads.next_multiple_of(S::PANEL) * dim)?,
            staging: Floats::scratch(S::PANEL * dim.next_multiple_of(S::PANEL))?,
            keys: Floats::scratch(TILE_KEYS * row_stride(dim))?,
            products: Floats::scratch(TILE_KEYS * S::PANEL)?,
            scores: Floats::scratch(TOKENS * keys)?,
            chosen: reserve(if chooses { keys } else { 0 })?,
        })
    }

    /// Computes the scores of tokens of one sequence with every key that is a candidate of one of them.
    fn score<S: Simd>(&self, s: S, scratch: &mut Scratch, rows: std::ops::Range<usize>) {
        let (call, problem, args) = (self.call, self.call.problem(), self.call.args());
        let (heads, dim) = (problem.num_heads as usize, problem.head_dim as usize);
        let lanes = heads.next_multiple_of(S::PANEL);
        let keys = problem.seqlen_k as usize;
        for (at, row) in rows.clone().enumerate() {
            s.run(GatherTransposed {
                from: matrix(&args.q, problem.dtype_q, dim).skip(row * heads),
                rows: heads,
                cols: dim,
                factor: 1.0,
                to: scratch.queries.as_mut_ptr().wrapping_add(at * lanes * dim),
                staging: scratch.staging.as_mut_ptr(),
                pairs: false,
            });
        }
        let ranges = || rows.clone().map(|row| call.candidates(row));
        let first = ranges().map(|range| range.start as usize).min().unwrap_or(0);
        let end = ranges().map(|range| range.end as usize).max().unwrap_or(0);
        for tile in (first..end).step_by(TILE_KEYS) {
            let count = TILE_KEYS.min(end - tile);
            let key = call.key(rows.start, tile as u32);
            let from = matrix(&args.k, problem.dtype_k, dim).skip(key);
            let to = scratch.keys.as_mut_ptr();
            match args.k_scale {
                None => s.run(GatherRows { from, rows: count, cols: dim, factor: 1.0, to, pairs: false }),
                Some(scale) => (0..count).for_each(|at| {
                    let (factor, to) = (scale[key + at], to.wrapping_add(at * row_stride(dim)));
                    s.run(GatherRows { from: from.skip(at), rows: 1, cols: dim, factor, to, pairs: false });
                }),
            }
            for (at, row) in rows.clone().enumerate() {
                // SAFETY: scores of as many keys for each token.
                let to = unsafe { scratch.scores.as_mut_ptr().add(at * keys + tile) };
                for lane in (0..heads).step_by(S::PANEL) {
                    let queries = S::PANEL.min(heads - lane);
                    let panel = Panel { i: 0, queries, j: 0, rows: (0, count), edge: false };
                    let products = scratch.products.as_mut_ptr();
                    s.run(Scores {
                        panel,
                        keys: scratch.keys.as_ptr(),
                        queries: scratch.queries.as_ptr().wrapping_add((at * lanes + lane) * dim),
                        dim,
                        factor: 1.0,
                        scores: products,
                        pairs: false,
                    });
                    let weights = &args.weights[row * heads + lane..][..queries];
                    s.run(WeighHeads { panel, products, weights, to, adds: lane > 0 });
                }
            }
        }
    }

    /// Writes the scores of a token, or the keys that they choose.
    fn put(&self, scratch: &mut Scratch, row: usize, at: usize) {
        let keys = self.call.problem().seqlen_k as usize;
        let candidates = self.call.candidates(row);
        // SAFETY: every candidate of the token has a score.
        let score = |j: u32| unsafe { *scratch.scores.as_ptr().add(at * keys + j as usize) };
        match self.to {
            IndexTo::Scores(to) => {
                for j in candidates {
                    // SAFETY: no other task writes this row; the length of all rows was checked.
                    unsafe { to.write_f32(row * keys + j as usize, score(j)) };
                }
            }
            IndexTo::Lists { topk, indices } => {
                let chosen = &mut scratch.chosen;
                chosen.clear();
                chosen.extend(candidates.map(|j| (score(j), j)));
                if topk == 0 {
                    chosen.clear();
                } else if topk < chosen.len() {
                    chosen.select_nth_unstable_by(topk - 1, |&a, &b| before(a, b));
                    chosen.truncate(topk);
                }
                chosen.sort_unstable_by_key(|&(_, j)| j);
                for entry in 0..topk {
                    let key = chosen.get(entry).map_or(-1, |&(_, j)| j.cast_signed());
                    // SAFETY: no other task writes this list; the length of all lists was checked.
                    unsafe { indices.write_i32(row * topk + entry, key) };
                }
            }
        }
    }
}

/// Dense rows of a tensor in host memory.
fn matrix(slice: &DevSlice<'_>, dtype: DType, cols: usize) -> Matrix {
    Matrix::dense(slice.as_ptr(), dtype, cols)
}

/// `to[row] (+)= sum_lane relu(products[row][lane]) weights[lane]`; NaN stays NaN.
struct WeighHeads<'a> {
    panel: Panel,
    products: *const f32,
    weights: &'a [f32],
    to: *mut f32,
    adds: bool,
}

impl<S: Simd> Op<S> for WeighHeads<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { panel, products, weights, to, adds } = self;
        // Lanes without a head may hold anything, and 0 times NaN is NaN, so these lanes are left out of the sum
        // below.
        let mut lanes = [0.0f32; 32];
        lanes[..weights.len()].copy_from_slice(weights);
        let mut live = [0.0f32; 32];
        live[..weights.len()].fill(1.0);
        let (zero, half) = (s.splat(0.0), s.splat(0.5));
        for row in panel.rows.0..panel.rows.1 {
            let mut sum = zero;
            for v in 0..panel.vectors::<S>() {
                // SAFETY: the arrays have rows of PANEL numbers, which are 32 at most.
                unsafe {
                    let product = s.load(products.add(row * S::PANEL + v * S::LANES));
                    // `max` returns its second operand if one of the operands is NaN, so a NaN score stays.
                    let relu = s.max(zero, product);
                    let is_live = s.load(live.as_ptr().add(v * S::LANES));
                    let relu = s.select_le(half, is_live, relu, zero);
                    sum = s.fma(relu, s.load(lanes.as_ptr().add(v * S::LANES)), sum);
                }
            }
            // SAFETY: a score for each row.
            unsafe {
                let to = to.add(row);
                *to = if adds { *to + s.sum(sum) } else { s.sum(sum) };
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use fmha_core::sparse::{Candidates, IndexArgs, IndexProblem, choose, index_scores};
    use half::bf16;

    use super::*;
    use crate::Config;

    fn noise(count: u32, salt: u32) -> Vec<f32> {
        let word = |i| fmha_core::dropout::philox4x32_10([i, salt, 0, 0], [1, 2])[0];
        (0..count).map(|i| (word(i) >> 21) as f32 / 1024.0 - 1.0).collect()
    }

    fn check(
        problem: IndexProblem,
        candidates: Candidates<'_>,
        k_scale: Option<&[f32]>,
        nan_at: Option<usize>,
    ) {
        let IndexProblem { batch, seqlen_q, seqlen_k, num_heads, head_dim, .. } = problem;
        let narrow = |x: Vec<f32>| x.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let q = narrow(noise(batch * seqlen_q * num_heads * head_dim, 1));
        let mut k = narrow(noise(batch * seqlen_k * head_dim, 2));
        if let Some(at) = nan_at {
            k[at] = bf16::NAN;
        }
        let weights = noise(batch * seqlen_q * num_heads, 3);
        let (q, k) = (DevSlice::host(&q), DevSlice::host(&k));
        let args = IndexArgs { q, k, weights: &weights, k_scale, candidates };
        let call = IndexCall::new(problem, args).unwrap();
        let exact = index_scores(&call);
        let backend = CpuBackend::with(Config { threads: Some(2), isa: None }).unwrap();
        let mut found = vec![7.0; exact.len()];
        backend.index_scores(&call, &mut found).unwrap();
        for (at, (&found, &exact)) in found.iter().zip(&exact).enumerate() {
            let (found, close) = (f64::from(found), 1e-5 * f64::from(num_heads * head_dim));
            let alike = found == exact || found.is_nan() && exact.is_nan() || (found - exact).abs() < close;
            assert!(alike, "{problem:?} [{at}]: {found}, should be {exact}");
        }
        for topk in [0, 1, 5, 64, seqlen_k + 3] {
            let mut lists = vec![99; call.rows() * topk as usize];
            backend.index_lists(&call, topk, &mut lists).unwrap();
            let mut wanted = vec![0; topk as usize];
            for row in 0..call.rows() {
                let scores = &found[row * seqlen_k as usize..][..seqlen_k as usize];
                choose(scores, call.candidates(row), &mut wanted).unwrap();
                assert_eq!(lists[row * topk as usize..][..topk as usize], wanted, "row {row}, topk {topk}");
            }
        }
    }

    #[test]
    fn scores_and_lists_are_those_of_the_definition() {
        let of = |sizes: [u32; 3], num_heads, head_dim| IndexProblem {
            batch: sizes[0],
            seqlen_q: sizes[1],
            seqlen_k: sizes[2],
            num_heads,
            head_dim,
            dtype_q: DType::Bf16,
            dtype_k: DType::Bf16,
        };
        check(of([2, 11, 300], 4, 32), Candidates::Causal, None, None);
        check(of([1, 1, 97], 64, 128), Candidates::All, None, Some(5 * 128));
        check(of([1, 9, 40], 33, 20), Candidates::Causal, Some(&noise(40, 4)), Some(39 * 20));
        check(of([1, 3, 1], 1, 8), Candidates::Causal, None, None);
        check(of([2, 2, 0], 2, 8), Candidates::All, None, None);
        let (first, end) = ([0, -4, 90, 60], [7, i32::MAX, 120, 3]);
        check(of([2, 2, 100], 8, 64), Candidates::Ranges { first: &first, end: &end }, None, None);
    }

    #[test]
    fn what_a_choice_writes_has_as_many_elements_as_it_says() {
        let backend = CpuBackend::with(Config { threads: Some(1), isa: None }).unwrap();
        let problem = IndexProblem {
            batch: 1,
            seqlen_q: 2,
            seqlen_k: 3,
            num_heads: 1,
            head_dim: 4,
            dtype_q: DType::F32,
            dtype_k: DType::F32,
        };
        let (q, k, weights) = ([0f32; 8], [0f32; 12], [1f32; 2]);
        let candidates = Candidates::All;
        let args = IndexArgs {
            q: DevSlice::host(&q),
            k: DevSlice::host(&k),
            weights: &weights,
            k_scale: None,
            candidates,
        };
        let call = IndexCall::new(problem, args).unwrap();
        let error = backend.index_lists(&call, 4, &mut [0; 7]).unwrap_err().to_string();
        assert_eq!(error, "indices has 7 elements, but 8 are wanted");
        let error = backend.index_scores(&call, &mut [0.0; 7]).unwrap_err().to_string();
        assert_eq!(error, "scores has 7 elements, but 6 are wanted");
        // Equal scores: the lower positions.
        let mut lists = [9; 4];
        backend.index_lists(&call, 2, &mut lists).unwrap();
        assert_eq!(lists, [0, 1, 0, 1]);
    }
}
