"""FlashAttention 2's functions, by name, argument order, defaults and return values.

``import fmha.flash_attn as flash_attn`` is the whole change. What differs is said in each function's notes: an empty
row's LSE is -inf here as in FlashAttention 3 (there +inf), and O is never padded by copies. What the contract does not
have is refused by its name.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import torch

from . import _layouts, _torch
from ._mask import NONE, from_window_size
from ._numbers import flag, real
from ._theirs import attention, attention_with_kvcache
from .rotary import sequence_of_rows


def _seed(p_drop: float) -> Tuple[int, int]:
    """Seed and offset from torch's default generator of the CPU, which ``torch.manual_seed`` sets."""
    if not p_drop:
        return 0, 0
    seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")
    return int(seed), 0


def _packed(name: str, x: torch.Tensor, axis: int, count: int) -> Tuple[torch.Tensor, ...]:
    """The tensors that lie in one, side by side on an axis."""
    if x.dim() != axis + 3 or x.shape[axis] != count:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {axis + 3} axes with {count} on axis {axis}")
    return x.unbind(axis)


def _call(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    deterministic,
    return_attn_probs,
    **lengths,
):
    dropout_p = real("dropout_p", dropout_p)
    seed, offset = _seed(dropout_p)
    shared = dict(
        mask=from_window_size(window_size, causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        p_drop=dropout_p,
        seed=seed,
        offset=offset,
        deterministic=deterministic,
        **lengths,
    )
    if not flag("return_attn_probs", return_attn_probs):
        return attention(q, k, v, **shared)
    if dropout_p and "block_table" in lengths:
        raise NotImplementedError("return_attn_probs is given beside block_table: marks are of packed or dense keys")
    o, lse = attention(q, k, v, return_lse=True, **shared)
    if not dropout_p:
        return o, lse, q.new_empty(0)
    from . import _marks

    return o, lse, _marks.marks(q, k, **shared)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """Q ``(batch, seqlen_q, nheads, headdim)``, K and V ``(batch, seqlen_k, nheads_k, headdim)``.

    Causal and windows are bottom-right: with ``(left, right)`` query i sees keys from ``i + seqlen_k - seqlen_q -
    left`` to ``i + seqlen_k - seqlen_q + right``, both included. With ``return_attn_probs``: ``(out, lse, S_dmask)``:
    marks for tests, below 0 where dropout leaves an element out; torch computes them, and they have no elements without
    dropout.
    """
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _call(q, k, v, *rest)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """QKV ``(batch, seqlen, 3, nheads, headdim)``; read where it lies."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _packed("qkv", qkv, 2, 3)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """Q ``(batch, seqlen_q, nheads, headdim)``, KV ``(batch, seqlen_k, 2, nheads_k, headdim)``."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = _packed("kv", kv, 2, 2)
    return flash_attn_func(q, k, v, *rest)


def integer(name: str, value: Union[int, torch.Tensor]) -> int:
    """A length that may come as a tensor: read once, which waits for a device, and cannot be done in a capture."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not one number")
        if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{name} is a tensor on the device, which a graph cannot read: give an int")
        return int(value.item())
    return value


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[torch.Tensor] = None,
):
    """Packed: Q ``(total_q, nheads, headdim)``, K and V ``(total_k, nheads_k, headdim)``; with ``block_table``, K and V
    are pages ``(num_blocks, page_block_size, nheads_k, headdim)``, and the lengths follow from ``cu_seqlens_k``."""
    lengths = dict(
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=integer("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=integer("max_seqlen_k", max_seqlen_k),
    )
    if block_table is None:
        lengths["cu_seqlens_k"] = cu_seqlens_k
    else:
        used = cu_seqlens_k.diff().to(torch.int32)
        check_cache_lengths("cu_seqlens_k's difference", used, k, block_table)
        lengths.update(block_table=block_table, seqused_k=used)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _call(q, k, v, *rest, **lengths)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """QKV ``(total, 3, nheads, headdim)``."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _packed("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """Q ``(total_q, nheads, headdim)``, KV ``(total_k, 2, nheads_k, headdim)``."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = _packed("kv", kv, 1, 2)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


def num_sequences(q: torch.Tensor, cu_seqlens_q: Optional[torch.Tensor]) -> int:
    for name, tensor in (("q", q), ("cu_seqlens_q", cu_seqlens_q)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "q"):
            raise TypeError(f"{name}: {type(tensor).__name__} is no tensor of torch")
        if tensor is not None and not tensor.dim():
            raise ValueError(f"{name} has 0 axes")
    return q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def rows(x: torch.Tensor, axis: int, name: str) -> int:
    """A tensor's extent where it has that axis."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, not a tensor")
    if x.dim() <= axis:
        raise ValueError(f"{name} has {x.dim()} axes")
    return x.shape[axis]


def refuse_outputs(**written: Tuple[Optional[torch.Tensor], Sequence[int]]) -> None:
    """Raises where an output of the caller's is not of the shape that it is written in: torch would repeat a result
    over a larger one in silence."""
    for name, (x, shape) in written.items():
        if x is not None and tuple(x.shape) != tuple(shape):
            raise RuntimeError(f"{name} has shape {tuple(x.shape)}, not {tuple(shape)}")


def lse_shape(q: torch.Tensor) -> Tuple[int, ...]:
    """The LSE's shape of dense or packed queries."""
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


def _readable(length: Any) -> bool:
    """Whether numbers can be read without a wait for a device; a tracer's tensor has none."""
    if isinstance(length, int):
        return True
    return type(length) is torch.Tensor and length.device.type == "cpu" and not torch.compiler.is_compiling()


def check_cache_lengths(
    name: str,
    lengths: Union[int, torch.Tensor, None],
    k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    new: Union[int, torch.Tensor] = 0,
) -> None:
    """Raises where a sequence with its ``new`` rows is longer than what holds it. Lengths on a GPU are not read: a
    kernel clamps them, and ``check_lengths`` of :func:`fmha.attention` reads them."""
    if not (_readable(lengths) and _readable(new)):
        return
    page_or_cache = rows(k_cache, 1, "k_cache")
    held = page_or_cache if block_table is None else rows(block_table, 1, "block_table") * page_or_cache
    longest, least = _extreme(lengths + new, max), _extreme(lengths, min)  # type: ignore[operator]
    if longest > held:
        holds = "k_cache has" if block_table is None else "the pages of block_table have"
        raise ValueError(f"{name} with new rows is {longest}, but {holds} {held}")
    if least < 0:
        raise ValueError(f"{name} {least} is below 0")


def _extreme(lengths: Any, of: Callable[..., int]) -> int:
    return lengths if isinstance(lengths, int) else of(lengths.flatten().tolist(), default=0)


def _refuse_half(**pair: Optional[torch.Tensor]) -> None:
    """Raises where one of two is given."""
    given, absent = ([name for name, x in pair.items() if (x is None) is missing] for missing in (False, True))
    if given and absent:
        raise ValueError(f"{given[0]} is given, but {absent[0]} is missing")


def over_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    *,
    batch: int,
    cache_seqlens: Union[int, torch.Tensor, None],
    cache_batch_idx: Optional[torch.Tensor],
    cache_leftpad: Optional[torch.Tensor],
    block_table: Optional[torch.Tensor],
    rotary_cos: Optional[torch.Tensor],
    rotary_sin: Optional[torch.Tensor],
    num_splits: int,
    rotary_seqlens: Optional[torch.Tensor] = None,
    qv: Optional[torch.Tensor] = None,
    attention_chunk: int = 0,
    **call: Any,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's ways to say where a sequence's cache lies, as this library has them."""
    _refuse_half(k=k, v=v)
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is missing beside k: it says where new rows are written")
    rotary = dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if k is None:
        for name, turns in (*rotary.items(), ("rotary_seqlens", rotary_seqlens)):
            if turns is not None:
                raise ValueError(f"{name} is given, but k is not: rows turn where new ones are appended")
        if call.get("cu_seqlens_new") is not None:
            raise ValueError("cu_seqlens_k_new is given, but k is not")
    _refuse_half(**rotary)
    if rotary_seqlens is not None and rotary_cos is None:
        raise ValueError("rotary_seqlens is given, but rotary_cos is not")
    new: Union[int, torch.Tensor] = 0
    if k is not None:
        offsets = call.get("cu_seqlens_new")
        new = rows(k, 1, "k") if offsets is None else offsets.diff()
    check_cache_lengths("cache_seqlens", cache_seqlens, k_cache, block_table, new)
    is_checked = _readable(cache_seqlens) and _readable(new)
    if cache_batch_idx is not None:
        # The batch's rows are chosen from the block table, or from a table whose page is a whole sequence.
        block_table = _chosen(cache_batch_idx, block_table)
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens < 1 << 31:
            raise ValueError(f"cache_seqlens {cache_seqlens} is not in 0 .. 2^31")
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    counted = cache_seqlens
    held = rows(k_cache, 1, "k_cache") * (1 if block_table is None else rows(block_table, 1, "block_table"))
    if cache_leftpad is not None:
        if k is not None and not is_checked:
            k, v = _that_fit(k, v, cache_seqlens, k_cache, block_table, call)
        held_in = (k_cache, v_cache, cache_leftpad, cache_seqlens, block_table)
        q, k_cache, v_cache, cache_seqlens, block_table = _behind_padding(
            q, *held_in, batch, k is not None, attention_chunk, call
        )
    if rotary_cos is not None:
        by, first = ("cache_seqlens", counted) if rotary_seqlens is None else ("rotary_seqlens", rotary_seqlens)
        _refuse_tables(q, k, rotary, held, by, first, attention_chunk, call)
    by_kernel = cache_leftpad is None and qv is None and not attention_chunk
    if rotary_cos is not None and not (by_kernel and (rotary_seqlens is None or rotary_seqlens is counted)):
        q, k = _turned(q, k, rotary, counted if rotary_seqlens is None else rotary_seqlens, attention_chunk, call)
        rotary = {}
    if qv is not None:
        q, k_cache, v_cache, k, v = _latent(q, qv, k_cache, v_cache, k, v, call)
    call.update(batch_invariant=num_splits == 1, return_lse=True)
    if attention_chunk:
        return _over_chunks(attention_chunk, q, k_cache, v_cache, k, v, batch, cache_seqlens, block_table, call)
    call.update(rotary, seqused_k=cache_seqlens, block_table=block_table)
    return attention_with_kvcache(q, k_cache, v_cache, k, v, **call)


def _chosen(cache_batch_idx: torch.Tensor, block_table: Optional[torch.Tensor]) -> torch.Tensor:
    """The table of the sequences that a batch chooses."""
    if block_table is None:
        return cache_batch_idx.to(torch.int32).reshape(-1, 1)
    most = rows(block_table, 0, "block_table")
    if _readable(cache_batch_idx) and cache_batch_idx.numel():
        for index in (int(cache_batch_idx.min()), int(cache_batch_idx.max())):
            if not 0 <= index < most:
                raise ValueError(f"cache_batch_idx {index} is not in 0 .. {most}, the rows of block_table")
    return block_table[cache_batch_idx.long().clamp(0, max(most - 1, 0))]


def _that_fit(k, v, used, k_cache, block_table, call):
    """New rows without those beyond the cache, packed: a kernel leaves them out too, but behind padding it would look
    for them from another row on. Lengths are not read."""
    held = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    first = call.get("cu_seqlens_new")
    if first is None:
        first = torch.arange(k.shape[0] + 1, device=k.device) * k.shape[1]
        call["max_seqlen_new"] = k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    fit = torch.minimum(first.diff().long(), held - used.long()).clamp(min=0)
    ends = torch.nn.functional.pad(fit.cumsum(0), (1, 0))
    sequence = sequence_of_rows(ends, k.shape[0])
    row = first.long()[sequence] + torch.arange(k.shape[0], device=k.device) - ends[sequence]
    row = row.clamp(0, max(k.shape[0] - 1, 0))
    call["cu_seqlens_new"] = ends.to(torch.int32)
    return k[row], v[row]


def _refuse_leftpad(leftpad: torch.Tensor, batch: int) -> None:
    if tuple(leftpad.shape) != (batch,) or leftpad.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cache_leftpad is of {leftpad.dtype} and shape {tuple(leftpad.shape)}, not int32 or int64 ({batch},)"
        )
    if _readable(leftpad) and _extreme(leftpad, min) < 0:
        raise ValueError(f"cache_leftpad {_extreme(leftpad, min)} is below 0")


def _behind_padding(q, k_cache, v_cache, leftpad, used, block_table, batch, appends, attention_chunk, call):
    """Q, caches, lengths and table of sequences that begin behind their padding."""
    _refuse_leftpad(leftpad, batch)
    size = k_cache.shape[1]
    longest = size if block_table is None else block_table.shape[1] * size
    used = longest if used is None else used
    if _readable(leftpad) and _readable(used):
        beyond = (leftpad > used).nonzero().flatten().tolist()
        if beyond:
            at = beyond[0]
            raise ValueError(
                f"cache_leftpad {int(leftpad[at])} is beyond the {int(used if isinstance(used, int) else used[at])} of "
                "cache_seqlens"
            )
    else:
        leftpad = leftpad.clamp(0, longest)
    # Lengths that the host has not read may exceed the tensor that holds the rows.
    held = min(used, longest) if isinstance(used, int) else used.clamp(max=longest)
    behind = (held - leftpad).clamp(min=0).to(torch.int32)
    if block_table is None and not appends and not attention_chunk:
        # Rows are packed, and each sequence begins behind its padding.
        pad = torch.nn.functional.pad(leftpad.to(torch.int32), (0, 1))
        call["cu_seqlens_k"] = torch.arange(0, batch + 1, dtype=torch.int32, device=q.device) * longest + pad
        call["max_seqlen_k"] = 2 * longest
        return q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), behind, None
    if block_table is None:
        block_table = torch.arange(batch, device=q.device)[:, None]
    made = _layouts.from_left(k_cache, v_cache, block_table, leftpad, appends)
    return q, made.k, made.v, behind, made.table


def _turns_by_row(attention_chunk, call) -> bool:
    """Whether a query's position counts on from its sequence's first new row, where else all of them stand."""
    return call["mask"] != NONE or attention_chunk > 0


def _refuse_tables(q, k, rotary, held, by, first, attention_chunk, call):
    """Raises what is wrong with tables of angles, ``first`` being each sequence's first position. A table that ends
    before a position leaves its row as it is; where lengths are not read, it has as many rows as the cache, as in
    FlashAttention."""
    cos, sin = rotary["rotary_cos"], rotary["rotary_sin"]
    for name, table in rotary.items():
        if table.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(table.shape)}, not 2 axes")
    if sin.shape != cos.shape:
        raise ValueError(f"rotary_sin has shape {tuple(sin.shape)}, but rotary_cos has {tuple(cos.shape)}")
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(f"rotary_cos has rotary_dim {2 * cos.shape[1]}, but q has headdim {q.shape[-1]}")
    offsets_q, offsets_new = call.get("cu_seqlens_q"), call.get("cu_seqlens_new")
    for name, x, offsets in (("q", q, offsets_q), ("k", k, offsets_new)):
        axes, batch = (4, rows(x, 0, name)) if offsets is None else (3, offsets.shape[0] - 1)
        if x.dim() != axes:
            raise ValueError(f"{name} has {x.dim()} axes, not {axes}, beside rotary_cos")
        if tuple(first.shape) != (batch,):
            raise ValueError(f"{by} has shape {tuple(first.shape)}, not ({batch},) of {name}'s sequences")
    if all(x is None or _readable(x) for x in (first, offsets_q, offsets_new)):
        ends = [x.shape[1] if cu is None else cu.diff() for x, cu in ((q, offsets_q), (k, offsets_new))]
        if not _turns_by_row(attention_chunk, call):
            ends[0] = ends[0].clamp(max=1) if isinstance(ends[0], torch.Tensor) else min(ends[0], 1)
        needed, what = max(_extreme(first + count, max) for count in ends), "positions of new rows and queries"
    else:
        needed, what = held, "rows of the cache"
    if cos.shape[0] < needed:
        raise ValueError(f"rotary_cos has {cos.shape[0]} positions, fewer than the {needed} {what}")


def _turned(q, k, rotary, first, attention_chunk, call):
    """Q and new keys, turned before a kernel has them."""
    return _layouts.turned_at(
        q,
        k,
        rotary["rotary_cos"],
        rotary["rotary_sin"],
        first,
        flag("rotary_interleaved", call.get("rotary_interleaved", True)),
        _turns_by_row(attention_chunk, call),
        call.get("cu_seqlens_q"),
        call.get("cu_seqlens_new"),
    )


def _latent(q, qv, k_cache, v_cache, k, v, call):
    """Q, caches and new rows where ``qv`` meets V: rows that have V in front and K behind."""
    if k is None:
        return (*_layouts.with_qv(q, qv, k_cache, v_cache), None, None)
    _layouts.refuse_qv(q, qv, v_cache)
    joint = _layouts.beside(v_cache, k_cache)
    if joint is None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "qv is given beside k, but a compiler does not say whether k_cache lies behind v_cache"
            )
        raise NotImplementedError(
            "qv is given beside k, but k_cache does not lie behind v_cache in one tensor's rows: new rows are written "
            "into one"
        )
    call["head_dim_v"] = v_cache.shape[-1]
    return torch.cat((qv, q), -1), joint, None, torch.cat((v, k), -1), None


def _over_chunks(attention_chunk, q, k_cache, v_cache, k, v, batch, used, block_table, call):
    """Over a cache in chunks; new rows are appended before."""
    size = k_cache.shape[1]
    if used is None:
        longest = size if block_table is None else block_table.shape[1] * size
        used = torch.full((batch,), longest, dtype=torch.int32, device=q.device)
    names = ("cu_seqlens_new", "max_seqlen_new", "rotary_interleaved")
    appends = {name: call.pop(name) for name in names if name in call}
    head_dim_v = call.pop("head_dim_v", 0)
    if k is not None:
        # This call only appends rows: its query is one row that sees one key, and its output is ignored.
        one = q.new_zeros((batch, 1, *q.shape[-2:]))
        scales = {name: call[name] for name in call if name.startswith("descale")}
        attention_with_kvcache(
            one,
            k_cache,
            v_cache,
            k,
            v,
            seqused_k=used,
            block_table=block_table,
            mask="b:0,0",
            head_dim_v=head_dim_v,
            softmax_scale=0.0,
            **appends,
            **scales,
        )
        offsets = appends.get("cu_seqlens_new")
        held = size * (1 if block_table is None else block_table.shape[1])
        used = (used + (k.shape[1] if offsets is None else offsets.diff())).clamp(max=held).to(torch.int32)
    if v_cache is None:
        v_cache = k_cache[..., :head_dim_v]
    if block_table is None:
        block_table = torch.arange(k_cache.shape[0], device=q.device)[:, None]
    o, lse = _layouts.in_chunks_of_pages(
        attention_chunk, q, k_cache, v_cache, block_table, used, attention_with_kvcache, **call
    )
    # Another call has appended the new rows.
    return _torch.without_gradients_of_a_cache(o, lse, k, v)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    cache_seqlens: Union[int, torch.Tensor, None] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
):
    """Attention over a cache that ``k`` and ``v`` are written to first, in place. ``num_splits`` 1 asks for results
    that do not depend on the batch; any other number is the kernel's own choice. With ``return_softmax_lse``: ``(out,
    lse)``.

    A number or a tensor on the CPU as ``cache_seqlens`` is read: a sequence that is longer than the cache, or than the
    pages of ``block_table``, new rows included, raises. A tensor on a GPU is not, and a kernel clamps its lengths;
    :func:`fmha.attention_with_kvcache` with ``check_lengths`` reads them.
    """
    o, lse = over_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        batch=num_sequences(q, None),
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        num_splits=num_splits,
        mask=from_window_size(window_size, causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
    )
    return (o, lse) if flag("return_softmax_lse", return_softmax_lse) else o


def install(force: bool = False) -> None:
    """From now on ``import flash_attn`` finds this module, with ``flash_attn.flash_attn_interface``,
    ``flash_attn.bert_padding``, ``flash_attn.layers.rotary`` and ``flash_attn.ops.triton.rotary``.

    Raises:
        ImportError: another ``flash_attn`` is imported already, and ``force`` is not set.
    """
    from . import _flash_attn_2_private, _install, bert_padding, rotary

    this = sys.modules[__name__]
    names = [name for name in vars(this) if name.startswith("flash_attn_")]
    _install.put("flash_attn", this, names, force)
    _install.put("flash_attn.flash_attn_interface", this, names, force)
    _install.add("flash_attn.flash_attn_interface", _flash_attn_2_private, _flash_attn_2_private.__all__)
    _install.put("flash_attn.bert_padding", bert_padding, bert_padding.__all__, force)
    for package in ("flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"):
        _install.put(package, rotary, (), force)
    for name in ("flash_attn.layers.rotary", "flash_attn.ops.triton.rotary"):
        _install.put(name, rotary, rotary.__all__, force)
