//! Copies from the caller's strided tensors to dense rows, and to panels, which are blocks of PANEL columns.

use crate::simd::{Op, Simd};
use crate::tensor::Matrix;

/// Copies rows of a tensor into blocks of PANEL columns of the head dimension. Reports whether all elements were
/// finite and, for pairs of bf16, also smaller than [`LARGE_BF16`](crate::simd::LARGE_BF16) in magnitude.
pub(crate) struct Gather<'a> {
    pub(crate) from: Matrix,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) factor: f32,
    pub(crate) to: *mut f32,
    /// Rows that `to` has room for; pairs of rows if `pairs`.
    pub(crate) capacity: usize,
    pub(crate) pairs: bool,
    pub(crate) is_moderate: &'a mut bool,
}

impl<S: Simd> Op<S> for Gather<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, rows, cols, factor, to, capacity, pairs, is_moderate } = self;
        // SAFETY: rows and columns are inside the tensor and the scratch by construction of the task.
        *is_moderate = unsafe {
            if S::BF16_DOT && pairs {
                from.gather_pairs(s, rows, cols, to, capacity)
            } else {
                from.gather(s, rows, cols, factor, to, capacity)
            }
        };
    }
}

/// Copies rows of a tensor into dense rows, [`row_stride`] apart.
pub(crate) struct GatherRows {
    pub(crate) from: Matrix,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) factor: f32,
    pub(crate) to: *mut f32,
    pub(crate) pairs: bool,
}

impl<S: Simd> Op<S> for GatherRows {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, rows, cols, factor, to, pairs } = self;
        // SAFETY: the caller promised the rows of `from`, and room in `to` for whole blocks of PANEL columns.
        unsafe {
            if S::BF16_DOT && pairs {
                from.gather_row_pairs(s, rows, cols, to, row_stride(cols.div_ceil(2)));
            } else {
                from.gather_rows(s, rows, cols, factor, to, row_stride(cols));
            }
        }
    }
}

/// Stride of dense rows of `cols` numbers: an odd number of cache lines, since rows a power of two apart
/// would share a few sets of the cache.
pub(crate) fn row_stride(cols: usize) -> usize {
    (cols.div_ceil(16) | 1) * 16
}

/// Copies rows of a tensor such as Q, and transposes each block of PANEL rows.
pub(crate) struct GatherTransposed {
    pub(crate) from: Matrix,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) factor: f32,
    pub(crate) to: *mut f32,
    /// Scratch for PANEL rows, before they are transposed.
    pub(crate) staging: *mut f32,
    pub(crate) pairs: bool,
}

impl<S: Simd> Op<S> for GatherTransposed {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, rows, cols, factor, to, staging, pairs } = self;
        if S::BF16_DOT && pairs {
            let units = cols.div_ceil(2);
            let stride = row_stride(units);
            for first in (0..rows).step_by(S::PANEL) {
                let live = S::PANEL.min(rows - first);
                let to = to.wrapping_add(first * units);
                // SAFETY: as for `Gather`; rows of pairs are shorter than PANEL-wide panels of columns are.
                unsafe {
                    from.skip(first).gather_row_pairs(s, live, cols, staging, stride);
                    transpose_rows(s, staging, stride, units, to);
                }
            }
            return;
        }
        let capacity = S::PANEL;
        for first in (0..rows).step_by(capacity) {
            let live = capacity.min(rows - first);
            // SAFETY: the caller promised the rows of `from`, and room in `to` for whole blocks of PANEL columns.
            unsafe { from.skip(first).gather(s, live, cols, factor, staging, capacity) };
            let to = to.wrapping_add(first * cols);
            TransposePanels { from: staging, capacity, rows: live, cols, to }.call(s);
        }
    }
}

/// Transposes blocks of PANEL columns, with `rows` rows in use, into blocks of PANEL rows.
pub(crate) struct TransposePanels {
    /// Input `[cols / PANEL][capacity][PANEL]`: PANEL columns of a row together.
    pub(crate) from: *const f32,
    pub(crate) capacity: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Output `[rows / PANEL][cols][PANEL]`: PANEL rows of a column together.
    pub(crate) to: *mut f32,
}

impl<S: Simd> Op<S> for TransposePanels {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, capacity, rows, cols, to } = self;
        let width = S::PANEL;
        for first in (0..rows).step_by(width) {
            let to = to.wrapping_add(first * cols);
            for panel in (0..cols).step_by(width) {
                let from = from.wrapping_add(panel * capacity + first * width);
                let to = to.wrapping_add(panel * width);
                let live = width.min(cols - panel);
                // SAFETY: capacities are multiples of PANEL, so all PANEL rows are there; rows beyond the last hold
                // old numbers, whose results are not used.
                unsafe { transpose_rows(s, from, width, live, to) };
            }
        }
    }
}

/// Transposes PANEL rows of `cols` numbers, `stride` apart, to `cols` rows of PANEL.
///
/// # Safety
/// All of that is readable and writable.
#[inline(always)]
unsafe fn transpose_rows<S: Simd>(s: S, from: *const f32, stride: usize, cols: usize, to: *mut f32) {
    let (width, whole) = (S::PANEL, cols - cols % S::LANES);
    // SAFETY: promised by the caller: all of that is readable and writable.
    unsafe {
        for row in (0..width).step_by(S::LANES) {
            for col in (0..whole).step_by(S::LANES) {
                s.transpose(from.add(row * stride + col), stride, to.add(col * width + row), width);
            }
            for col in whole..cols {
                for lane in row..row + S::LANES {
                    *to.add(col * width + lane) = *from.add(lane * stride + col);
                }
            }
        }
    }
}
