"""``attn_implementation="fmha"`` for Hugging Face transformers: attention and mask function are registered together.

::

    import fmha.transformers
    fmha.transformers.install()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fmha")

The mask function matters: without one of its own, transformers gives an implementation no mask at all, and padded
batches come out wrong. A padded batch arrives as a 2-D mask of rows in use, and is computed packed.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from . import attention
from ._mask import Mask, NONE

NAME = "fmha"


def _packed(attention_mask: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, int]:
    """Indices of rows in use, their offsets, and the longest sequence's rows."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return indices, offsets, int(lengths.max())


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[torch.Tensor] = None,
    **rest: Any,
) -> Tuple[torch.Tensor, None]:
    """Q, K and V ``(batch, heads, seqlen, dim)``, as transformers hands them over; O ``(batch, seqlen, heads,
    dim)``."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if torch.is_autocast_enabled(query.device.type):
        # As torch's own attention: rotary embeddings leave Q and K in f32 beside a V of 16 bits.
        to = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(to), key.to(to), value.to(to)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, seqlen_q, heads, _ = q.shape
    if causal and seqlen_q > 0:
        # Its window counts the query itself: the last `sliding_window` keys are seen.
        left = -1 if sliding_window is None else sliding_window - 1
        band = Mask(2, left, 0)
    else:
        band = NONE if sliding_window is None else Mask(2, sliding_window - 1, sliding_window - 1)
    seed = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")) if dropout else 0
    shared: Dict[str, Any] = dict(
        mask=band,
        softmax_scale=scaling,
        softcap=softcap,
        sink=None if s_aux is None else s_aux.float(),
        p_drop=dropout,
        seed=seed,
    )
    offsets_q, offsets_k = rest.get("cu_seq_lens_q"), rest.get("cu_seq_lens_k")
    if offsets_q is not None and offsets_k is not None:
        # Packed by the caller: one row of the batch holds all sequences.
        o = attention(
            q.squeeze(0),
            k.squeeze(0),
            v.squeeze(0),
            cu_seqlens_q=offsets_q,
            cu_seqlens_k=offsets_k,
            max_seqlen_q=int(rest["max_length_q"]),
            max_seqlen_k=int(rest["max_length_k"]),
            **shared,
        )
        return o.unsqueeze(0), None
    if attention_mask is None:
        return attention(q, k, v, **shared), None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} axes, not the 2 of [batch, seqlen_k]: "
            "fmha.transformers.install() registers the mask function that makes it"
        )
    mask_k = attention_mask[:, -k.shape[1] :].bool()
    rows_k, offsets_k, longest_k = _packed(mask_k)
    mask_q = mask_k[:, -seqlen_q:]
    rows_q, offsets_q, longest_q = _packed(mask_q)
    flat = lambda x, rows: x.reshape(-1, *x.shape[2:])[rows]
    o = attention(
        flat(q, rows_q),
        flat(k, rows_k),
        flat(v, rows_k),
        cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        **shared,
    )
    out = o.new_zeros((batch * seqlen_q, heads, o.shape[-1]))
    out = out.index_put((rows_q,), o)
    return out.view(batch, seqlen_q, heads, -1), None


def install() -> None:
    """Registers ``"fmha"`` with transformers; again is no harm."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
