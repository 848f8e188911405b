//! A run's struct against its plan's: all that was planned must be what it was. Addresses, the stream,
//! the dropout generator and the totals of packed and paged tensors may change from run to run; nothing
//! else may.

use std::fmt;

use fmha::{ProblemError, Result};

use crate::host::Pointed;
use crate::structs::{FmhaCache, FmhaCall, FmhaCombine, FmhaGradients, FmhaPartial, FmhaTensor};

/// Refuses a call that is not the planned one.
///
/// # Safety
/// As [`Pointed::read`].
pub(crate) unsafe fn call(planned: &FmhaCall, pointed: &Pointed, given: &FmhaCall) -> Result<()> {
    // Every field is named here, and an unused one is an error: a field that is added is thought of.
    let FmhaCall {
        struct_bytes,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads_q,
        num_heads_kv,
        head_dim_qk,
        head_dim_v,
        total_q: _,
        total_k: _,
        page_size,
        num_pages: _,
        max_pages: _,
        q,
        k,
        v,
        o,
        bias,
        lse,
        keep_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        page_table,
        alibi_slopes,
        sink,
        descale_q,
        descale_k,
        descale_v,
        scale_o,
        mask: _,
        softmax_scale: _,
        softcap: _,
        stream: _,
        gradients: _,
        cache: _,
        dropout_seed: _,
        dropout_offset: _,
        p_drop,
        dtype_qk,
        dtype_v,
        dtype_o,
        dtype_bias,
        v_layout,
        alibi_per_batch,
        descale_per_tensor,
    } = *given;
    // First: of another version's struct nothing else can be read.
    number("struct_bytes", struct_bytes, planned.struct_bytes)?;
    for (field, given, planned) in [
        ("batch", batch, planned.batch),
        ("seqlen_q", seqlen_q, planned.seqlen_q),
        ("seqlen_k", seqlen_k, planned.seqlen_k),
        ("num_heads_q", num_heads_q, planned.num_heads_q),
        ("num_heads_kv", num_heads_kv, planned.num_heads_kv),
        ("head_dim_qk", head_dim_qk, planned.head_dim_qk),
        ("head_dim_v", head_dim_v, planned.head_dim_v),
        ("page_size", page_size, planned.page_size),
        ("dtype_qk", dtype_qk.into(), planned.dtype_qk.into()),
        ("dtype_v", dtype_v.into(), planned.dtype_v.into()),
        ("dtype_o", dtype_o.into(), planned.dtype_o.into()),
        ("dtype_bias", dtype_bias.into(), planned.dtype_bias.into()),
        ("v_layout", v_layout.into(), planned.v_layout.into()),
        ("alibi_per_batch", alibi_per_batch.into(), planned.alibi_per_batch.into()),
        ("descale_per_tensor", descale_per_tensor.into(), planned.descale_per_tensor.into()),
    ] {
        number(field, given, planned)?;
    }
    if p_drop.to_bits() != planned.p_drop.to_bits() {
        return Err(differs("p_drop", &p_drop, &planned.p_drop, "the plan's").into());
    }
    for (field, given, planned) in [
        ("lse", lse.cast_const().cast(), planned.lse.cast_const().cast()),
        ("keep_mask", keep_mask.cast_const().cast(), planned.keep_mask.cast_const().cast()),
        ("cu_seqlens_q", cu_seqlens_q.cast::<()>(), planned.cu_seqlens_q.cast::<()>()),
        ("cu_seqlens_k", cu_seqlens_k.cast(), planned.cu_seqlens_k.cast()),
        ("seqused_q", seqused_q.cast(), planned.seqused_q.cast()),
        ("seqused_k", seqused_k.cast(), planned.seqused_k.cast()),
        ("page_table", page_table.cast(), planned.page_table.cast()),
        ("alibi_slopes", alibi_slopes.cast(), planned.alibi_slopes.cast()),
        ("sink", sink.cast(), planned.sink.cast()),
        ("descale_q", descale_q.cast(), planned.descale_q.cast()),
        ("descale_k", descale_k.cast(), planned.descale_k.cast()),
        ("descale_v", descale_v.cast(), planned.descale_v.cast()),
        ("scale_o", scale_o.cast(), planned.scale_o.cast()),
        ("bias.data", bias.data.cast_const().cast(), planned.bias.data.cast_const().cast()),
    ] {
        presence(field, given, planned)?;
    }
    for (field, given, planned) in [
        ("q", q, planned.q),
        ("k", k, planned.k),
        ("v", v, planned.v),
        ("o", o, planned.o),
        ("bias", bias, planned.bias),
    ] {
        strides(field, &given, &planned, "the plan's")?;
    }
    // SAFETY: passed on.
    let read = unsafe { Pointed::read(given)? };
    let Pointed { mask, softmax_scale, softcap, gradients, cache } = read;
    if mask != pointed.mask {
        return Err(differs("mask", &mask, &pointed.mask, "the plan's").into());
    }
    for (field, given, planned) in
        [("softmax_scale", softmax_scale, pointed.softmax_scale), ("softcap", softcap, pointed.softcap)]
    {
        if given.map(f32::to_bits) != planned.map(f32::to_bits) {
            let word = |value: Option<f32>| value.map_or("null".to_owned(), |value| value.to_string());
            return Err(differs(field, &word(given), &word(planned), "the plan's").into());
        }
    }
    both("gradients", gradients.as_ref(), pointed.gradients.as_ref(), self::gradients)?;
    both("cache", cache.as_ref(), pointed.cache.as_ref(), self::cache)
}

/// Two structs of host memory, which are there or not alike.
fn both<T>(
    field: &'static str,
    given: Option<&T>,
    planned: Option<&T>,
    agree: fn(&T, &T) -> Result<()>,
) -> Result<()> {
    match (given, planned) {
        (None, None) => Ok(()),
        (Some(given), Some(planned)) => agree(planned, given),
        (given, _) => {
            let (given, planned) = if given.is_some() { ("given", "null") } else { ("null", "given") };
            Err(differs(field, &given, &planned, "the plan's").into())
        }
    }
}

fn cache(planned: &FmhaCache, given: &FmhaCache) -> Result<()> {
    let FmhaCache {
        struct_bytes,
        seqlen_new,
        total_new: _,
        max_pos,
        k_new,
        v_new,
        cu_seqlens_new,
        rotary_cos,
        rotary_sin,
        tree_mask,
        rotary_dim,
        rotary_interleaved,
        dtype_rotary,
        dtype_cache,
        v_in_k,
        reserved,
    } = *given;
    number("struct_bytes", struct_bytes, planned.struct_bytes)?;
    for (field, given, planned) in
        [("seqlen_new", seqlen_new, planned.seqlen_new), ("max_pos", max_pos, planned.max_pos)]
    {
        number(field, given, planned)?;
    }
    for (field, given, planned) in [
        ("rotary_dim", rotary_dim, planned.rotary_dim),
        ("rotary_interleaved", rotary_interleaved, planned.rotary_interleaved),
        ("dtype_rotary", dtype_rotary, planned.dtype_rotary),
        ("dtype_cache", dtype_cache, planned.dtype_cache),
        ("v_in_k", v_in_k, planned.v_in_k),
        ("reserved", reserved, planned.reserved),
    ] {
        number(field, given, planned)?;
    }
    for (field, given, planned) in [
        ("k_new.data", k_new.data.cast_const().cast::<()>(), planned.k_new.data.cast_const().cast::<()>()),
        ("v_new.data", v_new.data.cast_const().cast(), planned.v_new.data.cast_const().cast()),
        ("cu_seqlens_new", cu_seqlens_new.cast(), planned.cu_seqlens_new.cast()),
        ("rotary_cos", rotary_cos.cast(), planned.rotary_cos.cast()),
        ("rotary_sin", rotary_sin.cast(), planned.rotary_sin.cast()),
        ("tree_mask", tree_mask.cast(), planned.tree_mask.cast()),
    ] {
        presence(field, given, planned)?;
    }
    strides("k_new", &k_new, &planned.k_new, "the plan's")?;
    strides("v_new", &v_new, &planned.v_new, "the plan's")
}

fn gradients(planned: &FmhaGradients, given: &FmhaGradients) -> Result<()> {
    let FmhaGradients { struct_bytes, dout, dq, dk, dv, dbias, dlse, dsink, dtype_grad, dtype_dbias } =
        *given;
    number("struct_bytes", struct_bytes, planned.struct_bytes)?;
    number("dtype_grad", dtype_grad, planned.dtype_grad)?;
    number("dtype_dbias", dtype_dbias, planned.dtype_dbias)?;
    presence("dlse", dlse.cast(), planned.dlse.cast())?;
    presence("dsink", dsink.cast_const().cast(), planned.dsink.cast_const().cast())?;
    presence("dbias.data", dbias.data.cast_const().cast(), planned.dbias.data.cast_const().cast())?;
    for (field, given, planned) in [
        ("dout", dout, planned.dout),
        ("dq", dq, planned.dq),
        ("dk", dk, planned.dk),
        ("dv", dv, planned.dv),
        ("dbias", dbias, planned.dbias),
    ] {
        strides(field, &given, &planned, "the plan's")?;
    }
    Ok(())
}

/// As [`call`], for combine.
pub(crate) fn combine(
    planned: &FmhaCombine,
    planned_part: &FmhaPartial,
    given: &FmhaCombine,
    first: &FmhaPartial,
) -> Result<()> {
    let FmhaCombine {
        struct_bytes,
        num_parts,
        batch,
        seqlen_q,
        num_heads_q,
        head_dim_v,
        parts: _,
        o,
        lse,
        stream: _,
        dtype_part,
        dtype_o,
    } = *given;
    number("struct_bytes", struct_bytes, planned.struct_bytes)?;
    for (field, given, planned) in [
        ("num_parts", num_parts, planned.num_parts),
        ("batch", batch, planned.batch),
        ("seqlen_q", seqlen_q, planned.seqlen_q),
        ("num_heads_q", num_heads_q, planned.num_heads_q),
        ("head_dim_v", head_dim_v, planned.head_dim_v),
        ("dtype_part", dtype_part.into(), planned.dtype_part.into()),
        ("dtype_o", dtype_o.into(), planned.dtype_o.into()),
    ] {
        number(field, given, planned)?;
    }
    presence("lse", lse.cast_const().cast(), planned.lse.cast_const().cast())?;
    strides("o", &o, &planned.o, "the plan's")?;
    strides("parts[0].o", &first.o, &planned_part.o, "the plan's")
}

/// Refuses strides other than the planned ones.
pub(crate) fn strides(name: &str, given: &FmhaTensor, planned: &FmhaTensor, whose: &str) -> Result<()> {
    let FmhaTensor { data: _, batch_stride, seqlen_stride, head_stride, dim_stride } = *given;
    for (axis, field, given, planned) in [
        ("batch_stride", "batch_stride", batch_stride, planned.batch_stride),
        ("seqlen_stride", "seqlen_stride", seqlen_stride, planned.seqlen_stride),
        ("head_stride", "head_stride", head_stride, planned.head_stride),
        ("dim_stride", "dim_stride", dim_stride, planned.dim_stride),
    ] {
        if given != planned {
            let text = format!("{name}.{axis} {given} is not {whose} {planned}");
            return Err(ProblemError::new(field, text).into());
        }
    }
    Ok(())
}

fn number<T: Copy + PartialEq + fmt::Display>(field: &'static str, given: T, planned: T) -> Result<()> {
    if given == planned { Ok(()) } else { Err(differs(field, &given, &planned, "the plan's").into()) }
}

fn presence(field: &'static str, given: *const (), planned: *const ()) -> Result<()> {
    match (given.is_null(), planned.is_null()) {
        (true, false) => {
            Err(ProblemError::new(field, format!("{field} is null (0), but the plan has it")).into())
        }
        (false, true) => {
            Err(ProblemError::new(field, format!("{field} is given (1), but the plan is without it")).into())
        }
        _ => Ok(()),
    }
}

fn differs(
    field: &'static str,
    given: &dyn fmt::Display,
    planned: &dyn fmt::Display,
    whose: &str,
) -> ProblemError {
    ProblemError::new(field, format!("{field} {given} is not {whose} {planned}"))
}
