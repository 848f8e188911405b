"""Launches rendered and compiled sm90 forward kernels on torch tensors, through libcuda alone.

What it binds is what any host has to bind: see the crate's README.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch

from structs import Structs

cuda = ctypes.CDLL("libcuda.so.1")
DEFAULT_GROUP = 32 << 20
UNBOUNDED_LO, UNBOUNDED_HI = -(2**31), 2**31 - 1


class Attribute(ctypes.Structure):
    """CUlaunchAttribute; 6 is programmatic stream serialisation."""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("shape", c_uint * 7), ("stream", c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("number", c_uint)]


def check(status, call):
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, byref(text))
        raise RuntimeError(f"{call}: {status} {text.value}")


def tensor_map(x, dims, strides, box):
    """A tiled map; `strides` in elements, from dimension 1."""
    out = (ctypes.c_char * 256)()
    address = (ctypes.addressof(out) + 127) // 128 * 128
    n = len(dims)
    swizzle = {128: 3, 64: 2, 32: 1}[box[0] * x.element_size()]
    kind = {torch.float16: 6, torch.bfloat16: 9}.get(x.dtype, 0)  # 0: bytes, as FP8 is loaded
    status = cuda.cuTensorMapEncodeTiled(
        c_void_p(address), c_int(kind), c_uint32(n), c_void_p(x.data_ptr()), (c_uint64 * n)(*dims),
        (c_uint64 * (n - 1))(*(s * x.element_size() for s in strides)), (c_uint32 * n)(*box),
        (c_uint32 * n)(*[1] * n), c_int(0), c_int(swizzle), c_int(1), c_int(0),
    )  # fmt: skip
    check(status, f"cuTensorMapEncodeTiled dims {dims} strides {strides} box {box}")
    return ctypes.string_at(address, 128)


def heads_per_l2_group(num_heads, kv_bytes, sharing, group_bytes):
    fitting = max(1, min(max(min(group_bytes // max(kv_bytes, 1), 32), 1) * sharing, num_heads))
    for heads in range(fitting, fitting // 2, -1):
        if num_heads % heads == 0 and heads % sharing == 0:
            return heads
    groups = -(-num_heads // fitting)
    even = -(-num_heads // groups)
    return -(-even // sharing) * sharing


class Kernel:
    def __init__(self, folder):
        folder = Path(folder)
        self.meta = dict(line.split("=") for line in (folder / "meta.txt").read_text().split())
        self.name = folder.name
        self.structs = Structs(*((folder / "fmha" / h).read_text() for h in ("params.h", "tile_schedule.h")))
        torch.cuda.current_stream()
        torch.zeros(1, device="cuda")
        image = (folder / "kernel.cubin").read_bytes()
        module, self.function = c_void_p(), c_void_p()
        check(cuda.cuModuleLoadData(byref(module), image), "cuModuleLoadData")
        check(cuda.cuModuleGetFunction(byref(self.function), module, b"fmha_kernel"), "cuModuleGetFunction")
        self.smem, self.threads = int(self.meta["smem"]), int(self.meta["threads"])
        check(cuda.cuFuncSetAttribute(self.function, c_int(8), c_int(self.smem)), "cuFuncSetAttribute")

    def prepare(
        self, q, k, v, *, mask=(UNBOUNDED_LO, UNBOUNDED_HI, 0, 0), scale=None, cu_q=None, cu_k=None, max_q=None,
        max_k=None, used_q=None, used_k=None, dtype_o=None, softcap=0.0, sink=None, group_bytes=DEFAULT_GROUP,
        lse=True, alibi=None, o=None, bias=None, p_drop=0.0,
    ):  # fmt: skip
        """(callable, o, lse): q, k, v are [batch, seqlen, heads, dim], or [total, heads, dim] with cu_q, cu_k."""
        m = self.meta
        group = cu_q is not None
        batch = len(cu_q) - 1 if group else q.shape[0]
        hq, hkv = q.shape[-2], k.shape[-2]
        dqk, dv = q.shape[-1], v.shape[-1]
        ratio = hq // hkv
        seqlen_q, seqlen_k = (max_q, max_k) if group else (q.shape[1], k.shape[1])
        if o is None:
            o = torch.full((*q.shape[:-1], dv), float("nan"), dtype=dtype_o or (q.dtype if q.element_size() > 1 else torch.bfloat16), device=q.device)
        rows_q = q.shape[0] if group else seqlen_q
        lse_shape = (hq, rows_q) if group else (batch, hq, seqlen_q)
        lse_out = torch.full(lse_shape, float("nan"), device=q.device) if lse else None
        scale = dqk**-0.5 if scale is None else scale
        block_m, q_rows, block_n, pack = int(m["block_m"]), int(m["q_rows"]), int(m["block_n"]), m["pack_gqa"] == "1"
        cluster = int(m.get("cluster", 1))

        def strides(x):
            return (0 if group else x.stride(0), x.stride(-3), x.stride(-2))

        def view(x, strides, dim=1):
            return (x, *strides, dim)

        # Kernels with a dynamic order count their tiles here, from 0 in each launch.
        claims = m["order"] == "Dynamic"
        workspace = torch.zeros(1, dtype=torch.int32, device=q.device)
        bias_strides = (0, 0, 0) if bias is None else (bias.stride(0), bias.stride(2), bias.stride(1))
        params = self.structs.pack("FwdParams", dict(
            q=view(q, strides(q)), k=view(k, strides(k)), v=view(v, strides(v)), o=view(o, strides(o)),
            bias=view(bias, bias_strides), lse=lse_out, lse_batch=0 if group else hq * seqlen_q, lse_head=rows_q,
            cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k, alibi_slopes=(alibi, 0, 1),
            sink=(sink, 0, 1), workspace=workspace, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=rows_q,
            total_k=k.shape[0] if group else seqlen_k, page_size=1, num_heads_q=hq, num_heads_kv=hkv, gqa_ratio=ratio,
            mask=mask, alibi_bottom_right=1, softmax_scale=scale, softcap=softcap,
            dropout_threshold=min(int((1 - p_drop) * 2**32), 2**32 - 1), dropout_scale=1 / (1 - p_drop),
            dropout_key_low=1, dropout_key_high=2, dropout_offset=3,
        ))  # fmt: skip

        box_qk, box_v = int(m["box_qk"]), int(m["box_v"])
        storage_batch = 1 if group else batch
        qs, ks, vs = strides(q), strides(k), strides(v)
        far = 1 << 20  # the stride of an axis of one: any that the driver takes
        q_map = tensor_map(
            q, (dqk, ratio, rows_q, hkv, storage_batch),
            (qs[2], qs[1], qs[2] * ratio, far if storage_batch == 1 else qs[0]),
            (box_qk, ratio if pack else 1, q_rows // ratio if pack else q_rows, 1, 1),
        )  # fmt: skip

        def kv_map(x, s, dim, box):
            rows = x.shape[0] if group else x.shape[1]
            if rows == 0:  # never read; the map needs an address
                x, rows = q, 1
            return tensor_map(x, (dim, rows, hkv, storage_batch), (s[1], s[2], far if storage_batch == 1 else s[0]), (box, block_n // cluster, 1, 1))

        def bias_map():
            if m.get("bias_stages", "0") == "0":
                return bytes(128)
            # One head or batch where they share it, as the kernel counts them.
            heads, batches = ((n, s) if s else (1, far) for n, s in ((bias.shape[1], bias.stride(1)), (bias.shape[0], bias.stride(0))))
            dims = (bias.shape[3], bias.shape[2], heads[0], batches[0])
            return tensor_map(bias, dims, (bias.stride(2), heads[1], batches[1]), (int(m["box_bias"]), 64, 1, 1))

        maps = q_map + kv_map(k, ks, dqk, box_qk) + kv_map(v, vs, dv, box_v) + bias_map()
        pair = cluster if m.get("cluster_heads") == "1" else 1  # heads of a cluster; else it has row blocks
        num_m = -(-seqlen_q * (ratio if pack else 1) // (block_m * cluster // pair))
        heads = batch * (hkv if pack else hq) // pair
        unmasked = mask[0] == UNBOUNDED_LO and mask[1] == UNBOUNDED_HI
        group_bytes = 0 if unmasked and group_bytes == DEFAULT_GROUP else group_bytes
        group = heads_per_l2_group(heads, seqlen_k * (dqk + dv) * q.element_size(), 1 if pack else ratio // pair, group_bytes)
        tiles = max(num_m * heads, 1)
        schedule = self.structs.pack("TileSchedule", (num_m * heads, max(num_m, 1), heads, group))
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        grid = cluster * (tiles if m["order"] == "Single" else min(tiles, sms // cluster))

        raw = (ctypes.c_char * 1024)()
        base = (ctypes.addressof(raw) + 127) // 128 * 128
        ctypes.memmove(base, maps, len(maps))
        p, s = ctypes.create_string_buffer(params), ctypes.create_string_buffer(schedule)
        arguments = (c_void_p * 3)(ctypes.addressof(p), base, ctypes.addressof(s))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        dependent = m.get("dependent_launch") == "1"
        attributes = (Attribute * 1)(Attribute(id=6, value=1))
        shape = (c_uint * 7)(grid, 1, 1, self.threads, 1, 1, self.smem)
        config = Config(shape, stream, attributes, int(dependent))
        held = (q, k, v, o, lse_out, workspace, raw, p, s, attributes, cu_q, cu_k, used_q, used_k, sink, alibi, bias)

        def run():
            if claims:
                workspace.zero_()
            status = cuda.cuLaunchKernelEx(byref(config), self.function, arguments, None)
            if status:
                check(status, f"cuLaunchKernelEx {self.name}")
            return o

        run.held = held
        return run, o, lse_out
