"""Times compiled sm90 kernels beside the peers: `python3 speed.py FOLDER KIT PLAN.txt [PEER,...] [BUDGET] [ROUNDS] [REPEATS]`.

KIT holds peers.py and compare.py. A line of PLAN is `TABLE REGEX KIND,... KERNEL...`: the rows of a table whose name
matches, the kinds of inputs (those of the kit) and the kernels to time on each. Outputs are checked by the kit before
anything is timed. `!n` after a figure: so many of REPEATS repeats beside other work gave other bits.
"""

import re
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, sys.argv[2])
import compare  # noqa: E402
import peers  # noqa: E402

from launch import UNBOUNDED_HI, UNBOUNDED_LO, Kernel  # noqa: E402

root = Path(sys.argv[1])
loaded = {}


def maker(name):
    folder, _, option = name.partition("@")
    if folder not in loaded:
        loaded[folder] = Kernel(root / folder)

    def make(w, q, k, v):
        mask = (UNBOUNDED_LO, UNBOUNDED_HI, 1, 0)
        if w.window is not None:
            mask = (-w.window[0], w.window[1], 1, 0)
        elif w.causal:
            mask = (UNBOUNDED_LO, 0, 1, 0)
        options = dict(mask=mask, scale=w.softmax_scale, lse=True)
        if option:
            options["group_bytes"] = int(option) << 20
        if w.lengths:
            cu = peers.cu_seqlens(w, q.device)
            options |= dict(cu_q=cu, cu_k=cu, max_q=max(w.lengths), max_k=max(w.lengths))
        return loaded[folder].prepare(q, k, v, **options)[0]

    return make


def cell(result):
    differ = result.get("differ")
    return compare.cell(result).rstrip("!") + (f"!{differ}" if differ else "")


def main():
    names = sys.argv[4].split(",") if len(sys.argv) > 4 and sys.argv[4] != "-" else []
    budget = float(sys.argv[5]) if len(sys.argv) > 5 else 1e9
    rounds = int(sys.argv[6]) if len(sys.argv) > 6 else 3
    repeats = int(sys.argv[7]) if len(sys.argv) > 7 else 0
    started = time.monotonic()
    for line in Path(sys.argv[3]).read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        table, pattern, kinds, *kernels = line.split()
        for kernel in kernels:
            peers.PEERS[kernel] = (maker(kernel), None)
        rows = [w for w in peers.TABLES[table] if re.search(pattern, str(w))]
        for w, kind in ((w, kind) for w in rows for kind in kinds.split(",")):
            if time.monotonic() - started > budget:
                print("out of budget")
                return
            results = compare.measure(w, kind, [*names, *kernels], "burst", rounds, repeats)
            best = max((results[n].get("speed", 0) for n in names), default=0)
            cells = " ".join(f"{n} {cell(results[n])}" for n in [*names, *kernels])
            ours = max((results[n].get("speed", 0), n) for n in kernels)
            ratio = f"{ours[0] / best:.3f} ({ours[1]})" if best else ""
            print(f"{table} {w!s} {kind}: {cells} | {ratio}", flush=True)
            for n in kernels:
                if "speed" not in results[n]:
                    print("   ", n, results[n])
            del results
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
