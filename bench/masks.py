"""Times masks and scores beside torch's compiled FlexAttention: `PYTHONPATH=bindings/python python3 bench/masks.py KIT`.

KIT is the peers' kit (its timing serves here; `none`: this file's own). Rows are masks and scores that users write: each
goes as functions through `fmha.flex` and, where ranges of keys say it, as data through `fmha.attention(mask=Intervals)`.
Outputs come first: O of every way is held to float64 on some rows of some heads, dQ, dK and dV (and the gradient of
what a score captures) to those of the first way alone; WRONG stands behind a figure that is beyond the bound. Then the
ways are timed in turns, forward
and backward, in milliseconds; the ratio is torch's time to the better of ours, and its geometric mean ends the table.
torch's mask is built before, and so is not timed, nor is the mask object's; the other ways of ours make their lists in
each call.

    --rows REGEX      some of the rows
    --backward 0      forward alone
    --sizes B,H,S,D   of other sizes than 2,16,8192,128; --heads-kv N for grouped heads
    --rounds N        rounds of the turns (7), the median counts
    --jobs N          processes that first compile all rows into the caches on disk, theirs and ours (0: none)
    --flash           FlashAttention 4 beneath torch's (kernel_options BACKEND=FLASH), where torch has it
    --torch 0         ours alone, as where torch compiles nothing
"""

import argparse
import math
import multiprocessing
import os
import re
import sys
import time

import torch
import torch._functorch.config
from torch.nn.attention import flex_attention as torchs

import fmha
import fmha.flex

# Backward runs again and again over what forward kept, which torch would else overwrite.
torch._functorch.config.donated_buffer = False

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("--rows", default=".")
parser.add_argument("--backward", type=int, default=1)
parser.add_argument("--sizes", default="2,16,8192,128")
parser.add_argument("--heads-kv", type=int, default=0)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
parser.add_argument("--flash", action="store_true")
parser.add_argument("--torch", type=int, default=1)
parser.add_argument("--device", default="cuda")
arguments = parser.parse_args()
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
    # Answers of equal length behind a question that all of them see.
    answer = (LENGTH - shared) // 4
    in_answer = ((i - shared).clamp(min=0)) // answer
    first_of_answer = torch.where(i < shared, 0, shared + in_answer * answer)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], device=DEVICE, requires_grad=True)
    in_block = i // block * block
    # Sequences in noisy and clean halves, as block diffusion is trained: own noisy block, and clean blocks before it.
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


def run(row):
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
    # Gradients of every way are held to those of the first: a float64 backward of whole heads does not fit.
    names = list(gradients)
    for name in names[1:]:
        for a, b in zip(gradients[names[0]], gradients[name]):
            wrong[name] |= relative_error(b.float(), a.double()) > 2e-2
    del gradients
    cells = []
    ratios = {}
    for kind, calls in (("forward", forward), ("backward", backward)):
        times = {name: [] for name in calls}
        for call in calls.values():
            event_times(call, 2, True)
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                times[name] += event_times(call, 1, True)
        median = {name: sorted(t)[len(t) // 2] for name, t in times.items()}
        for name, t in median.items():
            cells.append(f"{kind} {name} {t:.3f}{' WRONG' if wrong[name] else ''}")
        ours = [t for name, t in median.items() if name in ("functions", "intervals", "object") and not wrong[name]]
        if ours and "torch" in median:
            ratios[kind] = median["torch"] / min(ours)
            cells.append(f"{kind} ratio {ratios[kind]:.2f}")
    print(f"{row.name}: " + "  ".join(cells), flush=True)
    return ratios


def main():
    print(f"B{BATCH} H{HEADS}/{HEADS_KV} S{LENGTH} D{DIM} bf16, ms; torch {torch.__version__}", flush=True)
    all_ratios = {}
    rows = [row for row in table() if re.search(arguments.rows, row.name)]
    if arguments.jobs:
        with multiprocessing.get_context("spawn").Pool(min(arguments.jobs, len(rows)) or 1) as pool:
            for said in pool.imap_unordered(compile_row, [row.name for row in rows]):
                print(said, flush=True)
    for row in rows:
        torch.compiler.reset()
        for kind, ratio in run(row).items():
            all_ratios.setdefault(kind, []).append(ratio)
    for kind, ratios in all_ratios.items():
        mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
        print(f"{kind}: geometric mean {mean:.2f}, least {min(ratios):.2f}, of {len(ratios)} rows")


if __name__ == "__main__":
    main()
