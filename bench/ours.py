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


class FmhaStrides(Structure):
    _fields_ = [
        *((n, c_int64) for n in ("batch_stride", "seqlen_stride", "head_stride", "dim_stride")),
    ]


class FmhaGradients(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, FmhaStrides) for n in ("dout", "dq", "dk", "dv", "dbias")),
        *((n, c_int32) for n in ("dtype_grad", "dtype_dbias", "write_dbias", "write_dsink", "has_dlse")),
        ("reserved", c_int32),
    ]


class FmhaCache(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_int64) for n in ("seqlen_new", "max_pos")),
        *((n, FmhaStrides) for n in ("k_new", "v_new", "k_scale", "v_scale")),
        ("scale_block", c_int64),
        *((n, c_int32) for n in ("packed_new", "tree_mask", "rotary_dim", "rotary_interleaved")),
        *((n, c_int32) for n in ("dtype_rotary", "dtype_cache", "v_in_k", "cache_rows")),
    ]


class FmhaPart(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_int64) for n in ("position_q", "position_k", "seqlen_q", "seqlen_k", "batch", "head")),
        ("num_heads_q", c_int64),
    ]


class FmhaLists(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_int64) for n in ("topk", "batch_stride", "seqlen_stride", "head_stride")),
        *((n, c_int32) for n in ("length", "addresses", "block", "lse_without_sink")),
    ]


class FmhaProblem(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_int64) for n in ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv")),
        *((n, c_int64) for n in ("head_dim_qk", "head_dim_v", "page_size")),
        *((n, FmhaStrides) for n in ("q", "k", "v", "o", "bias")),
        ("mask", c_char_p),
        *((n, POINTER(c_float)) for n in ("softmax_scale", "softcap")),
        ("gradients", POINTER(FmhaGradients)),
        ("cache", POINTER(FmhaCache)),
        ("part", POINTER(FmhaPart)),
        ("code", c_void_p),
        ("lists", POINTER(FmhaLists)),
        *((n, c_void_p) for n in ("masks", "block_scales", "second")),
        ("p_drop", c_float),
        *((n, c_int32) for n in ("dtype_qk", "dtype_v", "dtype_o", "dtype_bias", "v_layout", "bias_kind")),
        *((n, c_int32) for n in ("packed_q", "packed_k", "seqused_q", "seqused_k", "sink", "descale_q")),
        *((n, c_int32) for n in ("descale_k", "descale_v", "scale_o", "write_lse", "write_keep_mask")),
        *((n, c_int32) for n in ("row_max", "head_max", "key_sum", "reserved")),
    ]


class FmhaArgs(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_void_p) for n in ("stream", "q", "k", "v", "o", "bias", "lse", "keep_mask", "row_max")),
        *((n, c_void_p) for n in ("head_max", "key_sum", "cu_seqlens_q", "cu_seqlens_k", "seqused_q")),
        *((n, c_void_p) for n in ("seqused_k", "block_table", "alibi_slopes", "sink", "descale_q")),
        *((n, c_void_p) for n in ("descale_k", "descale_v", "k_scale", "v_scale", "scale_o", "dout")),
        *((n, c_void_p) for n in ("dq", "dk", "dv", "dbias")),
        *((n, c_void_p) for n in ("dlse", "dsink", "k_new", "v_new", "cu_seqlens_new", "rotary_cos")),
        *((n, c_void_p) for n in ("rotary_sin", "tree_mask", "indices", "topk_length", "intervals")),
        *((n, c_void_p) for n in ("mask_bits", "kv_num_blocks", "kv_indices", "full_kv_num_blocks")),
        *((n, c_void_p) for n in ("full_kv_indices", "built", "block_scale_q", "block_scale_k")),
        *((n, c_void_p) for n in ("block_scale_v", "second", "captured")),
        *((n, c_int64) for n in ("total_q", "total_k", "total_new", "num_pages", "max_pages")),
        ("workspace", c_void_p),
        *((n, c_uint64) for n in ("workspace_bytes", "dropout_seed", "dropout_offset")),
        *((n, c_int32) for n in ("dropout_seeded", "reserved")),
    ]


class FmhaOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        *((n, c_char_p) for n in ("kernel", "tile")),
        *((n, c_int32) for n in ("allow_fallback", "accuracy", "deterministic", "batch_invariant")),
        *((n, c_int32) for n in ("check_lengths", "caller_workspace", "row_invariant", "reserved")),
    ]


@functools.cache
def _library():
    path = os.environ.get("FMHA_LIB")
    if not path:
        raise Unsupported("FMHA_LIB is not set")
    lib = ctypes.CDLL(path)
    lib.fmha_plan.argtypes = [c_char_p, POINTER(FmhaProblem), POINTER(FmhaOptions), POINTER(c_void_p)]
    lib.fmha_run.argtypes = [c_void_p, POINTER(FmhaArgs)]
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


def _strides(x) -> FmhaStrides:
    batch_stride = 0 if x.dim() == 3 else x.stride(0)
    return FmhaStrides(batch_stride, x.stride(-3), x.stride(-2), x.stride(-1))


class Call:
    """A problem, and the arguments of its runs."""

    device = None  # as fmha_plan names it

    def __init__(self, stream=None, **numbers):
        self.problem = FmhaProblem(struct_bytes=sizeof(FmhaProblem), **numbers)
        self.args = FmhaArgs(struct_bytes=sizeof(FmhaArgs), stream=stream)

    def tensors(self, of=None, **tensors):
        """Puts strides into the problem, or into `of`, and addresses into the arguments."""
        for name, x in tensors.items():
            setattr(of or self.problem, name, _strides(x))
            setattr(self.args, name, _address(x))

    def backward(self, dtype_grad, **tensors):
        """The call that computes gradients of this one: dout, dq, dk and dv."""
        made = Call.__new__(Call)
        made.device = self.device
        made.problem, made.args = (type(x).from_buffer_copy(x) for x in (self.problem, self.args))
        made.gradients = FmhaGradients(struct_bytes=sizeof(FmhaGradients), dtype_grad=dtype_grad)
        made.tensors(made.gradients, **tensors)
        made.problem.gradients = pointer(made.gradients)
        made.forward = self  # whose memory the copies point to
        return made


def _runner(call: Call, options: FmhaOptions):
    """Plans the call; returns a function that queues it once."""
    lib = _library()

    def check(status):
        if status:
            text = lib.fmha_last_error().decode()
            raise Unsupported(text) if "has no kernel for this problem" in text else RuntimeError(text)

    plan = c_void_p()
    check(lib.fmha_plan(call.device, byref(call.problem), byref(options), byref(plan)))

    def run():
        check(lib.fmha_run(plan, byref(call.args)))

    weakref.finalize(run, lib.fmha_drop, plan)
    return run


def make(w: Workload, q, k, v, dout=None):
    """One call of our library: returns O, or (dQ, dK, dV) when dout is given."""
    _library()  # says so first if there is none
    held = {}  # device memory that only the call's pointers refer to

    def address(name, x):
        held[name] = x
        setattr(call.args, name, _address(x))

    fp8_o = torch.float32 if os.environ.get("OURS_O") == "f32" else torch.bfloat16
    dtype_o = fp8_o if w.dtype == "e4m3" else q.dtype
    o = torch.empty(*q.shape[:-1], w.head_dim_v, device=q.device, dtype=dtype_o)
    call = Call(
        batch=len(w.segments), seqlen_q=w.seqlen_q, seqlen_k=w.seqlen_k,
        num_heads_q=w.num_heads_q, num_heads_kv=w.num_heads_kv, head_dim_qk=w.head_dim_qk, head_dim_v=w.head_dim_v,
        mask=w.mask.encode(), softmax_scale=pointer(c_float(w.softmax_scale)),
        dtype_qk=DTYPE[q.dtype], dtype_v=DTYPE[v.dtype], dtype_o=DTYPE[o.dtype],
        stream=None if q.is_meta else torch.cuda.current_stream().cuda_stream,
    )
    if w.page_size:
        k, v, table = to_pages(w, k, v)
        address("block_table", table)
        call.problem.page_size, call.args.num_pages, call.args.max_pages = w.page_size, k.shape[0], table.shape[1]
    call.tensors(q=q, k=k, v=v, o=o)
    if w.lengths:
        call.problem.packed_q = call.problem.packed_k = 1
        call.args.total_q, call.args.total_k = q.shape[0], k.shape[0]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            address(name, cu_seqlens(w, q.device))
    if w.dtype == "e4m3":
        for name in ("descale_q", "descale_k", "descale_v"):
            address(name, torch.ones(w.batch, w.num_heads_kv, device=q.device))
            setattr(call.problem, name, 1)

    if dout is not None:
        call.problem.write_lse = 1
        address("lse", torch.empty(q.shape[:-1].numel(), device=q.device))
    forward = _runner(call, _options(timed=dout is None, backward=False, caller_workspace=q.is_meta))

    def run():
        forward()
        return o

    run.held = call, held, q, k, v
    if dout is None:
        return run

    if not q.is_meta:
        run()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    back = call.backward(DTYPE[dq.dtype], dout=dout, dq=dq, dk=dk, dv=dv)
    backward = _runner(back, _options(timed=True, backward=True, caller_workspace=q.is_meta))

    def run_backward():
        backward()
        return dq, dk, dv

    run_backward.held = run, dout  # `run` keeps O, which backward reads
    return run_backward
