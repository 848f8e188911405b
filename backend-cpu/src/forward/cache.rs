//! Preparation of a KV cache around attention: writes new rows, rotates Q by position, and gathers blocks of keys
//! whose rows are not contiguous.

use fmha_core::seq::KvRows;
use fmha_core::{
    CacheArgs, CacheRows, CacheScales, CacheSlice, DType, DevSlice, FwdArgs, FwdProblem, Rotary, SeqSpan,
    Shape, Strides,
};

use half::{bf16, f16};

use crate::blocks::BLOCK_KEYS;
use crate::memory::{Floats, reserve};
use crate::score::HeadScore;
use crate::simd::{BytePlanes, Op, Simd};
use crate::tasks::Threads;
use crate::tensor::{Matrix, Source, Target, fp8_table};

/// The tables of a rotary embedding.
#[derive(Clone, Copy)]
pub(crate) struct Angles<'a> {
    rotary: Rotary,
    cos: &'a [u8],
    sin: &'a [u8],
}

impl<'a> Angles<'a> {
    fn new(rotary: Rotary, cache: &CacheArgs<'a>) -> Self {
        let bytes =
            |slice: &Option<DevSlice<'a>>| slice.as_ref().and_then(DevSlice::as_host).unwrap_or_default();
        Self { rotary, cos: bytes(&cache.cos), sin: bytes(&cache.sin) }
    }

    /// Rotates a row at `position`, which `spans` checked against the tables.
    fn turn(&self, row: &mut [f32], position: u32) {
        let (dtype, half) = (self.rotary.dtype, self.rotary.dim as usize / 2);
        let size = dtype.size_bytes() as usize;
        let at = |table: &[u8], i: u32| {
            let at = (position as usize * half + i as usize) * size;
            table.get(at..at + size).map_or(f32::NAN, |bytes| dtype.read(bytes) as f32)
        };
        self.rotary.turn(row, |i| (at(self.cos, i), at(self.sin, i)));
    }
}

/// Writes the new rows of a call to its cache.
///
/// # Errors
/// Memory for scratch that the system refuses, before anything is written.
pub(crate) fn append(
    problem: &FwdProblem,
    args: &FwdArgs<'_>,
    spans: &[SeqSpan],
    rows: KvRows<'_>,
    threads: &Threads,
) -> fmha_core::Result<()> {
    let Some(append) = &problem.cache.append else { return Ok(()) };
    let angles = problem.cache.rotary.map(|rotary| Angles::new(rotary, &args.cache));
    let dims = problem.dims;
    let scales = |slice: &Option<CacheSlice<'_>>, of: fn(&CacheScales) -> Strides| match (
        slice,
        &problem.cache.scales,
    ) {
        (Some(CacheSlice::Append(slice)), Some(scales)) => Some(Target::new(slice, DType::F32, of(scales))),
        _ => None,
    };
    let tensors = [
        (
            (&args.k, problem.strides.k, scales(&args.k_scale, |scales| scales.k)),
            (&args.cache.k_new, append.k_new, problem.dtypes.qk),
            dims.head_dim_qk,
            angles,
        ),
        (
            (&args.v, problem.strides.v, scales(&args.v_scale, |scales| scales.v)),
            (&args.cache.v_new, append.v_new, problem.dtypes.v),
            dims.head_dim_v,
            None,
        ),
    ];
    let used = threads.used(spans.len());
    for ((to, to_strides, scales), (new, from_strides, dtype), dim, angles) in tensors {
        let (CacheSlice::Append(to), Some(new)) = (to, new) else { continue };
        let from = Source::new(*new, dtype, from_strides);
        let stored = problem.cache.dtype.unwrap_or(dtype);
        // Rows of bytes are K's, whose strides are in bytes.
        let (packed, bytes) = (
            problem.cache.rows.zip(problem.layout.kv.page_size()),
            Target::new(to, DType::E4m3Fn, to_strides),
        );
        let to = Target::new(to, stored, to_strides);
        let mut scratch = reserve(used)?;
        scratch.extend((0..used).map(|_| vec![0f32; dim as usize]));
        threads.for_each(&mut scratch, spans.len(), |row, task| {
            let span = spans[task];
            for (n, j) in (span.seqlen_cached..span.seqlen_k).enumerate() {
                let (batch, at) = rows.at(&span, j);
                for head in 0..dims.num_heads_kv {
                    let source = from.matrix(span.new_batch, head, span.new_row + n as u32);
                    for (d, x) in row.iter_mut().enumerate() {
                        // SAFETY: the argument check measured k_new and v_new, `spans` their rows.
                        *x = unsafe { source.get(0, d) };
                    }
                    if let Some(angles) = &angles {
                        angles.turn(row, j);
                    }
                    if let Some((format, page_size)) = packed {
                        let page = bytes.row_ptr(batch, 0, head, 0);
                        // SAFETY: `spans` saw that the row's page is in the cache, and that no other row is written
                        // to its place.
                        format.write(page_size, at, row, |at, byte| unsafe { page.add(at).write(byte) });
                        continue;
                    }
                    if let Some(scales) = &scales {
                        let scale = CacheScales::quantise(stored, row);
                        // SAFETY: the argument check measured the scales, each of which is of one row and head.
                        unsafe { scales.write_strided(batch, at, head, &[scale]) };
                    }
                    // SAFETY: `spans` saw that this row is in the cache and that no other is written there.
                    unsafe { to.write_strided(batch, at, head, row) };
                }
            }
        });
    }
    Ok(())
}

/// Q rotated to its positions, b·s·h·d.
pub(crate) struct TurnedQueries {
    memory: Floats,
    dtype: DType,
    strides: Strides,
}

impl TurnedQueries {
    /// The rotation of a call; `None` without a rotary embedding.
    ///
    /// # Errors
    /// Memory that the system refuses.
    pub(crate) fn of(
        problem: &FwdProblem,
        args: &FwdArgs<'_>,
        spans: &[SeqSpan],
        threads: &Threads,
    ) -> fmha_core::Result<Option<Self>> {
        let Some(rotary) = problem.cache.rotary else { return Ok(None) };
        let angles = Angles::new(rotary, &args.cache);
        let shape: Shape = problem.extents(args.seq.totals).q;
        let (dtype, strides) = (problem.dtypes.qk, Strides::bshd(shape));
        let bytes = shape.num_elems() * dtype.size_bytes();
        let mut memory = Floats::scratch(bytes.div_ceil(4) as usize)?;
        let from = Source::new(args.q, dtype, problem.strides.q);
        let to = Target::of_scratch(memory.as_mut_ptr().cast(), dtype, strides);
        let used = threads.used(spans.len());
        let mut scratch = reserve(used)?;
        scratch.extend((0..used).map(|_| vec![0f32; shape.dim as usize]));
        threads.for_each(&mut scratch, spans.len(), |row, task| {
            let span = spans[task];
            for i in 0..span.seqlen_q {
                let position = span.seqlen_cached + if problem.positions_advance() { i } else { 0 };
                for head in 0..shape.head {
                    let source = from.q_rows(span, head).skip(i as usize);
                    for (d, x) in row.iter_mut().enumerate() {
                        // SAFETY: the argument check measured Q, `spans` its rows.
                        *x = unsafe { source.get(0, d) };
                    }
                    angles.turn(row, position);
                    // SAFETY: a row of the scratch that no other thread writes.
                    unsafe { to.write_row(span.q_batch, span.q_row + i, head, 0, row) };
                }
            }
        });
        Ok(Some(Self { memory, dtype, strides }))
    }

    /// The cache as a source of rows.
    pub(crate) fn source(&self) -> Source {
        Source::of_scratch(self.memory.as_ptr().cast(), self.dtype, self.strides)
    }
}

/// K or V with its layout in the cache.
#[derive(Clone, Copy)]
pub(crate) struct Cached<'a> {
    /// The tensor.
    pub(crate) source: Source,
    /// Where the cache's rows lie in memory.
    pub(crate) rows: KvRows<'a>,
    /// Elements of a row.
    pub(crate) dim: usize,
    /// The type to which a narrower cache is converted.
    pub(crate) widened: Option<DType>,
    /// Whether FP8 codes are read in place and converted in registers.
    pub(crate) in_codes: bool,
    /// Format of rows of bytes, and the rows of a page.
    pub(crate) packed: Option<(CacheRows, u32)>,
    /// Scales of the cache's rows, and the number of rows that share one scale.
    pub(crate) scales: Option<(Source, u32)>,
}

impl Cached<'_> {
    /// The element type in which arithmetic reads the operand.
    pub(crate) fn taken_as(&self) -> DType {
        if self.packed.is_some() {
            return DType::Bf16;
        }
        self.widened.unwrap_or(self.source.dtype())
    }

    /// Bytes of scratch for `count` keys.
    pub(crate) fn scratch_bytes(&self, count: usize) -> usize {
        count * self.dim * self.taken_as().size_bytes() as usize
    }

    /// Bytes of a key of one head in memory.
    pub(crate) fn row_bytes(&self) -> usize {
        self.dim * self.source.dtype().size_bytes() as usize
    }

    /// Whether the heads of one key are closer in memory than the keys of one head.
    pub(crate) fn heads_lie_together(&self) -> bool {
        let strides = self.source.strides();
        strides.head.unsigned_abs() < strides.seq.unsigned_abs()
    }

    /// Whether rows can be read in place, without a copy.
    pub(crate) fn reads_in_place(&self) -> bool {
        (self.widened.is_none() || self.in_codes) && self.source.matrix(0, 0, 0).has_dense_rows()
    }

    /// The scale of a row of a kv head; 1 where rows have none.
    fn scale(&self, batch: u32, row: u32, i_head_kv: u32) -> f32 {
        let Some((scales, block)) = &self.scales else { return 1.0 };
        // SAFETY: the argument check measured the scales.
        unsafe { scales.matrix(batch, i_head_kv, row / block).get(0, 0) }
    }

    /// Writes key `j` of a kv head in 16 bits, each element times the row's scale, rounded once.
    fn scale_row(&self, span: &SeqSpan, i_head_kv: u32, j: u32, to: *mut u16) {
        let values = fp8_table(self.source.dtype());
        let (batch, row) = self.rows.at(span, j);
        let (from, scale) = (self.source.matrix(batch, i_head_kv, row), self.scale(batch, row, i_head_kv));
        for d in 0..self.dim {
            // SAFETY: `spans` saw that the row is in the tensor; the scratch has room for it.
            unsafe {
                let value = values[usize::from(*from.at(0, d))] * scale;
                to.add(d).write(match self.taken_as() {
                    DType::F16 => f16::from_f32(value).to_bits(),
                    _ => bf16::from_f32(value).to_bits(),
                });
            }
        }
    }

    /// Element `d` of key `j` of a head, times its descale, in the type in which products read it.
    pub(crate) fn value(&self, head: &HeadScore, j: u32, d: usize, descale: f32) -> f32 {
        let (batch, row) = self.rows.at(&head.span, j);
        let descale = descale * self.scale(batch, row, head.i_head_kv);
        // SAFETY: the argument check measured the tensor, `spans` its rows.
        let value = unsafe { self.source.matrix(batch, head.i_head_kv, row).get(0, d) } * descale;
        self.widened.map_or(value, |wide| wide.round(f64::from(value)) as f32)
    }

    /// The type in which rows are read.
    pub(crate) fn read_as(&self) -> DType {
        if self.in_codes { self.source.dtype() } else { self.taken_as() }
    }

    /// Returns the cache with the conversion tables of each head. Codes are read in place if the cache's layout
    /// allows it and a head has few query rows: each further pair of rows (with sixteen registers) converts every
    /// code again. (AVX2, in place against through scratch, from memory: one query 4.8 against 3.2 GB/s, four
    /// queries 1.9 against 2.9.)
    pub(crate) fn widened_by<S: Simd>(mut self, descales: &[f32], rows: u32) -> (Self, Vec<BytePlanes>) {
        // Scales by rows are no table of a head's codes.
        let Some(wide) = self.widened.filter(|_| self.scales.is_none()) else { return (self, Vec::new()) };
        let mut planes: Vec<BytePlanes> = Vec::new();
        for (n, &descale) in descales.iter().enumerate() {
            let same = descales[..n].iter().position(|before| before.to_bits() == descale.to_bits());
            planes.push(match same {
                Some(same) => planes[same].clone(),
                None => widen(self.source.dtype(), wide, descale),
            });
        }
        self.in_codes = S::WIDENS_CODES
            && (S::TILE_ROWS > 6 || rows <= 2)
            && wide == DType::Bf16
            && self.source.matrix(0, 0, 0).has_dense_rows()
            && planes.iter().all(S::widens);
        (self, planes)
    }

    /// Bytes between heads in the rows that [`rows_of`](Self::rows_of) returns.
    pub(crate) fn head_step(&self) -> isize {
        match self.reads_in_place() {
            true => self.source.strides().head as isize * self.source.dtype().size_bytes() as isize,
            false => self.scratch_bytes(BLOCK_KEYS) as isize,
        }
    }

    /// Addresses of keys `j .. j + keys.len()` of a kv head.
    pub(crate) fn rows_in_place(&self, span: &SeqSpan, i_head_kv: u32, j: u32, keys: &mut [*const u8]) {
        let mut done = 0;
        while done < keys.len() {
            let at = j + done as u32;
            let run = (self.rows.run(span, at) as usize).min(keys.len() - done);
            let (batch, row) = self.rows.at(span, at);
            let here = self.source.matrix(batch, i_head_kv, row);
            for (n, key) in keys[done..done + run].iter_mut().enumerate() {
                *key = here.at(n, 0);
            }
            done += run;
        }
    }

    /// Copies keys `j .. j + keys.len()` of some kv heads (the first, and how many) to `scratch`, converted with
    /// the tables of [`widened_by`](Self::widened_by); returns where the first head's rows are.
    pub(crate) fn rows_in_scratch<S: Simd>(
        &self,
        s: S,
        span: &SeqSpan,
        heads: (u32, u32),
        widen: &[BytePlanes],
        scratch: &mut Floats,
        (j, keys): (u32, &mut [*const u8]),
    ) {
        let to = scratch.as_mut_ptr().cast::<u8>();
        self.bring_together(s, span, heads, (j, keys.len()), widen, to);
        for (n, key) in keys.iter_mut().enumerate() {
            *key = to.wrapping_add(self.scratch_bytes(n));
        }
    }

    /// Keys `j .. j + count` of one head as a matrix: in place, or copied to `scratch`. `dense`: the elements of a
    /// row must be contiguous.
    pub(crate) fn block<S: Simd>(
        &self,
        s: S,
        head: &HeadScore,
        (j, count): (u32, usize),
        descale: f32,
        dense: bool,
        scratch: &mut Floats,
    ) -> Matrix {
        let planes = self.widened_by::<S>(&[descale], u32::MAX).1;
        self.block_by(s, head, (j, count), &planes, dense, scratch)
    }

    /// Does what [`block`](Self::block) does, with the tables of [`widened_by`](Self::widened_by) for the
    /// head's rows.
    pub(crate) fn block_by<S: Simd>(
        &self,
        s: S,
        head: &HeadScore,
        (j, count): (u32, usize),
        planes: &[BytePlanes],
        dense: bool,
        scratch: &mut Floats,
    ) -> Matrix {
        let span = &head.span;
        if let Some(packed) = self.packed {
            return self.unpacked(packed, span, (j, count), scratch);
        }
        let run = self.rows.run(span, j) as usize;
        let (batch, row) = self.rows.at(span, j);
        let here = self.source.matrix(batch, head.i_head_kv, row);
        if self.widened.is_none() && run >= count && (here.has_dense_rows() || !dense) {
            return here;
        }
        let to = scratch.as_mut_ptr().cast::<u8>();
        self.bring_together(s, span, (head.i_head_kv, 1), (j, count), planes, to);
        Matrix::dense(to, self.taken_as(), self.dim)
    }

    /// Keys `j .. j + count` of rows of bytes, in bf16.
    fn unpacked(
        &self,
        (format, page_size): (CacheRows, u32),
        span: &SeqSpan,
        (j, count): (u32, usize),
        scratch: &mut Floats,
    ) -> Matrix {
        let to = scratch.as_mut_ptr().cast::<u8>();
        let page_bytes = page_size as usize * format.row_bytes() as usize;
        for n in 0..count {
            let (page, row) = self.rows.at(span, j + n as u32);
            // SAFETY: the argument check measured whole pages of bytes, and `spans` or the list checked the page;
            // the scratch has room for the keys of a tile.
            unsafe {
                let page = std::slice::from_raw_parts(self.source.matrix(page, 0, 0).at(0, 0), page_bytes);
                let to = to.cast::<u16>().add(n * self.dim);
                format.read_bf16(page, page_size, row, std::slice::from_raw_parts_mut(to, self.dim));
            }
        }
        Matrix::dense(to, DType::Bf16, self.dim)
    }

    /// Copies keys `j .. j + count` of heads to `to`, which has room for them; each head's rows begin
    /// [`head_step`](Self::head_step) bytes after the head's before.
    fn bring_together<S: Simd>(
        &self,
        s: S,
        span: &SeqSpan,
        (first_head, heads): (u32, u32),
        (j, count): (u32, usize),
        widen: &[BytePlanes],
        to: *mut u8,
    ) {
        if self.scales.is_some() {
            for (head, n) in (0..heads as usize).flat_map(|head| (0..count).map(move |n| (head, n))) {
                let to = to.wrapping_add(head * self.scratch_bytes(BLOCK_KEYS) + self.scratch_bytes(n));
                self.scale_row(span, first_head + head as u32, j + n as u32, to.cast());
            }
            return;
        }
        let size = self.taken_as().size_bytes() as usize;
        let mut done = 0;
        while done < count {
            let key = j + done as u32;
            let contiguous = self.rows.run(span, key) as usize;
            let run = contiguous.min(count - done);
            let (batch, row) = self.rows.at(span, key);
            s.run(Together {
                from: self.source.matrix(batch, first_head, row),
                from_head: self.source.strides().head as isize * self.source.dtype().size_bytes() as isize,
                heads: heads as usize,
                rows: run,
                contiguous,
                dim: self.dim,
                size,
                widen,
                to: to.wrapping_add(done * self.dim * size),
                to_head: self.scratch_bytes(BLOCK_KEYS),
            });
            done += run;
        }
    }
}

/// Distance in bytes by which rows are prefetched into the L2 cache.
const AHEAD_BYTES: usize = 16 << 10;

/// Copies rows of some heads to a separate place for each head, in the order of their addresses.
struct Together<'a> {
    /// Rows of the first head.
    from: Matrix,
    /// Bytes from head to head.
    from_head: isize,
    heads: usize,
    rows: usize,
    /// Number of rows that are contiguous from the first on, in this call or after the copy.
    contiguous: usize,
    dim: usize,
    /// Bytes of an element in the destination.
    size: usize,
    /// Conversion table of each head; empty if elements are copied unchanged.
    widen: &'a [BytePlanes],
    to: *mut u8,
    /// Bytes from head to head.
    to_head: usize,
}

impl<S: Simd> Op<S> for Together<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { from, from_head, heads, rows, contiguous, dim, size, widen, to, to_head } = self;
        let row_bytes = dim * from.dtype.size_bytes() as usize;
        let ahead = AHEAD_BYTES / (heads * row_bytes).max(1);
        let dense = from.has_dense_rows();
        for n in 0..rows {
            for head in 0..heads {
                if n + ahead < contiguous {
                    let row = from.at(n + ahead, 0).wrapping_offset((head as isize).wrapping_mul(from_head));
                    for at in (0..row_bytes).step_by(64) {
                        s.prefetch(row.wrapping_add(at));
                    }
                }
                let at = |d: usize| from.at(n, d).wrapping_offset((head as isize).wrapping_mul(from_head));
                let to = to.wrapping_add(head * to_head + n * dim * size);
                // SAFETY: `spans` saw that the row is in the tensor; the scratch has room for it.
                unsafe {
                    match widen.get(head) {
                        Some(widen) if dense => s.widen_bytes(widen, at(0), to.cast(), dim),
                        Some(widen) => {
                            for d in 0..dim {
                                to.cast::<u16>().add(d).write(widen.of(*at(d)));
                            }
                        }
                        None if dense => std::ptr::copy_nonoverlapping(at(0), to, dim * size),
                        None => {
                            for d in 0..dim {
                                std::ptr::copy_nonoverlapping(at(d), to.add(d * size), size);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Table from each byte of an FP8 cache to the 16-bit number that it becomes: its value times `descale`,
/// rounded once.
fn widen(from: DType, to: DType, descale: f32) -> BytePlanes {
    let values = fp8_table(from);
    BytePlanes::of_codes(from, to, |code| {
        let value = values[usize::from(code)] * descale;
        match to {
            DType::F16 => f16::from_f32(value).to_bits(),
            _ => bf16::from_f32(value).to_bits(),
        }
    })
}
