"""FlashMLA's names over lists of keys, on the CPU.

``flash_mla_sparse_fwd`` and ``flash_mla_with_kvcache(indices=...)`` take what FlashMLA's functions of these names
take and give what they give, LSE too: natural, without the sink, and ``+inf`` for a row that has no key. Caches are of
16 bits or f32: rows of 656 and 584 bytes, a second cache and ``indexer_topk`` are refused by name, as are tensors of a
GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any, Optional, Tuple

import torch

from ._native import DTYPES, MAX_DIMS, Device, Tensor, check, library
from ._numbers import real

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


class _ListCall(ctypes.Structure):
    """The library's struct of the same fields."""

    _fields_ = [
        ("q", Tensor),
        ("kv", Tensor),
        ("o", Tensor),
        ("lse", Tensor),
        ("indices", Tensor),
        ("topk_length", Tensor),
        ("sink", Tensor),
        ("softmax_scale", ctypes.c_double),
        ("addresses", ctypes.c_int64),
    ]


def _described(name: str, tensor: Optional[torch.Tensor]) -> Tensor:
    if tensor is None:
        return Tensor(num_dims=-1, dtype=-1)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: {type(tensor).__name__} is no tensor")
    if tensor.device.type != "cpu":
        raise NotImplementedError(f"{name} is on {tensor.device}: fmha.flash_mla takes tensors of the CPU")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires a gradient: fmha.flash_mla has none")
    described = Tensor(
        data=tensor.data_ptr(),
        num_dims=tensor.dim(),
        dtype=DTYPES.get(str(tensor.dtype).removeprefix("torch."), -1),
        device=Device(0, 0),
    )
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"{name} has {tensor.dim()} axes, more than {MAX_DIMS}")
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        described.sizes[axis], described.strides[axis] = size, stride
    return described


def _contiguous(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return tensor if tensor is None else tensor.contiguous()


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    sink: Optional[torch.Tensor],
    topk_length: Optional[torch.Tensor],
    addresses: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """O ``(batch, seqlen_q, num_heads_q, head_dim_v)`` and LSE ``(batch, num_heads_q, seqlen_q)``."""
    for name, given in (("q", q), ("kv", kv), ("indices", indices)):
        if given.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(given.shape)}: {given.dim()} axes, not 4")
    if sink is not None and (sink.dtype != torch.float32 or tuple(sink.shape) != (q.shape[2],)):
        raise ValueError(f"attn_sink of shape {tuple(sink.shape)} is not float32 ({q.shape[2]},)")
    if topk_length is not None and topk_length.dtype != torch.int32:
        raise ValueError(f"topk_length is {topk_length.dtype}, not int32")
    sink, topk_length = _contiguous(sink), _contiguous(topk_length)
    batch, seqlen_q, heads = q.shape[:3]
    o = q.new_empty((batch, seqlen_q, heads, head_dim_v))
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32)
    call = _ListCall(softmax_scale=real("softmax_scale", softmax_scale), addresses=int(addresses))
    for name, tensor in (
        ("q", q),
        ("kv", kv),
        ("o", o),
        ("lse", lse),
        ("indices", indices),
        ("topk_length", topk_length),
        ("sink", sink),
    ):
        setattr(call, name, _described(name, tensor))
    check(library.fmha_py_lists(ctypes.byref(call)))
    return o, torch.where(lse == -torch.inf, torch.inf, lse)


def _max_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    topk_length: Optional[torch.Tensor],
) -> torch.Tensor:
    """The greatest scaled product of each row with the keys of its list, ``(s_q, h_q)``; -inf of a row without one. A
    pass of its own, since attention does not write its maxima."""
    s_q, h_q, _ = q.shape
    s_kv, h_kv, _ = kv.shape
    logits = torch.full((s_q, h_q), -torch.inf)
    listed = (indices >= 0) & (indices < s_kv)
    if topk_length is not None:
        listed &= torch.arange(indices.shape[-1]) < topk_length[:, None, None]
    for row in range(s_q):
        for head in range(h_kv):
            keys = kv[indices[row, head][listed[row, head]].long(), head].float()
            if len(keys):
                heads = slice(head * (h_q // h_kv), (head + 1) * (h_q // h_kv))
                logits[row, heads] = (q[row, heads].float() @ keys.T * scale).amax(-1)
    return logits


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[torch.Tensor] = None,
    topk_length: Optional[torch.Tensor] = None,
    indexer_topk: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q ``(s_q, h_q, d_qk)``, kv ``(s_kv, h_kv, d_qk)``, indices i32 ``(s_q, h_kv, topk)``: positions in kv, absent
    where negative or past it; ``attn_sink`` f32 ``(h_q,)``, ``topk_length`` i32 ``(s_q,)``.

    Returns O ``(s_q, h_q, d_v)``, the greatest scaled product of each row f32 ``(s_q, h_q)``, and LSE f32
    ``(s_q, h_q)``: natural, without the sink, +inf for a row without a key."""
    if indexer_topk:
        raise NotImplementedError(f"indexer_topk {indexer_topk}: an LSE over a part of a list is not computed")
    for name, tensor in (("q", q), ("kv", kv), ("indices", indices)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: {tensor.dim()} axes, not 3")
    lengths = None if topk_length is None else topk_length[None]
    o, lse = _attend(q[None], kv[None], indices[None], d_v, sm_scale, attn_sink, lengths, addresses=False)
    return o[0], _max_logits(q, kv, indices, sm_scale, topk_length), lse[0].T.contiguous()


def get_mla_metadata(*args: Any, **kwargs: Any) -> Tuple[object, None]:
    """What FlashMLA's scheduler would be told; the CPU needs nothing of it."""
    return object(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    cache_seqlens: Optional[torch.Tensor],
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: None = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[torch.Tensor] = None,
    attn_sink: Optional[torch.Tensor] = None,
    extra_k_cache: Optional[torch.Tensor] = None,
    extra_indices_in_kvcache: Optional[torch.Tensor] = None,
    topk_length: Optional[torch.Tensor] = None,
    extra_topk_length: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """q ``(batch, seqlen_q, num_heads_q, head_dim)``, k_cache ``(num_pages, page_size, num_heads_k, head_dim)``,
    indices i32 ``(batch, seqlen_q, topk)``: addresses ``page * page_size + offset``, absent where negative or past the
    pages; ``topk_length`` i32 ``(batch,)``, ``attn_sink`` f32 ``(num_heads_q,)``. ``block_table`` and
    ``cache_seqlens`` are not read where there are lists, as in FlashMLA.

    Returns O ``(batch, seqlen_q, num_heads_q, head_dim_v)`` and LSE f32 ``(batch, num_heads_q, seqlen_q)``: natural,
    without the sink, +inf for a row without a key."""
    if indices is None:
        raise NotImplementedError("indices is None: dense caches are fmha.attention_with_kvcache's")
    for name, given in (
        ("num_splits", num_splits),
        ("extra_k_cache", extra_k_cache),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache),
        ("extra_topk_length", extra_topk_length),
    ):
        if given is not None:
            raise NotImplementedError(f"{name} is given: a second cache and splits are not taken")
    if causal:
        raise ValueError("causal True does not go with indices: an address has no position")
    if is_fp8_kvcache:
        raise NotImplementedError("is_fp8_kvcache True: rows of 656 and 584 bytes are not read, caches of 16 bits are")
    if indices.dim() != 3:
        raise ValueError(f"indices has shape {tuple(indices.shape)}: {indices.dim()} axes, not 3")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # A list is shared by the cache's heads.
    listed = indices[:, :, None, :].expand(-1, -1, k_cache.shape[2], -1)
    return _attend(q, k_cache, listed, head_dim_v, scale, attn_sink, topk_length, addresses=True)
