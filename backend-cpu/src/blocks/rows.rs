//! A block of keys against a few queries, key after key: what a short query over a long cache takes.
//!
//! Nothing is copied: a row of K or V is converted in registers as it comes from memory, for up to four
//! queries at once. Each query's arithmetic is its own, whatever others are beside it.

use fmha_core::DType;

use crate::simd::{Op, Simd, exp};
use crate::tensor::{Elem, Matrix, of_type};

/// Keys of a block.
pub(crate) const BLOCK_KEYS: usize = 64;

/// How many rows ahead memory is asked for: a block's worth hides the latency of two channels.
const AHEAD: usize = 16;

/// `scores[query][key] = factor * Q[query] . K[key]`, for one block.
pub(crate) struct Dots<'a> {
    pub(crate) keys: Matrix,
    pub(crate) count: usize,
    pub(crate) dim: usize,
    /// Rows of f32, `stride` apart.
    pub(crate) queries: *const f32,
    pub(crate) stride: usize,
    /// Which of them.
    pub(crate) live: &'a [usize],
    pub(crate) factor: f32,
    /// [`BLOCK_KEYS`] for each of the queries.
    pub(crate) scores: *mut f32,
}

impl<S: Simd> Op<S> for Dots<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        of_type!(self.keys.dtype, elem => self.of(s, elem));
    }
}

impl Dots<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, elem: E) {
        let mut live = self.live;
        while !live.is_empty() {
            let taken = match live.len() {
                4.. => self.group::<S, E, 4>(s, elem, live),
                2.. => self.group::<S, E, 2>(s, elem, live),
                _ => self.group::<S, E, 1>(s, elem, live),
            };
            live = &live[taken..];
        }
    }

    #[inline(always)]
    fn group<S: Simd, E: Elem, const Q: usize>(&self, s: S, elem: E, live: &[usize]) -> usize {
        let whole = self.dim - self.dim % S::LANES;
        let mut queries = [self.queries; Q];
        let mut scores = [self.scores; Q];
        for ((query, score), &row) in queries.iter_mut().zip(&mut scores).zip(live) {
            *query = self.queries.wrapping_add(row * self.stride);
            *score = self.scores.wrapping_add(row * BLOCK_KEYS);
        }
        for key in 0..self.count {
            let from = self.keys.at(key, 0);
            let ahead = self.keys.at(key + AHEAD, 0);
            for line in (0..self.dim * E::BYTES).step_by(64) {
                s.prefetch(ahead.wrapping_add(line));
            }
            let mut sums = [s.splat(0.0); Q];
            // SAFETY: keys and queries of the call; their rows are as long as `dim`.
            unsafe {
                for col in (0..whole).step_by(S::LANES) {
                    let k = elem.vector(s, from.add(col * E::BYTES));
                    for (sum, query) in sums.iter_mut().zip(queries) {
                        *sum = s.fma(k, s.load(query.add(col)), *sum);
                    }
                }
                for ((sum, query), score) in sums.into_iter().zip(queries).zip(scores) {
                    let mut dot = s.sum(sum);
                    for col in whole..self.dim {
                        dot += elem.one(from.add(col * E::BYTES)) * *query.add(col);
                    }
                    *score.add(key) = dot * self.factor;
                }
            }
        }
        Q
    }
}

/// The running state of one query.
#[derive(Clone, Copy)]
pub(crate) struct RowSums {
    pub(crate) row_max: f32,
    pub(crate) row_sum: f32,
}

impl RowSums {
    /// Nothing seen.
    pub(crate) const EMPTY: Self = Self { row_max: f32::NEG_INFINITY, row_sum: 0.0 };

    /// The maximum to subtract: −inf − −inf would be NaN.
    #[inline(always)]
    pub(crate) fn base(self) -> f32 {
        if self.row_max == f32::NEG_INFINITY { 0.0 } else { self.row_max }
    }
}

/// `e^x` of one number, to the bits that a vector of it has.
#[inline(always)]
pub(crate) fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than sixteen lanes.
    unsafe { s.store(lanes.as_mut_ptr(), exp(s, s.splat(x))) };
    lanes[0]
}

/// A query's block of scores to probabilities, in place, rounded to `round` when that is a 16-bit type, and
/// its running state. What was summed before is to be multiplied by `alpha`.
pub(crate) struct SoftmaxRow<'a> {
    /// [`BLOCK_KEYS`], −inf where a key is hidden or there is none.
    pub(crate) scores: *mut f32,
    pub(crate) state: &'a mut RowSums,
    pub(crate) alpha: &'a mut f32,
    pub(crate) round: DType,
}

impl<S: Simd> Op<S> for SoftmaxRow<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { scores, state, alpha, round } = self;
        let old = state.row_max;
        // SAFETY: a block of scores is whole vectors.
        unsafe {
            let mut most = s.splat(f32::NEG_INFINITY);
            for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                // A NaN leaves the maximum alone and shows in P.
                most = s.max(s.load(scores.add(at)), most);
            }
            let mut lanes = [f32::NEG_INFINITY; 16];
            s.store(lanes.as_mut_ptr(), most);
            state.row_max = lanes.iter().fold(old, |a, &b| if b > a { b } else { a });
            let base = state.base();
            *alpha = if old == state.row_max { 1.0 } else { exp_one(s, old - base) };
            let mut sum = s.splat(0.0);
            for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                let p = exp(s, s.sub(s.load(scores.add(at)), s.splat(base)));
                sum = s.add(sum, p);
                let kept = match round {
                    DType::Bf16 => s.round_to_bf16(p),
                    DType::F16 => s.round_to_f16(p),
                    _ => p,
                };
                s.store(scores.add(at), kept);
            }
            state.row_sum = state.row_sum * *alpha + s.sum(sum);
        }
    }
}

/// `out[query] = alpha[query] out[query] + sum_key P[query][key] V[key]`, for one block.
pub(crate) struct AddValues<'a> {
    pub(crate) values: Matrix,
    pub(crate) count: usize,
    pub(crate) dim: usize,
    /// [`BLOCK_KEYS`] for each query.
    pub(crate) weights: *const f32,
    /// One for each query.
    pub(crate) alpha: *const f32,
    /// Queries that see every key of the block.
    pub(crate) whole: &'a [usize],
    /// Queries that see some, and which: a bit for each key. What the others' V holds does not matter.
    pub(crate) partial: &'a [(usize, u64)],
    /// Rows of f32, `stride` apart.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
}

impl<S: Simd> Op<S> for AddValues<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        of_type!(self.values.dtype, elem => self.of(s, elem));
    }
}

impl AddValues<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, elem: E) {
        let mut whole = self.whole;
        while !whole.is_empty() {
            let taken = match whole.len() {
                4.. => self.group::<S, E, 4>(s, elem, whole, u64::MAX),
                2.. => self.group::<S, E, 2>(s, elem, whole, u64::MAX),
                _ => self.group::<S, E, 1>(s, elem, whole, u64::MAX),
            };
            whole = &whole[taken..];
        }
        for &(row, seen) in self.partial {
            self.group::<S, E, 1>(s, elem, &[row], seen);
        }
    }

    #[inline(always)]
    fn group<S: Simd, E: Elem, const Q: usize>(&self, s: S, elem: E, live: &[usize], seen: u64) -> usize {
        let mut col = 0;
        // Four vectors of each of four queries fit thirty-two registers, two fit sixteen.
        while col + 4 * S::LANES <= self.dim && (S::LANES == 16 || Q <= 2) {
            self.columns::<S, E, Q, 4>(s, elem, live, seen, col);
            col += 4 * S::LANES;
        }
        while col + 2 * S::LANES <= self.dim {
            self.columns::<S, E, Q, 2>(s, elem, live, seen, col);
            col += 2 * S::LANES;
        }
        while col + S::LANES <= self.dim {
            self.columns::<S, E, Q, 1>(s, elem, live, seen, col);
            col += S::LANES;
        }
        for &row in &live[..Q] {
            for col in col..self.dim {
                // SAFETY: rows and columns of the call.
                unsafe {
                    let out = self.out.add(row * self.stride + col);
                    let mut sum = *out * *self.alpha.add(row);
                    for key in (0..self.count).filter(|key| seen >> key & 1 != 0) {
                        let v = elem.one(self.values.at(key, 0).add(col * E::BYTES));
                        sum += *self.weights.add(row * BLOCK_KEYS + key) * v;
                    }
                    *out = sum;
                }
            }
        }
        Q
    }

    #[inline(always)]
    fn columns<S: Simd, E: Elem, const Q: usize, const V: usize>(
        &self,
        s: S,
        elem: E,
        live: &[usize],
        seen: u64,
        col: usize,
    ) {
        let mut out = [self.out; Q];
        let mut weights = [self.weights; Q];
        let mut sums = [[s.splat(0.0); V]; Q];
        // SAFETY: rows and columns of the call; the key that is asked for ahead need not be there.
        unsafe {
            for (query, &row) in live[..Q].iter().enumerate() {
                out[query] = self.out.add(row * self.stride + col);
                weights[query] = self.weights.add(row * BLOCK_KEYS);
                let alpha = s.splat(*self.alpha.add(row));
                for (v, sum) in sums[query].iter_mut().enumerate() {
                    *sum = s.mul(s.load(out[query].add(v * S::LANES)), alpha);
                }
            }
            for key in 0..self.count {
                if seen >> key & 1 == 0 {
                    continue;
                }
                let from = self.values.at(key, 0).add(col * E::BYTES);
                let ahead = self.values.at(key + AHEAD, 0).wrapping_add(col * E::BYTES);
                for line in (0..V * S::LANES * E::BYTES).step_by(64) {
                    s.prefetch(ahead.wrapping_add(line));
                }
                let mut row = [s.splat(0.0); V];
                for (v, row) in row.iter_mut().enumerate() {
                    *row = elem.vector(s, from.add(v * S::LANES * E::BYTES));
                }
                for (sums, weights) in sums.iter_mut().zip(weights) {
                    let p = s.splat(*weights.add(key));
                    for (sum, &v) in sums.iter_mut().zip(&row) {
                        *sum = s.fma(p, v, *sum);
                    }
                }
            }
            for (out, sums) in out.into_iter().zip(&sums) {
                for (v, &sum) in sums.iter().enumerate() {
                    s.store(out.add(v * S::LANES), sum);
                }
            }
        }
    }
}
