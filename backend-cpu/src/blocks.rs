//! The kernels of a tile, each an [`Op`]: products of panels and the softmax between them.

use fmha_core::{DType, MaskBand};

use crate::score::Panel;
use crate::simd::{Op, Simd, exp};
use crate::tensor::Matrix;
use crate::tile::{Left, Right, Store, tile};

/// Copies rows of a tensor into panels of the head dimension; says whether all were finite.
pub(crate) struct Gather<'a> {
    pub(crate) from: Matrix,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) factor: f32,
    pub(crate) to: *mut f32,
    pub(crate) capacity: usize,
    pub(crate) finite: &'a mut bool,
}

impl<S: Simd> Op<S> for Gather<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, rows, cols, factor, to, capacity, finite } = self;
        // SAFETY: rows and columns are inside the tensor and the scratch by construction of the task.
        *finite = unsafe { from.gather(s, rows, cols, factor, to, capacity) };
    }
}

/// Copies rows of a tensor into transposed panels of queries.
pub(crate) struct GatherTransposed {
    pub(crate) from: Matrix,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) factor: f32,
    pub(crate) to: *mut f32,
}

impl<S: Simd> Op<S> for GatherTransposed {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, rows, cols, factor, to } = self;
        // SAFETY: as for `Gather`.
        unsafe { from.gather_transposed(s, rows, cols, factor, to, cols) }
    }
}

/// `scores[row][lane] = factor * sum_d keys[row][d] queries[d][lane]` for the rows of a panel.
pub(crate) struct Scores {
    pub(crate) panel: Panel,
    /// Panels of the head dimension, `capacity` rows each.
    pub(crate) keys: *const f32,
    pub(crate) capacity: usize,
    /// One transposed panel, `[dim][QUERY_PANEL]`.
    pub(crate) queries: *const f32,
    pub(crate) dim: usize,
    pub(crate) factor: f32,
    pub(crate) scores: *mut f32,
}

impl<S: Simd> Op<S> for Scores {
    #[inline(always)]
    fn call(self, s: S) {
        match (S::KEY_ROWS, self.panel.vectors::<S>()) {
            (4, 1) => self.rows::<S, 4, 1>(s),
            (4, 2) => self.rows::<S, 4, 2>(s),
            (4, _) => self.rows::<S, 4, 3>(s),
            (_, 1) => self.rows::<S, 8, 1>(s),
            (_, 2) => self.rows::<S, 8, 2>(s),
            (_, _) => self.rows::<S, 8, 3>(s),
        }
    }
}

impl Scores {
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const VECTORS: usize>(self, s: S) {
        let width = S::QUERY_PANEL;
        let keys = Left::rows(self.keys, self.capacity, S::DIM_PANEL);
        let queries = Right { base: self.queries, step: width };
        let (first, last) = self.panel.rows;
        for row in (first / R * R..last).step_by(R) {
            // SAFETY: capacities are multiples of R; rows beyond the last live one hold old numbers,
            // which reach no other row.
            unsafe {
                let to = self.scores.add(row * width);
                let a = keys.at(row * S::DIM_PANEL);
                tile::<S, R, VECTORS, false>(s, a, queries, self.dim, to, width, Store::Scaled(self.factor));
            }
        }
    }
}

/// Running state of the online softmax, a lane each.
#[derive(Clone, Copy)]
pub(crate) struct RowState {
    pub(crate) row_max: *mut f32,
    pub(crate) row_sum: *mut f32,
    /// `exp(old row_max - new row_max)`, written.
    pub(crate) alpha: *mut f32,
}

/// Scores to probabilities, in place: `P = exp(S - row_max)`, rounded to `round` when that is a
/// 16-bit type, and the running state (Milakov and Gimelshein, "Online normalizer calculation for
/// softmax", arXiv 1805.02867).
pub(crate) struct Softmax {
    pub(crate) panel: Panel,
    pub(crate) scores: *mut f32,
    pub(crate) state: RowState,
    pub(crate) round: DType,
}

impl<S: Simd> Op<S> for Softmax {
    #[inline(always)]
    fn call(self, s: S) {
        match (self.round, self.panel.vectors::<S>()) {
            (DType::Bf16, 1) => self.lanes::<S, 1, TO_BF16>(s),
            (DType::Bf16, 2) => self.lanes::<S, 2, TO_BF16>(s),
            (DType::Bf16, _) => self.lanes::<S, 3, TO_BF16>(s),
            (DType::F16, 1) => self.lanes::<S, 1, TO_F16>(s),
            (DType::F16, 2) => self.lanes::<S, 2, TO_F16>(s),
            (DType::F16, _) => self.lanes::<S, 3, TO_F16>(s),
            (_, 1) => self.lanes::<S, 1, EXACT>(s),
            (_, 2) => self.lanes::<S, 2, EXACT>(s),
            (_, _) => self.lanes::<S, 3, EXACT>(s),
        }
    }
}

/// What becomes of a P: kept in f32, or rounded to a 16-bit type.
const EXACT: u8 = 0;
const TO_F16: u8 = 1;
const TO_BF16: u8 = 2;

impl Softmax {
    #[inline(always)]
    fn lanes<S: Simd, const VECTORS: usize, const ROUND: u8>(self, s: S) {
        let width = S::QUERY_PANEL;
        let (first, last) = self.panel.rows;
        let at = |row: usize, v: usize| self.scores.wrapping_add(row * width + v * S::LANES);
        // SAFETY: rows and lanes of the panel, and QUERY_PANEL numbers of each state.
        unsafe {
            let nothing = s.splat(f32::NEG_INFINITY);
            let mut row_max = [nothing; VECTORS];
            for (v, row_max) in row_max.iter_mut().enumerate() {
                *row_max = s.load(self.state.row_max.add(v * S::LANES));
            }
            for row in first..last {
                for (v, row_max) in row_max.iter_mut().enumerate() {
                    // A NaN leaves the maximum alone and shows in P.
                    *row_max = s.max(s.load(at(row, v)), *row_max);
                }
            }
            let mut row_sum = [s.splat(0.0); VECTORS];
            let mut base = row_max;
            for (v, base) in base.iter_mut().enumerate() {
                let old = self.state.row_max.add(v * S::LANES);
                // Where nothing is seen yet, exp(-inf - 0) is the 0 that exp(-inf - -inf) is not.
                *base = s.select_le(*base, nothing, s.splat(0.0), *base);
                s.store(self.state.alpha.add(v * S::LANES), exp(s, s.sub(s.load(old), *base)));
                s.store(old, row_max[v]);
            }
            for row in first..last {
                for v in 0..VECTORS {
                    let p = exp(s, s.sub(s.load(at(row, v)), base[v]));
                    row_sum[v] = s.add(row_sum[v], p);
                    let kept = match ROUND {
                        TO_BF16 => s.round_to_bf16(p),
                        TO_F16 => s.round_to_f16(p),
                        _ => p,
                    };
                    s.store(at(row, v), kept);
                }
            }
            for (v, &sum) in row_sum.iter().enumerate() {
                let (total, alpha) =
                    (self.state.row_sum.add(v * S::LANES), self.state.alpha.add(v * S::LANES));
                s.store(total, s.fma(s.load(total), s.load(alpha), sum));
            }
        }
    }
}

/// `x *= y` over the rows of a panel.
pub(crate) struct Multiply {
    pub(crate) panel: Panel,
    pub(crate) x: *mut f32,
    pub(crate) y: *const f32,
}

impl<S: Simd> Op<S> for Multiply {
    #[inline(always)]
    fn call(self, s: S) {
        let (first, last) = self.panel.rows;
        for at in (first * S::QUERY_PANEL..last * S::QUERY_PANEL).step_by(S::LANES) {
            // SAFETY: rows of two panels.
            unsafe { s.store(self.x.add(at), s.mul(s.load(self.x.add(at)), s.load(self.y.add(at)))) };
        }
    }
}

/// `out[lane][col] (=|+=) sum_row weights[row][lane] right[row][col]`: O from P and V, dQ from dS and K.
pub(crate) struct Columns {
    pub(crate) panel: Panel,
    /// One panel `[rows][QUERY_PANEL]`.
    pub(crate) weights: *const f32,
    /// Panels of the head dimension, `capacity` rows each.
    pub(crate) right: *const f32,
    pub(crate) capacity: usize,
    pub(crate) dim: usize,
    /// Panels of the head dimension, `out_capacity` rows each.
    pub(crate) out: *mut f32,
    pub(crate) out_capacity: usize,
    pub(crate) store: Store,
}

impl<S: Simd> Op<S> for Columns {
    #[inline(always)]
    fn call(self, s: S) {
        match (self.panel.queries, S::TILE_ROWS) {
            (1, _) => self.groups::<S, 1>(s),
            (2..=4, _) => self.groups::<S, 4>(s),
            (_, 6) => self.groups::<S, 6>(s),
            _ => self.groups::<S, 12>(s),
        }
    }
}

impl Columns {
    #[inline(always)]
    fn groups<S: Simd, const R: usize>(self, s: S) {
        let width = S::DIM_PANEL;
        let (first, last) = self.panel.rows;
        let weights = Left::columns(self.weights, S::QUERY_PANEL).at(first * S::QUERY_PANEL);
        for col in (0..self.dim).step_by(width) {
            let b = Right { base: self.right.wrapping_add(col * self.capacity + first * width), step: width };
            for lane in (0..self.panel.queries).step_by(R) {
                let store = match self.store {
                    Store::Rescale(factors) => Store::Rescale(factors.wrapping_add(lane)),
                    other => other,
                };
                // SAFETY: QUERY_PANEL is a multiple of R or lanes end within the first R; lanes beyond
                // the live ones compute rows of C that nobody reads.
                unsafe {
                    let c = self.out.add(col * self.out_capacity + lane * width);
                    tile::<S, R, 2, false>(s, weights.at(lane), b, last - first, c, width, store);
                }
            }
        }
    }
}

impl Columns {
    /// The same product over visible pairs alone, for a tile where a hidden row of `right` is not
    /// finite: 0 times NaN would reach rows that do not see it.
    pub(crate) fn visible_only<S: Simd>(self, band: MaskBand) {
        let (width, (first, last)) = (S::DIM_PANEL, self.panel.rows);
        for lane in 0..self.panel.queries {
            for col in 0..self.dim {
                // SAFETY: rows, lanes and columns of the panels.
                unsafe {
                    let at = |rows: usize, row: usize| (col / width * rows + row) * width + col % width;
                    let out = self.out.add(at(self.out_capacity, lane));
                    *out = match self.store {
                        Store::Scaled(_) => 0.0,
                        Store::Add => *out,
                        Store::Rescale(factors) => *out * *factors.add(lane),
                    };
                    for row in first..last {
                        if band.visible(self.panel.i + lane as u32, self.panel.j + row as u32) {
                            let weight = *self.weights.add(row * S::QUERY_PANEL + lane);
                            *out += weight * *self.right.add(at(self.capacity, row));
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
    /// Which panels of queries are live, and which of their rows.
    pub(crate) panels: &'a [Option<Panel>],
    /// Panels `[capacity][QUERY_PANEL]`.
    pub(crate) weights: *const f32,
    pub(crate) capacity: usize,
    pub(crate) rows: usize,
    pub(crate) queries: usize,
    /// Panels of the head dimension, `right_capacity` rows each.
    pub(crate) right: *const f32,
    pub(crate) right_capacity: usize,
    pub(crate) dim: usize,
    /// Panels of the head dimension, `capacity` rows each.
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
        let (width, lanes) = (S::DIM_PANEL, S::QUERY_PANEL);
        for col in (0..self.dim).step_by(width) {
            for row in (0..self.rows).step_by(R) {
                // Panels that see none of these rows hold zeros or nothing: leave out those at both ends.
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
                // SAFETY: the capacity is a multiple of R; rows beyond the last live one compute rows of
                // C that nobody reads.
                unsafe {
                    let c = self.out.add(col * self.capacity + row * width);
                    let b = Right { base: right, step: width };
                    tile::<S, R, 2, false>(s, weights, b, queries, c, width, Store::Add);
                }
            }
        }
    }

    /// The same product over visible pairs alone: see [`Columns::visible_only`].
    pub(crate) fn visible_only<S: Simd>(self, band: MaskBand) {
        let (width, lanes) = (S::DIM_PANEL, S::QUERY_PANEL);
        for (number, panel) in self.panels.iter().enumerate() {
            let Some(panel) = panel else { continue };
            for row in panel.rows.0..panel.rows.1 {
                for lane in 0..panel.queries {
                    if !band.visible(panel.i + lane as u32, panel.j + row as u32) {
                        continue;
                    }
                    let at = |rows: usize, row: usize, col: usize| {
                        (col / width * rows + row) * width + col % width
                    };
                    // SAFETY: rows, lanes and columns of the panels.
                    unsafe {
                        let weight = *self.weights.add((number * self.capacity + row) * lanes + lane);
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

/// S to P and dP to dS, in place on two panels: `P = exp(S - lse)`, `dS = P (keep dP - delta +
/// dLSE)`, and the weights of dV, `keep P`. Rows outside the panel's live ones become 0.
pub(crate) struct Gradient {
    pub(crate) panel: Panel,
    /// Rows of the panels.
    pub(crate) capacity: usize,
    pub(crate) weights: *mut f32,
    pub(crate) gradients: *mut f32,
    /// Keep factors, a panel.
    pub(crate) keep: Option<*const f32>,
    pub(crate) lse: *const f32,
    pub(crate) delta: *const f32,
    pub(crate) dlse: *const f32,
}

impl<S: Simd> Op<S> for Gradient {
    #[inline(always)]
    fn call(self, s: S) {
        let width = S::QUERY_PANEL;
        let (first, last) = self.panel.rows;
        let hidden = s.splat(f32::NEG_INFINITY);
        let zero = s.splat(0.0);
        // SAFETY: rows and lanes of the panels, QUERY_PANEL numbers of lse and delta.
        unsafe {
            for v in 0..self.panel.vectors::<S>() {
                let lane = v * S::LANES;
                let (lse, delta) = (s.load(self.lse.add(lane)), s.load(self.delta.add(lane)));
                let dlse = s.load(self.dlse.add(lane));
                for row in first..last {
                    let at = row * width + lane;
                    let (score, dp) = (s.load(self.weights.add(at)), s.load(self.gradients.add(at)));
                    let p = exp(s, s.sub(score, lse));
                    let (kept, dp) = match self.keep {
                        None => (p, dp),
                        Some(keep) => {
                            let keep = s.load(keep.add(at));
                            (s.mul(p, keep), s.mul(dp, keep))
                        }
                    };
                    // dP - delta cancels, exactly where a query sees one key: dLSE comes after.
                    let ds = s.mul(p, s.add(s.sub(dp, delta), dlse));
                    // A hidden key's V, or a hidden query's dO, may hold NaN: 0 times it is not 0.
                    let ds = if self.panel.edge { s.select_le(score, hidden, zero, ds) } else { ds };
                    s.store(self.weights.add(at), kept);
                    s.store(self.gradients.add(at), ds);
                }
            }
            if self.panel.edge || last < self.capacity {
                for panel in [self.weights, self.gradients] {
                    std::slice::from_raw_parts_mut(panel, first * width).fill(0.0);
                    let rest = (self.capacity - last) * width;
                    std::slice::from_raw_parts_mut(panel.add(last * width), rest).fill(0.0);
                }
            }
        }
    }
}

/// `to[row] = left[row] . right[row]`, each a chain of FMAs as in the micro-tile: where O is one row
/// of V, delta is dP to the bit.
pub(crate) struct RowDots {
    pub(crate) left: Matrix,
    pub(crate) right: Matrix,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) to: *mut f32,
}

impl<S: Simd> Op<S> for RowDots {
    #[inline(always)]
    fn call(self, s: S) {
        for row in 0..self.rows {
            let mut sum = s.splat(0.0);
            for col in 0..self.cols {
                // SAFETY: rows of the sequence.
                let (a, b) = unsafe { (self.left.get(row, col), self.right.get(row, col)) };
                sum = s.fma(s.splat(a), s.splat(b), sum);
            }
            let mut lanes = [0.0; 16];
            // SAFETY: no vector has more than sixteen lanes; each row is written by one thread.
            unsafe {
                s.store(lanes.as_mut_ptr(), sum);
                *self.to.add(row) = lanes[0];
            }
        }
    }
}

/// `to += from` over the rows of a panel.
pub(crate) struct AddTo {
    pub(crate) panel: Panel,
    pub(crate) from: *const f32,
    pub(crate) to: *mut f32,
}

impl<S: Simd> Op<S> for AddTo {
    #[inline(always)]
    fn call(self, s: S) {
        let (first, last) = self.panel.rows;
        for at in (first * S::QUERY_PANEL..last * S::QUERY_PANEL).step_by(S::LANES) {
            // SAFETY: rows of two panels.
            unsafe { s.store(self.to.add(at), s.add(s.load(self.from.add(at)), s.load(self.to.add(at)))) };
        }
    }
}

/// FMAs in registers, as many a second as the processor does; counts the operations.
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
