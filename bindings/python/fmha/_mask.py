"""Masks: the contract's text forms and a few names, read once into four integers."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Optional, Tuple, Union

from ._numbers import flag, integer, shown


class Mask(NamedTuple):
    """A band of visible keys. ``kind``: 0 all keys, 1 a window from the top-left diagonal, 2 from the bottom-right
    one, 3 generic coordinates (``left`` is y, ``right`` is x). -1 is unbounded."""

    kind: int = 0
    left: int = -1
    right: int = -1
    sink_columns: int = 0


NONE = Mask()
#: Causal mask aligned to the sequence's end: each query sees the keys up to its own row.
CAUSAL = Mask(2, -1, 0)
#: Causal mask aligned to the sequence's start.
CAUSAL_TOP_LEFT = Mask(1, -1, 0)

#: Distance larger than that of any two rows.
_FAR = (1 << 31) - 1

MaskLike = Union[None, bool, str, Mask]


def window(left: Optional[int], right: Optional[int], *, top_left: bool = False, sink_columns: int = 0) -> Mask:
    """Keys from ``left`` before to ``right`` behind a query's diagonal, both included; ``None`` is unbounded."""
    bounds = [-1, -1]
    for at, (name, value) in enumerate((("left", left), ("right", right))):
        if value is None:
            continue
        bounds[at] = integer(f"window: {name}", value)
        if bounds[at] < 0:
            raise ValueError(f"window: {name} {value} is below 0 (None is unbounded)")
    return Mask(1 if top_left else 2, bounds[0], bounds[1], integer("window: sink_columns", sink_columns))


def band(left: Optional[int], right: Optional[int], shift: int) -> Mask:
    """Keys from ``i + shift - left`` to ``i + shift + right`` for query ``i``, both included, counted from the first
    key; ``None`` is unbounded, and a bound may be below 0."""

    def coordinate(bound: Optional[int], shift: int) -> int:
        return _FAR if bound is None else max(-_FAR, min(bound + 1 + shift, _FAR))

    if left is None and right is None:
        return NONE
    return Mask(3, coordinate(left, -shift), coordinate(right, shift))


def _parse(text: str) -> Mask:
    if text in ("0", "none", ""):
        return NONE
    if text in ("2", "b", "causal"):
        return CAUSAL
    if text in ("1", "t"):
        return CAUSAL_TOP_LEFT
    kinds = {"t": 1, "b": 2, "g": 3}
    kind, colon, rest = text.partition(":")
    try:
        numbers = [int(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if kind not in kinds or not colon or len(numbers) not in (2, 3):
        raise ValueError(
            f"mask: {text!r} is none of '0', 't', 'causal', 'b', 't:left,right[,sink]', 'b:left,right[,sink]', 'g:y,x[,sink]'"
        )
    return mask(Mask(kinds[kind], *numbers))


def mask(given: Any) -> Mask:
    """``None``, ``"causal"``, a text of the contract (``"b:512,0"``), or a :class:`Mask`."""
    if given is None or given is False:
        return NONE
    if given is CAUSAL or given is NONE:
        return given
    if given is True:
        return CAUSAL
    if isinstance(given, str):
        return _parse(given)
    if isinstance(given, tuple) and len(given) == 4:
        return Mask(*(integer(f"mask: {name}", number) for name, number in zip(Mask._fields, given)))
    if type(given).__name__ in ("Intervals", "MaskBits", "BlockLists", "list"):
        raise NotImplementedError(
            f"mask: {type(given).__name__} is a mask as data, which fmha.attention, fmha.explain and "
            "fmha.jax.attention take, and no other function"
        )
    raise TypeError(
        f"mask: {shown(given)} is neither None, a text nor a Mask; a tensor of bools that says which keys are seen comes "
        "in as fmha.MaskBits.of(tensor)"
    )


def pair(window_size: Any) -> Tuple[Any, Any]:
    """Two bounds, which may come as a tensor: it is read once, which waits for a device."""
    numbers = getattr(window_size, "tolist", None)
    if numbers is not None:
        torch = sys.modules.get("torch")
        if getattr(window_size, "is_cuda", False) and torch is not None and torch.cuda.is_current_stream_capturing():
            raise ValueError("window_size is a tensor on the device, which a graph cannot read: give numbers")
        window_size = numbers()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size: {shown(window_size)} is no pair of numbers")
    return tuple(window_size)  # type: ignore[return-value]


def from_window_size(window_size: Tuple[Optional[int], Optional[int]], causal: bool) -> Mask:
    """FlashAttention's pair: both bounds included, -1 or None unbounded, bottom-right; causal closes the right side."""
    window_size = pair(window_size)
    if tuple(window_size) in ((-1, -1), (None, None)):
        return CAUSAL if flag("causal", causal) else NONE
    left, right = (-1 if value is None else integer("window_size", value) for value in window_size)
    for name, value in (("left", left), ("right", right)):
        if value < -1:
            raise ValueError(f"window_size: {name} {value} is below -1, which is unbounded")
    if flag("causal", causal):
        right = 0
    if left == -1 and right == -1:
        return NONE
    return Mask(2, left, right)
