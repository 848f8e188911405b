"""Latent attention over lists of keys for SGLang, for models that are trained sparse (DeepSeek-V3.2, GLM-5):
``FMHA_SGLANG_SPARSE=dsa`` in the environment, and SGLang's own names, ``--attention-backend dsa`` (``nsa`` in older
ones), ``--dsa-prefill-backend flashmla_sparse``, ``--dsa-decode-backend flashmla_kv``.

Metadata, indexer and pools stay SGLang's: this is its own backend, whose two implementations of those names compute by
this package's kernels. A cache in 16 bits is read as it lies under both names; one in FP8 has rows of 656 bytes. Every
other implementation (``fa3``, ``tilelang``, ``trtllm``, ...) is refused by name. Made for SGLang 0.5.23's and 0.5.22's
signatures, and tested on the CPU against a stand-in of its backend alone: neither a real engine nor a GPU has run it.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

from .flash_mla import _attend, flash_mla_with_kvcache

#: SGLang's names of sparse implementations that this library replaces.
TAKEN = ("flashmla_sparse", "flashmla_kv")


class Backend(DeepseekSparseAttnBackend):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for field in ("dsa_prefill_impl", "dsa_decode_impl"):
            asked = getattr(self, field)
            if asked not in TAKEN:
                raise NotImplementedError(f"{field} {asked} is none of {', '.join(TAKEN)}, which compute here")

    def _forward_flashmla_sparse(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
        topk_length: Optional[torch.Tensor] = None,
        attn_sink: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Q ``[tokens, heads, dim]`` over rows ``[rows, 1, dim]`` of the pool, which ``page_table_1`` lists, i32
        ``[tokens, topk]``; O ``[tokens, heads, v_head_dim]``. Any number of heads."""
        rows = kv_cache.view(1, -1, 1, q_all.shape[-1])
        if topk_length is not None:
            padding = q_all.shape[0] - topk_length.shape[0]
            if padding < 0:
                raise ValueError(f"topk_length has {topk_length.shape[0]} tokens, not {q_all.shape[0]} as q_all")
            # SGLang pads the batch with tokens that have no length; their lists mark absent keys.
            topk_length = torch.nn.functional.pad(topk_length, (0, padding), value=page_table_1.shape[1])
        lengths = None if topk_length is None else topk_length[None]
        listed = page_table_1[None, :, None]
        o, _ = _attend(q_all[None], rows, listed, v_head_dim, sm_scale, attn_sink, lengths, addresses=False)
        return o[0]

    def _forward_flashmla_kv(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: torch.Tensor,
    ) -> torch.Tensor:
        """Likewise over pages, of 16 bits or of rows of 656 bytes; O ``[tokens, 1, heads, v_head_dim]``."""
        layout = getattr(self, "flashmla_kv_format", "V32")
        if layout != "V32":
            raise NotImplementedError(f"flashmla_kv_format {layout} is not V32, whose rows have a rotary part")
        q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        is_fp8 = bool(self.dsa_kv_cache_store_fp8)
        pages = kv_cache.view(-1, self.physical_page_size, 1, self.kv_cache_dim if is_fp8 else layer.head_dim)
        o, _ = flash_mla_with_kvcache(
            q,
            pages,
            None,
            None,
            v_head_dim,
            softmax_scale=sm_scale,
            is_fp8_kvcache=is_fp8,
            indices=page_table_1[:, None],
        )
        return o
