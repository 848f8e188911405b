"""Ours beside flash-attn-4's forward programs: one problem, one emulator, the same counters, as a table.

    python beside.py --theirs COUNTERS.jsonl [--fmha target/release/fmha] [--page docs/measured/sm100-modelled.md]

COUNTERS.jsonl is what `run.py --only s384x384 --counters` printed. Ours are counted by `fmha explain --emulate`. The table
goes between the page's marks, or to the output.

A number is the clocks that a unit of one multiprocessor needs for the whole launch, by rates that are stated on the page.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[4]
BEGIN, END = "<!-- written by beside.py -->\n", "<!-- end of what beside.py wrote -->"
PROBLEMS = [(64, "full"), (64, "causal"), (128, "full"), (128, "causal")]
MOVES = "integer, move, predicate"


def units(c):
    """Clocks of each unit, of a launch's counters and warp instructions by class."""
    of = lambda name: c.get(name, 0)
    issued = c["warp_instructions"] - of(MOVES)
    return {
        "tensor cores": c["tensor_macs"] / 4096,
        "`ex2`": c["special_functions"] / 16,
        "multiply-add": (32 * of("float multiply, add") + 64 * of("packed float multiply, add")) / 128,
        "shared memory": (128 * c["shared_passes"] + c["shared_matrix_bytes"]) / 128,
        "minimum, maximum": 32 * of("float minimum, maximum") / 64,
        "conversion": 32 * of("conversion") / 64,
        "issue slots": issued / 4,
    }


def ours(fmha, dim, mask):
    """Totals of the launch, from what a tile takes on average."""
    command = [fmha, "explain", "--backend", "cuda", "--emulate", "sm_100a", "-b", "1", "-h", "1", "-s", "384",
               "-d", str(dim), "--prec", "bf16", "--mask", "b" if mask == "causal" else "0"]
    environment = os.environ | {"FMHA_EMULATE_SMS": "4"}
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    tiles = int(re.search(r"emulated +(\d+) tiles", text)[1])
    found = {name: int(count) * tiles for count, name in re.findall(r"(\d+) warp instructions: (.+)", text)}
    for name, words in [("tensor_macs", "multiply-adds"), ("special_functions", "results at 16")]:
        found[name] = int(re.search(rf"(\d+) {words}", text)[1]) * tiles
    found["barrier_waits"] = int(re.search(r"(\d+) barrier waits", text)[1]) * tiles
    # The report has one sum of shared memory's bytes, from which TMA's are taken away.
    shared, copied = (int(re.search(words, text)[1]) for words in (r"shared memory, (\d+) bytes", r"(\d+) bytes by bulk"))
    found |= {"shared_passes": 0, "shared_matrix_bytes": (shared - copied) * tiles}
    found["warp_instructions"] = sum(found[name] for name in re.findall(r"\d+ warp instructions: (.+)", text))
    return found


def table(fmha, theirs):
    columns = []
    for dim, mask in PROBLEMS:
        one = next(c for c in theirs if c["case"].startswith(f"forward/d{dim}/{mask}/s384x384") and c["case"].endswith("/1cta"))
        columns.append((ours(fmha, dim, mask), one))
    lines = ["| ours / FA4 | " + " | ".join(f"D {dim} {mask}" for dim, mask in PROBLEMS) + " |",
             "|---" * (len(PROBLEMS) + 1) + "|"]
    both = [(units(a), units(b)) for a, b in columns]
    row = lambda name, pairs: lines.append(f"| {name} | " + " | ".join(f"{a:.0f} / {b:.0f}" for a, b in pairs) + " |")
    for name in both[0][0]:
        row(name, [(a[name], b[name]) for a, b in both])
    row("**modelled time**", [(max(a.values()), max(b.values())) for a, b in both])
    row("waits at barriers", [(a["barrier_waits"], b["barrier_waits"]) for a, b in columns])
    return "\n".join(lines) + "\n"


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--theirs", required=True)
    options.add_argument("--fmha", default=str(ROOT / "target/release/fmha"))
    options.add_argument("--page")
    options = options.parse_args()
    lines = pathlib.Path(options.theirs).read_text().splitlines()
    theirs = [json.loads(line.removeprefix("counters ")) for line in lines if line.startswith("counters ")]
    text = table(options.fmha, theirs)
    if not options.page:
        sys.stdout.write(text)
        return
    page = pathlib.Path(options.page)
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
