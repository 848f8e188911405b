//! Copies of bf16 matrices, two elements in each 32-bit word.

use super::Matrix;
use crate::simd::Simd;

/// Copies with two bf16 in each 32-bit element, for dot products of pairs. The matrix is bf16, and nothing is
/// converted.
impl Matrix {
    #[inline(always)]
    unsafe fn bits(&self, row: usize, col: usize) -> u32 {
        // SAFETY: the caller keeps the contract of `bits`.
        unsafe { u32::from(self.at(row, col).cast::<u16>().read_unaligned()) }
    }

    /// Columns `2 unit` and `2 unit + 1`, zero beyond `cols`.
    #[inline(always)]
    unsafe fn column_pair(&self, row: usize, unit: usize, cols: usize) -> f32 {
        let col = 2 * unit;
        // SAFETY: the caller keeps the contract of `column_pair`.
        let high = if col + 1 < cols { unsafe { self.bits(row, col + 1) } } else { 0 };
        // SAFETY: the caller keeps the contract of `column_pair`.
        f32::from_bits(unsafe { self.bits(row, col) } | high << 16)
    }

    /// Copies as [`gather_rows`](Self::gather_rows) does, in pairs along columns.
    ///
    /// # Safety
    /// As there, with half the columns, rounded up.
    #[inline(always)]
    pub(crate) unsafe fn gather_row_pairs<S: Simd>(
        &self,
        s: S,
        rows: usize,
        cols: usize,
        to: *mut f32,
        stride: usize,
    ) {
        let units = cols.div_ceil(2);
        let whole = if self.col == 2 { cols / 2 / S::LANES * S::LANES } else { 0 };
        for row in 0..rows {
            let to = to.wrapping_add(row * stride);
            // SAFETY: the caller's promise, pair by pair.
            unsafe {
                let from = self.at(row, 0).cast::<f32>();
                for unit in (0..whole).step_by(S::LANES) {
                    s.store(to.add(unit), s.load(from.add(unit)));
                }
                for unit in whole..units {
                    *to.add(unit) = self.column_pair(row, unit, cols);
                }
            }
        }
    }

    /// Copies as [`gather`](Self::gather) does, in pairs along rows: `capacity` of them a panel. Returns
    /// whether all numbers were below [`LARGE_BF16`](crate::simd::LARGE_BF16) in magnitude.
    ///
    /// # Safety
    /// As there, with half the rows, rounded up.
    #[inline(always)]
    pub(crate) unsafe fn gather_pairs<S: Simd>(
        &self,
        s: S,
        rows: usize,
        cols: usize,
        to: *mut f32,
        capacity: usize,
    ) -> bool {
        let width = S::PANEL;
        let mut is_moderate = true;
        for first in (0..cols).step_by(width) {
            let panel = to.wrapping_add(first * capacity);
            let live = width.min(cols - first);
            for row in (0..rows).step_by(2) {
                let two = row + 1 < rows;
                let to = panel.wrapping_add(row / 2 * width);
                // Absent elements are 0. A panel has 32 columns at most.
                let mut edge = [[0u16; 32]; 2];
                // SAFETY: the caller's promise, element by element.
                is_moderate &= unsafe {
                    if self.col == 2 && live == width {
                        let low = self.at(row, first).cast();
                        let high = if two { self.at(row + 1, first).cast() } else { edge[1].as_ptr() };
                        s.interleave_bf16(low, high, to)
                    } else {
                        for (row, edge) in (row..rows).zip(&mut edge) {
                            for (col, to) in edge[..live].iter_mut().enumerate() {
                                *to = self.bits(row, first + col) as u16;
                            }
                        }
                        s.interleave_bf16(edge[0].as_ptr(), edge[1].as_ptr(), to)
                    }
                };
            }
        }
        is_moderate
    }
}
