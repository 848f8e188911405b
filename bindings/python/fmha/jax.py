"""Attention on JAX's arrays: a call of XLA's, with gradients, under ``jit``, ``vmap``, ``grad`` and sharding.

::

    import fmha.jax
    o = jax.jit(lambda q, k, v: fmha.jax.attention(q, k, v, mask="causal"))(q, k, v)

Handlers are registered on import for the CPU, CUDA and ROCm. Shapes and types are held to each other while JAX traces:
what is wrong is raised there as :class:`fmha.FmhaError`. A kernel's refusal, and lengths that lie, come when the call
runs, as JAX raises what a call of XLA's returns, with the same words.

What lengths leave out is zero here, in O, LSE and gradients alike: JAX's programs pad. ``vmap`` joins its axis to the
batch where a call is dense, and runs one call after another where it is packed, paged or has dropout. A dense call is
partitioned over devices by batch and by heads; the others are computed whole, unless ``jax.shard_map`` divides them.
Rows that ``jit`` has on several devices are brought together by the compiler, and the result is that of one device.
Inside ``jax.shard_map`` a call is of the device's own rows; with ``axis_name`` it is of the rows of all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import struct
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    FrozenSet,
    List,
    Literal,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
    overload,
)

import jax
import jax.numpy as jnp
import numpy
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from . import _arguments, _code, _native, _ranks_jax
from ._mask_data import OUTPUTS as _SMALL, TENSORS as _MASK_TENSORS, split as _split
from ._numbers import flag as _flag
from ._trace import Code

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arguments import Options

__all__ = ["attention"]

#: The name under which XLA knows the handlers.
TARGET = "fmha"

for _platform, _handler in (("cpu", "cpu"), ("CUDA", "cuda"), ("ROCM", "rocm")):
    jax.ffi.register_ffi_target(
        TARGET, jax.ffi.pycapsule(getattr(_native.library, f"fmha_xla_{_handler}")), platform=_platform
    )

#: Where shapes are held to each other before there is memory: no kernel's alignment minds it.
_NOWHERE = 256

_AT = {name: at for at, name in enumerate(_native.NUMBERS)}
_WANTS_DBIAS, _WANTS_DSINK = (_native.OPTIONS[name] for name in ("wants_dbias", "wants_dsink"))

#: Arguments in whose presence rows are left out.
_LENGTHS_Q, _LENGTHS_K = ("cu_seqlens_q", "seqused_q"), ("cu_seqlens_k", "seqused_k")

#: Axes by letters: what :func:`_sharding_rule` is made of. ``h`` are query heads, ``k`` those of K and V.
_AXES = {
    **dict.fromkeys(("q", "dq"), "bihd"),
    **dict.fromkeys(("k", "dk"), "bjkd"),
    **dict.fromkeys(("v", "dv"), "bjke"),
    **dict.fromkeys(("o", "dout"), "bihe"),
    **dict.fromkeys(("lse", "dlse", "row_max"), "bhi"),
    "key_sum": "bhj",
    "bias": "bhij",
    "alibi_slopes": "bh",
    "sink": "h",
    "seqused_q": "b",
    "seqused_k": "b",
}


#: What names of captured arrays begin with among a call's operands.
_CAPTURED = "captured."
#: Where the handler counts captured arrays and their gradients from.
_FIRST_CAPTURED, _FIRST_GRADIENT = 1 << 16, 1 << 17


class _Static(NamedTuple):
    """What of a call is known while it is traced, besides shapes: the operands' names in order, and numbers."""

    names: Tuple[str, ...]
    numbers: Tuple[Any, ...]
    #: Forward: whether LSE is wanted.
    lse: bool
    backward: bool = False
    #: A score and a mask, with what they capture by name and no tensors.
    code: Optional[Code] = None
    #: Backward: the captured arrays whose gradients are wanted.
    wanted: Tuple[str, ...] = ()
    #: Forward: the small outputs that are wanted.
    small: Tuple[str, ...] = ()

    def slot(self, name: str) -> int:
        """Where the handler finds an operand or puts a result."""
        if not name.startswith(_CAPTURED) and not name.startswith("d" + _CAPTURED):
            return _native.SLOTS[name]
        assert self.code is not None
        at = self.code.names.index(name.partition(".")[2])
        return (_FIRST_GRADIENT if name.startswith("d") else _FIRST_CAPTURED) + at

    def asks(self, option: int) -> bool:
        return bool(self.numbers[_AT["options"]] & option)

    def foldable(self) -> bool:
        """Whether sequences of a batch are independent of their place in it, and every operand is theirs alone."""
        return (
            all(name in _AXES for name in (*self.names, *self.small))
            and self.code is None
            and self.numbers[_AT["p_drop"]] == 0
            and not self.asks(_WANTS_DBIAS | _WANTS_DSINK)
        )


class _Result(NamedTuple):
    name: str
    shape: Tuple[int, ...]
    dtype: Any
    #: Whether rows of it may be left out.
    partial: bool


def _results(static: _Static, arrays: Sequence[Any]) -> List[_Result]:
    given = dict(zip(static.names, arrays))
    q, k, v = (given[name] for name in "qkv")
    partial_q, partial_k = (any(name in given for name in names) for names in (_LENGTHS_Q, _LENGTHS_K))
    if static.backward:
        results = [
            _Result(f"d{name}", x.shape, x.dtype, partial)
            for name, x, partial in (("q", q, partial_q), ("k", k, partial_k), ("v", v, partial_k))
        ]
        for name, wanted in (("bias", _WANTS_DBIAS), ("sink", _WANTS_DSINK)):
            if static.asks(wanted):
                results.append(_Result(f"d{name}", given[name].shape, given[name].dtype, partial_q or partial_k))
        for name in static.wanted:
            results.append(_Result(f"d{name}", given[name].shape, given[name].dtype, partial_q or partial_k))
        return results
    code = static.numbers[_AT["dtype_o"]]
    if code >= 0:
        dtype = jnp.dtype(next(name for name, known in _native.DTYPES.items() if known == code))
    else:
        dtype = jnp.dtype("bfloat16") if q.dtype.name.startswith("float8") else q.dtype
    results = [_Result("o", (*q.shape[:-1], *v.shape[-1:]), dtype, partial_q)]
    if static.lse:
        shape = (*q.shape[:-3], *q.shape[-2:-1], *q.shape[-3:-2])
        results.append(_Result("lse", shape, jnp.dtype("float32"), partial_q))
    for name in static.small:
        # Without a sequence nothing is written.
        partial = partial_q or 0 in q.shape[:1]
        results.append(_Result(name, _small_shape(name, static, given), jnp.dtype("float32"), partial))
    return results


def _small_shape(name: str, static: _Static, given: Dict[str, Any]) -> Tuple[int, ...]:
    """The shape of a small output, as the library holds it to the others; of wrong operands, which it refuses, any."""
    q, k, heads = given["q"], given["k"], given["q"].shape[-2:-1]
    if name == "head_max":
        return heads
    if name == "row_max":
        return (*q.shape[:-3], *heads, *q.shape[-3:-2])
    batch = (max(given["cu_seqlens_q"].shape[0] - 1, 0),) if "cu_seqlens_q" in given else q.shape[:1]
    longest = static.numbers[_AT["max_seqlen_k"]]
    if "block_table" in given:
        seqlen = longest or math.prod((*given["block_table"].shape[-1:], *k.shape[1:2]))
    else:
        seqlen = longest if "cu_seqlens_k" in given else math.prod(k.shape[1:2])
    return (*batch, *heads, seqlen)


def _words(numbers: Tuple[Any, ...]) -> numpy.ndarray:
    """A request's numbers, 8 bytes each."""
    numbers = (*numbers, *(0,) * (len(_native.NUMBERS) - len(numbers)))
    packed = (
        struct.pack("d" if name in _native.FLOATS else "q", math.nan if x is None else x)
        for name, x in zip(_native.NUMBERS, numbers)
    )
    return numpy.frombuffer(b"".join(packed), numpy.int64)


def _spelt(code: Optional[Code]) -> Dict[str, numpy.ndarray]:
    """Code as attributes: the lengths of score, mask and names, then their bytes; and the numbers' words."""
    if code is None:
        return {}
    texts = [text.encode() for text in (code.score, code.mask, ",".join(code.names))]
    lengths = [len(text) for text in texts]
    numbers = numpy.array(code.numbers, numpy.float64)
    return {"code": numpy.array([*lengths, *b"".join(texts)], numpy.int64), "captured": numbers.view(numpy.int64)}


def _check(static: _Static, arrays: Sequence[Any]) -> None:
    """Raises what is wrong with the shapes and types of a call."""
    request = _native.Request(static.numbers)
    if static.code is not None:
        code = static.code
        request.put_code(code.score, code.mask, code.names, code.numbers, len(code.names) - len(code.numbers))
    given = [*zip(static.names, arrays), *((r.name, r) for r in _results(static, arrays))]
    # Each somewhere else: V in K's place would be taken for the front of K's rows.
    for place, (name, x) in enumerate(given, 1):
        strides = [1] * len(x.shape)
        for axis in range(len(x.shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * max(x.shape[axis + 1], 1)
        if name.startswith(_CAPTURED):
            at = static.slot(name) - _FIRST_CAPTURED
            request.put_captured(at, place * _NOWHERE, x.dtype.name, x.shape, strides)
        else:
            request.put(name, place * _NOWHERE, x.dtype.name, x.shape, strides)
    _native.refuse(request)


def _emit(static: _Static, *arrays: Any) -> Tuple[Any, ...]:
    """One call of XLA's."""
    results = _results(static, arrays)
    operands = [static.slot(name) for name in static.names]
    # A result whose rows may be left out is written over zeros.
    zeros = {at: jnp.zeros(r.shape, r.dtype) for at, r in enumerate(results) if r.partial}
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results],
        input_output_aliases={len(operands) + i: at for i, at in enumerate(zeros)},
        vmap_method="sequential",
    )
    return tuple(
        call(
            *arrays,
            *zeros.values(),
            operands=numpy.array([*operands, *(-1 for _ in zeros)], numpy.int64),
            results=numpy.array([static.slot(r.name) for r in results], numpy.int64),
            numbers=_words(static.numbers),
            **_spelt(static.code),
        )
    )


def _axes(name: str, shape: Sequence[int]) -> List[str]:
    """A letter for each axis of an operand or result; an axis of 1 that is broadcast has none (``""``)."""
    letters = list(_AXES[name])[-len(shape) :] if shape else []
    if name == "bias":
        letters = ["" if size == 1 else letter for letter, size in zip(letters, shape)]
    return letters


def _all_axes(static: _Static, operands: Sequence[Any], results: Sequence[Any]) -> List[List[List[str]]]:
    """Of every operand, and of every result; what they are given by has a shape."""
    if static.backward:
        names = ["dq", "dk", "dv"]
    else:
        names = ["o", *(["lse"] if static.lse else []), *static.small]
    pairs = (zip(static.names, operands), zip(names, results))
    return [[_axes(name, x.shape) for name, x in pair] for pair in pairs]


def _sharding_rule(static: _Static, operands: Sequence[Any], results: Sequence[Any]) -> Tuple[str, Dict[str, Any]]:
    """The call for the compiler's partitioner: sequences and heads are independent, the rest stays whole."""
    q, k = (operands[static.names.index(name)].shape for name in "qk")
    ratio = q[2] // max(k[2], 1)
    alone = (f"x{i}" for i in itertools.count())
    # The query heads of one head of K stay together: the gradient of K is the sum over them.
    heads = "k" if ratio == 1 else "h" if k[2] == 1 else "(k g)"
    sizes = {"g": ratio} if heads == "(k g)" else {}
    # Factors in the order in which the rule names them, which the compiler requires.
    whole: Dict[str, None] = {}

    def spelt(letters: List[str]) -> str:
        words = []
        for letter in letters:
            factor = letter or next(alone)
            if factor == "h":
                factor = heads
                whole.update(dict.fromkeys(sizes))
            if factor not in ("b", "k", "(k g)"):
                whole[factor] = None
            words.append(factor)
        return " ".join(words)

    ours, theirs = (", ".join(map(spelt, axes)) for axes in _all_axes(static, operands, results))
    return f"{ours} -> {theirs}", {"need_replication_factors": tuple(whole), **sizes}


def _partitioned(static: _Static) -> Callable[..., Tuple[Any, ...]]:
    """The call, divided by batch and heads as its Q is."""
    whole = custom_partitioning(functools.partial(_emit, static))

    def shardings(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        q, k = (operands[static.names.index(name)] for name in "qk")
        batch, _, heads = (*getattr(q.sharding, "spec", ()), None, None, None)[:3]

        def devices(axes: Any) -> int:
            names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
            return math.prod(mesh.shape[name] for name in names)

        # Query heads stay with the heads of K that they share.
        if k.shape[2] % devices(heads):
            heads = None
        over = {"b": batch, "h": heads, "k": heads}
        place = lambda letters: NamedSharding(mesh, PartitionSpec(*map(over.get, letters)))
        return tuple(tuple(map(place, axes)) for axes in _all_axes(static, operands, results))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        ours, theirs = shardings(mesh, operands, results)
        return mesh, functools.partial(_emit, static), theirs, ours

    whole.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, operands, results: shardings(mesh, operands, results)[1],
        sharding_rule=lambda mesh, operands, results: _sharding_rule(static, operands, results),
    )
    return whole


@functools.lru_cache(maxsize=1024)
def _operator(static: _Static) -> Callable[..., Tuple[Any, ...]]:
    """A call with its rule for ``vmap``."""
    foldable = static.foldable()
    inner = _partitioned(static) if foldable else functools.partial(_emit, static)

    @custom_vmap
    def operator(*arrays: Any) -> Tuple[Any, ...]:
        return inner(*arrays)

    @operator.def_vmap
    def rule(axis_size: int, batched: Sequence[bool], *arrays: Any) -> Tuple[Any, Any]:
        # Every query head of a sequence has its own sink, whatever the sequence.
        shares_sink = "sink" not in static.names or not batched[static.names.index("sink")]
        if foldable and shares_sink:
            batch = arrays[0].shape[1 if batched[0] else 0]
            folded = [_folded(*named, axis_size, batch) for named in zip(static.names, arrays, batched)]
            out = tuple(x.reshape(axis_size, batch, *x.shape[1:]) for x in operator(*folded))
        else:
            mapped = [x for x, is_mapped in zip(arrays, batched) if is_mapped]

            def one(some: Sequence[Any]) -> Tuple[Any, ...]:
                rest = iter(some)
                return operator(*(next(rest) if is_mapped else x for x, is_mapped in zip(arrays, batched)))

            out = jax.lax.map(one, mapped)
        return out, tuple(True for _ in out)

    def call(*arrays: Any) -> Tuple[Any, ...]:
        # Rules for vmap and the partitioner forget over which axes of a shard_map their results vary.
        over = _manual_axes(arrays)
        return _varying(operator(*_varying(arrays, over)), over)

    return call


def _manual_axes(arrays: Sequence[Any]) -> FrozenSet[str]:
    """The axes of a ``shard_map`` around this call over which some array varies, as far as JAX follows them."""
    return frozenset().union(*map(_varies_over, arrays))


def _varies_over(x: Any) -> FrozenSet[str]:
    kind = jax.typeof(x)
    # Releases of JAX have two names for it.
    if hasattr(kind, "manual_axis_type"):
        return frozenset(kind.manual_axis_type.varying)
    return frozenset(getattr(kind, "vma", ()))


def _varying(arrays: Sequence[Any], over: FrozenSet[str]) -> Tuple[Any, ...]:
    """Arrays that all vary over these axes: the gradient of one that did not is then a sum over them."""

    def varying(x: Any) -> Any:
        lacking = tuple(sorted(over - _varies_over(x)))
        if not lacking:
            return x
        return jax.lax.pcast(x, lacking, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, lacking)

    return tuple(map(varying, arrays))


def _folded(name: str, x: Any, batched: bool, axis_size: int, batch: int) -> Any:
    """An operand whose mapped axis, in front, is joined to its batch."""
    axes = x.ndim - batched
    if not batched:
        # Shared by all: what has no batch, or one of 1 that is broadcast, stays.
        if (
            name == "sink"
            or (name == "alibi_slopes" and axes == 1)
            or (name == "bias" and (axes < 4 or x.shape[0] == 1))
        ):
            return x
        x = jnp.broadcast_to(x[None], (axis_size, *x.shape))
    elif name == "alibi_slopes" and axes == 1:
        x = jnp.broadcast_to(x[:, None], (axis_size, batch, *x.shape[1:]))
    elif name == "bias":
        x = x.reshape(axis_size, *(1,) * (4 - axes), *x.shape[1:])
        x = jnp.broadcast_to(x, (axis_size, batch, *x.shape[2:]))
    return x.reshape(axis_size * batch, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, *arrays: Any) -> Tuple[Any, ...]:
    return _operator(static)(*arrays)


def _forward(static: _Static, *primals: Any) -> Tuple[Tuple[Any, ...], Any]:
    """O, and LSE and small outputs where they are wanted; for the gradient, what it is made from."""
    arrays = tuple(primal.value for primal in primals)
    moved = {name for name, primal in zip(static.names, primals) if primal.perturbed}
    for name in ("block_table", "descale_q", "descale_k", "descale_v"):
        if name in static.names:
            raise ValueError(f"{name} is given, but there is no gradient of paged or FP8 tensors")
    if "alibi_slopes" in moved:
        raise ValueError("alibi_slopes: a gradient is wanted, of which attention has none")
    o, lse, *small = _operator(static._replace(lse=True))(*arrays)
    # An empty tuple has no leaves either, and it stays a tuple where None would change the tree.
    captured = tuple(name for name in static.names if name.startswith(_CAPTURED))
    wants = tuple(() if name in moved else None for name in ("bias", "sink", *captured))
    return ((o, lse, *small) if static.lse else (o, *small)), (arrays, o, lse, wants)


def _backward(static: _Static, kept: Any, gradients: Sequence[Any]) -> Tuple[Any, ...]:
    arrays, o, lse, wants = kept
    is_zero = [isinstance(gradient, SymbolicZero) for gradient in gradients]
    dout = jnp.zeros(o.shape, o.dtype) if is_zero[0] else gradients[0]
    extra = {"o": o, "lse": lse, "dout": dout}
    if static.lse and not is_zero[1]:
        extra["dlse"] = gradients[1]
    numbers = list(static.numbers)
    for bit, wanted in zip((_WANTS_DBIAS, _WANTS_DSINK), wants):
        numbers[_AT["options"]] |= 0 if wanted is None else bit
    captured = [name for name in static.names if name.startswith(_CAPTURED)]
    wanted = tuple(name for name, moves in zip(captured, wants[2:]) if moves is not None)
    call = _Static((*static.names, *extra), tuple(numbers), False, True, static.code, wanted)
    every = (*arrays, *extra.values())
    found = {r.name[1:]: x for r, x in zip(_results(call, every), _operator(call)(*every))}
    return tuple(found.get(name) for name in static.names)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: Literal[False] = False,
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    axis_name: Any = None,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: Literal[True],
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    axis_name: Any = None,
    **options: Unpack[Options],
) -> Tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: bool,
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    small: Tuple[()] = (),
    axis_name: Any = None,
    **options: Unpack[Options],
) -> Union[jax.Array, Tuple[jax.Array, jax.Array]]: ...
@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: bool = False,
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    small: Sequence[str],
    axis_name: Any = None,
    **options: Unpack[Options],
) -> Tuple[Any, ...]: ...
@_arguments.documented
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: bool = False,
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    small: Sequence[str] = (),
    axis_name: Any = None,
    **options: Unpack[Options],
) -> Any:
    """As :func:`fmha.attention`, on JAX's arrays; differentiable in q, k, v, bias and sink, by O and by LSE.

    Args:
        q: ``[batch, seqlen_q, num_heads_q, head_dim_qk]``, or packed ``[total_q, num_heads_q, head_dim_qk]``.
        k: ``[batch, seqlen_k, num_heads_kv, head_dim_qk]``, packed, or with ``block_table`` paged.
        v: as ``k``, of ``head_dim_v``.
        return_lse: whether LSE comes too, f32 ``[batch, num_heads_q, seqlen_q]`` or ``[num_heads_q, total_q]``.
        options: :func:`fmha.attention` says what each means. Numbers are Python's, not traced: another ``seed`` is
            another compiled program, and beside ``p_drop`` there has to be one.

        score_code, mask_code, captured: as there: texts, or functions over JAX's scalars, which JAX traces. A function
            reads an array of its closure by an index for each axis; what else it does with arrays is refused by the
            primitive's name. Arrays of floats have gradients. Numbers of ``captured`` are Python's; an array of no axes
            is an argument of the program.
        small: names of small outputs, f32: ``"row_max"`` of LSE's shape, each row's greatest score, ``"head_max"``
            ``[num_heads_q]``, a head's greatest, ``"key_sum"`` ``[batch, num_heads_q, seqlen_k]``, each key's
            probabilities before dropout, summed over the queries. They have no gradient, and change no bit of O.
        axis_name: an axis of the ``jax.shard_map`` around this call, over whose devices the rows of q, k and v are cut
            in order, evenly. Each device computes its own rows against all keys, which are gathered. ``mask``, tensors
            of masks and functions are of the whole's queries and keys; ``bias`` is this device's queries against all
            keys. Gradients of K and V are summed over the devices in f32. Dropout, ALiBi, texts of functions, packed
            and paged tensors are refused by name.

    Returns:
        O of Q's shape with ``head_dim_v``, or ``(O, LSE)``. Rows that lengths leave out are zero. Where ``small`` names
        some, they come last, as a dictionary: ``(O, {...})`` or ``(O, LSE, {...})``.

    Raises:
        FmhaError: shapes or types that do not go together, the argument first, then its numbers.
        TypeError, ValueError: an argument that is no number, no array or no mask, by its name.
    """
    band, masks = _split(options.get("mask"))
    whole = None
    if axis_name is not None:
        q, k, v = (_array(name, x) for name, x in zip("qkv", (q, k, v)))
        whole, k, v, rest, masks = _ranks_jax.gathered(axis_name, q, k, v, options, masks, band)
        score_code = _ranks_jax.function_of(whole, "score_code", score_code, 3)
        mask_code = _ranks_jax.function_of(whole, "mask_code", mask_code, 2)
        band, options = None, rest  # type: ignore[assignment]
    tensors, numbers = _arguments.bind(**{**options, "mask": band})
    if numbers[_AT["seed"]] is None:
        raise ValueError(f"seed: none is given beside p_drop {numbers[_AT['p_drop']]}, and a traced call draws none")
    given = [(name, x) for name, x in [*zip("qkv", (q, k, v)), *zip(_arguments.TENSORS, tensors)] if x is not None]
    wants_lse = _flag("return_lse", return_lse)
    if masks is not None:
        given += [(name, x) for name, x in zip(_MASK_TENSORS, masks.tensors) if x is not None]
        numbers = (*numbers, *(0,) * (_AT["block_q"] - len(numbers)), masks.block_q, masks.block_k)
    code = _code.bind(_Door, score_code, mask_code, captured)
    if code is not None:
        given += [(_CAPTURED + name, x) for name, x in zip(code.names, code.tensors)]
        code = code._replace(tensors=())
    names, arrays = tuple(name for name, _ in given), [_array(name, x) for name, x in given]
    static = _Static(names, numbers, wants_lse, code=code, small=_wanted_small(small))
    _check(static, arrays)
    out = _attention(static, *_varying(arrays, _manual_axes(arrays)))
    if not static.small:
        return (out[0], out[1]) if wants_lse else out[0]
    values = dict(zip(static.small, map(jax.lax.stop_gradient, out[1 + wants_lse :])))
    return (*out[: 1 + wants_lse], values if whole is None else _ranks_jax.small_of_all(whole, values))


def _wanted_small(small: Sequence[str]) -> Tuple[str, ...]:
    """Small outputs by name, in one order."""
    if isinstance(small, str) or not isinstance(small, Sequence):
        raise TypeError(f"small: {small!r} is no list of names; there are {', '.join(_SMALL)}")
    for name in small:
        if name not in _SMALL:
            raise ValueError(f"small: {name!r} is none of {', '.join(_SMALL)}")
    return tuple(name for name in _SMALL if name in small)


#: Names of the types of captured arrays in the language, by JAX's; what has none is made another.
_STORED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "bool": "bool"}
_WIDER = {"float64": "float32", "int16": "int32", "int8": "int32", "uint8": "int32"}


class _Door:
    """What code asks of JAX's arrays."""

    WRAPS = False
    read_function = staticmethod(_native.read_function)

    @staticmethod
    def is_compiling() -> bool:
        # JAX traces functions itself.
        return True

    Dispatching = contextlib.nullcontext

    @staticmethod
    def stored(x: Any) -> Optional[str]:
        if not isinstance(x, (jax.Array, numpy.ndarray, numpy.generic)):
            return None
        name = _WIDER.get(x.dtype.name, x.dtype.name)
        return _STORED.get(name, name)

    @staticmethod
    def captured(x: Any) -> jax.Array:
        name = _WIDER.get(x.dtype.name, x.dtype.name)
        if name not in _STORED:
            raise TypeError(f"captured: an array of {x.dtype.name} is none that a score or a mask reads")
        return jnp.asarray(x, name)

    @staticmethod
    def function(function: Any) -> Any:
        from ._traced_jax import traced

        return traced(function)


def _array(name: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {type(x).__name__} is no array of JAX's: {error}") from error
