"""Attention on NumPy's arrays, and on whatever speaks DLPack, in host memory."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, List, Optional, Tuple

import numpy

from . import _arguments, _code, _native
from ._mask_data import OUTPUTS
from ._trace import Code


def array(name: str, value: Any) -> numpy.ndarray:
    """The array behind a tensor, without a copy. NumPy has no bfloat16 and no FP8 of its own: arrays of a package that
    adds them (``ml_dtypes``) serve by their type's name."""
    if isinstance(value, numpy.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        try:
            return numpy.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{name}: NumPy does not take it by DLPack: {error}") from error
    raise TypeError(f"{name}: {type(value).__name__} is neither a NumPy array nor a DLPack tensor")


#: A traced index is wrapped: NumPy's array can not be indexed by it.
WRAPS = True

#: Types' names in the language of scores by NumPy's names. A captured array of another type in ``_WIDER`` is converted.
_STORED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "bool": "bool"}
_WIDER = {"float64": "float32", "int16": "int32", "int8": "int32", "uint8": "int32"}


read_function = _native.read_function
Dispatching = contextlib.nullcontext


def is_compiling() -> bool:
    """Whether a compiler traces the call."""
    return False


def stored(x: Any) -> Optional[str]:
    """The type of an array's elements in the language; ``None`` of what is no array."""
    if not isinstance(x, (numpy.ndarray, numpy.generic)):
        return None
    name = _WIDER.get(x.dtype.name, x.dtype.name)
    return _STORED.get(name, name)


def captured(x: Any) -> numpy.ndarray:
    """A captured array with elements that the language has."""
    name = _WIDER.get(x.dtype.name, x.dtype.name)
    if name not in _STORED:
        raise TypeError(f"captured: an array of {x.dtype.name} is none that a score or a mask reads")
    return numpy.asarray(x, name) if name != x.dtype.name else numpy.asarray(x)


def put_captured(request: _native.Request, at: int, name: str, value: Any, grad: int) -> numpy.ndarray:
    """Puts a captured array into a request, and returns what has to outlive it."""
    given, strides = _placed(f"captured {name}", value)
    data = given.ctypes.data if given.size else 0
    request.put_captured(at, data, given.dtype.name, given.shape, strides, grad=grad)
    return given


def put(request: _native.Request, name: str, value: Any) -> Optional[numpy.ndarray]:
    """Puts an array into a request, and returns what has to outlive it."""
    if value is None:
        return None
    given, strides = _placed(name, value)
    request.put(name, given.ctypes.data if given.size else 0, given.dtype.name, given.shape, strides)
    return given


def _placed(name: str, value: Any) -> Tuple[numpy.ndarray, List[int]]:
    """An array and its strides in elements."""
    given = array(name, value)
    size = given.dtype.itemsize
    for axis, stride in enumerate(given.strides):
        if stride % size:
            raise ValueError(f"{name} has stride {stride} bytes on axis {axis}, no multiple of {size}")
    if not given.dtype.isnative:
        raise TypeError(f"{name} is of {given.dtype.str}, whose bytes are in another machine's order")
    # NumPy makes arrays without elements with strides of 0; the library wants a step of 1 on the last axis.
    return given, [stride // size for stride in given.strides] if given.size else _dense(given.shape)


def _dense(shape: Tuple[int, ...]) -> List[int]:
    """Strides in elements of axes one in the other; one of size 0 counts as 1."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(size, 1))
    return strides[: len(shape)]


def _run(numbers: Tuple[Any, ...], tensors: Any, code: Optional[Code] = None) -> None:
    request = _native.Request(_seeded(numbers))
    alive = [put(request, name, value) for name, value in tensors]
    if code is not None:
        alive += _code.put(sys.modules[__name__], request, code)
    _native.run(request)
    del alive


def _o_dtype(like: numpy.ndarray, numbers: Tuple[Any, ...]) -> numpy.dtype:
    code = numbers[_native.NUMBERS.index("dtype_o")]
    if code < 0 and not like.dtype.name.startswith("float8"):
        return like.dtype
    name = "bfloat16" if code < 0 else next(name for name, known in _native.DTYPES.items() if known == code)
    try:
        return numpy.dtype(name)
    except TypeError:
        raise TypeError(f"dtype_o: NumPy has no {name}; the package ml_dtypes adds it") from None


def writable(name: str, value: Any) -> Any:
    """What is written to must be the caller's own memory, and not read-only."""
    if value is None:
        return None
    given = array(name, value)
    if not given.flags.writeable:
        raise ValueError(f"{name} is read-only, but is written")
    return given


def _outputs(query: numpy.ndarray, head_dim_v: int, numbers: Tuple[Any, ...]) -> Tuple[numpy.ndarray, numpy.ndarray]:
    # The kernel does not write rows that the lengths leave out, so they are zeros from the start.
    o = numpy.zeros((*query.shape[:-1], max(head_dim_v, 0)), _o_dtype(query, numbers))
    return o, numpy.zeros(query.shape[:-3] + (query.shape[-2], query.shape[-3]), numpy.float32)


def leaves_out_lse(qkv: Tuple[Any, Any, Any], tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]) -> bool:
    """Whether a call that does not ask for the LSE runs a kernel that does not write it."""
    return False


def _rows(name: str, value: Any) -> numpy.ndarray:
    """An array whose last axis is dense: a copy where it is not."""
    given = array(name, value)
    is_dense = not given.ndim or given.strides[-1] == given.itemsize or given.shape[-1] == 1
    return given if is_dense else numpy.ascontiguousarray(given)


def prepared(qkv: Tuple[Any, Any, Any], tensors: Tuple[Any, ...]) -> Tuple[Tuple[Any, Any, Any], Tuple[Any, ...]]:
    """A call's arrays, copied where an axis that has to be dense is not."""
    query, key, value = (array(*named) for named in zip("qkv", qkv))
    by_columns = value.ndim > 2 and value.strides[-3] == value.itemsize
    rest = (
        None if x is None else numpy.ascontiguousarray(array(name, x))
        for name, x in zip(_arguments.TENSORS[1:], tensors[1:])
    )
    bias = None if tensors[0] is None else _rows("bias", tensors[0])
    return (_rows("q", query), _rows("k", key), value if by_columns else _rows("v", value)), (bias, *rest)


def _seeded(numbers: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """A seed of NumPy's generator where a call that drops elements has none."""
    if numbers[_native.NUMBERS.index("seed")] is not None:
        return numbers
    return _arguments.with_seed(numbers, int(numpy.random.randint(-(1 << 63), (1 << 63) - 1, dtype=numpy.int64)))


def attention(
    q: Any,
    k: Any,
    v: Any,
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
    lse: bool = True,
    code: Optional[Code] = None,
) -> Tuple[numpy.ndarray, numpy.ndarray]:
    """O and LSE of a bound call."""
    (query, k, value), tensors = prepared((q, k, v), tensors)
    if query.ndim not in (3, 4) or not value.ndim:
        raise ValueError(f"q has {query.ndim} axes and v {value.ndim}, not 4 each or, packed, 3")
    o, sums = _outputs(query, value.shape[-1], numbers)
    for name, x in zip(OUTPUTS, () if code is None else code.masks.outputs):
        writable(name, x)
    arrays = [("q", query), ("k", k), ("v", value), ("o", o), ("lse", sums), *zip(_arguments.TENSORS, tensors)]
    _run(numbers, arrays, code)
    return o, sums


def attention_out(
    q: Any,
    k: Any,
    v: Any,
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
    scale_o: Any,
    o: Any,
    lse: Any,
    keep_mask: Any,
    small: Tuple[Any, ...] = (None, None, None),
) -> None:
    given = (("o", o), ("lse", lse), ("keep_mask", keep_mask), *zip(OUTPUTS, small))
    outputs = [(name, writable(name, value)) for name, value in given]
    _run(numbers, [("q", q), ("k", k), ("v", v), ("scale_o", scale_o), *outputs, *zip(_arguments.TENSORS, tensors)])


def kvcache(
    q: Any, k: Any, v: Any, cache: Tuple[Any, ...], tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]
) -> Tuple[numpy.ndarray, numpy.ndarray]:
    query = array("q", q)
    if cache[0] is not None:
        k, v = writable("k", k), writable("v", v)
        scales = zip(_arguments.CACHE_SCALES, cache[6:])
        cache = (*cache[:6], *(x if x is None else writable(name, x) for name, x in scales))
    value = array("v", v) if v is not None else None
    if query.ndim not in (3, 4):
        raise ValueError(f"q has {query.ndim} axes of {query.shape}, neither 4 nor, packed, 3")
    head_dim_v = numbers[_native.NUMBERS.index("head_dim_v")] if value is None else value.shape[-1]
    o, lse = _outputs(query, head_dim_v, numbers)
    _run(
        numbers,
        [
            ("q", query),
            ("k", k),
            ("v", value),
            ("o", o),
            ("lse", lse),
            *zip(_arguments.CACHE_TENSORS + _arguments.CACHE_SCALES, cache),
            *zip(_arguments.TENSORS, tensors),
        ],
    )
    return o, lse


def add_parts(o_parts: Any, o: Any, numbers: Tuple[Any, ...]) -> numpy.ndarray:
    parts = array("o_parts", o_parts)
    option = _native.OPTIONS["adds" if o is None else "adds_to"]
    o = numpy.zeros(parts.shape[1:], _o_dtype(parts, numbers)) if o is None else writable("o", o)
    _run((*numbers[:-1], numbers[-1] | option), [("o_parts", parts), ("o", o)])
    return o


def combine(o_parts: Any, lse_parts: Any, numbers: Tuple[Any, ...]) -> Tuple[numpy.ndarray, numpy.ndarray]:
    parts = array("o_parts", o_parts)
    lse_parts = numpy.ascontiguousarray(array("lse_parts", lse_parts))
    o = numpy.zeros(parts.shape[1:], _o_dtype(parts, numbers))
    lse = numpy.zeros(lse_parts.shape[1:], numpy.float32)
    _run(numbers, [("o_parts", parts), ("lse_parts", lse_parts), ("o", o), ("lse", lse)])
    return o, lse
