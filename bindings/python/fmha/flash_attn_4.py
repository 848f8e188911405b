"""FlashAttention 4's functions (module ``flash_attn.cute.interface``), by name, argument order, defaults and return
values.

Always ``(out, lse)``, lse ``None`` unless ``return_lse``. ``score_mod``, ``mask_mod``, block sparsity, gathered keys
and ``qv`` are programs or layouts that the contract does not have, and are refused by name.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

import torch

from . import attention
from ._mask import Mask, from_window_size
from ._numbers import flag
from .flash_attn import integer
from .flash_attn_3 import flash_attn_combine as _combine, refuse


def _band(window_size: Tuple[Optional[int], Optional[int]], causal: bool) -> Mask:
    left, right = window_size
    if left is not None and right is not None and left + right < 0:
        # As there: an empty window is no window.
        left = right = None
    return from_window_size((left, right), causal)


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
    """Q ``(batch, seqlen_q, nheads, headdim)``, K and V ``(batch, seqlen_k, nheads_k, headdim)``."""
    refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    o, lse = attention(
        q,
        k,
        v,
        mask=_band(window_size, causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=_sink(learnable_sink),
        deterministic=deterministic,
        return_lse=True,
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
    """Packed where ``cu_seqlens_*`` are given, else with a batch axis; paged K and V with ``page_table``."""
    refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    for name, offsets, longest in (
        ("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
        ("max_seqlen_k", cu_seqlens_k, max_seqlen_k),
    ):
        if offsets is not None and longest is None:
            raise ValueError(f"{name} is missing (0 given) beside its cu_seqlens")
    o, lse = attention(
        q,
        k,
        v,
        mask=_band(window_size, causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=_sink(learnable_sink),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=page_table,
        max_seqlen_q=0 if max_seqlen_q is None else integer("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=0 if max_seqlen_k is None else integer("max_seqlen_k", max_seqlen_k),
        deterministic=deterministic,
        return_lse=True,
    )
    return o, (lse if flag("return_lse", return_lse) else None)


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
    """As FlashAttention 3's; ``(out, lse)``, lse ``None`` without ``return_lse``."""
    refuse(seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    o, lse = _combine(out_partial, lse_partial, out, out_dtype)
    return o, (lse if flag("return_lse", return_lse) else None)


def install(force: bool = False) -> None:
    """From now on ``import flash_attn.cute`` and ``flash_attn.cute.interface`` find this module; as
    :func:`fmha.flash_attn.install`, which this calls: ``flash_attn.cute`` lies in it."""
    from . import _install, flash_attn

    flash_attn.install(force)
    this = sys.modules[__name__]
    names = [name for name in vars(this) if name.startswith("flash_attn_")]
    _install.put("flash_attn.cute", this, names, force)
    _install.put("flash_attn.cute.interface", this, names, force)
