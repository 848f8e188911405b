"""Latent decoding over unlike lengths: `FMHA_LIB=libfmha_c.so python3 bench/latent_lengths.py`, on a GPU.

Lengths are even in the logarithm from 1 to `--longest`, known to the device alone (`seqused_k`); rows of equal lengths
stand beside them. Caches are contiguous or in pages of 64. Each row's outputs by each way of cutting the keys are held
to float64 at some sequences, the longest and the shortest among them, and to each other in all numbers. Then they are
timed in turns, the L2 flushed before each call; the median counts. At the end one graph a layout is replayed over
lengths that change, 0 among them. The exit status is 1 if an output was wrong.
"""

import argparse
import math
import multiprocessing
import os
import random
import statistics
import sys
from ctypes import c_float, pointer, sizeof
from dataclasses import dataclass

import torch

import ours

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--longest", type=int, default=65536)
parser.add_argument("--repeats", type=int, default=20)
parser.add_argument("--replays", type=int, default=40)
parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes that compile")
arguments = parser.parse_args()

# Ways of dividing the keys, as tile fields of `sm90_mla`. `own` is the plan's choice, and `parts` its choice without
# shares.
WAYS = {"own": "", "parts": "shares=0", "boxes": "by_tma=1", "copies": "by_tma=0"}
DIM, DIM_V = 576, 512


@dataclass(frozen=True)
class Row:
    heads: int
    lengths: tuple
    page_size: int = 0
    fp8: bool = False
    of: str = "mixed"

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def __str__(self) -> str:
        layout = f"p{self.page_size}" if self.page_size else "rows"
        cache = "e4m3" if self.fp8 else "bf16"
        return f"H{self.heads:<3} B{self.batch:<3} {self.of:6} {layout:4} {cache} {sum(self.lengths):7} keys"


def rows() -> list:
    draw = random.Random(arguments.seed)
    top = math.log(arguments.longest)
    made = []
    for heads in (16, 128):
        for batch in (8, 16, 64):
            lengths = tuple(max(1, round(math.exp(draw.uniform(0, top)))) for _ in range(batch))
            made += [Row(heads, lengths, page_size) for page_size in (0, 64)]
    longest = arguments.longest
    made.append(Row(16, (longest,) + (longest // 64,) * 31, 64, of="1 long"))
    made.append(Row(16, tuple(draw.choice(made[2].lengths) for _ in range(16)), 64, fp8=True))
    for heads, batch, length in ((16, 64, 8192), (16, 132, 4096), (128, 16, 16384), (128, 66, 8192)):
        made.append(Row(heads, (length,) * batch, of="equal"))
    made.append(Row(16, (8192,) * 64, 64, of="equal"))
    return made


def inputs_of(row: Row, device="cuda") -> tuple:
    """Q, the cache, its block table or None, the lengths."""
    longest = max(row.lengths)
    pages, table = [-(-n // 64) for n in row.lengths], None
    extent = (sum(pages), row.page_size) if row.page_size else (row.batch, longest)
    if row.page_size:
        order = torch.randperm(sum(pages)).to(torch.int32)
        table = torch.zeros(row.batch, max(pages), dtype=torch.int32)
        for of_row, part in zip(table, order.split(pages)):
            of_row[: len(part)] = part
        table = table.to(device)

    def normal(*shape):
        x = torch.empty(shape, device=device, dtype=torch.bfloat16)
        return x if x.is_meta else x.normal_()

    cache = normal(*extent, 1, DIM)
    if row.fp8:
        cache = cache.to(torch.float8_e4m3fn)
    used = torch.tensor(row.lengths, dtype=torch.int32).to(device)
    return normal(row.batch, 1, row.heads, DIM), cache, table, used


def made(row: Row, way: str, q, cache, table, used):
    """A function that runs the call once and gives O."""
    os.environ["OURS_KERNEL"], os.environ["OURS_TILE"] = "sm90_mla", WAYS[way]
    o = torch.empty(*q.shape[:-1], DIM_V, device=q.device, dtype=q.dtype)
    code = ours.DTYPE[torch.bfloat16]
    call = ours.Call(
        batch=row.batch, seqlen_q=1, seqlen_k=0 if row.page_size else max(row.lengths),
        num_heads_q=row.heads, num_heads_kv=1, head_dim_qk=DIM, head_dim_v=DIM_V,
        mask=b"0", softmax_scale=pointer(c_float(DIM**-0.5)), dtype_qk=code, dtype_v=code, dtype_o=code,
        stream=None if q.is_meta else torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    problem, args = call.problem, call.args
    call.tensors(q=q, k=cache, o=o)
    problem.v = ours._strides(cache)
    problem.seqused_k, args.seqused_k = 1, ours._address(used)
    of_cache = ours.FmhaCache(struct_bytes=sizeof(ours.FmhaCache), v_in_k=1)
    if row.fp8:
        of_cache.dtype_cache = ours.DTYPE[cache.dtype]
    problem.cache = pointer(of_cache)
    if table is not None:
        problem.page_size, problem.seqlen_k = row.page_size, max(row.lengths)
        args.block_table, args.num_pages, args.max_pages = ours._address(table), cache.shape[0], table.shape[1]
    queued = ours._runner(call, ours._options(timed=True, backward=False))

    def run():
        queued()
        return o

    run.held = q, cache, table, used
    return run


def error_of(row: Row, q, cache, table, o, lengths) -> float:
    """The largest difference from float64 of some sequences, relative to the largest element; inf where O of one without
    keys is not 0."""
    order = sorted(range(row.batch), key=lambda b: lengths[b])
    worst = 0.0
    for b in {order[0], order[row.batch // 3], order[row.batch // 2], order[-1]}:
        n = lengths[b]
        if n == 0:
            worst = max(worst, math.inf if bool((o[b] != 0).any()) else 0.0)
            continue
        k = cache[table[b, : -(-n // 64)].long()].flatten(0, 1)[:n, 0] if table is not None else cache[b, :n, 0]
        k = k.to(torch.bfloat16).double()
        p = (q[b, 0].double() @ k.T * DIM**-0.5).softmax(-1)
        exact = p @ k[:, :DIM_V]
        worst = max(worst, float((o[b, 0].double() - exact).abs().max() / exact.abs().max()))
    return worst if bool(o.isfinite().all()) else math.inf


def timed(runs: dict) -> dict:
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times = {way: [] for way in runs}
    for _ in range(arguments.repeats):
        for way, run in runs.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[way].append(1e3 * begin.elapsed_time(end))
    return {way: statistics.median(of_way) for way, of_way in times.items()}


def compiled(turn: tuple) -> str:
    row, way = turn
    try:
        made(row, way, *inputs_of(row, "meta"))
    except RuntimeError as error:
        return f"{row} {way}: {str(error).splitlines()[0]}"
    return ""


def replayed(row: Row, draw: random.Random) -> int:
    """Replays of a captured call that were wrong."""
    q, cache, table, used = inputs_of(row)
    graph, stream, wrong = torch.cuda.CUDAGraph(), torch.cuda.Stream(), 0
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = made(row, "own", q, cache, table, used)
        o = run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    top = math.log(max(row.lengths) + 1)
    for at in range(arguments.replays):
        lengths = [0 if draw.random() < 0.2 else int(math.exp(draw.uniform(0, top))) for _ in range(row.batch)]
        if at % 10 == 9:
            lengths = [0] * row.batch if at % 20 == 9 else list(row.lengths)
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        o.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        wrong += not error_of(row, q, cache, table, o, lengths) < 1e-2
    return wrong


def main() -> None:
    every = rows()
    turns = [(row, way) for row in every for way in WAYS]
    with multiprocessing.get_context("fork").Pool(min(arguments.jobs, len(turns)), maxtasksperchild=4) as pool:
        refused = dict(zip(turns, pool.map(compiled, turns, chunksize=1)))
    wrong = 0
    print("row" + " " * 39 + "".join(f"{way:>9}" for way in WAYS) + "  parts/own  error")
    for row in every:
        torch.cuda.empty_cache()
        q, cache, table, used = inputs_of(row)
        runs = {way: made(row, way, q, cache, table, used) for way in WAYS if not refused[row, way]}
        outputs = {way: run().clone() for way, run in runs.items()}
        torch.cuda.synchronize()
        errors = {way: error_of(row, q, cache, table, o, row.lengths) for way, o in outputs.items()}
        apart = max(float((o.float() - outputs["parts"].float()).abs().max()) for o in outputs.values())
        bad = not max(errors.values()) < 1e-2 or apart > 0.05
        wrong += bad
        took = timed(runs)
        cells = "".join(f"{took[way]:9.1f}" if way in took else f"{'-':>9}" for way in WAYS)
        print(
            f"{row!s:42}{cells}  {took['parts'] / took['own']:9.2f}  {max(errors.values()):.1e} apart {apart:.1e}"
            + (f" WRONG {errors}" if bad else ""),
            flush=True,
        )
        del runs, q, cache
    print("\n".join(sorted({reason for reason in refused.values() if reason})[:6]))
    draw = random.Random(arguments.seed)
    for page_size, fp8 in ((0, False), (64, False), (64, True)):
        row = Row(16, (9000,) * 12, page_size, fp8, "graph")
        of_row = replayed(row, draw)
        wrong += of_row
        print(f"{row}: {arguments.replays - of_row} of {arguments.replays} replays right", flush=True)
    sys.exit(wrong > 0)


main()
