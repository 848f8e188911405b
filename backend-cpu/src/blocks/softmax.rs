//! Operations on a panel of scores (some keys and PANEL queries): softmax in the forward, its gradient in the
//! backward.

use fmha_core::DType;

use crate::score::Panel;
use crate::simd::{Op, Simd, exp};

/// Running state of the online softmax, one lane for each query.
#[derive(Clone, Copy)]
pub(crate) struct RowState {
    pub(crate) row_max: *mut f32,
    pub(crate) row_sum: *mut f32,
    /// `exp(old row_max - new row_max)`, written.
    pub(crate) alpha: *mut f32,
}

/// Converts scores to probabilities, in place: `P = exp(S - row_max)`, rounded to `round` if that is a 16-bit type
/// (for `pairs`, two rows of P become one of bf16 pairs), and updates the running state (Milakov and Gimelshein,
/// "Online normalizer calculation for softmax", arXiv 1805.02867).
pub(crate) struct Softmax {
    pub(crate) panel: Panel,
    pub(crate) scores: *mut f32,
    pub(crate) state: RowState,
    pub(crate) round: DType,
    pub(crate) pairs: bool,
}

impl<S: Simd> Op<S> for Softmax {
    #[inline(always)]
    fn call(self, s: S) {
        match (self.round, self.panel.vectors::<S>()) {
            (_, 1) if S::BF16_DOT && self.pairs => self.lanes::<S, 1, TO_PAIRS>(s),
            (_, _) if S::BF16_DOT && self.pairs => self.lanes::<S, 2, TO_PAIRS>(s),
            (DType::Bf16, 1) => self.lanes::<S, 1, TO_BF16>(s),
            (DType::Bf16, _) => self.lanes::<S, 2, TO_BF16>(s),
            (DType::F16, 1) => self.lanes::<S, 1, TO_F16>(s),
            (DType::F16, _) => self.lanes::<S, 2, TO_F16>(s),
            (_, 1) => self.lanes::<S, 1, EXACT>(s),
            (_, _) => self.lanes::<S, 2, EXACT>(s),
        }
    }
}

/// Rounding of P: none, or to a 16-bit type.
const EXACT: u8 = 0;
const TO_F16: u8 = 1;
const TO_BF16: u8 = 2;
const TO_PAIRS: u8 = 3;

impl Softmax {
    #[inline(always)]
    fn lanes<S: Simd, const VECTORS: usize, const ROUND: u8>(self, s: S) {
        let width = S::PANEL;
        let (first, last) = self.panel.rows;
        let at = |row: usize, v: usize| self.scores.wrapping_add(row * width + v * S::LANES);
        // SAFETY: rows and lanes are inside the panel of scores; maxima, sums and factors have PANEL numbers each.
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
                // The base is 0 for a row without visible keys: exp(-inf - 0) is 0, but exp(-inf - -inf) is NaN.
                *base = s.select_le(*base, nothing, s.splat(0.0), *base);
                s.store(self.state.alpha.add(v * S::LANES), exp(s, s.sub(s.load(old), *base)));
                s.store(old, row_max[v]);
            }
            if ROUND == TO_PAIRS {
                for row in (first..last).step_by(2) {
                    for v in 0..VECTORS {
                        let low = exp(s, s.sub(s.load(at(row, v)), base[v]));
                        row_sum[v] = s.add(row_sum[v], low);
                        let mut high = s.splat(0.0);
                        if row + 1 < last {
                            high = exp(s, s.sub(s.load(at(row + 1, v)), base[v]));
                            row_sum[v] = s.add(row_sum[v], high);
                        }
                        s.store(at(row / 2, v), s.pair_bf16(low, high));
                    }
                }
            } else {
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
            }
            for (v, &sum) in row_sum.iter().enumerate() {
                let (total, alpha) =
                    (self.state.row_sum.add(v * S::LANES), self.state.alpha.add(v * S::LANES));
                s.store(total, s.fma(s.load(total), s.load(alpha), sum));
            }
        }
    }
}

/// Multiplies two arrays of PANEL numbers a row, number by number: `x *= y`.
pub(crate) struct Multiply {
    pub(crate) panel: Panel,
    pub(crate) x: *mut f32,
    pub(crate) y: *const f32,
}

impl<S: Simd> Op<S> for Multiply {
    #[inline(always)]
    fn call(self, s: S) {
        let (first, last) = self.panel.rows;
        for at in (first * S::PANEL..last * S::PANEL).step_by(S::LANES) {
            // SAFETY: `at` is inside a row of PANEL numbers, which both `x` and `y` have.
            unsafe { s.store(self.x.add(at), s.mul(s.load(self.x.add(at)), s.load(self.y.add(at)))) };
        }
    }
}

/// Multiplies an array of PANEL numbers a row by one factor: `x *= factor`.
pub(crate) struct Scale {
    pub(crate) panel: Panel,
    pub(crate) x: *mut f32,
    pub(crate) factor: f32,
}

impl<S: Simd> Op<S> for Scale {
    #[inline(always)]
    fn call(self, s: S) {
        let (first, last) = self.panel.rows;
        let factor = s.splat(self.factor);
        for at in (first * S::PANEL..last * S::PANEL).step_by(S::LANES) {
            // SAFETY: `at` is inside a row of PANEL numbers of `x`.
            unsafe { s.store(self.x.add(at), s.mul(s.load(self.x.add(at)), factor)) };
        }
    }
}

/// Converts S to P and dP to dS, in place on two panels: `P = exp(S - lse)`, `dS = P (keep dP - delta + dLSE)`, and
/// computes the weights of dV, `keep P`. Rows outside the panel's live ones become 0.
pub(crate) struct Gradient {
    pub(crate) panel: Panel,
    /// Rows (keys) that `weights`, `gradients` and `keep` have room for, each of PANEL numbers.
    pub(crate) capacity: usize,
    pub(crate) weights: *mut f32,
    pub(crate) gradients: *mut f32,
    /// Dropout's factor of each P, 0 where P is dropped; laid out like `weights`.
    pub(crate) keep: Option<*const f32>,
    /// Origin of each query's scores and LSE, if it is not 0.
    pub(crate) origin: Option<*const f32>,
    pub(crate) lse: *const f32,
    pub(crate) delta: *const f32,
    pub(crate) dlse: *const f32,
}

impl<S: Simd> Op<S> for Gradient {
    #[inline(always)]
    fn call(self, s: S) {
        let width = S::PANEL;
        let (first, last) = self.panel.rows;
        let hidden = s.splat(f32::NEG_INFINITY);
        let zero = s.splat(0.0);
        // SAFETY: `weights`, `gradients` and `keep` have PANEL numbers a row; `lse`, `delta` and `dlse` have PANEL.
        unsafe {
            for v in 0..self.panel.vectors::<S>() {
                let lane = v * S::LANES;
                let (lse, delta) = (s.load(self.lse.add(lane)), s.load(self.delta.add(lane)));
                let dlse = s.load(self.dlse.add(lane));
                let origin = self.origin.map(|origin| s.load(origin.add(lane)));
                for row in first..last {
                    let at = row * width + lane;
                    let (score, dp) = (s.load(self.weights.add(at)), s.load(self.gradients.add(at)));
                    let from_origin = origin.map_or(score, |origin| s.sub(score, origin));
                    // 1 at most: of a large score LSE's rounding is more.
                    let p = exp(s, s.min(zero, s.sub(from_origin, lse)));
                    // Hidden keys have P = 0 even in a row whose LSE is NaN.
                    let p = if self.panel.edge { s.select_le(score, hidden, zero, p) } else { p };
                    let (kept, dp) = match self.keep {
                        None => (p, dp),
                        Some(keep) => {
                            let keep = s.load(keep.add(at));
                            (s.mul(p, keep), s.mul(dp, keep))
                        }
                    };
                    // dP - delta cancels exactly if a query sees only one key, so dLSE is added afterwards.
                    let ds = s.mul(p, s.add(s.sub(dp, delta), dlse));
                    // V of a hidden key, or dO of a hidden query, may hold NaN, and 0 times NaN is NaN: dS is
                    // replaced by 0.
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

/// `to += from` over the rows and live lanes of a panel. Other lanes hold arbitrary numbers, and may be live in a
/// longer sequence that shares the sum.
pub(crate) struct AddTo {
    pub(crate) panel: Panel,
    pub(crate) from: *const f32,
    pub(crate) to: *mut f32,
}

impl<S: Simd> Op<S> for AddTo {
    #[inline(always)]
    fn call(self, s: S) {
        let (first, last) = self.panel.rows;
        let whole = self.panel.queries / S::LANES * S::LANES;
        for row in (first..last).map(|row| row * S::PANEL) {
            for at in (row..row + whole).step_by(S::LANES) {
                // SAFETY: `at` is inside a row of PANEL numbers, which both `from` and `to` have.
                unsafe {
                    s.store(self.to.add(at), s.add(s.load(self.from.add(at)), s.load(self.to.add(at))));
                };
            }
            for at in row + whole..row + self.panel.queries {
                // SAFETY: `at` is inside a row of PANEL numbers, which both `from` and `to` have.
                unsafe { *self.to.add(at) += *self.from.add(at) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::simd::Portable;

    const WIDTH: usize = Portable::PANEL;
    const ROWS: usize = 6;

    fn panel(rows: (usize, usize)) -> Panel {
        Panel { i: 0, queries: WIDTH - 1, j: 0, rows, edge: true }
    }

    #[test]
    fn live_rows_of_a_panel_are_multiplied_and_no_others() {
        let (mut x, y) = ([2.0f32; ROWS * WIDTH], [3.0f32; ROWS * WIDTH]);
        let wanted = |live: f32| -> Vec<f32> {
            (0..ROWS * WIDTH).map(|at| if (2..5).contains(&(at / WIDTH)) { live } else { 2.0 }).collect()
        };
        Portable.run(Multiply { panel: panel((2, 5)), x: x.as_mut_ptr(), y: y.as_ptr() });
        assert_eq!(x[..], wanted(6.0));
        Portable.run(Scale { panel: panel((2, 5)), x: x.as_mut_ptr(), factor: 0.5 });
        assert_eq!(x[..], wanted(3.0));
    }

    /// The softmax runs over two blocks, so that the second one rescales.
    #[test]
    fn probabilities_are_rounded_to_the_type_of_v_and_their_sums_are_not() {
        let softmax = |round: DType| {
            let mut scores: [f32; ROWS * WIDTH] =
                std::array::from_fn(|at| (at * 37 % 48) as f32 / 9.7 - 1.3 * (at % WIDTH) as f32);
            let (mut row_max, mut row_sum, mut alpha) =
                ([f32::NEG_INFINITY; WIDTH], [0.0f32; WIDTH], [0.0f32; WIDTH]);
            for rows in [(0, 3), (3, ROWS)] {
                let state = RowState {
                    row_max: row_max.as_mut_ptr(),
                    row_sum: row_sum.as_mut_ptr(),
                    alpha: alpha.as_mut_ptr(),
                };
                let scores = scores.as_mut_ptr();
                Portable.run(Softmax { panel: panel(rows), scores, state, round, pairs: false });
            }
            (scores, [row_max, row_sum, alpha])
        };
        let (exact, state) = softmax(DType::F32);
        for (at, &p) in exact.iter().enumerate() {
            assert!(p > 0.0 && p <= 1.0, "{at}: {p}");
        }
        for (round, rounded) in [
            (DType::F16, exact.map(|p| f16::from_f32(p).to_f32())),
            (DType::Bf16, exact.map(|p| bf16::from_f32(p).to_f32())),
        ] {
            assert_ne!(rounded, exact);
            assert_eq!(softmax(round), (rounded, state), "{round}");
        }
    }
}
