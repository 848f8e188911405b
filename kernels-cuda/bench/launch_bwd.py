"""Launches rendered and compiled sm90 backward kernels on torch tensors, through libcuda alone.

A variant NAME is three folders of examples/render_bwd.rs: NAME, NAME.pre and NAME.post.
"""

import ctypes
import re
import struct
from ctypes import byref, c_int, c_uint, c_void_p
from pathlib import Path

import torch

from launch import UNBOUNDED_HI, UNBOUNDED_LO, check, cuda, tensor_map

ROW_THREADS = 256


def load(folder, smem):
    module, function = c_void_p(), c_void_p()
    check(cuda.cuModuleLoadData(byref(module), (folder / "kernel.cubin").read_bytes()), f"cuModuleLoadData {folder.name}")
    check(cuda.cuModuleGetFunction(byref(function), module, b"fmha_kernel"), "cuModuleGetFunction")
    if smem:
        check(cuda.cuFuncSetAttribute(function, c_int(8), c_int(smem)), "cuFuncSetAttribute")
    return function


class Backward:
    def __init__(self, root, name):
        root = Path(root)
        torch.zeros(1, device="cuda")
        entry = (root / name / "entry.cu").read_text()
        field = lambda word: re.search(rf"\.{word} = (\w+)", entry)[1]
        self.name = name
        self.block_m, self.block_n = int(field("block_m")), int(field("block_n"))
        self.persistent = field("persistent") == "true"
        self.deterministic = field("deterministic") == "true"
        self.dim = -(-max(int(field("head_dim_qk")), int(field("head_dim_v"))) // 64) * 64
        meta = dict(line.split("=", 1) for line in (root / name / "meta.txt").read_text().splitlines() if "=" in line)
        self.threads, self.smem = int(meta["threads"]), int(meta["smem"])
        self.main = load(root / name, self.smem)
        self.pre, self.post = load(root / f"{name}.pre", 0), load(root / f"{name}.post", 0)

    def prepare(self, q, k, v, o, lse, dout, *, mask=(UNBOUNDED_LO, UNBOUNDED_HI, 0, 0), scale=None, cu=None, longest=None):
        """A callable that gives (dq, dk, dv). [batch, seqlen, heads, dim], lse [batch, heads, seqlen]; or packed."""
        group = cu is not None
        batch = len(cu) - 1 if group else q.shape[0]
        hq, hkv, dqk, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        seqlen_q, seqlen_k = (longest, longest) if group else (q.shape[1], k.shape[1])
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        scale = dqk**-0.5 if scale is None else scale
        rows_q = q.shape[0] if group else seqlen_q
        m = self.block_m
        padded = -(-seqlen_q // m) * m
        rows, stats_batch, by_offset = (rows_q // m * m + batch * m, m, 1) if group else (batch * padded, padded, 0)
        stats = torch.empty(2, hq * rows, device=q.device)
        sums = torch.empty(hq * rows * self.dim, device=q.device)
        strides = lambda x: (0 if group else x.stride(0), x.stride(-3), x.stride(-2))
        view = lambda x: struct.pack("<Q4q", x.data_ptr(), *strides(x), 1)
        pointer = lambda x: struct.pack("<Q", x.data_ptr() if x is not None else 0)
        none = struct.pack("<Q", 0)
        params = b"".join(view(x) for x in (q, k, v, o)) + bytes(40)
        params += pointer(lse) + struct.pack("<qq", 0 if group else hq * seqlen_q, rows_q)
        params += none + pointer(cu) * 2 + none * 2 + bytes(16) * 5 + none * 2
        params += struct.pack("<6i4ii", batch, seqlen_q, seqlen_k, hq, hkv, hq // hkv, *mask, 1)
        params += struct.pack("<ffIfIII", scale, 0, 0, 1.0, 0, 0, 0)
        assert len(params) == 432, len(params)
        params += view(dout) + b"".join(view(x) for x in grads) + bytes(40) + none * 2
        params += pointer(stats[0]) + pointer(stats[1]) + pointer(sums)
        params += struct.pack("<qq4i", rows, stats_batch, m, by_offset, 0, 0)
        assert len(params) == 704, len(params)

        far = 1 << 20

        def map_of(x, rows_in_box):
            s, storage = strides(x), 1 if group else batch
            extent = x.shape[0] if group else x.shape[1]
            return tensor_map(x, (x.shape[-1], extent, x.shape[-2], storage), (s[1], s[2], far if storage == 1 else s[0]), (64, rows_in_box, 1, 1))

        maps = map_of(q, m) + map_of(k, self.block_n) + map_of(v, self.block_n) + map_of(dout, m)
        key_blocks, q_blocks = -(-seqlen_k // self.block_n), -(-seqlen_q // m)
        tiles = key_blocks * hkv * batch
        schedule = struct.pack("<3i", tiles, key_blocks, q_blocks)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        raw = (ctypes.c_char * 1024)()
        base = (ctypes.addressof(raw) + 127) // 128 * 128
        ctypes.memmove(base, maps, len(maps))
        p, s = ctypes.create_string_buffer(params), ctypes.create_string_buffer(schedule)
        around = (c_void_p * 2)(ctypes.addressof(p), ctypes.addressof(s))
        inside = (c_void_p * 3)(ctypes.addressof(p), base, ctypes.addressof(s))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        one = c_uint(1)
        launches = [
            (self.pre, q_blocks * hq * batch, ROW_THREADS, 0, around),
            (self.main, min(tiles, sms) if self.persistent else tiles, self.threads, self.smem, inside),
            (self.post, q_blocks * hq * batch, ROW_THREADS, 0, around),
        ]

        def launch(which):
            function, grid, threads, smem, arguments = launches[which]
            status = cuda.cuLaunchKernel(function, c_uint(grid), one, one, c_uint(threads), one, one, c_uint(smem), stream, arguments, None)
            if status:
                check(status, f"cuLaunchKernel {self.name} {which}")

        def run():
            for which in range(3):
                launch(which)
            return tuple(grads)

        run.launch = launch
        run.held = (q, k, v, o, lse, dout, grads, stats, sums, raw, p, s, cu)
        return run
