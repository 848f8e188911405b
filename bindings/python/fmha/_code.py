"""A score and a mask as code, of a call: texts of the small language, or functions that are traced to them."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

from . import _native
from ._mask_data import OUTPUTS, TENSORS as MASK_TENSORS, Masks
from ._numbers import shown
from ._trace import Code, Tracer

#: Neither a score nor a mask function. Masks as data and small outputs are added to this value.
NOTHING = Code("", "", (), (), ())

#: A score or mask function as a call takes it: a text, a function of torch's signature, or code that is already bound.
Function = Union[str, Callable[..., Any], Code]

#: The letters that name each function's arguments, in order.
_VARIABLES = {"score": "sbhqk", "mask": "bhqk"}


def bind(
    door: Any,
    score: Optional[Function],
    mask: Optional[Function],
    captured: Optional[Mapping[str, Any]],
    names: Tuple[str, str] = ("score_code", "mask_code"),
    device: Any = None,
    masks: Optional[Masks] = None,
    folds: bool = False,
) -> Optional[Code]:
    """The code of a call, and its masks as data; ``None`` where it has neither. ``door`` knows its library's tensors,
    ``names`` are those of the arguments, and ``device`` is Q's. With ``folds`` numbers
    of what kernels have built in are the text's: the call has nothing that such a part would not go with."""
    if isinstance(score, Code):
        # Another interface of this package has already bound the score.
        return score if masks is None else score._replace(masks=masks)
    given = {} if captured is None else _mapping(captured)
    if score is None and mask is None:
        if given:
            raise ValueError(f"captured: {next(iter(given))} is given, but neither {names[0]} nor {names[1]} is")
        return None if masks is None else NOTHING._replace(masks=masks)
    tracer = Tracer(door.stored, door.captured, given, door.WRAPS, door.is_compiling())
    tracer.device = device
    texts: List[str] = []
    declared: Dict[str, str] = {}
    both: Tuple[Tuple[str, str, Any], ...] = (("score", names[0], score), ("mask", names[1], mask))
    for kind, name, function in both:
        if function is None:
            texts.append("")
            continue
        if callable(function) and hasattr(door, "function"):
            function = door.function(function)
        if isinstance(function, str):
            text = function
        else:
            with door.Dispatching():
                text = tracer.trace(kind, name, function, _VARIABLES[kind])
        own, reads = door.read_function(name, text, kind == "mask")
        if folds and reads and not tracer.is_compiling:
            own, reads = _folded(door, name, kind, (own, reads), tracer.captured())
        texts.append(own)
        declared.update(reads)
    values = {**given, **tracer.captured()}
    for name in given:
        if name not in declared:
            raise ValueError(f"captured: {name} is given, but no function reads it")
    code = _ordered(door, texts, declared, values)
    return code if masks is None else code._replace(masks=masks)


def _folded(
    door: Any, name: str, kind: str, read: Tuple[str, Tuple[Tuple[str, str], ...]], values: Mapping[str, Any]
) -> Tuple[str, Tuple[Tuple[str, str], ...]]:
    own, reads = read
    numbers = tuple(name for name, of in reads if "[" not in of)
    # A score whose tensors have gradients stays a function of its numbers.
    if not numbers or kind == "score" and len(numbers) < len(reads):
        return read
    folded = _native.built_in(own, numbers, tuple(_number(name, dict(reads)[name], values[name]) for name in numbers))
    return read if folded == own else door.read_function(name, folded, kind == "mask")


def _mapping(captured: Any) -> Dict[str, Any]:
    if not isinstance(captured, Mapping):
        raise TypeError(f"captured: {shown(captured)} is no mapping from names to tensors and numbers")
    for name in captured:
        if not isinstance(name, str) or re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None:
            raise ValueError(f"captured: {shown(name)} is no name: a letter, then letters, digits and _")
    return dict(captured)


def _ordered(door: Any, texts: List[str], declared: Dict[str, str], values: Dict[str, Any]) -> Code:
    tensors: List[Tuple[str, Any]] = []
    numbers: List[Tuple[str, float]] = []
    for name, kind in declared.items():
        if name not in values:
            raise ValueError(f"captured: {name} is missing, which the function declares as {kind}")
        value = values[name]
        if "[" in kind:
            if door.stored(value) is None:
                raise TypeError(f"captured: {name}: {shown(value)} is no tensor, but is declared as {kind}")
            tensors.append((name, door.captured(value)))
        else:
            numbers.append((name, _number(name, kind, value)))
    names = tuple(name for name, _ in (*tensors, *numbers))
    return Code(texts[0], texts[1], names, tuple(x for _, x in tensors), tuple(x for _, x in numbers))


def _number(name: str, kind: str, value: Any) -> float:
    read = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    whole = isinstance(read, int) and not isinstance(read, bool)
    if not (whole or isinstance(read, float) and kind == "float"):
        raise TypeError(f"captured: {name}: {shown(value)} is no number, but is declared as {kind}")
    if whole and abs(read) > 1 << 53:
        raise ValueError(f"captured: {name} {read} is beyond 2^53")
    return float(read)


def put(door: Any, request: _native.Request, code: Code, gradients: int = 0) -> List[Any]:
    """Puts code and masks as data into a request, and returns what has to outlive it. Bits of ``gradients`` say of which tensors a
    gradient is described, whose memory is nowhere."""
    given = (*zip(MASK_TENSORS, code.masks.tensors), *zip(OUTPUTS, code.masks.outputs))
    alive = [door.put(request, name, x) for name, x in given]
    request.numbers.block_q, request.numbers.block_k = code.masks.block_q, code.masks.block_k
    if not code.is_text():
        return alive
    request.put_code(code.score, code.mask, code.names, code.numbers, len(code.tensors))
    return alive + [
        door.put_captured(request, at, code.names[at], tensor, 256 if gradients >> at & 1 else 0)
        for at, tensor in enumerate(code.tensors)
    ]
