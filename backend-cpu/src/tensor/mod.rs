//! Copies between the caller's strided tensors and panels, the blocks of PANEL columns that the micro-tile reads.

pub(crate) mod elem;
mod pairs;

use fmha_core::{DType, DevSlice, DevSliceMut, SeqSpan, Strides};
use half::{bf16, f16};

use crate::simd::Simd;
pub(crate) use elem::{Elem, fp8_table, of_type};

/// A tensor that is read, with strides and extents that passed validation and the argument check.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    ptr: *const u8,
    dtype: DType,
    strides: Strides,
}

// SAFETY: only ever read, and the argument check's borrow outlives every thread of a run.
unsafe impl Send for Source {}
// SAFETY: only ever read, and the argument check's borrow outlives every thread of a run.
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
// SAFETY: threads write disjoint elements (strides are injective, tasks are disjoint).
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

// SAFETY: as `Source`.
unsafe impl Send for Matrix {}

impl Source {
    pub(crate) fn new(slice: DevSlice<'_>, dtype: DType, strides: Strides) -> Self {
        Self { ptr: slice.as_ptr(), dtype, strides }
    }

    /// Scratch of this call's own.
    pub(crate) fn of_scratch(ptr: *const u8, dtype: DType, strides: Strides) -> Self {
        Self { ptr, dtype, strides }
    }

    /// Rows from `first` on of (batch, head).
    pub(crate) fn matrix(&self, batch: u32, head: u32, first: u32) -> Matrix {
        let size = self.dtype.size_bytes() as isize;
        let offset = self.strides.offset(batch, first, head, 0) as isize * size;
        Matrix {
            ptr: self.ptr.wrapping_offset(offset),
            dtype: self.dtype,
            // An invalid stride of an axis of one element does no harm: it is only multiplied by 0.
            row: (self.strides.seq as isize).wrapping_mul(size),
            col: (self.strides.dim as isize).wrapping_mul(size),
        }
    }

    pub(crate) fn q_rows(&self, span: SeqSpan, head: u32) -> Matrix {
        self.matrix(span.q_batch, head, span.q_row)
    }

    /// The heads from `first` on of one row, as rows.
    pub(crate) fn heads(&self, batch: u32, seq: u32, first: u32) -> Matrix {
        let head = (self.strides.head as isize).wrapping_mul(self.dtype.size_bytes() as isize);
        Matrix { row: head, ..self.matrix(batch, first, seq) }
    }

    pub(crate) fn k_rows(&self, span: SeqSpan, head: u32) -> Matrix {
        self.matrix(span.k_batch, head, span.k_row)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn strides(&self) -> Strides {
        self.strides
    }
}

impl Target {
    pub(crate) fn new(slice: &DevSliceMut<'_>, dtype: DType, strides: Strides) -> Self {
        Self { ptr: slice.as_mut_ptr(), dtype, strides }
    }

    /// Scratch of this call's own.
    pub(crate) fn of_scratch(ptr: *mut u8, dtype: DType, strides: Strides) -> Self {
        Self { ptr, dtype, strides }
    }

    /// The heads from `first` on of one row, as rows of a tensor.
    pub(crate) fn heads(&self, batch: u32, seq: u32, first: u32) -> Self {
        let strides = Strides { batch: 0, seq: self.strides.head, head: 0, ..self.strides };
        Self { ptr: self.row_ptr(batch, seq, first, 0), dtype: self.dtype, strides }
    }

    /// Writes one row with any stride between its elements.
    ///
    /// # Safety
    /// The row is inside the tensor, and no other thread writes it.
    pub(crate) unsafe fn write_strided(&self, batch: u32, seq: u32, head: u32, values: &[f32]) {
        if self.strides.dim == 1 || values.len() <= 1 {
            // SAFETY: promised by the caller: the row is inside the tensor, and no other thread writes it.
            return unsafe { self.write_row(batch, seq, head, 0, values) };
        }
        for (d, value) in values.iter().enumerate() {
            let elems = self.strides.offset(batch, seq, head, d as u32) as isize;
            let to = self.ptr.wrapping_offset(elems * self.dtype.size_bytes() as isize);
            let one = Self { ptr: to, ..*self };
            // SAFETY: the caller's promise, element by element.
            unsafe { one.write_row(0, 0, 0, 0, std::slice::from_ref(value)) };
        }
    }

    /// Address of column `first` of a row.
    #[inline(always)]
    pub(crate) fn row_ptr(&self, batch: u32, seq: u32, head: u32, first: u32) -> *mut u8 {
        let offset = self.strides.offset(batch, seq, head, 0) + i64::from(first);
        self.ptr.wrapping_offset(offset as isize * self.dtype.size_bytes() as isize)
    }

    /// Writes one row of results, from column `first` on.
    ///
    /// # Safety
    /// The row is inside the tensor, and no other thread writes it.
    pub(crate) unsafe fn write_row(&self, batch: u32, seq: u32, head: u32, first: u32, values: &[f32]) {
        let to = self.row_ptr(batch, seq, head, first);
        // SAFETY: the caller keeps the contract of `write_row`; the output check says that columns are one
        // element apart and that elements are aligned.
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

impl Matrix {
    /// Dense rows of `cols` elements in scratch.
    pub(crate) fn dense(ptr: *const u8, dtype: DType, cols: usize) -> Self {
        let size = dtype.size_bytes() as isize;
        Self { ptr, dtype, row: cols as isize * size, col: size }
    }

    /// Whether the elements of a row are contiguous.
    pub(crate) fn has_dense_rows(&self) -> bool {
        self.col == self.dtype.size_bytes() as isize
    }

    /// The address of element (row, col).
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, col: usize) -> *const u8 {
        self.ptr.wrapping_offset((row as isize).wrapping_mul(self.row)).wrapping_offset(
            // A matrix with one column never uses the column stride, which may then be invalid.
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
        // SAFETY: promised by the caller: it is inside the tensor.
        of_type!(self.dtype, elem => unsafe { elem.one(self.at(row, col)) })
    }

    /// Whether columns are one element apart.
    #[inline(always)]
    fn is_dense<E: Elem>(&self, _: E) -> bool {
        self.col == E::BYTES as isize
    }

    /// Copies `rows x cols` times `factor` into panels of `S::PANEL` columns, `capacity` rows each; zeros to the
    /// right of the last column. Returns whether all elements were finite.
    ///
    /// # Safety
    /// The extents are inside the tensor; `to` holds `cols / PANEL` (rounded up) panels.
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
        // SAFETY: the caller keeps the contract of `gather`.
        of_type!(self.dtype, elem => unsafe { self.gather_of(elem, s, rows, cols, factor, to, capacity) })
    }

    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "`gather`'s, and the type")]
    unsafe fn gather_of<E: Elem, S: Simd>(
        &self,
        elem: E,
        s: S,
        rows: usize,
        cols: usize,
        factor: f32,
        to: *mut f32,
        capacity: usize,
    ) -> bool {
        let width = S::PANEL;
        let scale = s.splat(factor);
        // A finite x has 0 x = 0; infinities and NaN leave NaN in the sum.
        let zero = s.splat(0.0);
        let mut residue = [zero; 2];
        for first in (0..cols).step_by(width) {
            let panel = to.wrapping_add(first * capacity);
            let live = width.min(cols - first);
            // SAFETY: the caller's promise, element by element.
            unsafe {
                if self.is_dense(elem) && live == width {
                    let (mut from, mut to) = (self.at(0, first), panel);
                    for _ in 0..rows {
                        for (v, residue) in residue.iter_mut().enumerate() {
                            let x = s.mul(elem.vector(s, from.add(v * S::LANES * E::BYTES)), scale);
                            *residue = s.fma(x, zero, *residue);
                            s.store(to.add(v * S::LANES), x);
                        }
                        from = from.wrapping_offset(self.row);
                        to = to.wrapping_add(width);
                    }
                } else {
                    for col in 0..width {
                        for row in 0..rows {
                            let x =
                                if col < live { elem.one(self.at(row, first + col)) * factor } else { 0.0 };
                            *panel.add(row * width + col) = x;
                        }
                    }
                    for at in (0..rows * width).step_by(S::LANES) {
                        residue[0] = s.fma(s.load(panel.add(at)), zero, residue[0]);
                    }
                }
            }
        }
        is_zero(s, s.add(residue[0], residue[1]))
    }

    /// Copies `rows x cols` times `factor` into rows that lie `stride` apart.
    ///
    /// # Safety
    /// The extents are inside the tensor; `to` holds `rows * stride`, `stride` at least `cols`.
    #[inline(always)]
    pub(crate) unsafe fn gather_rows<S: Simd>(
        &self,
        s: S,
        rows: usize,
        cols: usize,
        factor: f32,
        to: *mut f32,
        stride: usize,
    ) {
        // SAFETY: the caller keeps the contract of `gather_rows`.
        of_type!(self.dtype, elem => unsafe { self.gather_rows_of(elem, s, rows, cols, factor, to, stride) });
    }

    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "`gather_rows`' own, and the type")]
    unsafe fn gather_rows_of<E: Elem, S: Simd>(
        &self,
        elem: E,
        s: S,
        rows: usize,
        cols: usize,
        factor: f32,
        to: *mut f32,
        stride: usize,
    ) {
        let scale = s.splat(factor);
        let whole = if self.is_dense(elem) { cols - cols % S::LANES } else { 0 };
        let (mut from, mut to) = (self.ptr, to);
        for row in 0..rows {
            // SAFETY: the caller's promise, element by element.
            unsafe {
                for col in (0..whole).step_by(S::LANES) {
                    s.store(to.add(col), s.mul(elem.vector(s, from.add(col * E::BYTES)), scale));
                }
                for col in whole..cols {
                    *to.add(col) = elem.one(self.at(row, col)) * factor;
                }
            }
            from = from.wrapping_offset(self.row);
            to = to.wrapping_add(stride);
        }
    }

    /// Copies `rows x cols` times `factor`, transposed, into panels of `S::PANEL` rows:
    /// `[rows / PANEL][capacity][PANEL]`; zeros beyond the last row.
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
        let width = S::PANEL;
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
pub(crate) fn is_zero<S: Simd>(s: S, v: S::V) -> bool {
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
