"""FlashAttention 4's entry points below its functions, which frameworks call: ``_flash_attn_fwd`` and
``_flash_attn_bwd``. A context (:class:`fmha.row_invariant`) has to be around the latter too, which nobody tells what it
asked of the former."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from . import _torch
from ._flash_attn_2_private import maybe_contiguous
from ._theirs import bind
from .flash_attn import integer, lse_shape, refuse_outputs, rows
from .flash_attn_3 import _descales, refuse
from .flash_attn_4 import _below_zero, _bottom_right, _sink, _varlen, _window, rows_bound

__all__ = ["_flash_attn_bwd", "_flash_attn_fwd", "maybe_contiguous"]


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    page_table: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    softcap: Optional[float] = None,
    window_size_left: Optional[int] = None,
    window_size_right: Optional[int] = None,
    learnable_sink: Optional[torch.Tensor] = None,
    tile_mn: Optional[Tuple[int, int]] = None,
    mma_pv_is_rs: Optional[bool] = None,
    intra_wg_overlap: Optional[bool] = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    _arch: Optional[int] = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    gather_kv_indices: Optional[torch.Tensor] = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Optional[int] = None,
    disable_scheduler_metadata: bool = False,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], None, None]:
    """``(out, lse, None, None)``: LSE where it is asked for, or a gradient is; the rest is of sparse lists, which are
    refused. Tiles, threads and splits are hints."""
    refuse(
        qv=qv,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        gather_kv_indices=gather_kv_indices,
    )
    refuse_outputs(out=(out, (*q.shape[:-1], v.shape[-1])), lse=(lse, lse_shape(q)))
    wants_lse = return_lse or lse is not None
    wants_lse = wants_lse or any(x is not None and x.requires_grad for x in (q, k, v, learnable_sink))
    with torch.no_grad():
        made, of_rows = _varlen(
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
            window=_window((window_size_left, window_size_right), causal),
            learnable_sink=learnable_sink,
            softcap=softcap or 0.0,
            deterministic=False,
            **_descales((q, k, v), q_descale, k_descale, v_descale),
        )
        made = made if out is None else out.copy_(made)
        of_rows = of_rows if lse is None else lse.copy_(of_rows)
    return made, (of_rows if wants_lse else None), None, None


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: Optional[int] = None,
    window_size_right: Optional[int] = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    deterministic: bool = False,
    dq: Optional[torch.Tensor] = None,
    dk: Optional[torch.Tensor] = None,
    dv: Optional[torch.Tensor] = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    dlse: Optional[torch.Tensor] = None,
    learnable_sink: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, ...]:
    """``(dq, dk, dv)``, and ``dsink`` beside a ``learnable_sink``. Blocks, stages and layouts are hints."""
    refuse(
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
    )
    refuse_outputs(dq=(dq, q.shape), dk=(dk, k.shape), dv=(dv, v.shape))
    left, right = _window((window_size_left, window_size_right), causal)
    if _below_zero(left, right):
        raise NotImplementedError(
            f"window_size_left {left} and window_size_right {right}: a bound below 0 is taken by the functions alone"
        )
    if cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = rows_bound(rows(q, 0, "q"))
    if cu_seqlens_k is not None and max_seqlen_k is None:
        max_seqlen_k = rows_bound(rows(k, 0, "k"))
    _, numbers = bind(
        mask=_bottom_right(left, right),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        max_seqlen_q=0 if cu_seqlens_q is None else integer("max_seqlen_q", max_seqlen_q),  # type: ignore[arg-type]
        max_seqlen_k=0 if cu_seqlens_k is None else integer("max_seqlen_k", max_seqlen_k),  # type: ignore[arg-type]
    )
    sink = _sink(learnable_sink)
    dense = tuple(_torch.last_is_dense(x) for x in (dout, q, k, v, out))
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    with torch.no_grad():
        made = _torch.gradients(dense, lse, dlse, sink, lengths, numbers)
        given = [x if into is None else into.copy_(x) for x, into in zip(made, (dq, dk, dv))]
    if learnable_sink is None:
        return tuple(given)
    return (*given, made[4].to(learnable_sink.dtype))
