//! Conversion of a call's operands and gradients to the C structs.

use fmha_c::{
    FMHA_BF16, FMHA_BIAS_ALIBI, FMHA_BIAS_ALIBI_PER_BATCH, FMHA_BIAS_ELEMENTWISE, FMHA_DESCALE_PER_KV_HEAD,
    FMHA_DESCALE_PER_TENSOR, FMHA_F16, FMHA_F32, FMHA_V_COL_MAJOR, FMHA_V_ROW_MAJOR, FmhaArgs, FmhaGradients,
    FmhaProblem, FmhaStrides,
};

use crate::call::{Wrong, ensure};
use crate::request::{Request, Slot, name};
use crate::shapes::{
    NO_STRIDES, Placed, Sizes, cache_rows, contiguous, dense_rows, expect, is_cache, of_type, operand, plain,
    rows_of,
};
use crate::tensor::{I32, Tensor, U8, dtype_name, is_fp8};

pub(crate) fn fill_dims(
    problem: &mut FmhaProblem,
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<(), Wrong> {
    problem.batch = sizes.batch;
    problem.seqlen_q = sizes.seqlen_q;
    problem.seqlen_k = sizes.seqlen_k;
    problem.num_heads_q = sizes.heads_q;
    problem.num_heads_kv = sizes.heads_kv;
    problem.head_dim_qk = sizes.dim_qk;
    problem.head_dim_v = sizes.dim_v;
    args.total_q = sizes.total_q.unwrap_or(0);
    args.total_k = sizes.total_k.unwrap_or(0);
    if let Some((pages, page_size, max_pages)) = sizes.pages {
        (args.num_pages, problem.page_size, args.max_pages) = (pages, page_size, max_pages);
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

pub(crate) fn fill_operands(
    problem: &mut FmhaProblem,
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<(), Wrong> {
    // SAFETY: who made the request promised its scales.
    if let Some(scales) = unsafe { request.scaled() } {
        crate::scales::fill_operands(problem, args, sizes, request, scales)?;
        return fill_outputs(problem, args, sizes, request);
    }
    let (q, k) = (request.required(Slot::Q)?, request.required(Slot::K)?);
    let placed = operand("q", q, &sizes.q(sizes.dim_qk))?;
    (problem.q, args.q) = (placed.strides, placed.data);
    let bytes = cache_rows(k);
    let placed = match bytes {
        0 => operand("k", k, &sizes.k(sizes.dim_qk))?,
        bytes => rows_of("k", k, &sizes.k(bytes.into()))?,
    };
    (problem.k, args.k) = (placed.strides, placed.data);
    problem.dtype_qk = q.dtype;
    problem.dtype_v = q.dtype;
    match request.get(Slot::V) {
        Some(v) => {
            let placed = operand("v", v, &sizes.k(sizes.dim_v))?;
            (problem.v, args.v) = (placed.strides, placed.data);
            let by_columns = problem.v.dim_stride != 1 && problem.v.seqlen_stride == 1;
            problem.v_layout = if by_columns { FMHA_V_COL_MAJOR } else { FMHA_V_ROW_MAJOR };
            ensure!(
                v.dtype == q.dtype || is_cache(q, k) || is_fp8(q.dtype) && !is_fp8(v.dtype),
                "v is of {}, but q of {}",
                dtype_name(v.dtype),
                dtype_name(q.dtype)
            );
            problem.dtype_v = if is_cache(q, k) { q.dtype } else { v.dtype };
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
            problem.v = problem.k;
        }
    }
    ensure!(
        k.dtype == q.dtype || is_cache(q, k) || bytes != 0,
        "k is of {}, but q of {}",
        dtype_name(k.dtype),
        dtype_name(q.dtype)
    );
    fill_outputs(problem, args, sizes, request)
}

fn fill_outputs(
    problem: &mut FmhaProblem,
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<(), Wrong> {
    let o = request.required(Slot::O)?;
    let placed = operand("o", o, &sizes.q(sizes.dim_v))?;
    (problem.o, args.o) = (placed.strides, placed.data);
    problem.dtype_o = o.dtype;
    if let Some(lse) = request.get(Slot::Lse) {
        expect("lse", lse, &sizes.lse())?;
        of_type("lse", lse, &[FMHA_F32])?;
        contiguous("lse", lse)?;
        (problem.write_lse, args.lse) = (1, lse.address().cast());
    }
    args.row_max = plain(request, Slot::RowMax, &sizes.lse(), &[FMHA_F32])?.cast();
    args.head_max = plain(request, Slot::HeadMax, &[sizes.heads_q], &[FMHA_F32])?.cast();
    let of_keys = [sizes.batch, sizes.heads_q, sizes.seqlen_k];
    args.key_sum = plain(request, Slot::KeySum, &of_keys, &[FMHA_F32])?.cast();
    problem.row_max = has(request, Slot::RowMax);
    problem.head_max = has(request, Slot::HeadMax);
    problem.key_sum = has(request, Slot::KeySum);
    Ok(())
}

/// Flag of the problem that says whether a tensor is given.
fn has(request: &Request, slot: Slot) -> i32 {
    request.get(slot).is_some().into()
}

pub(crate) fn fill_modifiers(
    problem: &mut FmhaProblem,
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<(), Wrong> {
    if let Some(bias) = request.get(Slot::Bias) {
        let placed = self::bias("bias", bias, sizes)?;
        (problem.bias, args.bias) = (placed.strides, placed.data);
        (problem.bias_kind, problem.dtype_bias) = (FMHA_BIAS_ELEMENTWISE, bias.dtype);
    }
    let heads = [sizes.heads_q];
    if let Some(slopes) = request.get(Slot::AlibiSlopes) {
        let per_batch = slopes.shape().len() == 2;
        ensure!(problem.bias_kind == 0, "alibi_slopes and bias: 2 given, at most 1 is taken");
        problem.bias_kind = if per_batch { FMHA_BIAS_ALIBI_PER_BATCH } else { FMHA_BIAS_ALIBI };
        let wanted = [sizes.batch, sizes.heads_q];
        let wanted = if per_batch { &wanted[..] } else { &heads[..] };
        args.alibi_slopes = plain(request, Slot::AlibiSlopes, wanted, &[FMHA_F32])?.cast();
    }
    problem.sink = has(request, Slot::Sink);
    args.sink = plain(request, Slot::Sink, &heads, &[FMHA_F32])?.cast();
    problem.write_keep_mask = has(request, Slot::KeepMask);
    args.keep_mask =
        plain(request, Slot::KeepMask, &[sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k], &[U8])?
            .cast();
    let mut per_tensor = None;
    for (slot, kind, to) in [
        (Slot::DescaleQ, &mut problem.descale_q, &mut args.descale_q),
        (Slot::DescaleK, &mut problem.descale_k, &mut args.descale_k),
        (Slot::DescaleV, &mut problem.descale_v, &mut args.descale_v),
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
        *kind = if one { FMHA_DESCALE_PER_TENSOR } else { FMHA_DESCALE_PER_KV_HEAD };
        let wanted = [sizes.batch, sizes.heads_kv];
        let wanted = if one { descale.shape() } else { &wanted[..] };
        *to = plain(request, slot, wanted, &[FMHA_F32])?.cast();
    }
    if let Some(scale) = request.get(Slot::ScaleO) {
        let one = scale.shape().iter().product::<i64>();
        ensure!(one == 1, "scale_o has {one} elements, not 1");
        problem.scale_o = 1;
        args.scale_o = plain(request, Slot::ScaleO, scale.shape(), &[FMHA_F32])?.cast();
    }
    Ok(())
}

/// A bias, or its gradient: axes of size 1 before the last two are broadcast.
fn bias(name: &str, tensor: &Tensor, sizes: &Sizes) -> Result<Placed, Wrong> {
    let shape = tensor.shape();
    ensure!(
        (2..=4).contains(&shape.len()),
        "{name} has {} axes of {shape:?}, not 2 to 4 of [batch, num_heads_q, seqlen_q, seqlen_k]",
        shape.len()
    );
    let lacking = 4 - shape.len();
    // A tensor without elements gets dense strides: its own mean nothing, and a stride of 0 is no broadcast.
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
    let strides = FmhaStrides {
        batch_stride: stride(0),
        seqlen_stride: axis(2).1.max(0),
        head_stride: stride(1),
        dim_stride: if sizes.seqlen_k == 1 { 1 } else { axis(3).1 },
    };
    Ok(Placed { data: tensor.address(), strides })
}

pub(crate) fn fill_lengths(
    problem: &mut FmhaProblem,
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<(), Wrong> {
    let (offsets, used) = ([sizes.batch + 1], [sizes.batch]);
    args.cu_seqlens_q = plain(request, Slot::CuSeqlensQ, &offsets, &[I32])?.cast();
    args.cu_seqlens_k = plain(request, Slot::CuSeqlensK, &offsets, &[I32])?.cast();
    args.seqused_q = plain(request, Slot::SequsedQ, &used, &[I32])?.cast();
    args.seqused_k = plain(request, Slot::SequsedK, &used, &[I32])?.cast();
    problem.packed_q = has(request, Slot::CuSeqlensQ);
    problem.packed_k = has(request, Slot::CuSeqlensK);
    problem.seqused_q = has(request, Slot::SequsedQ);
    problem.seqused_k = has(request, Slot::SequsedK);
    if let Some((_, _, max_pages)) = sizes.pages
        && request.get(Slot::BlockTable).is_some()
    {
        args.block_table = plain(request, Slot::BlockTable, &[sizes.batch, max_pages], &[I32])?.cast();
    }
    Ok(())
}

pub(crate) fn gradients(
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<FmhaGradients, Wrong> {
    let tensor = |slot: Slot, wanted: &[i64]| operand(name(slot), request.required(slot)?, wanted);
    let (dq, dout) = (request.required(Slot::Dq)?, request.required(Slot::Dout)?);
    for slot in [Slot::Dk, Slot::Dv] {
        of_type(name(slot), request.required(slot)?, &[dq.dtype])?;
    }
    let o = request.required(Slot::O)?;
    of_type("dout", dout, &[o.dtype])?;
    let mut gradients = FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: NO_STRIDES,
        dq: NO_STRIDES,
        dk: NO_STRIDES,
        dv: NO_STRIDES,
        dbias: NO_STRIDES,
        dtype_grad: dq.dtype,
        dtype_dbias: 0,
        write_dbias: has(request, Slot::Dbias),
        write_dsink: has(request, Slot::Dsink),
        has_dlse: has(request, Slot::Dlse),
        reserved: 0,
    };
    let placed = tensor(Slot::Dout, &sizes.q(sizes.dim_v))?;
    (gradients.dout, args.dout) = (placed.strides, placed.data);
    let placed = tensor(Slot::Dq, &sizes.q(sizes.dim_qk))?;
    (gradients.dq, args.dq) = (placed.strides, placed.data);
    let placed = tensor(Slot::Dk, &sizes.k(sizes.dim_qk))?;
    (gradients.dk, args.dk) = (placed.strides, placed.data);
    let placed = tensor(Slot::Dv, &sizes.k(sizes.dim_v))?;
    (gradients.dv, args.dv) = (placed.strides, placed.data);
    if let Some(tensor) = request.get(Slot::Dbias) {
        let placed = bias("dbias", tensor, sizes)?;
        (gradients.dbias, args.dbias) = (placed.strides, placed.data);
        gradients.dtype_dbias = tensor.dtype;
    }
    args.dlse = plain(request, Slot::Dlse, &sizes.lse(), &[FMHA_F32])?.cast();
    args.dsink = plain(request, Slot::Dsink, &[sizes.heads_q], &[FMHA_F32])?.cast();
    Ok(gradients)
}
