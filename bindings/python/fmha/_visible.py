"""Which keys a query of a transformers model sees: transformers' mask functions read as a band, lengths and sequences.

transformers makes a mask once a forward and hands it to every layer. :class:`Visible` is that mask before anybody has
spelt it out: ``[batch, 1, seqlen_q, seqlen_k]`` by its shape, a few numbers in memory. Attention takes the numbers.
Every other operation on it spells the mask out as eager attention adds it, 0 where a key is seen and the type's lowest
number elsewhere, so that a model that slices or adds its mask has eager attention's results.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils

from ._mask import NONE, Mask, band


class Pattern(NamedTuple):
    """A mask function that was recognised.

    A query at position p sees keys from ``p - left`` to ``p + right``, ``None`` being unbounded; with ``chunk`` those
    of its own chunk of so many positions; with ``sequences``, ``[batch, seqlen]``, those whose number there is the
    query's.
    """

    left: Optional[int] = None
    right: Optional[int] = None
    chunk: Optional[int] = None
    sequences: Optional[torch.Tensor] = None


def _least(a: Optional[int], b: Optional[int]) -> Optional[int]:
    return b if a is None else a if b is None else min(a, b)


def _captured(function: Callable[..., Any], factory: Optional[Callable[..., Any]]) -> Optional[Dict[str, Any]]:
    """The variables of a closure that ``factory`` made; ``None`` where something else made the function."""
    code = getattr(function, "__code__", None)
    if factory is None or code is None or code not in factory.__code__.co_consts:
        return None
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def recognise(function: Callable[..., Any]) -> Optional[Pattern]:
    """The pattern of a mask function of transformers; ``None`` for one that it does not make itself."""
    if function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    held = _captured(function, masking_utils.sliding_window_overlay)
    if held is not None:
        return Pattern(left=held["sliding_window"] - 1)
    held = _captured(function, getattr(masking_utils, "sliding_window_bidirectional_overlay", None))
    if held is not None:
        return Pattern(left=held["sliding_window"], right=held["sliding_window"])
    held = _captured(function, masking_utils.chunked_overlay)
    if held is not None:
        return Pattern(chunk=held["chunk_size"])
    held = _captured(function, masking_utils.packed_sequence_mask_function)
    if held is not None:
        return Pattern(sequences=held["packed_sequence_mask"])
    held = _captured(function, getattr(masking_utils, "remap_positions_for_packed_sequence", None))
    if held is not None:
        # Positions count up by 1 inside a sequence, so a band of positions is a band of rows there. A chunk is not.
        inner = recognise(held["mask_function"])
        return None if inner is None or inner.chunk is not None or inner.sequences is not None else inner
    held = _captured(function, masking_utils.and_masks)
    if held is None:
        return None
    whole = Pattern()
    for part in held["mask_functions"]:
        read = recognise(part)
        if read is None:
            return None
        if (whole.chunk, read.chunk).count(None) == 0 or (
            whole.sequences is not None and read.sequences is not None
        ):
            return None
        whole = Pattern(
            _least(whole.left, read.left),
            _least(whole.right, read.right),
            whole.chunk if read.chunk is None else read.chunk,
            whole.sequences if read.sequences is None else read.sequences,
        )
    return whole


class Dense(NamedTuple):
    """A call with a batch axis over the first ``seqlen_k`` keys, of which ``seqused_k`` are in use."""

    mask: Mask
    seqlen_k: int
    seqused_k: Optional[torch.Tensor]


class Packed(NamedTuple):
    """A call over the rows in use, which ``rows_q`` and ``rows_k`` number; ``None``: all of them."""

    mask: Mask
    rows_q: Optional[torch.Tensor]
    rows_k: Optional[torch.Tensor]
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    #: Keys of a sequence of the batch from which ``rows_k`` count.
    seqlen_k: int


class Facts:
    """What a call for a mask says, and how attention computes it."""

    def __init__(
        self,
        pattern: Pattern,
        padding: Optional[torch.Tensor],
        spell: Callable[[], torch.Tensor],
        sizes: Tuple[int, int, int],
        first: Tuple[int, int],
        device: Any,
    ) -> None:
        """``sizes`` are batch, seqlen_q and seqlen_k, ``first`` the positions of the first query and the first key;
        ``padding`` ``[batch, seqlen_k]`` is true where a key is in use."""
        self.pattern, self.padding, self._spell, self._device = pattern, padding, spell, device
        self.batch, self.seqlen_q, self.seqlen_k = sizes
        self.first_q, self.first_k = first
        self._spelt: Optional[torch.Tensor] = None
        self._way: Union[None, Dense, Packed] = None
        self._has_way = False

    def spelt(self) -> torch.Tensor:
        """The mask as eager attention adds it. The same tensor each time: somebody may have written to it, so attention
        takes it from then on."""
        if self._spelt is None:
            self._spelt = self._spell()
        return self._spelt

    def way(self) -> Union[None, Dense, Packed]:
        """How attention computes it without the mask spelt out; ``None``: not at all."""
        if self._spelt is not None:
            return None
        if not self._has_way:
            self._way, self._has_way = self._find(), True
        return self._way

    def band(self) -> Optional[Mask]:
        """The band inside of each sequence of a packed batch; ``None`` where more than a band hides keys, or its place
        is unknown."""
        if self.padding is not None or self.pattern.chunk is not None or self._spelt is not None:
            return None
        band = _bottom_right(self.pattern)
        square = self.first_q == self.first_k and self.seqlen_q == self.seqlen_k
        return band if square or band == NONE else None

    def _find(self) -> Union[None, Dense, Packed]:
        left, right, chunk, sequences = self.pattern
        shift = self.first_q - self.first_k
        square = shift == 0 and self.seqlen_q == self.seqlen_k
        last = max(self.first_q + self.seqlen_q, self.first_k + self.seqlen_k)
        if chunk is not None and last <= chunk:
            # Every row in use is of the first chunk, left padding or not.
            chunk = None
        if chunk is not None:
            if sequences is not None or self.padding is not None or not square or self.first_q:
                return None
            numbers = torch.arange(self.seqlen_q, device=self._device) // chunk
            sequences = numbers.expand(self.batch, -1)
        if sequences is not None:
            return _by_sequences(self.pattern, sequences) if self.padding is None and square else None
        # Keys beyond what the last query sees: a static cache has rows for tokens to come.
        seqlen_k = self.seqlen_k if right is None else min(self.seqlen_k, shift + self.seqlen_q + right)
        if seqlen_k <= 0 or shift < 0 and (left, right) != (None, None):
            return None
        ends = None
        if self.padding is not None:
            padding = self.padding[:, :seqlen_k]
            spans = _spans(padding)
            if any((start, end, used) != (0, seqlen_k, seqlen_k) for start, end, used in spans):
                if any(start or used != end for start, end, used in spans):
                    return self._by_padding(padding, spans, shift, seqlen_k)
                ends = torch.tensor([end for _, end, _ in spans], dtype=torch.int32, device=padding.device)
        return Dense(self._aligned(shift, seqlen_k, ends is not None), seqlen_k, ends)

    def _aligned(self, shift: int, seqlen_k: int, with_lengths: bool) -> Mask:
        """The band, from a diagonal that does not change from step to step where one serves."""
        left, right, _, _ = self.pattern
        if left is None and right is None:
            return NONE
        bounds = (-1 if left is None else left, -1 if right is None else right)
        if shift == seqlen_k - self.seqlen_q and not with_lengths:
            return Mask(2, *bounds)
        if shift == 0:
            return Mask(1, *bounds)
        return band(left, right, shift)

    def _by_padding(
        self, padding: torch.Tensor, spans: List[Tuple[int, int, int]], shift: int, seqlen_k: int
    ) -> Optional[Packed]:
        left, right, _, _ = self.pattern
        lengths_k = [used for _, _, used in spans]
        if left is None and right is None:
            rows_q, lengths_q = None, [self.seqlen_q] * self.batch
        else:
            if shift + self.seqlen_q != seqlen_k or right is None:
                return None
            if any(used != end - start for start, end, used in spans) and (left is not None or right != 0):
                # A window of positions is no window of the rows in use where unused rows lie between.
                return None
            queries = padding[:, shift:]
            rows_q = torch.nonzero(queries.flatten()).flatten()
            lengths_q = [used for _, _, used in _spans(queries)]
        device = padding.device
        return Packed(
            _bottom_right(self.pattern),
            rows_q,
            torch.nonzero(padding.flatten()).flatten(),
            _offsets(lengths_q, device),
            _offsets(lengths_k, device),
            max(lengths_q),
            max(lengths_k),
            seqlen_k,
        )


def _bottom_right(pattern: Pattern) -> Mask:
    if pattern.left is None and pattern.right is None:
        return NONE
    return Mask(2, -1 if pattern.left is None else pattern.left, -1 if pattern.right is None else pattern.right)


def _offsets(lengths: List[int], device: Any) -> torch.Tensor:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _spans(used: torch.Tensor) -> List[Tuple[int, int, int]]:
    """The first row in use, the one behind the last, and how many, of each sequence: read by one wait for a device."""
    rows = used.shape[1]
    count = used.sum(-1)
    ones = used.to(torch.int8)
    first = ones.argmax(-1)
    end = rows - ones.flip(-1).argmax(-1)
    return [
        (int(start), int(stop), int(number)) if number else (0, 0, 0)
        for start, stop, number in torch.stack([first, end, count], -1).tolist()
    ]


def _by_sequences(pattern: Pattern, sequences: torch.Tensor) -> Packed:
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = torch.nonzero(begins.flatten()).flatten()
    offsets = torch.cat([starts, starts.new_tensor([sequences.numel()])]).to(torch.int32)
    longest = int(offsets.diff().max())
    return Packed(
        _bottom_right(pattern), None, None, offsets, offsets, longest, longest, sequences.shape[1]
    )


class Visible(torch.Tensor):
    """A mask that is not spelt out: see the module."""

    facts: Facts

    @staticmethod
    def __new__(cls, facts: Facts, dtype: torch.dtype, device: Any) -> "Visible":
        shape = (facts.batch, 1, facts.seqlen_q, facts.seqlen_k)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, facts: Facts, dtype: torch.dtype, device: Any) -> None:
        self.facts = facts

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default or function is torch.ops.aten.alias.default:
            given = args[0]
            return Visible(given.facts, given.dtype, given.device)
        spelt = lambda x: x.facts.spelt() if isinstance(x, Visible) else x
        return function(*tree_map(spelt, args), **tree_map(spelt, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Visible({tuple(self.shape)}, {self.facts.pattern})"
