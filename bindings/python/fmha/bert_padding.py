"""Padded batches to packed rows and back, by the names that ``flash_attn.bert_padding`` has."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of ``(total, ...)``: ``(len(indices), ...)``."""
    return x.index_select(0, indices)


def index_first_axis_residual(x: torch.Tensor, indices: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Those rows, and ``x`` itself for what is added behind them; the gradients of both add up."""
    return index_first_axis(x, indices), x.view_as(x)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Rows put back among ``first_axis_dim`` rows, the others 0."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """``(total, ...)`` to ``(batch, seqlen, ...)``, 0 where there is no row."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Optional[torch.Tensor] = None
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """``(batch, seqlen, ...)`` and the mask of its rows, ``(batch, seqlen)``: rows ``(total, ...)``, their indices,
    ``cu_seqlens`` i32 ``(batch + 1)``, the longest sequence's rows, and rows in use i32 ``(batch)``. Rows of
    ``unused_mask`` are kept, but not in use."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, offsets, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """As :func:`unpad_input` where a row of ``hidden_states`` holds several sequences one behind another. Row b of
    ``attention_mask_in_length`` ``(batch, seqlen)`` has their lengths in front, and 0 after them."""
    in_use = attention_mask_in_length.sum(-1, keepdim=True)
    place = torch.arange(attention_mask_in_length.shape[-1], device=in_use.device)
    indices = (place < in_use).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, int(lengths.max())
