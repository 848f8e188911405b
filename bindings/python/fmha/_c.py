"""The structs of ``fmha.h`` that calls over ranks are made of, as ctypes has them; a test holds them to the header."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from . import _native


class FmhaStrides(Structure):
    _fields_ = [
        ("batch_stride", c_int64),
        ("seqlen_stride", c_int64),
        ("head_stride", c_int64),
        ("dim_stride", c_int64),
    ]


class FmhaGradients(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("dout", FmhaStrides),
        ("dq", FmhaStrides),
        ("dk", FmhaStrides),
        ("dv", FmhaStrides),
        ("dbias", FmhaStrides),
        ("dtype_grad", c_int32),
        ("dtype_dbias", c_int32),
        ("write_dbias", c_int32),
        ("write_dsink", c_int32),
        ("has_dlse", c_int32),
        ("reserved", c_int32),
    ]


class FmhaProblem(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("batch", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_k", c_int64),
        ("num_heads_q", c_int64),
        ("num_heads_kv", c_int64),
        ("head_dim_qk", c_int64),
        ("head_dim_v", c_int64),
        ("page_size", c_int64),
        ("q", FmhaStrides),
        ("k", FmhaStrides),
        ("v", FmhaStrides),
        ("o", FmhaStrides),
        ("bias", FmhaStrides),
        ("mask", c_char_p),
        ("softmax_scale", ctypes.POINTER(c_float)),
        ("softcap", ctypes.POINTER(c_float)),
        ("gradients", ctypes.POINTER(FmhaGradients)),
        ("cache", c_void_p),
        ("part", c_void_p),
        ("code", c_void_p),
        ("lists", c_void_p),
        ("masks", c_void_p),
        ("block_scales", c_void_p),
        ("second", c_void_p),
        ("p_drop", c_float),
        ("dtype_qk", c_int32),
        ("dtype_v", c_int32),
        ("dtype_o", c_int32),
        ("dtype_bias", c_int32),
        ("v_layout", c_int32),
        ("bias_kind", c_int32),
        ("packed_q", c_int32),
        ("packed_k", c_int32),
        ("seqused_q", c_int32),
        ("seqused_k", c_int32),
        ("sink", c_int32),
        ("descale_q", c_int32),
        ("descale_k", c_int32),
        ("descale_v", c_int32),
        ("scale_o", c_int32),
        ("write_lse", c_int32),
        ("write_keep_mask", c_int32),
        ("row_max", c_int32),
        ("head_max", c_int32),
        ("key_sum", c_int32),
        ("reserved", c_int32),
    ]


class FmhaArgs(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("stream", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("o", c_void_p),
        ("bias", c_void_p),
        ("lse", c_void_p),
        ("keep_mask", c_void_p),
        ("row_max", c_void_p),
        ("head_max", c_void_p),
        ("key_sum", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("seqused_q", c_void_p),
        ("seqused_k", c_void_p),
        ("block_table", c_void_p),
        ("alibi_slopes", c_void_p),
        ("sink", c_void_p),
        ("descale_q", c_void_p),
        ("descale_k", c_void_p),
        ("descale_v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("scale_o", c_void_p),
        ("dout", c_void_p),
        ("dq", c_void_p),
        ("dk", c_void_p),
        ("dv", c_void_p),
        ("dbias", c_void_p),
        ("dlse", c_void_p),
        ("dsink", c_void_p),
        ("k_new", c_void_p),
        ("v_new", c_void_p),
        ("cu_seqlens_new", c_void_p),
        ("rotary_cos", c_void_p),
        ("rotary_sin", c_void_p),
        ("tree_mask", c_void_p),
        ("indices", c_void_p),
        ("topk_length", c_void_p),
        ("intervals", c_void_p),
        ("mask_bits", c_void_p),
        ("kv_num_blocks", c_void_p),
        ("kv_indices", c_void_p),
        ("full_kv_num_blocks", c_void_p),
        ("full_kv_indices", c_void_p),
        ("built", c_void_p),
        ("block_scale_q", c_void_p),
        ("block_scale_k", c_void_p),
        ("block_scale_v", c_void_p),
        ("second", c_void_p),
        ("captured", c_void_p),
        ("total_q", c_int64),
        ("total_k", c_int64),
        ("total_new", c_int64),
        ("num_pages", c_int64),
        ("max_pages", c_int64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("dropout_seed", c_uint64),
        ("dropout_offset", c_uint64),
        ("dropout_seeded", c_int32),
        ("reserved", c_int32),
    ]


class FmhaMasks(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("intervals", FmhaStrides),
        ("mask_bits", FmhaStrides),
        ("kv_num_blocks", FmhaStrides),
        ("kv_indices", FmhaStrides),
        ("full_kv_num_blocks", FmhaStrides),
        ("full_kv_indices", FmhaStrides),
        ("endpoints", c_int64),
        ("intervals_heads", c_int64),
        ("mask_bits_heads", c_int64),
        ("lists_heads", c_int64),
        ("block_q", c_int64),
        ("block_k", c_int64),
        ("max_blocks", c_int64),
        ("full_max_blocks", c_int64),
        ("partial", c_int32),
        ("full", c_int32),
    ]


class FmhaCaptured(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("shape", c_int64 * _native.MAX_DIMS),
        ("strides", c_int64 * _native.MAX_DIMS),
        ("num_dims", c_int32),
        ("dtype_grad", c_int32),
        ("write_grad", c_int32),
        ("reserved", c_int32),
    ]


class FmhaCode(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("score", c_char_p),
        ("mask", c_char_p),
        ("captured", ctypes.POINTER(FmhaCaptured)),
        ("num_captured", c_int64),
    ]


class FmhaCapturedArgs(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("grad", c_void_p),
        ("integer", c_int64),
        ("real", c_float),
        ("reserved", c_int32),
    ]


class FmhaOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("kernel", c_char_p),
        ("tile", c_char_p),
        ("allow_fallback", c_int32),
        ("accuracy", c_int32),
        ("deterministic", c_int32),
        ("batch_invariant", c_int32),
        ("check_lengths", c_int32),
        ("caller_workspace", c_int32),
        ("row_invariant", c_int32),
        ("reserved", c_int32),
    ]


class FmhaJoin(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("rank", c_int64),
        ("size", c_int64),
        ("address", c_char_p),
        ("timeout_seconds", c_double),
        ("nccl_comm", c_void_p),
        ("nccl_library", c_char_p),
        ("secret", c_char_p),
        ("listen", c_char_p),
        ("space", c_int32),
        ("reserved", c_int32),
    ]


class FmhaRun(Structure):
    _fields_ = [
        ("rank", c_int64),
        ("begin", c_int64),
        ("end", c_int64),
    ]


class FmhaRanks(Structure):
    _fields_ = [
        ("struct_bytes", c_uint64),
        ("own_rows_q", c_int64),
        ("own_rows_k", c_int64),
        ("runs_q", ctypes.POINTER(FmhaRun)),
        ("num_runs_q", c_int64),
        ("runs_k", ctypes.POINTER(FmhaRun)),
        ("num_runs_k", c_int64),
        ("cu_seqlens_q", ctypes.POINTER(c_int32)),
        ("cu_seqlens_k", ctypes.POINTER(c_int32)),
        ("scheme", c_char_p),
        ("links", c_char_p),
        ("partition_q", c_int32),
        ("partition_k", c_int32),
    ]


def new(struct: Any) -> Any:
    """A struct with its own size and nothing else."""
    return struct(struct_bytes=ctypes.sizeof(struct))


library = _native.library
library.fmha_last_error.restype = c_char_p
library.fmha_dist_plan_text.restype = c_char_p
library.fmha_dist_plan_text.argtypes = [c_void_p]
library.fmha_dist_join.argtypes = [ctypes.POINTER(FmhaJoin), ctypes.POINTER(c_void_p)]
library.fmha_dist_leave.argtypes = [c_void_p]
library.fmha_dist_leave.restype = None
library.fmha_dist_fail.argtypes = [c_void_p, c_char_p, c_char_p]
library.fmha_dist_fail.restype = None
library.fmha_dist_rows.argtypes = [
    c_int32,
    c_int64,
    c_int64,
    c_int64,
    ctypes.POINTER(FmhaRun),
    ctypes.POINTER(c_int64),
]
library.fmha_dist_plan.argtypes = [
    c_char_p,
    ctypes.POINTER(FmhaProblem),
    ctypes.POINTER(FmhaRanks),
    ctypes.POINTER(FmhaOptions),
    c_void_p,
    ctypes.POINTER(c_void_p),
]
library.fmha_dist_run.argtypes = [c_void_p, ctypes.POINTER(FmhaArgs)]
library.fmha_dist_drop.argtypes = [c_void_p]
library.fmha_dist_drop.restype = None


def check(code: int) -> None:
    """Raises what the C library said."""
    if code:
        raise _native.FmhaError(library.fmha_last_error().decode("utf-8", "replace"))
