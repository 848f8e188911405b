"""The arguments of a call, listed once: :func:`bind` has their names and defaults, and every function that computes
attention takes them through it."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Optional, Tuple, TypedDict, TypeVar, Union

from . import _native
from ._mask import CAUSAL, MaskLike, mask as _mask
from ._mask_data import AnyMask
from ._numbers import flag, integer, real, scale, shown, word

if TYPE_CHECKING:
    import numpy
    import torch

    from . import _code
    from ._block_scales import BlockScales

    #: What computes: torch's tensor, NumPy's array, or whatever speaks DLPack.
    Tensor = Union[torch.Tensor, numpy.ndarray, Any]

_ALLOW_FALLBACK, _EXACT, _DETERMINISTIC, _BATCH_INVARIANT, _ROW_INVARIANT, _CHECK_LENGTHS = (
    _native.OPTIONS[name]
    for name in ("allow_fallback", "exact", "deterministic", "batch_invariant", "row_invariant", "check_lengths")
)

#: Number of :func:`row_invariant` blocks that are active in the process. torch's compiler reads the number as a
#: constant.
_asked_for_rows = 0


class row_invariant:
    """A context in which every call has ``row_invariant=True`` that does not say otherwise: for whole models.

    It holds for all threads of the process, since torch runs backward in threads of its own. So a call of another
    thread is asked for equal bits too: it is slower, or refused by name where no kernel keeps them (f32 on every GPU,
    AMD's GPUs, lists of keys on NVIDIA's).

    The context has to cover ``backward()`` too: a checkpointed layer is computed again there, and the private backward
    functions of FlashAttention 2, 3 and 4 ask anew. Gradients of other calls are those of their forward, wherever
    backward runs. Under ``jax.jit`` the context counts when a call is traced, in a graph when it is captured.
    """

    def __enter__(self) -> None:
        global _asked_for_rows
        _asked_for_rows += 1

    def __exit__(self, *_: object) -> None:
        global _asked_for_rows
        _asked_for_rows -= 1


def wants_rows(asked: Optional[bool]) -> bool:
    """Whether a call is asked for rows of equal bits: by its argument, or else by the context."""
    return _asked_for_rows > 0 if asked is None else flag("row_invariant", asked)


class Unmasked(TypedDict, total=False):
    """:class:`Options` without the mask, for functions with a default of their own."""

    causal: Optional[bool]
    softmax_scale: Optional[float]
    softcap: Optional[float]
    bias: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    sink: Optional[Tensor]
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Optional[Tensor]
    seqused_k: Optional[Tensor]
    block_table: Optional[Tensor]
    descale_q: Optional[Tensor]
    descale_k: Optional[Tensor]
    descale_v: Optional[Tensor]
    p_drop: float
    seed: Optional[int]
    offset: int
    dtype_o: Any
    allow_fallback: bool
    accuracy: str
    deterministic: bool
    batch_invariant: bool
    row_invariant: Optional[bool]
    check_lengths: bool


class Options(Unmasked, total=False):
    """What :func:`fmha.attention` takes besides Q, K and V; its docstring says what each means."""

    mask: AnyMask


class AttentionOptions(Options, total=False):
    """All keywords of :func:`fmha.attention` but ``return_lse``, which says what comes back."""

    score_code: Optional[_code.Function]
    mask_code: Optional[_code.Function]
    captured: Optional[Mapping[str, Any]]
    indices: Optional[Tensor]
    topk_length: Optional[Tensor]
    index_block: int
    block_scales: Optional[BlockScales]
    row_max: Optional[Tensor]
    head_max: Optional[Tensor]
    key_sum: Optional[Tensor]


class CacheOptions(Unmasked, total=False):
    """All keywords of :func:`fmha.attention_with_kvcache` but ``return_lse``."""

    cu_seqlens_new: Optional[Tensor]
    rotary_cos: Optional[Tensor]
    rotary_sin: Optional[Tensor]
    tree_mask: Optional[Tensor]
    k_scale: Optional[Tensor]
    v_scale: Optional[Tensor]
    scale_block: int
    max_seqlen_new: int
    head_dim_v: int
    rotary_interleaved: bool
    mask: MaskLike


#: The tensors of :class:`Options`, in the order in which operators take them.
TENSORS = (
    "bias",
    "alibi_slopes",
    "sink",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "block_table",
    "descale_q",
    "descale_k",
    "descale_v",
)

#: No tensor of :data:`TENSORS` given, as in most calls: :func:`bind` then returns this very tuple.
NO_TENSORS: Tuple[Any, ...] = (None,) * len(TENSORS)

#: Tensors that :func:`fmha.attention_with_kvcache` takes besides :data:`TENSORS`, in the order in which operators take
#: them.
CACHE_TENSORS = ("k_new", "v_new", "cu_seqlens_new", "rotary_cos", "rotary_sin", "tree_mask")

#: Tensors that follow :data:`CACHE_TENSORS` where the cache has scales by rows.
CACHE_SCALES = ("k_scale", "v_scale")


def dtype_name(dtype: Any) -> str:
    """The name of a type by any library's name of it."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return name.rpartition(".")[2]


def dtype_code(dtype: Any) -> int:
    """The library's code for a type by any library's name of it; -1 for None."""
    if dtype is None:
        return -1
    name = dtype_name(dtype)
    if name not in _native.DTYPES or _native.DTYPES[name] >= 100:
        raise TypeError(f"dtype_o: {shown(dtype)} is no type that O can have")
    return _native.DTYPES[name]


#: Arguments' names in other libraries, each with the name in this one.
_THEIRS = {
    "is_causal": "causal (from the last key), or mask='t' (from the first, as torch has it)",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "dropout_p": "p_drop",
    "dropout": "p_drop",
    "attn_mask": "mask, a band, or bias, which is added to the scores (-inf hides a key)",
    "attention_mask": "mask, a band, or bias, which is added to the scores (-inf hides a key)",
    "attn_bias": "bias",
    "window_size": "mask=fmha.window(left, right)",
    "sliding_window": "mask=fmha.window(left, right)",
    "soft_cap": "softcap",
    "logits_soft_cap": "softcap",
    "sinks": "sink",
    "s_aux": "sink",
    "learnable_sink": "sink",
    "cache_seqlens": "seqused_k",
    "page_table": "block_table",
    "cu_seqlens_k_new": "cu_seqlens_new",
    "q_descale": "descale_q",
    "k_descale": "descale_k",
    "v_descale": "descale_v",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "enable_gqa": "nothing: K and V may have fewer heads than Q",
}


def unknown(function: str, wrong: Iterable[str], ours: Iterable[str]) -> TypeError:
    """The error for keywords that a function does not have."""
    name = next(iter(wrong))
    alike = difflib.get_close_matches(name, list(ours), 1)
    here = _THEIRS.get(name) or (alike[0] if alike else None)
    said = f"{function}() got an unexpected keyword argument '{name}'"
    return TypeError(said if here is None else f"{said}; here it is {here}")


def by_causal(causal: Any, mask: AnyMask) -> Any:
    """The mask of a call that says ``causal``."""
    if not flag("causal", causal):
        return _mask(mask)
    if mask is not None:
        raise ValueError("mask is given beside causal, which is one")
    return CAUSAL


def bind(
    mask: AnyMask = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    descale_q: Any = None,
    descale_k: Any = None,
    descale_v: Any = None,
    p_drop: float = 0.0,
    seed: Optional[int] = None,
    offset: int = 0,
    dtype_o: Any = None,
    allow_fallback: bool = False,
    accuracy: str = "fast",
    deterministic: bool = False,
    batch_invariant: bool = False,
    row_invariant: Optional[bool] = None,
    check_lengths: bool = False,
    causal: Optional[bool] = None,
    **wrong: Any,
) -> Tuple[Tuple[Any, ...], Tuple[Any, ...]]:
    """Tensors by :data:`TENSORS`, numbers as the operators take them (``fmha._native.NUMBERS`` up to ``options``)."""
    if wrong:
        raise unknown("attention", wrong, (*TENSORS, *Options.__annotations__))
    kind, left, right, sink_columns = _mask(mask) if causal is None else by_causal(causal, mask)
    probability = real("p_drop", p_drop)
    if accuracy != "fast" and accuracy != "exact":
        raise ValueError(f"accuracy: {shown(accuracy)} is neither 'fast' nor 'exact'")
    options = (
        (_ALLOW_FALLBACK if flag("allow_fallback", allow_fallback) else 0)
        | (_EXACT if accuracy == "exact" else 0)
        | (_DETERMINISTIC if flag("deterministic", deterministic) else 0)
        | (_BATCH_INVARIANT if flag("batch_invariant", batch_invariant) else 0)
        | (_ROW_INVARIANT if wants_rows(row_invariant) else 0)
        | (_CHECK_LENGTHS if flag("check_lengths", check_lengths) else 0)
    )
    tensors = (
        bias,
        alibi_slopes,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        block_table,
        descale_q,
        descale_k,
        descale_v,
    )
    for tensor in tensors:
        if tensor is not None:
            break
    else:
        tensors = NO_TENSORS
    return (
        tensors,
        (
            integer("max_seqlen_q", max_seqlen_q),
            integer("max_seqlen_k", max_seqlen_k),
            None if softmax_scale is None else scale(softmax_scale),
            0.0 if softcap is None else real("softcap", softcap),
            kind,
            left,
            right,
            sink_columns,
            probability,
            # A call with dropout must have a seed; an interface without one draws it.
            (None if probability else 0) if seed is None else word("seed", seed),
            word("offset", offset),
            dtype_code(dtype_o),
            options,
        ),
    )


_AT_SEED = _native.NUMBERS.index("seed")


def with_seed(numbers: Tuple[Any, ...], seed: int) -> Tuple[Any, ...]:
    """A call's numbers, with a seed that was drawn."""
    return (*numbers[:_AT_SEED], seed, *numbers[_AT_SEED + 1 :])


# Python names this function in the error for an unknown argument.
bind.__qualname__ = "attention"

Function = TypeVar("Function", bound=Callable[..., Any])


def documented(function: Function) -> Function:
    """Gives a function that takes ``**options`` the signature that it has, for ``help`` and editors."""
    own = inspect.signature(function)
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(bind).parameters.values()
        if parameter.name not in own.parameters and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    named = [parameter for parameter in own.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    positional = [parameter for parameter in named if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = [parameter for parameter in named if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=positional + options + keywords)  # type: ignore[attr-defined]
    return function
