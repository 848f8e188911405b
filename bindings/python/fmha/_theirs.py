"""Our calls as functions under other libraries' names make them: the slow kernel may serve.

Those libraries have no such option, and programs that were written for them have f32 and small extents too, which no
fast kernel of a GPU takes. Our own functions refuse them unless ``allow_fallback=True`` is given.
"""

from __future__ import annotations

from typing import Any, Tuple

import fmha

from . import _arguments


def bind(**options: Any) -> Tuple[Tuple[Any, ...], Tuple[Any, ...]]:
    """As :func:`fmha._arguments.bind`."""
    return _arguments.bind(allow_fallback=True, **options)


def attention(*operands: Any, **options: Any) -> Any:
    """As :func:`fmha.attention`."""
    return fmha.attention(*operands, allow_fallback=True, **options)


def attention_out(*operands: Any, **options: Any) -> None:
    """As :func:`fmha.attention_out`."""
    fmha.attention_out(*operands, allow_fallback=True, **options)


def attention_with_kvcache(*operands: Any, **options: Any) -> Any:
    """As :func:`fmha.attention_with_kvcache`."""
    return fmha.attention_with_kvcache(*operands, allow_fallback=True, **options)
