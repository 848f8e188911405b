//! Update of a KV cache by a call: appended rows, rotary embedding and quantised types.

use fmha_c::{FMHA_F32, FmhaArgs, FmhaCache};
use smallvec::SmallVec;

use crate::call::{Wrong, ensure};
use crate::request::{Request, Slot, name};
use crate::shapes::{
    NO_STRIDES, Sizes, cache_rows, is_cache, longest_is_said, of_type, operand, plain, rows, shape,
};
use crate::tensor::{I32, Tensor, U32};

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

/// The update of the cache that the call makes; `None` if it only reads the cache.
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
