"""Scales by blocks: what a call takes beside Q, K and V that are stored in MXFP8 or NVFP4."""

from __future__ import annotations

from typing import Any, Tuple


class BlockScales:
    """Scales by blocks of Q, K and V in one format. The CPU computes them, Blackwell's
    ``sm100`` those of MXFP8, and any GPU where ``allow_fallback`` is given. Gradients are those of the values, by the
    CPU, by Blackwell where values are bfloat16, and by any GPU where ``allow_fallback`` is given.

    Args:
        q: bytes ``[batch, seqlen_q, num_heads_q, ceil(head_dim_qk / block)]``, packed as Q.
        k: bytes ``[batch, seqlen_k, num_heads_kv, ceil(head_dim_qk / block)]``, paged as K.
        v: bytes ``[batch, ceil(seqlen_k / block), num_heads_kv, head_dim_v]``, paged ``[num_pages, page_size / block,
            num_heads_kv, head_dim_v]``: blocks of V are keys.
        format: ``"mxfp8_e4m3"`` or ``"mxfp8_e5m2"`` (a block has 32 elements, scales are ``uint8`` or
            ``float8_e8m0fnu``), or ``"nvfp4"`` (16; ``uint8`` or ``float8_e4m3fn``; Q, K and V are ``uint8`` or
            ``float4_e2m1fn_x2``, a byte a pair).
        values: type of the values, torch's ``bfloat16`` (``None``) or ``float32``: O's, where the call names none.
        descales: scales of whole tensors, f32, as ``descale_q``, ``descale_k`` and ``descale_v`` of the call.
        of: tensors from which Q, K and V were converted, of the values' shapes: they get the gradients of the values,
            as if the conversion were the identity. :meth:`quantize` names those that it was given.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        format: str,
        values: Any = None,
        descales: Tuple[Any, Any, Any] = (None,) * 3,
        of: Tuple[Any, Any, Any] = (None,) * 3,
    ) -> None:
        import torch

        self.q, self.k, self.v, self.format = q, k, v, format
        self.values = torch.bfloat16 if values is None else values
        self.descales, self.of = descales, of

    @classmethod
    def quantize(
        cls, q: Any, k: Any, v: Any, format: str, v_columns: bool = False
    ) -> Tuple[Any, Any, Any, "BlockScales"]:
        """Q, K and V of torch's in this format, and their scales: what :func:`fmha.attention` takes.

        Each is ``[batch, seqlen, heads, dim]``; Q may be packed, K and V may be pages that hold whole blocks. A scale
        of MXFP8 is the smallest power of two with which no element of its block saturates, one of NVFP4 the block's
        largest magnitude / 6 / the tensor's scale, rounded to nearest. A kernel converts them on their device, to the
        same bits on each. A call on the result has gradients, of Q, K and V as they are given here. ``v_columns``: V
        is column-major, its keys one after another, so that two of NVFP4 share a byte.
        """
        import torch

        from . import _scales

        given = (q, k, v)
        wanted = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given)
        of = given if wanted else (None,) * 3
        (q, of_q, by_q), (k, of_k, by_k), (v, of_v, by_v) = (
            _scales.quantize(x, format, axis, None, columns, field)
            for field, x, axis, columns in (("q", q, -1, False), ("k", k, -1, False), ("v", v, -3, v_columns))
        )
        if _scales.known(format).elems_per_byte == 1:
            return q, k, v, cls(of_q, of_k, of_v, format, of=of)
        return q, k, v, cls(of_q, of_k, of_v, format, descales=(by_q, by_k, by_v), of=of)
