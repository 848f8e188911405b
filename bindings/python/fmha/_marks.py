"""Marks of dropout as FlashAttention's and torch's tests read them, by torch's operations: nothing that is fast.

A mark is P before its division, ``exp(S - max S)``, of the rows' type, and below 0 where dropout leaves the element
out. Rows and keys are padded to multiples of 128. FlashAttention's marks have the maximum of the keys so far, block
by block; here it is the row's own, as for one block that holds all keys, which is what ``_get_block_size_n`` says.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch

from ._mask import Mask
from ._theirs import attention_out

#: Block size longer than any sequence, so that a sequence is one block.
BLOCK = (1 << 31) - 1


def rounded(rows: int) -> int:
    return -(-rows // 128) * 128


def _padded(x: torch.Tensor, offsets: Optional[torch.Tensor], longest: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Rows with a batch axis, and how many each sequence has."""
    if offsets is None:
        return x, torch.full((x.shape[0],), x.shape[1], device=x.device)
    at = offsets[:-1, None] + torch.arange(longest, device=x.device)
    return x[at.clamp(max=max(x.shape[0] - 1, 0)).long()], offsets.diff()


def _seen(mask: Mask, lengths_q: torch.Tensor, lengths_k: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Which keys a row sees: bool ``[batch, 1, rows, keys]``."""
    i = torch.arange(rows, device=lengths_q.device)[:, None]
    j = torch.arange(keys, device=lengths_q.device)
    lengths_q, lengths_k = lengths_q[:, None, None], lengths_k[:, None, None]
    seen = (i < lengths_q) & (j < lengths_k)
    diagonal = i + (lengths_k - lengths_q if mask.kind == 2 else 0)
    if mask.kind and mask.left >= 0:
        seen = seen & (j >= diagonal - mask.left)
    if mask.kind and mask.right >= 0:
        seen = seen & (j <= diagonal + mask.right)
    return seen[:, None]


def kept(like: torch.Tensor, shape: Tuple[int, int, int, int], p_drop: float, seed: int, offset: int) -> torch.Tensor:
    """What dropout keeps: bool ``[batch, heads, rows, keys]``; a mask is its place's, whatever Q and K are."""
    batch, heads, rows, keys = shape
    keep = torch.zeros(shape, dtype=torch.uint8, device=like.device)
    dtype = like.dtype if like.dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float32
    q = like.new_zeros((batch, rows, heads, 8), dtype=dtype)
    k = like.new_zeros((batch, keys, heads, 8), dtype=dtype)
    attention_out(torch.empty_like(q), q, k, k, keep_mask=keep, p_drop=p_drop, seed=seed, offset=offset)
    return keep.bool()


@torch.no_grad()
def marks(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: Mask,
    p_drop: float,
    seed: int,
    offset: int = 0,
    softmax_scale: Optional[float] = None,
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    **_rest: Any,
) -> torch.Tensor:
    """``[batch, heads, rounded(rows), rounded(keys)]`` of a dense call, or of a packed one."""
    q, lengths_q = _padded(q, cu_seqlens_q, max_seqlen_q)
    k, lengths_k = _padded(k, cu_seqlens_k, max_seqlen_k)
    batch, rows, heads, dim = q.shape
    keys = k.shape[1]
    k = k.repeat_interleave(heads // max(k.shape[2], 1), 2)
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        apart = torch.arange(rows, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        apart = apart + (lengths_k - lengths_q)[:, None, None, None]
        s = s - alibi_slopes.float().reshape(-1, heads, 1, 1) * apart.abs()
    seen = _seen(mask, lengths_q, lengths_k, rows, keys)
    s = s.masked_fill(~seen, -math.inf)
    largest = s.amax(-1, keepdim=True) if keys else s.new_zeros((*s.shape[:-1], 1))
    unnormed = torch.exp(s - largest.masked_fill(torch.isneginf(largest), 0)).to(q.dtype)
    keep = kept(q, (batch, heads, rows, keys), p_drop, seed, offset)
    # Dropped elements are negated, so that one that rounds to 0 is -0.
    signed = torch.where(keep | ~seen, unnormed, -unnormed)
    return torch.nn.functional.pad(signed, (0, rounded(keys) - keys, 0, rounded(rows) - rows))
