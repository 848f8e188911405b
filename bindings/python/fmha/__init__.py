"""Fused multi-head attention: one meaning on NVIDIA, AMD and the CPU.

Tensors are torch's, NumPy's, or anything that speaks DLPack. Nothing is copied but a tensor whose last axis is not
dense; work goes on the caller's stream, and memory comes from the caller's allocator. What attention means (LSE, empty rows, windows, dropout, FP8) is the project's
CONTRACT.md. Shapes: Q ``[batch, seqlen_q, num_heads_q, head_dim]``; packed, ``[total_q, num_heads_q, head_dim]`` with
``cu_seqlens_q``. Any strides serve, so a ``[batch, heads, seqlen, dim]`` tensor comes in by ``transpose(1, 2)``; a last
axis that is not dense is copied by :func:`attention`, and refused by functions over memory of the caller's.
"""

from __future__ import annotations

import sys as _sys
from typing import TYPE_CHECKING, Any, Dict, Literal, Mapping, Optional, Tuple, TypeVar, Union, overload

from . import _arguments, _code, _native
from ._arguments import row_invariant
from ._block_scales import BlockScales
from ._mask import CAUSAL, CAUSAL_TOP_LEFT, NONE, Mask, MaskLike, mask, window
from ._mask_data import BlockLists, Intervals, MaskBits, split as _split
from ._mask_object import MaskObject
from ._native import FmhaError
from ._numbers import flag as _flag, integer as _integer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arguments import AttentionOptions, CacheOptions, Options, Tensor, Unmasked

__version__ = "0.1.0"

__all__ = [
    "CAUSAL",
    "CAUSAL_TOP_LEFT",
    "NONE",
    "BlockLists",
    "BlockScales",
    "FmhaError",
    "Intervals",
    "Mask",
    "MaskBits",
    "MaskObject",
    "add_parts",
    "attention",
    "attention_out",
    "attention_with_kvcache",
    "combine",
    "devices",
    "explain",
    "mask",
    "prepare",
    "row_invariant",
    "window",
]


#: The type of a caller's tensors. Tensors that a call returns have the same type.
_Given = TypeVar("_Given")

#: Modules of this package by the type of tensor that they handle.
_doors: Dict[type, Any] = {}


def _door(tensor: Any) -> Any:
    """The module for a tensor's library: torch's operators, or NumPy's and DLPack's calls."""
    return _doors.get(type(tensor)) or _found(tensor)


def _found(tensor: Any) -> Any:
    torch = _sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        from . import _torch as door
    else:
        from . import _dlpack as door  # type: ignore[no-redef]
    _doors[type(tensor)] = door
    return door


def _bound(options: Any, *outputs: Any) -> Tuple[Tuple[Any, Any], Any]:
    """The tensors and numbers of a call, and its masks as data and small outputs."""
    mask = options.get("mask")
    band, masks = _split(mask, outputs or (None, None, None))
    return _arguments.bind(**(options if band is mask else {**options, "mask": band})), masks


@overload
def attention(
    q: _Given, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> _Given: ...
@overload
def attention(
    q: _Given, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> Tuple[_Given, _Given]: ...
@overload
def attention(
    q: _Given, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Union[_Given, Tuple[_Given, _Given]]: ...
@_arguments.documented
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    indices: Optional[Tensor] = None,
    topk_length: Optional[Tensor] = None,
    index_block: int = 1,
    block_scales: Optional[BlockScales] = None,
    row_max: Optional[Tensor] = None,
    head_max: Optional[Tensor] = None,
    key_sum: Optional[Tensor] = None,
    **options: Unpack[Options],
) -> Any:
    """Attention of ``q`` over ``k`` and ``v``.

    Args:
        q: ``[batch, seqlen_q, num_heads_q, head_dim_qk]``, or packed ``[total_q, num_heads_q, head_dim_qk]``.
        k: ``[batch, seqlen_k, num_heads_kv, head_dim_qk]``, packed, or with ``block_table`` paged
            ``[num_pages, page_size, num_heads_kv, head_dim_qk]``. ``num_heads_q`` is a multiple of ``num_heads_kv``.
        v: as ``k``, of ``head_dim_v``.
        mask: ``None``, ``"causal"`` (bottom-right), ``"b:left,right"``, ``"t:left,right"``, ``"g:y,x"``, each with
            ``",sink"`` for as many first keys that a left bound does not hide, or a :class:`Mask`;
            or data on Q's device, which compiles nothing: :class:`Intervals`, :class:`MaskBits`, :class:`BlockLists`;
            or a list of these, at most one of each kind: a key has to be seen by all, but blocks of the full list ask
            neither the other masks as data nor a function; or a :class:`MaskObject` that was built of them.
        causal: ``True`` is ``mask="causal"``.
        softmax_scale: multiplies ``Q K^T``; ``None`` is ``1 / sqrt(head_dim_qk)``, 0 is 0.
        softcap: ``softcap * tanh(score / softcap)``; ``None`` or 0 is none.
        bias: ``[batch, num_heads_q, seqlen_q, seqlen_k]``, f32 or Q's type, axes of size 1 in front broadcast;
            differentiable.
        alibi_slopes: f32 ``[num_heads_q]`` or ``[batch, num_heads_q]``.
        sink: f32 ``[num_heads_q]``, enters the softmax's denominator; differentiable.
        cu_seqlens_q, cu_seqlens_k: i32 ``[batch + 1]``, on the device: packed sequences. ``max_seqlen_q`` and
            ``max_seqlen_k`` are upper bounds of their lengths, which have to be given then.
        seqused_q, seqused_k: i32 ``[batch]``, on the device: rows in use.
        block_table: i32 ``[batch, max_pages]``, on the device.
        descale_q, descale_k, descale_v: what FP8 tensors are multiplied by, f32 ``[batch, num_heads_kv]`` or one
            number.
        p_drop: probability, 0 or more and below 1, that an element of P is dropped. ``seed`` and ``offset``, 64 bits
            each, choose the mask: the same triple gives the same one on every device. Without a seed one is drawn from
            torch's generator of the CPU, or NumPy's, so that two calls differ and a checkpoint repeats its own. A call
            that drops is not captured into a graph: its replays would drop the same elements.
        dtype_o: type of O: f32, f16 or bf16; ``None`` is Q's, bf16 for FP8.
        allow_fallback: whether a kernel that is right but slow may serve where no fast one takes the call (f32 on a
            GPU); without it such a call is refused, with the reason of each kernel.
        accuracy: ``"fast"`` or ``"exact"`` (the true running maximum).
        deterministic: gradients with the same bits in every run; also where torch's deterministic algorithms are on.
        batch_invariant: a sequence's bits depend on itself alone.
        row_invariant: a row's bits depend on that row and the keys that it sees alone: training, a prompt's chunks and
            decoding agree bit for bit; or an error that names what breaks it. ``None``: as :class:`row_invariant`, the
            context, says.
        check_lengths: lengths are read back and checked, which waits for the device. Without it a length beyond its
            rows, its cache or the pages in its row of ``block_table`` is clamped, on the CPU and on a GPU alike.
        return_lse: whether LSE comes too, f32 ``[batch, num_heads_q, seqlen_q]`` or ``[num_heads_q, total_q]``: natural
            logarithm, -inf for a row that sees no key; differentiable.
        score_code: what a scaled score becomes, before soft-cap and bias: a text of the small language
            (``"slopes: f32[_]; s + slopes[h] * (k - q)"``), or a function ``(score, b, h, q, k)`` that is called once
            with traced values, as :func:`fmha.flex.flex_attention` has it.
        mask_code: which pairs are seen, besides what ``mask`` hides: a text, or a function ``(b, h, q, k)``. Both see
            the
            query head, and rows and keys by their place in their sequence, from 0: no diagonal is added.
        row_max: written, f32, contiguous, of LSE's shape: each row's greatest score, as the softmax has it, of the keys that
            it sees, without the sink; -inf for a row that sees none.
        head_max: written, f32 ``[num_heads_q]``: the greatest of a head's; Muon's QK-clip reads it.
        key_sum: written, f32 ``[batch, num_heads_q, seqlen_k]``: each key's probability before dropout, summed over the
            queries; H2O and SnapKV keep the keys that have most. None of the three has a gradient.
        captured: what texts read by name: tensors, whose gradients come where they are floats and torch's, and numbers.
            A function finds its own.
        indices: i32 ``[batch, seqlen_q, num_heads_kv, topk]``, packed ``[total_q, num_heads_kv, topk]``: the keys that
            each token sees, by their positions, in place of all keys. An entry that is negative, or at or past the
            length, is absent; one that stands twice counts twice. torch's tensors alone, and no compiler.
        topk_length: i32 ``[batch]``, or ``[batch, seqlen_q]``, packed ``[total_q]``: entries of each list that are in
            use. Where ``total_q`` equals ``batch``, a packed call's numbers are of tokens.
        index_block: keys of an entry: entry ``e`` stands for keys ``e * index_block`` up to
            ``(e + 1) * index_block``.
        block_scales: scales by blocks of Q, K and V that are stored in MXFP8 or NVFP4, as
            :meth:`BlockScales.quantize` makes both; what was converted gets the gradients. On a GPU but Blackwell
            ``allow_fallback`` alone serves them. torch's tensors alone, without a compiler, and beside neither
            functions, masks as data, lists, small outputs nor a bias with a gradient.

    Returns:
        O of Q's shape with ``head_dim_v``, or ``(O, LSE)``. Rows that lengths leave out are 0, in O, LSE and gradients alike.

    Raises:
        RuntimeError: what is wrong with the call, the argument first, then its numbers; or why no kernel takes it.
        TypeError, ValueError: an argument that is no number, no tensor or no mask, by its name.
        NotImplementedError: torch's second derivatives and derivatives in forward mode.
    """
    wants_lse = _flag("return_lse", return_lse)
    door = _door(q)
    bound, masks = _bound(options, row_max, head_max, key_sum)
    if block_scales is not None:
        beside = dict(score_code=score_code, mask_code=mask_code, captured=captured, indices=indices)
        beside["index_block"] = None if index_block == 1 else index_block
        beside.update(topk_length=topk_length, row_max=row_max, head_max=head_max, key_sum=key_sum)
        o, lse = _scaled(door, block_scales, beside, masks)(q, k, v, *bound, block_scales)
    elif indices is not None or topk_length is not None or index_block != 1:
        beside = dict(score_code=score_code, mask_code=mask_code, captured=captured)
        outputs = dict(row_max=row_max, head_max=head_max, key_sum=key_sum)
        lists = _lists_of(door, q, (indices, topk_length, index_block), {**beside, **outputs}, masks)
        o, lse = lists.attention(q, k, v, *bound)
    elif score_code is None and mask_code is None and captured is None and masks is None:
        o, lse = door.attention(q, k, v, *bound, wants_lse)
    else:
        code = _code.bind(door, score_code, mask_code, captured, device=getattr(q, "device", None), masks=masks)
        o, lse = door.attention(q, k, v, *bound, wants_lse, code)
    return (o, lse) if wants_lse else o


def _scaled(door: Any, scales: Any, beside: Mapping[str, Any], masks: Any) -> Any:
    """The function for a call with scales by blocks."""
    if not isinstance(scales, BlockScales):
        raise TypeError(f"block_scales: {type(scales).__name__} is no fmha.BlockScales")
    for name, other in beside.items():
        if other is not None:
            raise NotImplementedError(f"{name} is given beside block_scales, which take none here")
    if masks is not None:
        raise NotImplementedError("mask: masks as data are given beside block_scales, which take none here")
    if door.__name__ != "fmha._torch":
        raise NotImplementedError("block_scales: scales by blocks are taken of torch's tensors")
    from . import _scales

    return _scales.attention


def _lists_of(door: Any, q: Any, given: Tuple[Any, Any, Any], beside: Mapping[str, Any], masks: Any) -> Any:
    """The lists of keys of a call that gives one of their arguments."""
    indices, topk_length, index_block = given
    block = _integer("index_block", index_block)
    if indices is None:
        name = "index_block" if topk_length is None else "topk_length"
        raise ValueError(f"{name} is given, but indices are None")
    for name, other in beside.items():
        if other is not None:
            text = f"{name} is given beside indices: lists take no functions and no small outputs here"
            raise NotImplementedError(text)
    if masks is not None:
        raise NotImplementedError("mask: masks as data are given beside indices, which say what a token sees")
    if door.__name__ != "fmha._torch":
        raise NotImplementedError(f"indices beside {type(q).__name__}: lists of keys are taken of torch's tensors")
    from . import _lists

    return _lists.Lists(indices, topk_length, block)


@_arguments.documented
def attention_out(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lse: Optional[Tensor] = None,
    keep_mask: Optional[Tensor] = None,
    scale_o: Optional[Tensor] = None,
    row_max: Optional[Tensor] = None,
    head_max: Optional[Tensor] = None,
    key_sum: Optional[Tensor] = None,
    **options: Unpack[Options],
) -> Any:
    """As :func:`attention`, into the caller's tensors, for engines with memory of their own; no gradients.

    Args:
        o: written: Q's shape with ``head_dim_v``, any strides, f32, f16, bf16 or, from FP8, FP8.
        lse: written: f32, contiguous, shaped as :func:`attention` gives it.
        keep_mask: written: u8 ``[batch, num_heads_q, seqlen_q, seqlen_k]``, 1 where dropout keeps an element.
        scale_o: f32, one number: an FP8 O is multiplied by it before it is rounded.
        row_max, head_max, key_sum: written, as :func:`attention` has them.

    Returns:
        ``o``.
    """
    wanted, has = options.get("dtype_o"), getattr(o, "dtype", None)
    if None not in (wanted, has) and _arguments.dtype_name(wanted) != _arguments.dtype_name(has):
        raise ValueError(f"dtype_o {_arguments.dtype_name(wanted)} is not o's {_arguments.dtype_name(has)}")
    small = (row_max, head_max, key_sum)
    _door(q).attention_out(q, k, v, *_arguments.bind(**options), scale_o, o, lse, keep_mask, small)
    return o


@overload
def attention_with_kvcache(
    q: _Given,
    k_cache: Tensor,
    v_cache: Optional[Tensor],
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CacheOptions],
) -> _Given: ...
@overload
def attention_with_kvcache(
    q: _Given,
    k_cache: Tensor,
    v_cache: Optional[Tensor],
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> Tuple[_Given, _Given]: ...
@overload
def attention_with_kvcache(
    q: _Given,
    k_cache: Tensor,
    v_cache: Optional[Tensor],
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    return_lse: bool,
    **options: Unpack[CacheOptions],
) -> Union[_Given, Tuple[_Given, _Given]]: ...
@_arguments.documented
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Optional[Tensor],
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    cu_seqlens_new: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    tree_mask: Optional[Tensor] = None,
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
    scale_block: int = 1,
    max_seqlen_new: int = 0,
    head_dim_v: int = 0,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
    mask: MaskLike = "causal",
    **options: Unpack[Unmasked],
) -> Any:
    """Attention over a KV cache, to which new rows are appended first where ``k`` and ``v`` are given.

    Args:
        q: ``[batch, seqlen_q, num_heads_q, head_dim]``, or packed with ``cu_seqlens_q`` and ``max_seqlen_q``.
        k_cache: ``[batch, seqlen_max, num_heads_kv, head_dim]``; with ``block_table``, pages
            ``[num_pages, page_size, num_heads_kv, head_dim]``. In FP8 under 16-bit queries too (``descale_k``,
            ``descale_v``). In uint8 FlashMLA's rows of 656 and 584 bytes, ``[num_pages, page_size, 1, bytes]``, under
            queries in bf16; ``v_cache`` is ``None`` and ``head_dim_v`` 512.
        v_cache: likewise; ``None`` with ``head_dim_v``: V is the front of K's rows (MLA).
        k, v: new rows ``[batch, seqlen_new, num_heads_kv, head_dim]``, written at ``seqused_k[b]``; packed
            ``[total_new, num_heads_kv, head_dim]`` with ``cu_seqlens_new``, i32 ``[batch + 1]``, and
            ``max_seqlen_new``. Rows of bytes are quantised from ``k`` in bf16, and ``v`` is ``None``.
        head_dim_v: V's last axis where ``v_cache`` is ``None``; beside a ``v_cache`` it has to be its.
        seqused_k: i32 ``[batch]``, rows in the cache: before the new ones.
        rotary_cos, rotary_sin: ``[max_pos, rotary_dim / 2]``, f32 or Q's type; ``rotary_interleaved`` turns pairs
            ``(2i, 2i + 1)``, else ``(i, i + rotary_dim / 2)``.
        tree_mask: u32 or i32 ``[batch, seqlen_q, ceil(seqlen_q / 32)]``: which of the last ``seqlen_q`` keys a query
            sees.
        k_scale, v_scale: scales of an FP8 cache's rows, f32 ``[batch, ceil(seqlen_max / scale_block), num_heads_kv]``,
            packed ``[total_k, num_heads_kv]``, paged ``[num_pages, page_size / scale_block, num_heads_kv]``, any
            strides. An element is multiplied by its scale and rounded to Q's type. Both go together, without
            ``descale_k`` and ``descale_v``. New rows are quantised: their scales are written too, and each row's
            greatest magnitude becomes the type's largest number.
        scale_block: rows that share a scale; 1: a scale for each token and head, which new rows ask for.
        mask: by default causal, bottom-right; ``causal=False`` is none.
        return_lse: as in :func:`attention`, whose other arguments are the same here.

    Returns:
        O of Q's shape with V's last axis, or ``(O, LSE)``; no gradients.
    """
    wants_lse = _flag("return_lse", return_lse)
    if options.get("causal") is not None and isinstance(mask, str) and mask == "causal":
        mask = None
    tensors, numbers = _arguments.bind(mask=mask, **options)
    axes = getattr(v_cache, "shape", None)
    if head_dim_v and axes and head_dim_v != axes[-1]:
        raise ValueError(f"head_dim_v {head_dim_v} is not the {axes[-1]} of v_cache's last axis")
    numbers = (
        *numbers,
        _integer("max_seqlen_new", max_seqlen_new),
        _integer("head_dim_v", head_dim_v),
        int(_flag("rotary_interleaved", rotary_interleaved)),
    )
    cache: Tuple[Any, ...] = (k, v, cu_seqlens_new, rotary_cos, rotary_sin, tree_mask)
    if k_scale is not None or v_scale is not None:
        cache = (*cache, k_scale, v_scale)
        numbers = (*numbers, _positive("scale_block", scale_block))
    elif _integer("scale_block", scale_block) != 1:
        raise ValueError(f"scale_block {scale_block} is given, but k_scale and v_scale are None")
    try:
        o, lse = _door(q).kvcache(q, k_cache, v_cache, cache, tensors, numbers)
    except (RuntimeError, TypeError, ValueError) as error:
        said = _native.as_cache(str(error))
        if said == str(error):
            raise
        raise type(error)(said) from None
    return (o, lse) if wants_lse else o


def _positive(name: str, number: Any) -> Any:
    """A whole number from 1 up; a compiler's symbolic size passes through."""
    whole = _integer(name, number)
    if isinstance(whole, int) and whole < 1:
        raise ValueError(f"{name} {whole} is not 1 or more")
    return whole


def combine(o_parts: Tensor, lse_parts: Tensor, *, dtype_o: Any = None) -> Tuple[Any, Any]:
    """Merges partial results over the same rows by their LSE.

    Args:
        o_parts: ``[parts, batch, seqlen_q, num_heads_q, head_dim_v]``, f32, f16 or bf16. Packed rows are a batch of 1.
        lse_parts: f32 ``[parts, batch, num_heads_q, seqlen_q]``; a part with -inf is neutral.
        dtype_o: type of the merged O; ``None`` is that of the parts.

    Returns:
        ``(O, LSE)``; differentiable.
    """
    return _door(o_parts).combine(o_parts, lse_parts, _arguments.bind(dtype_o=dtype_o)[1])


def add_parts(o_parts: Tensor, o: Optional[Tensor] = None, *, dtype_o: Any = None) -> Any:
    """Adds partial results over the same rows as they are, without an LSE: gradients of parts. Sums are f32, in the
    order of the parts, and rounded once.

    Args:
        o_parts: ``[parts, batch, seqlen, num_heads, head_dim]``, f32, f16 or bf16; of 0 parts the sum is 0.
        o: ``[batch, seqlen, num_heads, head_dim]``, f32, f16 or bf16: the first term, and written; ``None``: none.
        dtype_o: type of a sum that is made; ``None`` is that of the parts.

    Returns:
        The sum, differentiable; or ``o``, of which there is no gradient.

    Raises:
        FmhaError: what is wrong with a tensor, by its name, with its numbers.
        ValueError: ``o`` where a gradient is wanted.
    """
    return _door(o_parts).add_parts(o_parts, o, _arguments.bind(dtype_o=dtype_o)[1])


@_arguments.documented
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool = False,
    return_lse: bool = False,
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    indices: Optional[Tensor] = None,
    topk_length: Optional[Tensor] = None,
    index_block: int = 1,
    **options: Unpack[Options],
) -> str:
    """Which kernel would take the call, or with ``backward`` its gradients', with tile and promises, a fact a line.
    Plans it, which compiles the kernel, and runs nothing. With ``return_lse`` it is the call that asks for LSE, which
    may be another kernel where nobody wants a gradient.

    Raises:
        FmhaError: as :func:`attention`: what is wrong, or every kernel's refusal.
    """
    from ._explain import explain as plan

    door = _door(q)
    bound, masks = _bound(options)
    code = _code.bind(door, score_code, mask_code, captured, device=getattr(q, "device", None), masks=masks)
    wanted = _flag("backward", backward), _flag("return_lse", return_lse)
    beside = dict(score_code=score_code, mask_code=mask_code, captured=captured)
    has_lists = indices is not None or topk_length is not None or index_block != 1
    lists = _lists_of(door, q, (indices, topk_length, index_block), beside, masks) if has_lists else None
    return plan(door, (q, k, v), *bound, *wanted, code, lists)


def prepare(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Plans a call and compiles its kernel, so that the first real call does not wait for a compiler. Takes what
    :func:`explain` takes, and returns its text. A call with a gradient is two: ``prepare(..., backward=True)`` too."""
    return explain(q, k, v, **options)


def devices() -> str:
    """What there is to run on, and why the rest is absent, a line each."""
    _native.check(_native.library.fmha_py_devices())
    return _native.text()
