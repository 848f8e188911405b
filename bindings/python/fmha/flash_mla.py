"""FlashMLA's names over lists of keys, on the CPU and on GPUs.

``flash_mla_sparse_fwd`` and ``flash_mla_with_kvcache(indices=...)`` take what FlashMLA's functions of these names
take and give what they give, LSE too: natural, without the sink, and ``+inf`` for a row that has no key. Caches are of
16 bits or f32, or have FlashMLA's rows of 656 and 584 bytes; a second cache joins in the same softmax, where it lies.
Rows of bytes are read where they lie under queries in bf16, on the CPU, and on GPUs where pages begin on whole 16 bytes
(NVIDIA) or 4 (AMD). Elsewhere they are gathered into a tensor of their own first, which costs more. New rows are
quantised and written by ``fmha.attention_with_kvcache(q, k_cache, None, k, head_dim_v=512, block_table=..., seqused_k=...)`` over a
cache in uint8. ``indexer_topk`` is refused by name.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence, Tuple

import torch

from ._lists import Lists, Second, forward
from ._theirs import bind

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


def _refuse_numbers(**given: Optional[torch.Tensor]) -> None:
    """Raises for numbers of a list that are of another type than the library reads, in its words."""
    for name, numbers in given.items():
        if numbers is not None and numbers.dtype != torch.int32:
            raise RuntimeError(f"{name} is of {str(numbers.dtype).rpartition('.')[2]}, not of int32")


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    sink: Optional[torch.Tensor],
    topk_length: Optional[torch.Tensor],
    addresses: bool,
    second: Optional[Second] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """O ``(batch, seqlen_q, num_heads_q, head_dim_v)`` and LSE ``(batch, num_heads_q, seqlen_q)``."""
    for name, given in (("q", q), ("kv", kv), ("indices", indices)):
        if given.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(given.shape)}: {given.dim()} axes, not 4")
    for name, given in (("q", q), ("kv", kv), ("attn_sink", sink)):
        if given is not None and given.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} requires a gradient: fmha.flash_mla has none, fmha.attention has")
    if sink is not None and (sink.dtype != torch.float32 or tuple(sink.shape) != (q.shape[2],)):
        raise ValueError(f"attn_sink of shape {tuple(sink.shape)} is not float32 ({q.shape[2]},)")
    _refuse_numbers(topk_length=topk_length)
    lists = Lists(indices, topk_length, addresses=addresses, lse_without_sink=sink is not None, second=second)
    _, numbers = bind(softmax_scale=softmax_scale)
    named = [("sink", None if sink is None else sink.contiguous())]
    o, lse = forward(q, kv, None, named, (*numbers, 0, head_dim_v), lists)
    return o, torch.where(lse == -torch.inf, torch.inf, lse)


def _second(
    q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, topk_length: Optional[torch.Tensor]
) -> Second:
    """A second cache, and the addresses that tokens list of it."""
    if cache.dim() != 4:
        raise ValueError(f"extra_k_cache has shape {tuple(cache.shape)}: {cache.dim()} axes, not 4")
    if indices.dim() != 3:
        raise ValueError(f"extra_indices_in_kvcache has shape {tuple(indices.shape)}: {indices.dim()} axes, not 3")
    _refuse_numbers(extra_indices_in_kvcache=indices, extra_topk_length=topk_length)
    per_token = tuple(q.shape[:2])
    if topk_length is not None and tuple(topk_length.shape) not in (per_token[:1], per_token):
        shape = tuple(topk_length.shape)
        raise ValueError(f"extra_topk_length has shape {shape}, neither {per_token[:1]} nor {per_token}")
    if tuple(indices.shape[:2]) != per_token:
        shape = tuple(indices.shape)
        raise ValueError(f"extra_indices_in_kvcache of shape {shape} are not those of q's {per_token} tokens")
    if cache.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("extra_k_cache requires a gradient: fmha.flash_mla has none")
    listed = indices[:, :, None, :].expand(-1, -1, cache.shape[2], -1)
    return Second(cache, Lists(listed, topk_length, addresses=True))


#: Formats of rows by their bytes, DeepSeek V3.2's and V4's: FP8 elements and elements that share a scale.
_ROWS = {656: (512, 128), 584: (448, 64)}
_ROTARY = 64


def _begins_on_loads(cache: torch.Tensor) -> bool:
    """Whether pages begin on whole 16 bytes, as copies of NVIDIA's kernels take them, or on dwords on AMD's GPUs."""
    whole = 16 if torch.version.hip is None else 4
    return cache.data_ptr() % whole == 0 and cache.stride(0) * cache.element_size() % whole == 0


def _bytes_in_place(q: torch.Tensor, head_dim_v: int, caches: Sequence[Optional[torch.Tensor]]) -> bool:
    """Whether rows of bytes are read where they lie: a kernel does so, and all have one format."""
    if q.dtype != torch.bfloat16 or q.dim() != 4 or head_dim_v != 512:
        return False
    given = [cache for cache in caches if cache is not None]
    if q.device.type != "cpu" and not (q.device.type == "cuda" and all(map(_begins_on_loads, given))):
        return False
    width = given[0].shape[-1]
    return (
        width in _ROWS
        and q.shape[-1] == _ROWS[width][0] + _ROTARY
        and all(cache.dim() == 4 and tuple(cache.shape[2:]) == (1, width) and cache.numel() > 0 for cache in given)
        and all(x.element_size() == 1 and x.stride(1) == width and x.stride(3) == 1 for x in given)
    )


def _gathered(
    cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: Optional[torch.Tensor],
    names: Tuple[str, str],
    is_bytes: bool,
    q: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The rows that lists name, ``(batch, seqlen_q, topk, head_dim)`` in Q's type, zeros where absent, and whether each
    is there; ``names`` are those of the lists in errors."""
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}: {q.dim()} axes, not 4")
    per_token, (of_indices, of_length) = tuple(q.shape[:2]), names
    _refuse_numbers(**{of_indices: indices, of_length: topk_length})
    if topk_length is not None and tuple(topk_length.shape) not in (per_token[:1], per_token):
        raise ValueError(f"{of_length} has shape {tuple(topk_length.shape)}, neither {per_token[:1]} nor {per_token}")
    if indices.dim() != 3 or indices.shape[:2] != per_token:
        raise ValueError(f"{of_indices} of shape {tuple(indices.shape)} are not those of q's {per_token} tokens")
    if cache.dim() != 4 or cache.shape[2] != 1:
        raise ValueError(f"a cache of shape {tuple(cache.shape)} is not (num_pages, page_size, 1, row)")
    pages, page_size, _, width = cache.shape
    there = (indices >= 0) & (indices < pages * page_size)
    if topk_length is not None:
        used = topk_length.reshape(*topk_length.shape, *(1,) * (3 - topk_length.dim()))
        there &= torch.arange(indices.shape[-1], device=q.device) < used
    entries = torch.where(there, indices, 0).long()
    page, at = entries // max(page_size, 1), entries % max(page_size, 1)
    if pages * page_size == 0:
        return q.new_zeros((*indices.shape, q.shape[-1])), there
    rows = _widened(cache, page, at) if is_bytes else cache[page, at, 0]
    if rows.shape[-1] != q.shape[-1]:
        raise ValueError(f"rows of {width} of a cache have {rows.shape[-1]} elements, but q has {q.shape[-1]}")
    return torch.where(there[..., None], rows.to(q.dtype), 0), there


def _widened(cache: torch.Tensor, page: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rows of bytes in f32: e4m3 times powers of two, then the rotary elements in bf16. 656 bytes are a row's 512
    elements, 4 scales in f32 and 128 bytes; of 584 a page has 576 bytes of each row first, and 8 scales in E8M0 of each
    behind them."""
    pages, page_size, _, width = cache.shape
    if width not in _ROWS or cache.element_size() != 1 or cache.stride(1) != width or cache.stride(3) != 1:
        raise ValueError(f"k_cache of shape {tuple(cache.shape)} and {cache.dtype} has no rows of 656 or 584 bytes")
    flat = cache.view(torch.uint8).as_strided((pages, page_size * width), (cache.stride(0), 1))
    values, group = _ROWS[width]

    def bytes_of(first: Any, count: int) -> torch.Tensor:
        return flat[page[..., None], first[..., None] + torch.arange(count, device=cache.device)]

    if width == 656:
        first = at * width
        scales = bytes_of(first + values, 16).view(torch.float32)
        rotary = bytes_of(first + values + 16, 2 * _ROTARY)
    else:
        first = at * 576
        exponents = bytes_of(page_size * 576 + at * 8, values // group)
        scales = torch.exp2(exponents.float() - 127)
        rotary = bytes_of(first + values, 2 * _ROTARY)
    narrow = bytes_of(first, values).view(torch.float8_e4m3fn).float()
    wide = narrow.unflatten(-1, (values // group, group)) * scales[..., None]
    return torch.cat((wide.flatten(-2), rotary.view(torch.bfloat16).float()), -1)


def _attend_tokens(
    q: torch.Tensor,
    rows: torch.Tensor,
    there: torch.Tensor,
    head_dim_v: int,
    scale: float,
    sink: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Attention of each token over rows of its own."""
    batch, seqlen_q, topk = there.shape
    listed = torch.where(there, torch.arange(topk, dtype=torch.int32, device=q.device), -1)
    alone = (batch * seqlen_q, 1)
    o, lse = _attend(
        q.reshape(*alone, *q.shape[2:]),
        rows.reshape(batch * seqlen_q, topk, 1, rows.shape[-1]),
        listed.int().reshape(*alone, 1, topk),
        head_dim_v,
        scale,
        sink,
        None,
        addresses=False,
    )
    return o.reshape(*q.shape[:-1], head_dim_v), lse.reshape(batch, seqlen_q, -1).transpose(1, 2).contiguous()


#: Most elements of keys that are gathered at once: 256 MiB in f32.
_GATHERED = 1 << 26


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
    topk = indices.shape[-1]
    logits = torch.full((s_q, h_q), -torch.inf, device=q.device)
    if not s_kv or not topk:
        return logits
    listed = (indices >= 0) & (indices < s_kv)
    if topk_length is not None:
        listed &= torch.arange(topk, device=q.device) < topk_length[:, None, None]
    entries = torch.where(listed, indices, 0).long()
    heads = torch.arange(h_kv, device=q.device)[:, None]
    # Tokens are processed in chunks, so that the gathered keys are bounded; the host never waits for the device.
    step = max(1, _GATHERED // (h_kv * topk * kv.shape[-1]))
    for begin in range(0, s_q, step):
        rows = slice(begin, begin + step)
        keys = kv[entries[rows], heads].float()
        scores = torch.einsum("thgd,thkd->thgk", q[rows].float().unflatten(1, (h_kv, -1)), keys) * scale
        logits[rows] = scores.masked_fill(~listed[rows, :, None], -torch.inf).amax(-1).flatten(1)
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
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {type(tensor).__name__} is no tensor of torch's")
        if tensor.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: {tensor.dim()} axes, not 3")
    for name, tensor in (("attn_sink", attn_sink), ("topk_length", topk_length)):
        if tensor is not None and (not isinstance(tensor, torch.Tensor) or tensor.dim() != 1):
            raise ValueError(f"{name}: {type(tensor).__name__} is no tensor of one axis")
    if not isinstance(sm_scale, (int, float)) or not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale {sm_scale} is no finite number")
    if not isinstance(d_v, int) or not 1 <= d_v <= q.shape[-1]:
        raise ValueError(f"d_v {d_v} is not in 1..={q.shape[-1]}, the elements of a row")
    lengths = None if topk_length is None else topk_length[None]
    o, lse = _attend(q[None], kv[None], indices[None], d_v, sm_scale, attn_sink, lengths, addresses=False)
    return o[0], _max_logits(q, kv, indices, sm_scale, topk_length), lse[0].T.contiguous()


def get_mla_metadata(*args: Any, **kwargs: Any) -> Tuple[object, None]:
    """What FlashMLA's scheduler would be told; nothing here needs it."""
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
    pages; ``topk_length`` i32 ``(batch,)``, ``attn_sink`` f32 ``(num_heads_q,)``. With ``is_fp8_kvcache`` rows of the
    caches have 656 or 584 bytes. ``extra_k_cache`` and its lists join in the same softmax. ``block_table`` and
    ``cache_seqlens`` are not read where there are lists, as in FlashMLA.

    Returns O ``(batch, seqlen_q, num_heads_q, head_dim_v)`` and LSE f32 ``(batch, num_heads_q, seqlen_q)``: natural,
    without the sink, +inf for a row without a key."""
    if indices is None:
        raise NotImplementedError("indices is None: dense caches are fmha.attention_with_kvcache's")
    if num_splits is not None:
        raise NotImplementedError("num_splits is given: the library chooses them")
    if causal:
        raise ValueError("causal True does not go with indices: an address has no position")
    if indices.dim() != 3:
        raise ValueError(f"indices has shape {tuple(indices.shape)}: {indices.dim()} axes, not 3")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        name = "extra_k_cache" if extra_k_cache is None else "extra_indices_in_kvcache"
        raise ValueError(f"{name} is None, but the other of a second cache is given")
    if extra_k_cache is None and extra_topk_length is not None:
        raise ValueError("extra_topk_length is given, but extra_k_cache is None")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if is_fp8_kvcache and _bytes_in_place(q, head_dim_v, (k_cache, extra_k_cache)):
        k_cache = k_cache.view(torch.uint8)
        extra_k_cache = None if extra_k_cache is None else extra_k_cache.view(torch.uint8)
    elif is_fp8_kvcache:
        caches = [(k_cache, indices, topk_length, ("indices", "topk_length"))]
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            names = ("extra_indices_in_kvcache", "extra_topk_length")
            caches.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length, names))
        gathered = [_gathered(*cache, is_fp8_kvcache, q) for cache in caches]
        rows, at = (torch.cat(parts, 2) for parts in zip(*gathered))
        return _attend_tokens(q, rows, at, head_dim_v, scale, attn_sink)
    second = None
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        second = _second(q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    # All heads of the cache share a list.
    listed = indices[:, :, None, :].expand(-1, -1, k_cache.shape[2], -1)
    return _attend(q, k_cache, listed, head_dim_v, scale, attn_sink, topk_length, addresses=True, second=second)
