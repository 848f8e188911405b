//! Forward's products in tiles of bf16, O standing transposed: head dimension down, queries across, as S
//! does. K's rows and V's columns are A, Q and P are B: P is used as the softmax leaves it.

use fmha_core::MaskBand;

use super::row_stride;
use crate::score::Panel;
use crate::simd::{Op, Simd, TileProduct};

/// bf16 that a step of a product reduces, and rows of A in a block.
pub(crate) const TILE: usize = 32;
/// f32 in a vector; a panel has two.
const LANES: usize = 16;

/// `scores[row][lane] = K Q^T` for the rows of a panel, not scaled.
pub(crate) struct TileScores {
    pub(crate) panel: Panel,
    /// Dense rows of `units` pairs.
    pub(crate) keys: *const f32,
    /// One transposed panel of pairs, `[units][PANEL]`.
    pub(crate) queries: *const f32,
    /// Half the head dimension.
    pub(crate) units: usize,
    pub(crate) scores: *mut f32,
}

impl<S: Simd> Op<S> for TileScores {
    #[inline(always)]
    fn call(self, s: S) {
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
            unsafe { s.tile_product(&block) };
        }
    }
}

/// V of a tile of keys from panels of pairs `[dim / PANEL][capacity][PANEL]` to rows of its columns,
/// `[dim][row_stride(capacity)]` pairs, with zeros beyond the last key: what a hidden row of P, which is 0,
/// is multiplied by is finite.
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
            // SAFETY: `capacity` is a multiple of a tile's pairs, `dim` of a panel.
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

/// Scores to pairs of probabilities, `P = 2^(factor S - row_max)`, zeros beside the live rows of the tiles
/// that they touch, and the running state as [`Softmax`](super::Softmax) keeps it, but in powers of 2.
///
/// `row_max` follows the maximum only when that is [`SLACK`] above it: any base serves that keeps P in
/// range, and O is mostly spared its rescaling (Dao and others use it in FlashAttention-4).
pub(crate) struct TileSoftmax {
    pub(crate) panel: Panel,
    pub(crate) scores: *mut f32,
    /// Above 0.
    pub(crate) factor: f32,
    pub(crate) state: super::RowState,
}

/// P stays below 2 to this power.
const SLACK: f32 = 8.0;

impl<S: Simd> Op<S> for TileSoftmax {
    #[inline(always)]
    fn call(self, s: S) {
        match self.panel.vectors::<S>() {
            1 => self.lanes::<S, 1>(s),
            _ => self.lanes::<S, 2>(s),
        }
    }
}

impl TileSoftmax {
    #[inline(always)]
    fn lanes<S: Simd, const VECTORS: usize>(self, s: S) {
        let Self { panel, scores, factor, state } = self;
        let (first, last) = panel.rows;
        let at = |row: usize, v: usize| scores.wrapping_add(row * S::PANEL + v * S::LANES);
        let factor = s.splat(factor);
        let nothing = s.splat(f32::NEG_INFINITY);
        // SAFETY: rows and lanes of the panel, and PANEL numbers of each state.
        unsafe {
            let mut largest = [nothing; VECTORS];
            for row in first..last {
                for (v, largest) in largest.iter_mut().enumerate() {
                    // A NaN leaves the maximum alone and shows in P.
                    *largest = s.max(s.load(at(row, v)), *largest);
                }
            }
            let mut base = largest;
            for (v, base) in base.iter_mut().enumerate() {
                let row_max = state.row_max.add(v * S::LANES);
                let (old, seen) = (s.load(row_max), s.mul(*base, factor));
                // Where both are -inf, the difference is NaN, and the new one is as good.
                let new = s.select_le(s.sub(seen, old), s.splat(SLACK), old, seen);
                // Where nothing is seen yet, 2^(-inf - 0) is the 0 that 2^(-inf - -inf) is not.
                *base = s.select_le(new, nothing, s.splat(0.0), new);
                s.store(state.alpha.add(v * S::LANES), s.exp2_coarse(s.sub(old, *base)));
                s.store(row_max, new);
                *base = s.sub(s.splat(0.0), *base);
            }
            let mut row_sum = [s.splat(0.0); VECTORS];
            for row in (first..last).step_by(2) {
                for v in 0..VECTORS {
                    let low = s.exp2_coarse(s.fma(s.load(at(row, v)), factor, base[v]));
                    row_sum[v] = s.add(row_sum[v], low);
                    let mut high = s.splat(0.0);
                    if row + 1 < last {
                        high = s.exp2_coarse(s.fma(s.load(at(row + 1, v)), factor, base[v]));
                        row_sum[v] = s.add(row_sum[v], high);
                    }
                    s.store(at(row / 2, v), s.pair_bf16(low, high));
                }
            }
            for (v, &sum) in row_sum.iter().enumerate() {
                let (total, alpha) = (state.row_sum.add(v * S::LANES), state.alpha.add(v * S::LANES));
                s.store(total, s.fma(s.load(total), s.load(alpha), sum));
            }
            let live = first / 2..last.div_ceil(2);
            let before = live.start / LANES * LANES..live.start;
            for unit in before.chain(live.end..live.end.next_multiple_of(LANES)) {
                for v in 0..2 {
                    s.store(at(unit, v), s.splat(0.0));
                }
            }
        }
    }
}

/// `out[col][lane] (=|+=) sum_row P[row][lane] V[row][col]`, `out` times `alpha` first.
pub(crate) struct TileColumns {
    pub(crate) panel: Panel,
    /// Pairs of probabilities, `[units][PANEL]`.
    pub(crate) weights: *const f32,
    /// V's columns, [`TransposeValues`]'s.
    pub(crate) columns: *const f32,
    /// Pairs of keys that a column has room for.
    pub(crate) capacity: usize,
    pub(crate) dim: usize,
    /// `[dim][PANEL]`.
    pub(crate) out: *mut f32,
    /// `None` where `out` holds nothing yet.
    pub(crate) alpha: Option<*const f32>,
}

impl<S: Simd> Op<S> for TileColumns {
    #[inline(always)]
    fn call(self, s: S) {
        self.rescale(s);
        let Self { panel, weights, columns, capacity, dim, out, alpha } = self;
        let (first, last) = (panel.rows.0 / TILE * LANES, panel.rows.1.div_ceil(TILE) * LANES);
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
            unsafe { s.tile_product(&block) };
        }
    }
}

impl TileColumns {
    #[inline(always)]
    fn rescale<S: Simd>(&self, s: S) {
        let Some(alpha) = self.alpha else { return };
        // SAFETY: `dim` rows of a panel.
        unsafe {
            let alphas = [s.load(alpha), s.load(alpha.add(S::LANES))];
            // So it is in most tiles: see `TileSoftmax`.
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

    /// The same product over visible pairs alone, of V in `panels` of pairs as [`TransposeValues`] finds
    /// them: see [`Columns::visible_only`](super::Columns::visible_only).
    pub(crate) fn visible_only<S: Simd>(self, s: S, band: MaskBand, panels: *const f32) {
        self.rescale(s);
        let half = |pair: f32, row: usize| f32::from_bits(pair.to_bits() >> (16 * (row % 2)) << 16);
        for lane in 0..self.panel.queries {
            for col in 0..self.dim {
                // SAFETY: rows, lanes and columns of the panels.
                unsafe {
                    let out = self.out.add(col * S::PANEL + lane);
                    if self.alpha.is_none() {
                        *out = 0.0;
                    }
                    for row in self.panel.rows.0..self.panel.rows.1 {
                        if band.visible(self.panel.i + lane as u32, self.panel.j + row as u32) {
                            let weight = half(*self.weights.add(row / 2 * S::PANEL + lane), row);
                            let at = (col / S::PANEL * self.capacity + row / 2) * S::PANEL + col % S::PANEL;
                            *out += weight * half(*panels.add(at), row);
                        }
                    }
                }
            }
        }
    }
}

/// One panel of queries `[dim][PANEL]` to rows in panels of the head dimension, `capacity` rows each.
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
                // SAFETY: whole panels on both sides.
                unsafe {
                    s.transpose(from.add(col * S::PANEL + lane), S::PANEL, to.add(lane * S::PANEL), S::PANEL);
                }
            }
        }
    }
}
