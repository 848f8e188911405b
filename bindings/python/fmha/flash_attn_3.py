"""FlashAttention 3's functions (module ``flash_attn_interface``), by name, argument order, defaults and return values.

Speed hints (``pack_gqa``, ``sm_margin``, ``scheduler_metadata``) are taken and have no effect: kernels choose.
``attention_chunk`` cuts sequences into packed ones, a chunk each. ``qv`` is part of longer rows: K and V are joined,
by a copy where they do not lie side by side.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, Optional, Tuple, Union

import torch

from . import _layouts, combine
from ._mask import from_window_size
from ._numbers import flag, integer as whole
from ._theirs import attention
from .flash_attn import integer, num_sequences, over_cache, refuse_outputs


def refuse(**given: Any) -> None:
    """What the contract does not have, by its name; ``None`` and 0 are not given."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise NotImplementedError(
                f"{name} is given ({value if isinstance(value, int) else 1}): not in the contract"
            )


def _descales(of: Tuple[Optional[torch.Tensor], ...], *given: Optional[torch.Tensor]) -> Dict[str, Any]:
    """Scales of Q, K and V, which are FP8 then. Expanded ones (stride 0) are common; a few numbers are copied."""
    scales = {}
    for letter, x, scale in zip("qkv", of, given):
        if scale is not None and x is not None and x.element_size() != 1:
            raise ValueError(f"{letter}_descale is given, but {letter} is of {x.dtype}, not FP8")
        scales[f"descale_{letter}"] = None if scale is None else scale.contiguous()
    return scales


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: Optional[torch.Tensor],
    attention_chunk: int,
    softmax_scale: Optional[float],
    **call: Any,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """O and LSE with what FlashAttention 3 has besides."""
    call["softmax_scale"] = _layouts.scale_of(q, qv, softmax_scale)
    if qv is not None:
        q, k, v = _layouts.with_qv(q, qv, k, v)
    attend = functools.partial(attention, return_lse=True)
    chunk = whole_chunk(attention_chunk)
    return _layouts.in_chunks(chunk, q, k, v, attend, **call) if chunk else attend(q, k, v, **call)


def whole_chunk(attention_chunk: int) -> int:
    """The chunk's length; 0 is none."""
    chunk = whole("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk {chunk} is below 0")
    return chunk


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """As :func:`fmha.flash_attn.flash_attn_func`, without dropout. With ``return_attn_probs``: ``(out, lse)``."""
    o, lse = _attend(
        q,
        k,
        v,
        qv,
        attention_chunk,
        mask=from_window_size(window_size, causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        **_descales((q, k, v), q_descale, k_descale, v_descale),
    )
    return (o, lse) if flag("return_attn_probs", return_attn_probs) else o


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """QKV ``(batch, seqlen, 3, nheads, headdim)``, or with ``num_heads_q`` ``(batch, seqlen, nheads_q + 2 nheads_k,
    headdim)``."""
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv has {qkv.shape[2]} tensors on axis 2, not 3")
        if num_heads_q not in (None, qkv.shape[3]):
            raise ValueError(f"num_heads_q {num_heads_q} is not the {qkv.shape[3]} heads of qkv's axis 3")
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None:
            raise ValueError(f"num_heads_q is missing for qkv of {qkv.dim()} axes")
        heads_kv, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if rest or heads_kv < 1:
            raise ValueError(
                f"num_heads_q {num_heads_q} of {qkv.shape[2]} heads leaves {qkv.shape[2] - num_heads_q} for K and V"
            )
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    rest = (q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, 1, None, deterministic)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, *rest, sm_margin, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """Packed sequences; ``seqused_q`` and ``seqused_k`` are lengths inside the physical ones."""
    o, lse = _attend(
        q,
        k,
        v,
        qv,
        attention_chunk,
        mask=from_window_size(window_size, causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=integer("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=integer("max_seqlen_k", max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        deterministic=deterministic,
        **_descales((q, k, v), q_descale, k_descale, v_descale),
    )
    return (o, lse) if flag("return_attn_probs", return_attn_probs) else o


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    qv: Optional[torch.Tensor] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    cache_seqlens: Union[int, torch.Tensor, None] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    page_table: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[torch.Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
):
    """As :func:`fmha.flash_attn.flash_attn_with_kvcache`. With ``return_softmax_lse``: ``(out, lse, None, None)``, the
    last two being partial results that this library does not give out."""
    batch = num_sequences(q, cu_seqlens_q)
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise ValueError("max_seqlen_q is missing beside cu_seqlens_q")
    # New rows are packed, so their total bounds the longest sequence, which costs nothing to know.
    max_seqlen_new = 0 if cu_seqlens_k_new is None or k is None else k.shape[0]
    o, lse = over_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        batch=batch,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=page_table,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        num_splits=num_splits,
        rotary_seqlens=rotary_seqlens,
        qv=qv,
        attention_chunk=whole_chunk(attention_chunk),
        mask=from_window_size(window_size, causal),
        softmax_scale=_layouts.scale_of(q, qv, softmax_scale),
        softcap=softcap,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_new=cu_seqlens_k_new,
        max_seqlen_new=max_seqlen_new,
        max_seqlen_q=0 if max_seqlen_q is None else integer("max_seqlen_q", max_seqlen_q),
        rotary_interleaved=rotary_interleaved,
        **_descales((q, k_cache, v_cache), q_descale, k_descale, v_descale),
    )
    return (o, lse, None, None) if flag("return_softmax_lse", return_softmax_lse) else o


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
):
    """``out_partial`` ``(splits, batch, seqlen, nheads, headdim)`` or packed ``(splits, total, nheads, headdim)``,
    ``lse_partial`` ``(splits, batch, seqlen, nheads)`` or ``(splits, total, nheads)``: ``(out, lse)``."""
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"out_dtype {out_dtype} is not the {out.dtype} of out")
    refuse_outputs(out=(out, out_partial.shape[1:]))
    packed = out_partial.dim() == 4
    if packed:
        out_partial, lse_partial = out_partial.unsqueeze(1), lse_partial.unsqueeze(1)
    o, lse = combine(out_partial, lse_partial.transpose(-1, -2), dtype_o=out_dtype if out is None else out.dtype)
    lse = lse.transpose(-1, -2)
    if packed:
        o, lse = o.squeeze(0), lse.squeeze(0)
    return (o if out is None else out.copy_(o)), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """An i32 tensor without elements, which ``scheduler_metadata`` takes: work is dealt out on the device."""
    return cache_seqlens.new_empty(0, dtype=torch.int32)


def install(force: bool = False) -> None:
    """From now on ``import flash_attn_interface`` finds this module, and ``torch.ops.flash_attn_3`` its operators; as
    :func:`fmha.flash_attn.install`."""
    from . import _flash_attn_3_private, _install

    this = sys.modules[__name__]
    names = [name for name in vars(this) if name.startswith(("flash_attn_", "get_scheduler_metadata"))]
    _install.put("flash_attn_interface", this, names, force)
    _install.add("flash_attn_interface", _flash_attn_3_private, _flash_attn_3_private.__all__)
    _flash_attn_3_private.register()
