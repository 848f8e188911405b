"""Functions of a score and of a pair, called once with traced values: what they compute, as the small language's text.

A :class:`Traced` value stands for one element. Operators and torch's functions on it write text; what else is asked of
it is refused by its name. Tensors that a function reads by index are captured, and so are Python's numbers that it
finds
in its closure or among its globals: a number is an argument of a call, so another value is the same text.
"""

from __future__ import annotations

import dis
import functools
import math
import types
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ._mask_data import Masks
from ._numbers import shown

#: Reserved words of the language of scores and masks.
_WORDS = frozenset(
    "let and or not true false inf nan select clamp min max pow mul0 if else bool int float "
    "s b h q k seqlen_q seqlen_k abs sign floor ceil round exp exp2 log log2 sin cos tanh erf sigmoid relu sqrt rsqrt".split()
)

#: Length in characters above which an expression gets a name of its own.
_LONGEST = 48


class Code(NamedTuple):
    """A score and a mask as text, and what they capture by name."""

    #: Texts of the functions; ``""`` for an absent one.
    score: str
    mask: str
    #: Names of captured tensors, then names of captured numbers.
    names: Tuple[str, ...]
    tensors: Tuple[Any, ...]
    numbers: Tuple[float, ...]
    #: Masks as data that the call has beside the functions.
    masks: Masks = Masks()

    def is_text(self) -> bool:
        """Whether there is a score or a mask as text, and not masks as data alone."""
        return bool(self.score or self.mask)


class _Real(float):
    """A number of a function's closure: with a traced value it is an argument of the call."""

    label: str


class _Whole(int):
    """Likewise a whole one."""

    label: str


class Tracer:
    """What two functions capture together."""

    def __init__(
        self,
        stored: Callable[[Any], Optional[str]],
        prepared: Callable[[Any], Any],
        taken: Iterable[str] = (),
        wraps: bool = False,
        is_compiling: bool = False,
    ) -> None:
        """``stored`` names the type of a tensor's elements in the language, and is ``None`` of what is no tensor;
        ``prepared`` is the tensor with elements that the language has; names that are ``taken`` are given to nothing.
        With ``wraps`` a library's tensors do not know what to do with a traced index, and are handed over as parts.
        A compiler that traces the call guards numbers itself: they are those of the text."""
        self._stored, self._prepared, self._taken = stored, prepared, frozenset(taken)
        self._wraps, self.is_compiling = wraps, is_compiling
        self._labels: Dict[int, str] = {}
        #: Names of captured objects by identity. The objects live as long as this tracer.
        self._names: Dict[int, str] = {}
        #: Captured tensors as the function has them, each with its name and type.
        self._captured: List[Tuple[Any, str, str]] = []
        self._tensors: List[Tuple[str, Any, str]] = []
        self._numbers: List[Tuple[str, Any]] = []
        self._kept: List[Any] = []
        self._read: Dict[int, Any] = {}
        #: Q's device, as Q's tensor library describes it.
        self.device: Any = None
        #: Functions whose closures were read, by identity.
        self.seen: Dict[int, Any] = {}

    def trace(self, kind: str, what: str, function: Callable[..., Any], variables: str) -> str:
        """The text of ``function``, a score or a mask, called once with the ``variables`` of these letters; ``what`` is
        the name of the argument that it is."""
        if not callable(function):
            raise TypeError(f"{what}: {shown(function)} is no function")
        self.body = body = _Body(self, what)
        self.seen.clear()
        given = [Traced(body, name, "float" if name == "s" else "int") for name in variables]
        value = body.value((function if self.is_compiling else _with_labels(self, function))(*given))
        self.seen.clear()
        if kind == "mask":
            value = body.cast(value, "bool")
        elif value.type == "bool":
            raise TypeError(f"{what} gives a bool, which is a mask, not a score")
        return body.declared() + "".join(body.lines) + value.text

    def is_tensor(self, x: Any) -> bool:
        return self._stored(x) is not None

    def tensor(self, x: Any) -> Tuple[str, str]:
        """The name and the type of a captured tensor."""
        # Tensors are compared by identity without `id`, which torch's compiler lacks for tensors that the graph makes.
        for known, name, stored in self._captured:
            if known is x:
                return name, stored
        ready = self._prepared(x)
        kind = self._stored(ready)
        assert kind is not None
        name = self._new_name(None if self.is_compiling else self._labels.get(id(x)), "t")
        self._captured.append((x, name, kind))
        self._tensors.append((name, ready, kind))
        return name, kind

    def number(self, x: Any, label: Optional[str]) -> Tuple[str, str]:
        """The name and the type of a captured number."""
        kind = "float" if isinstance(x, float) else "int"
        if kind == "int" and abs(x) > 1 << 53:
            raise ValueError(f"captured {label or 'number'} {int(x)} is beyond 2^53")
        if id(x) not in self._names:
            self._names[id(x)] = self._new_name(label, "n")
            self._kept.append(x)
            self._numbers.append((self._names[id(x)], float(x) if kind == "float" else int(x)))
        return self._names[id(x)], kind

    def wrapped(self, x: Any) -> Any:
        """A tensor as a function finds it."""
        return Part(self.body, x, ()) if self._wraps and len(x.shape) else x

    def label(self, x: Any, label: str) -> None:
        self._labels.setdefault(id(x), label)

    def label_of(self, x: Any) -> Optional[str]:
        return self._labels.get(id(x))

    def once(self, x: Any, number: Any) -> Any:
        """The one object that stands for the number of a tensor."""
        if id(x) not in self._read:
            self._kept.append(x)
            self._read[id(x)] = float(number) if isinstance(number, float) else int(number)
        return self._read[id(x)]

    def captured(self) -> Dict[str, Any]:
        """What the functions met, by name: more than they need, where a value goes nowhere."""
        return {**{name: tensor for name, tensor, _ in self._tensors}, **dict(self._numbers)}

    def _new_name(self, label: Optional[str], letter: str) -> str:
        taken = {*self._names.values(), *(name for name, *_ in self._tensors), *self._taken}
        name = label or ""
        sound = name.isascii() and name.isidentifier() and not name.startswith("_")
        if sound and name in _WORDS:
            name += "_"
        if not sound or name in taken:
            count = len(taken)
            while f"{letter}{count}" in taken:
                count += 1
            name = f"{letter}{count}"
        return name


class _Body:
    """The text of one function while it grows."""

    def __init__(self, tracer: Tracer, what: str) -> None:
        self.tracer, self.what = tracer, what
        self.lines: List[str] = []
        self._declared: Dict[str, str] = {}

    def declared(self) -> str:
        return "".join(f"{name}: {kind}; " for name, kind in self._declared.items())

    def refuse(self, operation: str, why: str) -> NotImplementedError:
        return NotImplementedError(f"{self.what}: {operation}: {why}")

    def make(self, text: str, kind: str) -> "Traced":
        """A value; a text that has grown long gets a name, so that it is spelt once."""
        if len(text) > _LONGEST:
            name = f"_{len(self.lines)}"
            self.lines.append(f"let {name} = {text}; ")
            text = name
        return Traced(self, text, kind)

    def value(self, x: Any) -> "Traced":
        """A traced value of a number, of a tensor of one element, or of itself."""
        if isinstance(x, Traced):
            if x._body is not self:
                raise self.refuse("a traced value", "it was kept from another function's call")
            return x
        if isinstance(x, Part):
            if not x.is_whole():
                raise self.refuse("a captured tensor", f"{x.said()} has axes left, of which each needs an index")
            return x.read()
        if isinstance(x, (_Real, _Whole)):
            return self._number(x, x.label)
        if isinstance(x, bool):
            return Traced(self, "true" if x else "false", "bool")
        if isinstance(x, int):
            if not -(1 << 63) <= x < 1 << 63:
                raise ValueError(f"{self.what}: the integer {x} does not fit 64 bits")
            # The number may be of a library's own type, which prints itself in another way.
            return Traced(self, str(int(x)) if x >= 0 else f"({int(x)})", "int")
        if isinstance(x, float):
            return Traced(self, _literal(x), "float")
        if self.tracer.is_tensor(x):
            return self._of_tensor(x)
        raise self.refuse(type(x).__name__, "a value of the language is a number, a bool or an element of a tensor")

    def _number(self, x: Any, label: Optional[str]) -> "Traced":
        name, kind = self.tracer.number(x, label)
        self._declared[name] = kind
        return Traced(self, name, kind)

    def _of_tensor(self, x: Any) -> "Traced":
        shape = tuple(x.shape)
        if shape and math.prod(shape) != 1:
            said = f"a captured tensor of shape {list(shape)} meets a traced value: read one element, by an index each"
            raise self.refuse("operand", said)
        is_of_host = getattr(getattr(x, "device", None), "type", "cpu") == "cpu"
        if is_of_host and not (self.tracer.is_compiling or getattr(x, "requires_grad", False)):
            # A number on the host becomes an argument of the call. A compiler knows no value of such a tensor.
            return self._of_host(x)
        return Part(self, x.reshape(()) if shape else x, ()).read()

    def _of_host(self, x: Any) -> "Traced":
        number = x.item()
        if isinstance(number, bool):
            return self.value(number)
        label = self.tracer.label_of(x)
        return self._number(self.tracer.once(x, number), label)

    def load(self, tensor: Any, index: Sequence["Traced"]) -> "Traced":
        name, stored = self.tracer.tensor(tensor)
        self._declared[name] = f"{stored}[{', '.join('_' * len(index))}]"
        kind = {"bool": "bool", "i32": "int", "i64": "int"}.get(stored, "float")
        return self.make(f"{name}[{', '.join(at.text for at in index)}]", kind)

    def cast(self, x: "Traced", kind: str) -> "Traced":
        if x.type == kind:
            return x
        if kind == "bool":
            return self.make(f"({x.text} != 0)", "bool")
        return self.make(f"{kind}({x.text})", kind)

    def call(self, name: str, operands: Sequence["Traced"], kind: str) -> "Traced":
        return self.make(f"{name}({', '.join(x.text for x in operands)})", kind)

    def alike(self, *operands: Any, least: str = "bool") -> Tuple[List["Traced"], str]:
        """Values, cast to the widest of their types."""
        values = [self.value(x) for x in operands]
        order = ("bool", "int", "float")
        kind = order[max(order.index(least), *(order.index(x.type) for x in values))]
        return [self.cast(x, kind) for x in values], kind


def _literal(x: float) -> str:
    """A number of the text, whose sign is its own."""
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "inf" if x > 0 else "(-inf)"
    text = repr(float(x))
    return f"({text})" if text.startswith("-") else text


def _unary(name: str) -> Callable[..., "Traced"]:
    """Of floats."""

    def compute(body: _Body, x: Any) -> Traced:
        return body.call(name, [body.cast(body.value(x), "float")], "float")

    return compute


def _whole(name: str) -> Callable[..., "Traced"]:
    """A rounding, which whole numbers have behind them."""

    def compute(body: _Body, x: Any) -> Traced:
        value = body.value(x)
        return value if value.type == "int" else body.call(name, [body.cast(value, "float")], "float")

    return compute


def _kept(name: str) -> Callable[..., "Traced"]:
    """Of numbers, whole or not."""

    def compute(body: _Body, x: Any) -> Traced:
        (value,), kind = body.alike(x, least="int")
        return body.call(name, [value], kind)

    return compute


def _arithmetic(operator: str, of_bools: Optional[str] = None) -> Callable[..., "Traced"]:
    def compute(body: _Body, a: Any, b: Any, alpha: Any = 1) -> Traced:
        (x, y), kind = body.alike(a, b)
        if not (isinstance(alpha, int) and alpha == 1):
            y = body.value(y * alpha)
            (x, y), kind = body.alike(x, y)
        if kind == "bool":
            if of_bools is None:
                (x, y), kind = body.alike(x, y, least="int")
            else:
                return body.make(f"({x.text} {of_bools} {y.text})", "bool")
        return body.make(f"({x.text} {operator} {y.text})", kind)

    return compute


def _comparison(operator: str) -> Callable[..., "Traced"]:
    def compute(body: _Body, a: Any, b: Any) -> Traced:
        (x, y), _ = body.alike(a, b, least="int")
        return body.make(f"({x.text} {operator} {y.text})", "bool")

    return compute


def _bits(operator: str, of_bools: str, name: str) -> Callable[..., "Traced"]:
    def compute(body: _Body, a: Any, b: Any) -> Traced:
        (x, y), kind = body.alike(a, b)
        if kind == "float":
            raise body.refuse(name, "floats have no bits here")
        return body.make(f"({x.text} {of_bools if kind == 'bool' else operator} {y.text})", kind)

    return compute


def _logical(operator: str) -> Callable[..., "Traced"]:
    def compute(body: _Body, a: Any, b: Any) -> Traced:
        x, y = (body.cast(body.value(x), "bool") for x in (a, b))
        return body.make(f"({x.text} {operator} {y.text})", "bool")

    return compute


def _shift(operator: str, name: str) -> Callable[..., "Traced"]:
    def compute(body: _Body, a: Any, b: Any) -> Traced:
        (x, y), kind = body.alike(a, b, least="int")
        if kind != "int":
            raise body.refuse(name, "floats have no bits here")
        return body.make(f"({x.text} {operator} {y.text})", "int")

    return compute


def _divide(body: _Body, a: Any, b: Any, rounding_mode: Optional[str] = None) -> "Traced":
    if rounding_mode == "floor":
        return _floor_divide(body, a, b)
    (x, y), kind = body.alike(a, b, least="int")
    if rounding_mode == "trunc" and kind == "int":
        # Truncation is made of the floor: 1 is added where the quotient is negative and not whole.
        below = body.make(f"(({x.text} < 0) != ({y.text} < 0) and {x.text} % {y.text} != 0)", "bool")
        return body.make(f"(({x.text} // {y.text}) + int({below.text}))", "int")
    (x, y), _ = body.alike(a, b, least="float")
    quotient = body.make(f"({x.text} / {y.text})", "float")
    if rounding_mode is None:
        return quotient
    if rounding_mode != "trunc":
        raise body.refuse("div", f"rounding_mode {shown(rounding_mode)} is neither None, 'floor' nor 'trunc'")
    return _trunc(body, quotient)


def _trunc(body: _Body, x: Any) -> "Traced":
    value = body.value(x)
    if value.type != "float":
        return value
    return body.make(f"select({value.text} < 0.0, ceil({value.text}), floor({value.text}))", "float")


def _floor_divide(body: _Body, a: Any, b: Any) -> "Traced":
    (x, y), kind = body.alike(a, b, least="int")
    if kind == "int":
        return body.make(f"({x.text} // {y.text})", "int")
    return body.make(f"floor({x.text} / {y.text})", "float")


def _power(body: _Body, a: Any, b: Any) -> "Traced":
    if isinstance(b, (int, float)) and not isinstance(b, bool) and b in (1, 2, 3):
        x = body.value(a)
        x = body.cast(x, "float" if isinstance(b, float) or x.type == "float" else "int")
        return body.make(f"({' * '.join([x.text] * int(b))})", x.type)
    (x, y), kind = body.alike(a, b, least="int")
    if kind == "int":
        raise body.refuse("pow", "whole numbers have powers 1, 2 and 3; a float has any: give x.float()")
    return body.call("pow", [x, y], "float")


def _not(body: _Body, x: Any) -> "Traced":
    value = body.value(x)
    if value.type == "float":
        raise body.refuse("bitwise_not", "floats have no bits here")
    return body.make(f"(not {value.text})" if value.type == "bool" else f"(~{value.text})", value.type)


def _logical_not(body: _Body, x: Any) -> "Traced":
    return body.make(f"(not {body.cast(body.value(x), 'bool').text})", "bool")


def _negative(body: _Body, x: Any) -> "Traced":
    (value,), kind = body.alike(x, least="int")
    return body.make(f"(-({value.text}))", kind)


def _pairwise(name: str) -> Callable[..., "Traced"]:
    def compute(body: _Body, a: Any, b: Any) -> Traced:
        values, kind = body.alike(a, b, least="int")
        return body.call(name, values, kind)

    return compute


def _where(body: _Body, condition: Any, a: Any, b: Any) -> "Traced":
    chosen = body.value(condition)
    if chosen.type != "bool":
        raise body.refuse("where", f"its condition is {chosen.type}, not a bool")
    values, kind = body.alike(a, b)
    if kind == "bool":
        x, y = values
        return body.make(f"({chosen.text} and {x.text} or not {chosen.text} and {y.text})", "bool")
    return body.call("select", [chosen, *values], kind)


def _masked_fill(body: _Body, x: Any, hidden: Any, value: Any) -> "Traced":
    return _where(body, hidden, value, x)


def _clamp(body: _Body, x: Any, min: Any = None, max: Any = None) -> "Traced":
    if min is None and max is None:
        raise body.refuse("clamp", "neither min nor max is given")
    given = [bound for bound in (min, max) if bound is not None]
    values, kind = body.alike(x, *given, least="int")
    if len(values) == 3:
        return body.call("clamp", values, kind)
    low, high = (_literal(-math.inf), "inf") if kind == "float" else (str(-(1 << 63)), str((1 << 63) - 1))
    bounds = (values[1].text, high) if max is None else (low, values[1].text)
    return body.make(f"clamp({values[0].text}, {bounds[0]}, {bounds[1]})", kind)


def _square(body: _Body, x: Any) -> "Traced":
    return _power(body, x, 2)


def _reciprocal(body: _Body, x: Any) -> "Traced":
    return _divide(body, 1.0, x)


def _silu(body: _Body, x: Any) -> "Traced":
    value = body.cast(body.value(x), "float")
    return body.make(f"({value.text} * sigmoid({value.text}))", "float")


def _is_nan(body: _Body, x: Any) -> "Traced":
    value = body.value(x)
    return body.make(f"({value.text} != {value.text})", "bool")


def _is_inf(body: _Body, x: Any) -> "Traced":
    value = body.cast(body.value(x), "float")
    return body.make(f"(abs({value.text}) == inf)", "bool")


def _self(body: _Body, x: Any) -> "Traced":
    return body.value(x)


#: Operations of the language, by the names that torch, NumPy and JAX give them.
OPERATIONS: Dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in "exp exp2 log log2 sin cos tanh erf sigmoid sqrt rsqrt".split()},
    "relu": _kept("relu"),
    **{name: _whole(name) for name in "floor ceil round".split()},
    "rint": _whole("round"),
    "trunc": _trunc,
    "fix": _trunc,
    **dict.fromkeys(("abs", "absolute", "fabs", "__abs__"), _kept("abs")),
    **dict.fromkeys(("sign", "sgn"), _kept("sign")),
    **dict.fromkeys(("neg", "negative", "__neg__"), _negative),
    **dict.fromkeys(("positive", "clone", "contiguous", "squeeze"), _self),
    **dict.fromkeys(("square",), _square),
    **dict.fromkeys(("reciprocal",), _reciprocal),
    "silu": _silu,
    "isnan": _is_nan,
    "isinf": _is_inf,
    **dict.fromkeys(("add", "__add__"), _arithmetic("+", "or")),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _arithmetic("-")),
    **dict.fromkeys(("mul", "multiply", "__mul__"), _arithmetic("*", "and")),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _divide),
    **dict.fromkeys(("floor_divide", "__floordiv__"), _floor_divide),
    **dict.fromkeys(("remainder", "mod", "__mod__"), _arithmetic("%")),
    **dict.fromkeys(("pow", "power", "float_power", "__pow__"), _power),
    **dict.fromkeys(("eq", "equal", "__eq__"), _comparison("==")),
    **dict.fromkeys(("ne", "not_equal", "__ne__"), _comparison("!=")),
    **dict.fromkeys(("lt", "less", "__lt__"), _comparison("<")),
    **dict.fromkeys(("le", "less_equal", "__le__"), _comparison("<=")),
    **dict.fromkeys(("gt", "greater", "__gt__"), _comparison(">")),
    **dict.fromkeys(("ge", "greater_equal", "__ge__"), _comparison(">=")),
    **dict.fromkeys(("bitwise_and", "__and__"), _bits("&", "and", "bitwise_and")),
    **dict.fromkeys(("bitwise_or", "__or__"), _bits("|", "or", "bitwise_or")),
    **dict.fromkeys(("bitwise_xor", "__xor__"), _bits("^", "!=", "bitwise_xor")),
    **dict.fromkeys(("bitwise_not", "invert", "__invert__"), _not),
    **dict.fromkeys(("bitwise_left_shift", "left_shift", "__lshift__"), _shift("<<", "left_shift")),
    **dict.fromkeys(("bitwise_right_shift", "right_shift", "__rshift__"), _shift(">>", "right_shift")),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("!="),
    "logical_not": _logical_not,
    **dict.fromkeys(("minimum", "min"), _pairwise("min")),
    **dict.fromkeys(("maximum", "max"), _pairwise("max")),
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda body, x, min: _clamp(body, x, min=min),
    "clamp_max": lambda body, x, max: _clamp(body, x, max=max),
    "float": lambda body, x: body.cast(body.value(x), "float"),
    "int": lambda body, x: body.cast(body.value(x), "int"),
    "long": lambda body, x: body.cast(body.value(x), "int"),
    "bool": lambda body, x: body.cast(body.value(x), "bool"),
}

#: Operations whose operands are in reverse order.
REFLECTED = {"rsub": "sub", "__rsub__": "sub", "__rpow__": "pow", "__rtruediv__": "div", "__rdiv__": "div"}
REFLECTED.update({"__rfloordiv__": "floor_divide", "__rmod__": "remainder"})

#: Conversions by the names of types that hold every value of the language's float, int or bool.
_CASTS = {"float32": "float", "int32": "int", "int64": "int", "bool": "bool"}

_TRUTH = (
    "a Python `if`, `and`, `or`, `not`, `min` or `max` asks a traced value for its truth, another for each pair: "
    "use torch.where, or &, | and ~"
)


def _operator(name: str, reflected: bool = False) -> Callable[..., Any]:
    def operate(self: "Traced", *others: Any) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        return operation(self._body, name, operands, {})

    return operate


def operation(body: _Body, name: str, args: Sequence[Any], kwargs: Dict[str, Any]) -> "Traced":
    """The value of an operation, by its name."""
    if name in REFLECTED:
        name, args = REFLECTED[name], args[::-1]
    compute = OPERATIONS.get(name)
    if compute is None:
        raise body.refuse(name, "the language of scores and masks has no such operation")
    kwargs = {key: value for key, value in kwargs.items() if key not in ("out", "inplace") or value}
    try:
        return compute(body, *args, **kwargs)
    except TypeError as error:
        said = str(error)
        if "argument" not in said:
            raise
        given = ", ".join([*(type(x).__name__ for x in args), *kwargs])
        raise body.refuse(name, f"its arguments here ({given}) are none that the language takes") from None


class Traced:
    """A value of one pair, while its function is called once."""

    __slots__ = ("_body", "text", "type")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, body: _Body, text: str, kind: str) -> None:
        self._body, self.text, self.type = body, text, kind

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from ._traced_torch import dispatch

        return dispatch(function, args, kwargs or {})

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> "Traced":
        if method != "__call__":
            raise self._body.refuse(f"{function.__name__}.{method}", "a traced value is one element")
        return operation(self._body, function.__name__, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> "Traced":
        return operation(self._body, function.__name__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in OPERATIONS:
            return lambda *args, **kwargs: operation(self._body, name, (self, *args), kwargs)
        from ._traced_torch import attribute

        return attribute(self, name)

    def __bool__(self) -> bool:
        raise TypeError(f"{self._body.what}: {_TRUTH}")

    def _no_number(self, *_: Any) -> Any:
        raise TypeError(
            f"{self._body.what}: a Python number is asked of a traced value, which is another for each pair: "
            "use torch's functions in place of math's, and no range() or list index"
        )

    __float__ = __int__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = _no_number

    def __iter__(self) -> Any:
        raise TypeError(f"{self._body.what}: a traced value is one element, over which nothing iterates")

    def __len__(self) -> int:
        raise TypeError(f"{self._body.what}: a traced value is one element and has no length")

    def __getitem__(self, index: Any) -> "Traced":
        whole = index if isinstance(index, tuple) else (index,)
        if all(at is None or at is Ellipsis for at in whole):
            return self
        raise self._body.refuse("[]", "a traced value is one element, of which none is read by an index")

    def like(self, variable: str) -> "Traced":
        """Another variable of the pair: a length of its sequence."""
        return Traced(self._body, variable, "int")

    def __repr__(self) -> str:
        return f"Traced({self.text}: {self.type})"

    __add__, __radd__ = _operator("add"), _operator("add", True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", True)
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", True)
    __mod__, __rmod__ = _operator("remainder"), _operator("remainder", True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", True)
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", True)
    __lshift__, __rlshift__ = _operator("left_shift"), _operator("left_shift", True)
    __rshift__, __rrshift__ = _operator("right_shift"), _operator("right_shift", True)
    __lt__, __le__, __gt__, __ge__ = (_operator(name) for name in ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]
    __neg__, __pos__, __abs__, __invert__ = (_operator(name) for name in ("neg", "positive", "abs", "bitwise_not"))


class Part:
    """A captured tensor with some of its indices."""

    __slots__ = ("_body", "_tensor", "_index")

    def __init__(self, body: _Body, tensor: Any, index: Tuple[Traced, ...]) -> None:
        self._body, self._tensor, self._index = body, tensor, index

    def is_whole(self) -> bool:
        return len(self._index) == len(self._tensor.shape)

    def said(self) -> str:
        return f"a tensor of shape {list(self._tensor.shape)} with {len(self._index)} of its indices"

    def read(self) -> Traced:
        return self._body.load(self._tensor, self._index)

    def __getitem__(self, index: Any) -> Any:
        given = index if isinstance(index, tuple) else (index,)
        axes = len(self._tensor.shape)
        if len(self._index) + len(given) > axes:
            raise IndexError(f"{self._body.what}: {axes} axes have {len(self._index) + len(given)} indices")
        values: List[Traced] = []
        for at in given:
            if at is None or at is Ellipsis or isinstance(at, slice):
                raise self._body.refuse("[]", f"{shown(at)} is no index: an element is read, by one number an axis")
            extent = self._tensor.shape[len(self._index) + len(values)]
            if isinstance(at, int) and not -extent <= at < extent:
                raise IndexError(f"{self._body.what}: index {at} is not in an axis of {extent}")
            value = self._body.value(at)
            if value.type != "int":
                raise self._body.refuse("[]", f"an index is {value.type}, not an integer: give x.long()")
            values.append(value)
        part = Part(self._body, self._tensor, (*self._index, *values))
        return part.read() if part.is_whole() else part

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from ._traced_torch import dispatch

        return dispatch(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._body.refuse(name, f"{self.said()} is read by the others, and nothing else is done with it")


def is_plain(function: Any) -> bool:
    """Whether a function is Python's own, which does with its arguments what its operators say."""
    if isinstance(function, functools.partial):
        return is_plain(function.func)
    return isinstance(function, (types.FunctionType, types.MethodType))


#: Packages whose functions' globals hold no values of a caller.
_NOT_THE_CALLERS = ("torch", "numpy", "jax", "math", "builtins")


def _with_labels(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose closure and globals have numbers that are known again where a traced value meets them. Names
    of its captured tensors are noted."""
    if isinstance(function, functools.partial):
        given = {name: _marked(tracer, name, held) for name, held in function.keywords.items()}
        rest = (_marked(tracer, "n", held) for held in function.args)
        return functools.partial(_with_labels(tracer, function.func), *rest, **given)
    if not isinstance(function, types.FunctionType):
        return function
    if id(function) in tracer.seen:
        return tracer.seen[id(function)]
    # A recursive function finds itself here, untraced.
    tracer.seen[id(function)] = function
    code = function.__code__
    cells, changed = [], False
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            held = cell.cell_contents
        except ValueError:
            cells.append(cell)
            continue
        marked = _marked(tracer, name, held)
        changed |= marked is not held
        cells.append(types.CellType(marked) if marked is not held else cell)
    new = {}
    if (function.__module__ or "").partition(".")[0] not in _NOT_THE_CALLERS:
        for name in code.co_names:
            held = function.__globals__.get(name)
            marked = _marked(tracer, name, held)
            if marked is not held:
                new[name] = marked
    if changed or new:
        scope = {**function.__globals__, **new} if new else function.__globals__
        made = types.FunctionType(code, scope, function.__name__, function.__defaults__, tuple(cells) or None)
        made.__kwdefaults__ = function.__kwdefaults__
        tracer.seen[id(function)] = made
    return tracer.seen[id(function)]


#: Modules whose functions never change.
_CONSTANT_MODULES = frozenset(("torch", "math", "builtins", "operator", "numpy"))

#: Types whose values are told apart by their text.
_VALUES = (int, float, bool, str, bytes, type(None))


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> Tuple[str, ...]:
    """Names that a function and those inside it may read from its globals."""
    inner = (_global_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


@functools.lru_cache(maxsize=1024)
def _imports(code: types.CodeType) -> bool:
    """Whether a function, or one inside it, imports while it runs."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return any(x.opname == "IMPORT_NAME" for x in dis.get_instructions(code)) or any(map(_imports, inner))


def facts(function: Any, is_tensor: Callable[[Any], bool]) -> Optional[List[Any]]:
    """All that a function's trace depends on, to compare by :func:`same`; ``None`` where something else may be read:
    an object's attribute, a list, a tensor whose number is."""
    found: List[Any] = []
    return found if _note(function, is_tensor, found, []) else None


def same(a: List[Any], b: List[Any]) -> bool:
    """Whether two functions' facts are the same."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b):
        # The text tells 0.0 from -0.0, and makes a NaN equal itself.
        if x is not y and not (type(x) is type(y) and type(x) in _VALUES and repr(x) == repr(y)):
            return False
    return True


def _note(held: Any, is_tensor: Callable[[Any], bool], found: List[Any], path: List[Any]) -> bool:
    found.append(held)
    kind = type(held)
    if kind in _VALUES:
        return True
    if kind is types.FunctionType:
        if any(held is x for x in path):
            return True
        if len(path) > 8:
            return False
        if (held.__module__ or "").partition(".")[0] in _CONSTANT_MODULES:
            return True
        # Attributes of a function may be read, and an import in its body reads values that no scope here holds.
        if vars(held).keys() - {"__wrapped__"} or _imports(held.__code__):
            return False
        path = [*path, held]
        parts = [held.__code__, *(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]
        found.append(parts[0])
        try:
            parts[1:1] = [cell.cell_contents for cell in held.__closure__ or ()]
        except ValueError:
            return False
        scope = held.__globals__
        parts += [scope[name] for name in _global_names(held.__code__) if name in scope]
        return all(_note(part, is_tensor, found, path) for part in parts[1:])
    if kind is functools.partial:
        parts = [held.func, *held.args, *held.keywords.values()]
        found += list(held.keywords)
        return all(_note(part, is_tensor, found, path) for part in parts)
    if kind is types.ModuleType:
        return held.__name__.partition(".")[0] in _CONSTANT_MODULES
    if kind is types.BuiltinFunctionType:
        # A bound method reads its object.
        return held.__self__ is None or isinstance(held.__self__, types.ModuleType)
    if isinstance(held, type):
        return (held.__module__ or "").partition(".")[0] in _CONSTANT_MODULES
    if is_tensor(held):
        # The number in a host tensor of one element is an argument, and may change in place.
        if held.device.type == "cpu" and held.numel() == 1 and not held.requires_grad:
            return False
        found += [held.requires_grad, str(held.dtype), str(tuple(held.shape)), str(tuple(held.stride()))]
        return True
    return False


def _marked(tracer: Tracer, name: str, held: Any) -> Any:
    kind = type(held)
    if kind is float or kind is int:
        number = _Real(held) if kind is float else _Whole(held)
        number.label = name
        return number
    if kind is types.FunctionType or kind is functools.partial:
        return _with_labels(tracer, held)
    if kind in (tuple, list) and held and all(isinstance(x, types.FunctionType) for x in held):
        marked = [_with_labels(tracer, x) for x in held]
        return kind(marked) if any(a is not b for a, b in zip(marked, held)) else held
    if tracer.is_tensor(held):
        tracer.label(held, name)
        return tracer.wrapped(held)
    return held
