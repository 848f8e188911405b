"""The structs of ``fmha.h`` that calls over ranks are made of, as ctypes has them; a test holds them to the header."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any, List, Tuple

from . import _native


def _of(kind: Any, names: str) -> List[Tuple[str, Any]]:
    """Fields of one type that stand side by side."""
    return [(name, kind) for name in names.split()]


class FmhaStrides(Structure):
    _fields_ = [
        *_of(c_int64, "batch_stride seqlen_stride head_stride dim_stride"),
    ]


class FmhaGradients(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(FmhaStrides, "dout dq dk dv dbias"),
        *_of(c_int32, "dtype_grad dtype_dbias write_dbias write_dsink has_dlse reserved"),
    ]


class FmhaProblem(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(c_int64, "batch seqlen_q seqlen_k num_heads_q num_heads_kv head_dim_qk head_dim_v page_size"),
        *_of(FmhaStrides, "q k v o bias"),
        *_of(c_char_p, "mask"),
        *_of(POINTER(c_float), "softmax_scale softcap"),
        *_of(POINTER(FmhaGradients), "gradients"),
        *_of(c_void_p, "cache part code lists masks block_scales second"),
        *_of(c_float, "p_drop"),
        *_of(c_int32, "dtype_qk dtype_v dtype_o dtype_bias v_layout bias_kind packed_q packed_k seqused_q"),
        *_of(c_int32, "seqused_k sink descale_q descale_k descale_v scale_o write_lse write_keep_mask"),
        *_of(c_int32, "row_max head_max key_sum reserved"),
    ]


class FmhaArgs(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(c_void_p, "stream q k v o bias lse keep_mask row_max head_max key_sum cu_seqlens_q"),
        *_of(c_void_p, "cu_seqlens_k seqused_q seqused_k block_table alibi_slopes sink descale_q descale_k"),
        *_of(c_void_p, "descale_v k_scale v_scale scale_o dout dq dk dv dbias dlse dsink k_new v_new"),
        *_of(c_void_p, "cu_seqlens_new rotary_cos rotary_sin tree_mask indices topk_length intervals"),
        *_of(c_void_p, "mask_bits kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices built"),
        *_of(c_void_p, "block_scale_q block_scale_k block_scale_v second captured"),
        *_of(c_int64, "total_q total_k total_new num_pages max_pages"),
        *_of(c_void_p, "workspace"),
        *_of(c_uint64, "workspace_bytes dropout_seed dropout_offset"),
        *_of(c_int32, "dropout_seeded reserved"),
    ]


class FmhaMasks(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(FmhaStrides, "intervals mask_bits kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices"),
        *_of(c_int64, "endpoints intervals_heads mask_bits_heads lists_heads block_q block_k max_blocks"),
        *_of(c_int64, "full_max_blocks"),
        *_of(c_int32, "partial full"),
    ]


class FmhaCaptured(Structure):
    _fields_ = [
        *_of(c_char_p, "name"),
        *_of(c_int64 * _native.MAX_DIMS, "shape strides"),
        *_of(c_int32, "num_dims dtype_grad write_grad reserved"),
    ]


class FmhaCode(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(c_char_p, "score mask"),
        *_of(POINTER(FmhaCaptured), "captured"),
        *_of(c_int64, "num_captured"),
    ]


class FmhaCapturedArgs(Structure):
    _fields_ = [
        *_of(c_void_p, "data grad"),
        *_of(c_int64, "integer"),
        *_of(c_float, "real"),
        *_of(c_int32, "reserved"),
    ]


class FmhaOptions(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(c_char_p, "kernel tile"),
        *_of(c_int32, "allow_fallback accuracy deterministic batch_invariant check_lengths caller_workspace"),
        *_of(c_int32, "row_invariant reserved"),
    ]


class FmhaJoin(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(c_int64, "rank size"),
        *_of(c_char_p, "address"),
        *_of(c_double, "timeout_seconds"),
        *_of(c_void_p, "nccl_comm"),
        *_of(c_char_p, "nccl_library secret listen"),
        *_of(c_int32, "space reserved"),
    ]


class FmhaRun(Structure):
    _fields_ = [
        *_of(c_int64, "rank begin end"),
    ]


class FmhaRanks(Structure):
    _fields_ = [
        *_of(c_uint64, "struct_bytes"),
        *_of(c_int64, "own_rows_q own_rows_k"),
        *_of(POINTER(FmhaRun), "runs_q"),
        *_of(c_int64, "num_runs_q"),
        *_of(POINTER(FmhaRun), "runs_k"),
        *_of(c_int64, "num_runs_k"),
        *_of(POINTER(c_int32), "cu_seqlens_q cu_seqlens_k"),
        *_of(c_char_p, "scheme links"),
        *_of(c_int32, "partition_q partition_k"),
    ]


def new(struct: Any) -> Any:
    """A struct with its own size and nothing else."""
    return struct(struct_bytes=ctypes.sizeof(struct))


library = _native.library
library.fmha_last_error.restype = c_char_p
library.fmha_dist_plan_text.restype = c_char_p
library.fmha_dist_plan_text.argtypes = [c_void_p]
library.fmha_dist_join.argtypes = [POINTER(FmhaJoin), POINTER(c_void_p)]
library.fmha_dist_leave.argtypes = [c_void_p]
library.fmha_dist_leave.restype = None
library.fmha_dist_fail.argtypes = [c_void_p, c_char_p, c_char_p]
library.fmha_dist_fail.restype = None
library.fmha_dist_rows.argtypes = [
    c_int32,
    c_int64,
    c_int64,
    c_int64,
    POINTER(FmhaRun),
    POINTER(c_int64),
]
library.fmha_dist_plan.argtypes = [
    c_char_p,
    POINTER(FmhaProblem),
    POINTER(FmhaRanks),
    POINTER(FmhaOptions),
    c_void_p,
    POINTER(c_void_p),
]
library.fmha_dist_run.argtypes = [c_void_p, POINTER(FmhaArgs)]
library.fmha_dist_drop.argtypes = [c_void_p]
library.fmha_dist_drop.restype = None


def check(code: int) -> None:
    """Raises what the C library said."""
    if code:
        raise _native.FmhaError(library.fmha_last_error().decode("utf-8", "replace"))
