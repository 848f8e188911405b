"""What FlashAttention has as an argument and this library as a layout of the same rows: padding in front of a cache,
chunks of keys, a second product with V."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch

from .rotary import sequence_of_rows, turned


class Rows(NamedTuple):
    """Pages of one row each, of K and of V, and in which order a sequence has them."""

    k: torch.Tensor
    v: torch.Tensor
    #: Block table, i32 of shape ``[batch, rows]``.
    table: torch.Tensor


def _by_rows(name: str, x: torch.Tensor) -> Tuple[torch.Tensor, int]:
    """A view of pages as pages of one row, and how many of them lie from one page's first to the next one's."""
    pages, size = x.shape[:2]
    if pages < 2:
        return x.view(pages * size, 1, *x.shape[2:]) if not pages else x.transpose(0, 1), size
    apart, rest = divmod(x.stride(0), x.stride(1)) if x.stride(1) else (0, 1)
    if rest or apart < size:
        raise NotImplementedError(
            f"{name} has stride {x.stride(0)} from page to page, which is no multiple of the {x.stride(1)} from row to "
            "row: its rows cannot be pages of their own"
        )
    rows = (pages - 1) * apart + size
    return x.as_strided((rows, 1, *x.shape[2:]), (x.stride(1), x.stride(1), *x.stride()[2:])), apart


def from_left(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    leftpad: torch.Tensor,
    are_written: bool = False,
) -> Rows:
    """Sequences of pages that begin ``leftpad`` rows behind their first page's first row."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)) if are_written else ():
        heads = x.shape[2] if x.dim() == 4 else 1
        if heads > 1 and x.stride(2) * heads > x.stride(1):
            raise NotImplementedError(
                f"cache_leftpad is given beside k, but {name} has stride {x.stride(1)} from row to row and "
                f"{x.stride(2)} from head to head: new rows behind padding are written where a row's heads lie side by side"
            )
    k, apart = _by_rows("k_cache", k_cache)
    v, apart_v = _by_rows("v_cache", v_cache)
    if apart != apart_v:
        raise NotImplementedError(
            f"k_cache has {apart} rows from page to page, but v_cache has {apart_v}: cache_leftpad counts in both"
        )
    if k.shape[0] >= 1 << 31:
        raise NotImplementedError(f"cache_leftpad: k_cache has {k.shape[0]} rows, beyond 2^31")
    size = k_cache.shape[1]
    most = block_table.shape[1] * size
    # Rows after a sequence's last page are never read or written. The caller leaves out new rows that would lie there.
    place = (torch.arange(most, device=k.device) + leftpad.long()[:, None]).clamp(0, max(most - 1, 0))
    page = block_table.long().gather(1, place // max(size, 1))
    return Rows(k, v, (page * apart + place % max(size, 1)).to(torch.int32))


def turned_at(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first: torch.Tensor,
    interleaved: bool,
    by_row: bool,
    cu_seqlens_q: Optional[torch.Tensor],
    cu_seqlens_new: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Q and new keys, turned by torch's operations where a sequence's first new row stands at ``first`` ``[batch]``.
    Rows of Q count on from it ``by_row``; else all of them stand there."""

    def positions(x: torch.Tensor, offsets: Optional[torch.Tensor], counts: bool) -> torch.Tensor:
        if offsets is None:
            row = torch.arange(x.shape[1], device=x.device) if counts else x.new_zeros(x.shape[1], dtype=torch.long)
            return first.long()[:, None] + row
        sequence = sequence_of_rows(offsets, x.shape[0])
        row = torch.arange(x.shape[0], device=x.device) - offsets[sequence]
        return first.long()[sequence] + (row if counts else 0)

    return (
        turned(q, cos, sin, positions(q, cu_seqlens_q, by_row), interleaved),
        turned(k, cos, sin, positions(k, cu_seqlens_new, True), interleaved),
    )


def _first_rows(rows: int, size: int, device: torch.device) -> torch.Tensor:
    """Where sequences of one length begin among packed rows."""
    return torch.arange(rows + 1, device=device) * size


def _starts(first: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Offsets of chunks, of which each begins where the one before ends; padding is behind a sequence's last one."""
    starts = (first.long()[:-1, None] + ends[:, :-1]).flatten()
    return torch.cat((starts, first.long()[-1:])).to(torch.int32)


def in_chunks(attention_chunk: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Any, **call: Any) -> Any:
    """``attend`` of sequences cut into chunks of ``attention_chunk`` positions, each a packed sequence of its own.

    Query i stands at ``seqlen_k - seqlen_q + i`` and sees the keys of the chunk that this lies in. A chunk's last query
    stands at its last key, or both at the sequence's end: a mask from the bottom-right is the same inside of a chunk.
    Rows in front of key 0 are a first chunk without keys. All is computed on the device, and nobody waits for it.
    """
    shape = q.shape
    device, lengths = q.device, {}
    for name, x in (("q", q), ("k", k)):
        offsets, used = call.pop(f"cu_seqlens_{name}", None), call.pop(f"seqused_{name}", None)
        longest = call.pop(f"max_seqlen_{name}", 0)
        if offsets is None:
            offsets, longest = _first_rows(x.shape[0], x.shape[1], device), x.shape[1]
        lengths[name] = offsets, offsets.diff() if used is None else used, longest, used is not None
    first_q, used_q, longest_q, has_used_q = lengths["q"]
    first_k, used_k, longest_k, has_used_k = lengths["k"]
    edge = torch.arange(-(-longest_k // attention_chunk) + 1, device=device) * attention_chunk
    used_q, used_k = used_q.long()[:, None], used_k.long()[:, None]
    ends_q = torch.minimum((edge - (used_k - used_q)).clamp(min=0), used_q)
    ends_q, ends_k = (torch.nn.functional.pad(x, (1, 0)) for x in (ends_q, torch.minimum(edge, used_k)))
    if has_used_q:
        call["seqused_q"] = ends_q.diff(dim=1).flatten().to(torch.int32)
    if has_used_k:
        call["seqused_k"] = ends_k.diff(dim=1).flatten().to(torch.int32)
    _for_chunks(call, used_q.shape[0], ends_q.shape[1] - 1)
    o, lse = attend(
        *(x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v)),
        cu_seqlens_q=_starts(first_q, ends_q),
        cu_seqlens_k=_starts(first_k, ends_k),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k if has_used_k else min(longest_k, attention_chunk),
        **call,
    )
    return _as_given(o, lse, shape)


def _for_chunks(call: Any, batch: int, count: int) -> None:
    """Scales of sequences, for each of their chunks."""
    for name in ("descale_q", "descale_k", "descale_v"):
        scale = call.get(name)
        if scale is not None and scale.dim() == 2 and scale.shape[0] == batch:
            call[name] = scale.repeat_interleave(count, 0)


def _as_given(o: torch.Tensor, lse: torch.Tensor, shape: torch.Size) -> Tuple[torch.Tensor, torch.Tensor]:
    """Packed results as Q came."""
    if len(shape) == 3:
        return o, lse
    return o.unflatten(0, shape[:2]), lse.unflatten(1, shape[:2]).transpose(0, 1).contiguous()


def in_chunks_of_pages(
    attention_chunk: int,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    used_k: torch.Tensor,
    attend: Any,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    max_seqlen_q: int = 0,
    **call: Any,
) -> Any:
    """As :func:`in_chunks` over pages: a chunk is a sequence whose table begins at the chunk's first key. Chunks
    that no query stands in are left out, so that one token reads one chunk."""
    shape = q.shape
    if cu_seqlens_q is None:
        cu_seqlens_q, max_seqlen_q = _first_rows(q.shape[0], q.shape[1], q.device), q.shape[1]
        q = q.flatten(0, 1)
    size = max(k_cache.shape[1], 1)
    # A chunk that holds the whole cache is the whole sequence: tables need no more columns than a chunk has.
    attention_chunk = min(attention_chunk, max(block_table.shape[1], 1) * size)
    if attention_chunk % size:
        # A chunk begins inside of a page, so each row becomes a page.
        k_cache, v_cache, block_table = from_left(k_cache, v_cache, block_table, torch.zeros_like(used_k))
        size = 1
    most = block_table.shape[1] * size
    count = max(1, min(-(-most // attention_chunk), (max_seqlen_q + attention_chunk - 2) // attention_chunk + 1))
    used_q, used_k = cu_seqlens_q.diff().long()[:, None], used_k.long()[:, None]
    ahead = used_k - used_q
    chunk = ahead.clamp(min=0) // attention_chunk + torch.arange(count, device=q.device)
    ends_q = torch.minimum(((chunk + 1) * attention_chunk - ahead).clamp(min=0), used_q)
    # The rows in front of key 0 come first, as a chunk without keys.
    ends_q = torch.cat((torch.zeros_like(ahead), torch.minimum((-ahead).clamp(min=0), used_q), ends_q), 1)
    keys = (used_k - chunk * attention_chunk).clamp(0, attention_chunk)
    keys = torch.nn.functional.pad(keys, (1, 0)).flatten().to(torch.int32)
    pages = attention_chunk // size
    place = chunk[..., None] * pages + torch.arange(pages, device=q.device)
    place = torch.cat((torch.zeros_like(place[:, :1]), place), 1).clamp(max=max(block_table.shape[1] - 1, 0))
    table = block_table[:, None].expand(-1, count + 1, -1).gather(2, place)
    _for_chunks(call, used_q.shape[0], count + 1)
    o, lse = attend(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=_starts(cu_seqlens_q, ends_q),
        max_seqlen_q=max_seqlen_q,
        seqused_k=keys,
        block_table=table.flatten(0, 1).to(torch.int32),
        **call,
    )
    return _as_given(o, lse, shape)


def beside(v: torch.Tensor, k: torch.Tensor) -> Optional[torch.Tensor]:
    """V and K as the front and the back of one tensor's rows, where they lie so: a latent cache and its positions.
    While a compiler traces, nobody knows where a tensor lies."""
    if torch.compiler.is_compiling():
        return None
    reads = v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and v.dtype == k.dtype
    if not reads or v.stride() != k.stride() or v.shape[:-1] != k.shape[:-1] or v.stride(-1) != 1:
        return None
    if k.storage_offset() != v.storage_offset() + v.shape[-1]:
        return None
    return v.as_strided((*v.shape[:-1], v.shape[-1] + k.shape[-1]), v.stride(), v.storage_offset())


def refuse_qv(q: torch.Tensor, qv: torch.Tensor, v: torch.Tensor) -> None:
    """Raises where ``qv`` is not Q's rows with V's last axis."""
    wanted = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != wanted:
        raise RuntimeError(f"qv has shape {tuple(qv.shape)}, not {wanted} of q's rows and v's last axis")
    if qv.dtype != q.dtype or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RuntimeError(f"qv is of {qv.dtype} and q of {q.dtype}: both are of one type, f32, f16 or bf16")


def with_qv(q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tuple[Any, Any, Any]:
    """Q, K and V of one product: ``Q . K + QV . V`` is that of rows with both, V in front. Where K and V lie beside
    each other nothing of them is copied; else they are joined by a copy."""
    refuse_qv(q, qv, v)
    joint = None if k.requires_grad or v.requires_grad else beside(v, k)
    if joint is None:
        joint = torch.cat((v, k), -1)
    return torch.cat((qv, q), -1), joint, joint[..., : v.shape[-1]]


def scale_of(q: torch.Tensor, qv: Optional[torch.Tensor], softmax_scale: Any) -> Any:
    """FlashAttention 3's scale where none is given: of both products' lengths together."""
    if softmax_scale is not None or qv is None:
        return softmax_scale
    return (q.shape[-1] + qv.shape[-1]) ** -0.5
