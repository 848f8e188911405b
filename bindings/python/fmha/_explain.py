"""A call that is planned and not run: its outputs are described without being made."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

from . import _arguments, _code, _native
from ._trace import Code

#: Address of outputs in a request that is only planned: nothing is written there, and the kernels' alignments divide
#: it.
_NOWHERE = 256

_AT_SEED = _native.NUMBERS.index("seed")

_FP8 = {code for name, code in _native.DTYPES.items() if name.startswith("float8")}


def _like(request: _native.Request, name: str, shape: List[int], dtype: int) -> None:
    tensor = request.tensors[_native.SLOTS[name]]
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    tensor.data, tensor.num_dims, tensor.dtype, tensor.device = _NOWHERE, len(shape), dtype, request.tensors[0].device
    tensor.sizes[: len(shape)], tensor.strides[: len(shape)] = shape, strides


def described(
    door: Any,
    qkv: Tuple[Any, Any, Any],
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
    backward: bool,
    lse: bool,
    code: Optional[Code] = None,
    lists: Any = None,
) -> Tuple[_native.Request, List[Any]]:
    """A request that a call, or its gradients, is planned by, and what has to outlive it."""
    qkv, tensors = door.prepared(qkv, tensors)
    # The plan does not depend on the seed.
    request = _native.Request(numbers if numbers[_AT_SEED] is not None else _arguments.with_seed(numbers, 0))
    # The return values of `put` own memory that the request points to.
    alive = [door.put(request, *named) for named in [*zip("qkv", qkv), *zip(_arguments.TENSORS, tensors)]]

    def given(name: str) -> Tuple[List[int], int]:
        tensor = request.tensors[_native.SLOTS[name]]
        return list(tensor.sizes[: max(tensor.num_dims, 0)]), tensor.dtype

    (sizes, dtype_q), (sizes_v, _) = given("q"), given("v")
    dtype_o = numbers[_native.NUMBERS.index("dtype_o")]
    if dtype_o < 0:
        dtype_o = _native.DTYPES["bfloat16"] if dtype_q in _FP8 else dtype_q
    o = sizes[:-1] + sizes_v[-1:]
    outputs = [("o", o, dtype_o)]
    if backward or lse or code is not None or not door.leaves_out_lse(qkv, tensors, numbers):
        outputs.append(("lse", sizes[:-3] + [*sizes[-2:-1], *sizes[-3:-2]], _native.DTYPES["float32"]))
    if backward:
        outputs += [("dout", o, dtype_o), *((f"d{name}", *given(name)) for name in "qkv")]
    for name, shape, dtype in outputs:
        _like(request, name, shape, dtype)
    if code is not None:
        moves = (getattr(x, "requires_grad", False) and backward for x in code.tensors)
        alive += _code.put(door, request, code, sum(1 << at for at, wanted in enumerate(moves) if wanted))
    if lists is not None:
        lists.put(request)
    return request, alive


def explain(door: Any, *call: Any) -> str:
    """What a plan says of itself; arguments as of :func:`described`."""
    request, alive = described(door, *call)
    text = _native.explain(request)
    del alive
    return text
