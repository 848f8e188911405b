"""The shared library: found beside this file, called by ctypes. No tensor library is imported here."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import pathlib
import re
import sys
from typing import Any, List, Optional, Tuple

from ._numbers import shown

MAX_DIMS = 5

#: Names of element types by the library's codes. Every tensor library uses these names.
DTYPES = {
    "float16": 0,
    "bfloat16": 1,
    "float8_e4m3fn": 2,
    "float8_e5m2": 3,
    "float8_e4m3fnuz": 4,
    "float8_e5m2fnuz": 5,
    "float32": 6,
    "int32": 100,
    "uint8": 101,
    "uint32": 102,
    "float64": 103,
    "int64": 104,
    "bool": 105,
}

#: Code of any type that attention does not take.
OTHER = -1


class FmhaError(RuntimeError):
    """What the library said: the argument first, then its numbers."""


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
        ("num_dims", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("device", Device),
    ]


#: Name of the library's file as Cargo writes it on this system.
FILE = {"win32": "fmha_native.dll", "darwin": "libfmha_native.dylib"}.get(sys.platform, "libfmha_native.so")


def _path() -> pathlib.Path:
    """``FMHA_NATIVE``, or beside this file as in a wheel, or where Cargo builds it as in a checkout."""
    given = os.environ.get("FMHA_NATIVE")
    if given:
        return pathlib.Path(given)
    here = pathlib.Path(__file__).resolve()
    beside = here.with_name(FILE)
    built = here.parents[3] / "target" / "release" / beside.name if len(here.parents) > 3 else beside
    return built if built.exists() and not beside.exists() else beside


def _load() -> ctypes.CDLL:
    # Bundles of compiled kernels lie beside the library. A caller's own FMHA_BUNDLE comes first, and a child process
    # inherits the list.
    bundles = os.environ.get("FMHA_BUNDLE", "").split(os.pathsep)
    bundles += sorted(map(str, pathlib.Path(__file__).parent.glob("kernels*.fmha")))
    bundles = list(dict.fromkeys(bundle for bundle in bundles if bundle))
    if bundles:
        os.environ["FMHA_BUNDLE"] = os.pathsep.join(bundles)
    path = _path()
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        named = "FMHA_NATIVE"
        if not os.environ.get(named):
            named = "the package's library, which in a checkout `cargo build --release -p fmha-py` makes"
        raise ImportError(f"{named}: {error}", path=str(path)) from None
    found.fmha_py_text.restype = ctypes.c_char_p
    found.fmha_py_describe.restype = ctypes.c_size_t
    return found


library = _load()


def text() -> str:
    """What the library's last call on this thread had to say."""
    return library.fmha_py_text().decode("utf-8", "replace")


def fields(size: int, what: str, *more: Tuple[str, Any]) -> List[Tuple[str, Any]]:
    """Fields of a structure of ``size`` bytes that the library has just described: numbers, addresses, ``more``."""
    numbers, addresses = (line.split() for line in text().split("\n"))
    made = [*((name, ctypes.c_int64) for name in numbers), *((name, ctypes.c_void_p) for name in addresses), *more]
    here = ctypes.sizeof(type("Described", (ctypes.Structure,), {"_fields_": made}))
    if here != size:
        raise ImportError(f"{what} has {size} bytes in the library, {here} here")
    return made


def check(code: int) -> None:
    if code:
        raise FmhaError(text())


#: The library's names of a cache and its new rows, each with its argument of :func:`fmha.attention_with_kvcache`.
_OF_A_CACHE = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v"}

# Patterns are compiled at import, since torch's compiler does not trace through `re`'s parser.
_QUOTED = re.compile(r" does not compile \(|\nPosition: ")
_TENSOR = re.compile(r"\b[kv](_new)?\b")


def as_cache(said: str) -> str:
    """A refusal in the words of a function that takes ``k_cache`` and, as ``k``, new rows. What a compiler said, or torch
    quotes of a value, stays as it is."""
    quoted = _QUOTED.search(said)
    end = len(said) if quoted is None else quoted.start()
    return _TENSOR.sub(lambda found: _OF_A_CACHE[found[0]], said[:end]) + said[end:]


_bytes = library.fmha_py_describe()
_slots, _numbers, _options = (line.split() for line in text().split("\n"))

#: Position in a request of each tensor, by name.
SLOTS = {name: at for at, name in enumerate(_slots)}
#: A request's numbers, in the order in which operators take them.
NUMBERS: Tuple[str, ...] = tuple(number.partition(":")[0] for number in _numbers)
#: Names of the numbers that are floats and not integers.
FLOATS = {number.partition(":")[0] for number in _numbers if ":float" in number}
#: Names of the numbers that may be absent: ``None`` in Python, NaN in a request.
OPTIONAL = {number.partition(":")[0] for number in _numbers if number.endswith("?")}
#: Options of a plan: bits of the number ``options``, by name.
OPTIONS = {name: 1 << at for at, name in enumerate(_options)}


class Numbers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double if name in FLOATS else ctypes.c_int64) for name in NUMBERS]


class Captured(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("tensor", Tensor),
        ("gradient", Tensor),
        ("real", ctypes.c_double),
        ("integer", ctypes.c_int64),
    ]


class Code(ctypes.Structure):
    _fields_ = [
        ("score", ctypes.c_char_p),
        ("mask", ctypes.c_char_p),
        ("captured", ctypes.POINTER(Captured)),
        ("num_captured", ctypes.c_int64),
    ]


class Lists(ctypes.Structure):
    _fields_ = [
        ("indices", Tensor),
        ("topk_length", Tensor),
        ("block", ctypes.c_int64),
        ("addresses", ctypes.c_int64),
        ("lse_without_sink", ctypes.c_int64),
    ]


class BlockScales(ctypes.Structure):
    _fields_ = [
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("format", ctypes.c_int64),
        ("values", ctypes.c_int64),
    ]


class Request(ctypes.Structure):
    """A call. Tensors that are put in must outlive it."""

    _fields_ = [
        ("tensors", Tensor * len(SLOTS)),
        ("numbers", Numbers),
        ("stream", ctypes.c_int64),
        ("code", ctypes.POINTER(Code)),
        ("lists", ctypes.POINTER(Lists)),
        ("block_scales", ctypes.POINTER(BlockScales)),
        ("second", ctypes.c_void_p),
    ]

    def __init__(self, numbers: Tuple[Any, ...]) -> None:
        super().__init__()
        for tensor in self.tensors:
            tensor.num_dims = -1
            tensor.dtype = OTHER
        for name, number in zip(NUMBERS, numbers):
            try:
                setattr(self.numbers, name, math.nan if number is None and name in OPTIONAL else number)
            except TypeError:
                raise TypeError(f"{name}: {shown(number)} is no number") from None

    def put(self, name: str, data: int, dtype: str, sizes: Any, strides: Any, device: Device = Device(0, 0)) -> None:
        """A tensor by its address, type, sizes, and strides in elements."""
        if len(sizes) > MAX_DIMS:
            raise ValueError(f"{name} has {len(sizes)} axes, more than {MAX_DIMS}")
        _fill(self.tensors[SLOTS[name]], data, dtype, sizes, strides, device)

    def put_lists(self, indices: Tensor, topk_length: Tensor, block: int, addresses: bool, without_sink: bool) -> None:
        """Lists of keys, by tensors that :func:`described` has made."""
        self._lists = Lists(indices, topk_length, block, int(addresses), int(without_sink))
        self.lists = ctypes.pointer(self._lists)

    def put_second(self, second: Request) -> None:
        """A call of the same queries over a second cache alone, whose keys join in the softmax."""
        self._second = second
        self.second = ctypes.addressof(second)

    def put_block_scales(self, q: Tensor, k: Tensor, v: Tensor, format: int, values: str) -> None:
        """Scales by blocks, by tensors that :func:`described` has made, and the type of the values."""
        self._block_scales = BlockScales(q, k, v, format, DTYPES[values])
        self.block_scales = ctypes.pointer(self._block_scales)

    def put_code(self, score: str, mask: str, names: Any, numbers: Any, num_tensors: int) -> None:
        """A score and a mask as code: ``names`` of so many tensors, which :meth:`put_captured` puts, then of
        numbers."""
        code = Code(score.encode() or None, mask.encode() or None, num_captured=len(names))
        self._captured = (Captured * max(len(names), 1))()
        for at, name in enumerate(names):
            one = self._captured[at]
            one.name = name.encode()
            one.tensor.num_dims = one.gradient.num_dims = -1
            if at >= num_tensors:
                one.real = numbers[at - num_tensors]
                one.integer = int(one.real) if math.isfinite(one.real) else 0
        code.captured = self._captured
        self._code = code
        self.code = ctypes.pointer(code)

    def put_captured(
        self, at: int, data: int, dtype: str, sizes: Any, strides: Any, device: Device = Device(0, 0), grad: int = 0
    ) -> None:
        """The captured tensor of a place, and, where ``grad`` is not 0, the address of its gradient of the same
        type."""
        one = self._captured[at]
        if len(sizes) > MAX_DIMS:
            raise ValueError(f"captured {one.name.decode()} has {len(sizes)} axes, more than {MAX_DIMS}")
        _fill(one.tensor, data, dtype, sizes, strides, device)
        if grad:
            dense = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
            _fill(one.gradient, grad, dtype, sizes, dense, device)


def described(data: int, dtype: str, sizes: Any, strides: Any, device: Device = Device(0, 0)) -> Tensor:
    """A tensor by its address, type, sizes, and strides in elements."""
    tensor = Tensor()
    _fill(tensor, data, dtype, sizes, strides, device)
    return tensor


#: A tensor that is not given.
ABSENT = Tensor(num_dims=-1, dtype=OTHER)


def _fill(tensor: Tensor, data: int, dtype: str, sizes: Any, strides: Any, device: Device) -> None:
    tensor.data = data or None
    tensor.num_dims = len(sizes)
    tensor.sizes[: len(sizes)] = sizes
    tensor.strides[: len(sizes)] = strides
    tensor.dtype = DTYPES.get(dtype, OTHER)
    tensor.device = device


if ctypes.sizeof(Request) != _bytes:
    raise ImportError(
        f"{_path()}: a request has {_bytes} bytes there, {ctypes.sizeof(Request)} here: another version's library"
    )

for _function in (library.fmha_py_run, library.fmha_py_explain):
    _function.argtypes = [ctypes.POINTER(Request)]
library.fmha_py_check.argtypes = [ctypes.POINTER(Request), ctypes.c_char_p]

library.fmha_py_keep.argtypes = [ctypes.POINTER(Request)]
library.fmha_py_keep.restype = ctypes.c_int64


def keep(numbers: Tuple[Any, ...]) -> int:
    """The number under which the library keeps these for the process; -1 where it has no room."""
    return library.fmha_py_keep(ctypes.byref(Request(numbers)))


library.fmha_py_function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]


@functools.lru_cache(maxsize=1024)
def read_function(name: str, given: str, is_mask: bool) -> Tuple[str, Tuple[Tuple[str, str], ...]]:
    """A score's or a mask's own text, and the names that it captures with what each is declared to be."""
    if "\0" in given:
        raise ValueError(f"{name}: a text of the language has no zero in it")
    check(library.fmha_py_function(name.encode(), given.encode(), is_mask))
    own = text()
    return own, tuple(re.findall(r"(?:^|; )([A-Za-z]\w*): ([^;]+)(?=;)", own))


library.fmha_py_built_in.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_double)]


@functools.lru_cache(maxsize=1024)
def built_in(given: str, names: Tuple[str, ...], values: Tuple[float, ...]) -> str:
    """A function's own text with those numbers as constants that a part needs which kernels have built in: a window, a
    soft-cap. Another value is then another plan, and compiles nothing."""
    numbers = (ctypes.c_double * len(values))(*values)
    check(library.fmha_py_built_in(given.encode(), ",".join(names).encode(), numbers))
    return text()


def refuse(request: Request, operator: Optional[str] = None) -> None:
    """Raises what is wrong with a request on every device; ``operator``: of torch's, whose results are not put in."""
    check(library.fmha_py_check(ctypes.byref(request), operator and operator.encode()))


def run(request: Request) -> None:
    check(library.fmha_py_run(ctypes.byref(request)))


library.fmha_py_workspace.argtypes = [ctypes.POINTER(Request), ctypes.POINTER(ctypes.c_uint64)]
library.fmha_py_run_with.argtypes = [ctypes.POINTER(Request), ctypes.c_void_p, ctypes.c_uint64]


def plan(request: Request) -> None:
    """Plans a request, which compiles its kernels; raises why no kernel takes it."""
    check(library.fmha_py_workspace(ctypes.byref(request), ctypes.byref(ctypes.c_uint64())))


def run_with(request: Request, allocate: Any) -> None:
    """Runs a request on any device. ``allocate(bytes)`` gives an object that keeps scratch and its address, aligned to
    256; it is asked where there are any."""
    wanted = ctypes.c_uint64()
    check(library.fmha_py_workspace(ctypes.byref(request), ctypes.byref(wanted)))
    kept, address = allocate(wanted.value) if wanted.value else (None, 0)
    check(library.fmha_py_run_with(ctypes.byref(request), address, wanted.value))
    del kept


library.fmha_py_mask_object.argtypes = [
    ctypes.POINTER(Request),
    ctypes.POINTER(Request),
    ctypes.POINTER(ctypes.c_int64),
]
library.fmha_py_build_mask.argtypes = [ctypes.c_int64, ctypes.POINTER(Request)]
library.fmha_py_drop_mask_object.argtypes = [ctypes.c_int64]
library.fmha_py_drop_mask_object.restype = None


def mask_object(forward: Request, backward: Optional[Request]) -> int:
    """The number of a new mask object for the masks of a call, and of its gradients."""
    number = ctypes.c_int64()
    behind = None if backward is None else ctypes.byref(backward)
    check(library.fmha_py_mask_object(ctypes.byref(forward), behind, ctypes.byref(number)))
    return number.value


def build_mask(number: int, request: Request) -> None:
    check(library.fmha_py_build_mask(number, ctypes.byref(request)))


def explain(request: Request) -> str:
    check(library.fmha_py_explain(ctypes.byref(request)))
    return text()
