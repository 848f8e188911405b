//! Copies from panels, which are blocks of PANEL columns, to the caller's strided tensors.

use fmha_core::DType;

use crate::simd::{Op, Simd};
use crate::tensor::{Target, is_zero};

/// Tests whether numbers, in whole vectors, are all finite.
pub(crate) struct AllFinite<'a> {
    pub(crate) from: *const f32,
    pub(crate) len: usize,
    /// Set to false if a number is not finite.
    pub(crate) is_finite: &'a mut bool,
}

impl<S: Simd> Op<S> for AllFinite<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        // A finite x gives 0 x = 0; infinities and NaN make the sum NaN.
        let zero = s.splat(0.0);
        let mut residue = [zero; 2];
        for at in (0..self.len).step_by(S::LANES) {
            let residue = &mut residue[at / S::LANES % 2];
            // SAFETY: whole vectors.
            *residue = unsafe { s.fma(s.load(self.from.add(at)), zero, *residue) };
        }
        *self.is_finite &= is_zero(s, s.add(residue[0], residue[1]));
    }
}

/// Factors of the rows.
#[derive(Clone, Copy)]
pub(crate) enum Factors {
    All(f32),
    /// A factor for each row, at this address.
    Each(*const f32),
}

/// Writes rows that are stored in blocks of PANEL columns, times their factors, to rows of a tensor.
pub(crate) struct WriteRows<'a> {
    pub(crate) to: &'a Target,
    /// Batch, first row, head.
    pub(crate) at: (u32, u32, u32),
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Rows to write: `[cols / PANEL][capacity][PANEL]`, PANEL columns of a row together.
    pub(crate) from: *const f32,
    pub(crate) capacity: usize,
    pub(crate) factors: Factors,
    /// A bit for each PANEL rows that were never written and count as 0.
    pub(crate) untouched: u128,
    /// Scratch for one row, with room up to a multiple of PANEL columns.
    pub(crate) row: *mut f32,
}

impl<S: Simd> Op<S> for WriteRows<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { to, at: (batch, first, head), rows, cols, from, capacity, factors, untouched, row } = self;
        for r in 0..rows {
            let touched = r / S::PANEL >= 128 || untouched & 1 << (r / S::PANEL) == 0;
            // SAFETY: `from` and the scratch have whole blocks of PANEL columns; no other task writes these rows.
            unsafe {
                let factor = s.splat(match factors {
                    Factors::All(factor) => factor,
                    Factors::Each(factors) => *factors.add(r),
                });
                // Rows of f32 that end with a vector are written directly.
                let out = to.row_ptr(batch, first + r as u32, head, 0);
                let direct = to.dtype == DType::F32 && cols.is_multiple_of(S::PANEL);
                let row = if direct { out.cast() } else { row };
                for panel in 0..cols.div_ceil(S::PANEL) {
                    let from = from.add((panel * capacity + r) * S::PANEL);
                    for lane in (0..S::PANEL).step_by(S::LANES) {
                        let x = if touched { s.mul(s.load(from.add(lane)), factor) } else { s.splat(0.0) };
                        s.store(row.add(panel * S::PANEL + lane), x);
                    }
                }
                if to.dtype == DType::Bf16 {
                    let out = out.cast::<u16>();
                    let whole = cols - cols % S::LANES;
                    for col in (0..whole).step_by(S::LANES) {
                        s.store_bf16(out.add(col), s.load(row.add(col)));
                    }
                    for col in whole..cols {
                        out.add(col).write(half::bf16::from_f32(*row.add(col)).to_bits());
                    }
                } else if !direct {
                    let values = std::slice::from_raw_parts(row, cols);
                    to.write_row(batch, first + r as u32, head, 0, values);
                }
            }
        }
    }
}
