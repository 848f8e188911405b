//! Matrix products of panels (blocks of PANEL columns), all computed by the micro-tile of `tile.rs`.

use super::{GatherTransposed, row_stride};
use crate::score::{Panel, Visible};
use crate::simd::{Op, Simd};
use crate::tensor::Matrix;
use crate::tile::{Left, Right, Store, tile};

/// `scores[row][lane] = factor * sum_d keys[row][d] queries[d][lane]`; a row is a key, a lane one of PANEL queries.
pub(crate) struct Scores {
    pub(crate) panel: Panel,
    /// Dense rows of `dim`.
    pub(crate) keys: *const f32,
    /// PANEL queries, transposed: `[dim][PANEL]`.
    pub(crate) queries: *const f32,
    pub(crate) dim: usize,
    pub(crate) factor: f32,
    pub(crate) scores: *mut f32,
    /// Whether `dim` counts pairs of bf16.
    pub(crate) pairs: bool,
}

impl<S: Simd> Op<S> for Scores {
    #[inline(always)]
    fn call(self, s: S) {
        match (S::TILE_ROWS, self.panel.vectors::<S>()) {
            (6, 1) => self.rows::<S, 6, 1, false>(s),
            (6, _) => self.rows::<S, 6, 2, false>(s),
            (_, 1) if S::BF16_DOT && self.pairs => self.rows::<S, 12, 1, true>(s),
            (_, _) if S::BF16_DOT && self.pairs => self.rows::<S, 12, 2, true>(s),
            (_, 1) => self.rows::<S, 12, 1, false>(s),
            (_, _) => self.rows::<S, 12, 2, false>(s),
        }
    }
}

impl Scores {
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const VECTORS: usize, const BF16: bool>(self, s: S) {
        let width = S::PANEL;
        let stride = row_stride(self.dim);
        let keys = Left::dense(self.keys, stride);
        let queries = Right { base: self.queries, step: width };
        let (first, last) = self.panel.rows;
        for row in (first / R * R..last).step_by(R) {
            // SAFETY: capacities are multiples of R; rows beyond the last live one hold old numbers,
            // which reach no other row.
            unsafe {
                let to = self.scores.add(row * width);
                let a = keys.at(row * stride);
                tile::<S, R, VECTORS, BF16>(s, a, queries, self.dim, to, width, Store::Scaled(self.factor));
            }
        }
    }
}

/// `out[lane][col] (=|+=) sum_row weights[row][lane] right[row][col]`: O from P and V, dQ from dS and K.
pub(crate) struct Columns {
    pub(crate) panel: Panel,
    /// P or dS of PANEL queries: `[rows][PANEL]`, a row for each key.
    pub(crate) weights: *const f32,
    /// V or K in blocks of PANEL columns: `[blocks][capacity][PANEL]`.
    pub(crate) right: *const f32,
    pub(crate) capacity: usize,
    pub(crate) dim: usize,
    /// O or dQ in blocks of PANEL columns: `[blocks][out_capacity][PANEL]`.
    pub(crate) out: *mut f32,
    pub(crate) out_capacity: usize,
    pub(crate) store: Store,
    /// Whether `weights` and `right` hold pairs of rows as bf16; `capacity` then counts pairs.
    pub(crate) pairs: bool,
}

impl<S: Simd> Op<S> for Columns {
    #[inline(always)]
    fn call(self, s: S) {
        let mut lane = 0;
        while lane < self.panel.queries {
            // PANEL lanes in micro-tiles: 6 + 6 + 4 lanes for PANEL = 16, 12 + 12 + 8 for 32, and 6 + 2 or 8 for 8.
            let (left, room) = (self.panel.queries - lane, S::PANEL - lane);
            lane += match S::TILE_ROWS {
                _ if left == 1 => self.group::<S, 1>(s, lane),
                _ if left == 2 || room < 4 => self.group::<S, 2>(s, lane),
                _ if left <= 4 || room < 6 => self.group::<S, 4>(s, lane),
                6 => self.group::<S, 6>(s, lane),
                _ if left <= 8 || room < 12 => self.group::<S, 8>(s, lane),
                _ => self.group::<S, 12>(s, lane),
            };
        }
    }
}

impl Columns {
    #[inline(always)]
    fn group<S: Simd, const R: usize>(&self, s: S, lane: usize) -> usize {
        let width = S::PANEL;
        let pairs = S::BF16_DOT && self.pairs;
        let (first, last) = self.panel.rows;
        let (first, last) = if pairs { (first / 2, last.div_ceil(2)) } else { (first, last) };
        let weights = Left::columns(self.weights, width).at(first * width + lane);
        let store = match self.store {
            Store::Rescale(factors) => Store::Rescale(factors.wrapping_add(lane)),
            other => other,
        };
        for col in (0..self.dim).step_by(width) {
            let b = Right { base: self.right.wrapping_add(col * self.capacity + first * width), step: width };
            // SAFETY: the R lanes are among the PANEL lanes of a row. Lanes beyond the live ones compute rows of C
            // that are never read.
            unsafe {
                let c = self.out.add(col * self.out_capacity + lane * width);
                if pairs {
                    tile::<S, R, 2, true>(s, weights, b, last - first, c, width, store);
                } else {
                    tile::<S, R, 2, false>(s, weights, b, last - first, c, width, store);
                }
            }
        }
        R
    }
}

impl Columns {
    /// Computes the product over visible pairs alone, one pair at a time. It is needed if a hidden row of `right`
    /// is not finite: 0 times NaN would reach rows that do not see it.
    pub(crate) fn visible_only<S: Simd>(self, visible: Visible) {
        let (width, (first, last)) = (S::PANEL, self.panel.rows);
        for lane in 0..self.panel.queries {
            for col in 0..self.dim {
                // SAFETY: rows, lanes and columns are inside the arrays of PANEL numbers a row.
                unsafe {
                    let at = |rows: usize, row: usize| (col / width * rows + row) * width + col % width;
                    let out = self.out.add(at(self.out_capacity, lane));
                    *out = match self.store {
                        Store::Scaled(_) => 0.0,
                        Store::Add => *out,
                        Store::Rescale(factors) => *out * *factors.add(lane),
                    };
                    for row in first..last {
                        let (weight, right) = if self.pairs {
                            let half = |pair: f32| f32::from_bits(pair.to_bits() >> (16 * (row % 2)) << 16);
                            let weight = *self.weights.add(row / 2 * width + lane);
                            (half(weight), half(*self.right.add(at(self.capacity, row / 2))))
                        } else {
                            let weight = *self.weights.add(row * width + lane);
                            (weight, *self.right.add(at(self.capacity, row)))
                        };
                        if visible.sees(self.panel.i + lane as u32, self.panel.j + row as u32, weight) {
                            *out += weight * right;
                        }
                    }
                }
            }
        }
    }
}

/// `out[row][col] += sum_query weights[row][query] right[query][col]`: dV from P and dO, dK from dS
/// and Q.
pub(crate) struct Rows<'a> {
    /// Keys and queries in use of each block of PANEL queries; `None` for a block without visible pairs.
    pub(crate) panels: &'a [Option<Panel>],
    /// P or dS: `[capacity][PANEL]` for each block of PANEL queries.
    pub(crate) weights: *const f32,
    pub(crate) capacity: usize,
    pub(crate) rows: usize,
    pub(crate) queries: usize,
    /// dO or Q in blocks of PANEL columns: `[blocks][right_capacity][PANEL]`.
    pub(crate) right: *const f32,
    pub(crate) right_capacity: usize,
    pub(crate) dim: usize,
    /// dV or dK in blocks of PANEL columns: `[blocks][capacity][PANEL]`.
    pub(crate) out: *mut f32,
}

impl<S: Simd> Op<S> for Rows<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        match S::TILE_ROWS {
            6 => self.groups::<S, 6>(s),
            _ => self.groups::<S, 12>(s),
        }
    }
}

impl Rows<'_> {
    #[inline(always)]
    fn groups<S: Simd, const R: usize>(self, s: S) {
        let (width, lanes) = (S::PANEL, S::PANEL);
        for col in (0..self.dim).step_by(width) {
            for row in (0..self.rows).step_by(R) {
                // Blocks of PANEL queries that see none of these keys hold zeros or were not written: those at both
                // ends are skipped.
                let sees = |panel: &Option<Panel>| {
                    panel.as_ref().is_some_and(|panel| panel.rows.0 < row + R && row < panel.rows.1)
                };
                let Some(first) = self.panels.iter().position(sees) else { continue };
                let last = self.panels.iter().rposition(sees).map_or(first, |last| last + 1);
                let queries = self.queries.min(last * lanes) - first * lanes;
                let weights = Left::rows(self.weights, self.capacity, lanes)
                    .at(first * self.capacity * lanes + row * lanes);
                let right =
                    self.right.wrapping_add((col / width * self.right_capacity + first * lanes) * width);
                // SAFETY: the capacity is a multiple of R. Rows beyond the last live one only produce rows of C
                // that are never read.
                unsafe {
                    let c = self.out.add(col * self.capacity + row * width);
                    let b = Right { base: right, step: width };
                    tile::<S, R, 2, false>(s, weights, b, queries, c, width, Store::Add);
                }
            }
        }
    }

    /// Computes the product over visible pairs alone, one pair at a time: see [`Columns::visible_only`].
    pub(crate) fn visible_only<S: Simd>(self, visible: Visible) {
        let (width, lanes) = (S::PANEL, S::PANEL);
        for (number, panel) in self.panels.iter().enumerate() {
            let Some(panel) = panel else { continue };
            for row in panel.rows.0..panel.rows.1 {
                for lane in 0..panel.queries {
                    let at = |rows: usize, row: usize, col: usize| {
                        (col / width * rows + row) * width + col % width
                    };
                    // SAFETY: rows, lanes and columns are inside the arrays of PANEL numbers a row.
                    unsafe {
                        let weight = *self.weights.add((number * self.capacity + row) * lanes + lane);
                        if !visible.sees(panel.i + lane as u32, panel.j + row as u32, weight) {
                            continue;
                        }
                        for col in 0..self.dim {
                            let right = *self.right.add(at(self.right_capacity, number * lanes + lane, col));
                            *self.out.add(at(self.capacity, row, col)) += weight * right;
                        }
                    }
                }
            }
        }
    }
}

/// `to[row] = left[row] . right[row]`, each a chain of FMAs as in the micro-tile, so that delta equals dP bit for
/// bit if O is one row of V. Each lane has one row, so that chains run in parallel.
pub(crate) struct RowDots {
    pub(crate) left: Matrix,
    pub(crate) right: Matrix,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Scratch of [`RowDots::scratch`] numbers.
    pub(crate) scratch: *mut f32,
    pub(crate) to: *mut f32,
}

impl RowDots {
    /// Number of f32 of scratch memory that the product needs.
    pub(crate) fn scratch<S: Simd>(cols: usize) -> usize {
        S::PANEL * (cols.next_multiple_of(S::PANEL) + 2 * cols)
    }
}

impl<S: Simd> Op<S> for RowDots {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { left, right, rows, cols, scratch, to } = self;
        let staging = scratch.wrapping_add(2 * S::PANEL * cols);
        let transposed = [scratch, scratch.wrapping_add(S::PANEL * cols)];
        for first in (0..rows).step_by(S::PANEL) {
            let live = S::PANEL.min(rows - first);
            for (from, to) in [left, right].into_iter().zip(transposed) {
                let from = from.skip(first);
                GatherTransposed { from, rows: live, cols, factor: 1.0, to, staging, pairs: false }.call(s);
            }
            let mut sums = [s.splat(0.0); 2];
            let mut lanes = [0.0; 32];
            // SAFETY: both arrays have `cols` rows of PANEL numbers; each row of `to` is written by one thread.
            unsafe {
                for at in (0..cols * S::PANEL).step_by(S::PANEL) {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        let [a, b] = transposed.map(|panel| s.load(panel.add(at + v * S::LANES)));
                        *sum = s.fma(a, b, *sum);
                    }
                }
                s.store(lanes.as_mut_ptr(), sums[0]);
                s.store(lanes.as_mut_ptr().add(S::LANES), sums[1]);
                to.add(first).copy_from_nonoverlapping(lanes.as_ptr(), live);
            }
        }
    }
}

/// Runs FMAs on registers at the processor's full rate, and counts the operations.
pub(crate) struct FmaLoop<'a> {
    pub(crate) flops: &'a mut f64,
}

impl<S: Simd> Op<S> for FmaLoop<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        const STEPS: usize = 200_000;
        let mut acc = [s.splat(0.0); 12];
        let (a, b) = (s.splat(std::hint::black_box(0.5)), s.splat(std::hint::black_box(0.5)));
        for _ in 0..STEPS {
            for acc in &mut acc {
                *acc = s.fma(*acc, a, b);
            }
        }
        let mut lanes = [0.0; 16];
        for acc in acc {
            // SAFETY: no vector has more than sixteen lanes.
            unsafe { s.store(lanes.as_mut_ptr(), acc) };
            std::hint::black_box(lanes);
        }
        *self.flops = (STEPS * 12 * 2 * S::LANES) as f64;
    }
}
