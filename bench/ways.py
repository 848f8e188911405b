"""Times all ways in which few queries can walk their keys, on calls drawn by a seed; rows of `split/measured.tsv`.

    python3 ways.py KIT --seed N --rows 150 --calls > calls.tsv                                   # no GPU needed
    cargo run --release -p fmha-kernels-cuda --example ways < calls.tsv > ways.tsv
    FMHA_LIB=libfmha_c.so python3 ways.py KIT --seed N --rows 150 --ways ways.tsv --run NAME      # on an H200
    cargo run --release -p fmha-kernels-cuda --example rates                                      # fits the price

Calls are decode_rows.py's, in 16 bits without windows, sinks and soft-caps. Half of those of equal lengths tell the
host so. Every output is held to float64, ways are timed in turns with the L2 flushed before each, the median counts.
"""

import argparse
import collections
import dataclasses
import multiprocessing
import os
import random
import statistics
import sys
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--rows", type=int, default=150)
parser.add_argument("--grid", action="store_true", help="in place of drawn calls: 32/8 heads over 512 to 131072 keys")
parser.add_argument("--calls", action="store_true", help="print the calls and stop")
parser.add_argument("--ways", help="what the example `ways` made of the calls")
parser.add_argument("--run", default="run", help="the name of this run, in the first column")
parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="then start no row")
arguments = parser.parse_args()
sys.path.insert(0, arguments.kit)
import decode_rows  # noqa: E402
from decode_rows import Decode  # noqa: E402


def rows() -> list[tuple[Decode, bool]]:
    """Calls, and whether the host knows that all lengths are equal."""
    if arguments.grid:
        sizes = [(b, n) for b in (1, 4, 16, 64, 128) for n in (512, 1024, 2048, 4096, 8192, 32768, 131072)]
        fitting = [(b, n) for b, n in sizes if b * n <= 1 << 22]
        return [
            (Decode(1, 32, 8, 128, (n,) * b, page_size=page_size), True) for b, n in fitting for page_size in (0, 64)
        ]
    draw = random.Random(f"{arguments.seed} ways")
    made = [dataclasses.replace(w, cache="16 bits") for w in decode_rows.named()]
    while len(made) < arguments.rows:
        w = decode_rows.drawn(draw)
        if w.head_dim in (64, 128, 256) or draw.random() < 0.3:
            made.append(dataclasses.replace(w, cache="16 bits", dtype="bf16", window=None, softcap=None, sink=False))
    return [(w, not w.mixed and draw.random() < 0.5) for w in made]


def columns(w: Decode, is_known: bool) -> tuple[str, ...]:
    lengths = str(w.longest) if is_known else f"{min(w.lengths)}..{w.longest}"
    heads, page = f"{w.num_heads_q}/{w.num_heads_kv}", str(w.page_size or "-")
    return str(w.batch), heads, str(w.tokens), lengths, str(w.head_dim), page


ROWS = rows()
if arguments.calls:
    for w, is_known in ROWS:
        print("\t".join(columns(w, is_known)))
    sys.exit()

import compare  # noqa: E402
from peers import torch  # noqa: E402

WAYS = collections.defaultdict(dict)
for line in open(arguments.ways):
    *call, kernel, keys, words, _ = line.rstrip("\n").split("\t")
    WAYS[tuple(call)][kernel, keys] = words


def made(w: Decode, is_known: bool, inputs, way):
    kernel, _ = way
    os.environ.update(OURS_KERNEL=kernel, OURS_TILE=WAYS[columns(w, is_known)][way])
    *tensors, used, sink = inputs
    return decode_rows.make_ours(w, *tensors, None if is_known else used, sink)


def compiled(at: int) -> int:
    w, is_known = ROWS[at]
    inputs = decode_rows.make_inputs(w, "meta")
    for way in WAYS[columns(w, is_known)]:
        try:
            made(w, is_known, inputs, way)
        except Exception:  # the row says so when its turn comes
            pass
    return at


pool = multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 2))
planned = pool.imap(compiled, range(len(ROWS)))
started = time.monotonic()
for w, is_known in ROWS:
    next(planned)
    if time.monotonic() - started > arguments.budget:
        break
    inputs = decode_rows.make_inputs(w)
    fns, outputs = {}, {}
    for way in WAYS[columns(w, is_known)]:
        try:
            fns[way] = made(w, is_known, inputs, way)
            outputs[way] = fns[way]().clone()
            torch.cuda.synchronize()
        except Exception as error:  # a tile that a kernel refuses
            fns.pop(way, None)
            print("#", w, *way, " ".join(str(error).split())[:160], flush=True)
    for way, error in decode_rows.errors(w, *inputs, outputs).items():
        if not error < compare.TOLERANCE[w.dtype]:
            print("#", w, *way, f"wrong: relative error {error:.1e}", flush=True)
            del fns[way]
    del outputs
    times = collections.defaultdict(list)
    for _ in range(8):
        events = {}
        for way, fn in fns.items():
            events[way] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for _ in range(4):
                compare._flush_l2()
            events[way][0].record()
            fn()
            events[way][1].record()
        torch.cuda.synchronize()
        for way, (begin, end) in events.items():
            times[way].append(begin.elapsed_time(end) * 1e3)
    *first, head_dim, page = columns(w, is_known)
    mean = str(round(sum(w.lengths) / w.batch))
    for (kernel, keys), micros in times.items():
        median = f"{statistics.median(micros[1:]):.1f}"
        print("\t".join((arguments.run, "H200", *first, mean, head_dim, page, kernel, keys, median)), flush=True)
pool.terminate()
