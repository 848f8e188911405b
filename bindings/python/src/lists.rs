//! Lists of keys on tensors of host memory: what `fmha.flash_mla` calls by `ctypes`.

use fmha::{
    Backend, CacheSlice, DType, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem, KeyLists, KvLayout,
    ListEntries, ListLength, MemorySpace, PlanOptions, QLayout, ScoreArgs, SeqArgs, Strides, Totals,
};

use crate::tensor::{I32, Tensor, dtype_name};

/// A forward call over lists of keys, V in the first elements of K's rows. `ctypes` fills the same struct.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ListCall {
    /// `[batch, seqlen_q, num_heads_q, head_dim]`.
    pub q: Tensor,
    /// `[batch, seqlen_k, num_heads_kv, head_dim]`, or with addresses `[pages, page_size, num_heads_kv, head_dim]`.
    pub kv: Tensor,
    /// `[batch, seqlen_q, num_heads_q, head_dim_v]`, written.
    pub o: Tensor,
    /// f32 `[batch, num_heads_q, seqlen_q]`, contiguous, written: LSE of the keys alone.
    pub lse: Tensor,
    /// i32 `[batch, seqlen_q, num_heads_kv, topk]`.
    pub indices: Tensor,
    /// i32 `[batch]` or `[batch, seqlen_q]`, contiguous; or absent.
    pub topk_length: Tensor,
    /// f32 `[num_heads_q]`, contiguous; or absent.
    pub sink: Tensor,
    /// Multiplies the products.
    pub softmax_scale: f64,
    /// 1: entries are addresses in pages.
    pub addresses: i64,
}

/// Computes it on the CPU.
///
/// # Safety
/// `call` is null or a call whose tensors are host memory as large as they say, the outputs apart from all else.
///
/// # Errors
/// What is wrong with the call, by its argument's name.
pub(crate) unsafe fn run(call: *const ListCall) -> Result<(), String> {
    // SAFETY: the caller keeps the contract of `run`.
    let call = unsafe { call.as_ref() }.ok_or("call is null")?;
    // SAFETY: the caller keeps the contract of `run`.
    unsafe { attend(call) }.map_err(|error| error.to_string())
}

/// # Safety
/// As [`run`].
unsafe fn attend(call: &ListCall) -> Result<(), Box<dyn std::error::Error>> {
    let [batch, seqlen_q, num_heads_q, head_dim_qk] = axes("q", &call.q)?;
    let [rows, seqlen_k, num_heads_kv, kv_dim] = axes("kv", &call.kv)?;
    let [.., head_dim_v] = axes("o", &call.o)?;
    let [.., topk] = axes("indices", &call.indices)?;
    let dtype = dtype("q", &call.q)?;
    let addresses = call.addresses != 0;
    wants("kv", dtype == self::dtype("kv", &call.kv)?, &call.kv)?;
    wants("kv", kv_dim == head_dim_qk && (addresses || rows == batch), &call.kv)?;
    wants("o", axes("o", &call.o)? == [batch, seqlen_q, num_heads_q, head_dim_v], &call.o)?;
    wants("indices", call.indices.dtype == I32, &call.indices)?;
    let lists_shape = [batch, seqlen_q, num_heads_kv, topk];
    wants("indices", axes("indices", &call.indices)? == lists_shape, &call.indices)?;
    let length = match call.topk_length.given().map(Tensor::shape) {
        None => ListLength::Whole,
        Some(shape) if shape == [i64::from(batch)] => ListLength::Sequence,
        Some(shape) if shape == [i64::from(batch), i64::from(seqlen_q)] => ListLength::Token,
        Some(_) => return Err(misfit("topk_length", &call.topk_length)),
    };
    let dims = Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v };
    let kv_layout = if addresses { KvLayout::Paged { page_size: seqlen_k } } else { KvLayout::Strided };
    let mut problem = FwdProblem::new(QLayout::Batch, kv_layout, dtype, dims)
        .strides_q(strides(&call.q))
        .strides_k(strides(&call.kv))
        .strides_v(strides(&call.kv))
        .strides_o(strides(&call.o))
        .v_in_k(true)
        .sink(call.sink.given().is_some())
        .softmax_scale(call.softmax_scale as f32)
        .write_lse(true);
    let lists = KeyLists::new(&problem, topk)
        .strides(strides(&call.indices))
        .length(length)
        .lse_without_sink(problem.score.sink)
        .entries(if addresses { ListEntries::Addresses } else { ListEntries::Positions });
    problem = problem.lists(lists);
    let totals = Totals { num_pages: addresses.then_some(rows), ..Totals::NONE };
    // SAFETY: the caller promised that each tensor is host memory as large as it says.
    let input = |tensor: &Tensor| unsafe {
        DevSlice::from_raw(MemorySpace::Host, tensor.address().cast(), bytes(tensor), fmha::ElemType::Bytes)
    };
    // SAFETY: the caller promised that each tensor is host memory as large as it says.
    let output = |tensor: &Tensor| unsafe {
        let address = tensor.address().cast();
        DevSliceMut::from_raw(MemorySpace::Host, address, bytes(tensor), fmha::ElemType::Bytes)
    };
    let seq = SeqArgs::default()
        .totals(totals)
        .indices(input(&call.indices))
        .topk_length(call.topk_length.given().map(input));
    let mut args = FwdArgs::new(input(&call.q), input(&call.kv), CacheSlice::InK, output(&call.o))
        .lse(output(&call.lse))
        .seq(seq)
        .score(ScoreArgs::default().sink(call.sink.given().map(input)));
    let device = Device::open(Backend::Cpu)?;
    let plan = device.plan_fwd(&problem.validate()?, &PlanOptions::default())?;
    plan.run(&mut args, &device.default_stream())?;
    Ok(())
}

fn axes(name: &str, tensor: &Tensor) -> Result<[u32; 4], Box<dyn std::error::Error>> {
    let sizes = <[i64; 4]>::try_from(tensor.shape()).map_err(|_| misfit(name, tensor))?;
    let mut axes = [0; 4];
    for (to, size) in axes.iter_mut().zip(sizes) {
        *to = u32::try_from(size).map_err(|_| misfit(name, tensor))?;
    }
    Ok(axes)
}

fn strides(tensor: &Tensor) -> Strides {
    let [batch, seq, head, dim, ..] = tensor.strides;
    Strides { batch, seq, head, dim }
}

fn dtype(name: &str, tensor: &Tensor) -> Result<DType, Box<dyn std::error::Error>> {
    match dtype_name(tensor.dtype) {
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::Bf16),
        "float32" => Ok(DType::F32),
        other => Err(format!("{name} has dtype {other}, not float16, bfloat16 or float32").into()),
    }
}

fn wants(name: &str, fits: bool, tensor: &Tensor) -> Result<(), Box<dyn std::error::Error>> {
    if fits { Ok(()) } else { Err(misfit(name, tensor)) }
}

fn misfit(name: &str, tensor: &Tensor) -> Box<dyn std::error::Error> {
    let (shape, dtype) = (tensor.shape(), dtype_name(tensor.dtype));
    format!("{name} of shape {shape:?} and dtype {dtype} does not go with the other tensors").into()
}

/// Bytes from a tensor's first element to behind its last.
fn bytes(tensor: &Tensor) -> u64 {
    let size = match dtype_name(tensor.dtype) {
        "float16" | "bfloat16" => 2,
        _ => 4,
    };
    u64::try_from(tensor.spanned_elems()).unwrap_or(0) * size
}
