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
from ._mask_data import Intervals, MaskBits


class Pattern(NamedTuple):
    """A mask function that was recognised.

    A query at position p sees keys from ``p - left`` to ``p + right``, ``None`` being unbounded; with ``chunk`` those
    of its own chunk of so many positions, counted from ``left_padding``, ``[batch]``; with ``sequences``,
    ``[batch, seqlen]``, those whose number there is the query's. With ``blocks``, ``[batch, positions]``, it sees keys
    whose number there is its own and not below 0 besides those of band and chunk.
    """

    left: Optional[int] = None
    right: Optional[int] = None
    chunk: Optional[int] = None
    sequences: Optional[torch.Tensor] = None
    left_padding: Optional[torch.Tensor] = None
    blocks: Optional[torch.Tensor] = None

    def is_band(self) -> bool:
        """Whether a band alone says it."""
        return self.chunk is None and self.sequences is None and self.blocks is None


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
        return Pattern(chunk=held["chunk_size"], left_padding=held["left_padding"])
    held = _captured(function, masking_utils.packed_sequence_mask_function)
    if held is not None:
        return Pattern(sequences=held["packed_sequence_mask"])
    held = _captured(function, getattr(masking_utils, "remap_positions_for_packed_sequence", None))
    if held is not None:
        # Positions count up by 1 inside a sequence, so a band of positions is a band of rows; a chunk of positions need
        # not be one of rows.
        inner = recognise(held["mask_function"])
        return inner if inner is not None and inner.is_band() else None
    held = _captured(function, getattr(masking_utils, "or_masks", None))
    if held is not None:
        return _united(held["mask_functions"])
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
        if whole.blocks is not None or read.blocks is not None:
            # Sequences also split blocks. A band or a chunk beside a union of masks would cut the union's band alone.
            united, rest = (read, whole) if whole.blocks is None else (whole, read)
            if rest._replace(sequences=None) != Pattern():
                return None
            whole = united._replace(sequences=rest.sequences if united.sequences is None else united.sequences)
            continue
        whole = Pattern(
            _least(whole.left, read.left),
            _least(whole.right, read.right),
            whole.chunk if read.chunk is None else read.chunk,
            whole.sequences if read.sequences is None else read.sequences,
            whole.left_padding if read.left_padding is None else read.left_padding,
        )
    return whole


def _united(functions: Tuple[Callable[..., Any], ...]) -> Optional[Pattern]:
    """The pattern of a mask function and of blocks that see themselves both ways, of which one shows a key."""
    blocks = [_captured(one, getattr(masking_utils, "blockwise_overlay", None)) for one in functions]
    if len(functions) != 2 or (blocks[0] is None) is (blocks[1] is None):
        return None
    at = 0 if blocks[0] is None else 1
    inner, held = recognise(functions[at]), blocks[1 - at]
    if inner is None or held is None or inner.sequences is not None or inner.blocks is not None:
        return None
    return inner._replace(blocks=held["block_sequence_ids"])


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
    #: Keys that each sequence has in the batch whose rows ``rows_k`` numbers.
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
        self._data: Optional[List[Any]] = None
        self._has_data = False

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
        if self.padding is not None or self._spelt is not None:
            return None
        if self.pattern.chunk is not None or self.pattern.blocks is not None:
            return None
        band = _bottom_right(self.pattern)
        square = self.first_q == self.first_k and self.seqlen_q == self.seqlen_k
        return band if square or band == NONE else None

    def data(self) -> Optional[List[Any]]:
        """The mask as data where there is no way; ``None``: that neither says it, or a bias is faster: AMD's fast kernels
        read no masks as data."""
        if self._spelt is not None or torch.version.hip:
            return None
        if not self._has_data:
            self._data, self._has_data = self._make_data(), True
        return self._data

    def _make_data(self) -> Optional[List[Any]]:
        left, right, chunk, sequences, left_padding, blocks = self.pattern
        rows, keys = self.seqlen_q, self.seqlen_k
        position = torch.arange(self.first_q, self.first_q + rows, device=self._device)
        begin, end = torch.zeros_like(position)[None], torch.full_like(position, keys)[None]
        if left is not None:
            begin = (position - left - self.first_k).clamp(min=0)[None]
        if right is not None:
            end = (position + right + 1 - self.first_k).clamp(max=keys)[None]
        if chunk is not None:
            first = 0 if left_padding is None else left_padding.to(self._device).view(-1, 1)
            own = torch.div(position - first, chunk, rounding_mode="floor") * chunk + first - self.first_k
            own = own.view(-1, rows)
            begin, end = torch.maximum(begin, own), torch.minimum(end, own + chunk)
        pairs = [(begin, end)]
        if blocks is not None:
            if blocks.shape[-1] < max(self.first_q + rows, self.first_k + keys) or not _are_runs(blocks):
                return None
            starts, ends = _runs(blocks)
            own = slice(self.first_q, self.first_q + rows)
            is_in = blocks[:, own] >= 0
            # A query that sees nothing has the range from 0 to 0.
            pairs.append(tuple(torch.where(is_in, x[:, own] - self.first_k, 0) for x in (starts, ends)))
        if sequences is not None:
            if self.first_q != self.first_k or rows != keys or not _are_runs(sequences):
                return None
            starts, ends = _runs(sequences)
            pairs = [(torch.maximum(begin, starts), torch.minimum(end, ends)) for begin, end in pairs]
        pairs = [tuple(x.clamp(0, keys).expand(self.batch, -1) for x in pair) for pair in pairs]
        if len(pairs) == 2:
            # Endpoints must ascend, so the range that begins first comes first.
            (a, b), (c, d) = pairs
            swap = c < a
            pairs = [(torch.where(swap, c, a), torch.where(swap, d, b)), (torch.where(swap, a, c), torch.where(swap, b, d))]
        endpoints = torch.stack([x for pair in pairs for x in pair], 1).to(torch.int32)
        data: List[Any] = [Intervals(endpoints[:, None].contiguous())]
        if self.padding is not None:
            # Each query reads one row of the mask's bits.
            words = MaskBits.of(self.padding[:, None, None]).words
            data.append(MaskBits(words.expand(-1, -1, rows, -1)))
        return data

    def _find(self) -> Union[None, Dense, Packed]:
        left, right, chunk, sequences, _, blocks = self.pattern
        if blocks is not None:
            return None
        shift = self.first_q - self.first_k
        square = shift == 0 and self.seqlen_q == self.seqlen_k
        last = max(self.first_q + self.seqlen_q, self.first_k + self.seqlen_k)
        if chunk is not None and last <= chunk:
            # Every row in use lies in the first chunk, with or without left padding.
            chunk = None
        if chunk is not None:
            if sequences is not None or self.padding is not None or not square or self.first_q:
                return None
            numbers = torch.arange(self.seqlen_q, device=self._device) // chunk
            sequences = numbers.expand(self.batch, -1)
        if sequences is not None:
            return _by_sequences(self.pattern, sequences) if self.padding is None and square else None
        # Keys beyond those that the last query sees are cut off: a static cache has rows for tokens to come.
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
        left, right = self.pattern[:2]
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
        left, right = self.pattern[:2]
        lengths_k = [used for _, _, used in spans]
        if left is None and right is None:
            rows_q, lengths_q = None, [self.seqlen_q] * self.batch
        else:
            if shift + self.seqlen_q != seqlen_k or right is None:
                return None
            if any(used != end - start for start, end, used in spans) and (left is not None or right != 0):
                # A window of positions is not a window of rows where unused rows lie between.
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


def _begins(numbers: torch.Tensor) -> torch.Tensor:
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins


def _runs(numbers: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Where the run of equal numbers of each place begins, and where it ends: ``[batch, places]`` each."""
    places = numbers.shape[1]
    at = torch.arange(places, device=numbers.device).expand_as(numbers)
    begins = _begins(numbers)
    starts = torch.where(begins, at, 0).cummax(1).values
    last = torch.cat([begins[:, 1:], begins.new_ones(numbers.shape[0], 1)], 1)
    ends = torch.where(last, at + 1, places).flip(1).cummin(1).values.flip(1)
    return starts, ends


def _are_runs(numbers: torch.Tensor) -> bool:
    """Whether no number that is not below 0 comes again after another one: read by one wait for a device."""
    ordered = numbers.sort(1).values
    counts = [(_begins(x) & (x >= 0)).sum(1) for x in (numbers, ordered)]
    return bool((counts[0] == counts[1]).all())


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
