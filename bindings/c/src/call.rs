//! The C structs, and the problem and arguments that they say.

use std::ffi::{CStr, c_char, c_void};

use fmha_core::error::{ProblemError, Result};
use fmha_core::{
    DType, Descale, DevBuffer, DevSlice, DevSliceMut, Dims, FmhaBackend, FwdArgs, FwdPlan, FwdProblem,
    MemorySpace, Shape, Stream, Strides, Totals, ValidFwd,
};

/// A tensor. Strides are in elements; head_dim has stride 1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaTensor {
    /// Device memory.
    pub data: *mut c_void,
    /// From sequence to sequence; 0 when packed. Paged K and V: from page to page.
    pub batch_stride: i64,
    /// From row to row.
    pub seqlen_stride: i64,
    /// From head to head.
    pub head_stride: i64,
}

/// One call. Optional pointers are null where they are not wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaCall {
    /// Sequences.
    pub batch: i64,
    /// Queries of a sequence; packed: of the longest.
    pub seqlen_q: i64,
    /// Keys of a sequence; packed: of the longest.
    pub seqlen_k: i64,
    /// Query heads, a multiple of num_heads_kv.
    pub num_heads_q: i64,
    /// Key and value heads.
    pub num_heads_kv: i64,
    /// Elements of a row of Q and K.
    pub head_dim_qk: i64,
    /// Elements of a row of V and O.
    pub head_dim_v: i64,
    /// Rows of a page; 0: K and V are not paged, the only value taken so far.
    pub page_size: i64,
    /// Q `[batch, seqlen_q, num_heads_q, head_dim_qk]`.
    pub q: FmhaTensor,
    /// K `[batch, seqlen_k, num_heads_kv, head_dim_qk]`.
    pub k: FmhaTensor,
    /// V `[batch, seqlen_k, num_heads_kv, head_dim_v]`.
    pub v: FmhaTensor,
    /// O `[batch, seqlen_q, num_heads_q, head_dim_v]`.
    pub o: FmhaTensor,
    /// Backward only.
    pub dout: FmhaTensor,
    /// Backward only.
    pub dq: FmhaTensor,
    /// Backward only.
    pub dk: FmhaTensor,
    /// Backward only.
    pub dv: FmhaTensor,
    /// `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`; null: not wanted.
    pub lse: *mut f32,
    /// `[batch + 1]` on the device, or null; with cu_seqlens_k or not at all.
    pub cu_seqlens_q: *const i32,
    /// `[batch + 1]` on the device, or null.
    pub cu_seqlens_k: *const i32,
    /// `[batch, seqlen_k / page_size]`, or null.
    pub page_table: *const i32,
    /// `[batch, num_heads_kv]`, or null (1).
    pub descale_q: *const f32,
    /// `[batch, num_heads_kv]`, or null (1).
    pub descale_k: *const f32,
    /// `[batch, num_heads_kv]`, or null (1).
    pub descale_v: *const f32,
    /// "0" (none), "t" and "b" (causal, top-left and bottom-right), "b:left,right" (window).
    pub mask: *const c_char,
    /// A CUstream of the device's primary context; null: the default stream.
    pub stream: *mut c_void,
    /// Multiplies Q K^T.
    pub softmax_scale: f32,
    /// Of Q, K and V: 0 f16, 1 bf16, 2 e4m3fn.
    pub dtype: i32,
    /// Of O, counted likewise.
    pub dtype_o: i32,
    /// 0 forward, 1 backward (not taken so far).
    pub backward: i32,
}

impl FmhaCall {
    /// The caller's queue.
    pub(crate) fn queue(&self) -> Stream {
        Stream(self.stream as u64)
    }

    /// The problem of this call. Packed: waits for the stream and reads the two totals, which no
    /// host field has.
    ///
    /// # Safety
    /// `mask` is null or a C string; `cu_seqlens_*` are null or `batch + 1` numbers in the memory of
    /// `backend`.
    pub(crate) unsafe fn problem(&self, backend: &dyn FmhaBackend) -> Result<(ValidFwd, Totals)> {
        self.is_supported()?;
        let dims = Dims {
            batch: size("batch", self.batch)?,
            seqlen_q: size("seqlen_q", self.seqlen_q)?,
            seqlen_k: size("seqlen_k", self.seqlen_k)?,
            num_heads_q: size("num_heads_q", self.num_heads_q)?,
            num_heads_kv: size("num_heads_kv", self.num_heads_kv)?,
            head_dim_qk: size("head_dim_qk", self.head_dim_qk)?,
            head_dim_v: size("head_dim_v", self.head_dim_v)?,
        };
        let dtype = dtype("dtype", self.dtype)?;
        let (mut problem, totals) = if self.cu_seqlens_q.is_null() {
            (FwdProblem::batch(dtype, dims), Totals::NONE)
        } else {
            backend.memory().synchronize(self.queue())?;
            // SAFETY: the caller of this function promised both arrays.
            let total_q = unsafe { last("cu_seqlens_q", backend, self.cu_seqlens_q, dims.batch)? };
            // SAFETY: as above.
            let total_k = unsafe { last("cu_seqlens_k", backend, self.cu_seqlens_k, dims.batch)? };
            (FwdProblem::group(dtype, dims), Totals::packed(total_q, total_k))
        };
        problem.dtype_o = self::dtype("dtype_o", self.dtype_o)?;
        problem.q = strides(&self.q);
        problem.k = strides(&self.k);
        problem.v = strides(&self.v);
        problem.o = strides(&self.o);
        if !self.mask.is_null() {
            // SAFETY: the caller of this function promised a C string.
            let text = unsafe { CStr::from_ptr(self.mask) }.to_string_lossy();
            problem.mask =
                text.parse().map_err(|error| ProblemError::new("mask", format!("mask {text}: {error}")))?;
        }
        problem.softmax_scale = Some(self.softmax_scale);
        problem.descale_q = descale(self.descale_q);
        problem.descale_k = descale(self.descale_k);
        problem.descale_v = descale(self.descale_v);
        problem.write_lse = !self.lse.is_null();
        Ok((problem.validate()?, totals))
    }

    fn is_supported(&self) -> Result<()> {
        let refuse = |field, text: String| Err(ProblemError::new(field, text).into());
        if self.backward != 0 {
            return refuse("backward", format!("backward {} is not 0: forward only", self.backward));
        }
        if self.page_size != 0 || !self.page_table.is_null() {
            return refuse("page_size", format!("page_size {}: paged K and V are not taken", self.page_size));
        }
        if self.cu_seqlens_q.is_null() != self.cu_seqlens_k.is_null() {
            return refuse("cu_seqlens_k", "cu_seqlens_k and cu_seqlens_q: 1 of 2 is null".to_owned());
        }
        Ok(())
    }

    /// The arguments of this call for a plan; sizes are those that the plan's problem reaches.
    ///
    /// # Safety
    /// Every pointer that is not null is memory of `space`, as large as the plan's problem says, and
    /// nobody else touches it until the work is done.
    pub(crate) unsafe fn args<'a>(
        &self,
        plan: &FwdPlan,
        totals: Totals,
        space: MemorySpace,
        workspace: Option<&'a DevBuffer>,
    ) -> Result<FwdArgs<'a>> {
        let problem = plan.problem();
        let extents = problem.extents(totals);
        let tensor = |name, tensor: &FmhaTensor, planned: Strides, shape: Shape, dtype: DType| {
            same_strides(name, strides(tensor), planned)?;
            let bytes = ValidFwd::extent_bytes(planned, shape, dtype);
            if tensor.data.is_null() && bytes > 0 {
                let text = format!("{name}.data is null, but {bytes} bytes are needed");
                return Err(ProblemError::new(name, text));
            }
            Ok((tensor.data.cast::<u8>(), bytes))
        };
        // SAFETY: the caller of this function promised all of it.
        let input = |(ptr, bytes): (*mut u8, u64)| unsafe { DevSlice::from_raw(space, ptr, bytes) };
        // SAFETY: as above.
        let output = |(ptr, bytes): (*mut u8, u64)| unsafe { DevSliceMut::from_raw(space, ptr, bytes) };
        let present = |ptr: *const u8, bytes| (!ptr.is_null()).then(|| input((ptr.cast_mut(), bytes)));

        let mut args = FwdArgs::new(
            input(tensor("q", &self.q, problem.q, extents.q, problem.dtype_qk)?),
            input(tensor("k", &self.k, problem.k, extents.k, problem.dtype_qk)?),
            input(tensor("v", &self.v, problem.v, extents.v, problem.dtype_v)?),
            output(tensor("o", &self.o, problem.o, extents.o, problem.dtype_o)?),
        );
        let Dims { batch, num_heads_kv, .. } = problem.dims;
        if !self.lse.is_null() {
            args.lse = Some(output((self.lse.cast(), extents.lse_elems * 4)));
        }
        let cu_bytes = (u64::from(batch) + 1) * 4;
        args.seq.totals = totals;
        args.seq.cu_seqlens_q = present(self.cu_seqlens_q.cast(), cu_bytes);
        args.seq.cu_seqlens_k = present(self.cu_seqlens_k.cast(), cu_bytes);
        let scale_bytes = Descale::PerKvHead.num_elems(batch, num_heads_kv) * 4;
        args.score.descale_q = present(self.descale_q.cast(), scale_bytes);
        args.score.descale_k = present(self.descale_k.cast(), scale_bytes);
        args.score.descale_v = present(self.descale_v.cast(), scale_bytes);
        args.workspace = workspace.map(|buffer| output((buffer.as_ptr(), buffer.bytes())));
        Ok(args)
    }
}

fn strides(tensor: &FmhaTensor) -> Strides {
    Strides { batch: tensor.batch_stride, seq: tensor.seqlen_stride, head: tensor.head_stride, dim: 1 }
}

fn same_strides(name: &'static str, given: Strides, planned: Strides) -> Result<(), ProblemError> {
    if given == planned {
        return Ok(());
    }
    Err(ProblemError::new(name, format!("{name} strides {given:?} are not the plan's {planned:?}")))
}

fn size(field: &'static str, value: i64) -> Result<u32, ProblemError> {
    u32::try_from(value).map_err(|_| ProblemError::new(field, format!("{field} {value} is not in 0..2^32")))
}

fn dtype(field: &'static str, code: i32) -> Result<DType, ProblemError> {
    match code {
        0 => Ok(DType::F16),
        1 => Ok(DType::Bf16),
        2 => Ok(DType::E4m3Fn),
        _ => Err(ProblemError::new(field, format!("{field} {code} is not 0 (f16), 1 (bf16) or 2 (e4m3fn)"))),
    }
}

fn descale(ptr: *const f32) -> Descale {
    if ptr.is_null() { Descale::None } else { Descale::PerKvHead }
}

/// Entry `batch` of a `cu_seqlens` array.
///
/// # Safety
/// `array` is `batch + 1` numbers in the memory of `backend`.
unsafe fn last(field: &'static str, backend: &dyn FmhaBackend, array: *const i32, batch: u32) -> Result<u32> {
    let memory = backend.memory();
    let entry = array.wrapping_add(batch as usize).cast_mut().cast::<u8>();
    // SAFETY: the caller promised the entry; it is only read, and not freed.
    let buffer = unsafe { DevBuffer::from_raw(memory.space(), entry, 4, Box::new(|_| ())) };
    let mut bytes = [0; 4];
    memory.download(&buffer, &mut bytes)?;
    let total = i32::from_ne_bytes(bytes);
    Ok(size(field, total.into())?)
}
