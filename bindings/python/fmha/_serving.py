"""What the serving engines' hooks share: the numbers of a call over a paged cache, made once a layer."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from . import _arguments
from ._mask import NONE, Mask
from ._theirs import bind


def bound(length: int, most: int) -> int:
    """An upper bound of a length that does not change with every step: plans are kept by it."""
    return min(1 << (length - 1).bit_length() if length > 1 else length, most)


def band(left: Optional[int], causal: bool) -> Mask:
    """Keys that a query sees, counted from the sequence's end: ``left`` before it; behind it none, or as many."""
    if causal:
        return Mask(2, -1 if left is None else left, 0)
    return NONE if left is None else Mask(2, left, left)


class Numbers:
    """The numbers of a layer's calls; the longest lengths come first, and change."""

    def __init__(self, softmax_scale: float, softcap: float, left: Optional[int], batch_invariant: bool) -> None:
        rest: Any = dict(softmax_scale=softmax_scale, softcap=softcap, batch_invariant=batch_invariant)
        self._rest = {
            (causal, rows): bind(mask=band(left, causal), row_invariant=rows, **rest)[1][2:]
            for causal in (True, False)
            for rows in (True, False)
        }

    def of(self, max_seqlen_q: int, max_seqlen_k: int, causal: bool = True) -> Tuple[Any, ...]:
        """Numbers of one call. A context asks for rows of equal bits at the call, not where the layer was made."""
        return (max_seqlen_q, max_seqlen_k, *self._rest[causal, _arguments.wants_rows(None)])
