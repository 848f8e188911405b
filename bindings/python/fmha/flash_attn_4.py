"""FlashAttention 4's functions (module ``flash_attn.cute.interface``), by name, argument order, defaults and return
values.

Always ``(out, lse)``, lse ``None`` unless ``return_lse``. ``score_mod`` and ``mask_mod`` that are plain functions of
Python are called once with traced values and have gradients, to floating ``aux_tensors`` too; beside a ``mask_mod``
``causal`` and ``window_size`` say nothing, as there. ``block_sparse_tensors`` are lists of blocks, of which
``mask_mod`` is asked in those of ``mask_block_*`` alone; gradients follow them, so that ``block_sparse_tensors_bwd``, the
same blocks by key, is not read. ``qv`` is part of longer rows, as of FlashAttention 3. CuTe's programs,
``score_mod_bwd`` and gathered keys are refused by name.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

import torch

from . import _code, _layouts, _torch
from ._mask import NONE, Mask, band, pair
from ._mask_data import BlockLists
from ._numbers import flag, integer as whole
from ._serving import bound
from ._theirs import attention
from .flash_attn import check_cache_lengths, integer, refuse_outputs, rows
from ._trace import Code, Traced, is_plain
from .flash_attn_3 import flash_attn_combine as _combine, refuse


class _Lengths:
    """Lengths of a pair's sequence, as a function of FlashAttention's finds them."""

    def __init__(self, beside: Traced) -> None:
        self.seqlen_q, self.seqlen_k = beside.like("seqlen_q"), beside.like("seqlen_k")


def _functions(score_mod: Any, mask_mod: Any, aux_tensors: Any, softcap: float, q: torch.Tensor) -> Optional[Code]:
    """The code of a call: functions get the lengths and the auxiliary tensors behind the places."""
    if score_mod is None and mask_mod is None:
        refuse(aux_tensors=aux_tensors)
        return None
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None and not is_plain(function):
            kind = type(function).__name__
            raise NotImplementedError(
                f"{name}: {kind} is no plain function of Python, which is called with traced values"
            )
    if score_mod is not None and softcap:
        raise ValueError(f"softcap {softcap} is given beside score_mod, of which one is taken")

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score_mod(s, b, h, q_idx, kv_idx, _Lengths(s), aux_tensors)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx, kv_idx, _Lengths(b), aux_tensors)

    given = (None if score_mod is None else score, None if mask_mod is None else mask)
    return _code.bind(_torch, *given, None, ("score_mod", "mask_mod"), getattr(q, "device", None))


#: Fields of packed sequences' lists. FlashAttention's other fields only order the work of its kernels.
_PACKED = ("cu_total_m_blocks", "cu_block_idx_offsets")


def _lists(tensors: Any, backward: Any) -> Optional[BlockLists]:
    """Their block sparsity: a tuple with named fields, whose tensors broadcast over batch and heads."""
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    for name, given in (("block_sparse_tensors", tensors), ("block_sparse_tensors_bwd", backward)):
        if given is None:
            continue
        if not all(hasattr(given, field) for field in names[:2]):
            raise TypeError(f"{name}: {type(given).__name__} has no mask_block_cnt and mask_block_idx")
        if tensors is None:
            raise ValueError("block_sparse_tensors_bwd is given without block_sparse_tensors")
        for field in _PACKED:
            if getattr(given, field, None) is not None:
                raise NotImplementedError(f"{name}: {field} is given, of which attention takes no lists")
    if tensors is None:
        return None
    if getattr(tensors, "block_size", None) is None:
        raise NotImplementedError("block_sparse_tensors: block_size is None, which is their kernel's tile: give numbers")
    given = [getattr(tensors, name, None) for name in names]
    batch, heads = (max((x.shape[axis] for x in given if x is not None), default=1) for axis in (0, 1))
    spread = (None if x is None else x.expand(batch, heads, *x.shape[2:]) for x in given)
    return BlockLists(*spread, block_size=tuple(tensors.block_size))


def _window(window_size: Tuple[Optional[int], Optional[int]], causal: bool) -> Tuple[Optional[int], Optional[int]]:
    """Bounds of what a query sees, counted from the bottom-right diagonal, ``None`` unbounded. As there: causal closes
    the right side first, and bounds whose sum is below 0 are no window."""
    left, right = (None if bound is None else whole("window_size", bound) for bound in pair(window_size))
    if flag("causal", causal):
        right = 0
    if left is not None and right is not None and left + right < 0:
        return None, 0 if causal else None
    return left, right


def _bottom_right(left: Optional[int], right: Optional[int]) -> Mask:
    if left is None and right is None:
        return NONE
    return Mask(2, -1 if left is None else left, -1 if right is None else right)


def _below_zero(*bounds: Optional[int]) -> bool:
    return any(bound is not None and bound < 0 for bound in bounds)


def _sink(learnable_sink: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if learnable_sink is None else learnable_sink.float()


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: Optional[torch.Tensor] = None,
    gather_kv_indices: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[Optional[int], Optional[int]] = (None, None),
    learnable_sink: Optional[torch.Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
):
    """Q ``(batch, seqlen_q, nheads, headdim)``, K and V ``(batch, seqlen_k, nheads_k, headdim)``.

    A bound of ``window_size`` that is ``None`` is open. Every number is a bound, -1 and less too: with ``(None, -1)``
    a query sees the keys before its own. Bounds whose sum is below 0 are no window, as there.
    """
    refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod_bwd=score_mod_bwd,
        aux_scalars=aux_scalars,
    )
    lists = _lists(block_sparse_tensors, block_sparse_tensors_bwd)
    if qv is not None:
        if q is None:
            raise NotImplementedError("q is None beside qv: scores of qv alone are those of a call with q=qv and k=v")
        softmax_scale = _layouts.scale_of(q, qv, softmax_scale)
        q, k, v = _layouts.with_qv(q, qv, k, v)
    code = _functions(score_mod, mask_mod, aux_tensors, softcap, q)
    if mask_mod is not None:
        causal, window_size = False, (None, None)
    left, right = _window(window_size, causal)
    mask = _bottom_right(left, right)
    if _below_zero(left, right):
        mask = band(left, right, rows(k, 1, "k") - rows(q, 1, "q"))
    o, lse = attention(
        q,
        k,
        v,
        mask=mask if lists is None else [mask, lists],
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=_sink(learnable_sink),
        deterministic=deterministic,
        return_lse=True,
        score_code=code,
    )
    return o, (lse if flag("return_lse", return_lse) else None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    gather_kv_indices: Optional[torch.Tensor] = None,
    page_table: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[Optional[int], Optional[int]] = (None, None),
    learnable_sink: Optional[torch.Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Any = None,
    disable_scheduler_metadata: bool = False,
):
    """Packed where ``cu_seqlens_*`` are given, else with a batch axis; paged K and V with ``page_table``. A
    ``max_seqlen_*`` that is not given is bounded by the call's rows."""
    refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod_bwd=score_mod_bwd,
        aux_scalars=aux_scalars,
    )
    if qv is not None:
        if q is None:
            raise NotImplementedError("q is None beside qv: scores of qv alone are those of a call with q=qv and k=v")
        softmax_scale = _layouts.scale_of(q, qv, softmax_scale)
        q, k, v = _layouts.with_qv(q, qv, k, v)
    code = _functions(score_mod, mask_mod, aux_tensors, softcap, q)
    if mask_mod is not None:
        causal, window_size = False, (None, None)
    o, lse = _varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale,
        window=_window(window_size, causal),
        learnable_sink=learnable_sink,
        softcap=softcap,
        deterministic=deterministic,
        score_code=code,
    )
    return o, (lse if flag("return_lse", return_lse) else None)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: Optional[torch.Tensor],
    cu_seqlens_k: Optional[torch.Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    seqused_q: Optional[torch.Tensor],
    seqused_k: Optional[torch.Tensor],
    page_table: Optional[torch.Tensor],
    softmax_scale: Optional[float],
    window: Tuple[Optional[int], Optional[int]],
    learnable_sink: Optional[torch.Tensor],
    softcap: float,
    deterministic: bool,
    **scales: Any,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of sequences, each with the window that its own lengths give."""
    # The number of rows bounds the longest sequence, so that the host need not wait for the device.
    if cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = rows_bound(rows(q, 0, "q"))
    if cu_seqlens_k is not None and max_seqlen_k is None:
        max_seqlen_k = rows_bound(rows(k, 0, "k"))
    if page_table is not None:
        check_cache_lengths("seqused_k", seqused_k, k, page_table)
    left, right = window
    if scales.get("score_code") and min(left or 0, right or 0) < 0:
        raise NotImplementedError(
            f"window_size {window} is given beside score_mod: a bound below 0 is said by lengths, which a function reads"
        )
    sink, hidden = _sink(learnable_sink), None
    if right is not None and right < 0:
        # A window that ends n keys before the diagonal ends on it where a sequence has n keys less.
        used = _lengths(seqused_k, cu_seqlens_k, k, page_table)
        seqused_k = (used + right).clamp(min=0).to(torch.int32)
        left, right = None if left is None else left + right, 0
    elif left is not None and left < 0:
        # A window that begins n keys behind the diagonal begins on it where a sequence has n queries less, and the last
        # n queries see nothing.
        used = _lengths(seqused_q, cu_seqlens_q, q, None)
        seqused_q = (used + left).clamp(min=0).to(torch.int32)
        left, right = 0, None if right is None else right + left
        hidden = _between(seqused_q, used, cu_seqlens_q, q)
    o, lse = attention(
        q,
        k,
        v,
        mask=_bottom_right(left, right),
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=page_table,
        max_seqlen_q=0 if max_seqlen_q is None else integer("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=0 if max_seqlen_k is None else integer("max_seqlen_k", max_seqlen_k),
        deterministic=deterministic,
        return_lse=True,
        **scales,
    )
    if hidden is not None:
        empty = lse.new_full((lse.shape[-2],), -torch.inf) if sink is None else sink
        lse = torch.where(hidden, empty[:, None], lse)
    return o, lse


def rows_bound(total: int) -> int:
    """An upper bound of sequences' lengths in ``total`` packed rows, which does not change with every step: plans are
    kept by it. A compiler's symbolic size is the bound itself."""
    return bound(total, (1 << 31) - 1) if isinstance(total, int) else total


def _lengths(
    used: Optional[torch.Tensor],
    offsets: Optional[torch.Tensor],
    x: torch.Tensor,
    page_table: Optional[torch.Tensor],
) -> torch.Tensor:
    """Rows in use of each sequence."""
    if used is not None:
        return used
    if offsets is not None:
        return offsets.diff()
    batch, longest = x.shape[0], rows(x, 1, "q or k")
    if page_table is not None:
        batch, longest = page_table.shape[0], page_table.shape[1] * longest
    return torch.full((batch,), longest, dtype=torch.int32, device=x.device)


def _between(first: torch.Tensor, end: torch.Tensor, offsets: Optional[torch.Tensor], q: torch.Tensor) -> torch.Tensor:
    """Whether a row's place in its sequence is ``first`` or more, and below ``end``: as LSE lies, of one head."""
    if offsets is None:
        place = torch.arange(q.shape[1], device=q.device)
        return ((place >= first[:, None]) & (place < end[:, None]))[:, None]
    row = torch.arange(q.shape[0], device=q.device)
    sequence = (torch.bucketize(row, offsets, right=True) - 1).clamp(max=offsets.shape[0] - 2)
    place = row - offsets[sequence]
    return (place >= first[sequence]) & (place < end[sequence])


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    seqused: Optional[torch.Tensor] = None,
    virtual_batch_idx: Optional[torch.Tensor] = None,
    return_lse: bool = True,
):
    """As FlashAttention 3's; ``(out, lse)``, lse ``None`` without ``return_lse``. Rows are merged each on its own: with
    ``seqused`` ``(batch)`` those behind a sequence's rows in use are left out (0 in what is made here, and as they were
    in ``out``); ``cu_seqlens`` says where packed sequences begin. ``virtual_batch_idx`` is the order in which sequences
    are merged, and changes no result."""
    refuse_outputs(out=(out, out_partial.shape[1:]))
    packed = out_partial.dim() == 4
    if cu_seqlens is not None and not packed:
        raise ValueError(f"cu_seqlens is given, but out_partial has {out_partial.dim()} axes, not the 4 of packed rows")
    batch = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else 1 if packed else out_partial.shape[1]
    for name, x in (("seqused", seqused), ("virtual_batch_idx", virtual_batch_idx)):
        if x is not None and tuple(x.shape) != (batch,):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, not ({batch},)")
    if seqused is None:
        o, lse = _combine(out_partial, lse_partial, out, out_dtype)
        return o, (lse if flag("return_lse", return_lse) else None)
    dtype = out.dtype if out is not None else out_dtype
    o, lse = _combine(out_partial, lse_partial, None, dtype)
    # FlashAttention 4 lays LSE out like O, with the heads last.
    offsets = cu_seqlens
    if packed and offsets is None:
        offsets = torch.arange(2, device=o.device) * o.shape[0]
    inside = _between(torch.zeros_like(seqused), seqused, offsets, o)
    inside = inside[:, None] if packed else inside[:, 0, :, None]
    kept = torch.zeros_like(o) if out is None else out
    o, lse = torch.where(inside[..., None], o, kept), torch.where(inside, lse, 0)
    return (o if out is None else out.copy_(o)), (lse if flag("return_lse", return_lse) else None)


def install(force: bool = False) -> None:
    """From now on ``import flash_attn.cute`` and ``flash_attn.cute.interface`` find this module; as
    :func:`fmha.flash_attn.install`, which this calls: ``flash_attn.cute`` lies in it."""
    from . import _flash_attn_4_private, _install, flash_attn

    flash_attn.install(force)
    this = sys.modules[__name__]
    names = [name for name in vars(this) if name.startswith("flash_attn_")]
    _install.put("flash_attn.cute", this, names, force)
    _install.put("flash_attn.cute.interface", this, names, force)
    _install.add("flash_attn.cute.interface", _flash_attn_4_private, _flash_attn_4_private.__all__)
