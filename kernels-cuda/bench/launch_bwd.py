"""Launches rendered and compiled sm90 backward kernels on torch tensors, through libcuda alone.

A variant NAME is three folders of examples/render_bwd.rs, NAME, NAME.pre and NAME.post, with a mask a fourth, NAME.repair
(`kernel=repair`). Of each the cubin, of the first
also entry.cu, meta.txt and the headers `fmha/params.h` and `fmha/sm90_bwd_host.h`, which say how arguments lie.
"""

import ctypes
import re
from ctypes import byref, c_int, c_uint, c_void_p
from pathlib import Path

import torch

from launch import UNBOUNDED_HI, UNBOUNDED_LO, check, cuda, tensor_map
from structs import Structs

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
        self.structs = Structs(*((root / name / "fmha" / h).read_text() for h in ("params.h", "sm90_bwd_host.h")))
        self.block_m, self.block_n = int(field("block_m")), int(field("block_n"))
        self.persistent = field("persistent") == "true"
        dim = max(int(field("head_dim_qk")), int(field("head_dim_v")))
        step = 256 if dim > 128 else 64
        self.dim, self.warps = -(-dim // step) * step, 8
        meta = dict(line.split("=", 1) for line in (root / name / "meta.txt").read_text().splitlines() if "=" in line)
        self.threads, self.smem = int(meta["threads"]), int(meta["smem"])
        self.main = load(root / name, self.smem)
        self.pre, self.post = load(root / f"{name}.pre", 0), load(root / f"{name}.post", 0)
        repair = root / f"{name}.repair"
        self.repair = load(repair, 0) if repair.exists() else None

    def prepare(self, q, k, v, o, lse, dout, *, mask=(UNBOUNDED_LO, UNBOUNDED_HI, 0, 0), scale=None, cu=None, longest=None):
        """A callable that gives (dq, dk, dv). [batch, seqlen, heads, dim], lse [batch, heads, seqlen]; or packed."""
        group = cu is not None
        batch = len(cu) - 1 if group else q.shape[0]
        hq, hkv, dqk = q.shape[-2], k.shape[-2], q.shape[-1]
        seqlen_q, seqlen_k = (longest, longest) if group else (q.shape[1], k.shape[1])
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        total_q = q.shape[0] if group else seqlen_q
        m = self.block_m
        padded = -(-seqlen_q // m) * m
        rows = batch * padded
        stats = torch.empty(2, hq * rows, device=q.device)
        sums = torch.empty(hq * rows * self.dim, device=q.device)
        turns = torch.empty(hq * rows // m + 1, dtype=torch.int32, device=q.device)
        strides = lambda x: (0 if group else x.stride(0), x.stride(-3), x.stride(-2))
        view = lambda x: (x, *strides(x), 1)
        fwd = dict(
            q=view(q), k=view(k), v=view(v), o=view(o), lse=lse, lse_batch=0 if group else hq * seqlen_q, lse_head=total_q,
            cu_seqlens_q=cu, cu_seqlens_k=cu, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=total_q,
            total_k=k.shape[0] if group else seqlen_k, page_size=1, num_heads_q=hq, num_heads_kv=hkv, gqa_ratio=hq // hkv,
            mask=mask, alibi_bottom_right=1, softmax_scale=dqk**-0.5 if scale is None else scale, dropout_scale=1.0,
        )  # fmt: skip
        key_blocks, q_blocks = -(-seqlen_k // self.block_n), -(-seqlen_q // m)
        tiles = key_blocks * hkv * batch
        row_blocks = q_blocks * hq * batch
        suspects = torch.empty(tiles * self.warps + row_blocks, dtype=torch.int32, device=q.device)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        params = self.structs.pack("BwdParams", dict(
            fwd=fwd, dout=view(dout), dq=view(grads[0]), dk=view(grads[1]), dv=view(grads[2]), lse_log2=stats[0],
            delta=stats[1], dq_sums=sums, turns=turns[1:], claimed=turns, suspects=suspects, stats_head=rows, stats_batch=padded,
        ))  # fmt: skip
        schedule = self.structs.pack("Sm90BwdSchedule", (tiles, key_blocks, q_blocks, 0, sms))

        far = 1 << 20

        def map_of(x, rows_in_box):
            s, storage = strides(x), 1 if group else batch
            extent = x.shape[0] if group else x.shape[1]
            return tensor_map(x, (x.shape[-1], extent, x.shape[-2], storage), (s[1], s[2], far if storage == 1 else s[0]), (64, rows_in_box, 1, 1))

        maps = map_of(q, m) + map_of(k, self.block_n) + map_of(v, self.block_n) + map_of(dout, m)
        raw = (ctypes.c_char * 1024)()
        base = (ctypes.addressof(raw) + 127) // 128 * 128
        ctypes.memmove(base, maps, len(maps))
        p, s = ctypes.create_string_buffer(params), ctypes.create_string_buffer(schedule)
        around = (c_void_p * 2)(ctypes.addressof(p), ctypes.addressof(s))
        inside = (c_void_p * 3)(ctypes.addressof(p), base, ctypes.addressof(s))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        one = c_uint(1)
        launches = [
            (self.pre, row_blocks, ROW_THREADS, 0, around),
            (self.main, min(tiles, sms) if self.persistent else tiles, self.threads, self.smem, inside),
            (self.post, row_blocks, ROW_THREADS, 0, around),
        ]
        if self.repair:
            launches.append((self.repair, -(-(row_blocks + tiles) * 32 // ROW_THREADS), ROW_THREADS, 0, around))

        def launch(which):
            function, grid, threads, smem, arguments = launches[which]
            status = cuda.cuLaunchKernel(function, c_uint(grid), one, one, c_uint(threads), one, one, c_uint(smem), stream, arguments, None)
            if status:
                check(status, f"cuLaunchKernel {self.name} {which}")

        def run():
            for which in range(len(launches)):
                launch(which)
            return tuple(grads)

        run.launch, run.number = launch, len(launches)
        run.held = (q, k, v, o, lse, dout, grads, stats, sums, turns, suspects, raw, p, s, cu)
        return run
