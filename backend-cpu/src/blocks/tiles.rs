//! The forward's products in tiles of bf16. O is transposed like S: head dimension down, queries across. K's rows
//! and V's columns are operand A, Q and P are operand B, so that P is used in the layout that the softmax writes.

use super::row_stride;
use crate::score::{Panel, Visible};
use crate::simd::{Between, Nothing, Op, Simd, TileProduct};
use crate::tensor::Target;

/// Number of bf16 that one step of a product reduces over, and of rows of A in a block.
pub(crate) const TILE: usize = 32;
/// f32 numbers of a vector; a panel of PANEL columns is two vectors wide.
const LANES: usize = 16;

/// `scores[row][lane] = K Q^T`, without the softmax scale; a row is a key, a lane one of PANEL queries.
pub(crate) struct TileScores {
    pub(crate) panel: Panel,
    /// Dense rows of `units` pairs.
    pub(crate) keys: *const f32,
    /// PANEL queries transposed, in pairs of elements: `[units][PANEL]`.
    pub(crate) queries: *const f32,
    /// Half the head dimension.
    pub(crate) units: usize,
    pub(crate) scores: *mut f32,
}

impl TileScores {
    /// Computes the scores, and calls `between` after each step.
    #[inline(always)]
    fn run<S: Simd>(self, s: S, between: &mut impl Between<S>) {
        let Self { panel, keys, queries, units, scores } = self;
        let stride = row_stride(units);
        for row in (panel.rows.0 / TILE * TILE..panel.rows.1).step_by(TILE) {
            let block = TileProduct {
                a: keys.wrapping_add(row * stride).cast(),
                a_row: 4 * stride,
                b: queries.cast(),
                b_row: 4 * S::PANEL,
                steps: units / LANES,
                c: scores.wrapping_add(row * S::PANEL),
                c_row: 4 * S::PANEL,
                add: false,
            };
            // SAFETY: capacities are multiples of a tile; rows beyond the last live one hold old numbers,
            // which reach no other row.
            unsafe { block.run(s, between) };
        }
    }

    fn steps(&self) -> usize {
        (self.panel.rows.1.div_ceil(TILE) - self.panel.rows.0 / TILE) * (self.units / LANES)
    }
}

/// Converts V of a tile of keys from panels of pairs `[dim / PANEL][capacity][PANEL]` to rows of its columns,
/// `[dim][row_stride(capacity)]` pairs, with zeros beyond the last key, since P = 0 of a missing key must be
/// multiplied by a finite number.
pub(crate) struct TransposeValues {
    pub(crate) from: *mut f32,
    pub(crate) capacity: usize,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    pub(crate) to: *mut f32,
}

impl<S: Simd> Op<S> for TransposeValues {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, capacity, keys, dim, to } = self;
        let (units, stride) = (keys.div_ceil(2), row_stride(capacity));
        let whole = units.next_multiple_of(LANES);
        for col in (0..dim).step_by(LANES) {
            let panel = from.wrapping_add(col / S::PANEL * S::PANEL * capacity + col % S::PANEL);
            // SAFETY: `capacity` is a multiple of the pairs of a tile, and `dim` a multiple of PANEL.
            unsafe {
                for unit in units..whole {
                    s.store(panel.add(unit * S::PANEL), s.splat(0.0));
                }
                for unit in (0..whole).step_by(LANES) {
                    s.transpose(panel.add(unit * S::PANEL), S::PANEL, to.add(col * stride + unit), stride);
                }
            }
        }
    }
}

/// Turns scores into pairs of probabilities, `P = 2^(factor S - row_max)`, with zeros in the dead rows of the
/// tiles, and updates the running state as [`Softmax`](super::Softmax) does, but in powers of 2.
///
/// `row_max` is only raised when the maximum exceeds it by `slack`, so that O is rarely rescaled; any base that
/// keeps P in range is correct (FlashAttention-4 does this too).
#[derive(Clone, Copy)]
pub(crate) struct TileSoftmax {
    pub(crate) panel: Panel,
    pub(crate) scores: *mut f32,
    /// Factor of the scores, above 0.
    pub(crate) factor: f32,
    /// P stays below 2 to this power.
    pub(crate) slack: f32,
    pub(crate) state: super::RowState,
}

/// Largest base for which scores need not be scaled first, 2^22. The base is a rounded product, and a multiply-add
/// subtracts it from exact products. Beyond this limit half an ulp of the base exceeds 2^-2, so P would be wrong by
/// a quarter of a power of 2 or more.
const LARGEST_BASE: f32 = 4_194_304.0;

/// Progress of a [`TileSoftmax`]: first the comparison for the largest scores, then the probabilities.
struct Progress<S: Simd, const VECTORS: usize> {
    softmax: TileSoftmax,
    /// Factor of the scores.
    factor: [S::V; VECTORS],
    /// Largest scores so far of even and of odd rows: one chain of maxima would take twice as long.
    largest: [[S::V; VECTORS]; 2],
    /// The next row to compare.
    compared: usize,
    /// Term that is added to a score.
    base: [S::V; VECTORS],
    row_sum: [S::V; VECTORS],
    /// The row whose probabilities are computed next.
    row: usize,
    /// Pairs of rows between two steps of a product.
    pairs: usize,
}

/// Rows compared in the time of one row's probabilities.
const COMPARED_AT_ONCE: usize = 8;

impl<S: Simd, const VECTORS: usize> Between<S> for Progress<S, VECTORS> {
    #[inline(always)]
    fn go_on(&mut self, s: S) {
        if self.compared < self.softmax.panel.rows.1 {
            self.compare(s, 2 * COMPARED_AT_ONCE * self.pairs);
        } else {
            self.advance(s, self.pairs);
        }
    }
}

impl TileSoftmax {
    /// Slack for a V of moderate size.
    pub(crate) const SLACK: f32 = 8.0;

    #[inline(always)]
    fn begin<S: Simd, const VECTORS: usize>(self, s: S, pairs: usize) -> Progress<S, VECTORS> {
        let (zero, first) = ([s.splat(0.0); VECTORS], self.panel.rows.0);
        Progress {
            softmax: self,
            factor: [s.splat(self.factor); VECTORS],
            largest: [[s.splat(f32::NEG_INFINITY); VECTORS]; 2],
            compared: first,
            base: zero,
            row_sum: zero,
            row: first,
            pairs,
        }
    }

    #[inline(always)]
    fn at<S: Simd>(&self, row: usize, v: usize) -> *mut f32 {
        self.scores.wrapping_add(row * S::PANEL + v * S::LANES)
    }
}

impl<S: Simd, const VECTORS: usize> Progress<S, VECTORS> {
    /// Compares the next `rows` with the largest; after the last row, updates the running state.
    #[inline(always)]
    fn compare(&mut self, s: S, rows: usize) {
        let stop = (self.compared + rows).min(self.softmax.panel.rows.1);
        for row in (self.compared..stop).step_by(2) {
            // An odd last row is compared twice.
            for (parity, row) in [row, (row + 1).min(stop - 1)].into_iter().enumerate() {
                for (v, largest) in self.largest[parity].iter_mut().enumerate() {
                    // SAFETY: `row` and `v` are a row and a vector of the panel of scores. A NaN leaves the maximum
                    // alone and shows in P.
                    *largest = s.max(unsafe { s.load(self.softmax.at::<S>(row, v)) }, *largest);
                }
            }
        }
        self.compared = stop;
        if stop == self.softmax.panel.rows.1 {
            self.settle(s);
        }
    }

    #[inline(always)]
    fn settle(&mut self, s: S) {
        let state = self.softmax.state;
        let (nothing, zero) = (s.splat(f32::NEG_INFINITY), s.splat(0.0));
        let mut farthest = zero;
        for (v, base) in self.base.iter_mut().enumerate() {
            // SAFETY: maxima, sums and factors have PANEL numbers each, one for each query.
            unsafe {
                let row_max = state.row_max.add(v * S::LANES);
                let (old, seen) =
                    (s.load(row_max), s.mul(s.max(self.largest[0][v], self.largest[1][v]), self.factor[v]));
                // The difference of -inf and -inf is NaN; the selection then gives the new maximum.
                let new = s.select_le(s.sub(seen, old), s.splat(self.softmax.slack), old, seen);
                // The base is 0 for a row without visible keys: 2^(-inf - 0) is 0, but 2^(-inf - -inf) is NaN.
                let finite = s.select_le(new, nothing, zero, new);
                s.store(state.alpha.add(v * S::LANES), s.exp2_coarse(s.sub(old, finite)));
                s.store(row_max, new);
                *base = s.sub(zero, finite);
                farthest = s.max(farthest, s.abs(finite));
            }
        }
        // Lanes without a query may hold any number, so each lane is tested separately: no row's bits may depend on
        // another row.
        if s.largest(farthest) > LARGEST_BASE {
            self.scale_far_lanes(s);
        }
    }

    /// Multiplies scores by the factor, like the base was, in lanes whose base is far from 0: their difference is
    /// then exact.
    #[inline(always)]
    fn scale_far_lanes(&mut self, s: S) {
        let (first, last) = self.softmax.panel.rows;
        let limit = s.splat(LARGEST_BASE);
        for v in 0..VECTORS {
            let (base, factor) = (self.base[v], self.factor[v]);
            let distance = s.abs(base);
            for row in first..last {
                let at = self.softmax.at::<S>(row, v);
                // SAFETY: `row` and `v` are a row and a vector of the panel of scores.
                unsafe {
                    let score = s.load(at);
                    s.store(at, s.select_le(distance, limit, score, s.mul(score, factor)));
                }
            }
            self.factor[v] = s.select_le(distance, limit, factor, s.splat(1.0));
        }
    }

    /// Probabilities of a row's vector.
    #[inline(always)]
    fn exp(&mut self, s: S, row: usize, v: usize) -> S::V {
        // SAFETY: `row` and `v` are a row and a vector of the panel of scores.
        let score = unsafe { s.load(self.softmax.at::<S>(row, v)) };
        let p = s.exp2_coarse(s.fma(score, self.factor[v], self.base[v]));
        self.row_sum[v] = s.add(self.row_sum[v], p);
        p
    }

    /// Computes the probabilities of the next `pairs` of rows; an odd last row has no partner.
    #[inline(always)]
    fn advance(&mut self, s: S, pairs: usize) {
        let stop = (self.row + 2 * pairs).min(self.softmax.panel.rows.1 & !1);
        while self.row < stop {
            for v in 0..VECTORS {
                let (low, high) = (self.exp(s, self.row, v), self.exp(s, self.row + 1, v));
                // SAFETY: there are half as many rows as scores.
                unsafe { s.store(self.softmax.at::<S>(self.row / 2, v), s.pair_weights(low, high)) };
            }
            self.row += 2;
        }
    }

    /// Processes the rows that are left.
    #[inline(always)]
    fn finish(mut self, s: S) {
        let (first, last) = self.softmax.panel.rows;
        if self.compared < last {
            self.compare(s, last);
        }
        self.advance(s, last);
        // SAFETY: rows and lanes are inside the panel of scores; maxima, sums and factors have PANEL numbers each.
        unsafe {
            if self.row < last {
                for v in 0..VECTORS {
                    let low = self.exp(s, self.row, v);
                    s.store(self.softmax.at::<S>(self.row / 2, v), s.pair_weights(low, s.splat(0.0)));
                }
            }
            let state = self.softmax.state;
            for (v, &sum) in self.row_sum.iter().enumerate() {
                let (total, alpha) = (state.row_sum.add(v * S::LANES), state.alpha.add(v * S::LANES));
                s.store(total, s.fma(s.load(total), s.load(alpha), sum));
            }
            let live = first / 2..last.div_ceil(2);
            let before = live.start / LANES * LANES..live.start;
            for unit in before.chain(live.end..live.end.next_multiple_of(LANES)) {
                for v in 0..2 {
                    s.store(self.softmax.at::<S>(unit, v), s.splat(0.0));
                }
            }
        }
    }
}

/// Work that overlaps, since tiles and vectors use different units: products of the panel before and of the panel
/// after, with the softmax of a panel between their steps.
pub(crate) struct TileStage {
    pub(crate) columns: Option<TileColumns>,
    pub(crate) softmax: Option<TileSoftmax>,
    pub(crate) scores: Option<TileScores>,
}

impl<S: Simd> Op<S> for TileStage {
    #[inline(always)]
    fn call(self, s: S) {
        match self.softmax {
            Some(softmax) if softmax.panel.queries <= S::LANES => self.with::<S, 1>(s, softmax),
            Some(softmax) => self.with::<S, 2>(s, softmax),
            None => self.products(s, &mut Nothing),
        }
    }
}

impl TileStage {
    #[inline(always)]
    fn with<S: Simd, const VECTORS: usize>(self, s: S, softmax: TileSoftmax) {
        let steps = self.columns.as_ref().map_or(0, TileColumns::steps)
            + self.scores.as_ref().map_or(0, TileScores::steps);
        // A ninth of the steps compares.
        let half_rows = (softmax.panel.rows.1 - softmax.panel.rows.0).div_ceil(2);
        let pairs = (half_rows + half_rows.div_ceil(COMPARED_AT_ONCE)).div_ceil(steps.max(1));
        let mut progress = softmax.begin::<S, VECTORS>(s, pairs);
        self.products(s, &mut progress);
        progress.finish(s);
    }

    #[inline(always)]
    fn products<S: Simd>(self, s: S, between: &mut impl Between<S>) {
        if let Some(columns) = self.columns {
            columns.run(s, between);
        }
        if let Some(scores) = self.scores {
            scores.run(s, between);
        }
    }
}

/// `out[col][lane] (=|+=) sum_row P[row][lane] V[row][col]`, `out` times `alpha` first.
pub(crate) struct TileColumns {
    pub(crate) panel: Panel,
    /// P in pairs of keys: `[units][PANEL]`, a lane for each of PANEL queries.
    pub(crate) weights: *const f32,
    /// V's columns, [`TransposeValues`]'s.
    pub(crate) columns: *const f32,
    /// Capacity of a column in pairs of keys.
    pub(crate) capacity: usize,
    pub(crate) dim: usize,
    /// O of PANEL queries, transposed: `[dim][PANEL]`.
    pub(crate) out: *mut f32,
    /// `None` where `out` holds nothing yet.
    pub(crate) alpha: Option<*const f32>,
}

impl TileColumns {
    /// Pairs of keys from the first live tile on, to the last.
    fn units(&self) -> (usize, usize) {
        (self.panel.rows.0 / TILE * LANES, self.panel.rows.1.div_ceil(TILE) * LANES)
    }

    fn steps(&self) -> usize {
        let (first, last) = self.units();
        (last - first) / LANES * (self.dim / TILE)
    }

    /// Runs as [`TileScores::run`] does.
    #[inline(always)]
    fn run<S: Simd>(self, s: S, between: &mut impl Between<S>) {
        self.rescale(s);
        let (first, last) = self.units();
        let Self { weights, columns, capacity, dim, out, alpha, .. } = self;
        let stride = row_stride(capacity);
        for col in (0..dim).step_by(TILE) {
            let block = TileProduct {
                a: columns.wrapping_add(col * stride + first).cast(),
                a_row: 4 * stride,
                b: weights.wrapping_add(first * S::PANEL).cast(),
                b_row: 4 * S::PANEL,
                steps: (last - first) / LANES,
                c: out.wrapping_add(col * S::PANEL),
                c_row: 4 * S::PANEL,
                add: alpha.is_some(),
            };
            // SAFETY: whole tiles of keys and columns; lanes beyond the live ones reach no other lane.
            unsafe { block.run(s, between) };
        }
    }

    #[inline(always)]
    fn rescale<S: Simd>(&self, s: S) {
        let Some(alpha) = self.alpha else { return };
        // SAFETY: `out` has `dim` rows of PANEL numbers, and `alpha` has PANEL.
        unsafe {
            let alphas = [s.load(alpha), s.load(alpha.add(S::LANES))];
            // Most tiles do not rescale, so their factors are 1: see `TileSoftmax`.
            if (0..self.panel.queries).all(|lane| *alpha.add(lane) == 1.0) {
                return;
            }
            for at in (0..self.dim * S::PANEL).step_by(S::PANEL) {
                for (v, &alpha) in alphas.iter().enumerate() {
                    let at = self.out.add(at + v * S::LANES);
                    s.store(at, s.mul(s.load(at), alpha));
                }
            }
        }
    }

    /// Computes the product over visible pairs alone, one pair at a time. `panels` holds V in pairs, in the
    /// layout of [`TransposeValues`]. See [`Columns::visible_only`](super::Columns::visible_only).
    pub(crate) fn visible_only<S: Simd>(self, s: S, visible: Visible, panels: *const f32) {
        self.rescale(s);
        let half = |pair: f32, row: usize| f32::from_bits(pair.to_bits() >> (16 * (row % 2)) << 16);
        for lane in 0..self.panel.queries {
            for col in 0..self.dim {
                // SAFETY: rows, lanes and columns are inside the arrays of PANEL numbers a row.
                unsafe {
                    let out = self.out.add(col * S::PANEL + lane);
                    if self.alpha.is_none() {
                        *out = 0.0;
                    }
                    for row in self.panel.rows.0..self.panel.rows.1 {
                        let weight = half(*self.weights.add(row / 2 * S::PANEL + lane), row);
                        if visible.sees(self.panel.i + lane as u32, self.panel.j + row as u32, weight) {
                            let at = (col / S::PANEL * self.capacity + row / 2) * S::PANEL + col % S::PANEL;
                            *out += weight * half(*panels.add(at), row);
                        }
                    }
                }
            }
        }
    }
}

/// Writes O of PANEL queries a block, `[dim][PANEL]`, times the factors of its rows, to rows of a bf16 tensor.
pub(crate) struct WriteTransposed<'a> {
    pub(crate) to: &'a Target,
    /// Batch, first row, head.
    pub(crate) at: (u32, u32, u32),
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) from: *const f32,
    /// Factor of each row of O, with room up to a multiple of PANEL rows.
    pub(crate) factors: *const f32,
    /// A bit for each block of PANEL rows of O that was never written and counts as 0.
    pub(crate) untouched: u128,
    /// Scratch of two blocks of LANES x LANES.
    pub(crate) staging: *mut f32,
}

impl<S: Simd> Op<S> for WriteTransposed<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { to, at: (batch, first_row, head), rows, dim, from, factors, untouched, staging } = self;
        let rounded = staging.wrapping_add(S::LANES * S::LANES);
        for first in (0..rows).step_by(S::LANES) {
            let (panel, lane) = (first / S::PANEL, first % S::PANEL);
            let from = from.wrapping_add(panel * S::PANEL * dim + lane);
            let live = S::LANES.min(rows - first);
            // SAFETY: `from` has whole blocks of PANEL queries and of PANEL columns; no other task writes these
            // rows.
            unsafe {
                let factors = s.load(factors.add(first));
                for col in (0..dim).step_by(2 * S::LANES) {
                    for unit in 0..S::LANES {
                        let from = from.add((col + 2 * unit) * S::PANEL);
                        let pair = if untouched & 1 << panel != 0 {
                            s.splat(0.0)
                        } else {
                            let (low, high) = (s.load(from), s.load(from.add(S::PANEL)));
                            s.pair_bf16(s.mul(low, factors), s.mul(high, factors))
                        };
                        s.store(rounded.add(unit * S::LANES), pair);
                    }
                    s.transpose(rounded, S::LANES, staging, S::LANES);
                    for row in 0..live {
                        let to =
                            to.row_ptr(batch, (first_row as usize + first + row) as u32, head, col as u32);
                        s.store(to.cast(), s.load(staging.add(row * S::LANES)));
                    }
                }
            }
        }
    }
}

/// Transposes O of PANEL queries, `[dim][PANEL]`, to rows in blocks of PANEL columns, `capacity` rows each.
pub(crate) struct UntransposeOut {
    pub(crate) from: *const f32,
    pub(crate) dim: usize,
    pub(crate) to: *mut f32,
    pub(crate) capacity: usize,
}

impl<S: Simd> Op<S> for UntransposeOut {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, dim, to, capacity } = self;
        for col in (0..dim).step_by(S::LANES) {
            let to = to.wrapping_add(col / S::PANEL * S::PANEL * capacity + col % S::PANEL);
            for lane in [0, S::LANES] {
                // SAFETY: `from` and `to` have room for whole blocks of PANEL columns.
                unsafe {
                    s.transpose(from.add(col * S::PANEL + lane), S::PANEL, to.add(lane * S::PANEL), S::PANEL);
                }
            }
        }
    }
}
