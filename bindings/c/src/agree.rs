//! A run's struct against its plan's: all that was planned must be what it was. Addresses, the stream,
//! the dropout generator and the totals of packed and paged tensors may change from run to run; nothing
//! else may.

use std::fmt;

use fmha::ProblemError;

use crate::Result;
use crate::host::{self, Pointed};
use crate::structs::{
    FmhaBlockScales, FmhaCache, FmhaCall, FmhaCombine, FmhaGradients, FmhaLists, FmhaMasks, FmhaPart,
    FmhaPartial, FmhaTensor,
};

// Macros that compare a run's struct with the plan's. `$field` is a variable that holds the run's field of
// the same name. Every run calls them, so a field costs one comparison and no more.

/// Numbers that must be the planned ones.
macro_rules! number {
    ($planned:expr, $($field:ident),+) => {
        $(if *$field != $planned.$field {
            return Err(differs(stringify!($field), $field, &$planned.$field).into());
        })+
    };
}

/// Pointers that must be null or not as planned.
macro_rules! presence {
    ($planned:expr, $($field:ident),+) => {
        $(presence(stringify!($field), *$field, $planned.$field)?;)+
    };
}

/// Tensors whose strides must be the planned ones.
macro_rules! lattice {
    ($planned:expr, $($field:ident),+) => {
        $(strides(stringify!($field), $field, &$planned.$field, "the plan's")?;)+
    };
}

/// Refuses a call that is not the planned one.
///
/// # Safety
/// As [`Pointed::read`].
pub(crate) unsafe fn call(planned: &FmhaCall, pointed: &Pointed, given: &FmhaCall) -> Result<()> {
    // SAFETY: the caller keeps the contract of `call`.
    unsafe { call_of_rows(planned, pointed, given, true) }
}

/// Does what [`call`] does for a rank that may have no queries of a whole that has some.
///
/// # Safety
/// As [`call`].
pub(crate) unsafe fn call_of_rows(
    planned: &FmhaCall,
    pointed: &Pointed,
    given: &FmhaCall,
    has_own: bool,
) -> Result<()> {
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
        row_max,
        head_max,
        key_sum,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        block_table,
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
        part: _,
        code: _,
        lists: _,
        masks,
        block_scales,
        workspace: _,
        workspace_bytes: _,
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
        dropout_seeded: _,
        reserved,
    } = given;
    // First: of another version's struct nothing else can be read.
    number!(planned, struct_bytes);
    number!(
        planned,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads_q,
        num_heads_kv,
        head_dim_qk,
        head_dim_v,
        page_size
    );
    number!(planned, dtype_qk, dtype_v, dtype_o, dtype_bias);
    number!(planned, v_layout, alibi_per_batch, descale_per_tensor, reserved);
    // Comparison by value: -0 drops as little as 0.
    if *p_drop != planned.p_drop {
        return Err(differs("p_drop", p_drop, &planned.p_drop).into());
    }
    presence!(planned, cu_seqlens_q, cu_seqlens_k, sink, scale_o);
    // A tensor without elements may be null in one run and not null in another.
    let no_sequences = *batch == 0;
    if !no_sequences {
        presence!(planned, seqused_q, seqused_k);
    }
    if !no_sequences || *alibi_per_batch == 0 {
        presence!(planned, alibi_slopes);
    }
    if !no_sequences || *descale_per_tensor != 0 {
        presence!(planned, descale_q, descale_k, descale_v);
    }
    let no_rows = !has_own || host::has_no_rows(given);
    let no_scores = !has_own || host::has_no_scores(given);
    // Gradients always take LSE, whatever a plan of no rows had.
    if !no_rows && given.gradients.is_null() {
        presence!(planned, lse);
    }
    if !no_rows {
        presence!(planned, row_max);
    }
    if !no_scores {
        presence!(planned, keep_mask);
        presence("bias.data", bias.data, planned.bias.data)?;
    }
    presence!(planned, head_max);
    if *batch != 0 && *seqlen_k != 0 {
        presence!(planned, key_sum);
    }
    // A plan with pages needs the table, unless the table has no entries.
    if *page_size == 0 {
        presence!(planned, block_table);
    }
    lattice!(planned, q, k, v, o, bias);
    // SAFETY: the caller keeps the contract of `call_of_rows`.
    let (softmax_scale, softcap, gradients, cache, part) = unsafe {
        let (scale, cap) = (given.softmax_scale.as_ref(), given.softcap.as_ref());
        (scale, cap, given.gradients.as_ref(), given.cache.as_ref(), given.part.as_ref())
    };
    // SAFETY: the caller keeps the contract of `call_of_rows`.
    if unsafe { !pointed.spells_mask_of(given) } {
        // SAFETY: the caller keeps the contract of `call_of_rows`. Another spelling of the same mask is the
        // same.
        let mask = unsafe { host::mask(given)? };
        if mask != pointed.mask {
            return Err(differs("mask", &mask, &pointed.mask).into());
        }
    }
    optional("softmax_scale", softmax_scale.copied(), pointed.softmax_scale)?;
    optional("softcap", softcap.copied(), pointed.softcap)?;
    both("gradients", gradients, pointed.gradients.as_ref(), |planned, given| {
        self::gradients(planned, given, no_rows, no_scores)
    })?;
    both("part", part, pointed.part.as_ref(), self::part)?;
    // SAFETY: the caller keeps the contract of `call_of_rows`.
    unsafe { crate::code::agree(given.code.as_ref(), pointed.code.as_ref())? };
    // SAFETY: the caller keeps the contract of this function.
    let lists = unsafe { given.lists.as_ref() };
    both("lists", lists, pointed.lists.as_ref(), |planned, given| self::lists(planned, given, no_rows))?;
    let no_blocks = host::has_no_blocks(given);
    // SAFETY: the caller keeps the contract of this function.
    both("masks", unsafe { masks.as_ref() }, pointed.masks.as_ref(), |planned, given| {
        self::masks(planned, given, no_blocks)
    })?;
    // SAFETY: the caller keeps the contract of this function.
    let block_scales = unsafe { block_scales.as_ref() };
    both("block_scales", block_scales, pointed.block_scales.as_ref(), self::block_scales)?;
    both("cache", cache, pointed.cache.as_ref(), |planned, given| {
        self::cache(planned, given, no_rows, no_sequences)
    })
}

/// Two numbers of host memory, which are there or not alike.
#[inline]
fn optional(field: &'static str, given: Option<f32>, planned: Option<f32>) -> Result<()> {
    // Comparison by value: -0 equals 0. NaN was refused with the plan.
    if given == planned {
        return Ok(());
    }
    let word = |value: Option<f32>| value.map_or("null".to_owned(), |value| value.to_string());
    Err(differs(field, &word(given), &word(planned)).into())
}

/// Two structs of host memory, which are there or not alike.
#[inline]
fn both<T>(
    field: &'static str,
    given: Option<&T>,
    planned: Option<&T>,
    agree: impl FnOnce(&T, &T) -> Result<()>,
) -> Result<()> {
    match (given, planned) {
        (None, None) => Ok(()),
        (Some(given), Some(planned)) => agree(planned, given),
        (given, _) => {
            let (given, planned) = if given.is_some() { ("given", "null") } else { ("null", "given") };
            Err(differs(field, &given, &planned).into())
        }
    }
}

fn part(planned: &FmhaPart, given: &FmhaPart) -> Result<()> {
    let FmhaPart { struct_bytes, position_q, position_k, seqlen_q, seqlen_k, batch, head, num_heads_q } =
        given;
    number!(planned, struct_bytes, position_q, position_k, seqlen_q, seqlen_k, batch, head, num_heads_q);
    Ok(())
}

fn block_scales(planned: &FmhaBlockScales, given: &FmhaBlockScales) -> Result<()> {
    let FmhaBlockScales { struct_bytes, q, k, v, format, reserved } = given;
    number!(planned, struct_bytes, format, reserved);
    lattice!(planned, q, k, v);
    Ok(())
}

fn lists(planned: &FmhaLists, given: &FmhaLists, no_rows: bool) -> Result<()> {
    let FmhaLists {
        struct_bytes,
        topk,
        indices: _,
        batch_stride,
        seqlen_stride,
        head_stride,
        topk_length,
        length_per_token,
        addresses,
        block,
        lse_without_sink,
    } = given;
    number!(planned, struct_bytes, topk, batch_stride, seqlen_stride, head_stride);
    number!(planned, length_per_token, addresses, block, lse_without_sink);
    if !no_rows {
        presence!(planned, topk_length);
    }
    Ok(())
}

fn cache(planned: &FmhaCache, given: &FmhaCache, no_rows: bool, no_sequences: bool) -> Result<()> {
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
    } = given;
    number!(planned, struct_bytes, seqlen_new, max_pos);
    number!(planned, rotary_dim, rotary_interleaved, dtype_rotary, dtype_cache, v_in_k, reserved);
    presence!(planned, cu_seqlens_new);
    // Packed, there may be no new rows in one run and some in another: whoever makes the slices asks for them.
    let has_new = cu_seqlens_new.is_null() && !no_sequences;
    if has_new {
        presence("k_new.data", k_new.data, planned.k_new.data)?;
    }
    if has_new || *v_in_k != 0 {
        presence("v_new.data", v_new.data, planned.v_new.data)?;
    }
    if *max_pos != 0 {
        presence!(planned, rotary_cos, rotary_sin);
    }
    if !no_rows {
        presence!(planned, tree_mask);
    }
    lattice!(planned, k_new, v_new);
    Ok(())
}

fn masks(planned: &FmhaMasks, given: &FmhaMasks, no_blocks: bool) -> Result<()> {
    let FmhaMasks {
        struct_bytes,
        intervals,
        mask_bits,
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        endpoints,
        intervals_heads,
        mask_bits_heads,
        lists_heads,
        block_q,
        block_k,
        max_blocks,
        full_max_blocks,
    } = given;
    number!(planned, struct_bytes, endpoints, intervals_heads, mask_bits_heads, lists_heads);
    number!(planned, block_q, block_k, max_blocks, full_max_blocks);
    if !no_blocks {
        presence("kv_num_blocks.data", kv_num_blocks.data, planned.kv_num_blocks.data)?;
        presence("full_kv_num_blocks.data", full_kv_num_blocks.data, planned.full_kv_num_blocks.data)?;
    }
    lattice!(planned, intervals, mask_bits, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices);
    Ok(())
}

fn gradients(planned: &FmhaGradients, given: &FmhaGradients, no_rows: bool, no_scores: bool) -> Result<()> {
    let FmhaGradients { struct_bytes, dout, dq, dk, dv, dbias, dlse, dsink, dtype_grad, dtype_dbias } = given;
    number!(planned, struct_bytes, dtype_grad, dtype_dbias);
    presence!(planned, dsink);
    if !no_rows {
        presence!(planned, dlse);
    }
    if !no_scores {
        presence("dbias.data", dbias.data, planned.dbias.data)?;
    }
    lattice!(planned, dout, dq, dk, dv, dbias);
    Ok(())
}

/// Checks a combine call against its plan, as [`call`] does for attention.
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
        merge,
        reserved,
    } = given;
    number!(planned, struct_bytes, num_parts, batch, seqlen_q, num_heads_q, head_dim_v);
    number!(planned, dtype_part, dtype_o, merge, reserved);
    if !host::combines_no_rows(given) {
        presence!(planned, lse);
    }
    lattice!(planned, o);
    strides("parts[0].o", &first.o, &planned_part.o, "the plan's")
}

/// Refuses strides other than the planned ones.
#[inline(always)]
pub(crate) fn strides(
    name: impl fmt::Display,
    given: &FmhaTensor,
    planned: &FmhaTensor,
    whose: &str,
) -> Result<()> {
    if host::strides(given) == host::strides(planned) {
        Ok(())
    } else {
        differing(&name, given, planned, whose)
    }
}

/// The first of the strides that differs.
#[cold]
fn differing(name: &dyn fmt::Display, given: &FmhaTensor, planned: &FmhaTensor, whose: &str) -> Result<()> {
    for (axis, given, planned) in [
        ("batch_stride", given.batch_stride, planned.batch_stride),
        ("seqlen_stride", given.seqlen_stride, planned.seqlen_stride),
        ("head_stride", given.head_stride, planned.head_stride),
        ("dim_stride", given.dim_stride, planned.dim_stride),
    ] {
        if given != planned {
            let text = format!("{name}.{axis} {given} is not {whose} {planned}");
            return Err(ProblemError::new(axis, text).into());
        }
    }
    Ok(())
}

#[inline(always)]
fn presence<T>(field: &'static str, given: *const T, planned: *const T) -> Result<()> {
    if given.is_null() == planned.is_null() { Ok(()) } else { Err(present(field, planned.is_null()).into()) }
}

#[cold]
fn present(field: &'static str, given: bool) -> ProblemError {
    let text = if given { "given, but the plan is without it" } else { "null, but the plan has it" };
    ProblemError::new(field, format!("{field} is {text}"))
}

#[cold]
pub(crate) fn differs(
    field: &'static str,
    given: &dyn fmt::Display,
    planned: &dyn fmt::Display,
) -> ProblemError {
    ProblemError::new(field, format!("{field} {given} is not the plan's {planned}"))
}
