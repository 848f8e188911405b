"""Rotary embeddings by the names of ``flash_attn.layers.rotary`` and ``flash_attn.ops.triton.rotary``.

The library's kernels turn rows where they append them to a cache; what has no cache is turned here by torch's
operations, on any device: in f32 (f64 for f64), rounded once to the rows' type.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch

from ._numbers import flag

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]

Offsets = Union[int, torch.Tensor]


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """A quarter turn of each pair of the last axis: ``(2i, 2i + 1)`` if interleaved, else ``(i, i + half)``."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1)
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """``x`` ``(batch, seqlen, nheads, headdim)`` by ``cos`` and ``sin`` ``(seqlen, rotary_dim / 2)``, with a batch axis
    or without, in the type that torch gives their product."""
    turns = 2 * cos.shape[-1]
    if turns > x.shape[-1]:
        raise AssertionError(f"cos has rotary_dim {turns}, but x has headdim {x.shape[-1]}")

    def wide(angle: torch.Tensor) -> torch.Tensor:
        return (angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)).unsqueeze(-2)

    first = x[..., :turns]
    return torch.cat((first * wide(cos) + rotate_half(first, interleaved) * wide(sin), x[..., turns:]), -1)


def turned(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    conjugate: bool = False,
) -> torch.Tensor:
    """Rows ``(..., nheads, headdim)``, each turned by its position's angles, ``positions`` ``(...)``. A position that
    the tables do not have turns nothing, as in FlashAttention."""
    known = ((positions >= 0) & (positions < cos.shape[0])).unsqueeze(-1)
    at = positions.clamp(0, max(cos.shape[0] - 1, 0)).long()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    of_rows = [
        torch.where(known, table[at].to(wide), beyond)
        for table, beyond in ((cos, 1.0), (sin, 0.0))
    ]
    return apply_rotary_emb_torch(x.to(wide), of_rows[0], -of_rows[1] if conjugate else of_rows[1], interleaved).to(
        x.dtype
    )


def _refuse(x: Any, cos: Any, sin: Any, offsets: Offsets, seqlen: int, batch: int) -> None:
    """Raises what FlashAttention asserts, by its kind of error."""
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2:
            raise AssertionError(f"{name} has shape {tuple(table.shape)}, not 2 axes")
    if sin.shape != cos.shape:
        raise AssertionError(f"sin has shape {tuple(sin.shape)}, but cos has {tuple(cos.shape)}")
    rows, half = cos.shape
    if 2 * half > x.shape[-1]:
        raise AssertionError(f"cos has rotary_dim {2 * half}, but x has headdim {x.shape[-1]}")
    if x.shape[-1] > 256:
        raise AssertionError(f"x has headdim {x.shape[-1]}, above 256")
    if rows < seqlen:
        raise AssertionError(f"cos has {rows} positions, but x has {seqlen} rows in a sequence")
    if isinstance(offsets, torch.Tensor):
        if offsets.shape != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
            raise AssertionError(
                f"seqlen_offsets is of {offsets.dtype} and shape {tuple(offsets.shape)}, not int32 or int64 ({batch},)"
            )
    elif offsets + seqlen > rows:
        raise AssertionError(f"seqlen_offsets {offsets} and {seqlen} rows are beyond the {rows} positions of cos")


def sequence_of_rows(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Which sequence each packed row is of: i64 ``(rows,)``. Rows behind the last offset are of the last one."""
    at = torch.arange(rows, device=offsets.device)
    return (torch.bucketize(at, offsets, right=True) - 1).clamp(0, max(offsets.shape[0] - 2, 0))


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """``x`` ``(batch, seqlen, nheads, headdim)``, or packed ``(total, nheads, headdim)`` with ``cu_seqlens`` and
    ``max_seqlen``; ``cos`` and ``sin`` ``(positions, rotary_dim / 2)``. Row i of a sequence is at position
    ``seqlen_offsets + i``. ``conjugate`` turns back."""
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
    elif max_seqlen is None:
        raise AssertionError("max_seqlen is missing beside cu_seqlens")
    else:
        batch, seqlen = cu_seqlens.shape[0] - 1, max_seqlen
    _refuse(x, cos, sin, seqlen_offsets, seqlen, batch)
    if cu_seqlens is None:
        rows = torch.arange(seqlen, device=x.device).expand(batch, seqlen)
        start = seqlen_offsets[:, None] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
        moved, last = turned(x, cos, sin, rows + start, flag("interleaved", interleaved), conjugate), None
    else:
        sequence = sequence_of_rows(cu_seqlens, x.shape[0])
        start = seqlen_offsets[sequence] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
        place = torch.arange(x.shape[0], device=x.device) - cu_seqlens[sequence]
        moved = turned(x, cos, sin, place + start, flag("interleaved", interleaved), conjugate)
        last = cu_seqlens[-1]
    if last is not None:
        # Rows behind the last sequence belong to no sequence.
        inside = (torch.arange(x.shape[0], device=x.device) < last)[:, None, None]
        moved = torch.where(inside, moved, x)
    return x.copy_(moved) if inplace else moved


class ApplyRotaryEmb(torch.autograd.Function):
    """:func:`apply_rotary`, whose gradient is turned back."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
        out = apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)
        has_tensor = isinstance(seqlen_offsets, torch.Tensor)
        ctx.save_for_backward(cos, sin, cu_seqlens, seqlen_offsets if has_tensor else None)
        ctx.rest = None if has_tensor else seqlen_offsets, max_seqlen, interleaved
        if inplace:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx, dout):
        cos, sin, cu_seqlens, offsets = ctx.saved_tensors
        offset, max_seqlen, interleaved = ctx.rest
        offsets = offset if offsets is None else offsets
        dx = apply_rotary(dout, cos, sin, offsets, cu_seqlens, max_seqlen, interleaved, conjugate=True)
        return (dx, *(None,) * 7)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
) -> torch.Tensor:
    """As :func:`apply_rotary`, with a gradient of ``x``; ``inplace`` writes ``x`` and returns it."""
    return ApplyRotaryEmb.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


apply_rotary_emb_func = apply_rotary_emb


def _q_and_k(qkv: torch.Tensor, num_heads_q: Optional[int]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Views of Q and K in a tensor of all three."""
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise AssertionError(f"qkv has {qkv.shape[2]} tensors on axis 2, not 3")
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.dim() != 4:
        raise AssertionError(f"qkv has {qkv.dim()} axes, not 4 or 5")
    if num_heads_q is None:
        raise AssertionError("num_heads_q is missing for qkv of 4 axes")
    heads_k, rest = divmod(qkv.shape[2] - num_heads_q, 2)
    if rest or heads_k < 0:
        raise AssertionError(f"num_heads_q {num_heads_q} of {qkv.shape[2]} heads leaves no 2 equal parts for K and V")
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]


class ApplyRotaryEmbQKV_(torch.autograd.Function):
    """Q and K turned where they lie in one tensor."""

    @staticmethod
    def _turn(qkv, angles, interleaved, offsets, num_heads_q, conjugate=False):
        cos, sin, cos_k, sin_k = angles
        q, k = _q_and_k(qkv, num_heads_q)
        apply_rotary(q, cos, sin, offsets, interleaved=interleaved, inplace=True, conjugate=conjugate)
        cos, sin = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        apply_rotary(k, cos, sin, offsets, interleaved=interleaved, inplace=True, conjugate=conjugate)
        return qkv

    @staticmethod
    def forward(ctx, qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
        has_tensor = isinstance(seqlen_offsets, torch.Tensor)
        ctx.save_for_backward(cos, sin, cos_k, sin_k, seqlen_offsets if has_tensor else None)
        ctx.rest = None if has_tensor else seqlen_offsets, interleaved, num_heads_q
        ctx.mark_dirty(qkv)
        return ApplyRotaryEmbQKV_._turn(qkv, (cos, sin, cos_k, sin_k), interleaved, seqlen_offsets, num_heads_q)

    @staticmethod
    def backward(ctx, dqkv):
        *angles, offsets = ctx.saved_tensors
        offset, interleaved, num_heads_q = ctx.rest
        offsets = offset if offsets is None else offsets
        back = ApplyRotaryEmbQKV_._turn(dqkv.clone(), angles, interleaved, offsets, num_heads_q, conjugate=True)
        return (back, *(None,) * 7)


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: Optional[torch.Tensor] = None,
    sin_k: Optional[torch.Tensor] = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: Optional[int] = None,
) -> torch.Tensor:
    """``qkv`` ``(batch, seqlen, 3, nheads, headdim)``, or with ``num_heads_q`` ``(batch, seqlen, nheads_q + 2 nheads_k,
    headdim)``: Q and K turned in place, K by ``cos_k`` and ``sin_k`` where they are given."""
    return ApplyRotaryEmbQKV_.apply(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


class ApplyRotaryEmbKV_(torch.autograd.Function):
    """K turned where it lies beside V."""

    @staticmethod
    def forward(ctx, kv, cos, sin, interleaved=False, seqlen_offsets=0):
        if kv.dim() != 5 or kv.shape[2] != 2:
            raise AssertionError(f"kv has shape {tuple(kv.shape)}, not 5 axes with 2 on axis 2")
        has_tensor = isinstance(seqlen_offsets, torch.Tensor)
        ctx.save_for_backward(cos, sin, seqlen_offsets if has_tensor else None)
        ctx.rest = None if has_tensor else seqlen_offsets, interleaved
        ctx.mark_dirty(kv)
        apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
        return kv

    @staticmethod
    def backward(ctx, dkv):
        cos, sin, offsets = ctx.saved_tensors
        offset, interleaved = ctx.rest
        offsets = offset if offsets is None else offsets
        dkv = dkv.clone()
        apply_rotary(dkv[:, :, 0], cos, sin, offsets, interleaved=interleaved, inplace=True, conjugate=True)
        return (dkv, *(None,) * 4)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
) -> torch.Tensor:
    """``kv`` ``(batch, seqlen, 2, nheads, headdim)``: K turned in place."""
    return ApplyRotaryEmbKV_.apply(kv, cos, sin, interleaved, seqlen_offsets)


class RotaryEmbedding(torch.nn.Module):
    """Tables of angles ``position / base ** (2i / dim)``, and what they turn. With ``scale_base`` Q and K grow and
    shrink with the position (XPos), so that far keys weigh less."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: Optional[float] = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        growth = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", growth, persistent=False)
        self.inv_freq: torch.Tensor
        self.scale: Optional[torch.Tensor]
        self._seq_len_cached = 0
        self._cos_cached: Optional[torch.Tensor] = None
        self._sin_cached: Optional[torch.Tensor] = None
        self._cos_k_cached: Optional[torch.Tensor] = None
        self._sin_k_cached: Optional[torch.Tensor] = None

    def _compute_inv_freq(self, device: Any = None) -> torch.Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (even / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        kept = self._cos_cached
        if (
            kept is not None
            and seqlen <= self._seq_len_cached
            and (kept.device, kept.dtype) == (device, dtype)
            and not (self.training and kept.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        # Positions are large, so the angles are f32 whatever the model's type.
        frequency = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        angle = torch.outer(position, frequency.to(device))
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = angle.cos().to(dtype), angle.sin().to(dtype)
            return
        power = (position - seqlen // 2) / self.scale_base
        grown = self.scale.to(device=device, dtype=torch.float32) ** power[:, None]
        self._cos_cached, self._sin_cached = (angle.cos() * grown).to(dtype), (angle.sin() * grown).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (angle.cos() / grown).to(dtype), (angle.sin() / grown).to(dtype)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: Optional[torch.Tensor] = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: Optional[int] = None,
        num_heads_q: Optional[int] = None,
    ) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
        """``qkv`` as :func:`apply_rotary_emb_qkv_` takes it, turned in place; or Q ``(batch, seqlen, nheads, headdim)``
        beside ``kv`` ``(batch, seqlen, 2, nheads, headdim)``, both turned in place. ``max_seqlen`` bounds positions
        where ``seqlen_offset`` is a tensor."""
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        if self._cos_cached is None or self._sin_cached is None:
            raise AssertionError("max_seqlen is missing beside a seqlen_offset that is a tensor")
        tables = (self._cos_cached, self._sin_cached)
        tables_k = (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv,
                *tables,
                *tables_k,
                interleaved=self.interleaved,
                seqlen_offsets=seqlen_offset,
                num_heads_q=num_heads_q,
            )
        q = apply_rotary_emb(qkv, *tables, interleaved=self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        cos_k, sin_k = tables_k
        of_k = tables if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *of_k, interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
