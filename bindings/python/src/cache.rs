//! Conversion of a call's KV cache and its update: appended rows, rotary embedding, quantised types.

use fmha_c::{FMHA_F32, FmhaArgs, FmhaCache, FmhaStrides};
use smallvec::SmallVec;

use crate::call::{Wrong, ensure};
use crate::request::{Request, Slot, name};
use crate::shapes::{
    NO_STRIDES, Sizes, cache_rows, expect, is_cache, longest_is_said, of_type, operand, plain, rows, shape,
};
use crate::tensor::{I32, Tensor, U32, dtype_name};

/// Whether V is a view of the first elements of K's rows, by its address and strides. False in a call with
/// gradients, with new values, or with a factor of V that is not K's.
fn is_front_of_k(v: &Tensor, k: &Tensor, request: &Request) -> bool {
    let data = |slot| request.get(slot).map(|tensor| tensor.data);
    let (Some((dim_v, axes_v)), Some((dim_k, axes_k))) = (v.shape().split_last(), k.shape().split_last())
    else {
        return false;
    };
    !v.data.is_null()
        && v.data == k.data
        && v.dtype == k.dtype
        && dim_v <= dim_k
        && axes_v == axes_k
        && v.steps() == k.steps()
        && v.steps().last() == Some(&1)
        && data(Slot::DescaleV) == data(Slot::DescaleK)
        && request.get(Slot::VNew).is_none()
        && !request.is_backward()
}

/// Scales of K and V by rows: their strides, and the number of rows that share one. `None` where there are none.
fn scales(
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<Option<([FmhaStrides; 2], i64)>, Wrong> {
    let block = request.numbers.scale_block;
    let given = [Slot::KScale, Slot::VScale].map(|slot| request.get(slot));
    let (q, k) = (request.required(Slot::Q)?, request.required(Slot::K)?);
    let (of_k, of_v) = match given {
        [Some(of_k), Some(of_v)] => (of_k, of_v),
        [None, None] => {
            ensure!(block == 0, "scale_block {block} is given, but k_scale and v_scale are missing");
            return Ok(None);
        }
        [Some(_), None] => return Err("k_scale is given, but v_scale is missing".to_owned()),
        [None, Some(_)] => return Err("v_scale is given, but k_scale is missing".to_owned()),
    };
    ensure!(block >= 1, "scale_block {block} is not 1 or more");
    ensure!(
        is_cache(q, k),
        "k_scale is given, but k is of {} beside q of {}: scales by rows are those of FP8 beside 16 bits",
        dtype_name(k.dtype),
        dtype_name(q.dtype)
    );
    // Scales have K's axes without the axis of elements. Packed rows must have blocks of 1, which the library checks.
    let mut wanted = sizes.k(1);
    wanted.pop();
    if wanted.len() == 3 {
        wanted[1] = wanted[1].saturating_add(block - 1) / block;
    }
    let strides = |name: &str, tensor: &Tensor| {
        expect(name, tensor, &wanted)?;
        of_type(name, tensor, &[FMHA_F32])?;
        let steps = tensor.steps();
        for (axis, (&step, &size)) in steps.iter().zip(&wanted).enumerate() {
            ensure!(step >= 0 || size <= 1, "{name} has stride {step} on axis {axis}, below 0");
        }
        let step = |from_last: usize| steps.len().checked_sub(from_last).map_or(0, |at| steps[at].max(0));
        let (batch_stride, seqlen_stride) = (step(3), step(2));
        Ok::<_, Wrong>(FmhaStrides { batch_stride, seqlen_stride, head_stride: step(1), dim_stride: 1 })
    };
    let found = [strides("k_scale", of_k)?, strides("v_scale", of_v)?];
    (args.k_scale, args.v_scale) = (of_k.address().cast(), of_v.address().cast());
    Ok(Some((found, block)))
}

/// Update of the cache that the call makes; `None` if the call only reads the cache.
pub(crate) fn cache(
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<Option<FmhaCache>, Wrong> {
    let (q, k) = (request.required(Slot::Q)?, request.required(Slot::K)?);
    for (slot, beside) in
        [(Slot::VNew, Slot::KNew), (Slot::CuSeqlensNew, Slot::KNew), (Slot::RotarySin, Slot::RotaryCos)]
    {
        ensure!(
            request.get(slot).is_none() || request.get(beside).is_some(),
            "{} is given, but {} is missing",
            name(slot),
            name(beside)
        );
    }
    let is_cache = is_cache(q, k);
    // If V is the front of K's rows, K is loaded once for both, whether V is absent or given as a view of K.
    let v_in_k = request.get(Slot::V).is_none_or(|v| is_front_of_k(v, k, request));
    let touched = [Slot::KNew, Slot::RotaryCos, Slot::TreeMask];
    let by_rows = scales(args, sizes, request)?;
    if !is_cache && !v_in_k && touched.iter().all(|&slot| request.get(slot).is_none()) {
        return Ok(None);
    }
    if v_in_k {
        args.v = std::ptr::null_mut();
    }
    let has = |slot| i32::from(request.get(slot).is_some());
    let mut cache = FmhaCache {
        struct_bytes: size_of::<FmhaCache>() as u64,
        seqlen_new: 0,
        max_pos: 0,
        k_new: NO_STRIDES,
        v_new: NO_STRIDES,
        k_scale: by_rows.map_or(NO_STRIDES, |([of_k, _], _)| of_k),
        v_scale: by_rows.map_or(NO_STRIDES, |([_, of_v], _)| of_v),
        scale_block: by_rows.map_or(0, |(_, block)| block),
        packed_new: has(Slot::CuSeqlensNew),
        tree_mask: has(Slot::TreeMask),
        rotary_dim: 0,
        rotary_interleaved: i32::try_from(request.numbers.rotary_interleaved).unwrap_or(-1),
        dtype_rotary: 0,
        dtype_cache: if is_cache { k.dtype } else { 0 },
        v_in_k: i32::from(v_in_k),
        cache_rows: cache_rows(k),
    };
    if let Some(k_new) = request.get(Slot::KNew) {
        let (wanted, total) = match request.get(Slot::CuSeqlensNew) {
            Some(_) => {
                let [total, ..] = shape::<3>("k_new", k_new, "total_new, num_heads_kv, head_dim_qk")?;
                (rows(0, 0, Some(total), sizes.heads_kv, sizes.dim_qk), total)
            }
            None => {
                let [_, seqlen, ..] =
                    shape::<4>("k_new", k_new, "batch, seqlen_new, num_heads_kv, head_dim_qk")?;
                cache.seqlen_new = seqlen;
                (rows(sizes.batch, seqlen, None, sizes.heads_kv, sizes.dim_qk), 0)
            }
        };
        let placed = operand("k_new", k_new, &wanted)?;
        (cache.k_new, args.k_new) = (placed.strides, placed.data);
        of_type("k_new", k_new, &[q.dtype])?;
        if let Some(v_new) = request.get(Slot::VNew) {
            let mut wanted = wanted;
            if let Some(dim) = wanted.last_mut() {
                *dim = sizes.dim_v;
            }
            let placed = operand("v_new", v_new, &wanted)?;
            (cache.v_new, args.v_new) = (placed.strides, placed.data);
        } else {
            ensure!(v_in_k, "v_new is missing beside k_new");
        }
        if request.get(Slot::CuSeqlensNew).is_some() {
            args.total_new = total;
            cache.seqlen_new = request.numbers.max_seqlen_new;
            longest_is_said("max_seqlen_new", cache.seqlen_new, "k_new", Some(total))?;
            args.cu_seqlens_new = plain(request, Slot::CuSeqlensNew, &[sizes.batch + 1], &[I32])?.cast();
        }
    }
    if let Some(cos) = request.get(Slot::RotaryCos) {
        let [max_pos, half] = shape("rotary_cos", cos, "max_pos, rotary_dim / 2")?;
        let types = if q.dtype == FMHA_F32 { &[FMHA_F32][..] } else { &[FMHA_F32, q.dtype] };
        args.rotary_cos = plain(request, Slot::RotaryCos, &[max_pos, half], types)?;
        request.required(Slot::RotarySin)?;
        args.rotary_sin = plain(request, Slot::RotarySin, &[max_pos, half], &[cos.dtype])?;
        cache.max_pos = max_pos;
        cache.rotary_dim =
            i32::try_from(half.saturating_mul(2)).map_err(|error| format!("rotary_cos: {half}: {error}"))?;
        cache.dtype_rotary = cos.dtype;
    } else {
        cache.rotary_interleaved = 0;
    }
    if request.get(Slot::TreeMask).is_some() {
        let words = (sizes.seqlen_q + 31) / 32;
        let wanted: SmallVec<[i64; 4]> = match sizes.total_q {
            Some(total) => SmallVec::from_slice(&[total, words]),
            None => SmallVec::from_slice(&[sizes.batch, sizes.seqlen_q, words]),
        };
        args.tree_mask = plain(request, Slot::TreeMask, &wanted, &[I32, U32])?.cast();
    }
    Ok(Some(cache))
}
