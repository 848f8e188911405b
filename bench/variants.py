"""Times variants of one call of ours in turns, peers beside them: `FMHA_LIB=libfmha_c.so python3 variants.py KIT JOB...`.

KIT is the peers' kit with bench/ours.py as its ours.py. A JOB is `TABLE;ROWS;VARIANT,...;PEER,...[;KIND,...[;REPEATS]]`: a
table of the kit, a regular expression for its rows, what is timed, the kinds of inputs, and how many repeats beside other
work are to have equal bits. A VARIANT is `NAME` or `NAME=WORDS`, WORDS with `+` between: tile fields (`stages_q=2`), or
`deterministic`, `batch_invariant`, `exact`, `lib=FILE` (another build's library in place of $FMHA_LIB). Every output is
held to float64 first; WRONG and its error stand behind a figure that is beyond the kit's bound. One line a row: TFLOP/s
of each, the median of three bursts.
"""

import argparse
import dataclasses
import os
import re
import sys
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("kit")
parser.add_argument("jobs", nargs="+", metavar="JOB")
parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="then start no row")
arguments = parser.parse_args()
sys.path.insert(0, arguments.kit)
import compare  # noqa: E402
import ours  # noqa: E402
import peers  # noqa: E402
from peers import TABLES, torch  # noqa: E402

LIBRARY = os.environ.get("FMHA_LIB", "")


def rows_of(table):
    """A table of the kit; what it lacks with a name that ends in -bwd is the backward of one."""
    if table not in TABLES and table.endswith("-bwd"):
        return [dataclasses.replace(w, backward=True) for w in TABLES[table.removesuffix("-bwd")]]
    return TABLES[table]


def choose(words):
    """Sets what ours.py reads."""
    libraries = [word.removeprefix("lib=") for word in words if word.startswith("lib=")]
    os.environ["FMHA_LIB"] = libraries[0] if libraries else LIBRARY
    ours._library.cache_clear()
    fields = [word for word in words if "=" in word and not word.startswith("lib=")]
    os.environ["OURS_TILE"] = ",".join(fields)
    for word in ("deterministic", "batch_invariant"):
        os.environ[f"OURS_{word.upper()}"] = "1" if word in words else ""
    os.environ.pop("OURS_ACCURACY", None)
    if "exact" in words:
        os.environ["OURS_ACCURACY"] = "exact"


def parsed(variant):
    name, _, words = variant.partition("=")
    return name, words.split("+") if words else []


def row(w, kind, variants, names, repeats):
    inputs = peers.make_inputs(w)
    peers.INPUTS[kind](w, *inputs[:3])
    fns, outputs, notes = {}, {}, []
    for name, words in [(name, None) for name in names] + [parsed(variant) for variant in variants]:
        if words is not None:
            choose(words)
        try:
            fns[name] = peers.make(name if words is None else "ours", w, inputs)
            out = fns[name]()
            torch.cuda.synchronize()
            outputs[name] = out if w.backward else out.float()
        except Exception as error:  # a refusal, or whatever a peer throws
            fns.pop(name, None)
            notes.append(f"{name}: {' '.join(repr(error).split())[:200]}")
    errors = (compare.backward_error if w.backward else compare.forward_error)(w, *inputs, outputs)
    del outputs
    times = compare.burst(fns, w, 3)
    wrong = {name: f" WRONG {error:.1e}" for name, error in errors.items() if error >= compare.tolerance(w)}
    cells = [f"{name} {compare.speed(w, t['ms']):.0f}{wrong.get(name, '')}" for name, t in times.items()]
    if repeats:
        cells += [f"other bits of {name} {compare.differing_bits(fns[name], repeats)}" for name in fns]
    print(f"{w!s} {kind}: " + "  ".join(cells), *notes, sep="\n  ", flush=True)


started = time.monotonic()
for job in arguments.jobs:
    given = job.split(";")
    table, rows, variants, names, kinds, repeats = given + ["normal", "0"][len(given) - 4 :]
    for w in (w for w in rows_of(table) if re.search(rows, str(w))):
        for kind in kinds.split(","):
            if time.monotonic() - started > arguments.budget:
                sys.exit("out of budget: the remaining rows were not run")
            row(w, kind, variants.split(","), names.split(",") if names else [], int(repeats))
