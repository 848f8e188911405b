"""Masks as data and functions of a call over ranks, as the structs of ``fmha.h`` have them."""

from __future__ import annotations

import ctypes
import math
import re
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from . import _c, _native
from ._mask_data import TENSORS
from ._numbers import shown
from ._trace import Code
from ._traced_torch import STORED

#: Six tensors of masks, ``None`` for masks that the call does not have, and the captured tensors.
Operands = Tuple[Tuple[Optional[torch.Tensor], ...], Tuple[torch.Tensor, ...]]

#: A declaration in a function's text: a name and the type of its elements.
_DECLARED = re.compile(r"(?:^|; )([A-Za-z]\w*): (\w+)")


class Coded:
    """Functions and masks as data of a call over ranks, without their tensors, which each run brings."""

    def __init__(self, code: Optional[Code], captured: Sequence[torch.Tensor], masks: Optional[_c.FmhaMasks]) -> None:
        self._masks = masks
        is_text = code is not None and code.is_text()
        self._texts = (code.score, code.mask) if code is not None and is_text else None
        self._names = code.names if code is not None and is_text else ()
        self._numbers = code.numbers if code is not None and is_text else ()
        self._captured = tuple((x.dtype, tuple(x.shape), x.stride()) for x in captured)

    def key(self) -> Tuple[Any, ...]:
        """All on which a plan depends, without captured numbers, which are arguments of a run."""
        return None if self._masks is None else bytes(self._masks), self._texts, self._names, self._captured

    def named(self, captured: Sequence[torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Captured tensors by what errors call them."""
        return {f"captured {name}": x for name, x in zip(self._names, captured)}

    def put(self, problem: _c.FmhaProblem, wanted: Tuple[int, ...]) -> List[Any]:
        """Puts the structs into a problem, with gradients of the captured tensors ``wanted``. Returns what has to
        outlive it."""
        if self._masks is not None:
            problem.masks = ctypes.addressof(self._masks)
        if self._texts is None:
            return []
        listed = (_c.FmhaCaptured * max(len(self._names), 1))()
        for one, name in zip(listed, self._names):
            one.name = name.encode()
        for at, (dtype, sizes, steps) in enumerate(self._captured):
            one = listed[at]
            one.num_dims = len(sizes)
            for axis, (size, step) in enumerate(zip(sizes, steps)):
                # An axis of one index gets its full size and a stride of 0.
                one.shape[axis], one.strides[axis] = size, 0 if size == 1 else step
            if at in wanted:
                one.write_grad, one.dtype_grad = 1, _native.DTYPES[str(dtype).rpartition(".")[2]]
        code = _c.new(_c.FmhaCode)
        code.score, code.mask = (text.encode() or None for text in self._texts)
        if self._names:
            code.captured, code.num_captured = listed, len(self._names)
        problem.code = ctypes.addressof(code)
        return [listed, code]

    def put_args(
        self, args: _c.FmhaArgs, operands: Operands, gradients: Optional[Dict[int, torch.Tensor]] = None
    ) -> Any:
        """Puts a run's tensors and numbers into its arguments, and the ``gradients`` of captured tensors by their
        place. Returns what has to outlive them."""
        masks, captured = operands
        for name, x in zip(TENSORS, masks):
            if x is not None and x.numel():
                setattr(args, name, x.data_ptr())
        if not self._names:
            return None
        listed = (_c.FmhaCapturedArgs * len(self._names))()
        for at, x in enumerate(captured):
            listed[at].data = x.data_ptr()
        for at, number in enumerate(self._numbers, len(captured)):
            listed[at].real, listed[at].integer = number, int(number) if math.isfinite(number) else 0
        for at, gradient in (gradients or {}).items():
            listed[at].grad = gradient.data_ptr()
        args.captured = ctypes.addressof(listed)
        return listed


def read(
    code: Optional[Code], like: torch.Tensor, whole: Tuple[int, int, Optional[int], int]
) -> Tuple[Coded, Operands]:
    """What a call has, and its tensors.

    Args:
        code: functions and masks as data; ``None``: neither.
        like: this rank's Q, on whose device all tensors are.
        whole: of all ranks: batch, rows of a sequence, rows of packed queries or ``None``, and keys.

    Raises:
        TypeError, ValueError: a tensor or a number that is none of such a call, by its name.
    """
    if code is None:
        return Coded(None, (), None), ((None,) * len(TENSORS), ())
    tensors = {name: x for name, x in zip(TENSORS, code.masks.tensors) if x is not None}
    for name, x in tensors.items():
        _goes_with(f"mask: {name}", x, like)
    masks = _described(tensors, (code.masks.block_q, code.masks.block_k), whole) if tensors else None
    _check(code, like)
    captured = tuple(x.resolve_neg() for x in code.tensors)
    return Coded(code, captured, masks), (tuple(map(tensors.get, TENSORS)), captured)


def _goes_with(name: str, x: Any, like: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        raise TypeError(f"{name}: {shown(x)} is no tensor of torch that has strides")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, but q is on {like.device}")


def _check(code: Code, like: torch.Tensor) -> None:
    """Raises for a captured tensor that its function cannot read where it is, and for a number that is none of 32
    bits."""
    declared = dict(pair for text in (code.score, code.mask) for pair in _DECLARED.findall(text))
    for name, x in zip(code.names, code.tensors):
        _goes_with(f"captured {name}", x, like)
        if STORED.get(x.dtype) != declared[name]:
            raise TypeError(f"captured {name} is of {x.dtype}, but the function reads {declared[name]}")
        if x.dim() > _native.MAX_DIMS:
            raise ValueError(f"captured {name} has {x.dim()} axes, more than {_native.MAX_DIMS}")
    for name, number in zip(code.names[len(code.tensors) :], code.numbers):
        narrow = ctypes.c_float(number).value
        if math.isfinite(number) != math.isfinite(narrow):
            raise ValueError(f"captured {name} {number} is {narrow} as a 32-bit number")


def _described(
    tensors: Dict[str, torch.Tensor], block: Tuple[int, int], whole: Tuple[int, int, Optional[int], int]
) -> _c.FmhaMasks:
    """The struct of masks whose shapes go with the whole."""
    batch, seqlen_q, total_q, seqlen_k = whole
    masks = _c.new(_c.FmhaMasks)
    packed = total_q is not None
    rows = seqlen_q if total_q is None else total_q
    for name, dtypes, wanted in (
        ("intervals", ("int32",), "heads, endpoints, rows"),
        ("mask_bits", ("int32", "uint32"), "heads, rows, words"),
    ):
        x = tensors.get(name)
        if x is None:
            continue
        axes = wanted if packed else f"batch or 1, {wanted}"
        heads, *rest = _extents(name, x, axes, dtypes, None if packed else batch)
        of_rows, of_keys = reversed(rest) if name == "intervals" else rest
        if of_rows != rows:
            raise ValueError(f"mask: {name} has {of_rows} queries, but the whole has {rows}: it is {axes}")
        if not heads:
            raise ValueError(f"mask: {name} has 0 heads, not 1, num_heads_kv or num_heads_q")
        if name == "intervals":
            if not of_keys:
                raise ValueError("mask: intervals has 0 endpoints a row, which is not an even number from 2 on")
            masks.intervals, masks.intervals_heads, masks.endpoints = _strides(x, packed, (3, 1, 2)), heads, of_keys
            continue
        words = -(-seqlen_k // 32)
        if of_keys != words:
            raise ValueError(f"mask: mask_bits has {of_keys} words a query, not {words} for {seqlen_k} keys")
        masks.mask_bits, masks.mask_bits_heads = _strides(x, packed, (2, 1, 3)), heads
    _describe_lists(masks, tensors, block, batch, seqlen_q)
    return masks


def _describe_lists(
    masks: _c.FmhaMasks, tensors: Dict[str, torch.Tensor], block: Tuple[int, int], batch: int, seqlen_q: int
) -> None:
    alike: Optional[Tuple[str, Sequence[int]]] = None
    for prefix in ("", "full_"):
        counts, indices = f"{prefix}kv_num_blocks", f"{prefix}kv_indices"
        if counts not in tensors and indices not in tensors:
            continue
        for missing, beside in ((counts, indices), (indices, counts)):
            if missing not in tensors:
                raise ValueError(f"mask: {missing} is missing beside {beside}")
        of_counts, of_indices = tensors[counts], tensors[indices]
        sizes = _extents(counts, of_counts, "batch or 1, heads, blocks", ("int32",), batch)
        *front, room = _extents(indices, of_indices, "batch or 1, heads, blocks, max_blocks", ("int32",), batch)
        if of_counts.shape != of_indices.shape[:-1]:
            shapes = tuple(of_indices.shape), tuple(of_counts.shape)
            raise ValueError(f"mask: {indices} has shape {shapes[0]}, but {counts} {shapes[1]}")
        heads, rows = sizes
        wanted = -(-seqlen_q // block[0])
        if rows != wanted:
            raise ValueError(
                f"mask: {counts} has {rows} rows of blocks, but {seqlen_q} queries are {wanted} blocks of {block[0]}"
            )
        if not heads:
            raise ValueError(f"mask: {counts} has 0 heads, not 1 or num_heads_q")
        if alike is not None and alike[1] != of_counts.shape:
            raise ValueError(f"mask: {counts} has shape {tuple(of_counts.shape)}, but {alike[0]} {tuple(alike[1])}")
        alike = counts, of_counts.shape
        setattr(masks, counts, _strides(of_counts, False, (2, 1, 3)))
        setattr(masks, indices, _strides(of_indices, False, (2, 1, 3)))
        setattr(masks, "full" if prefix else "partial", 1)
        setattr(masks, f"{prefix}max_blocks", room)
        masks.lists_heads, (masks.block_q, masks.block_k) = heads, block


def _extents(name: str, x: torch.Tensor, axes: str, dtypes: Sequence[str], batch: Optional[int]) -> List[int]:
    """Extents without that of the batch, which packed rows do not have."""
    count = axes.count(",") + 1
    if x.dim() != count:
        raise ValueError(f"mask: {name} has shape {tuple(x.shape)}, not {axes}")
    if str(x.dtype).rpartition(".")[2] not in dtypes:
        raise TypeError(f"mask: {name} is of {x.dtype}, not of {' or '.join(dtypes)}")
    if batch is None:
        return list(x.shape)
    if x.shape[0] not in (1, batch):
        raise ValueError(f"mask: {name} has batch {x.shape[0]}, neither 1 nor q's {batch}")
    return list(x.shape[1:])


def _strides(x: torch.Tensor, packed: bool, axes: Tuple[int, int, int]) -> _c.FmhaStrides:
    """Steps of the axes of queries, heads and what a query has, counted with a batch axis. An axis of one index has no
    step, and a batch without one is one mask for all sequences."""
    steps = [0 if size <= 1 else step for size, step in zip(x.shape, x.stride())]
    steps = [0, *steps] if packed else steps
    return _c.FmhaStrides(steps[0], *(steps[axis] if axis < len(steps) else 0 for axis in axes))
