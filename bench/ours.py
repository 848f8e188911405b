"""`fmha` as a peer of the comparison kit, through its C ABI (bindings/c/fmha.h): copied over the kit's own file.

The shared library is $FMHA_LIB (`cargo build --release -p fmha-c`: target/release/libfmha_c.so). Further words:
    OURS_TILE=block_m=128,stages=2   the tile, honoured or refused
    OURS_KERNEL=sm90                 the kernel, honoured or refused
    OURS_DETERMINISTIC=1             backward with the same bits every run
    OURS_BATCH_INVARIANT=1           a sequence has the same bits whatever is beside it
    OURS_ACCURACY=exact              the true running maximum is subtracted
    OURS_O=f32                       O in f32, where FP8's is bf16 else
    OURS_FALLBACK=1                  a kernel that is correct but slow may serve
The words of tile and kernel are those of the call that is timed: of backward, in its tables.
Of tensors without memory (torch's device "meta") `make` plans the calls and runs none: their kernels are then compiled.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from ctypes import (
    POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p, pointer, sizeof,
)

import torch

try:
    from peers import Unsupported, Workload, cu_seqlens, to_pages
except ImportError:  # outside the kit: its structs serve train.py
    Unsupported = RuntimeError

DTYPE = {torch.float16: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3, torch.float32: 6}


class FmhaTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        *((n, c_int64) for n in ("batch_stride", "seqlen_stride", "head_stride", "dim_stride")),
    ]


class FmhaGradients(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, FmhaTensor) for n in ("dout", "dq", "dk", "dv", "dbias")),
        *((n, c_void_p) for n in ("dlse", "dsink")),
        *((n, c_int32) for n in ("dtype_grad", "dtype_dbias")),
    ]


class FmhaCache(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_int64) for n in ("seqlen_new", "total_new", "max_pos")),
        *((n, FmhaTensor) for n in ("k_new", "v_new")),
        *((n, c_void_p) for n in ("cu_seqlens_new", "rotary_cos", "rotary_sin", "tree_mask")),
        *((n, c_int32) for n in ("rotary_dim", "rotary_interleaved", "dtype_rotary", "dtype_cache")),
        *((n, c_int32) for n in ("v_in_k", "reserved")),
    ]


class FmhaPart(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_int64) for n in ("position_q", "position_k", "seqlen_q", "seqlen_k", "batch", "head", "num_heads_q")),
    ]


class FmhaLists(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("topk", c_int64),
        ("indices", c_void_p),
        *((n, c_int64) for n in ("batch_stride", "seqlen_stride", "head_stride")),
        ("topk_length", c_void_p),
        *((n, c_int32) for n in ("length_per_token", "addresses", "block", "lse_without_sink")),
    ]


class FmhaCall(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_int64) for n in ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv")),
        *((n, c_int64) for n in ("head_dim_qk", "head_dim_v", "total_q", "total_k")),
        *((n, c_int64) for n in ("page_size", "num_pages", "max_pages")),
        *((n, FmhaTensor) for n in ("q", "k", "v", "o", "bias")),
        *((n, c_void_p) for n in ("lse", "keep_mask", "row_max", "head_max", "key_sum")),
        *((n, c_void_p) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
        *((n, c_void_p) for n in ("block_table", "alibi_slopes", "sink")),
        *((n, c_void_p) for n in ("descale_q", "descale_k", "descale_v", "scale_o")),
        ("mask", c_char_p),
        *((n, POINTER(c_float)) for n in ("softmax_scale", "softcap")),
        ("stream", c_void_p),
        ("gradients", POINTER(FmhaGradients)),
        ("cache", POINTER(FmhaCache)),
        ("part", POINTER(FmhaPart)),
        ("code", c_void_p),
        ("lists", POINTER(FmhaLists)),
        ("masks", c_void_p),
        ("block_scales", c_void_p),
        ("workspace", c_void_p),
        *((n, c_uint64) for n in ("workspace_bytes", "dropout_seed", "dropout_offset")),
        ("p_drop", c_float),
        *((n, c_int32) for n in ("dtype_qk", "dtype_v", "dtype_o", "dtype_bias")),
        *((n, c_int32) for n in ("v_layout", "alibi_per_batch", "descale_per_tensor")),
        *((n, c_int32) for n in ("dropout_seeded", "reserved")),
    ]


class FmhaOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_char_p) for n in ("backend", "kernel", "tile")),
        *((n, c_int32) for n in ("allow_fallback", "accuracy", "deterministic")),
        *((n, c_int32) for n in ("batch_invariant", "check_lengths", "caller_workspace")),
        *((n, c_int32) for n in ("row_invariant", "reserved")),
    ]


@functools.cache
def _library():
    path = os.environ.get("FMHA_LIB")
    if not path:
        raise Unsupported("FMHA_LIB is not set")
    lib = ctypes.CDLL(path)
    lib.fmha_plan.argtypes = [POINTER(FmhaCall), POINTER(FmhaOptions), POINTER(c_void_p)]
    lib.fmha_run.argtypes = [c_void_p, POINTER(FmhaCall)]
    lib.fmha_plan.restype = lib.fmha_run.restype = c_int
    lib.fmha_drop.argtypes, lib.fmha_drop.restype = [c_void_p], None
    lib.fmha_last_error.restype = c_char_p
    return lib


def _options(timed: bool, backward: bool, caller_workspace: bool = False) -> FmhaOptions:
    word = lambda name: os.environ.get(name, "").encode() or None
    options = FmhaOptions(struct_bytes=sizeof(FmhaOptions), allow_fallback=bool(word("OURS_FALLBACK")))
    options.caller_workspace = caller_workspace
    if timed:
        options.kernel, options.tile = word("OURS_KERNEL"), word("OURS_TILE")
    options.accuracy = {None: 0, b"fast": 0, b"exact": 1}[word("OURS_ACCURACY")]
    options.deterministic = backward and bool(word("OURS_DETERMINISTIC"))
    options.batch_invariant = timed and bool(word("OURS_BATCH_INVARIANT"))
    return options


def _address(x) -> int:
    return 1 << 20 if x.is_meta else x.data_ptr()


def _tensor(x) -> FmhaTensor:
    batch_stride = 0 if x.dim() == 3 else x.stride(0)
    return FmhaTensor(_address(x), batch_stride, x.stride(-3), x.stride(-2), x.stride(-1))


def _runner(call: FmhaCall, options: FmhaOptions):
    """Plans the call; returns a function that queues it once."""
    lib = _library()

    def check(status):
        if status:
            text = lib.fmha_last_error().decode()
            raise Unsupported(text) if "has no kernel for this problem" in text else RuntimeError(text)

    plan = c_void_p()
    check(lib.fmha_plan(byref(call), byref(options), byref(plan)))

    def run():
        check(lib.fmha_run(plan, byref(call)))

    weakref.finalize(run, lib.fmha_drop, plan)
    return run


def make(w: Workload, q, k, v, dout=None):
    """One call of our library: returns O, or (dQ, dK, dV) when dout is given."""
    _library()  # says so first if there is none
    held = {}  # device memory that only the call's pointers refer to

    def address(name, x):
        held[name] = x
        setattr(call, name, _address(x))

    fp8_o = torch.float32 if os.environ.get("OURS_O") == "f32" else torch.bfloat16
    dtype_o = fp8_o if w.dtype == "e4m3" else q.dtype
    o = torch.empty(*q.shape[:-1], w.head_dim_v, device=q.device, dtype=dtype_o)
    call = FmhaCall(
        struct_bytes=sizeof(FmhaCall),
        batch=len(w.segments), seqlen_q=w.seqlen_q, seqlen_k=w.seqlen_k,
        num_heads_q=w.num_heads_q, num_heads_kv=w.num_heads_kv, head_dim_qk=w.head_dim_qk, head_dim_v=w.head_dim_v,
        mask=w.mask.encode(), softmax_scale=pointer(c_float(w.softmax_scale)),
        dtype_qk=DTYPE[q.dtype], dtype_v=DTYPE[v.dtype], dtype_o=DTYPE[o.dtype],
        stream=None if q.is_meta else torch.cuda.current_stream().cuda_stream,
    )
    if w.page_size:
        k, v, table = to_pages(w, k, v)
        address("block_table", table)
        call.page_size, call.num_pages, call.max_pages = w.page_size, k.shape[0], table.shape[1]
    for name, x in dict(q=q, k=k, v=v, o=o).items():
        setattr(call, name, _tensor(x))
    if w.lengths:
        call.total_q, call.total_k = q.shape[0], k.shape[0]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            address(name, cu_seqlens(w, q.device))
    if w.dtype == "e4m3":
        for name in ("descale_q", "descale_k", "descale_v"):
            address(name, torch.ones(w.batch, w.num_heads_kv, device=q.device))

    if dout is not None:
        address("lse", torch.empty(q.shape[:-1].numel(), device=q.device))
    forward = _runner(call, _options(timed=dout is None, backward=False, caller_workspace=q.is_meta))

    def run():
        forward()
        return o

    run.held = held, q, k, v
    if dout is None:
        return run

    if not q.is_meta:
        run()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    gradients = FmhaGradients(struct_bytes=sizeof(FmhaGradients), dtype_grad=DTYPE[dq.dtype])
    for name, x in dict(dout=dout, dq=dq, dk=dk, dv=dv).items():
        setattr(gradients, name, _tensor(x))
    call.gradients = pointer(gradients)
    backward = _runner(call, _options(timed=True, backward=True, caller_workspace=q.is_meta))

    def run_backward():
        backward()
        return dq, dk, dv

    run_backward.held = run, dout, gradients  # `run` keeps O, which backward reads
    return run_backward
