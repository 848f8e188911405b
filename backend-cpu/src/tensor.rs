//! Between the caller's strided tensors and the panels of the micro-tile.

use std::sync::LazyLock;

use fmha_core::fp8::{E4m3Fn, E4m3Fnuz, E5m2, E5m2Fnuz};
use fmha_core::{DType, DevSlice, DevSliceMut, SeqSpan, Strides};
use half::{bf16, f16};

use crate::simd::Simd;

/// A tensor that is read. Its strides and extents have passed validation and the argument check.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    ptr: *const u8,
    dtype: DType,
    strides: Strides,
}

// SAFETY: only ever read, and the argument check's borrow outlives every thread of a run.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

/// A tensor that is written, each element by one thread.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    ptr: *mut u8,
    pub(crate) dtype: DType,
    strides: Strides,
}

// SAFETY: threads write disjoint elements (strides are injective, tasks are disjoint).
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

/// One head of one sequence of a tensor: rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    ptr: *const u8,
    pub(crate) dtype: DType,
    /// Bytes from row to row, and from column to column.
    row: isize,
    col: isize,
}

impl Source {
    pub(crate) fn new(slice: DevSlice<'_>, dtype: DType, strides: Strides) -> Self {
        Self { ptr: slice.as_ptr(), dtype, strides }
    }

    /// Rows from `first` on of (batch, head).
    pub(crate) fn matrix(&self, batch: u32, head: u32, first: u32) -> Matrix {
        let size = self.dtype.size_bytes() as isize;
        let offset = self.strides.offset(batch, first, head, 0) as isize * size;
        Matrix {
            ptr: self.ptr.wrapping_offset(offset),
            dtype: self.dtype,
            // A bogus stride of an axis of one element is never multiplied by more than 0.
            row: (self.strides.seq as isize).wrapping_mul(size),
            col: (self.strides.dim as isize).wrapping_mul(size),
        }
    }

    pub(crate) fn q_rows(&self, span: SeqSpan, head: u32) -> Matrix {
        self.matrix(span.storage_batch, head, span.q_row)
    }

    pub(crate) fn k_rows(&self, span: SeqSpan, head: u32) -> Matrix {
        self.matrix(span.storage_batch, head, span.k_row)
    }
}

impl Target {
    pub(crate) fn new(slice: &DevSliceMut<'_>, dtype: DType, strides: Strides) -> Self {
        Self { ptr: slice.as_mut_ptr(), dtype, strides }
    }

    /// Writes one row of results, from column `first` on.
    ///
    /// # Safety
    /// The row is inside the tensor, and no other thread writes it.
    pub(crate) unsafe fn write_row(&self, batch: u32, seq: u32, head: u32, first: u32, values: &[f32]) {
        let size = self.dtype.size_bytes() as isize;
        let offset = self.strides.offset(batch, seq, head, 0) + i64::from(first);
        let to = self.ptr.wrapping_offset(offset as isize * size);
        // SAFETY: the caller's promise; the output check says that columns are one element apart and
        // that elements are aligned.
        unsafe {
            match self.dtype {
                DType::F32 => std::ptr::copy_nonoverlapping(values.as_ptr(), to.cast::<f32>(), values.len()),
                DType::F16 => {
                    let to = std::slice::from_raw_parts_mut(to.cast::<f16>(), values.len());
                    to.iter_mut().zip(values).for_each(|(to, &value)| *to = f16::from_f32(value));
                }
                DType::Bf16 => {
                    let to = std::slice::from_raw_parts_mut(to.cast::<bf16>(), values.len());
                    to.iter_mut().zip(values).for_each(|(to, &value)| *to = bf16::from_f32(value));
                }
                fp8 => {
                    let to = std::slice::from_raw_parts_mut(to, values.len());
                    for (to, &value) in to.chunks_exact_mut(1).zip(values) {
                        fp8.write(f64::from(value), to);
                    }
                }
            }
        }
    }
}

/// The value of every FP8 byte.
fn fp8_table(dtype: DType) -> &'static [f32; 256] {
    type Table = LazyLock<[f32; 256]>;
    static E4M3FN: Table = LazyLock::new(|| std::array::from_fn(|b| E4m3Fn::from_bits(b as u8).to_f32()));
    static E5M2: Table = LazyLock::new(|| std::array::from_fn(|b| E5m2::from_bits(b as u8).to_f32()));
    static E4M3FNUZ: Table = LazyLock::new(|| std::array::from_fn(|b| E4m3Fnuz::from_bits(b as u8).to_f32()));
    static E5M2FNUZ: Table = LazyLock::new(|| std::array::from_fn(|b| E5m2Fnuz::from_bits(b as u8).to_f32()));
    match dtype {
        DType::E5m2 => &E5M2,
        DType::E4m3Fnuz => &E4M3FNUZ,
        DType::E5m2Fnuz => &E5M2FNUZ,
        _ => &E4M3FN,
    }
}

impl Matrix {
    /// The address of element (row, col).
    #[inline(always)]
    fn at(&self, row: usize, col: usize) -> *const u8 {
        self.ptr.wrapping_offset((row as isize).wrapping_mul(self.row)).wrapping_offset(
            // Column 0 never uses the stride, which may be bogus for one column.
            (col as isize).wrapping_mul(self.col),
        )
    }

    /// The matrix without its first `rows`.
    pub(crate) fn skip(self, rows: usize) -> Self {
        Self { ptr: self.at(rows, 0), ..self }
    }

    /// The matrix without its first `cols`.
    pub(crate) fn skip_cols(self, cols: usize) -> Self {
        Self { ptr: self.at(0, cols), ..self }
    }

    /// Element (row, col).
    ///
    /// # Safety
    /// It is inside the tensor.
    #[inline(always)]
    pub(crate) unsafe fn get(&self, row: usize, col: usize) -> f32 {
        let at = self.at(row, col);
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::F32 => at.cast::<f32>().read_unaligned(),
                DType::F16 => f16::from_bits(at.cast::<u16>().read_unaligned()).to_f32(),
                DType::Bf16 => bf16::from_bits(at.cast::<u16>().read_unaligned()).to_f32(),
                fp8 => fp8_table(fp8)[usize::from(at.read())],
            }
        }
    }

    /// A whole vector from element (row, col) on; columns are one element apart.
    ///
    /// # Safety
    /// `LANES` elements are inside the tensor.
    #[inline(always)]
    unsafe fn vector<S: Simd>(&self, s: S, row: usize, col: usize) -> S::V {
        let at = self.at(row, col);
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::F32 => s.load(at.cast()),
                DType::F16 => s.load_f16(at.cast()),
                DType::Bf16 => s.load_bf16(at.cast()),
                fp8 => {
                    let table = fp8_table(fp8);
                    let mut lanes = [0.0; 16];
                    for (i, lane) in lanes[..S::LANES].iter_mut().enumerate() {
                        *lane = table[usize::from(*at.add(i))];
                    }
                    s.load(lanes.as_ptr())
                }
            }
        }
    }

    /// Copies `rows x cols` times `factor` into panels of `S::DIM_PANEL` columns, `capacity` rows
    /// each; zeros to the right of the last column. Whether all of it was finite.
    ///
    /// # Safety
    /// The extents are inside the tensor; `to` holds `cols / DIM_PANEL` (rounded up) panels.
    #[inline(always)]
    pub(crate) unsafe fn gather<S: Simd>(
        &self,
        s: S,
        rows: usize,
        cols: usize,
        factor: f32,
        to: *mut f32,
        capacity: usize,
    ) -> bool {
        let width = S::DIM_PANEL;
        let scale = s.splat(factor);
        // A finite x has x - x = 0; infinities and NaN leave NaN in the sum.
        let mut residue = s.splat(0.0);
        let dense = self.col == self.dtype.size_bytes() as isize;
        for first in (0..cols).step_by(width) {
            let panel = to.wrapping_add(first * capacity);
            let live = width.min(cols - first);
            // SAFETY: the caller's promise, element by element.
            unsafe {
                if dense && live == width {
                    for row in 0..rows {
                        for v in 0..2 {
                            let x = s.mul(self.vector(s, row, first + v * S::LANES), scale);
                            residue = s.add(residue, s.sub(x, x));
                            s.store(panel.add(row * width + v * S::LANES), x);
                        }
                    }
                } else {
                    for col in 0..width {
                        for row in 0..rows {
                            let x = if col < live { self.get(row, first + col) * factor } else { 0.0 };
                            *panel.add(row * width + col) = x;
                        }
                    }
                    for at in (0..rows * width).step_by(S::LANES) {
                        let x = s.load(panel.add(at));
                        residue = s.add(residue, s.sub(x, x));
                    }
                }
            }
        }
        is_zero(s, residue)
    }

    /// Copies `rows x cols` times `factor`, transposed, into panels of `S::QUERY_PANEL` rows:
    /// `[rows / QUERY_PANEL][capacity][QUERY_PANEL]`; zeros beyond the last row.
    ///
    /// # Safety
    /// The extents are inside the tensor; `to` holds those panels, `capacity` at least `cols`.
    #[inline(always)]
    pub(crate) unsafe fn gather_transposed<S: Simd>(
        &self,
        _: S,
        rows: usize,
        cols: usize,
        factor: f32,
        to: *mut f32,
        capacity: usize,
    ) {
        let width = S::QUERY_PANEL;
        for first in (0..rows).step_by(width) {
            let panel = to.wrapping_add(first * capacity);
            for lane in 0..width {
                let live = first + lane < rows;
                for col in 0..cols {
                    // SAFETY: the caller's promise, element by element.
                    unsafe {
                        let x = if live { self.get(first + lane, col) * factor } else { 0.0 };
                        *panel.add(col * width + lane) = x;
                    }
                }
            }
        }
    }
}

/// Whether every lane is 0.
#[inline(always)]
fn is_zero<S: Simd>(s: S, v: S::V) -> bool {
    let mut lanes = [0.0; 16];
    // SAFETY: no vector has more than sixteen lanes.
    unsafe { s.store(lanes.as_mut_ptr(), v) };
    lanes.iter().all(|&x| x == 0.0)
}

/// One f32 of an argument that the argument check has measured.
pub(crate) fn f32_at(slice: &DevSlice<'_>, index: usize) -> f32 {
    let bytes = slice.as_host().unwrap_or_default();
    bytes.get(index * 4..index * 4 + 4).map_or(f32::NAN, bytemuck::pod_read_unaligned)
}
