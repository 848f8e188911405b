"""Times ours beside the peers on problems drawn by a seed, so that nothing can be tuned to them.

    FMHA_LIB=libfmha_c.so python3 anyshape.py KIT --seed 7 --what forward --rows 200 --peers fa3,cudnn

KIT is the peers' kit with bench/ours.py as its ours.py. What is drawn: batch, heads, query heads a key head (1 to 16),
lengths (short, odd, long, unequal), head dimensions 32 to 256, mask, packed or not, f16 or bf16. `--what`:
    forward        ours / the best peer
    backward       the same
    deterministic  our backward with the same bits every run / without; no peer
    fp8            e4m3 with O in bf16; D 64, 96, 128, 192, 256
    decode         few tokens over caches, lengths mixed or equal, contiguous or in pages (decode_rows.py); a second
                   summary is of the rows of mixed lengths alone
`--also NAME=WORDS` times variants of ours beside it, WORDS as in variants.py (`same=deterministic`); each has its ratio
to ours and its own summary. `--inputs` draws one of the kit's kinds of inputs a row.

Kernels of later rows are compiled by `--jobs` processes while earlier rows are timed, which they bound: some four
seconds of a core to a row of backward, seven with a variant. cuDNN takes 1.5 s for a backward row's plan, FlashAttention
nothing. Calls are timed in turns, ours and the peers' each once with the L2 flushed before it, some `--milliseconds` of
each or `--calls` of them; the median counts.
Every output is right before it is timed: all outputs of a row agree in all their numbers, within twice the kit's bound,
or are held to float64 as compare.py does it; so is every `--exactly`-th row, and a row with one output.

A row that no peer takes, or we refuse, is listed with its reason and counted apart. At the end: the geometric mean of
the ratios, their least, tenth and middle, the share of rows below bounds that `--below` gives, and the `--worst` least
rows. With `$OUT` set each row is a line of $OUT/anyshape.jsonl. `--list` prints the rows and needs no GPU.

On several GPUs each process has a `--part` of the rows; `--compile` fills the kernels' cache beforehand, and
`--summary LOG...` prints the end of all their logs together.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit", nargs="?")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--what", choices=("forward", "backward", "deterministic", "fp8", "decode"), default="forward")
parser.add_argument("--rows", type=int, default=200)
parser.add_argument("--named", action="store_true", help="decode: the rows that decode_rows.py names, before those drawn")
parser.add_argument("--peers", default="fa3,cudnn", help="comma-separated; not for deterministic")
parser.add_argument("--inputs", default="normal", help="comma-separated kinds, one drawn a row")
parser.add_argument("--below", default="0.85,0.93,0.95", help="bounds whose share of rows is printed")
parser.add_argument("--least-us", type=float, default=10.0, help="shorter rows are left out of the shares and the least")
parser.add_argument("--also", action="append", default=[], metavar="NAME=WORDS", help="a variant of ours")
parser.add_argument("--calls", type=int, default=20, help="timed of each, at most; at least 5")
parser.add_argument("--milliseconds", type=float, default=15.0, help="timed of each, about")
parser.add_argument("--exactly", type=int, default=8, metavar="N", help="every N-th row is held to float64")
parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes that compile")
parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="then start no row")
parser.add_argument("--worst", type=int, default=10, metavar="N", help="least rows that are printed")
parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th row from the I-th on")
parser.add_argument("--compile", action="store_true", help="compile the rows' kernels and stop")
parser.add_argument("--list", action="store_true", help="print the rows that the seed draws and stop")
parser.add_argument("--summary", nargs="+", metavar="LOG", help="print the summary of logs and stop")
arguments = parser.parse_args()


def report(records: list) -> bool:
    """Prints the summary of rows as they are logged; whether each output of ours was right."""
    # The first list holds our time over the best peer's, the second each variant's over ours.
    ratios, lone, wrong = {}, [], []
    for record in records:
        text, results, variants = record["row"], record["results"], record["variants"]
        wrong += [(name, f"{text}: {name} {r['absent']}") for name, r in results.items() if "wrong" in r]
        timed = {name: r["ms"] for name, r in results.items() if "ms" in r}
        peers_of_row = [name for name in results if name not in variants]
        best = min((name for name in peers_of_row if name in timed), key=timed.get, default=None)
        if "ours" not in timed or (peers_of_row and best is None):
            reasons = "; ".join(f"{name}: {r['absent']}" for name, r in results.items() if "absent" in r)
            lone.append(f"{text}: {reasons}")
        for name in variants:
            held_to = best if name == "ours" else "ours"
            if name in timed and held_to in timed:
                ratio = timed[held_to] / timed[name]
                ratios.setdefault(name, []).append((ratio, timed[name] * 1e3, text, held_to))
                if name == "ours" and record.get("mixed"):
                    ratios.setdefault("ours, mixed lengths", []).append(ratios[name][-1])
    print(f"\n{len(records)} rows, {len(lone)} not compared, {len(wrong)} wrong outputs")
    for name, of_name in ratios.items():
        held_to = "ours" if name in records[0]["variants"] and name != "ours" else "the best peer"
        summary(f"{name} by {held_to}", of_name)
    for text in lone:
        print(f"not compared: {text}")
    for _, text in wrong:
        print(f"wrong: {text}")
    variants_of_all = {name for record in records for name in record["variants"]}
    return not any(name in variants_of_all for name, _ in wrong)


def summary(title: str, ratios: list):
    """Of (ratio, microseconds, row, held to) each."""
    values = sorted(ratio for ratio, *_ in ratios)
    long = sorted(r for r in ratios if r[1] > arguments.least_us)
    print(
        f"{title}: geometric mean {statistics.geometric_mean(values):.3f} of {len(values)}, least {values[0]:.3f}, "
        f"tenth {values[len(values) // 10]:.3f}, median {statistics.median(values):.3f}"
    )
    for bound in map(float, arguments.below.split(",")):
        below = sum(ratio < bound for ratio, *_ in long)
        print(f"below {bound}: {below} of {len(long)} rows of more than {arguments.least_us:.0f} us")
    for ratio, us, text, best in long[: arguments.worst]:
        print(f"  {ratio:.3f} of {best}, {us:.0f} us: {text}")


if arguments.summary:
    lines = [line for log in arguments.summary for line in Path(log).read_text().splitlines()]
    sys.exit(not report([json.loads(line) for line in lines]))
if not arguments.kit:
    parser.error("KIT is missing")
sys.path.insert(0, arguments.kit)
from peers import Workload  # noqa: E402

DECODE = arguments.what == "decode"
if arguments.named and not DECODE:
    parser.error("--named rows are decode's")
if DECODE:
    import decode_rows  # noqa: E402

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
ROWS = [
    (decode_rows.drawn(draw) if DECODE else problem(draw, arguments.what), draw.choice(arguments.inputs.split(",")))
    for _ in range(arguments.rows)
]
if arguments.named:
    ROWS[:0] = [(w, "normal") for w in decode_rows.named()]
PART, PARTS = map(int, arguments.part.split("/"))
ROWS = ROWS[PART::PARTS]


def described(w) -> str:
    lengths = f" of {min(w.lengths)} to {max(w.lengths)}" if w.lengths and not DECODE else ""
    return f"{w}{lengths}"


if arguments.list:
    for w, kind in ROWS:
        print(described(w), kind, f"{w.flops:.1e} FLOP")
    sys.exit()

import compare  # noqa: E402
import ours  # noqa: E402
import peers  # noqa: E402
from peers import torch  # noqa: E402

LIBRARY = os.environ.get("FMHA_LIB", "")
VARIANTS = {"ours": []}
if arguments.what == "deterministic":
    VARIANTS["deterministic"] = ["deterministic"]
for also in arguments.also:
    name, _, words = also.partition("=")
    VARIANTS[name] = words.split("+") if words else []
PEERS = [] if arguments.what == "deterministic" else [name for name in arguments.peers.split(",") if name]
banded = compare.visible


def visible(w: Workload, rows, seqlen_q, seqlen_k):
    """The kit's, which means bands that reach from end to end of equal lengths, but for unmasked calls of any lengths."""
    if w.mask == "0":
        return torch.ones(len(rows), seqlen_k, dtype=torch.bool, device=rows.device)
    return banded(w, rows, seqlen_q, seqlen_k)


compare.visible = visible


def maker(name, w, inputs):
    if name not in VARIANTS:
        return (decode_rows if DECODE else peers).make(name, w, inputs)
    words = VARIANTS[name]
    libraries = [word.removeprefix("lib=") for word in words if word.startswith("lib=")]
    library = libraries[0] if libraries else LIBRARY
    if os.environ.get("FMHA_LIB") != library:
        os.environ["FMHA_LIB"] = library
        ours._library.cache_clear()
    os.environ["OURS_TILE"] = ",".join(word for word in words if "=" in word and not word.startswith("lib="))
    for word in ("deterministic", "batch_invariant"):
        os.environ[f"OURS_{word.upper()}"] = "1" if word in words else ""
    return (decode_rows.make_ours if DECODE else ours.make)(w, *inputs)


def compiled(at: int) -> int:
    """In a process of its own: ours and its variants of a row are planned, for tensors without memory."""
    w, _ = ROWS[at]

    def empty(seqlen, heads, head_dim):
        rows = (sum(w.lengths),) if w.lengths else (w.batch, seqlen)
        return torch.empty(*rows, heads, head_dim, device="meta", dtype=peers.torch_dtype(w))

    inputs = decode_rows.make_inputs(w, "meta") if DECODE else [
        empty(w.seqlen_q, w.num_heads_q, w.head_dim_qk),
        empty(w.seqlen_k, w.num_heads_kv, w.head_dim_qk),
        empty(w.seqlen_k, w.num_heads_kv, w.head_dim_v),
        *[empty(w.seqlen_q, w.num_heads_q, w.head_dim_v)] * w.backward,
    ]
    for name in VARIANTS:
        try:
            maker(name, w, inputs)
        except Exception:  # the row says so when its turn comes
            pass
    return at


def backward_error(w: Workload, q, k, v, dout, outputs: dict, block=2048) -> dict:
    """As compare.backward_error, but that a row of dQ has the scale of what cancels in it too.

    dQ is a difference of dP and delta = dO . O, where O was rounded to the inputs' type before: of a row that sees few
    keys, and nearly one alone, nothing else may be left. Of long causal sequences one head in six has such a row
    beyond the kit's bound, by the rounding of O alone.
    """
    index, kv_head = len(w.segments) // 2, w.num_heads_kv - 1
    group = w.num_heads_q // w.num_heads_kv
    heads = slice(kv_head * group, (kv_head + 1) * group)
    seqlen_q, seqlen_k = w.segments[index]
    k1, v1 = (compare.sequence(w, x, index)[:, kv_head].double() for x in (k, v))
    q1, dout1 = (compare.sequence(w, x, index)[:, heads].double() for x in (q, dout))
    dq, dk, dv = torch.empty_like(q1), torch.zeros_like(k1), torch.zeros_like(v1)
    cancelled = torch.empty(q1.shape[:-1], device=q1.device, dtype=q1.dtype)
    for head in range(group):
        for row in torch.arange(seqlen_q, device=q.device).split(block):
            hidden = ~visible(w, row, seqlen_q, seqlen_k)
            p = torch.softmax((q1[row, head] @ k1.T * w.softmax_scale).masked_fill_(hidden, -math.inf), -1)
            p = p.nan_to_num_(0.0)  # a row that sees no key
            terms = dout1[row, head] * (p @ v1)
            ds = p * (dout1[row, head] @ v1.T - terms.sum(-1, keepdim=True)) * w.softmax_scale
            dq[row, head] = ds @ k1
            cancelled[row, head] = terms.norm(dim=-1) * (p @ k1).norm(dim=-1) * w.softmax_scale
            dk += ds.T @ q1[row, head]
            dv += p.T @ dout1[row, head]

    def error_of(out):
        norm = dq.norm(dim=-1)
        of_dq = (compare.sequence(w, out[0], index)[:, heads].double() - dq).norm(dim=-1) / (
            norm + norm.mean() + cancelled
        )
        of_keys = (
            compare.relative_error(compare.sequence(w, x, index)[:, kv_head], r) for x, r in zip(out[1:], (dk, dv))
        )
        worst = max(of_dq.max().item(), *of_keys)
        return worst if math.isfinite(worst) else math.inf

    return {name: error_of(out) for name, out in outputs.items()}


def wrong_outputs(w: Workload, inputs, outputs: dict, exactly: bool) -> dict:
    """{name: relative error} of outputs beyond the kit's bound."""
    if DECODE:
        errors = decode_rows.errors(w, *inputs, outputs)
        return {name: error for name, error in errors.items() if not error < decode_rows.tolerance(w, name)}
    tensors = {name: out if isinstance(out, tuple) else (out,) for name, out in outputs.items()}
    first, *others = tensors
    if others and not exactly:
        expected = [x.double() for x in tensors[first]]
        bound = 2 * compare.tolerance(w)
        agree = (
            compare.relative_error(x, e) < bound for name in others for x, e in zip(tensors[name], expected)
        )
        if all(agree):
            return {}
    errors = (backward_error if w.backward else compare.forward_error)(w, *inputs, outputs)
    return {name: error for name, error in errors.items() if not error < compare.tolerance(w)}


def in_turns(fns: dict) -> dict:
    """{name: milliseconds}, the median of calls in turns."""

    def once():
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in fns}
        for name, (begin, end) in events.items():
            # The calls run long enough to be queued before the device reaches them.
            for _ in range(4):
                compare._flush_l2()
            begin.record()
            fns[name]()
            end.record()
        return events

    def elapsed(events):
        torch.cuda.synchronize()
        return {name: begin.elapsed_time(end) for name, (begin, end) in events.items()}

    once()
    slowest = max(elapsed(once()).values())
    calls = max(5, min(arguments.calls, int(arguments.milliseconds / slowest)))
    timed = [elapsed_of for elapsed_of in map(elapsed, [once() for _ in range(calls)])]
    return {name: statistics.median(times[name] for times in timed) for name in fns}


SPENT = dict.fromkeys(("compiler", "inputs", *VARIANTS, *PEERS, "checks", "turns"), 0.0)


class Spent:
    """Adds the seconds of a block to SPENT."""

    def __init__(self, on):
        self.on = on

    def __enter__(self):
        self.began = time.monotonic()

    def __exit__(self, *_):
        SPENT[self.on] += time.monotonic() - self.began


def row(w: Workload, kind: str, exactly: bool):
    """{name: {"ms"} or {"absent"}}: right outputs alone are timed."""
    with Spent("inputs"):
        inputs = (decode_rows if DECODE else peers).make_inputs(w)
        peers.INPUTS[kind](w, *inputs[:3])
    results, fns, outputs = {}, {}, {}
    for name in (*VARIANTS, *PEERS):
        try:
            with Spent(name):
                fns[name] = maker(name, w, inputs)
                out = fns[name]()
                torch.cuda.synchronize()
            scale = getattr(fns[name], "scale_o", 1.0)
            outputs[name] = out if w.backward else out.float() / scale
        except Exception as error:  # a refusal, or whatever a peer throws
            fns.pop(name, None)
            results[name] = dict(absent=" ".join(str(error).split())[:160])
    with Spent("checks"):
        errors = wrong_outputs(w, inputs, outputs, exactly) if outputs else {}
    del outputs
    for name, error in errors.items():
        results[name] = dict(absent=f"wrong: relative error {error:.1e}", wrong=True)
        del fns[name]
    with Spent("turns"):
        results.update((name, dict(ms=ms)) for name, ms in (in_turns(fns) if fns else {}).items())
    return results


# The pool starts before CUDA is initialised, since a forked process can not use an initialised CUDA.
pool = multiprocessing.get_context("fork").Pool(arguments.jobs) if arguments.jobs > 0 else None
if arguments.compile:
    began = time.monotonic()
    done = len(list(pool.imap_unordered(compiled, range(len(ROWS)))) if pool else [])
    sys.exit(print(f"{arguments.what}: kernels of {done} rows in {time.monotonic() - began:.0f} seconds"))
planned = pool.imap(compiled, range(len(ROWS))) if pool else iter(range(len(ROWS)))
log = open(Path(os.environ["OUT"]) / "anyshape.jsonl", "a") if os.environ.get("OUT") else None
started, records = time.monotonic(), []
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.what}, seed {arguments.seed}", flush=True)
for at, (w, kind) in enumerate(ROWS):
    with Spent("compiler"):
        next(planned)
    if time.monotonic() - started > arguments.budget:
        break
    text = f"{described(w)} {kind}"
    results = row(w, kind, at % arguments.exactly == 0)
    records.append(
        dict(row=text, what=arguments.what, seed=arguments.seed, variants=list(VARIANTS), results=results)
    )
    if DECODE and w.mixed:
        records[-1]["mixed"] = True
    if log:
        log.write(json.dumps(records[-1]) + "\n")
        log.flush()
    cells = "  ".join(f"{name} {r['ms'] * 1e3:.1f}" for name, r in results.items() if "ms" in r)
    print(f"{text:64} {cells} us", flush=True)

seconds = ", ".join(f"{name} {spent:.0f}" for name, spent in SPENT.items())
print(f"{len(ROWS) - len(records)} rows out of budget; {time.monotonic() - started:.0f} seconds: {seconds}")
is_right = report(records) if records else True
if pool:
    pool.terminate()
sys.exit(not is_right)
