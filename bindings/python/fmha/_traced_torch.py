"""Torch's functions and attributes on traced values."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch.overrides import TorchFunctionMode

from ._numbers import shown
from ._trace import _CASTS, OPERATIONS, Part, Traced, _Body, operation

_TYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}
#: Names of the types that a captured tensor's elements have in the language.
STORED = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}
_WIDER = {
    torch.float64: torch.float32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
}
_ALIASES = {"special_expit": "sigmoid", "special_erf": "erf", "special_exp2": "exp2", "hardtanh": "clamp"}


def stored(x: Any) -> Optional[str]:
    """The type of a tensor's elements in the language; ``None`` of what is no tensor."""
    if not isinstance(x, torch.Tensor):
        return None
    return STORED.get(x.dtype, STORED.get(_WIDER.get(x.dtype, x.dtype), str(x.dtype)))


def prepared(x: torch.Tensor) -> torch.Tensor:
    """A captured tensor with elements that the language has; autograd knows the cast."""
    if x.dtype in STORED:
        return x
    if x.dtype not in _WIDER:
        raise TypeError(f"captured: a tensor of {x.dtype} is none that a score or a mask reads")
    return x.to(_WIDER[x.dtype])


def _body_of(values: Any) -> Optional[_Body]:
    for x in values:
        if isinstance(x, (Traced, Part)):
            return x._body
        if isinstance(x, (tuple, list)):
            found = _body_of(x)
            if found is not None:
                return found
    return None


def dispatch(function: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """What a function of torch gives of traced values."""
    name = getattr(function, "__name__", str(function))
    body = _body_of((*args, *kwargs.values()))
    assert body is not None
    if name == "__getitem__":
        given, index = args
        if isinstance(given, (Traced, Part)):
            return given[index]
        return Part(body, given, ())[index]
    name = _ALIASES.get(name, name)
    if name in ("ones_like", "zeros_like", "full_like"):
        fill = {"ones_like": 1, "zeros_like": 0}.get(name)
        fill = (args[1] if len(args) > 1 else kwargs["fill_value"]) if fill is None else fill
        return _constant(body, fill, kwargs.get("dtype") or _TYPES[body.value(args[0]).type])
    if name in OPERATIONS or name not in _METHODS:
        return operation(body, name, args, kwargs)
    return _METHODS[name](body, *args, **kwargs)


class Dispatching(TorchFunctionMode):
    """While a function is called: a tensor that is asked for an element by traced indices hands the question here. A
    compiler's does not by itself, where there are several."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _body_of(args) is not None:
            return dispatch(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _cast(body: _Body, x: Any, dtype: torch.dtype) -> Traced:
    name = str(dtype).rpartition(".")[2]
    if name not in _CASTS:
        raise body.refuse(f"to({dtype})", "values of the language are float32, int64 and bool")
    return body.cast(body.value(x), _CASTS[name])


def _constant(body: _Body, fill: Any, dtype: Optional[torch.dtype]) -> Traced:
    value = body.value(fill)
    return value if dtype is None else _cast(body, value, dtype)


def _to(body: _Body, x: Any, *args: Any, **kwargs: Any) -> Traced:
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.dtype):
            return _cast(body, x, given)
        if isinstance(given, Traced):
            return body.cast(body.value(x), given.type)
        if isinstance(given, torch.Tensor):
            return _cast(body, x, given.dtype)
    return body.value(x)


def _type(body: _Body, x: Any, dtype: Any = None) -> Traced:
    if not isinstance(dtype, torch.dtype):
        raise body.refuse("type", f"{shown(dtype)} is no type of torch")
    return _cast(body, x, dtype)


def _of_no_axes(body: _Body, name: str, size: Any) -> None:
    if tuple(size) not in ((), (1,)):
        raise body.refuse(name, f"a value of the language is one element, not one of shape {list(size)}")


def _new(name: str, fill: Any) -> Any:
    def make(body: _Body, x: Any, *size: Any, dtype: Any = None, **kwargs: Any) -> Traced:
        given = kwargs.get("size", size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size)
        _of_no_axes(body, name, given)
        return _constant(body, fill, dtype or _TYPES[body.value(x).type])

    return make


def _new_full(body: _Body, x: Any, size: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Traced:
    _of_no_axes(body, "new_full", size)
    return _constant(body, fill_value, dtype or _TYPES[body.value(x).type])


def _new_tensor(body: _Body, x: Any, data: Any, dtype: Any = None, **_: Any) -> Traced:
    return _constant(body, data, dtype)


_METHODS: Dict[str, Any] = {
    "to": _to,
    "type": _type,
    "type_as": _to,
    "new_ones": _new("new_ones", 1),
    "new_zeros": _new("new_zeros", 0),
    "new_full": _new_full,
    "new_tensor": _new_tensor,
}


def attribute(x: Traced, name: str) -> Any:
    """An attribute of a tensor, of a traced value."""
    body = x._body
    if name in _METHODS:
        return lambda *args, **kwargs: _METHODS[name](body, x, *args, **kwargs)
    device = body.tracer.device or torch.device("cpu")
    facts: Dict[str, Any] = {
        "dtype": _TYPES[x.type],
        "device": device,
        "shape": torch.Size(()),
        "ndim": 0,
        "requires_grad": False,
        "is_cuda": device.type == "cuda",
        "dim": lambda: 0,
        "size": lambda: torch.Size(()),
        "numel": lambda: 1,
        "is_floating_point": lambda: x.type == "float",
    }
    if name in facts:
        return facts[name]
    if name in ("item", "tolist"):
        return x._no_number
    raise body.refuse(name, "the language of scores and masks has no such operation")
