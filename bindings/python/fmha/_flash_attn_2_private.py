"""FlashAttention 2's entry points below its functions, which frameworks call: forwards and backwards apart, with the
seed handed from one to the other. Their results have no gradients. A context (:class:`fmha.row_invariant`) has to be
around the backwards too, which nobody tells what it asked of the forwards."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from . import _marks, _torch
from ._mask import Mask, from_window_size
from ._theirs import attention, bind
from .flash_attn import _seed, integer, refuse_outputs

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "maybe_contiguous",
    "round_multiple",
]

#: FlashAttention's tests read this flag to learn whose kernels run.
USE_TRITON_ROCM = False


def maybe_contiguous(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    return -(-x // m) * m


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """How many keys share one maximum in S_dmask: all of a row's."""
    if head_dim > 256:
        raise AssertionError(f"head_dim {head_dim} is above 256")
    return _marks.BLOCK


def _run(q, k, v, mask: Mask, dropout_p, softmax_scale, softcap, alibi_slopes, return_softmax, **lengths) -> Any:
    if return_softmax and not dropout_p:
        raise RuntimeError(f"return_softmax is True, but dropout_p is {dropout_p}: marks are of dropout")
    if return_softmax and "block_table" in lengths:
        raise NotImplementedError("return_softmax is given beside block_table: marks are of packed or dense keys")
    seed, offset = _seed(dropout_p)
    rest = dict(softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes)
    drops = dict(p_drop=dropout_p, seed=seed, offset=offset)
    with torch.no_grad():
        out, lse = attention(q, k, v, mask=mask, return_lse=True, **rest, **drops, **lengths)
    marks = q.new_empty(0)
    if return_softmax:
        marks = _marks.marks(q, k, mask, **drops, **rest, **lengths)
    # The seed lies on the CPU, so that reading it does not wait for a device.
    return out, lse, marks, torch.tensor([seed, offset], dtype=torch.int64, device="cpu")


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    return_softmax: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, lse, S_dmask, rng_state)``; S_dmask has no elements without ``return_softmax``, and ``rng_state`` is
    seed and offset."""
    mask = from_window_size((window_size_left, window_size_right), causal)
    return _run(q, k, v, mask, dropout_p, softmax_scale, softcap, alibi_slopes, return_softmax)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`_flash_attn_forward`, of packed rows. ``zero_tensors`` is so in any case, and ``num_splits`` a hint."""
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k is given: packed keys begin at cu_seqlens_k")
    lengths = dict(
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=integer("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=integer("max_seqlen_k", max_seqlen_k),
    )
    if seqused_k is not None:
        if return_softmax:
            raise NotImplementedError("return_softmax is given beside seqused_k: marks are of whole sequences")
        lengths["seqused_k"] = seqused_k
    if block_table is None:
        lengths["cu_seqlens_k"] = cu_seqlens_k
    else:
        lengths["block_table"] = block_table
        lengths.setdefault("seqused_k", cu_seqlens_k.diff().to(torch.int32))
    mask = from_window_size((window_size_left, window_size_right), causal)
    return _run(q, k, v, mask, dropout_p, softmax_scale, softcap, alibi_slopes, return_softmax, **lengths)


def products_of_rows(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The sum of dO O over each row: f32, as LSE lies."""
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


def gradients_into(
    written: Tuple[Optional[torch.Tensor], ...],
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    alibi_slopes: Optional[torch.Tensor],
    lengths: Tuple[Optional[torch.Tensor], ...],
    **call: Any,
) -> Tuple[torch.Tensor, ...]:
    """dQ, dK and dV, in tensors of the caller's where they are given."""
    refuse_outputs(**{name: (into, x.shape) for name, into, x in zip(("dq", "dk", "dv"), written, (q, k, v))})
    _, numbers = bind(**call)
    dense = [_torch.last_is_dense(x) for x in (dout, q, k, v, out)]
    # FlashAttention 2 gives +inf as the LSE of a row without keys.
    lse = torch.where(torch.isposinf(lse), -torch.inf, lse).contiguous()
    with torch.no_grad():
        made = _torch.backward(*dense, lse, None, None, alibi_slopes, None, *lengths, *numbers)
    for x, given in zip(made, written):
        if given is not None:
            given.copy_(x)
    return tuple(x if given is None else given for x, given in zip(made[:3], written))


def _drops(dropout_p: float, rng_state: Optional[torch.Tensor]) -> Any:
    if not dropout_p:
        return {}
    if rng_state is None:
        raise RuntimeError(f"rng_state is missing beside dropout_p {dropout_p}: it says what forward left out")
    seed, offset = rng_state.tolist()
    return dict(p_drop=dropout_p, seed=seed, offset=offset)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Writes ``dq``, ``dk`` and ``dv``; gives the sums of dO O, f32 ``(batch, nheads, seqlen_q)`` with the last axis
    padded by 0 to a multiple of 128."""
    gradients_into(
        (dq, dk, dv),
        *(dout, q, k, v, out, softmax_lse, alibi_slopes),
        (None,) * 4,
        mask=from_window_size((window_size_left, window_size_right), causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        **_drops(dropout_p, rng_state),
    )
    sums = products_of_rows(dout, out)
    return torch.nn.functional.pad(sums, (0, _marks.rounded(sums.shape[-1]) - sums.shape[-1]))


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """As :func:`_flash_attn_backward`, of packed rows; the sums ``(nheads, total_q + 128 batch)``, where sequence b
    begins at the multiple of 128 at or below ``cu_seqlens_q[b] + 128 b``."""
    gradients_into(
        (dq, dk, dv),
        *(dout, q, k, v, out, softmax_lse, alibi_slopes),
        (cu_seqlens_q, cu_seqlens_k, None, None),
        mask=from_window_size((window_size_left, window_size_right), causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        max_seqlen_q=integer("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=integer("max_seqlen_k", max_seqlen_k),
        **_drops(dropout_p, rng_state),
    )
    return by_sequence(products_of_rows(dout, out), cu_seqlens_q)


def by_sequence(sums: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """Numbers of packed rows where each sequence begins at a multiple of 128, 0 between them."""
    from .rotary import sequence_of_rows

    batch, total = cu_seqlens_q.shape[0] - 1, sums.shape[-1]
    sequence = sequence_of_rows(cu_seqlens_q, total)
    starts = (cu_seqlens_q[:-1].long() + 128 * torch.arange(batch, device=sums.device)) // 128 * 128
    at = starts[sequence] + torch.arange(total, device=sums.device) - cu_seqlens_q[sequence]
    made = sums.new_zeros((sums.shape[0], total + 128 * batch))
    row = torch.arange(total, device=sums.device)
    # Rows in front of the first sequence belong to no sequence, and neither do rows behind the last one.
    inside = (row >= cu_seqlens_q[0]) & (row < cu_seqlens_q[-1])
    return made.index_add(1, at.clamp(0, max(made.shape[1] - 1, 0)), torch.where(inside, sums, 0))


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
