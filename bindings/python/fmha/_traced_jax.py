"""Functions over JAX's scalars, traced by JAX, as the small language's text."""

from __future__ import annotations

import types
from typing import Any, Callable, Dict, List, Sequence

import jax
import jax.numpy as jnp
import numpy
from jax.extend.core import Primitive

from ._trace import Part, Traced, _Body, operation

#: Primitive for reading one element of an array in the closure: JAX traces it in place of a gather.
_load = Primitive("fmha_load")


@_load.def_abstract_eval
def _element(*indices: Any, at: int, dtype: Any) -> Any:
    return jax.core.ShapedArray((), dtype)


class CapturedArray:
    """An array of a closure, whose elements are read by as many indices as it has axes."""

    def __init__(self, array: Any, arrays: List[Any], index: Any = ()) -> None:
        self._array, self._arrays, self._index = array, arrays, index
        self.shape, self.dtype, self.ndim = array.shape[len(index) :], array.dtype, array.ndim - len(index)

    def __getitem__(self, index: Any) -> Any:
        given = (*self._index, *(index if isinstance(index, tuple) else (index,)))
        if len(given) < self._array.ndim:
            return CapturedArray(self._array, self._arrays, given)
        if not any(array is self._array for array in self._arrays):
            self._arrays.append(self._array)
        at = next(at for at, array in enumerate(self._arrays) if array is self._array)
        return _load.bind(*map(jnp.asarray, given), at=at, dtype=jax.dtypes.canonicalize_dtype(self.dtype))

    def __getattr__(self, name: str) -> Any:
        # JAX reads attributes that state facts and are no methods.
        if name.startswith("_") or not callable(getattr(self._array, name, None)):
            raise AttributeError(name)
        why = "a function reads elements of an array of its closure, and does nothing else with it"
        raise NotImplementedError(f"{name}: {why}")


def _wrapped(function: Any, arrays: List[Any], labels: Dict[int, str], depth: int = 0) -> Any:
    """The function with arrays of its closure and globals that know traced indices."""
    if not isinstance(function, types.FunctionType) or depth > 4:
        return function
    code, held = function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        held[name] = cell.cell_contents
    names = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}

    def marked(name: str, x: Any) -> Any:
        if isinstance(x, (jax.Array, numpy.ndarray)) and x.ndim:
            labels.setdefault(id(x), name)
            return CapturedArray(x, arrays)
        own = (getattr(x, "__module__", "") or "").partition(".")[0] not in ("jax", "numpy")
        return _wrapped(x, arrays, labels, depth + 1) if isinstance(x, types.FunctionType) and own else x

    new = {name: marked(name, x) for name, x in names.items()}
    changed = {name: x for name, x in new.items() if x is not names[name]}
    scope = {**function.__globals__, **changed} if changed else function.__globals__
    cells = tuple(types.CellType(marked(name, x)) for name, x in held.items())
    made = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells or None)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


#: Operations of the language by the names of JAX's primitives that take the same operands.
_ALIKE = {
    **{name: name for name in "add sub mul exp exp2 log tanh sin cos erf sqrt rsqrt abs sign floor ceil neg".split()},
    **{name: name for name in "eq ne lt le gt ge pow square max min".split()},
    "logistic": "sigmoid",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
    "shift_left": "left_shift",
    "shift_right_arithmetic": "right_shift",
}
_SAME = (
    "copy",
    "copy_p",
    "squeeze",
    "reshape",
    "broadcast_in_dim",
    "optimization_barrier",
    # Inside shard_map: over which axes a value varies is no part of it.
    "pvary",
    "pcast",
)
#: Functions of JAX whose derivative equals the one of their text here.
_OF_JAX = ("relu", "relu6", "silu", "softplus", "logsumexp", "logaddexp", "gelu", "swish", "log_sigmoid")
_INLINED = (
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "remat",
)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function over traced values that computes what ``function`` does over JAX's scalars."""

    def over(*values: Traced) -> Traced:
        body, arrays, labels = values[0]._body, [], {}  # type: Any, List[Any], Dict[int, str]
        abstract = [jax.ShapeDtypeStruct((), jnp.float32 if value.type == "float" else jnp.int32) for value in values]
        closed = jax.make_jaxpr(_wrapped(function, arrays, labels))(*abstract)
        if len(closed.out_avals) != 1 or closed.out_avals[0].shape != ():
            raise TypeError(f"{body.what} gives {', '.join(map(str, closed.out_avals))}, not one element")
        for x in arrays:
            body.tracer.label(x, labels.get(id(x), "t"))
        return _run(body, closed.jaxpr, closed.consts, values, arrays)[0]

    return over


def _run(body: _Body, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], arrays: Sequence[Any]) -> List[Traced]:
    known: Dict[Any, Any] = dict(zip(jaxpr.invars, values))
    known.update(zip(jaxpr.constvars, consts))

    def of(atom: Any) -> Any:
        x = atom.val if hasattr(atom, "val") else known[atom]
        return x.item() if isinstance(x, (numpy.ndarray, numpy.generic)) and x.shape == () else x

    for equation in jaxpr.eqns:
        given = [of(atom) for atom in equation.invars]
        results = _equation(body, equation, given, arrays)
        known.update(zip(equation.outvars, results))
    return [body.value(of(atom)) for atom in jaxpr.outvars]


def _equation(body: _Body, equation: Any, given: List[Any], arrays: Sequence[Any]) -> List[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "fmha_load":
        return [Part(body, arrays[params["at"]], ())[tuple(given)]]
    if any(getattr(x, "shape", ()) not in ((), (1,)) for x in given):
        shapes = [list(x.shape) for x in given if hasattr(x, "shape")]
        why = (
            f"an array of shape {shapes[0]} is read by an index for each axis, of a variable of the function's closure"
        )
        raise body.refuse(name, why)
    if name in _INLINED:
        inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
        named = params.get("name")
        if name == "custom_jvp_call" and named not in (None, *_OF_JAX):
            raise body.refuse(f"custom_jvp {named}", "a derivative of its own is lost here: gradients follow from the text")
        if named in ("floor_divide", "remainder") and len(given) == 2:
            return [operation(body, named, given, {})]
        return _run(body, getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, arrays)
    if name in _SAME:
        return [given[0]]
    if name in _ALIKE:
        return [operation(body, _ALIKE[name], given, {})]
    if name == "div":
        whole = all(body.value(x).type == "int" for x in given)
        return [operation(body, "div", given, {"rounding_mode": "trunc"} if whole else {})]
    if name == "rem":
        x, y = (body.value(x) for x in given)
        rest = x % y
        wrong = (rest != 0) & ((x < 0) != (y < 0))
        return [operation(body, "where", (wrong, rest - y, rest), {})]
    if name == "select_n" and len(given) == 3:
        return [operation(body, "where", (given[0], given[2], given[1]), {})]
    if name == "clamp":
        return [operation(body, "clamp", (given[1], given[0], given[2]), {})]
    if name == "integer_pow":
        return [operation(body, "pow", (given[0], params["y"]), {})]
    if name == "round" and params["rounding_method"] == 1:
        return [operation(body, "round", given, {})]
    if name == "convert_element_type":
        kind = {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(numpy.dtype(params["new_dtype"]).kind)
        if kind is None or numpy.dtype(params["new_dtype"]).itemsize < 4 and kind != "bool":
            raise body.refuse(f"astype({params['new_dtype']})", "values of the language are float32, int and bool")
        return [body.cast(body.value(given[0]), kind)]
    raise body.refuse(name, "the language of scores and masks has no such operation")
