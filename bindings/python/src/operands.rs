//! The operands of a call and of its gradients, put into the C structs.

use fmha_c::{
    FMHA_BF16, FMHA_F16, FMHA_F32, FMHA_V_COL_MAJOR, FMHA_V_ROW_MAJOR, FmhaCall, FmhaGradients, FmhaTensor,
};

use crate::call::{NO_TENSOR, Wrong, ensure};
use crate::request::{Request, Slot, name};
use crate::shapes::{Sizes, contiguous, dense_rows, expect, is_cache, of_type, operand, plain};
use crate::tensor::{I32, Tensor, U8, dtype_name, is_fp8};

pub(crate) fn fill_dims(call: &mut FmhaCall, sizes: &Sizes, request: &Request) -> Result<(), Wrong> {
    call.batch = sizes.batch;
    call.seqlen_q = sizes.seqlen_q;
    call.seqlen_k = sizes.seqlen_k;
    call.num_heads_q = sizes.heads_q;
    call.num_heads_kv = sizes.heads_kv;
    call.head_dim_qk = sizes.dim_qk;
    call.head_dim_v = sizes.dim_v;
    call.total_q = sizes.total_q.unwrap_or(0);
    call.total_k = sizes.total_k.unwrap_or(0);
    if let Some((pages, page_size, max_pages)) = sizes.pages {
        (call.num_pages, call.page_size, call.max_pages) = (pages, page_size, max_pages);
    }
    let numbers = &request.numbers;
    for (name, value) in [
        ("max_seqlen_q", numbers.max_seqlen_q),
        ("max_seqlen_k", numbers.max_seqlen_k),
        ("max_seqlen_new", numbers.max_seqlen_new),
        ("head_dim_v", numbers.head_dim_v),
    ] {
        ensure!(value >= 0, "{name} {value} is below 0");
    }
    Ok(())
}

pub(crate) fn fill_operands(call: &mut FmhaCall, sizes: &Sizes, request: &Request) -> Result<(), Wrong> {
    // SAFETY: who made the request promised its scales.
    if let Some(scales) = unsafe { request.scaled() } {
        crate::scales::fill_operands(call, sizes, request, scales)?;
        return fill_outputs(call, sizes, request);
    }
    let (q, k) = (request.required(Slot::Q)?, request.required(Slot::K)?);
    call.q = operand("q", q, &sizes.q(sizes.dim_qk))?;
    call.k = operand("k", k, &sizes.k(sizes.dim_qk))?;
    call.dtype_qk = q.dtype;
    call.dtype_v = q.dtype;
    match request.get(Slot::V) {
        Some(v) => {
            call.v = operand("v", v, &sizes.k(sizes.dim_v))?;
            let by_columns = call.v.dim_stride != 1 && call.v.seqlen_stride == 1;
            call.v_layout = if by_columns { FMHA_V_COL_MAJOR } else { FMHA_V_ROW_MAJOR };
            ensure!(
                v.dtype == q.dtype || is_cache(q, k) || is_fp8(q.dtype) && !is_fp8(v.dtype),
                "v is of {}, but q of {}",
                dtype_name(v.dtype),
                dtype_name(q.dtype)
            );
            call.dtype_v = if is_cache(q, k) { q.dtype } else { v.dtype };
            ensure!(
                !is_cache(q, k) || v.dtype == k.dtype,
                "v is of {}, but k, the cache beside it, of {}",
                dtype_name(v.dtype),
                dtype_name(k.dtype)
            );
        }
        None => {
            ensure!(
                sizes.dim_v >= 1,
                "v is missing, and head_dim_v {} says nothing of k's rows that hold it",
                sizes.dim_v
            );
            call.v = FmhaTensor { data: std::ptr::null_mut(), ..call.k };
        }
    }
    ensure!(
        k.dtype == q.dtype || is_cache(q, k),
        "k is of {}, but q of {}",
        dtype_name(k.dtype),
        dtype_name(q.dtype)
    );
    fill_outputs(call, sizes, request)
}

fn fill_outputs(call: &mut FmhaCall, sizes: &Sizes, request: &Request) -> Result<(), Wrong> {
    let o = request.required(Slot::O)?;
    call.o = operand("o", o, &sizes.q(sizes.dim_v))?;
    call.dtype_o = o.dtype;
    if let Some(lse) = request.get(Slot::Lse) {
        expect("lse", lse, &sizes.lse())?;
        of_type("lse", lse, &[FMHA_F32])?;
        contiguous("lse", lse)?;
        call.lse = lse.address().cast();
    }
    call.row_max = plain(request, Slot::RowMax, &sizes.lse(), &[FMHA_F32])?.cast();
    call.head_max = plain(request, Slot::HeadMax, &[sizes.heads_q], &[FMHA_F32])?.cast();
    let of_keys = [sizes.batch, sizes.heads_q, sizes.seqlen_k];
    call.key_sum = plain(request, Slot::KeySum, &of_keys, &[FMHA_F32])?.cast();
    Ok(())
}

pub(crate) fn fill_modifiers(call: &mut FmhaCall, sizes: &Sizes, request: &Request) -> Result<(), Wrong> {
    if let Some(bias) = request.get(Slot::Bias) {
        call.bias = self::bias("bias", bias, sizes)?;
        call.dtype_bias = bias.dtype;
    }
    let heads = [sizes.heads_q];
    if let Some(slopes) = request.get(Slot::AlibiSlopes) {
        let per_batch = slopes.shape().len() == 2;
        call.alibi_per_batch = i32::from(per_batch);
        let wanted = [sizes.batch, sizes.heads_q];
        let wanted = if per_batch { &wanted[..] } else { &heads[..] };
        call.alibi_slopes = plain(request, Slot::AlibiSlopes, wanted, &[FMHA_F32])?.cast();
    }
    call.sink = plain(request, Slot::Sink, &heads, &[FMHA_F32])?.cast();
    call.keep_mask =
        plain(request, Slot::KeepMask, &[sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k], &[U8])?
            .cast();
    let mut per_tensor = None;
    for (slot, to) in [
        (Slot::DescaleQ, &mut call.descale_q),
        (Slot::DescaleK, &mut call.descale_k),
        (Slot::DescaleV, &mut call.descale_v),
    ] {
        let Some(descale) = request.get(slot) else { continue };
        let one = descale.shape().iter().product::<i64>() == 1 && descale.shape().len() <= 1;
        ensure!(
            per_tensor.is_none_or(|so_far| so_far == one),
            "{} has shape {:?}: all descales are one number, or all are [batch, num_heads_kv]",
            name(slot),
            descale.shape()
        );
        per_tensor = Some(one);
        let wanted = [sizes.batch, sizes.heads_kv];
        let wanted = if one { descale.shape() } else { &wanted[..] };
        *to = plain(request, slot, wanted, &[FMHA_F32])?.cast();
    }
    call.descale_per_tensor = i32::from(per_tensor == Some(true));
    if let Some(scale) = request.get(Slot::ScaleO) {
        let one = scale.shape().iter().product::<i64>();
        ensure!(one == 1, "scale_o has {one} elements, not 1");
        call.scale_o = plain(request, Slot::ScaleO, scale.shape(), &[FMHA_F32])?.cast();
    }
    Ok(())
}

/// A bias, or its gradient: axes of size 1 before the last two are broadcast.
fn bias(name: &str, tensor: &Tensor, sizes: &Sizes) -> Result<FmhaTensor, Wrong> {
    let shape = tensor.shape();
    ensure!(
        (2..=4).contains(&shape.len()),
        "{name} has {} axes of {shape:?}, not 2 to 4 of [batch, num_heads_q, seqlen_q, seqlen_k]",
        shape.len()
    );
    let lacking = 4 - shape.len();
    // Strides of a tensor without elements say nothing, not even that a view repeats it.
    let dense = Tensor::described(shape, tensor.dtype, tensor.device);
    let steps = if shape.contains(&0) { dense.steps() } else { tensor.steps() };
    let axis = |i: usize| if i < lacking { (1, 0) } else { (shape[i - lacking], steps[i - lacking]) };
    let wanted = [sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k];
    for (i, &size) in wanted.iter().enumerate() {
        let (given, stride) = axis(i);
        let broadcasts = i < 2 && given == 1;
        ensure!(
            given == size || broadcasts,
            "{name} has shape {shape:?}, which {wanted:?} does not broadcast to"
        );
        ensure!(stride >= 0 || given <= 1, "{name} has stride {stride}, below 0");
    }
    let stride = |i: usize| match axis(i) {
        (1, _) => 0,
        (_, stride) => stride,
    };
    of_type(name, tensor, &[FMHA_F32, FMHA_F16, FMHA_BF16])?;
    dense_rows(name, tensor, false)?;
    Ok(FmhaTensor {
        data: tensor.address(),
        batch_stride: stride(0),
        seqlen_stride: axis(2).1.max(0),
        head_stride: stride(1),
        dim_stride: if sizes.seqlen_k == 1 { 1 } else { axis(3).1 },
    })
}

pub(crate) fn fill_lengths(call: &mut FmhaCall, sizes: &Sizes, request: &Request) -> Result<(), Wrong> {
    let (offsets, used) = ([sizes.batch + 1], [sizes.batch]);
    call.cu_seqlens_q = plain(request, Slot::CuSeqlensQ, &offsets, &[I32])?.cast();
    call.cu_seqlens_k = plain(request, Slot::CuSeqlensK, &offsets, &[I32])?.cast();
    call.seqused_q = plain(request, Slot::SequsedQ, &used, &[I32])?.cast();
    call.seqused_k = plain(request, Slot::SequsedK, &used, &[I32])?.cast();
    if let Some((_, _, max_pages)) = sizes.pages
        && request.get(Slot::BlockTable).is_some()
    {
        call.block_table = plain(request, Slot::BlockTable, &[sizes.batch, max_pages], &[I32])?.cast();
    }
    Ok(())
}

pub(crate) fn gradients(sizes: &Sizes, request: &Request) -> Result<FmhaGradients, Wrong> {
    let tensor = |slot: Slot, wanted: &[i64]| operand(name(slot), request.required(slot)?, wanted);
    let (dq, dout) = (request.required(Slot::Dq)?, request.required(Slot::Dout)?);
    for slot in [Slot::Dk, Slot::Dv] {
        of_type(name(slot), request.required(slot)?, &[dq.dtype])?;
    }
    let o = request.required(Slot::O)?;
    of_type("dout", dout, &[o.dtype])?;
    let (dbias, dtype_dbias) = match request.get(Slot::Dbias) {
        Some(tensor) => (bias("dbias", tensor, sizes)?, tensor.dtype),
        None => (NO_TENSOR, 0),
    };
    Ok(FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: tensor(Slot::Dout, &sizes.q(sizes.dim_v))?,
        dq: tensor(Slot::Dq, &sizes.q(sizes.dim_qk))?,
        dk: tensor(Slot::Dk, &sizes.k(sizes.dim_qk))?,
        dv: tensor(Slot::Dv, &sizes.k(sizes.dim_v))?,
        dbias,
        dlse: plain(request, Slot::Dlse, &sizes.lse(), &[FMHA_F32])?.cast(),
        dsink: plain(request, Slot::Dsink, &[sizes.heads_q], &[FMHA_F32])?.cast(),
        dtype_grad: dq.dtype,
        dtype_dbias,
    })
}
