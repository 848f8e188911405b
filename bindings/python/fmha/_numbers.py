"""Numbers of a call, read once: what is none is refused by its argument's name."""

from __future__ import annotations

import operator
from typing import Any


def shown(value: Any) -> str:
    """A value as an error names it: a tensor by its type and shape, and nothing at length."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def real(name: str, number: Any) -> float:
    if type(number) is float:
        return number
    try:
        # A text is refused, although float("1") is 1.
        if not isinstance(number, (str, bytes)):
            return float(number)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name}: {shown(number)} is no number")


def flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{name}: {type(value).__name__} is neither true nor false") from None


def integer(name: str, number: Any) -> Any:
    """A whole number that a C ``int64_t`` holds; symbolic sizes of a compiler pass through."""
    if type(number) is not int:
        if hasattr(number, "node"):
            return number
        try:
            number = operator.index(number)
        except TypeError:
            raise TypeError(f"{name}: {shown(number)} is no whole number") from None
    if not -1 << 63 <= number < 1 << 63:
        raise ValueError(f"{name} {number} is not in -2^63 .. 2^63")
    return number


def word(name: str, number: Any) -> int:
    """A u64 in the bits of an i64."""
    if type(number) is not int:
        number = integer(name, number)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name} {number} is not in 0 .. 2^64")
    return number - (1 << 64) if number >= 1 << 63 else number


def scale(softmax_scale: Any) -> float:
    """A softmax scale that somebody gave: the library takes NaN for one that nobody gave."""
    number = real("softmax_scale", softmax_scale)
    if number != number:
        raise ValueError("softmax_scale nan is not finite")
    return number
