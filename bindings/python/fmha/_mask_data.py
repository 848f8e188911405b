"""Masks as data: ranges of keys, bits and lists of blocks, as objects that a call takes for its ``mask``."""

from __future__ import annotations

import sys
from typing import Any, List, NamedTuple, Optional, Tuple, Union

from ._mask import Mask, MaskLike, mask as _band
from ._numbers import integer, shown

#: The tensors of masks as data, in the order in which operators take them.
TENSORS = ("intervals", "mask_bits", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


#: Small outputs of a call, written to the caller's tensors.
OUTPUTS = ("row_max", "head_max", "key_sum")


class Masks(NamedTuple):
    """What a call has that operators of code take: masks by :data:`TENSORS`, the sizes of blocks, 0 where there are no
    lists, and small outputs."""

    tensors: Tuple[Any, ...] = (None,) * len(TENSORS)
    block_q: int = 0
    block_k: int = 0
    #: Tensors for :data:`OUTPUTS`; ``None`` for an output that is not wanted.
    outputs: Tuple[Any, ...] = (None,) * len(OUTPUTS)

    def is_empty(self) -> bool:
        return all(x is None for x in (*self.tensors, *self.outputs))


class Intervals:
    """Ranges of keys for each query.

    Args:
        endpoints: i32 ``[batch or 1, heads, 2 n, seqlen_q]``, packed ``[heads, 2 n, total_q]``, on the call's device;
            heads are 1, those of K or those of Q. Query i sees the keys from endpoint 2 p up to endpoint 2 p + 1,
            without that one, for p from 0 below n. An endpoint below the one before it counts as that one, so that a
            pair of equal ones is unused.
    """

    def __init__(self, endpoints: Any) -> None:
        self.endpoints = _tensor("Intervals: endpoints", endpoints)

    def put(self, masks: Masks) -> Masks:
        return _with(masks, "Intervals", {"intervals": self.endpoints})


class MaskBits:
    """A bit for each query and key.

    Args:
        words: u32 or i32 ``[batch or 1, heads, seqlen_q, ceil(seqlen_k / 32)]``, packed ``[heads, total_q, ceil(max_seqlen_k
            / 32)]``, on the call's device: bit ``j % 32`` of word ``j / 32``, counted from the least, is 1 where key j is
            seen. :meth:`of` packs them.
    """

    def __init__(self, words: Any) -> None:
        self.words = _tensor("MaskBits: words", words)

    @classmethod
    def of(cls, seen: Any) -> "MaskBits":
        """The bits of a tensor of bools whose last axis is the key: ``[batch or 1, heads, seqlen_q, seqlen_k]``."""
        seen = _tensor("MaskBits.of: seen", seen)
        if len(seen.shape) == 0:
            raise ValueError("MaskBits.of: seen is a single number, and has no axis of keys")
        return cls(_packed(seen))

    def put(self, masks: Masks) -> Masks:
        return _with(masks, "MaskBits", {"mask_bits": self.words})


class BlockLists:
    """Which blocks of keys each block of queries sees, as torch's ``BlockMask`` has them, and as (counts, indices).

    Args:
        kv_num_blocks: i32 ``[batch or 1, heads, blocks_q]``, heads 1 or those of Q: how many indices count.
        kv_indices: i32 ``[batch or 1, heads, blocks_q, max_blocks]``: blocks of keys in which other masks of the call,
            ``mask_code`` among them, decide.
        full_kv_num_blocks, full_kv_indices: likewise the blocks that are seen as a whole, within lengths and the band:
            they ask neither intervals, bits nor a function. Either pair may be ``None``.
        block_size: rows and keys of a block: one number, or two.
    """

    def __init__(
        self,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        *,
        block_size: Union[int, Tuple[int, int]],
    ) -> None:
        given = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        if all(x is None for x in given):
            raise ValueError("BlockLists: kv_num_blocks and full_kv_num_blocks are both None")
        self.lists = tuple(
            None if x is None else _tensor(f"BlockLists: {name}", x) for name, x in zip(TENSORS[2:], given)
        )
        sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
        if len(sizes) != 2:
            raise ValueError(f"BlockLists: block_size: {shown(block_size)} is neither a number nor two")
        self.block_q, self.block_k = (integer("BlockLists: block_size", size) for size in sizes)
        for size in (self.block_q, self.block_k):
            if size < 1:
                raise ValueError(f"BlockLists: block_size {size} is below 1")

    @classmethod
    def of(cls, block_mask: Any) -> "BlockLists":
        """The lists of a ``BlockMask`` of torch's; its ``mask_mod`` is no part of them."""
        lists = [getattr(block_mask, name, None) for name in TENSORS[2:]]
        size = getattr(block_mask, "BLOCK_SIZE", None)
        if size is None or lists[0] is None:
            raise TypeError(f"BlockLists.of: block_mask: {shown(block_mask)} is no BlockMask")
        return cls(*lists, block_size=tuple(size))

    def put(self, masks: Masks) -> Masks:
        masks = _with(masks, "BlockLists", dict(zip(TENSORS[2:], self.lists)))
        return masks._replace(block_q=self.block_q, block_k=self.block_k)


#: Masks that a call takes: a band, masks as data, or a list of masks. A query sees a key that every mask allows; only
#: block of the full list the other masks are not applied.
AnyMask = Union[MaskLike, Intervals, MaskBits, BlockLists, List[Any]]

_DATA = (Intervals, MaskBits, BlockLists)


def is_object(given: Any) -> bool:
    """Whether a ``mask`` is a :class:`fmha.MaskObject`, whose module needs this one."""
    module = sys.modules.get(f"{__package__}._mask_object")
    return module is not None and isinstance(given, module.MaskObject)


def split(given: Any, outputs: Tuple[Any, ...] = (None,) * len(OUTPUTS)) -> Tuple[Any, Optional[Masks]]:
    """The band of a call's ``mask``, and its masks as data and small outputs; ``None``: it has neither."""
    masks, band = Masks(outputs=outputs), None
    if is_object(given):
        return given.band, given.masks._replace(outputs=outputs)
    if not isinstance(given, (*_DATA, list)):
        return given, None if masks.is_empty() else masks
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, _DATA):
            masks = one.put(masks)
            continue
        if one is None:
            continue
        read: Mask = _band(one)
        if band is not None:
            raise ValueError(f"mask: {shown(one)} is the second band of a list, of which one is taken")
        band = read
    return band, None if masks.is_empty() else masks


def _with(masks: Masks, kind: str, tensors: Any) -> Masks:
    held = dict(zip(TENSORS, masks.tensors))
    if any(held[name] is not None for name in tensors):
        raise ValueError(f"mask: {kind} is given twice")
    return masks._replace(tensors=tuple({**held, **tensors}.values()))


def _tensor(name: str, x: Any) -> Any:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: {shown(x)} is no tensor")
    return x


def _packed(seen: Any) -> Any:
    """Bits of bools along the last axis, 32 in a word: on the tensor's own library and device."""
    if str(seen.dtype).rpartition(".")[2] not in ("bool", "bool_"):
        raise TypeError(f"MaskBits.of: seen is of {seen.dtype}, not of bool")
    module = type(seen).__module__.partition(".")[0]
    keys = seen.shape[-1]
    words = -(-keys // 32)
    if module == "torch":
        import torch

        bits = torch.nn.functional.pad(seen, (0, words * 32 - keys)).unflatten(-1, (words, 32))
        weights = torch.tensor([1 << bit for bit in range(32)], dtype=torch.int64, device=seen.device)
        # A word of 32 bits: what is above 2^31 is below 0 as an i32.
        whole = (bits.to(torch.int64) * weights).sum(-1)
        return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)
    if module.startswith("jax"):
        import jax.numpy as numpy
    else:
        import numpy  # type: ignore[no-redef]
    lacking = [(0, 0)] * (seen.ndim - 1) + [(0, words * 32 - keys)]
    bits = numpy.pad(seen, lacking).reshape(*seen.shape[:-1], words, 32).astype(numpy.uint32)
    return (bits << numpy.arange(32, dtype=numpy.uint32)).sum(-1, dtype=numpy.uint32)
