"""Scales by blocks on torch's tensors, on any device: the library's requests, called by ctypes."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch

from . import _lists, _native, _torch
from ._arguments import dtype_code
from ._block_scales import BlockScales

_ARE = "block_scales: scales by blocks are"
_AT_DTYPE_O = _native.NUMBERS.index("dtype_o")
_DESCALES = ("descale_q", "descale_k", "descale_v")


class _Format(NamedTuple):
    code: int
    #: Types that elements may have, of which the first is what the library is told.
    elements: Tuple[torch.dtype, ...]
    scales: Tuple[torch.dtype, ...]
    elems_per_byte: int
    block: int
    largest: float


_MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)
_FORMATS = {
    "mxfp8_e4m3": _Format(1, (torch.float8_e4m3fn,), _MX_SCALES, 1, 32, 448.0),
    "mxfp8_e5m2": _Format(2, (torch.float8_e5m2,), _MX_SCALES, 1, 32, 57344.0),
    "nvfp4": _Format(
        3, (torch.uint8, torch.float4_e2m1fn_x2), (torch.uint8, torch.float8_e4m3fn), 2, 16, 6.0
    ),
}

#: Numbers between two neighbours of E2M1, which round to the even one.
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def known(name: str) -> _Format:
    """The format of a name."""
    found = _FORMATS.get(name)
    if found is None:
        raise ValueError(f"block_scales: format {name!r} is none of {', '.join(_FORMATS)}")
    return found


class _Put:
    """Scales of a request."""

    def __init__(self, scales: BlockScales, form: _Format) -> None:
        self.form, self.values = form, str(scales.values).rpartition(".")[2]
        self.scales = [
            _bytes(f"block_scales: {name}", x, form.scales) for name, x in zip("qkv", (scales.q, scales.k, scales.v))
        ]

    def put(self, request: _native.Request) -> None:
        q, k, v = (_lists._described(f"block_scales: {name}", x) for name, x in zip("qkv", self.scales))
        request.put_block_scales(q, k, v, self.form.code, self.values)


def _bytes(name: str, x: Any, types: Tuple[torch.dtype, ...]) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {type(x).__name__} is no tensor of torch's")
    if x.dtype not in types:
        raise TypeError(f"{name} is of {x.dtype}, not of {' or '.join(map(str, types))}, as block_scales stand for")
    return x if x.dtype == types[0] else x.view(types[0])


def attention(
    q: Any, k: Any, v: Any, tensors: Tuple[Any, ...], numbers: Tuple[Any, ...], scales: BlockScales
) -> Tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of a bound call."""
    _torch.refuse_tracers(_ARE)
    form = known(scales.format)
    if scales.values not in (torch.bfloat16, torch.float32):
        raise TypeError(f"block_scales: values {scales.values} are not of torch.bfloat16 or torch.float32")
    q, k, v = (_bytes(name, x, form.elements) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() not in (3, 4):
            raise ValueError(f"{name} has {x.dim()} axes of shape {tuple(x.shape)}, not 3 or 4")
    named = dict(zip(_torch.TENSORS, tensors))
    for name, own in zip(_DESCALES, scales.descales):
        if own is not None and named[name] is not None:
            raise ValueError(f"{name} is given, and the scales by blocks have their own")
        named[name] = named[name] if own is None else own
    for name, x in named.items():
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} beside block_scales has no gradient")
    if numbers[_AT_DTYPE_O] == -1:
        numbers = (*numbers[:_AT_DTYPE_O], dtype_code(scales.values), *numbers[_AT_DTYPE_O + 1 :])
    _, rest = _torch.prepared((q, k, v), tuple(named.values()))
    numbers, _ = _torch._seeded(q, numbers)
    by_columns = v.dim() == 4 and v.stride(-3) == 1 and v.stride(-1) != 1
    head_dim_v = v.shape[-1] * (1 if by_columns else form.elems_per_byte)
    o, lse = _torch._o_and_lse(q, head_dim_v, numbers)
    if named["seqused_q"] is not None or named["cu_seqlens_q"] is not None:
        o, lse = o.zero_(), lse.zero_()
    more = [(name, x) for name, x in zip(named, rest) if x is not None]
    with torch.no_grad():
        run = [("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), *more]
        _lists._run(numbers, run, _Put(scales, form), _ARE)
    return o, lse


def quantize(x: Any, name: str, axis: int, descale: Optional[torch.Tensor]) -> Tuple[Any, Any, torch.Tensor]:
    """Elements, scales by blocks along an axis, and the tensor's own scale, f32 ``[1]``."""
    form = known(name)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() not in (3, 4):
        raise TypeError(f"quantize: {type(x).__name__} is no floating tensor of 3 or 4 axes")
    if form.elems_per_byte == 2 and x.shape[-1] % 2:
        raise ValueError(f"quantize: a head dimension of {x.shape[-1]} is no number of pairs")
    with torch.no_grad():
        x = x.detach().to(torch.float64)
        x = x.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
        size = x.shape[axis]
        blocks = -(-size // form.block)
        # The axis of blocks last, in whole blocks.
        rows = torch.nn.functional.pad(x.movedim(axis, -1), (0, blocks * form.block - size))
        rows = rows.unflatten(-1, (blocks, form.block))
        most = rows.nan_to_num(nan=0.0).abs().amax(-1)
        if descale is None:
            whole = most.max() / (6.0 * 448.0) if form.elems_per_byte == 2 and most.numel() else most.new_tensor(1.0)
            whole = whole.to(torch.float32)
            # The scale of zeros is 1, as is one that would leave f32.
            descale = torch.where(whole >= torch.finfo(torch.float32).tiny, whole, torch.ones_like(whole)).reshape(1)
        wanted = most / form.largest / descale.to(torch.float64)
        if form.elems_per_byte == 1:
            mantissa, exponent = torch.frexp(wanted)
            exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
            exponent = torch.where(wanted == 0, -127, exponent).clamp(-127, 127)
            codes = (exponent + 127).to(torch.uint8)
            factor = torch.ldexp(torch.ones_like(wanted), exponent)
        else:
            scale = wanted.clamp(max=448.0).to(torch.float32).to(torch.float8_e4m3fn)
            codes = scale.view(torch.uint8)
            codes = torch.where(rows.isnan().any(-1), 0x7F, codes).to(torch.uint8)
            factor = scale.to(torch.float64)
        divisor = (factor * descale.to(torch.float64)).unsqueeze(-1)
        elements = torch.where(divisor == 0, 0.0, rows / divisor).flatten(-2)[..., :size].movedim(-1, axis)
        if form.elems_per_byte == 1:
            stored = elements.clamp(-form.largest, form.largest).to(torch.float32).to(form.elements[0])
        else:
            stored = _pairs(elements)
        return stored.contiguous(), codes.movedim(-1, axis).contiguous(), descale


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """E2M1 of the nearest numbers, ties to even codes, the first of two in the lower four bits."""
    ties = torch.tensor(_E2M1_TIES, dtype=x.dtype, device=x.device)
    magnitude = x.nan_to_num(nan=0.0).abs().contiguous()
    below, above = (torch.bucketize(magnitude, ties, right=right) for right in (False, True))
    code = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    code = code | (torch.signbit(x).to(torch.uint8) << 3)
    first, second = code[..., 0::2], code[..., 1::2]
    return first | (second << 4)
