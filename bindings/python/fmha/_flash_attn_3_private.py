"""FlashAttention 3's entry points below its functions: ``_flash_attn_forward``, ``_flash_attn_backward``, and the
operators ``torch.ops.flash_attn_3.*``, which frameworks call. The forwards are differentiable, as there. A
context (:class:`fmha.row_invariant`) has to be around ``_flash_attn_backward`` too."""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Tuple

import torch

from . import _layouts
from ._flash_attn_2_private import by_sequence, gradients_into, maybe_contiguous, products_of_rows, round_multiple
from ._mask import from_window_size
from .flash_attn import integer, num_sequences, over_cache, refuse_outputs
from .flash_attn_3 import _attend, _descales, flash_attn_combine, whole_chunk

__all__ = ["_flash_attn_backward", "_flash_attn_forward", "maybe_contiguous", "round_multiple"]


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: Optional[torch.Tensor] = None,
    v_new: Optional[torch.Tensor] = None,
    qv: Optional[torch.Tensor] = None,
    out_: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    page_table: Optional[torch.Tensor] = None,
    kv_batch_idx: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    seqlens_rotary: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[torch.Tensor] = None,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, lse, out_accum, lse_accum)``, the last two without elements: partial results are not given out."""
    for name, offsets, longest in (
        ("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
        ("max_seqlen_k", cu_seqlens_k, max_seqlen_k),
    ):
        if offsets is not None and longest is None:
            raise ValueError(f"{name} is missing beside its cu_seqlens")
    refuse_outputs(out_=(out_, (*q.shape[:-1], v.shape[-1])))
    call: Dict[str, Any] = dict(
        mask=from_window_size((window_size_left, window_size_right), causal),
        softmax_scale=_layouts.scale_of(q, qv, softmax_scale),
        softcap=softcap,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=0 if cu_seqlens_q is None else integer("max_seqlen_q", max_seqlen_q),  # type: ignore[arg-type]
        **_descales((q, k, v), q_descale, k_descale, v_descale),
    )
    chunk = whole_chunk(attention_chunk)
    where = dict(
        k_new=k_new,
        v_new=v_new,
        cu_seqlens_k_new=cu_seqlens_k_new,
        page_table=page_table,
        kv_batch_idx=kv_batch_idx,
        leftpad_k=leftpad_k,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary,
    )
    of_cache = next((name for name, x in where.items() if x is not None), None)
    if of_cache is None:
        softmax_scale = call.pop("softmax_scale")
        call.update(seqused_q=seqused_q, seqused_k=seqused_k, cu_seqlens_k=cu_seqlens_k)
        if cu_seqlens_k is not None:
            call["max_seqlen_k"] = integer("max_seqlen_k", max_seqlen_k)  # type: ignore[arg-type]
        out, lse = _attend(q, k, v, qv, chunk, softmax_scale, **call)
    else:
        for name, given in (("cu_seqlens_k", cu_seqlens_k), ("seqused_q", seqused_q)):
            if given is not None:
                raise NotImplementedError(f"{name} is given beside {of_cache}: a cache's keys are not packed")
        out, lse = over_cache(
            q,
            k,
            v,
            k_new,
            v_new,
            batch=num_sequences(q, cu_seqlens_q),
            cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            block_table=page_table,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_seqlens=seqlens_rotary,
            num_splits=num_splits,
            qv=qv,
            attention_chunk=chunk,
            rotary_interleaved=rotary_interleaved,
            cu_seqlens_new=cu_seqlens_k_new,
            max_seqlen_new=0 if cu_seqlens_k_new is None or k_new is None else k_new.shape[0],
            **call,
        )
    if out_ is not None:
        # The copy is made where autograd records it, so that a gradient passes through it.
        with torch.set_grad_enabled(out.requires_grad):
            out = out_.copy_(out)
    return out, lse, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    cu_seqlens_q: Optional[torch.Tensor],
    cu_seqlens_k: Optional[torch.Tensor],
    seqused_q: Optional[torch.Tensor],
    seqused_k: Optional[torch.Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    softmax_scale: Optional[float],
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
) -> torch.Tensor:
    """Writes the gradients; gives the sums of dO O."""
    gradients_into(
        (dq, dk, dv),
        *(dout, q, k, v, out, softmax_lse, None),
        (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        mask=from_window_size((window_size_left, window_size_right), is_causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        max_seqlen_q=0 if cu_seqlens_q is None else integer("max_seqlen_q", max_seqlen_q),  # type: ignore[arg-type]
        max_seqlen_k=0 if cu_seqlens_k is None else integer("max_seqlen_k", max_seqlen_k),  # type: ignore[arg-type]
    )
    sums = products_of_rows(dout, out)
    if cu_seqlens_q is not None:
        return by_sequence(sums, cu_seqlens_q)
    return torch.nn.functional.pad(sums, (0, round_multiple(sums.shape[-1], 128) - sums.shape[-1]))


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    sequed_q: Optional[torch.Tensor] = None,
    sequed_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dq: Optional[torch.Tensor] = None,
    dk: Optional[torch.Tensor] = None,
    dv: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Writes ``dq``, ``dk`` and ``dv``; gives the sums of dO O, f32, as FlashAttention 2's backward pads them."""
    lengths = (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k)
    band = (softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic)
    return _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, *band)


def _fwd(**named: Any) -> Tuple[torch.Tensor, ...]:
    names = (("qv", "q_v"), ("out_", "out"), ("causal", "is_causal"), ("rotary_interleaved", "is_rotary_interleaved"))
    for ours, theirs in names:
        named[ours] = named.pop(theirs)
    return _flash_attn_forward(**named)


def _bwd(sm_margin: int, **named: Any) -> Tuple[torch.Tensor, ...]:
    """The sums of dO O, the LSE to base 2, padded alike, and 3 tensors without elements in place of sums that are
    not made here."""
    sums, lse = _backward(**named), named["softmax_lse"]
    lse = lse.masked_fill(torch.isinf(lse), 0) / math.log(2)
    if named["cu_seqlens_q"] is None:
        lse = torch.nn.functional.pad(lse, (0, sums.shape[-1] - lse.shape[-1]))
    else:
        lse = by_sequence(lse, named["cu_seqlens_q"])
    return (sums, lse, *(sums.new_empty(0) for _ in range(3)))


_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_COMBINE = (
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
    "-> (Tensor(out!), Tensor)"
)
_METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    "int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> Tensor"
)


def _whole(schema: str, function: Any) -> Any:
    """A kernel that has every argument of its schema by name, with the defaults of what is left out."""
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    names = [argument.name for argument in arguments]
    return lambda *given, **rest: function(**{**defaults, **dict(zip(names, given)), **rest})


def _metadata(seqused_k: torch.Tensor, **_rest: Any) -> torch.Tensor:
    return seqused_k.new_empty(0, dtype=torch.int32)


_library: Optional[torch.library.Library] = None


def register() -> None:
    """``torch.ops.flash_attn_3`` is there from then on.

    Raises:
        ImportError: another library has defined it.
    """
    global _library
    if _library is not None:
        return
    if torch._C._jit_get_schemas_for_operator("flash_attn_3::fwd"):
        raise ImportError("torch.ops.flash_attn_3.fwd is defined already: FlashAttention 3 is loaded")
    _library = torch.library.Library("flash_attn_3", "FRAGMENT")
    kernels = (
        (_FORWARD, _whole(_FORWARD, _fwd)),
        (_BACKWARD, _whole(_BACKWARD, _bwd)),
        (_COMBINE, _whole(_COMBINE, flash_attn_combine)),
        (_METADATA, _whole(_METADATA, _metadata)),
    )
    for schema, kernel in kernels:
        _library.define(schema)
        # The operator is composite: the operators that it calls have gradients and fake kernels of their own.
        _library.impl(schema.partition("(")[0], kernel, "CompositeImplicitAutograd")
