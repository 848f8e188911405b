"""The loss that trains an indexer, with gradients: the library's, torch's operators where they may serve."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from . import _native, _torch

_NUMBERS = ("struct_bytes", "batch", "seqlen_q", "seqlen_k", "topk", "num_heads", "head_dim")
_READ = ("q", "k", "weights", "indices", "target", "dloss")
_WRITTEN = ("loss", "dq", "dk", "dweights")


class _Call(ctypes.Structure):
    """``FmhaIndexLoss`` of the C header, whose size the library checks."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in (*_READ, *_WRITTEN)),
        *((name, ctypes.c_int32) for name in ("dtype_q", "dtype_k", "deterministic", "allow_fallback")),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
    ]


_library = _native.library
_library.fmha_py_index_loss.argtypes = [ctypes.POINTER(_Call), ctypes.c_int, ctypes.c_int]
_library.fmha_py_workspace_index_loss.argtypes = [
    *_library.fmha_py_index_loss.argtypes,
    ctypes.POINTER(ctypes.c_uint64),
]

#: What the library's text has where a sound call has no kernel.
_NO_KERNEL = "has no kernel for this problem"

#: Most elements that torch's operators gather at once.
_GATHERED = 1 << 24

_TRAINED = (torch.float32, torch.float16, torch.bfloat16)


def _by_library(
    q: Any, k: Any, weights: Any, indices: Any, target: Any, dloss: Optional[torch.Tensor], wanted: Tuple[bool, ...]
) -> Tuple[Optional[torch.Tensor], ...]:
    """What is wanted of the loss and the gradients of q, k and weights, f32, on q's device."""
    batch, seqlen_q, heads, dim = q.shape
    call = _Call(ctypes.sizeof(_Call), batch, seqlen_q, k.shape[1], indices.shape[2], heads, dim)
    read = (q, k, weights, indices, target, dloss)
    alive = [None if x is None else _torch.resolved(x).contiguous() for x in read]
    # Kernels of GPUs load q and k by 16 bytes.
    if q.device.type == "cuda":
        alive[:2] = [x.clone() if x is not None and x.data_ptr() % 16 else x for x in alive[:2]]
    shapes = ((batch, seqlen_q), q.shape, k.shape, weights.shape)
    # The library writes f32, whatever torch's defaults are.
    there: Dict[str, Any] = dict(dtype=torch.float32, device=q.device)
    made = tuple(torch.zeros(shape, **there) if wants else None for shape, wants in zip(shapes, wanted))
    if not any(wanted):
        return made
    for name, x in zip((*_READ, *_WRITTEN), (*alive, *made)):
        # torch gives no address of a tensor without elements.
        setattr(call, name, None if x is None else x.data_ptr() or 256)
    call.dtype_q, call.dtype_k = (_native.DTYPES[str(x.dtype).rpartition(".")[2]] for x in (q, k))
    call.deterministic = torch.are_deterministic_algorithms_enabled()
    if q.device.type == "cpu":
        _run(call, q.device, 0)
        return made
    with torch.cuda.device(q.device):
        call.stream = torch.cuda.current_stream(q.device).cuda_stream
        _run(call, q.device, 2 if torch.version.hip else 1)
    return made


def _run(call: _Call, device: torch.device, kind: int) -> None:
    place = (kind, device.index or 0)
    wanted = ctypes.c_uint64()
    _native.check(_library.fmha_py_workspace_index_loss(ctypes.byref(call), *place, ctypes.byref(wanted)))
    scratch = None
    if wanted.value:
        scratch = torch.empty(wanted.value + 256, dtype=torch.uint8, device=device)
        call.workspace, call.workspace_bytes = -(-scratch.data_ptr() // 256) * 256, wanted.value
    _native.check(_library.fmha_py_index_loss(ctypes.byref(call), *place))
    del scratch


def _by_library_or_torch(q: Any, *rest: Any) -> Tuple[Optional[torch.Tensor], ...]:
    """As :func:`_by_library`, and by torch's operators what no kernel takes."""
    try:
        return _by_library(q, *rest)
    except _native.FmhaError as error:
        if _NO_KERNEL not in str(error):
            raise
    return _by_torch(q, *rest)


def _by_torch(
    q: Any, k: Any, weights: Any, indices: Any, target: Any, dloss: Optional[torch.Tensor], wanted: Tuple[bool, ...]
) -> Tuple[Optional[torch.Tensor], ...]:
    """As :func:`_by_library`, by torch's operators on any device, in f32, or f64 where q is; some queries at a time."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    (batch, seqlen_q, heads, dim), seqlen_k, topk = q.shape, k.shape[1], indices.shape[2]
    new = lambda *shape: torch.zeros(shape, dtype=dtype, device=q.device)
    loss, dq, dweights, dk = new(batch, seqlen_q), new(*q.shape), new(*weights.shape), new(batch * seqlen_k, dim)
    keys = k.to(dtype).flatten(0, 1)
    step = max(1, _GATHERED // max(1, topk * (dim + heads)))
    if seqlen_k and topk:
        for b in range(batch):
            for begin in range(0, seqlen_q, step):
                rows = slice(begin, begin + step)
                listed = (indices[b, rows] >= 0) & (indices[b, rows] < seqlen_k)
                entries = torch.where(listed, indices[b, rows], 0).long() + b * seqlen_k
                of_q, of_w = q[b, rows].to(dtype), weights[b, rows].to(dtype)
                # An absent entry is read as key 0, whose numbers must not count.
                of_k = torch.where(listed[..., None], keys[entries], 0)
                products = torch.einsum("ihd,ijd->ihj", of_q, of_k)
                products = torch.where(listed[:, None], products, 0)
                scores = torch.einsum("ihj,ih->ij", products.relu(), of_w).masked_fill(~listed, -torch.inf)
                p = torch.where(listed, target[b, rows].to(dtype), 0)
                total = p.sum(-1, keepdim=True)
                is_any = listed.any(-1, keepdim=True) & (total != 0)
                p = torch.where(is_any, p / torch.where(is_any, total, 1), 0)
                ln_q = scores.masked_fill(~is_any, 0).log_softmax(-1)
                ln_q = torch.where(listed & is_any, ln_q, 0)
                loss[b, rows] = torch.where(p > 0, p * (p.log() - ln_q), 0).sum(-1)
                d_scores = torch.where(listed & is_any, ln_q.exp() - p, 0)
                if dloss is not None:
                    d_scores = d_scores * dloss[b, rows].to(dtype)[:, None]
                if wanted[3]:
                    dweights[b, rows] = torch.einsum("ij,ihj->ih", d_scores, products.relu())
                d_products = torch.where(products > 0, d_scores[:, None] * of_w[..., None], 0)
                if wanted[1]:
                    dq[b, rows] = torch.einsum("ihj,ijd->ihd", d_products, of_k)
                if wanted[2]:
                    d_keys = torch.einsum("ihj,ihd->ijd", d_products, of_q)
                    d_keys = torch.where(listed[..., None], d_keys, 0)
                    dk.index_add_(0, entries.flatten(), d_keys.flatten(0, 1))
    made = (loss, dq, dk.view(batch, seqlen_k, dim), dweights)
    return tuple(x if wants else None for x, wants in zip(made, wanted))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, weights, indices, target, compute):
        ctx.save_for_backward(q, k, weights, indices, target)
        ctx.compute = compute
        return compute(q, k, weights, indices, target, None, (True, False, False, False))[0]

    @staticmethod
    def backward(ctx, dloss):
        q, k, weights, *lists = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        with torch.no_grad():
            _, *made = ctx.compute(q, k, weights, *lists, dloss, (False, *wants))
        cast = (None if x is None else x.to(of.dtype) for x, of in zip(made, (q, k, weights)))
        return (*_torch.once(tuple(cast), q=q, k=k, weights=weights, dloss=dloss), None, None, None)

    jvp = staticmethod(lambda ctx, *tangents: _torch._no_tangents())


def _held(name: str, x: Any, dtypes: Tuple[torch.dtype, ...], shape: Tuple[int, ...], device: torch.device) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {type(x).__name__} is no tensor of torch's")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but q is on {device}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} is of {x.dtype}, not {' or '.join(map(str, dtypes))}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {shape}")


def index_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    target: torch.Tensor,
    *,
    allow_fallback: bool = False,
) -> torch.Tensor:
    """What :func:`fmha.sparse.index_loss` says."""
    _torch.refuse_tracers("losses of an indexer are")
    for name, x, axes in (("q", q, 4), ("k", k, 3), ("indices", indices, 3)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {type(x).__name__} is no tensor of torch's")
        if x.dim() != axes:
            raise ValueError(f"{name} has {x.dim()} axes of shape {tuple(x.shape)}, not {axes}")
    batch, seqlen_q, heads, dim = q.shape
    is_wide = q.dtype == torch.float64
    floats = (torch.float64,) if is_wide else _TRAINED
    _held("q", q, (*_TRAINED, torch.float64), (batch, seqlen_q, heads, dim), q.device)
    _held("k", k, floats, (batch, k.shape[1], dim), q.device)
    _held("weights", weights, floats if is_wide else (torch.float32,), (batch, seqlen_q, heads), q.device)
    _held("indices", indices, (torch.int32,), (batch, seqlen_q, indices.shape[2]), q.device)
    _held("target", target, floats if is_wide else (torch.float32,), tuple(indices.shape), q.device)
    if target.requires_grad and torch.is_grad_enabled():
        raise ValueError("target requires a gradient, but is a constant of the loss: target.detach() is")
    if heads < 1 or dim < 1:
        raise ValueError(f"q has {heads} heads of {dim} elements, not 1 or more of both")
    compute: Callable[..., Tuple[Optional[torch.Tensor], ...]] = _by_library
    if q.device.type == "cuda" and allow_fallback:
        compute = _by_library_or_torch
    if is_wide or q.device.type not in ("cpu", "cuda"):
        if not allow_fallback:
            what = "float64" if is_wide else str(q.device)
            text = f"q is on {q.device}" if not is_wide else "q is of float64"
            raise NotImplementedError(
                f"{text}: no kernel computes an indexer's loss in {what}; allow_fallback=True takes torch's operators"
            )
        compute = _by_torch
    loss: torch.Tensor = _Loss.apply(q, k, weights, indices, target, compute)
    return loss


def index_target(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, indices: torch.Tensor, softmax_scale: Optional[float]
) -> torch.Tensor:
    """What :func:`fmha.sparse.index_target` says."""
    for name, x, axes in (("q", q, 4), ("k", k, 4), ("lse", lse, 3), ("indices", indices, 3)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {type(x).__name__} is no tensor of torch's")
        if x.dim() != axes:
            raise ValueError(f"{name} has {x.dim()} axes of shape {tuple(x.shape)}, not {axes}")
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_kv, _), topk = q.shape, k.shape, indices.shape[2]
    _held("k", k, (q.dtype,), (batch, seqlen_k, heads_kv, dim), q.device)
    _held("lse", lse, (torch.float32, torch.float64), (batch, heads, seqlen_q), q.device)
    _held("indices", indices, (torch.int32,), (batch, seqlen_q, topk), q.device)
    if heads_kv < 1 or heads % heads_kv:
        raise ValueError(f"num_heads_q {heads} is not a multiple of num_heads_kv {heads_kv}")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = dim**-0.5 if softmax_scale is None else float(softmax_scale)
    target = torch.zeros(indices.shape, dtype=dtype, device=q.device)
    if not seqlen_k or not topk:
        return target
    step = max(1, _GATHERED // max(1, topk * (heads_kv * dim + heads)))
    with torch.no_grad():
        for b in range(batch):
            for begin in range(0, seqlen_q, step):
                rows = slice(begin, begin + step)
                listed = (indices[b, rows] >= 0) & (indices[b, rows] < seqlen_k)
                keys = k[b][torch.where(listed, indices[b, rows], 0).long()].to(dtype)
                grouped = q[b, rows].to(dtype).unflatten(1, (heads_kv, -1))
                scores = torch.einsum("ighd,ijgd->ighj", grouped, keys).flatten(1, 2) * scale
                of_rows = lse[b, :, rows].T.to(dtype)[..., None]
                # A row that sees no key has probabilities of 0.
                p = torch.where(torch.isneginf(of_rows), 0, (scores - of_rows).exp()).sum(1)
                target[b, rows] = torch.where(listed, p, 0)
    return target
