"""Scales by blocks on torch's tensors, on any device: the library's requests, called by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, NamedTuple, Optional, Tuple

import torch

from . import _lists, _native, _torch
from ._arguments import dtype_code
from ._block_scales import BlockScales

_ARE = "block_scales: scales by blocks are"
_AT_DTYPE_O = _native.NUMBERS.index("dtype_o")
_AT_OPTIONS, _DETERMINISTIC = _torch._AT_OPTIONS, _torch._DETERMINISTIC
_DESCALES = ("descale_q", "descale_k", "descale_v")


class _Format(NamedTuple):
    code: int
    #: Types that elements may have. The library is given the first one.
    elements: Tuple[torch.dtype, ...]
    scales: Tuple[torch.dtype, ...]
    elems_per_byte: int
    block: int


_MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)
_FORMATS = {
    "mxfp8_e4m3": _Format(1, (torch.float8_e4m3fn,), _MX_SCALES, 1, 32),
    "mxfp8_e5m2": _Format(2, (torch.float8_e5m2,), _MX_SCALES, 1, 32),
    "nvfp4": _Format(
        3, (torch.uint8, torch.float4_e2m1fn_x2), (torch.uint8, torch.float8_e4m3fn), 2, 16
    ),
}

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
        if name != "sink" and isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} beside block_scales has no gradient")
    _torch.refuse_tangents(q, k, v, *tensors, **{f"of_{name}": x for name, x in zip("qkv", scales.of)})
    if torch.are_deterministic_algorithms_enabled():
        numbers = (*numbers[:_AT_OPTIONS], numbers[_AT_OPTIONS] | _DETERMINISTIC, *numbers[_AT_OPTIONS + 1 :])
    if numbers[_AT_DTYPE_O] == -1:
        numbers = (*numbers[:_AT_DTYPE_O], dtype_code(scales.values), *numbers[_AT_DTYPE_O + 1 :])
    _, rest = _torch.prepared((q, k, v), tuple(named.values()))
    numbers, _ = _torch._seeded(q, numbers)
    by_columns = v.dim() == 4 and v.stride(-3) == 1 and v.stride(-1) != 1
    head_dim_v = v.shape[-1] * (1 if by_columns else form.elems_per_byte)
    more = [(name, x) for name, x in zip(named, rest) if x is not None]
    put = _Put(scales, form)
    if not _torch._want_gradients(*scales.of, named["sink"]):
        return _forward((q, k, v), head_dim_v, more, numbers, put)
    # Shapes of the values that Q, K and V stand for: gradients have these shapes.
    keys = (k.shape[-3] if v.dim() == 4 and by_columns else v.shape[-3], v.shape[-2], head_dim_v)
    shapes = [(*x.shape[:-1], x.shape[-1] * form.elems_per_byte) for x in (q, k)] + [(*v.shape[:-3], *keys)]
    for name, x, shape in zip("qkv", scales.of, shapes):
        if x is not None and (not isinstance(x, torch.Tensor) or tuple(x.shape) != shape or x.device != q.device):
            found = f"{tuple(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"block_scales: of {name} is {found}, not a tensor of {shape} on {q.device}")
    sink = dict(more).get("sink")
    more = [(name, x) for name, x in more if name != "sink"]
    return _Attention.apply(*scales.of, sink, (q, k, v), shapes, more, numbers, put)


def _forward(
    stored: Tuple[torch.Tensor, ...], head_dim_v: int, more: _lists.Named, numbers: Tuple[Any, ...], put: _Put
) -> Tuple[torch.Tensor, torch.Tensor]:
    o, lse = _torch._o_and_lse(stored[0], head_dim_v, numbers)
    if any(name in ("seqused_q", "cu_seqlens_q") for name, _ in more):
        o, lse = o.zero_(), lse.zero_()
    with torch.no_grad():
        _lists._run(numbers, [*zip("qkv", stored), ("o", o), ("lse", lse), *more], put, _ARE)
    return o, lse


class _Attention(torch.autograd.Function):
    """Gradients of the values go to the tensors that were converted: the rounding counts as the identity."""

    @staticmethod
    def forward(ctx, q, k, v, sink, stored, shapes, more, numbers, put):
        o, lse = _forward(stored, shapes[2][-1], [*more, ("sink", sink)] if sink is not None else more, numbers, put)
        ctx.save_for_backward(*stored, o, lse, sink, *put.scales, *(x for _, x in more))
        ctx.types = [x.dtype if isinstance(x, torch.Tensor) else None for x in (q, k, v)]
        ctx.shapes, ctx.names, ctx.numbers, ctx.put = shapes, [name for name, _ in more], numbers, put
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 9
        # Unpacking raises an error for tensors that were changed in place since the forward pass.
        q, k, v, o, lse, sink, _, _, _, *rest = ctx.saved_tensors
        dout = torch.zeros_like(o) if dout is None else _torch.last_is_dense(dout)
        dlse = None if dlse is None else dlse.contiguous()
        types = {x for x in ctx.types if x is not None}
        dtype = types.pop() if len(types) == 1 and types <= set(_torch._CAST) else torch.float32
        # Rows that lengths leave out have gradients of 0.
        made = [torch.zeros(shape, dtype=dtype, device=q.device) for shape in ctx.shapes]
        dsink = None if sink is None or not ctx.needs_input_grad[3] else torch.zeros_like(sink)
        named = [("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("sink", sink), *zip(ctx.names, rest)]
        named += [("dout", dout), ("dlse", dlse), *zip(("dq", "dk", "dv"), made), ("dsink", dsink)]
        with torch.no_grad():
            _lists._run(ctx.numbers, [(name, x) for name, x in named if x is not None], ctx.put, _ARE)
        # torch converts a gradient whose type is not its tensor's.
        wanted = [x if asked else None for x, asked in zip((*made, dsink), ctx.needs_input_grad)]
        return (*_torch.once(wanted, q=q, k=k, v=v, sink=sink, dout=dout, dlse=dlse), None, None, None, None, None)


_library = _native.library


class Quantize(ctypes.Structure):
    _fields_ = _native.fields(_library.fmha_py_describe_quantize(), "a conversion", ("stream", ctypes.c_int64))


_library.fmha_py_workspace_quantize.argtypes = [ctypes.POINTER(Quantize), ctypes.POINTER(ctypes.c_uint64)]
_library.fmha_py_run_quantize.argtypes = [ctypes.POINTER(Quantize), ctypes.c_void_p, ctypes.c_uint64]

_SCALE_ONE, _SCALE_GIVEN, _SCALE_WRITTEN = 0, 1, 2


def quantize(
    x: Any, name: str, axis: int, descale: Optional[torch.Tensor], by_columns: bool = False, field: str = "x"
) -> Tuple[Any, Any, torch.Tensor]:
    """Elements, scales by blocks along an axis, and the tensor's own scale, f32 ``[1]``: the library's conversion, on
    the tensor's device. ``by_columns``: rows lie one after another, and those of NVFP4 share bytes. ``field``: what an
    error calls the tensor."""
    form = known(name)
    _torch.refuse_tracers("quantize: conversions are")
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{field}: {type(x).__name__} is no tensor of torch's")
    if not x.is_floating_point():
        raise TypeError(f"{field}: {x.dtype} is no floating type")
    if x.dim() not in (3, 4):
        raise ValueError(f"{field} has {x.dim()} axes of shape {tuple(x.shape)}, not 3 or 4")
    paired = -3 if by_columns else -1
    if form.elems_per_byte == 2 and x.shape[paired] % 2:
        raise ValueError(f"{field}.shape[{paired}] {x.shape[paired]} is odd, and two elements of {name} share a byte")
    with torch.no_grad():
        x = _torch.resolved(x.detach())
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            # Numbers of more bits are rounded to f32 first; infinities stay infinite.
            x = x.to(torch.float32)
        four = x if x.dim() == 4 else x.unsqueeze(0)
        batch, seqlen, heads, dim = four.shape
        is_pair = form.elems_per_byte == 2

        def empty(shape: Tuple[int, ...], columns: bool) -> torch.Tensor:
            stored = torch.uint8 if is_pair else form.elements[0]
            if not columns:
                return torch.empty(shape, dtype=stored, device=x.device)
            batch, rows, heads, dim = shape
            return torch.empty((batch, heads, dim, rows), dtype=stored, device=x.device).permute(0, 3, 1, 2)

        each = form.elems_per_byte
        rows = (batch, -(-seqlen // each), heads, dim) if by_columns else (batch, seqlen, heads, -(-dim // each))
        elements = empty(rows, by_columns)
        if axis == -1:
            of_scales = (batch, seqlen, heads, -(-dim // form.block))
        else:
            of_scales = (batch, -(-seqlen // form.block), heads, dim)
        scales = torch.empty(of_scales, dtype=torch.uint8, device=x.device)
        call = Quantize()
        call.batch, call.seqlen, call.num_heads, call.dim = four.shape
        for what, tensor in (("x", four), ("elements", elements), ("scales", scales)):
            for place, axis_name in enumerate(("batch", "seqlen", "head", "dim")):
                # torch may give an axis of one element any stride.
                setattr(call, f"{what}_{axis_name}", tensor.stride(place))
            # torch gives no address of a tensor without elements, but the library refuses a null one.
            setattr(call, what, tensor.data_ptr() or 256)
        call.dtype, call.format = dtype_code(four.dtype), form.code
        call.blocks_of_rows, call.pairs_of_rows = axis != -1, by_columns
        if not is_pair:
            call.scale_of_tensor = _SCALE_ONE
            of_tensor = torch.ones(1, dtype=torch.float32, device=x.device)
        elif descale is not None:
            call.scale_of_tensor = _SCALE_GIVEN
            of_tensor = descale.to(device=x.device, dtype=torch.float32).reshape(1).contiguous()
            call.tensor_scale = of_tensor.data_ptr()
        else:
            call.scale_of_tensor = _SCALE_WRITTEN
            of_tensor = torch.empty(1, dtype=torch.float32, device=x.device)
            call.written_scale = of_tensor.data_ptr()
        _run(call, x.device, field)
        if x.dim() == 3:
            elements, scales = elements[0], scales[0]
        return elements, scales, of_tensor


def _run(call: Quantize, device: torch.device, field: str) -> None:
    """Queues a conversion on the device's current stream."""
    kind = {"cpu": 0, "cuda": 2 if torch.version.hip else 1}.get(device.type)
    if kind is None:
        raise ValueError(f"{field} is on {device}, neither the CPU nor a GPU")
    call.device_kind, call.device_index = kind, device.index or 0
    with torch.cuda.device(device) if kind else contextlib.nullcontext():
        call.stream = torch.cuda.current_stream(device).cuda_stream if kind else 0
        wanted = ctypes.c_uint64()
        _native.check(_library.fmha_py_workspace_quantize(ctypes.byref(call), ctypes.byref(wanted)))
        scratch, address = None, 0
        if wanted.value:
            scratch = torch.empty(wanted.value + 256, dtype=torch.uint8, device=device)
            address = -(-scratch.data_ptr() // 256) * 256
        _native.check(_library.fmha_py_run_quantize(ctypes.byref(call), address, wanted.value))
        del scratch
