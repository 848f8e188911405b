"""Times ours beside the peers on problems drawn by a seed, so that nothing can be tuned to them.

    FMHA_LIB=libfmha_c.so python3 anyshape.py KIT --seed 7 --what forward --rows 200 --peers fa3,cudnn

KIT is the peers' kit with bench/ours.py as its ours.py. What is drawn: batch, heads, query heads a key head (1 to 16),
lengths (short, odd, long, unequal), head dimensions 32 to 256, mask, packed or not, f16 or bf16. `--what`:
    forward        ours / the best peer
    backward       the same
    deterministic  our backward with the same bits every run / without; no peer
    fp8            e4m3 with O in bf16; D 64, 96, 128, 192, 256
`--inputs` draws one of the kit's kinds of inputs a row. Every output is held to float64 first, as compare.py does.
A row that no peer takes, or we refuse, is listed with its reason and counted apart. At the end: the geometric mean of the
ratios, their least, tenth and middle, the share of rows below bounds that `--below` gives, and the ten least rows. With
`$OUT` set each row is a line of $OUT/anyshape.jsonl. `--list` prints the rows and needs no GPU.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--what", choices=("forward", "backward", "deterministic", "fp8"), default="forward")
parser.add_argument("--rows", type=int, default=200)
parser.add_argument("--peers", default="fa3,cudnn", help="comma-separated; not for deterministic")
parser.add_argument("--inputs", default="normal", help="comma-separated kinds, one drawn a row")
parser.add_argument("--below", default="0.85,0.93,0.95", help="bounds whose share of rows is printed")
parser.add_argument("--least-us", type=float, default=10.0, help="shorter rows are left out of the shares and the least")
parser.add_argument("--rounds", type=int, default=1, help="of bursts, peers in turns")
parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="then start no row")
parser.add_argument("--list", action="store_true", help="print the rows that the seed draws and stop")
arguments = parser.parse_args()
sys.path.insert(0, arguments.kit)
from peers import Workload  # noqa: E402

MOST_BYTES = 4 << 30  # Q, K, V and O
FLOPS = (2e9, 3e12)  # of one call: from some microseconds to some milliseconds


def length(draw: random.Random, least: int, most: int) -> int:
    """Even in the logarithm; half of them odd lengths, half multiples of 64."""
    n = round(math.exp(draw.uniform(math.log(least), math.log(most))))
    return max(64, n // 64 * 64) if draw.random() < 0.5 and n >= 64 else n


def head_dim(draw: random.Random, what: str) -> int:
    if what == "fp8":
        return draw.choice((64, 96, 128, 192, 256))
    return draw.choice((64, 128, 128, 128, 256, draw.randrange(32, 257, 8)))


def problem(draw: random.Random, what: str) -> Workload:
    """One call within FLOPS and MOST_BYTES."""
    backward = what in ("backward", "deterministic")
    while True:
        heads_kv = draw.choice((1, 2, 3, 4, 8, 8, 16, 24, 32))
        group = draw.choice((1, 1, 1, 2, 3, 4, 5, 8, 16))
        seqlen_q = length(draw, 64, 32768)
        unequal = draw.random() < 0.2
        w = Workload(
            batch=draw.choice((1, 1, 2, 3, 4, 8, 16, 32, 64)),
            seqlen_q=seqlen_q,
            seqlen_k=length(draw, 64, 32768) if unequal else seqlen_q,
            num_heads_q=heads_kv * group,
            num_heads_kv=heads_kv,
            head_dim_qk=(dim := head_dim(draw, what)),
            head_dim_v=dim,
            dtype="e4m3" if what == "fp8" else draw.choice(("bf16", "bf16", "fp16")),
            causal=draw.random() < 0.6,
            backward=backward,
        )
        if draw.random() < 0.1 and what != "fp8":
            w = dataclasses.replace(w, causal=False, window=(length(draw, 64, 2048), 0))
        if not unequal and w.batch > 1 and draw.random() < 0.5:
            lengths = tuple(length(draw, max(1, seqlen_q // 8), seqlen_q) for _ in range(w.batch))
            w = dataclasses.replace(w, lengths=lengths, seqlen_q=max(lengths), seqlen_k=max(lengths))
        if w.causal and w.seqlen_q > w.seqlen_k:  # as caches are: the last queries of longer sequences
            w = dataclasses.replace(w, seqlen_q=w.seqlen_k, seqlen_k=w.seqlen_q)
        if w.num_heads_q <= 64 and w.bytes <= MOST_BYTES and FLOPS[0] <= w.flops <= FLOPS[1]:
            return w


draw = random.Random(f"{arguments.seed} {arguments.what}")
ROWS = [(problem(draw, arguments.what), draw.choice(arguments.inputs.split(","))) for _ in range(arguments.rows)]


def described(w: Workload) -> str:
    lengths = f" of {min(w.lengths)} to {max(w.lengths)}" if w.lengths else ""
    return f"{w}{lengths}"


if arguments.list:
    for w, kind in ROWS:
        print(described(w), kind, f"{w.flops:.1e} FLOP")
    sys.exit()

import compare  # noqa: E402
import ours  # noqa: E402
import peers  # noqa: E402
from peers import torch  # noqa: E402

DETERMINISTIC = "ours, deterministic"
banded = compare.visible


def visible(w: Workload, rows, seqlen_q, seqlen_k):
    """The kit's, which means bands that reach from end to end of equal lengths, but for unmasked calls of any lengths."""
    if w.mask == "0":
        return torch.ones(len(rows), seqlen_k, dtype=torch.bool, device=rows.device)
    return banded(w, rows, seqlen_q, seqlen_k)


compare.visible = visible


def maker(name, w, inputs):
    if name in ("ours", DETERMINISTIC):
        os.environ["OURS_DETERMINISTIC"] = "1" if name == DETERMINISTIC else ""
        return ours.make(w, *inputs)
    return peers.make(name, w, inputs)


def row(w: Workload, kind: str, names):
    """{peer: {"ms", "error"} or {"absent"}}: right outputs alone are timed."""
    inputs = peers.make_inputs(w)
    peers.INPUTS[kind](w, *inputs[:3])
    results, fns, outputs = {}, {}, {}
    for name in names:
        try:
            fns[name] = maker(name, w, inputs)
            out = fns[name]()
            torch.cuda.synchronize()
            scale = getattr(fns[name], "scale_o", 1.0)
            outputs[name] = out if w.backward else out.float() / scale
        except Exception as error:  # a refusal, or whatever a peer throws
            fns.pop(name, None)
            results[name] = dict(absent=" ".join(str(error).split())[:160])
    errors = (compare.backward_error if w.backward else compare.forward_error)(w, *inputs, outputs)
    del outputs
    for name, error in errors.items():
        if not error < compare.tolerance(w):
            results[name] = dict(absent=f"wrong: relative error {error:.1e}", wrong=True)
            del fns[name]
    for name, timing in compare.burst(fns, w, arguments.rounds).items():
        results[name] = dict(ms=timing["ms"], error=errors[name])
    return results


names = ["ours", DETERMINISTIC] if arguments.what == "deterministic" else ["ours", *arguments.peers.split(",")]
log = open(Path(os.environ["OUT"]) / "anyshape.jsonl", "a") if os.environ.get("OUT") else None
started, ratios, lone, wrong, not_run = time.monotonic(), [], [], [], 0
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.what}, seed {arguments.seed}", flush=True)
for at, (w, kind) in enumerate(ROWS):
    if time.monotonic() - started > arguments.budget:
        not_run = len(ROWS) - at
        break
    results = row(w, kind, names)
    text = f"{described(w)} {kind}"
    if log:
        log.write(json.dumps(dict(row=text, what=arguments.what, seed=arguments.seed, results=results)) + "\n")
        log.flush()
    wrong += [f"{text}: {name} {r['absent']}" for name, r in results.items() if "wrong" in r]
    # The time that counts as ours, and those that it is held to.
    mine, others = (DETERMINISTIC, ["ours"]) if arguments.what == "deterministic" else ("ours", names[1:])
    timed = {name: r["ms"] for name, r in results.items() if "ms" in r}
    best = min((name for name in others if name in timed), key=timed.get, default=None)
    if mine not in timed or best is None:
        reasons = "; ".join(f"{name}: {r['absent']}" for name, r in results.items() if "absent" in r)
        lone.append(f"{text}: {reasons}")
        continue
    ratio = timed[best] / timed[mine]
    ratios.append((ratio, timed[mine] * 1e3, text, best))
    cells = "  ".join(f"{name} {compare.speed(w, ms):.0f}" for name, ms in timed.items())
    print(f"{text:64} {cells}  {ratio:.3f} ({timed[mine] * 1e3:.0f} us)", flush=True)

print(f"\n{len(ratios)} rows compared, {len(lone)} not, {len(wrong)} wrong outputs, {not_run} out of budget")
if ratios:
    values = sorted(ratio for ratio, *_ in ratios)
    long = sorted(r for r in ratios if r[1] > arguments.least_us)
    tenth = values[len(values) // 10]
    print(
        f"ratio: geometric mean {statistics.geometric_mean(values):.3f}, least {values[0]:.3f}, tenth {tenth:.3f}, "
        f"median {statistics.median(values):.3f}"
    )
    for bound in map(float, arguments.below.split(",")):
        below = sum(ratio < bound for ratio, *_ in long)
        print(f"below {bound}: {below} of {len(long)} rows of more than {arguments.least_us:.0f} us")
    for ratio, us, text, best in long[:10]:
        print(f"  {ratio:.3f} of {best}, {us:.0f} us: {text}")
for title, texts in (("not compared", lone), ("wrong", wrong)):
    for text in texts:
        print(f"{title}: {text}")
sys.exit(any(": ours" in text for text in wrong))
