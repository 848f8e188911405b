#!/usr/bin/env python3
"""Decode of the CPU backend beside plain reads of the same bytes, and beside PyTorch's scaled_dot_product_attention.

    cargo build --release -p fmha-cpu --example decode_bench
    python backend-cpu/bench/decode.py --out docs/measured/cpu-decode.md

One query over many keys of dimension 128, keys and heads as in a cache, b·s·h·d. Each row is `decode_bench` (ours and
plain reads in turns), then PyTorch on as many threads; each figure is the best over the turns, in GB of K and V a second.
"By lines" are reads of 64 bytes at once, which one core does faster, in the order in which the cache lies, pages in that
of their table. What PyTorch has no kernel for (pages, an FP8 cache) has no figure of its. By the clock: the machine should
be otherwise idle. `--busy` takes one thread alone and its processor time, which other programs do not lengthen, though they
do take their share of caches and of the memory. About three minutes.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

DIM = 128
# Rows of the table: batch, query heads, kv heads, types (of Q, and of the cache if it differs), rows per page.
ROWS = [
    (1, 8, 8, "bf16", 0),
    (1, 8, 8, "bf16", 16),
    (1, 32, 8, "bf16", 0),
    (1, 32, 8, "bf16", 16),
    (8, 8, 1, "bf16", 0),
    (8, 8, 1, "bf16", 16),
    (1, 8, 8, "f16", 0),
    (1, 32, 8, "f16", 0),
    (1, 8, 8, "f32", 0),
    (1, 8, 8, "bf16/fp8", 0),
    (1, 32, 8, "bf16/fp8", 0),
    (1, 32, 8, "bf16/fp8", 16),
]


def ours(binary, row, keys, threads, turns, busy):
    """The backend's name, and GB/s of decode, of plain reads, and of reads by lines in the order in which the cache lies."""
    batch, heads_q, heads_kv, types, page = row
    command = [binary, *map(str, (keys, batch, heads_q, heads_kv, DIM, types, page, turns))]
    env = {**os.environ, "FMHA_NUM_THREADS": str(threads)}
    text = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    clock = "processor time" if busy else "by the clock"
    (line,) = [line for line in text.splitlines() if clock in line]
    pattern = r"decode ([\d.]+) GB/s, reads ([\d.]+) GB/s.*lines in its order ([\d.]+) GB/s"
    speeds = re.search(pattern, line).groups()
    return text.split(" (")[1].split(",")[0], *map(float, speeds)


def theirs(row, keys, threads, turns, busy):
    """GB/s of PyTorch, or None where it has no kernel."""
    batch, heads_q, heads_kv, types, page = row
    if torch is None or page or "/" in types:
        return None
    torch.set_num_threads(threads)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[types]
    q = torch.randn(batch, heads_q, 1, DIM, dtype=dtype)
    k, v = (torch.randn(batch, keys, heads_kv, DIM, dtype=dtype).transpose(1, 2) for _ in range(2))
    clock = time.process_time if busy else time.perf_counter
    best = float("inf")
    with torch.inference_mode():
        for _ in range(turns):
            start = clock()
            F.scaled_dot_product_attention(q, k, v, enable_gqa=heads_q != heads_kv)
            best = min(best, clock() - start)
    return 2 * k.numel() * k.element_size() / best / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/examples/decode_bench")
    parser.add_argument("--out", help="the Markdown file to write; standard output if not given")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", help="how many, with commas")
    parser.add_argument("--types", default="bf16,f16,f32,bf16/fp8", help="which types, with commas")
    parser.add_argument("--keys", type=int, default=32768, help="of each sequence; K and V should not fit the caches")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--busy", action="store_true", help="one thread, by its processor time")
    args = parser.parse_args()
    counts = [1] if args.busy else sorted({int(count) for count in args.threads.split(",")})
    name, lines = "", []
    for threads in counts:
        for row in (row for row in ROWS if row[3] in args.types.split(",")):
            name, decode, reads, by_lines = ours(args.binary, row, args.keys, threads, args.turns, args.busy)
            torch_speed = theirs(row, args.keys, threads, args.turns, args.busy)
            batch, heads_q, heads_kv, types, page = row
            beside = "absent | " if torch_speed is None else f"{torch_speed:.1f} | {decode / torch_speed:.2f}"
            lines.append(
                f"| {threads} | {batch} | {heads_q}/{heads_kv} | {types} | {page or 'strided'} "
                f"| {decode:.1f} | {reads:.1f} | {decode / reads:.2f} | {by_lines:.1f} | {decode / by_lines:.2f} "
                f"| {beside} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    version = f"PyTorch {torch.__version__}" if torch else "PyTorch absent"
    types = "" if args.types == parser.get_default("types") else f" --types {args.types}"
    keys = "" if args.keys == parser.get_default("keys") else f" --keys {args.keys}"
    flags = f"{types}{keys} --turns {args.turns}{' --busy' if args.busy else ''}"
    text = [
        f"# Decode on the CPU ({name}), beside plain reads and {version}",
        "",
        f"Written by `python backend-cpu/bench/decode.py --threads {','.join(map(str, counts))}{flags}`: one query over "
        f"{args.keys} keys of dimension {DIM}, GB of K and V a second, best of {args.turns} turns, "
        f"{'processor time' if args.busy else 'by the clock'}, {platform.system()}, load average at the end "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. The last column is our speed by PyTorch's.",
        "",
        "| threads | batch | heads | type | page size | GB/s | reads, GB/s | ratio | by lines, GB/s | ratio | PyTorch, GB/s | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *lines,
    ]
    text = "\n".join(text) + "\n"
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
