"""Latent attention over lists of keys for vLLM, for models that are trained sparse (DeepSeek-V3.2, GLM-5):
``vllm serve ... --attention-backend FMHA_SPARSE``.

vLLM's indexer chooses the keys; this backend attends to them. Its own backends' names lead here too, where the
environment lists them, ``FMHA_VLLM_SPARSE=FLASHMLA_SPARSE,FLASHINFER_MLA_SPARSE``: a model or a script that asks for
one of them gets this backend. Names: FLASHMLA_SPARSE, FLASHINFER_MLA_SPARSE, FLASH_ATTN_MLA_SPARSE.

Caches of 16 bits, 576 or 512 elements a row, and FlashMLA's rows of 656 bytes (``fp8_ds_mla``; under FLASHMLA_SPARSE
``fp8`` means them). Prompts and decoding take one path, whose lists are positions, read with the block table on the
device. Tested on the CPU, against a stand-in and inside of vLLM 0.32's and 0.31's own registry, check and base classes.
Nobody has served a model with it, and no GPU has run it; it is captured into no CUDA graph. Context parallelism, sparse
caches on the host, sinks and every other quantised cache are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MLAAttentionImpl

from . import vllm as _dense
from ._lists import Lists, forward
from ._serving import bound
from ._theirs import bind

#: Bytes of a row of FlashMLA's format, and the cache types that vLLM stores in it.
_ROW_BYTES = 656
_OF_BYTES = ("fp8_ds_mla",)


@dataclass
class Metadata(_dense.Metadata):
    """What all layers of a step share. Every token takes the path of lists, so all count as decoded ones."""

    num_reqs: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    prefill: None = None


class Builder(_dense.Builder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        ranks = getattr(vllm_config, "parallel_config", None)
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            size = getattr(ranks, name, 1)
            if size > 1:
                raise NotImplementedError(f"{name} {size}: lists of keys are not cut over ranks")
        options = getattr(vllm_config, "attention_config", None)
        if getattr(options, "hisparse_config", None) is not None:
            raise NotImplementedError("hisparse_config is given: caches on the host are not read")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        dense = super().build(common_prefix_len, common, fast_build)
        requests = dense.query_start_loc.shape[0] - 1
        counts = dict(num_reqs=requests, num_decodes=requests, num_decode_tokens=dense.num_actual_tokens)
        return Metadata(**{**vars(dense), **counts})

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        return Metadata(**{**vars(metadata), "block_table": blk_table, "slot_mapping": slot_mapping})


class Impl(MLAAttentionImpl):
    """One layer's attention: :meth:`forward_mqa` over the keys that the indexer has listed."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    supports_pcp: bool = False
    supports_quant_query_input: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Optional[List[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: Optional[str] = None,
        q_lora_rank: Optional[int] = None,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        qk_head_dim: int = 192,
        v_head_dim: int = 128,
        kv_b_proj: Any = None,
        indexer: Any = None,
        topk_indices_buffer: Optional[torch.Tensor] = None,
        index_group_builder: Any = None,
        q_pad_num_heads: Optional[int] = None,
        **beside: Any,
    ) -> None:
        # Arguments that are not read: q_lora_rank, qk_nope_head_dim, qk_head_dim, v_head_dim and kv_b_proj belong to
        # the layer's projections and to a dense prefill. Kernels take any number of heads, so q_pad_num_heads is no
        # need; lists are not converted, so index_group_builder has nothing to share.
        refused: Dict[str, Any] = dict(alibi_slopes=alibi_slopes, sliding_window=sliding_window)
        refused.update(logits_soft_cap=logits_soft_cap, kv_sharing_target_layer_name=kv_sharing_target_layer_name, **beside)
        for name, value in refused.items():
            if isinstance(value, torch.Tensor) or value:
                raise NotImplementedError(f"{name} is given: latent attention over lists does not take it")
        if attn_type != "decoder":
            raise NotImplementedError(f"attn_type {attn_type} is not decoder")
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads {num_kv_heads} is not 1: a latent row is shared by all heads")
        if head_size != kv_lora_rank + qk_rope_head_dim:
            raise ValueError(
                f"head_size {head_size} is not kv_lora_rank {kv_lora_rank} and qk_rope_head_dim {qk_rope_head_dim}"
            )
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype {kv_cache_dtype} is none of {', '.join(Backend.supported_kv_cache_dtypes)}"
            )
        if indexer is None and topk_indices_buffer is None:
            raise ValueError("indexer and topk_indices_buffer are None: one of them has the lists")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), 1
        self.kv_cache_dtype, self.kv_lora_rank = kv_cache_dtype, kv_lora_rank
        self._indexer, self._lists = indexer, topk_indices_buffer

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """i32 ``[tokens, topk]``: positions in a request, -1 absent. An indexer may be given another buffer later, so
        it is asked each time."""
        buffer: Any = self._lists if self._indexer is None else self._indexer.topk_indices_buffer
        return buffer  # type: ignore[no-any-return]

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        self._indexer, self._lists = None, buffer

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Metadata, layer: Any
    ) -> Tuple[torch.Tensor, None]:
        """Q ``[tokens, num_heads, head_size]``, or its two parts; the cache ``[num_blocks, block_size, row]``. Gives O
        ``[tokens, num_heads, kv_lora_rank]``."""
        m = attn_metadata
        rows = torch.cat(q, -1) if isinstance(q, tuple) else q
        if rows.shape[-1] != self.head_size:
            raise ValueError(f"q has rows of {rows.shape[-1]} elements, not head_size {self.head_size}")
        cache = kv_c_and_k_pe_cache
        if self.kv_cache_dtype in _OF_BYTES:
            cache = cache.view(torch.uint8)
            if cache.shape[-1] != _ROW_BYTES:
                said = f"a cache of {self.kv_cache_dtype} has rows of {cache.shape[-1]} bytes"
                raise ValueError(f"{said}, not {_ROW_BYTES}")
        elif cache.dtype != rows.dtype:
            raise ValueError(f"kv_cache is of {cache.dtype}, but q of {rows.dtype}")
        tokens = rows.shape[0]
        indices = self.topk_indices_buffer[:tokens, None]
        bounds = dict(max_seqlen_q=bound(m.max_query_len, tokens), max_seqlen_k=m.max_seq_len)
        _, numbers = bind(softmax_scale=self.scale, batch_invariant=_dense._batch_invariant(), **bounds)
        named = [
            ("cu_seqlens_q", m.query_start_loc),
            ("seqused_k", m.seq_lens),
            ("block_table", m.block_table),
        ]
        o, _ = forward(rows, cache[:, :, None], None, named, (*numbers, 0, self.kv_lora_rank), Lists(indices))
        return o, None


class Backend(AttentionBackend):
    """What vLLM asks before it takes the backend; each refusal is listed by vLLM with those of the others."""

    supported_dtypes: ClassVar[List[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[List[str]] = ["auto", "float16", "bfloat16", *_OF_BYTES]

    @staticmethod
    def get_name() -> str:
        return "FMHA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def get_supported_head_sizes(cls) -> List[int]:
        return [576, 512]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Optional[str],
        block_size: Optional[int],
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> Optional[str]:
        """Why not, in words; ``None``: it is taken."""
        # vLLM allocates rows of bytes for "fp8" and for its other names of the format.
        if kv_cache_dtype in (*_OF_BYTES, "fp8") and (dtype != torch.bfloat16 or head_size != 576):
            return f"rows of {_ROW_BYTES} bytes go with bfloat16 and head_size 576, not {dtype} and {head_size}"
        major = getattr(device_capability, "major", 8)
        return f"compute capability {major} is below 8" if major < 8 else None


# vLLM looks a backend up by the name that the backend gives, so each name has a class.


class FLASHMLA_SPARSE(Backend):
    #: vLLM's layer turns ``fp8`` into fp8_ds_mla for a backend of this name.
    supported_kv_cache_dtypes: ClassVar[List[str]] = [*Backend.supported_kv_cache_dtypes, "fp8"]

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"


class FLASHINFER_MLA_SPARSE(Backend):
    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA_SPARSE"


class FLASH_ATTN_MLA_SPARSE(Backend):
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA_SPARSE"
