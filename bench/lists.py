"""Attention over lists of keys: `FMHA_LIB=libfmha_c.so python3 lists.py KIT [--rows REGEX] [--kernels A,B]`, on a GPU.

KIT is a folder with bench/ours.py as its ours.py. Lists are drawn by the seed. Each row's outputs, and of a backward its
gradients, are first held to float64 at some tokens; then calls are timed by events, one after another with the L2 full
of other keys, and the median is printed as microseconds, TFLOP/s of selected work (2 (head_dim_qk + head_dim_v) a listed
key and query head; backward 2 (3 head_dim_qk + 2 head_dim_v)) and TB/s of the rows that are gathered. The exit status is
1 if a row was wrong. Words of ours.py (OURS_KERNEL, OURS_TILE, OURS_FALLBACK, OURS_DETERMINISTIC) are honoured.

Each row has a turn by each of `--kernels`; `own` is the plan's choice. All kernels are first compiled into the cache
(FMHA_CACHE_DIR) by `--jobs` processes beside each other, so that no device waits for a compiler; `--compile` stops then.
`--same-bits N` runs each call N times more and compares bits with the first run's; beside OURS_DETERMINISTIC=1 it holds
what a deterministic backward promises.
`python3 lists.py KIT --rows '^(prefill|decode).*/512' --kernels sm90_mla,sm80` compares Hopper's kernels of latent rows; its
rows `every key` and `dense` have the same keys.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import sys
from ctypes import c_float, pointer, sizeof
from dataclasses import dataclass

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("--rows", default="")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--repeats", type=int, default=20)
parser.add_argument("--same-bits", type=int, default=0, metavar="N", help="runs whose bits are compared with the first's")
parser.add_argument("--kernels", default="own", help="names, a comma between two; own: the plan's choice")
parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes that compile")
parser.add_argument("--compile", action="store_true", help="compile the rows' kernels and stop")
arguments = parser.parse_args()
sys.path.insert(0, arguments.kit)
import ours  # noqa: E402


# The kernel of turns that `--kernels` leaves to the plan.
OWN = os.environ.get("OURS_KERNEL", "")


@dataclass(frozen=True)
class Row:
    """One call: K's rows hold V's where `dim_v` is less than `dim_qk` or both are 512."""

    name: str
    batch: int
    tokens: int
    keys: int
    heads: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    topk: int
    block: int = 1
    page_size: int = 0  # entries are then addresses
    every: bool = False  # lists that hold every key, in order
    dense: bool = False  # no lists at all, for comparison
    row_bytes: int = 0  # FlashMLA's rows of 656 and 584 bytes, in pages
    backward: bool = False
    ascending: bool = False  # lists in ascending order, as an indexer gives them

    @property
    def latent(self) -> bool:
        return self.dim_qk >= 512 and not self.backward

    @property
    def listed(self) -> int:
        return self.batch * self.tokens * (self.keys if self.dense else self.topk * self.block)

    @property
    def flops(self) -> float:
        dims = 3 * self.dim_qk + 2 * self.dim_v if self.backward else self.dim_qk + self.dim_v
        return 2.0 * self.listed * self.heads * dims

    @property
    def bytes(self) -> float:
        if self.row_bytes:
            return 1.0 * self.listed * self.row_bytes
        return 2.0 * self.listed * self.heads_kv * (self.dim_qk + (0 if self.latent else self.dim_v))


ROWS = (
    Row("prefill 576/512 H128 top 2048", 1, 4096, 131072, 128, 1, 576, 512, 2048),
    Row("prefill 512/512 H64 top 512", 1, 4096, 131072, 64, 1, 512, 512, 512),
    Row("decode 576/512 H128 B128 T1 top 2048", 128, 1, 32768, 128, 1, 576, 512, 2048, page_size=64),
    Row("decode 576/512 H64 B128 T2 top 2048", 128, 2, 32768, 64, 1, 576, 512, 2048, page_size=64),
    Row("decode 576/512 H128 B1 T1 top 2048", 1, 1, 131072, 128, 1, 576, 512, 2048, page_size=64),
    Row("decode 656 bytes H128 B64 T1 top 2048", 64, 1, 32768, 128, 1, 576, 512, 2048, page_size=64, row_bytes=656),
    Row("decode 656 bytes H128 B128 T1 top 2048", 128, 1, 32768, 128, 1, 576, 512, 2048, page_size=64, row_bytes=656),
    Row("decode 656 bytes H128 B128 T2 top 2048", 128, 2, 32768, 128, 1, 576, 512, 2048, page_size=64, row_bytes=656),
    Row("decode 656 bytes H128 B1 T1 top 2048", 1, 1, 131072, 128, 1, 576, 512, 2048, page_size=64, row_bytes=656),
    Row("decode 584 bytes H64 B128 T1 top 512", 128, 1, 32768, 64, 1, 512, 512, 512, page_size=64, row_bytes=584),
    Row("prefill 656 bytes H128 top 2048", 1, 4096, 131072, 128, 1, 576, 512, 2048, page_size=64, row_bytes=656),
    Row("prefill 584 bytes H64 top 512", 1, 4096, 131072, 64, 1, 512, 512, 512, page_size=64, row_bytes=584),
    Row("decode 576/512 H128 B66 every key", 66, 1, 8192, 128, 1, 576, 512, 8192, every=True),
    Row("decode 576/512 H128 B66 dense", 66, 1, 8192, 128, 1, 576, 512, 0, dense=True),
    Row("decode 576/512 H128 B16 dense of 16384", 16, 1, 16384, 128, 1, 576, 512, 0, dense=True),
    Row("decode 576/512 H128 B1 dense of 32768", 1, 1, 32768, 128, 1, 576, 512, 0, dense=True),
    Row("decode 576/512 H16 B32 every key", 32, 1, 8192, 16, 1, 576, 512, 8192, every=True),
    Row("decode 576/512 H16 B32 dense", 32, 1, 8192, 16, 1, 576, 512, 0, dense=True),
    Row("prefill D128 H64/4, 16 blocks of 128", 1, 4096, 131072, 64, 4, 128, 128, 16, block=128),
    Row("prefill D128 H32/8 top 1024", 1, 4096, 65536, 32, 8, 128, 128, 1024),
    Row("backward 576/512 H128 top 2048", 1, 2048, 65536, 128, 1, 576, 512, 2048, backward=True),
    Row("backward 576/512 H128 top 2048 T4096", 1, 4096, 65536, 128, 1, 576, 512, 2048, backward=True),
    Row("backward 576/512 H128 top 2048 T4096 of 16384", 1, 4096, 16384, 128, 1, 576, 512, 2048, backward=True),
    Row("backward 576/512 H128 top 2048 T4096 ascending", 1, 4096, 65536, 128, 1, 576, 512, 2048, backward=True,
        ascending=True),
    Row("backward 512/512 H128 top 2048", 1, 4096, 65536, 128, 1, 512, 512, 2048, backward=True),
    Row("backward 512/512 H64 top 1024", 1, 4096, 65536, 64, 1, 512, 512, 1024, backward=True),
    Row("backward D128 H32/8 top 1024", 1, 4096, 65536, 32, 8, 128, 128, 1024, backward=True),
)


def lists_of(row: Row, draw: torch.Generator | None) -> torch.Tensor:
    """i32 `[batch, tokens, heads_kv, topk]`: positions, blocks, or addresses of a sequence's own pages; none twice."""
    shape = (row.batch, row.tokens, row.heads_kv, row.topk)
    if draw is None:
        return torch.empty(shape, dtype=torch.int32, device="meta")
    if row.every:
        return torch.arange(row.topk, dtype=torch.int32, device="cuda").expand(shape).contiguous()
    reach = row.keys // row.block
    # The stride has no common factor with the number of keys, so no key is visited twice.
    first = torch.randint(reach, shape[:3], generator=draw, device="cuda")
    step = torch.randint(reach // 2, shape[:3], generator=draw, device="cuda") * 2 + 1
    at = torch.arange(row.topk, device="cuda")
    found = (first[..., None] + step[..., None] * at) % reach
    if row.ascending:
        found = found.sort(-1).values
    if row.page_size:
        found = found + torch.arange(row.batch, device="cuda")[:, None, None, None] * row.keys
    return found.to(torch.int32)


def rows_of_bytes(row: Row, k: torch.Tensor) -> torch.Tensor:
    """FlashMLA's rows of bytes `[pages, page_size, 1, row_bytes]` of K, which becomes what they stand for."""
    group, values = (128, 512) if row.row_bytes == 656 else (64, 448)
    pages = row.batch * row.keys // row.page_size
    found = torch.empty(pages, row.page_size * row.row_bytes, dtype=torch.uint8, device=k.device)
    if not k.is_meta:
        of_pages = k.view(pages, row.page_size, row.dim_qk)
        for first in range(0, pages, 4096):  # bounds what lies beside the cache
            page = of_pages[first : first + 4096]
            wide = page[..., :values].float().unflatten(-1, (values // group, group))
            exponents = (wide.abs().amax(-1) / 448).clamp_min(2.0**-20).log2().ceil()
            scales = exponents.exp2()
            narrow = (wide / scales[..., None]).to(torch.float8_e4m3fn)
            page[..., :values] = (narrow.float() * scales[..., None]).flatten(-2).to(page.dtype)
            codes, rotary = narrow.flatten(-2).view(torch.uint8), page[..., values:].contiguous().view(torch.uint8)
            if row.row_bytes == 656:
                rows = torch.cat((codes, scales.contiguous().view(torch.uint8), rotary), -1).flatten(1)
            else:
                spare = torch.nn.functional.pad((exponents + 127).to(torch.uint8), (0, 1), value=255)
                rows = torch.cat((torch.cat((codes, rotary), -1).flatten(1), spare.flatten(1)), -1)
            found[first : first + 4096] = rows
    return found.view(pages, row.page_size, 1, row.row_bytes)


def inputs_of(row: Row, draw: torch.Generator | None) -> tuple:
    """Q, K, V, dO and lists; without a generator they have no memory, as for a plan alone."""

    def normal(*shape):
        if draw is None:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.float32).to(torch.bfloat16)

    q = normal(row.batch, row.tokens, row.heads, row.dim_qk)
    k = normal(row.batch, row.keys, row.heads_kv, row.dim_qk)
    if row.row_bytes:
        k.in_bytes = rows_of_bytes(row, k)
    v = k[..., : row.dim_v] if row.latent else normal(row.batch, row.keys, row.heads_kv, row.dim_v)
    dout = normal(row.batch, row.tokens, row.heads, row.dim_v) if row.backward else None
    return q, k, v, dout, None if row.dense else lists_of(row, draw)


def made(row: Row, q, k, v, dout, indices):
    """A function that runs the call once and gives O, or dQ, dK and dV."""
    o = torch.empty(*q.shape[:-1], row.dim_v, device=q.device, dtype=q.dtype)
    lse = torch.empty(row.batch, row.heads, row.tokens, device=q.device)
    stream = None if q.is_meta else torch.cuda.current_stream().cuda_stream
    code = ours.DTYPE[torch.bfloat16]
    call = ours.Call(
        batch=row.batch, seqlen_q=row.tokens, seqlen_k=row.keys,
        num_heads_q=row.heads, num_heads_kv=row.heads_kv, head_dim_qk=row.dim_qk, head_dim_v=row.dim_v,
        mask=b"0", softmax_scale=pointer(c_float(row.dim_qk**-0.5)), dtype_qk=code, dtype_v=code, dtype_o=code,
        write_lse=1, stream=stream,
    )  # fmt: skip
    call.args.lse = ours._address(lse)
    if row.page_size:
        k = k.in_bytes if row.row_bytes else k.view(-1, row.page_size, row.heads_kv, row.dim_qk)
        call.problem.page_size, call.args.num_pages, call.problem.seqlen_k = row.page_size, k.shape[0], 0
    call.tensors(q=q, k=k, o=o)
    if row.latent:
        call.problem.v = ours._strides(k)
        call.problem.cache = pointer(
            ours.FmhaCache(struct_bytes=sizeof(ours.FmhaCache), v_in_k=1, cache_rows=row.row_bytes)
        )
    else:
        call.tensors(v=v)
    if indices is not None:
        strides = dict(zip(("batch_stride", "seqlen_stride", "head_stride"), indices.stride()))
        call.args.indices = ours._address(indices)
        call.problem.lists = pointer(ours.FmhaLists(
            struct_bytes=sizeof(ours.FmhaLists), topk=row.topk, addresses=int(row.page_size > 0), block=row.block,
            **strides,
        ))  # fmt: skip
    forward = ours._runner(call, ours._options(timed=not row.backward, backward=False))
    if not row.backward:

        def run():
            forward()
            return (o,)

        run.held = call, k, v, indices, lse
        return run
    if not q.is_meta:
        forward()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    backward = ours._runner(call.backward(code, dout=dout, dq=dq, dk=dk, dv=dv), ours._options(timed=True, backward=True))

    def run_backward():
        backward()
        return dq, dk, dv

    run_backward.held = call, forward, o, lse, k, v, indices, dout
    return run_backward


def keys_of(row: Row, indices, b: int, i: int, h: int) -> torch.Tensor:
    if indices is None:
        return torch.arange(row.keys, device="cuda")
    entries = indices[b, i, h].long() - (b * row.keys if row.page_size else 0)
    return (entries[:, None] * row.block + torch.arange(row.block, device="cuda")).flatten()


def error_of(row: Row, q, k, v, dout, indices, found) -> float:
    """The largest difference from float64 at some tokens, of O or dQ, relative to the largest element."""
    draw, worst, group = torch.Generator().manual_seed(row.topk), 0.0, row.heads // row.heads_kv
    for _ in range(6):
        b, i, h = (int(torch.randint(n, (), generator=draw)) for n in (row.batch, row.tokens, row.heads_kv))
        keys, heads = keys_of(row, indices, b, i, h), slice(h * group, (h + 1) * group)
        of_q, of_k, of_v = q[b, i, heads].double(), k[b, keys, h].double(), v[b, keys, h].double()
        p = (of_q @ of_k.T * row.dim_qk**-0.5).softmax(-1)
        exact = p @ of_v
        if row.backward:
            of_o = dout[b, i, heads].double()
            ds = p * (of_o @ of_v.T - (of_o * exact).sum(-1, keepdim=True))
            exact = ds @ of_k * row.dim_qk**-0.5
        worst = max(worst, float((found[0][b, i, heads].double() - exact).abs().max() / exact.abs().max()))
    if row.backward:
        worst = max(worst, error_of_keys(row, q, k, v, dout, indices, found))
    return worst


def error_of_keys(row: Row, q, k, v, dout, indices, found) -> float:
    """The largest relative difference of dK and dV of one key of the first sequence and kv head from float64."""
    key, group = int(keys_of(row, indices, 0, 0, 0)[0]), row.heads // row.heads_kv
    dk = torch.zeros(row.dim_qk, dtype=torch.float64, device="cuda")
    dv = torch.zeros(row.dim_v, dtype=torch.float64, device="cuda")
    listing = (indices[0, :, 0] == key // row.block).any(-1).nonzero().flatten().tolist()
    for i in listing:
        keys = keys_of(row, indices, 0, i, 0)
        of_q, of_o = q[0, i, :group].double(), dout[0, i, :group].double()
        of_k, of_v = k[0, keys, 0].double(), v[0, keys, 0].double()
        p = (of_q @ of_k.T * row.dim_qk**-0.5).softmax(-1)
        o = p @ of_v
        ds = p * (of_o @ of_v.T - (of_o * o).sum(-1, keepdim=True))
        at = keys == key
        dk += (ds[:, at].sum(-1) @ of_q) * row.dim_qk**-0.5
        dv += p[:, at].sum(-1) @ of_o
    pairs = ((found[1][0, key, 0], dk), (found[2][0, key, 0], dv))
    return max(float((x.double() - exact).abs().max() / exact.abs().max()) for x, exact in pairs)


def micros(run) -> float:
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(arguments.repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def name_kernel(kernel: str) -> None:
    os.environ["OURS_KERNEL"] = OWN if kernel == "own" else kernel


def compiled(turn: tuple[Row, str]) -> str:
    """Plans a call without memory, in a process of its own; what it was refused for, or nothing."""
    row, kernel = turn
    name_kernel(kernel)
    try:
        made(row, *inputs_of(row, None))
    except RuntimeError as error:
        return f"{row.name} by {kernel}: {str(error).splitlines()[0]}"
    return ""


def main() -> None:
    rows = [row for row in ROWS if re.search(arguments.rows, row.name)]
    turns = [(row, kernel) for row in rows for kernel in arguments.kernels.split(",")]
    # The processes start before this process opens a device.
    with multiprocessing.get_context("fork").Pool(min(arguments.jobs, len(turns) or 1), maxtasksperchild=1) as pool:
        refused = pool.map(compiled, turns, chunksize=1)
    print(f"{len(turns) - sum(map(bool, refused))} of {len(turns)} plans made", flush=True)
    if arguments.compile:
        print("\n".join(filter(None, refused)))
        sys.exit(0)
    wrong = 0
    for (row, kernel), reason in zip(turns, refused):
        if reason:
            print(reason, flush=True)
            continue
        name_kernel(kernel)
        draw = torch.Generator(device="cuda").manual_seed(arguments.seed)
        inputs = inputs_of(row, draw)
        run = made(row, *inputs)
        found = run()
        torch.cuda.synchronize()
        error = error_of(row, *inputs, found)
        first, other_bits = [x.clone() for x in found], 0
        for _ in range(arguments.same_bits):
            other_bits += not all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(run(), first))
        bad = not error < 2e-2 or other_bits > 0
        wrong += bad
        took = micros(run)
        print(
            f"{row.name} by {kernel}: {took:.1f} us, {row.flops / took / 1e6:.0f} TFLOP/s, {row.bytes / took / 1e6:.2f} TB/s, "
            f"error {error:.1e}"
            + (f", other bits in {other_bits} of {arguments.same_bits} runs" if arguments.same_bits else "")
            + (" WRONG" if bad else ""),
            flush=True,
        )
        del inputs, run, found, first
        torch.cuda.empty_cache()
    sys.exit(wrong > 0)


main()
