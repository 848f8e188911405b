//! The micro-tile: the one matrix product that everything here is made of.
//!
//! Operands lie in *panels*: a matrix of `rows x cols` is cut into strips of [`Simd::PANEL`] columns,
//! and each strip holds its rows one after another, `[cols / PANEL][rows][PANEL]`. V, O, dO and the
//! gradients have panels along the head dimension; S and P stand transposed, keys down and queries
//! across, so that a row's softmax is a lane's and needs no sum across lanes. Where rows of K or V
//! are A, they lie densely.
//!
//! A micro-tile keeps `R x VECTORS` accumulators (6 x 2 of AVX2's 16 registers, 12 x 2 of 32) in registers;
//! each step loads one row of B and broadcasts R elements of A. Every element of the result is one chain of
//! FMAs in the order of the reduction, whatever R and the tile's place: results do not depend on how work was
//! cut.

use crate::simd::Simd;

/// Layout of A's elements: element (r, t) of the tile at `base + r * row + (t / segment) * jump + (t %
/// segment) * step`.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub(crate) base: *const f32,
    /// Stride between rows of the tile.
    pub(crate) row: usize,
    /// Stride between steps of the reduction.
    pub(crate) step: usize,
    /// Number of steps of the reduction before the address moves by `jump`.
    pub(crate) segment: usize,
    /// Stride between the first steps of two segments.
    pub(crate) jump: usize,
}

impl Left {
    /// Operand of rows of a panelled matrix `[cols / width][rows][width]`, summed over its columns.
    pub(crate) fn rows(base: *const f32, rows: usize, width: usize) -> Self {
        Self { base, row: width, step: 1, segment: width, jump: rows * width }
    }

    /// Operand of rows that lie `stride` apart, summed over their columns.
    pub(crate) fn dense(base: *const f32, stride: usize) -> Self {
        Self { base, row: stride, step: 1, segment: usize::MAX, jump: 0 }
    }

    /// Operand whose columns are those of an array `[rows][width]`; the product sums over the rows.
    pub(crate) fn columns(base: *const f32, width: usize) -> Self {
        Self { base, row: 1, step: width, segment: usize::MAX, jump: 0 }
    }

    pub(crate) fn at(self, offset: usize) -> Self {
        Self { base: self.base.wrapping_add(offset), ..self }
    }
}

/// Layout of B's rows and C's rows.
#[derive(Clone, Copy)]
pub(crate) struct Right {
    pub(crate) base: *const f32,
    /// Stride between rows.
    pub(crate) step: usize,
}

/// Treatment of C's old content.
#[derive(Clone, Copy)]
pub(crate) enum Store {
    /// `C = factor * A B`.
    Scaled(f32),
    /// `C = C + A B`.
    Add,
    /// `C = factor[row] * C + A B`, the factors at this address.
    Rescale(*const f32),
}

/// `C[R][VECTORS * LANES] (=|+=) A[R][len] B[len][VECTORS * LANES]`; with `BF16` every element of A
/// and B is a pair of bf16 and the reduction runs over pairs.
///
/// # Safety
/// A, B and C (rows `c_step` apart) are readable, C writable, over the extents above.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, const R: usize, const VECTORS: usize, const BF16: bool>(
    s: S,
    a: Left,
    b: Right,
    len: usize,
    c: *mut f32,
    c_step: usize,
    store: Store,
) {
    let mut acc = [[s.splat(0.0); VECTORS]; R];
    let (mut a_segment, mut b_row, mut left) = (a.base, b.base, len);
    while left > 0 {
        let steps = left.min(a.segment);
        let mut a_step = a_segment;
        for _ in 0..steps {
            // SAFETY: the caller's promise, for step t of `len`.
            unsafe {
                let mut row = [s.splat(0.0); VECTORS];
                for (v, row) in row.iter_mut().enumerate() {
                    *row = s.load(b_row.add(v * S::LANES));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let broadcast = s.splat(*a_step.add(r * a.row));
                    for v in 0..VECTORS {
                        acc[v] = if BF16 {
                            s.dot_bf16(acc[v], broadcast, row[v])
                        } else {
                            s.fma(broadcast, row[v], acc[v])
                        };
                    }
                }
                b_row = b_row.add(b.step);
            }
            a_step = a_step.wrapping_add(a.step);
        }
        a_segment = a_segment.wrapping_add(a.jump);
        left -= steps;
    }
    for (r, acc) in acc.iter().enumerate() {
        for (v, &acc) in acc.iter().enumerate() {
            // SAFETY: the caller's promise, for row r and vector v of C.
            unsafe {
                let at = c.add(r * c_step + v * S::LANES);
                let value = match store {
                    Store::Scaled(factor) => s.mul(acc, s.splat(factor)),
                    Store::Add => s.add(s.load(at), acc),
                    Store::Rescale(factors) => s.fma(s.load(at), s.splat(*factors.add(r)), acc),
                };
                s.store(at, value);
            }
        }
    }
}
