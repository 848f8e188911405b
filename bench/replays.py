"""One graph of a decoding call, replayed over lengths that change: `FMHA_LIB=libfmha_c.so python3 replays.py KIT`, on a GPU.

A call is captured once. Before each replay every sequence's length is drawn anew, 0 among them, and written where the call
reads it, and the output is filled with NaN. After it the rows of some sequences, the longest and the shortest among
them, are held to float64, rows without a key to 0, and all others to be finite. `--replays` of each of CALLS; the exit
status is 1 if any was wrong.
"""

import argparse
import dataclasses
import math
import random
import sys

import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("--replays", type=int, default=500)
parser.add_argument("--first", type=int, default=None, help="so many of CALLS, from the first")
parser.add_argument("--seed", type=int, default=1)
arguments = parser.parse_args()
sys.path.insert(0, arguments.kit)
import decode_rows  # noqa: E402
from decode_rows import Decode  # noqa: E402

# Calls to capture. Each is captured with the longest of all lengths for every sequence.
CALLS = (
    Decode(1, 28, 4, 128, (9000,) * 16),
    Decode(1, 28, 4, 128, (9000,) * 16, page_size=16),
    Decode(3, 40, 8, 128, (5000,) * 9, page_size=64),
    Decode(1, 24, 3, 64, (20_000,) * 5, dtype="fp16"),
    Decode(1, 32, 8, 128, (4096,) * 70, cache="e4m3", page_size=64),
    Decode(5, 36, 3, 128, (3000,) * 40, window=700),
    Decode(1, 32, 8, 128, (800,) * 12, page_size=16),
)


def lengths_of(w: Decode, draw: random.Random) -> list[int]:
    """Even in the logarithm, some 0; now and then all of one kind."""
    kind = draw.random()
    if kind < 0.03:
        return [0] * w.batch
    if kind < 0.06:
        return [w.longest] * w.batch
    top = math.log(w.longest + 1)
    drawn = [int(math.exp(draw.uniform(0, top))) - (draw.random() < 0.1) for _ in range(w.batch)]
    return [0 if draw.random() < 0.15 else min(n, w.longest) for n in drawn]


def replayed(w: Decode, draw: random.Random) -> int:
    """Replays that were wrong."""
    inputs = decode_rows.make_inputs(w)
    used, wrong = inputs[4], 0
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = decode_rows.make_ours(w, *inputs)
        o = run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    for at in range(arguments.replays):
        lengths = lengths_of(w, draw)
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        o.fill_(math.nan)
        graph.replay()
        now = dataclasses.replace(w, lengths=tuple(lengths))
        error = decode_rows.errors(now, *inputs, {"ours": o}, pairs=6)["ours"] if any(lengths) else 0.0
        empty = torch.tensor([n == 0 for n in lengths], device="cuda")
        bad = not error < decode_rows.tolerance(w, "ours") or not bool(o.isfinite().all()) or bool(o[empty].any())
        if bad and wrong < 3:
            print(f"wrong: replay {at}, relative error {error:.1e}, lengths {lengths}")
        wrong += bad
    return wrong


def main():
    draw = random.Random(arguments.seed)
    wrong = 0
    for w in CALLS[: arguments.first]:
        of_call = replayed(w, draw)
        print(f"{w}: {arguments.replays - of_call} of {arguments.replays} replays right", flush=True)
        wrong += of_call
    sys.exit(wrong > 0)


main()
