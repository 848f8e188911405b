"""Times masks and scores beside torch's compiled FlexAttention: `PYTHONPATH=bindings/python python3 bench/masks.py KIT`.

KIT is the peers' kit, whose timing serves here (`none`: this file's own). Parts, in this order, all of them unless
--parts says fewer; each result is printed as it is known, tables come last, and what --seconds does not hold is said to
be left out:

    rows     masks and scores that users write: as functions through `fmha.flex`, and where ranges of keys say them as
             data through `fmha.attention(mask=Intervals)`. O of every way is held to float64 on some rows of some
             heads, dQ, dK and dV (and the gradient of what a score captures) to those of the first way alone; WRONG
             stands behind a figure that is beyond the bound. Then the ways take turns, forward and backward, in
             milliseconds; the ratio is torch's time to the best of ours. Torch's mask is built before, and so are the
             mask object and the lists that `fmha.flex` keeps with a mask; intervals make their lists in each call.
    lists    block lists, random and clustered, blocks of 64 x 64 and 128 x 128, 64 of 1713 blocks in each row of
             blocks: TFLOP/s of the selected work, forward and backward, beside torch's FlexAttention over the same
             BlockMask.
    making   making the lists of 131072 tokens in documents of mean 4096, 32 heads, one mask, beside its forward.
    exact    deterministic backward beside the other, over the rows' intervals, and whether 100 repeats have one set of
             bits.
    compile  first call of an expression that nobody has compiled beside the same call without one, the cache on disk
             empty.

    --rows REGEX      some of the rows
    --backward 0      forward alone
    --sizes B,H,S,D   of other sizes than 2,16,8192,128; --heads-kv N for grouped heads
    --rounds N        rounds of the turns (5), the median counts
    --seconds N       stop beginning new measurements after so many (240)
    --jobs N          processes that first compile all rows into the caches on disk, theirs and ours (0: none)
    --flash           FlashAttention 4 beneath torch's (kernel_options BACKEND=FLASH), where torch has it
    --torch 0         ours alone, as where torch compiles nothing
"""

import argparse
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time

import torch
import torch._functorch.config
from torch.nn.attention import flex_attention as torchs

import fmha
import fmha.flex

# Backward runs many times on the tensors that forward saved, which torch would otherwise overwrite.
torch._functorch.config.donated_buffer = False

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("--rows", default=".")
parser.add_argument("--backward", type=int, default=1)
parser.add_argument("--sizes", default="2,16,8192,128")
parser.add_argument("--heads-kv", type=int, default=0)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--parts", default="rows,lists,making,exact,compile")
parser.add_argument("--seconds", type=float, default=240.0)
parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
parser.add_argument("--flash", action="store_true")
parser.add_argument("--torch", type=int, default=1)
parser.add_argument("--device", default="cuda")
arguments = parser.parse_args()
BEGAN = time.monotonic()
BATCH, HEADS, LENGTH, DIM = (int(x) for x in arguments.sizes.split(","))
HEADS_KV = arguments.heads_kv or HEADS
DEVICE = torch.device(arguments.device)
if DEVICE.type == "cpu":

    def event_times(fn, calls, flush):
        """Milliseconds of each call on a processor: to try the file where there is no GPU."""
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            fn()
            times.append(1e3 * (time.perf_counter() - begin))
        return times

elif arguments.kit != "none":
    sys.path.insert(0, arguments.kit)
    from compare import event_times
else:

    def event_times(fn, calls, flush):
        """Milliseconds of each call, the L2 written over before it."""
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for begin, end in events:
            if flush:
                scratch.zero_()
            begin.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]


class Row:
    """A mask as a function and as ranges of keys, a score as a function, and what it captures with a gradient."""

    def __init__(self, name, mask=None, ranges=None, score=None, captured=None):
        self.name, self.mask, self.ranges, self.score, self.captured = name, mask, ranges, score, captured


def endpoints(*pairs):
    """`[1, 1, 2 n, LENGTH]` of ranges, each a number or one number a row."""
    rows = [
        torch.as_tensor(x, device=DEVICE).expand(LENGTH) if torch.as_tensor(x).ndim == 0 else x for pair in pairs for x in pair
    ]
    return torch.stack([x.to(torch.int32) for x in rows])[None, None].contiguous()


def documents(mean):
    """The document of each row, its first row and the row behind it: lengths drawn around a mean."""
    torch.manual_seed(7)
    ends, at = [], 0
    while at < LENGTH:
        at = min(LENGTH, at + int(torch.randint(mean // 2, 3 * mean // 2, ()).item()) + 1)
        ends.append(at)
    end = torch.tensor(ends, device=DEVICE)
    begin = torch.cat([end.new_zeros(1), end[:-1]])
    of_row = torch.searchsorted(end, torch.arange(LENGTH, device=DEVICE), right=True)
    return of_row.to(torch.int32), begin[of_row], end[of_row]


def table():
    i = torch.arange(LENGTH, device=DEVICE)
    doc, begin, end = documents(max(LENGTH // 8, 2))
    window, prefix, shared, block, side = LENGTH // 8, LENGTH // 4, LENGTH // 4, max(LENGTH // 256, 1), int(math.isqrt(LENGTH))
    # Answers of equal length follow a question that all of them see.
    answer = (LENGTH - shared) // 4
    in_answer = ((i - shared).clamp(min=0)) // answer
    first_of_answer = torch.where(i < shared, 0, shared + in_answer * answer)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], device=DEVICE, requires_grad=True)
    in_block = i // block * block
    # Sequences have a noisy and a clean half, as in training by block diffusion: a token sees its own noisy block and
    # earlier clean blocks.
    half = LENGTH // 2
    noisy = i < half
    own = torch.where(noisy, in_block, 0)
    own_end = torch.where(noisy, in_block + block, 0)
    clean_end = torch.where(noisy, half + in_block, in_block + block)
    return [
        Row("causal", lambda b, h, q, k: q >= k, [(0, i + 1)]),
        Row("window", lambda b, h, q, k: (q >= k) & (q - k <= window), [((i - window).clamp(min=0), i + 1)]),
        Row("prefix", lambda b, h, q, k: (k < prefix) | (q >= k), [(0, torch.clamp(i + 1, min=prefix))]),
        Row("documents", lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k), [(begin, i + 1)]),
        Row("documents full", lambda b, h, q, k: doc[q] == doc[k], [(begin, end)]),
        Row(
            "shared prefix",
            lambda b, h, q, k: (q >= k) & ((k < shared) | (k >= first_of_answer[q])),
            [(0, torch.clamp(i + 1, max=shared)), (torch.where(i < shared, 0, first_of_answer), torch.where(i < shared, 0, i + 1))],
        ),
        Row(
            "global + window",
            lambda b, h, q, k: (k < 128) | ((q - k <= window) & (k - q <= window)),
            [(0, 128), ((i - window).clamp(min=128), torch.clamp(i + window + 1, max=LENGTH))],
        ),
        Row("dilated", lambda b, h, q, k: (q >= k) & (q - k <= 4 * window) & ((q - k) % 4 == 0)),
        Row(
            "neighbourhood",
            lambda b, h, q, k: (q // side - k // side <= 6)
            & (k // side - q // side <= 6)
            & (q % side - k % side <= 6)
            & (k % side - q % side <= 6),
        ),
        Row(
            "block diffusion",
            lambda b, h, q, k: ((q < half) & (k >= own[q]) & (k < own_end[q])) | ((k >= half) & (k < clean_end[q])),
            [(own, own_end), (half, torch.clamp(clean_end, min=half))],
        ),
        Row(
            "ALiBi, learned",
            lambda b, h, q, k: q >= k,
            None,
            lambda s, b, h, q, k: s + slopes[h] * (k - q),
            slopes,
        ),
        Row("soft-cap", lambda b, h, q, k: q >= k, None, lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0)),
    ]


def ways(row, q, k, v):
    """Forward calls by name: `[B, H, S, D]` in and out."""
    calls = {}
    if arguments.torch:
        compiled = torch.compile(torchs.flex_attention, dynamic=False)
        blocks = None
        if row.mask is not None:
            blocks = torch.compile(torchs.create_block_mask)(row.mask, None, None, LENGTH, LENGTH, device=DEVICE)
        options = {"BACKEND": "FLASH"} if arguments.flash else None
        gqa = HEADS_KV != HEADS
        calls["torch"] = lambda: compiled(
            q, k, v, score_mod=row.score, block_mask=blocks, enable_gqa=gqa, kernel_options=options
        )
    lazy = None if row.mask is None else fmha.flex.create_block_mask(row.mask, None, None, LENGTH, LENGTH, device=DEVICE)
    calls["functions"] = lambda: fmha.flex.flex_attention(
        q, k, v, score_mod=row.score, block_mask=lazy, enable_gqa=HEADS_KV != HEADS
    )
    if row.ranges is not None and hasattr(fmha, "Intervals"):
        data = fmha.Intervals(endpoints(*row.ranges))
        laid = [x.transpose(1, 2) for x in (q, k, v)]
        calls["intervals"] = lambda: fmha.attention(*laid, mask=data).transpose(1, 2)
        built = fmha.MaskObject(*laid, data)
        calls["object"] = lambda: fmha.attention(*laid, mask=built).transpose(1, 2)
    if row.name == "causal":
        laid = [x.transpose(1, 2) for x in (q, k, v)]
        calls["built in"] = lambda: fmha.attention(*laid, mask="causal").transpose(1, 2)
    return calls


def reference(row, q, k, v, rows, batch, head):
    """O in float64 of some rows of a head."""
    head_kv = head * HEADS_KV // HEADS
    of = lambda x, at: x[batch, at].double()  # noqa: E731
    scores = of(q, head)[rows] @ of(k, head_kv).T / math.sqrt(DIM)
    i, j = rows[:, None], torch.arange(LENGTH, device=DEVICE)[None, :]
    at = [torch.tensor(x, device=DEVICE) for x in (batch, head)]
    if row.score is not None:
        with torch.no_grad():
            scores = row.score(scores, *at, i, j)
    if row.mask is not None:
        scores = scores.masked_fill(~row.mask(*at, i, j).expand_as(scores), -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ of(v, head_kv)


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def operands(row):
    """Q, K and V, the gradient of O, and what has a gradient."""
    torch.manual_seed(0)
    make = lambda heads: torch.randn(  # noqa: E731
        BATCH, heads, LENGTH, DIM, device=DEVICE, dtype=torch.bfloat16, requires_grad=bool(arguments.backward)
    )
    q, k, v = make(HEADS), make(HEADS_KV), make(HEADS_KV)
    dout = torch.randn(BATCH, HEADS, LENGTH, DIM, device=DEVICE, dtype=torch.bfloat16)
    return (q, k, v), dout, [q, k, v] + ([row.captured] if row.captured is not None else [])


def compile_row(name):
    """Fills the caches on disk with a row's kernels; the seconds of each way."""
    torch.set_num_threads(1)
    row = next(row for row in table() if row.name == name)
    (q, k, v), dout, wanted = operands(row)
    seconds = []
    for way, call in ways(row, q, k, v).items():
        begin = time.perf_counter()
        try:
            out = call()
            torch.no_grad()(call)()
            if arguments.backward:
                torch.autograd.grad(out, wanted, dout)
        except Exception:  # noqa: BLE001: the turn of this way says it
            pass
        seconds.append(f"{way} {time.perf_counter() - begin:.1f}")
    return f"{name}: first calls in seconds: {', '.join(seconds)}"


def held(what, seconds=0.0):
    """Whether there is time for something that takes about so many seconds."""
    left = arguments.seconds - (time.monotonic() - BEGAN)
    if left < seconds:
        print(f"left out: {what}, for which {left:.0f} of {arguments.seconds:.0f} seconds are left", flush=True)
    return left >= seconds


def medians(calls, rounds=None):
    """Milliseconds of calls that take turns."""
    times = {name: [] for name in calls}
    for call in calls.values():
        event_times(call, 2, True)
    for _ in range(rounds or arguments.rounds):
        for name, call in calls.items():
            times[name] += event_times(call, 1, True)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def run(row):
    """A row's cells by kind: what each way takes, with WRONG where its results are, and the ratio."""
    (q, k, v), dout, wanted = operands(row)
    rows = torch.randperm(LENGTH, device=DEVICE)[:64]
    places = [(0, 0), (BATCH - 1, HEADS - 1)]
    expected = [reference(row, q.detach(), k.detach(), v.detach(), rows, b, h) for b, h in places]
    forward, backward, wrong, gradients = {}, {}, {}, {}
    for name, call in ways(row, q, k, v).items():
        try:
            out = call()
            errors = [relative_error(out[b, h][rows], x) for (b, h), x in zip(places, expected)]
            wrong[name] = max(errors) > 1e-2
            forward[name] = torch.no_grad()(call)
            if arguments.backward:
                gradients[name] = torch.autograd.grad(out, wanted, dout, retain_graph=True)
                backward[name] = lambda out=out: torch.autograd.grad(out, wanted, dout, retain_graph=True)
        except Exception as error:  # a refusal, or whatever a peer throws
            print(f"  {row.name}: {name}: {' '.join(repr(error).split())[:300]}", flush=True)
            forward.pop(name, None)
            backward.pop(name, None)
    # Gradients of every way are compared with those of the first way: a float64 backward of whole heads needs too much
    # memory.
    names = list(gradients)
    for name in names[1:]:
        for a, b in zip(gradients[names[0]], gradients[name]):
            wrong[name] |= relative_error(b.float(), a.double()) > 2e-2
    del gradients
    found = {}
    for kind, calls in (("forward", forward), ("backward", backward)):
        # torch's gradient of a captured tensor may take seconds.
        slow = [name for name, call in calls.items() if event_times(call, 1, True)[0] > 300]
        median = medians({name: call for name, call in calls.items() if name not in slow})
        median.update({name: event_times(calls[name], 1, True)[0] for name in slow})
        cells = {name: f"{t:.3f}{' WRONG' if wrong[name] else ''}" for name, t in median.items()}
        ours = [t for name, t in median.items() if name in ("functions", "intervals", "object") and not wrong[name]]
        if ours and "torch" in median:
            cells["ratio"] = f"{median['torch'] / min(ours):.2f}"
        if cells:
            found[kind] = cells
            print(f"{row.name}, {kind}: " + "  ".join(f"{name} {x}" for name, x in cells.items()), flush=True)
    return found


def table_of(columns, rows):
    """Prints rows of cells by the names of their columns."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for cells in rows:
        print("| " + " | ".join(str(cells.get(name, "")) for name in columns) + " |")


def part_rows():
    all_rows, ratios = [], {}
    for row in table():
        # Each of the other parts needs time too.
        others = 15 * arguments.parts.count(",")
        if not re.search(arguments.rows, row.name) or not held(f"row {row.name}", 12 + others):
            continue
        torch.compiler.reset()
        for kind, cells in run(row).items():
            all_rows.append({"mask": row.name, "": kind, **cells})
            if "ratio" in cells:
                ratios.setdefault(kind, []).append(float(cells["ratio"]))
    notes = []
    for kind, of in ratios.items():
        mean = math.exp(sum(math.log(r) for r in of) / len(of))
        notes.append(f"{kind}: geometric mean {mean:.2f}, least {min(of):.2f}, of {len(of)} rows")
    return ["mask", "", "torch", "functions", "intervals", "object", "built in", "ratio"], all_rows, notes


def listed_blocks(kind, side, of):
    """`[1, 1, rows, columns]` of bools: in each row of blocks 64 of 1713 of them, one at least."""
    torch.manual_seed(3)
    count = max(1, round(of * 64 / 1713))
    at = torch.zeros(1, 1, of, of, dtype=torch.bool, device=DEVICE)
    for row in range(of):
        if kind == "random":
            columns = torch.randperm(of, device=DEVICE)[:count]
        else:
            # A query sees runs of four neighbouring keys, and the diagonal's own key.
            first = torch.randint(0, max(of - 3, 1), (max(1, math.ceil(count / 4)),), device=DEVICE)
            columns = (first[:, None] + torch.arange(4, device=DEVICE)).flatten().clamp(max=of - 1).unique()[:count]
        at[0, 0, row, columns] = True
    return at


def part_lists():
    """64 of 1713 blocks in each row of blocks, and so tokens by their size; fewer heads than the rows'."""
    heads, rows = (8 if DEVICE.type != "cpu" else 1), []
    for side in (64, 128):
        of = 1713 if DEVICE.type != "cpu" else 8
        length = of * side
        for kind in ("random", "clustered"):
            if not held(f"block lists {side} x {side}, {kind}", 20):
                continue
            torch.compiler.reset()
            at = listed_blocks(kind, side, of)
            counts = at.sum(-1, dtype=torch.int32)
            indices = at.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
            mask = torchs.BlockMask.from_kv_blocks(
                torch.zeros_like(counts),
                torch.zeros_like(indices),
                counts,
                indices,
                BLOCK_SIZE=side,
                seq_lengths=(length, length),
            )
            torch.manual_seed(0)
            q, k, v, dout = (
                torch.randn(1, heads, length, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)
            )
            q, k, v = (x.requires_grad_(bool(arguments.backward)) for x in (q, k, v))
            compiled = torch.compile(torchs.flex_attention, dynamic=False)
            calls = {"torch": lambda: compiled(q, k, v, block_mask=mask)} if arguments.torch else {}
            calls["ours"] = lambda: fmha.flex.flex_attention(q, k, v, block_mask=mask)
            # FLOPs: two products for each visible pair in forward, five in backward.
            flops = 4.0 * counts.sum().item() * side * side * DIM * heads
            sample = torch.randperm(length, device=DEVICE)[:64]
            seen = at[0, 0].repeat_interleave(side, 1)[sample // side].bool()
            with torch.no_grad():
                scores = q[0, 0][sample].double() @ k[0, 0].double().T / math.sqrt(DIM)
                expected = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v[0, 0].double()
            cells = {"blocks": f"{side} x {side} {kind}, {counts.sum().item()} of {of * of}"}
            gradients = {}
            forward, backward = {}, {}
            for name, call in calls.items():
                try:
                    out = call()
                    bad = " WRONG" if relative_error(out[0, 0][sample], expected) > 1e-2 else ""
                    forward[name] = torch.no_grad()(call)
                    if arguments.backward:
                        grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                        backward[name] = lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                        gradients[name] = grads
                    cells[name] = bad
                except Exception as error:  # noqa: BLE001
                    print(f"  lists {side} {kind}: {name}: {' '.join(repr(error).split())[:300]}", flush=True)
            if len(gradients) == 2:
                for a, b in zip(*gradients.values()):
                    if relative_error(b.float(), a.double()) > 2e-2:
                        cells["ours"] = " WRONG"
            for name, ms in medians(forward, 3).items():
                cells[f"{name} forward"] = f"{flops / ms / 1e9:.0f}{cells.get(name, '')}"
            del gradients
            for name, ms in medians(backward, 3).items():
                cells[f"{name} backward"] = f"{2.5 * flops / ms / 1e9:.0f}{cells.get(name, '')}"
            print("lists: " + "  ".join(f"{name} {x}" for name, x in cells.items()), flush=True)
            rows.append(cells)
            del q, k, v, dout, forward, backward, calls
    names = ["blocks", "torch forward", "ours forward", "torch backward", "ours backward"]
    return names, rows, ["lists: TFLOP/s of selected work; wanted 330 of 64 x 64, 550 of 128 x 128, backward 0.65 of it"]


def part_making():
    length, heads = (131072, 32) if DEVICE.type != "cpu" else (1024, 2)
    if not held("making lists", 10):
        return [], [], []
    torch.manual_seed(5)
    ends, at = [], 0
    while at < length:
        at = min(length, at + int(torch.randint(2048, 6144, ()).item()) * length // 131072 + 1)
        ends.append(at)
    end = torch.tensor(ends, device=DEVICE)
    begin = torch.cat([end.new_zeros(1), end[:-1]])
    i = torch.arange(length, device=DEVICE)
    of = torch.searchsorted(end, i, right=True)
    rows = []
    for name, ranges in (("documents", (begin[of], end[of])), ("documents, causal", (begin[of], i + 1))):
        data = fmha.Intervals(torch.stack([x.to(torch.int32) for x in ranges])[None, None].contiguous())
        q, k, v = (torch.randn(1, length, heads, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        built = fmha.MaskObject(q, k, v, data, backward=False)
        calls = {
            "building an object": built.build,
            "forward by it": lambda: fmha.attention(q, k, v, mask=built),
            "forward that makes lists": lambda: fmha.attention(q, k, v, mask=data),
        }
        cells = {name: f"{ms:.3f}" for name, ms in medians(calls, 3).items()}
        ms = [float(cells[name]) for name in ("forward by it", "forward that makes lists")]
        cells["making"] = f"{100 * (ms[1] - ms[0]) / ms[0]:.1f} %"
        rows.append({"131072 tokens, 32 heads": name, **cells})
        print("making: " + "  ".join(f"{name} {x}" for name, x in rows[-1].items()), flush=True)
    return ["131072 tokens, 32 heads", *calls, "making"], rows, ["making: below 5 % of the forward is wanted"]


def part_exact():
    if not held("deterministic backward", 10):
        return [], [], []
    rows = []
    for name, mask in [("built-in causal", "causal")] + [
        (row.name, fmha.Intervals(endpoints(*row.ranges))) for row in table() if row.ranges is not None
    ]:
        if not re.search(arguments.rows, name) or not held(f"deterministic backward of {name}", 3):
            continue
        torch.manual_seed(0)
        sizes = (BATCH, LENGTH, HEADS, DIM)
        q, k, v, dout = (torch.randn(sizes, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        calls, bits = {}, []
        for way, options in (("backward", {}), ("deterministic", {"deterministic": True})):
            try:
                out = fmha.attention(q, k, v, mask=mask, **options)
                calls[way] = lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            except Exception as error:  # noqa: BLE001
                print(f"  {name}: {way}: {' '.join(repr(error).split())[:300]}", flush=True)
        cells = {way: f"{ms:.3f}" for way, ms in medians(calls).items()}
        if "deterministic" in calls:
            first = calls["deterministic"]()
            bits = [all(torch.equal(a, b) for a, b in zip(first, calls["deterministic"]())) for _ in range(100)]
            cells["repeats with other bits"] = f"{bits.count(False)} of {len(bits)}"
        if len(calls) == 2:
            cells["price"] = f"{float(cells['deterministic']) / float(cells['backward']):.2f}"
        rows.append({"mask": name, **cells})
        print("exact: " + "  ".join(f"{name} {x}" for name, x in rows[-1].items()), flush=True)
    return ["mask", "backward", "deterministic", "price", "repeats with other bits"], rows, []


#: Program that times the first two calls of a process, forward and backward: without an expression, then with one.
FIRST = """
import sys, time, torch, fmha, fmha.flex
device = sys.argv[1]
q, k, v = (torch.randn(1, 4, 1024, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
wait = torch.cuda.synchronize if device != "cpu" else (lambda: None)
def first(**how):
    begin = time.perf_counter()
    out = fmha.flex.flex_attention(q, k, v, **how)
    wait()
    forward = time.perf_counter() - begin
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wait()
    return f"{forward:.3f} {time.perf_counter() - begin - forward:.3f}"
x = torch.zeros(1, device=device)
wait()
mask = lambda b, h, i, j: (i >= j) & ((i * 7 + j) % 5 != 1)
block = fmha.flex.create_block_mask(mask, None, None, 1024, 1024, device=device)
score = lambda s, b, h, i, j: s * torch.sigmoid(s * 0.25)
hows = {"none": {}, "score": {"score_mod": score}, "mask": {"block_mask": block}}
print(first(**hows[sys.argv[2]]))
"""


def part_compile():
    rows, own = [], {}
    for what in ("none", "score", "mask"):
        if not held(f"first call, {what}", 12):
            continue
        with tempfile.TemporaryDirectory() as empty:
            environment = {**os.environ, "FMHA_CACHE_DIR": empty}
            given = [sys.executable, "-c", FIRST, arguments.device, what]
            done = subprocess.run(given, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"  first call, {what}: {done.stderr[-300:]}", flush=True)
            continue
        own[what] = [float(x) for x in done.stdout.split()[-2:]]
        cells = {"expression": what, "forward s": f"{own[what][0]:.2f}", "backward s": f"{own[what][1]:.2f}"}
        if what != "none" and "none" in own:
            ratios = [a / b for a, b in zip(own[what], own["none"])]
            cells["of none"] = " ".join(f"{x:.2f}" for x in ratios)
        rows.append(cells)
        print("compile: " + "  ".join(f"{name} {x}" for name, x in cells.items()), flush=True)
    return ["expression", "forward s", "backward s", "of none"], rows, ["compile: within 1.3 of none is wanted"]


PARTS = {"rows": part_rows, "lists": part_lists, "making": part_making, "exact": part_exact, "compile": part_compile}


def main():
    print(f"B{BATCH} H{HEADS}/{HEADS_KV} S{LENGTH} D{DIM} bf16, ms; torch {torch.__version__}", flush=True)
    wanted = arguments.parts.split(",")
    rows = [row for row in table() if re.search(arguments.rows, row.name)] if "rows" in wanted else []
    if arguments.jobs and rows:
        with multiprocessing.get_context("spawn").Pool(min(arguments.jobs, len(rows))) as pool:
            for said in pool.imap_unordered(compile_row, [row.name for row in rows]):
                print(said, flush=True)
    tables = []
    for part in wanted:
        try:
            tables.append((part, *PARTS[part]()))
        except Exception as error:  # noqa: BLE001: the other parts still have their turn
            print(f"  {part}: {' '.join(repr(error).split())[:300]}", flush=True)
    for part, columns, cells, notes in tables:
        if cells:
            print(f"\n{part}\n")
            table_of(columns, cells)
        for note in notes:
            print(note)
    print(f"{time.monotonic() - BEGAN:.0f} seconds in all")


if __name__ == "__main__":
    main()
