"""The choice of keys on a GPU: `PYTHONPATH=bindings/python python3 bench/choose.py [--rows REGEX] [--variants]`.

Each row draws an indexer's operands by the seed. Its scores are first held to float64 at some tokens (of FP8 on Hopper
to float64 sums that are cut as the tensor cores cut them), its lists to torch.topk of those scores (the same values,
ascending positions) and to a second run. Then calls are timed inside a
graph with the L2 full of other numbers, and the median is printed: microseconds, TB/s of the indexer's keys read once,
TFLOP/s of 2 num_heads head_dim a candidate, and the time of torch's own (matmul, relu, sum, topk, sort) in the same
run. `--variants` times other tiles of Hopper's kernel and sm80_index beside some rows, and then lists of given scores:
the lists of each tile must be those of the first. The exit status is 1 if a row was wrong. FMHA_NATIVE names the
library where it is not in target/release.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass

import torch

from fmha import sparse

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rows", default="")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--repeats", type=int, default=20)
parser.add_argument("--kernel", default=None)
parser.add_argument("--variants", action="store_true", help="time other tiles too, and lists by themselves")
parser.add_argument("--no-torch", action="store_true", help="leave torch's own out")
arguments = parser.parse_args()


@dataclass(frozen=True)
class Row:
    name: str
    batch: int
    tokens: int
    keys: int
    topk: int = 2048
    heads: int = 64
    dim: int = 128
    fp8: bool = True
    paged: bool = True
    block: int = 0

    @property
    def candidates(self) -> float:
        return self.batch * (self.tokens * self.keys - self.tokens * (self.tokens - 1) / 2)

    @property
    def key_bytes(self) -> float:
        return self.batch * self.keys * (self.dim + 4 if self.fp8 else 2 * self.dim)


ROWS = [
    Row("decode b32 128k", 32, 1, 131072),
    Row("decode b128 32k", 128, 1, 32768),
    Row("decode b1 128k", 1, 1, 131072),
    Row("decode b8 128k", 8, 1, 131072),
    Row("decode b64 128k", 64, 1, 131072),
    Row("decode b1 32k", 1, 1, 32768),
    Row("decode b8 32k", 8, 1, 32768),
    Row("decode b32 32k", 32, 1, 32768),
    Row("decode b64 32k", 64, 1, 32768),
    Row("decode b1 128k bf16", 1, 1, 131072, fp8=False),
    Row("decode b32 128k bf16", 32, 1, 131072, fp8=False),
    Row("decode b8 128k bf16", 8, 1, 131072, fp8=False),
    Row("decode b64 128k bf16", 64, 1, 131072, fp8=False),
    Row("decode b1 32k bf16", 1, 1, 32768, fp8=False),
    Row("decode b8 32k bf16", 8, 1, 32768, fp8=False),
    Row("decode b32 32k bf16", 32, 1, 32768, fp8=False),
    Row("decode b64 32k bf16", 64, 1, 32768, fp8=False),
    Row("two tokens b32 64k", 32, 2, 65536),
    Row("blocks b32 128k", 32, 1, 131072, topk=16, block=128),
    Row("prefill 4k", 1, 4096, 4096, paged=False),
    Row("prefill 8k", 1, 8192, 8192, paged=False),
    Row("prefill 16k", 1, 16384, 16384, paged=False),
    Row("prefill 4096 of 64k", 1, 4096, 65536, paged=False),
    Row("prefill 8192 of 64k", 1, 8192, 65536, paged=False),
    Row("prefill 4096 of 128k", 1, 4096, 131072, paged=False),
    Row("prefill 4096 of 64k bf16", 1, 4096, 65536, fp8=False, paged=False),
    Row("prefill 4096 of 128k bf16", 1, 4096, 131072, fp8=False, paged=False),
]
# Rows whose variants are timed, too.
VARIED = ["decode b1 128k", "decode b32 128k", "decode b32 128k bf16", "prefill 8k", "prefill 4096 of 64k"]
# Tiles of Hopper's kernel beside its own choice, and the kernel of every GPU: name, and fields.
VARIANTS = [
    ("sm90_index", "run_tokens=1"),
    ("sm90_index", "run_tokens=4"),
    ("sm90_index", "warpgroups=3,warpgroup_tiles=2"),
    ("sm90_index", "cluster=4"),
    ("sm90_index", "cluster=8"),
    ("sm80_index", ""),
]
# Lists of given scores: rows and keys, and the groups of threads that share a row; none: the device's own way.
LISTS = [(1, 131072), (8, 131072), (32, 131072), (64, 131072), (1, 32768), (32, 32768), (64, 32768), (512, 16384), (4096, 65536)]
WAYS = ["", "cluster=1", "cluster=2", "cluster=4", "cluster=8", "parts=4"]
PAGE = 64


class Operands:
    """Operands of a row, drawn by a seed."""

    def __init__(self, row: Row, seed: int) -> None:
        made = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=made)

        small = torch.float8_e4m3fn if row.fp8 else torch.bfloat16
        self.q = normal(row.batch, row.tokens, row.heads, row.dim).to(small)
        self.weights = torch.rand(row.batch, row.tokens, row.heads, device="cuda", generator=made)
        self.dense = torch.cat([normal(1, row.keys, row.dim).to(small) for _ in range(row.batch)])
        scale = torch.rand(row.batch, row.keys, device="cuda", generator=made) + 0.5
        self.scale = scale if row.fp8 else None
        self.more = {}
        self.k = self.dense
        self.k_scale = self.scale
        if row.paged:
            pages = row.batch * row.keys // PAGE
            table = torch.randperm(pages, device="cuda", generator=made).to(torch.int32).view(row.batch, -1)
            at = table.flatten().long()
            if row.fp8:
                cache = torch.empty(pages, PAGE, 1, row.dim + 4, device="cuda", dtype=torch.uint8)
                self.k, self.k_scale = sparse.split_pages(cache, row.dim)
                # FP8 has no scatter of its own.
                self.k.view(torch.uint8)[at] = self.dense.view(torch.uint8).view(pages, PAGE, row.dim)
                self.k_scale[at] = scale.view(pages, PAGE)
            else:
                self.k = torch.empty(pages, PAGE, row.dim, device="cuda", dtype=small)
                self.k[at] = self.dense.view(pages, PAGE, row.dim)
            self.more["block_table"] = table

    def lists(self, row: Row, out: torch.Tensor | None = None) -> torch.Tensor:
        more = {"block": row.block, "last_blocks": 1} if row.block else {}
        more.update(self.more, k_scale=self.k_scale, kernel=arguments.kernel, out=out)
        return sparse.index_lists(self.q, self.k, self.weights, row.topk, **more)

    def scores(self, row: Row, kernel: str | None) -> torch.Tensor:
        return sparse.index_scores(self.q, self.k, self.weights, **self.more, k_scale=self.k_scale, kernel=kernel)

    def torchs(self, row: Row) -> torch.Tensor:
        """The lists by torch: rows at a time whose products are half a gigabyte."""
        made = []
        for b in range(row.batch):
            k = self.dense[b].to(torch.bfloat16).t()
            step = max(1, (1 << 28) // (row.heads * row.keys))
            for i in range(0, row.tokens, step):
                q = self.q[b, i : i + step].to(torch.bfloat16)
                products = (q.flatten(0, 1) @ k).view(-1, row.heads, row.keys).relu_()
                scores = torch.einsum("ihj,ih->ij", products, self.weights[b, i : i + step].to(torch.bfloat16)).float()
                if self.scale is not None:
                    scores *= self.scale[b]
                if row.block:
                    scores = scores.view(len(scores), -1, row.block).amax(-1)
                elif row.tokens > 1:
                    ends = torch.arange(i, i + len(q), device="cuda") + 1 + row.keys - row.tokens
                    scores.masked_fill_(torch.arange(row.keys, device="cuda") >= ends[:, None], -torch.inf)
                made.append(scores.topk(min(row.topk, scores.shape[-1]), sorted=False).indices.sort().values)
        return torch.cat(made)


def products_of(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Products of keys and heads in float64. Of FP8 on Hopper they are cut as `ScoreSums::Cut` says: 32 products and
    the sum so far are cut towards zero 13 bits below the largest exponent, then their sum to 14 bits."""
    hopper = torch.cuda.get_device_capability() == (9, 0) and arguments.kernel in (None, "sm90_index")
    if k.dtype != torch.float8_e4m3fn or not hopper:
        return k.double() @ q.double().t()

    def exponent(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == 0, -1000, torch.frexp(x).exponent - 1)

    def power(exponents: torch.Tensor) -> torch.Tensor:
        return ((exponents.clamp(min=-500).long() + 1023) << 52).view(torch.float64)

    def cut(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return (x / unit).trunc() * unit

    made = []
    for part in k.double().split(16384):
        total = torch.zeros(len(part), len(q), device=k.device, dtype=torch.float64)
        for a, b in zip(part.split(32, 1), q.double().split(32, 1)):
            exponents = exponent(a)[:, None] + exponent(b)[None]
            unit = power(torch.maximum(exponents.amax(-1), exponent(total)) - 13)
            total = cut(total, unit) + cut(a[:, None] * b[None], unit[..., None]).sum(-1)
            total = cut(total, power(exponent(total) - 13))
        made.append(total)
    return torch.cat(made)


def wrong(row: Row, it: Operands) -> str | None:
    """What is wrong with a row's lists."""
    lists = it.lists(row)
    if not torch.equal(lists, it.lists(row)):
        return "a second run gives other lists"
    tokens = sorted({0, row.tokens // 2, row.tokens - 1})
    for b in sorted({0, row.batch - 1}):
        for i in tokens:
            end = row.keys - row.tokens + i + 1
            q, w = it.q[b : b + 1, i : i + 1], it.weights[b : b + 1, i : i + 1]
            scale = None if it.scale is None else it.scale[b : b + 1]
            scores = sparse.index_scores(q, it.dense[b : b + 1], w, k_scale=scale, causal=False)[0, 0]
            scores = scores[:end]
            products = products_of(it.dense[b], q[0, 0])
            if scale is not None:
                products *= scale[0, :, None].double()
            exact = (products.relu() @ w[0, 0].double())[: len(scores)]
            error = ((scores - exact).abs() / exact.abs().clamp(min=1)).max().item()
            if not error < 1e-4:
                return f"scores of token {i} of sequence {b} are wrong by {error:.1e}"
            if row.block:
                pad = -len(scores) % row.block
                scores = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf).view(-1, row.block).amax(-1)
                scores[-1] = torch.inf
            chosen = lists[b, i][lists[b, i] >= 0].long()
            if not bool((chosen.diff() > 0).all()):
                return f"the list of token {i} of sequence {b} does not ascend"
            best = scores.topk(min(row.topk, len(scores))).values
            if not torch.equal(scores[chosen].sort(descending=True).values, best):
                return f"the list of token {i} of sequence {b} is not of the greatest scores"
    return None


def microseconds(call, flush: torch.Tensor) -> float:
    """Median over replays of a graph with one call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(arguments.repeats):
        flush.add_(1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def variants(row: Row, it: Operands, out: torch.Tensor, flush: torch.Tensor) -> bool:
    """Times other tiles; whether all of them have the same lists."""
    expected, own_kernel, sound = out.clone(), arguments.kernel, True
    for kernel, tile in VARIANTS:
        if kernel == "sm80_index" and row.tokens > 1024:
            continue
        arguments.kernel, sparse._Call.tile = kernel, tile
        try:
            out.fill_(-7)
            it.lists(row, out)
            same = bool((out == expected).all())
            # The slower kernel sums FP8 in another way: its lists differ where scores are nearly equal.
            sound &= same or (kernel == "sm80_index" and row.fp8)
            common = sum(len(set(a) & set(b)) for a, b in zip(out[:, 0].tolist(), expected[:, 0].tolist()))
            share = common / max(1, out[:, 0].numel())
            own = microseconds(lambda: it.lists(row, out), flush)
            line = f"  {kernel} {tile:50} {own:10.1f} us, {'the same lists' if same else f'{share:.4f} in common'}"
            if row.tokens <= 2:
                scores = microseconds(lambda: it.scores(row, kernel), flush)
                line += f", scores alone {scores:8.1f} us"
            print(line if same or kernel == "sm80_index" else f"{line}   WRONG", flush=True)
        except Exception as refusal:  # a tile that the device has no room for
            print(f"  {kernel} {tile:50} refused: {str(refusal).splitlines()[0][:150]}", flush=True)
    arguments.kernel, sparse._Call.tile = own_kernel, None
    return sound


def lists_alone(flush: torch.Tensor) -> bool:
    """Times lists of given scores; whether every way has torch's values and the same lists."""
    sound = True
    for rows, keys in LISTS:
        scores = torch.randn(1, rows, keys, device="cuda") * 80 + 500
        scores[:, :, ::5] = scores[:, :, ::5].round()
        # Rows in order and of equal scores are not chosen by a bound.
        ascending = torch.arange(keys, device="cuda").float()
        ordered = torch.stack([ascending, torch.full_like(ascending, 1.5)])[None]
        lists, best = sparse.choose(ordered, 2048), torch.arange(2048, device="cuda")
        if not (torch.equal(lists[0, 0], best + keys - 2048) and torch.equal(lists[0, 1], best)):
            sound = False
            print(f"lists of {keys} scores in order or equal   WRONG")
        best = scores.topk(2048).values
        first = None
        for way in WAYS:
            sparse._Call.tile = way
            try:
                lists = sparse.choose(scores, 2048)
                chosen = scores.gather(2, lists.long()).sort(descending=True).values
                first = lists if first is None else first
                fine = torch.equal(chosen, best) and torch.equal(lists, first)
                sound &= fine
                own = microseconds(lambda: sparse.choose(scores, 2048, out=lists), flush)
                line = f"lists of {rows} x {keys} {way or 'own':10} {own:8.1f} us"
                print(line if fine else f"{line}   WRONG", flush=True)
            except Exception as refusal:
                print(f"lists of {rows} x {keys} {way:10} refused: {str(refusal).splitlines()[0][:150]}", flush=True)
    sparse._Call.tile = None
    return sound


def main() -> int:
    print(torch.cuda.get_device_name(), torch.__version__)
    flush = torch.zeros(1 << 26, device="cuda")
    failures = 0
    for row in ROWS:
        if not re.search(arguments.rows, row.name):
            continue
        it = Operands(row, arguments.seed)
        fault = wrong(row, it)
        if fault is not None:
            failures += 1
            print(f"{row.name:28} WRONG: {fault}")
            continue
        out = it.lists(row)
        own = microseconds(lambda: it.lists(row, out), flush)
        flops = 2 * row.candidates * row.heads * row.dim
        line = f"{row.name:28} {own:10.1f} us {row.key_bytes / own / 1e6:6.2f} TB/s {flops / own / 1e6:7.1f} TFLOP/s"
        if not row.block:
            alone = microseconds(lambda: it.scores(row, arguments.kernel), flush)
            line += f", scores alone {alone:10.1f} us"
        if not arguments.no_torch:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            it.torchs(row)
            begin.record()
            it.torchs(row)
            end.record()
            torch.cuda.synchronize()
            theirs = begin.elapsed_time(end) * 1000
            line += f"   torch {theirs:10.1f} us, {theirs / own:5.2f} times"
        print(line, flush=True)
        if arguments.variants and row.name in VARIED and not variants(row, it, out, flush):
            failures += 1
        del it, out
        torch.cuda.empty_cache()
    if arguments.variants and not lists_alone(flush):
        failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
