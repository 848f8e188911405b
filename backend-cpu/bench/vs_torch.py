#!/usr/bin/env python3
"""The CPU backend beside PyTorch's CPU scaled_dot_product_attention, in one run, taking turns.

    cargo build --release -p fmha-cpu --example cpu_bench
    python backend-cpu/bench/vs_torch.py --out docs/measured/cpu-NAME.md

Batch 1, 8 heads, head dimension 128, b·h·s·d in memory, both sides with the same number of threads.
Each row takes turns (ours, PyTorch, ours, ...) so that what else the machine does falls on both. A
turn is a pause, a call that is not timed, and one that is: PyTorch's worker threads go on spinning for
some milliseconds after a call (OpenMP waits actively), and without the pause they did so on the cores
of our next call: 3.4 ms of processor time in a call that takes 7 ms. The untimed call gives both sides
the state of a program that calls attention again and again. A row gives each side's best GFLOP/s over
its turns and the median over the turns of PyTorch's time divided by ours. Causal rows count the visible
half of the work. Backward counts five products.

With one thread the times are processor time, which other programs do not lengthen (though they do
take their share of caches and clocks); with more they are wall-clock times, and the machine should
be otherwise idle: the load average at the end is in the table's text.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

HEADS, DIM = 8, 128
# Pause that is longer than PyTorch's threads spin.
PAUSE_SECONDS = 0.03


class Ours:
    """The bench example, one repetition a line of its standard input."""

    def __init__(self, binary, what, seqlen, dtype, mask, turns, threads):
        command = [binary, what, str(seqlen), dtype, mask, str(turns)]
        env = {**os.environ, "FMHA_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
        self.name = self.process.stderr.readline().strip()
        self.column = 1 if threads == 1 else 0

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline().split()[self.column])

    def close(self):
        # The rest of the output is read here: communicate() would skip what readline() has buffered, often its end.
        self.process.stdin.close()
        tail = self.process.stdout.read().split()
        self.process.wait()
        return {tail[i]: int(tail[i + 1]) for i in range(0, len(tail) - 1, 2)}


def steady(turn):
    """The time of the second call after a pause."""
    time.sleep(PAUSE_SECONDS)
    turn()
    return turn()


def torch_turn(what, seqlen, dtype, mask, clock):
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    q, k, v, dout = (torch.randn(1, HEADS, seqlen, DIM, dtype=dtype) for _ in range(4))
    causal = mask == "causal"
    if what == "bwd":
        for x in (q, k, v):
            x.requires_grad_()
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        run = lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)
    else:
        run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def turn():
        start = clock()
        run()
        return clock() - start

    turn()
    return turn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/examples/cpu_bench")
    parser.add_argument("--out", help="the Markdown file to write; standard output if not given")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a row may take")
    parser.add_argument("--least", type=int, default=512, help="the shortest sequence")
    parser.add_argument("--most", type=int, default=8192, help="the longest sequence")
    parser.add_argument("--rows", default="fwd-f32,fwd-bf16,bwd-f32", help="which rows, by pass and type")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter

    rows, name = [], ""
    lengths = [s for s in (512, 1024, 2048, 4096, 8192) if args.least <= s <= args.most]
    kinds = [kind.split("-") for kind in args.rows.split(",")]
    cases = [(what, s, dtype, mask) for what, dtype in kinds for mask in ("full", "causal") for s in lengths]
    for what, seqlen, dtype, mask in cases:
        theirs = torch_turn(what, seqlen, dtype, mask, clock)
        once = theirs()
        turns = max(3, min(40, int(args.seconds / (4 * once + 2 * PAUSE_SECONDS))))
        ours = Ours(args.binary, what, seqlen, dtype, mask, 2 * turns, args.threads)
        name = ours.name
        pairs = [(steady(ours.turn), steady(theirs)) for _ in range(turns)]
        ours.close()
        flops = 4 * HEADS * seqlen**2 * DIM * (2.5 if what == "bwd" else 1)
        if mask == "causal":
            flops *= (seqlen + 1) / (2 * seqlen)
        best = [flops / min(p[side] for p in pairs) / 1e9 for side in (0, 1)]
        ratio = statistics.median(p[1] / p[0] for p in pairs)
        rows.append(f"| {what} | {dtype} | {mask} | {seqlen} | {turns} | {best[0]:.1f} | {best[1]:.1f} | {ratio:.2f} |")
        print(rows[-1], file=sys.stderr, flush=True)

    memory = []
    if not args.no_memory:
        for what, dtype in (("fwd", "f32"), ("fwd", "bf16"), ("bwd", "f32")):
            ours = Ours(args.binary, what, 16384, dtype, "causal", 1, args.threads)
            ours.turn()
            sizes = ours.close()
            peak = sizes.get("peak")  # not every kernel tells
            words = f"{peak} | {peak / sizes['tensors']:.3f}" if peak else "absent | absent"
            memory.append(f"| {what} | {dtype} | {sizes['tensors']} | {words} |")
            print(memory[-1], file=sys.stderr, flush=True)

    capability = torch.backends.cpu.get_cpu_capability()
    clock_name = "processor time" if args.threads == 1 else "wall-clock time"
    text = [
        f"# {name}, beside PyTorch {torch.__version__}",
        "",
        f"Written by `python backend-cpu/bench/vs_torch.py --threads {args.threads} "
        f"--seconds {args.seconds:g} --least {args.least} --most {args.most}"
        f"{'' if args.rows == parser.get_default('rows') else f' --rows {args.rows}'}"
        f"{' --no-memory' if args.no_memory else ''}`.",
        "",
        f"{args.threads} thread{'s' if args.threads > 1 else ''} on both sides, PyTorch with {capability}, {clock_name}, "
        f"{platform.system()}, load average at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. "
        f"Batch 1, {HEADS} heads, head dimension {DIM}. A turn is a pause of {PAUSE_SECONDS * 1e3:.0f} ms, an "
        "untimed call and a timed one. The ratio is the median over turns of PyTorch's time by ours: above 1 "
        "we are faster.",
        "",
        "| | type | mask | seqlen | turns | best GFLOP/s | PyTorch's best | ratio |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    if memory:
        text += [
            "",
            "Peak of resident memory at 16384 causal, program and all (backward: with the forward before it):",
            "",
            "| | type | bytes of inputs and outputs | peak bytes | quotient |",
            "|---|---|---|---|---|",
            *memory,
        ]
    text = "\n".join(text) + "\n"
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
