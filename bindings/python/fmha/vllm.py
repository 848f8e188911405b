"""An attention backend of vLLM's, found by its plugin entry point: ``vllm serve ... --attention-backend FMHA``.

Made for vLLM 0.33's interface; before 0.32, which has no names of plugins' own, it is ``--attention-backend CUSTOM``.
Tested on the CPU and an H200, against a stand-in of its base classes and metadata, and inside of vLLM 0.32's and 0.31's
own registry, check, scheduler, cache manager, base classes and metadata, the rest of the engine stubbed.

Decoder attention over the paged cache in 16 bits or FP8, with windows, sinks, soft-cap, ALiBi, batch invariance, causal
and not. CUDA graphs of any batch (``ALWAYS``): a graph's plan has its tokens for the longest query, unless the engine
promises less, and its pages for the longest cache, so it serves whatever lengths it is replayed for. What vLLM asks for
besides is refused by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, List, Optional, Tuple

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from ._serving import Numbers, bound
from ._torch import forward_out

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass
class Metadata:
    """What all layers of a step share; lengths and pages stay on the device."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    #: Upper bound of the queries' lengths. Plans are kept by such bounds.
    max_query_len: int
    max_seq_len: int
    causal: bool


class Builder(AttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError("causal is a tensor, a mask for each request, which no kernel takes")
        return Metadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            bound(common.max_query_len, common.num_actual_tokens),
            bound(common.max_seq_len, common.block_table_tensor.shape[1] * self.block_size),
            common.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """What a graph is captured with: bounds of every step that it is replayed for, not those of this one."""
        metadata = self.build(0, common_attn_metadata)
        requests, pages = metadata.block_table.shape
        metadata.max_seq_len = pages * self.block_size
        # The longest query is a bound for later replays only if all requests have equally many queries.
        if common_attn_metadata.max_query_len * requests != metadata.num_actual_tokens:
            metadata.max_query_len = metadata.num_actual_tokens
        return metadata

    def update_block_table(self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        return Metadata(**{**vars(metadata), "block_table": blk_table, "slot_mapping": slot_mapping})


class Impl(AttentionImpl):
    """One layer's attention; :meth:`forward` writes ``output``."""

    #: The LSE is always a natural logarithm.
    lse_base_on_e: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Optional[int] = None,
        alibi_slopes: Optional[List[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[torch.Tensor] = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type {attn_type} is not {AttentionType.DECODER}")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype {kv_cache_dtype} is none of {', '.join(Backend.supported_kv_cache_dtypes)}"
            )
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window {sliding_window} is below 1, the query itself")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.alibi_slopes = slopes
        # vLLM's window counts the query itself.
        left = None if sliding_window is None else sliding_window - 1
        self._numbers = Numbers(self.scale, logits_soft_cap or 0.0, left, _batch_invariant())
        self._kept: Tuple[Any, Any, Any] = (None, None, None)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        # A layer loads its sinks in the model's type.
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float().contiguous()

    def _cache(self, kv_cache: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """K and V as pages ``[num_blocks, block_size, num_kv_heads, head_size]`` of one tensor ``[num_blocks,
        num_kv_heads, block_size, 2 head_size]``; views are slow on the host, so they are kept."""
        if self._kept[0] is not kv_cache:
            if kv_cache.shape[1] != self.num_kv_heads:
                raise ValueError(
                    f"num_kv_heads {self.num_kv_heads} is not the {kv_cache.shape[1]} of the cache"
                )
            pages = kv_cache.view(_FP8[self.kv_cache_dtype]) if self.kv_cache_dtype in _FP8 else kv_cache
            k, v = pages.transpose(1, 2).split(self.head_size, dim=-1)
            self._kept = (kv_cache, k, v)
        return self._kept[1:]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Optional[Metadata],
        output: torch.Tensor,
        output_scale: Optional[torch.Tensor] = None,
        output_block_scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Q ``[num_tokens, num_heads, head_size]`` over the cache, which has this step's keys already."""
        for name, scales in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if scales is not None:
                raise NotImplementedError(f"{name} is given: O is written in 16 bits")
        if attn_metadata is None:
            # The engine is only measuring memory, so the output is zeros.
            return output.fill_(0)
        k, v = self._cache(kv_cache)
        m = attn_metadata
        if query.shape[0] != m.num_actual_tokens:
            query, written = query[: m.num_actual_tokens], output[: m.num_actual_tokens]
        else:
            written = output
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if self.kv_cache_dtype in _FP8 else (None, None)
        forward_out(
            query,
            k,
            v,
            None,
            self.alibi_slopes,
            self.sinks,
            m.query_start_loc,
            None,
            None,
            m.seq_lens,
            m.block_table,
            None,
            k_scale,
            v_scale,
            None,
            written,
            None,
            None,
            *self._numbers.of(m.max_query_len, m.max_seq_len, m.causal),
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes a step's keys and values by vLLM's own operator; a slot below 0 is padding."""
        from vllm._custom_ops import reshape_and_cache_flash

        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        reshape_and_cache_flash(key, value, k, v, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)


def _batch_invariant() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


class Backend(AttentionBackend):
    """What vLLM asks before it takes the backend; each refusal is listed by vLLM with those of the others."""

    supported_dtypes: ClassVar[List[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[List[str]] = ["auto", "float16", "bfloat16", *_FP8]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "FMHA"

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # The plan has the longest query that the host knows; a longer query on the device would be left out.
        return False

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
        if use_mla or use_sparse:
            return "latent rows and lists of keys are FMHA_SPARSE's, not this backend's"
        major = getattr(device_capability, "major", 8)
        return f"compute capability {major} is below 8" if major < 8 else None
