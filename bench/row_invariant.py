"""Rows of equal bits on a GPU: `FMHA_LIB=libfmha_c.so python3 row_invariant.py KIT --seed 1 --pairs 500`.

A pair is two calls that have rows of one sequence in common: training packed or in a batch, a piece of a prompt, one
to sixteen decoded tokens, over pages of 1 to 128 rows, beside other sequences. Both are planned with `row_invariant`,
and O and the log-sum-exp of the common rows are compared bit for bit. Half of the sequences span three parts of 2048
keys or more. A pair of gradients is two training calls, of whole sequences or some of their rows: dQ of the common rows
is compared, and dK and dV where both have the same rows. Then the price: microseconds of calls with and without the
promise, queued behind a wait of the device, so that the host's time is in none. The exit status is 1 if a bit differed.
`--price 0` compares alone, `--pairs 0 --gradients 0` times alone, `--keys 512,1024,2048` times parts of these sizes
too, which a CTA folds, or a launch behind CTAs of a part each. `--jobs` processes compare pairs beside each other.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, pointer

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("--pairs", type=int, default=500)
parser.add_argument("--gradients", type=int, default=200, help="pairs of training calls")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes that compare pairs")
parser.add_argument("--only", type=int, default=None, help="the pair of this seed alone")
parser.add_argument("--price", type=int, default=1, help="0: no times")
parser.add_argument("--rows", default="", help="times calls whose names match this expression alone")
parser.add_argument("--keys", default="", help="times parts of so many keys too, as 512,1024,2048")
arguments = parser.parse_args()
sys.path.insert(0, arguments.kit)
import ours  # noqa: E402

PART = 2048
DEVICE = "cuda"


def call_of(q, k, v, *, mask, dims, o, lse=None, table=None, used=None, begins_q=None, begins_k=None, page_size=0):
    """The C call, and what it holds."""
    batch, seqlen_q, seqlen_k = dims
    call = ours.Call(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        num_heads_q=q.shape[-2], num_heads_kv=k.shape[-2], head_dim_qk=q.shape[-1], head_dim_v=v.shape[-1],
        mask=mask.encode(), softmax_scale=pointer(c_float(q.shape[-1] ** -0.5)),
        dtype_qk=ours.DTYPE[q.dtype], dtype_v=ours.DTYPE[v.dtype], dtype_o=ours.DTYPE[o.dtype],
        stream=torch.cuda.current_stream().cuda_stream,
    )
    if page_size:
        call.problem.page_size, call.args.num_pages, call.args.max_pages = page_size, k.shape[0], table.shape[1]
        call.args.block_table = table.data_ptr()
    call.tensors(q=q, k=k, v=v, o=o)
    for name, flag, x in (
        ("lse", "write_lse", lse),
        ("seqused_k", "seqused_k", used),
        ("cu_seqlens_q", "packed_q", begins_q),
        ("cu_seqlens_k", "packed_k", begins_k),
    ):
        if x is not None:
            setattr(call.problem, flag, 1)
            setattr(call.args, name, x.data_ptr())
    if begins_q is not None:
        call.args.total_q = q.shape[0]
    if begins_k is not None:
        call.args.total_k = k.shape[0]
    return call, (q, k, v, o, lse, table, used, begins_q, begins_k)


def planned(call, invariant: bool):
    options = ours._options(timed=True, backward=False)
    options.row_invariant = invariant
    return ours._runner(call, options)


def numbers(seed: int, length: int, heads: int, dim: int, dtype, spread: float):
    draw = torch.Generator(device=DEVICE).manual_seed(seed)
    rows = torch.randn(length, heads, dim, generator=draw, device=DEVICE)
    # Some rows are larger than others, so that maxima rise late, by little and by much.
    scale = 2.0 ** torch.randint(-2, 3, (length, heads, 1), generator=draw, device=DEVICE)
    return (rows * scale * spread).to(dtype)


class Story:
    """One sequence."""

    def __init__(self, seed: int, draw: random.Random):
        self.long = draw.random() < 0.5
        self.length = draw.randint(2 * PART + 1, 5 * PART) if self.long else draw.randint(1, 2 * PART)
        self.kv = draw.choice((1, 1, 2, 4))
        self.heads = self.kv * draw.choice((1, 2, 3, 4, 8))
        self.dim = draw.choice((64, 64, 96, 128, 128, 128, 192, 256, 80))
        self.dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        self.dtype_o = draw.choice((torch.float32, self.dtype))
        self.window = draw.randint(0, self.length) if draw.random() < 0.2 else None
        of = lambda salt, heads, spread: numbers(4 * seed + salt, self.length, heads, self.dim, self.dtype, spread)
        self.q, self.k, self.v = of(0, self.heads, 1.5), of(1, self.kv, 1.0), of(2, self.kv, 1.0)
        self.row = draw.randint(2 * PART, self.length - 1) if self.long else draw.randrange(self.length)

    def __str__(self):
        words = f"{self.length} tokens, {self.heads}/{self.kv} heads, D {self.dim}, {self.dtype}, O {self.dtype_o}"
        return words + (f", window {self.window}" if self.window is not None else "")


def offsets(lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


class View:
    """A call that has some of a story's rows."""

    def __init__(self, story: Story, draw: random.Random):
        kind = draw.choice(("train", "piece", "decode"))
        row, length = story.row, story.length
        if kind == "train":
            self.begin, self.end = 0, draw.randint(row + 1, length)
        elif kind == "piece":
            self.begin = max(0, row - draw.randrange(512))
            self.end = min(length, max(row + 1, self.begin + draw.randint(1, 1024)))
        else:
            self.begin = max(0, row - draw.randrange(16))
            self.end = min(length, row + 1 + draw.randrange(16 - (row - self.begin)))
        self.keys = draw.choice(("packed", "paged", "strided"))
        self.page_size = draw.choice((1, 2, 3, 16, 17, 32, 64, 100, 128)) if self.keys == "paged" else 0
        self.spare = draw.choice((0, 0, draw.randint(1, 3 * PART)))
        # The other sequences have other numbers. In a strided call they have as many queries as this one.
        self.others = []
        for _ in range(draw.randrange(4)):
            keys = draw.randint(1, length + PART)
            own = self.end - self.begin
            queries = own if self.keys == "strided" else min(keys, draw.choice((1, 1, 16, 300)))
            self.others.append((queries, max(keys, queries)))
        self.place = draw.randint(0, len(self.others))
        one = self.end - self.begin == 1 and all(queries == 1 for queries, _ in self.others)
        self.unmasked = one and story.window is None and draw.random() < 0.5
        self.seed = draw.randrange(1 << 30)

    def __str__(self):
        how = f"pages of {self.page_size}" if self.page_size else self.keys
        words = f"rows {self.begin}..{self.end}, {how}, {len(self.others)} others, spare {self.spare}"
        return words + (", unmasked" if self.unmasked else "")

    def run(self, story: Story):
        """O and LSE of the story's rows."""
        sequences = list(self.others)
        sequences.insert(self.place, (self.end - self.begin, self.end))
        qs, ks, vs = [], [], []
        for at, (queries, keys) in enumerate(sequences):
            if at == self.place:
                q, k, v = story.q[self.begin : self.end], story.k[: self.end], story.v[: self.end]
            else:
                of = lambda salt, n, heads: numbers(self.seed + 8 * at + salt, n, heads, story.dim, story.dtype, 1.0)
                q, k, v = of(0, queries, story.heads), of(1, keys, story.kv), of(2, keys, story.kv)
            qs.append(q), ks.append(k), vs.append(v)
        longest_q, longest_k = (max(pair[at] for pair in sequences) for at in (0, 1))
        used = torch.tensor([keys for _, keys in sequences], dtype=torch.int32, device=DEVICE)
        mask = "0" if self.unmasked else "b" if story.window is None else f"b:{story.window},0"
        count = len(sequences)
        empty = lambda *rows: torch.full((*rows, story.kv, story.dim), math.nan, dtype=story.dtype, device=DEVICE)
        if self.keys == "strided":
            q = torch.stack(qs)
            k, v = (empty(count, longest_k + self.spare) for _ in "kv")
            for to, rows in ((k, ks), (v, vs)):
                for at, x in enumerate(rows):
                    to[at, : len(x)] = x
            of_call = dict(used=used, dims=(count, longest_q, longest_k + self.spare))
        else:
            q = torch.cat(qs)
            of_call = dict(begins_q=offsets(pair[0] for pair in sequences), dims=(count, longest_q, longest_k))
            if self.keys == "packed":
                k, v = torch.cat(ks), torch.cat(vs)
                of_call.update(begins_k=offsets(pair[1] for pair in sequences))
            else:
                size = self.page_size
                wide = -(-(longest_k + self.spare) // size)
                order = torch.randperm(count * wide, generator=torch.Generator().manual_seed(self.seed)).to(DEVICE)
                table = order.view(count, wide).to(torch.int32).contiguous()
                k, v = (empty(count * wide, size) for _ in "kv")
                for to, rows in ((k, ks), (v, vs)):
                    for at, x in enumerate(rows):
                        places = (table[at].long()[:, None] * size + torch.arange(size, device=DEVICE)).flatten()
                        to.view(-1, story.kv, story.dim)[places[: len(x)]] = x
                of_call.update(table=table, used=used, page_size=size, dims=(count, longest_q, wide * size))
        o = torch.full(q.shape, math.nan, dtype=story.dtype_o, device=DEVICE)
        packed = self.keys != "strided"
        shape = (story.heads, len(q)) if packed else (count, story.heads, longest_q)
        lse = torch.full(shape, math.nan, device=DEVICE)
        call, held = call_of(q, k, v, mask=mask, o=o, lse=lse, **of_call)
        planned(call, True)()
        torch.cuda.synchronize()
        del held
        if packed:
            first = sum(pair[0] for pair in sequences[: self.place])
            rows = slice(first, first + self.end - self.begin)
            return o[rows], lse[:, rows].T
        return o[self.place], lse[self.place].T


def compared(seed: int) -> str | None:
    """What differs."""
    draw = random.Random(seed)
    story = Story(seed, draw)
    views = [View(story, draw) for _ in range(2)]
    begin, end = max(view.begin for view in views), min(view.end for view in views)
    results = []
    for view in views:
        o, lse = view.run(story)
        rows = slice(begin - view.begin, end - view.begin)
        results.append((o[rows], lse[rows]))
    integer = {2: torch.int16, 4: torch.int32}
    for name, a, b in zip(("o", "lse"), *results):
        a, b = (x.contiguous().view(integer[x.element_size()]) for x in (a, b))
        if not torch.equal(a, b):
            where = (a != b).nonzero()
            at = where[0].tolist()
            place = f"{name} at row {begin + at[0]} {at[1:]}, {len(where)} elements"
            return "\n  ".join([f"pair {seed}: {place}", str(story), *map(str, views)])
    return None


class Training:
    """A call that has some of a story's rows, and gradients."""

    def __init__(self, story: Story, draw: random.Random, same: bool):
        self.begin, self.end = 0, story.length
        if not same:
            self.end = draw.randint(story.row + 1, story.length)
            self.begin = draw.choice((0, draw.randint(0, story.row)))
        self.packed = draw.random() < 0.6
        own = (self.end - self.begin, self.end)
        self.others = []
        for _ in range(draw.randrange(4)):
            keys = draw.randint(1, story.length)
            self.others.append((draw.choice((keys, draw.randint(1, keys))), keys) if self.packed else own)
        self.place = draw.randint(0, len(self.others))
        self.seed = draw.randrange(1 << 30)

    def __str__(self):
        return f"rows {self.begin}..{self.end}, {'packed' if self.packed else 'batch'}, {len(self.others)} others"

    def run(self, story: Story):
        """dQ of the story's rows, and dK and dV of its keys."""
        sequences = list(self.others)
        sequences.insert(self.place, (self.end - self.begin, self.end))
        rows = [[], [], [], []]
        for at, (queries, keys) in enumerate(sequences):
            if at == self.place:
                own = slice(self.begin, self.end)
                of_call = story.q[own], story.k[: self.end], story.v[: self.end], story.dout[own]
            else:
                of = lambda salt, n, heads: numbers(self.seed + 8 * at + salt, n, heads, story.dim, story.dtype, 1.0)
                shapes = (queries, story.heads), (keys, story.kv), (keys, story.kv), (queries, story.heads)
                of_call = [of(salt, *shape) for salt, shape in enumerate(shapes)]
            for to, x in zip(rows, of_call):
                to.append(x)
        longest = [max(pair[at] for pair in sequences) for at in (0, 1)]
        q, k, v, dout = (torch.cat(x) if self.packed else torch.stack(x) for x in rows)
        more = dict(begins_q=offsets(x for x, _ in sequences), begins_k=offsets(x for _, x in sequences))
        mask = "b" if story.window is None else f"b:{story.window},0"
        o = torch.full(q.shape, math.nan, dtype=story.dtype, device=DEVICE)
        shape = (story.heads, len(q)) if self.packed else (len(q), story.heads, longest[0])
        lse = torch.full(shape, math.nan, device=DEVICE)
        of_call = dict(mask=mask, dims=(len(sequences), *longest), o=o, lse=lse)
        call, held = call_of(q, k, v, **of_call, **(more if self.packed else {}))
        planned(call, True)()
        grads = [torch.full(x.shape, math.nan, device=DEVICE) for x in (q, k, v)]
        backward = call.backward(ours.DTYPE[torch.float32], dout=dout, **dict(zip(("dq", "dk", "dv"), grads)))
        planned(backward, True)()
        torch.cuda.synchronize()
        del held
        if not self.packed:
            return [x[self.place] for x in grads]
        before = [sum(pair[at] for pair in sequences[: self.place]) for at in (0, 1)]
        ends = [before[0] + self.end - self.begin, before[1] + self.end]
        return [grads[0][before[0] : ends[0]], *(x[before[1] : ends[1]] for x in grads[1:])]


def drawn_training(seed: int):
    draw = random.Random(seed)
    story = Story(seed, draw)
    story.dim = draw.choice((64, 128, 128, 80, 16))
    of = lambda salt, heads, spread: numbers(4 * seed + salt, story.length, heads, story.dim, story.dtype, spread)
    story.q, story.k, story.v = of(0, story.heads, 1.5), of(1, story.kv, 1.0), of(2, story.kv, 1.0)
    story.dout = of(3, story.heads, 1.0)
    same = draw.random() < 0.5
    return story, [Training(story, draw, same) for _ in range(2)], same


def compared_gradients(seed: int) -> str | None:
    """What differs."""
    story, views, same = drawn_training(seed)
    begin, end = max(view.begin for view in views), min(view.end for view in views)
    results = [view.run(story) for view in views]
    pairs = [("dq", *(x[0][begin - view.begin : end - view.begin] for view, x in zip(views, results)))]
    if same:
        pairs += [(name, results[0][at], results[1][at]) for at, name in ((1, "dk"), (2, "dv"))]
    for name, a, b in pairs:
        if not torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)):
            where = (a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).nonzero()
            place = f"{name} at row {begin + where[0][0].item()} {where[0][1:].tolist()}, {len(where)} elements"
            return "\n  ".join([f"gradients {seed}: {place}", str(story), *map(str, views)])
    return None


def micros(run, times: int = 40) -> float:
    for _ in range(5):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    # The device sleeps for some 5 ms, in which the host queues all calls.
    torch.cuda._sleep(10_000_000)
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(begin.elapsed_time(end) for begin, end in events)


def with_gradients(call, held, q, k, v):
    """The backward of a call, whose forward has run."""
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=DEVICE)
    call.problem.write_lse, call.args.lse = 1, lse.data_ptr()
    planned(call, True)()
    tensors = dict(dout=torch.randn_like(q), dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))
    return call.backward(ours.DTYPE[q.dtype], **tensors), (call, held, lse, tensors)


def ways(keys_of_parts):
    """Names of a row's columns, and how each is planned: without the promise, with it, with parts of other sizes."""
    folding = [(f"{keys} in CTAs", True, f"fold_keys={keys}") for keys in keys_of_parts]
    apart = [(f"{keys} apart", True, f"split_keys={keys},fixed_parts=1") for keys in keys_of_parts]
    return [("without", False, None), ("with", True, None), *folding, *apart]


def price_calls():
    """Names of calls, whether parts of other sizes are timed, and what makes the call."""
    of = lambda *shape: torch.randn(*shape, device=DEVICE).to(torch.bfloat16)
    rows = []
    for dim in (128, 64):
        for length in (4096, 8192, 16384):
            def train(length=length, dim=dim):
                q, k, v = (of(1, length, 16, dim) for _ in range(3))
                return call_of(q, k, v, mask="b", dims=(1, length, length), o=torch.empty_like(q))

            def backward(length=length, dim=dim):
                q, k, v = (of(1, length, 16, dim) for _ in range(3))
                call, held = call_of(q, k, v, mask="b", dims=(1, length, length), o=torch.empty_like(q))
                return with_gradients(call, held, q, k, v)

            rows.append((f"causal {length}, H16 D{dim}", True, train))
            rows.append((f"causal {length}, H16 D{dim}, backward", False, backward))
    for page_size in (0, 64):
        for tokens in (1, 4, 16):
            for length in (4096, 8192, 32768, 131072):
                def decode(page_size=page_size, tokens=tokens, length=length):
                    q, o = of(1, tokens, 32, 128), of(1, tokens, 32, 128)
                    more = {}
                    if page_size:
                        pages = length // page_size
                        k, v = (of(pages, page_size, 8, 128) for _ in "kv")
                        table = torch.randperm(pages).to(torch.int32).to(DEVICE)[None].contiguous()
                        used = torch.tensor([length], dtype=torch.int32, device=DEVICE)
                        more = dict(table=table, page_size=page_size, used=used)
                    else:
                        k, v = (of(1, length, 8, 128) for _ in "kv")
                    return call_of(q, k, v, mask="b", dims=(1, tokens, length), o=o, **more)

                where = f"pages of {page_size}" if page_size else "contiguous"
                rows.append((f"{tokens} tokens over {length}, 32/8 heads, {where}", True, decode))
    return rows


def prices(only: str, keys_of_parts) -> None:
    """Times each call in each way, after all of them are compiled beside each other."""
    every = ways(keys_of_parts)
    chosen = [row for row in price_calls() if re.search(only, row[0])]

    def plan(call, invariant, tile):
        options = ours._options(timed=True, backward=False)
        options.row_invariant = invariant
        if tile:
            options.tile = tile.encode()
        try:
            return ours._runner(call, options)
        except (ours.Unsupported, RuntimeError):
            return None

    def compiled(row):
        call, held = row[2]()
        for _, invariant, tile in every if row[1] else every[:2]:
            plan(call, invariant, tile)
        del held

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, chosen))
    print("\n| call | " + " | ".join(name for name, *_ in every) + " | price |")
    print("|---" * (len(every) + 2) + "|")
    for name, has_sizes, make in chosen:
        call, held = make()
        times = []
        for _, invariant, tile in every if has_sizes else every[:2]:
            run = plan(call, invariant, tile)
            times.append(micros(run) if run else None)
        del held
        times += [None] * (len(every) - len(times))
        ratio = f"{times[1] / times[0]:.3f}" if times[0] and times[1] else "-"
        print(f"| {name} | " + " | ".join(f"{t:.1f}" if t else "-" for t in times) + f" | {ratio} |", flush=True)


def main() -> None:
    wrong = 0
    searches = (compared, arguments.pairs, "pairs"), (compared_gradients, arguments.gradients, "pairs of gradients")
    for compare, count, what in searches:
        seeds = range(arguments.seed, arguments.seed + count)
        if count and arguments.only is not None:
            seeds = [arguments.only]
        differ = 0
        # Child processes are spawned, since a child that inherits a CUDA context can not use it.
        with multiprocessing.get_context("spawn").Pool(min(arguments.jobs, len(seeds)) or 1) as pool:
            for at, said in enumerate(pool.imap_unordered(compare, seeds)):
                if said is not None:
                    differ += 1
                    print(said, flush=True)
                if at % 50 == 49:
                    print(f"{at + 1} {what}, {differ} differ", flush=True)
        print(f"{len(seeds)} {what}: {differ} differ", flush=True)
        wrong += differ
    if arguments.price and arguments.only is None:
        prices(arguments.rows, [int(keys) for keys in arguments.keys.split(",") if keys])
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
