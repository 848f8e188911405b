"""An attention backend of SGLang's, found by its plugin entry point: ``--attention-backend fmha``.

Made for SGLang 0.5.23's interface. Tested on the CPU and an H200, against a stand-in of its base class, pools and
batches, and inside of its own registry, base class and modes, the rest of the engine stubbed. Nobody has served a model
with it yet.

Decoding and extending over the token pool, whose pages are the block table's, with windows, sinks and soft-cap. CUDA
graphs of decoding: lengths and pages are read on the device. Speculative verification, cross and encoder attention,
pools of 8 bits and pools of sliding windows are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from . import _keywords
from ._serving import Numbers, bound
from ._torch import forward_out


@dataclass
class Metadata:
    """What all layers of a step share."""

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    #: Upper bound of the queries' lengths. Plans are kept by such bounds.
    max_seqlen_q: int
    max_seqlen_k: int


class Backend(AttentionBackend):
    #: Whether the host must have the lengths: no, the device reads them. Where the host has them they bound the
    #: longest.
    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.pool = runner.token_to_kv_pool
        if hasattr(self.pool, "swa_layer_nums") and self.pool.swa_layer_nums > 0:
            raise NotImplementedError(f"a pool of sliding windows has {self.pool.swa_layer_nums} layers of its own")
        self.page_size = int(runner.page_size)
        self.longest = int(self.req_to_token.shape[1])
        self.forward_metadata: Optional[Metadata] = None
        self._numbers: Dict[int, Numbers] = {}

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing is kept for graphs: what a step derives is derived inside of the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._derive(forward_batch, self._longest(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        _mode(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        # A graph is recorded once and replayed for all lengths, so the pool's own length bounds them.
        self._derive(forward_batch, self.longest)

    def _longest(self, batch: Any) -> int:
        lengths = getattr(batch, "seq_lens_cpu", None)
        return self.longest if lengths is None or len(lengths) == 0 else bound(int(max(lengths)), self.longest)

    def _derive(self, batch: Any, longest: int) -> None:
        device = batch.seq_lens.device
        if _mode(batch) == "decode":
            rows = torch.arange(batch.seq_lens.shape[0] + 1, dtype=torch.int32, device=device)
            max_seqlen_q = 1
        else:
            rows = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            max_seqlen_q = bound(int(max(batch.extend_seq_lens_cpu)), self.longest)
        # A request's tokens lie page by page, so each page's first token gives the page's number.
        first = self.req_to_token[:, : longest : self.page_size]
        table = (first[batch.req_pool_indices] // self.page_size).to(torch.int32)
        self.forward_metadata = Metadata(rows, batch.seq_lens.to(torch.int32), table, max_seqlen_q, longest)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **rest: Any
    ) -> Any:
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, **rest)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **rest: Any
    ) -> Any:
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, **rest)

    def _run(
        self,
        q: torch.Tensor,
        k: Optional[torch.Tensor],
        v: Optional[torch.Tensor],
        layer: Any,
        batch: Any,
        save_kv_cache: bool,
        sinks: Optional[torch.Tensor] = None,
        **rest: Any,
    ) -> torch.Tensor:
        """Q ``[num_tokens, heads x head_dim]`` over the pool; O ``[num_tokens, heads x v_head_dim]``."""
        _keywords.refuse(rest)
        kind = getattr(layer.attn_type, "value", layer.attn_type)
        if layer.is_cross_attention or kind != "decoder":
            raise NotImplementedError(f"layer {layer.layer_id} is of {kind} attention, not of a decoder's")
        if save_kv_cache and k is not None and v is not None:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            self.pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        numbers = self._numbers.get(layer.layer_id)
        if numbers is None:
            # SGLang's window does not count the query itself.
            window = layer.sliding_window_size
            left = None if window is None or window < 0 else window
            numbers = self._numbers[layer.layer_id] = Numbers(layer.scaling, layer.logit_cap or 0.0, left, False)
        keys, values = self._pages(layer)
        if keys.element_size() < 2:
            raise NotImplementedError(f"kv_cache_dtype: the pool is of {keys.dtype}, and its scales are not taken here")
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        o = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        m = self.forward_metadata
        if m is None:
            raise RuntimeError("forward_metadata is None: init_forward_metadata comes first")
        forward_out(
            q,
            keys,
            values,
            None,
            None,
            None if sinks is None else sinks.float(),
            m.cu_seqlens_q,
            None,
            None,
            m.seqused_k,
            m.block_table,
            None,
            None,
            None,
            None,
            o,
            None,
            None,
            *numbers.of(m.max_seqlen_q, m.max_seqlen_k),
        )
        return o.view(q.shape[0], -1)

    def _pages(self, layer: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """The pool's rows as pages; it has whole pages of them."""
        return tuple(
            rows.unflatten(0, (-1, self.page_size))
            for rows in (self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id))
        )  # type: ignore[return-value]


def _mode(batch: Any) -> str:
    """What of a batch's modes this one is."""
    mode = batch.forward_mode
    if mode.is_decode():
        return "decode"
    if mode.is_target_verify() or getattr(mode, "is_draft_extend_v2", lambda: False)():
        raise NotImplementedError(f"forward_mode {mode} is speculative, whose masks this backend does not take")
    return "extend"
