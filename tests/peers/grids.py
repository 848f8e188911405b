"""Calls drawn from the grids of FlashAttention's, vLLM's and FlashInfer's own suites, through this package.

    python tests/peers/grids.py SEED:COUNT [SUITE ...]     # as `2:500`, or `2:500 fa3 fa4`
    python tests/peers/grids.py SEED:FIRST:COUNT           # a part: calls FIRST .. FIRST + COUNT

What is those suites': names of functions, lists of sizes and options, and the rule (twice the error of plain
attention in the same type, three times for gradients). What is here: the program, its reference in float64, and
smaller batches and fewer heads on the CPU, where `FMHA_PEERS_WORK` (multiply-adds of a call, 2e8 by default) bounds a
call; the sizes of sequences stay. A call that stays larger is counted as large. `FMHA_TEST_DEVICE=cuda` runs on a
GPU, and 1e11 is the bound there.

Calls run in a child process: one that ends it is a crash, and the next child goes on behind it. The last line is a
sum in JSON. A refusal is named by the page "What differs from FlashAttention" or is a fault; so is a wrong number and
a crash.
"""

from __future__ import annotations

import collections
import json
import pathlib
import random
import re
import subprocess
import sys
import traceback

HERE = pathlib.Path(__file__).resolve()
PYTHON = HERE.parents[2] / "bindings" / "python"
sys.path[:0] = [str(PYTHON), str(PYTHON / "tests")]

#: What the page names, by what a refusal says.
NAMED = (r"qv is given beside k, but k_cache does not lie behind",)


PAIRS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)]
PAIRS += [(1024, 1024), (1023, 1024), (1024, 1023)]
DIMS_2 = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
DIMS_3 = [64, 96, 128, 192, 256]
CACHED = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128)]
#: Lists of sizes and options; `kind` says which function, and how its inputs are made.
GRIDS = {
    "fa2": [
        dict(
            kind="dense2",
            sizes=PAIRS + [(2048, 2048)],
            d=DIMS_2,
            dropout=[0.0, 0.17],
            softcap=[0.0, 50.0],
            alibi=[0, 1],
        ),
        dict(
            kind="packed2",
            sizes=PAIRS + [(1, 147), (2048, 2048)],
            d=DIMS_2,
            dropout=[0.0, 0.17],
            alibi=[0, 1],
            softcap=[0.0, 50.0],
        ),
        dict(
            kind="qkv2",
            sizes=[(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)],
            d=DIMS_2,
            dropout=[0.0, 0.17],
            alibi=[0, 1],
        ),
        dict(
            kind="causal2",
            sizes=[(1, 239), (3, 799), (127, 512), (127, 513), (1023, 1024), *PAIRS[:5]],
            d=DIMS_2,
            swap=[0, 1],
            page=[None, 256, 512],
        ),
        dict(
            kind="cache2",
            sizes=CACHED,
            d=[32, 59, 64, 80, 128, 256],
            page=[None, 256],
            new=[0, 1],
            alibi=[0, 1],
            leftpad=[0, 1],
            index=[0],
            turn=[0.0, 0.5, 1.0],
            interleaved=[0, 1],
            like_q=[0, 1],
            splits=[1, 0],
        ),
    ],
    "fa3": [
        dict(
            kind="dense3",
            sizes=[
                (1, 1),
                (64, 128),
                (128, 192),
                (256, 256),
                (239, 1),
                (799, 3),
                *PAIRS,
                (113, 128),
                (384, 256),
                (640, 128),
                (4096, 4096),
                (4224, 4224),
            ],
            d=DIMS_3,
            dtype=["bfloat16", "float16", "float8_e4m3fn"],
            softcap=[0.0, 15.0],
            qv=[0, 1],
            chunk=[0, 1],
        ),
        dict(
            kind="packed3",
            sizes=[
                (1, 1),
                (1, 3),
                (2, 1),
                (511, 1),
                (3, 513),
                (64, 128),
                (128, 128),
                (256, 256),
                (307, 256),
                (640, 128),
                *PAIRS,
                (2048, 2048),
                (4096, 4096),
            ],
            d=DIMS_3,
            dtype=["bfloat16", "float16", "float8_e4m3fn"],
            softcap=[0.0, 15.0],
            qv=[0, 1],
            chunk=[0, 1],
            unused=[0, 1],
        ),
        dict(
            kind="cache3",
            sizes=[*CACHED, (256, 512), (2048, 3577)],
            d=[128],
            page=[None, 1, 4, 128],
            new=[0, 1],
            dtype=["bfloat16", "float8_e4m3fn"],
            leftpad=[0, 1],
            index=[0, 1],
            turn=[0.0, 0.5, 1.0],
            interleaved=[0, 1],
            like_q=[0, 1],
            packed=[0, 1],
            chunk=[0, 1],
        ),
        dict(
            kind="combine",
            sizes=[(n, 0) for n in (1, 2, 3, 32, 64, 256, 113, 108, 640, 1024)],
            d=[64, 96, 128, 192, 256, 512],
            parts=[1, 2, 3, 5, 17, 32, 55, 97, 133],
            dtype=["float32", "float16", "bfloat16"],
        ),
    ],
    "fa4": [
        dict(
            kind="dense4",
            sizes=[
                (1, 1),
                (3, 3),
                (64, 32),
                (64, 128),
                (128, 192),
                (239, 1),
                (799, 3),
                (113, 128),
                (255, 256),
                *PAIRS,
                (384, 256),
                (640, 128),
                (2048, 2048),
                (4096, 4096),
            ],
            d=DIMS_3,
            softcap=[0.0, 15.0],
            sink=[0, 1],
            open=[0, 1, 2],
        ),
        dict(
            kind="packed4",
            sizes=[(511, 1), (3, 513), (64, 128), (256, 256), (307, 256), *PAIRS, (64, 1)],
            d=[64, 128, 192, 256],
            softcap=[0.0, 15.0],
            sink=[0, 1],
            open=[0, 1, 2],
            longest=[0, 1],
        ),
        dict(
            kind="combine",
            sizes=[(n, 0) for n in (1, 32, 113, 256, 1024)],
            d=[64, 96, 128, 256],
            parts=[2, 5, 17, 55],
            dtype=["float32", "float16", "bfloat16"],
            rows=["cu_seqlens", "seqused", "both", "order"],
        ),
    ],
    "rotary": [
        dict(
            kind="rotary",
            sizes=[(217, 0)],
            d=[128],
            offset=[0, 1, 2],
            turn=[1.0, 0.5],
            interleaved=[0, 1],
            inplace=[0, 1],
            dtype=["float16", "bfloat16"],
            packed=[0, 1],
        ),
    ],
    "vllm": [
        dict(
            kind="pages",
            lengths=[[(1, 1328), (5, 18), (129, 463)], [(1, 523), (1, 37), (1, 2011)]],
            heads=[(4, 4), (8, 2)],
            d=[40, 72, 80, 128, 256],
            page=[16],
            window=[None, 256],
            softcap=[0.0, 50.0],
            causal=[1],
            dtype=["bfloat16", "float8_e4m3fn"],
        ),
    ],
    "flashinfer": [
        dict(
            kind="pages",
            lengths=[[(q, k)] * 3 for q in (37, 17, 127, 577) for k in (54, 97, 512, 2048)],
            heads=[(32, 32), (4, 4), (32, 4)],
            d=[128, 256],
            page=[1, 5, 16],
            window=[None],
            softcap=[0.0],
            causal=[0, 1],
            dtype=["float16"],
        ),
    ],
}


def draw(seed, at, suites):
    """A call: a suite, one of its grids, and one of each list."""
    rng = random.Random(f"{seed}:{at}")
    suite = rng.choice(suites)
    grid = rng.choice(GRIDS[suite])
    case = {name: rng.choice(list_) if isinstance(list_, list) else list_ for name, list_ in grid.items()}
    case.update(suite=suite, causal=case.get("causal", rng.choice([0, 1])), local=rng.choice([0, 1]))
    case.setdefault("dtype", rng.choice(["float16", "bfloat16"]))
    case["group"] = rng.choice(["mha", "gqa", "mqa"])
    return case, rng


def main_child(seed, first, count, suites):
    import calls

    for at in range(first, first + count):
        case, rng = draw(seed, at, suites)
        print(json.dumps({"at": at, "case": case}), flush=True)
        try:
            outcome, said = "right", calls.run(case, rng)
            if said:
                outcome = "wrong"
        except calls.Skipped:
            # No call of the suite's: it skips this combination.
            outcome, said = "skipped", ""
        except calls.Large:
            outcome, said = "large", ""
        except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
            outcome, said = "refused", f"{type(error).__name__}: {error}"
        except Exception:
            outcome, said = "crashed", traceback.format_exc(limit=-3)
        print(json.dumps({"at": at, "outcome": outcome, "said": str(said)[:600]}), flush=True)


def cause(said):
    """A refusal's words without its numbers."""
    return re.sub(r"\d+(\.\d+)?", "N", said.splitlines()[0])[:100]


def main(seed, first, count, suites):
    counts, causes, last = collections.Counter(), collections.Counter(), first + count
    at = first
    while at < last:
        part = f"{seed}:{at}:{last - at}"
        child = subprocess.Popen(
            [sys.executable, str(HERE), "--child", part, *suites], stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        )
        case = None
        for line in child.stdout:
            said = json.loads(line) if line.startswith('{"at"') else {}
            if "case" in said:
                case = said
                continue
            if "outcome" not in said:
                continue
            outcome = said["outcome"]
            if outcome == "refused":
                causes[cause(said["said"])] += 1
                if not any(re.search(named, said["said"]) for named in NAMED):
                    outcome = "refused_unnamed"
            counts[outcome] += 1
            if outcome in ("wrong", "crashed", "refused_unnamed"):
                print(f"call {said['at']} of seed {seed}: {outcome}: {said['said']}\n    {case['case']}", flush=True)
            at, case = said["at"] + 1, None
        child.wait()
        if case is not None:
            counts["crashed"] += 1
            print(
                f"call {case['at']} of seed {seed}: the process ended ({child.returncode})\n    {case['case']}",
                flush=True,
            )
            at = case["at"] + 1
        elif at < last:
            print(f"the child ended ({child.returncode}) between calls {at - 1} and {at}", flush=True)
            counts["crashed"] += 1
            break
    bad = sum(counts[name] for name in ("wrong", "crashed", "refused_unnamed"))
    print(json.dumps({"bad": bad, **counts, "causes": causes}))
    return 1 if bad else 0


if __name__ == "__main__":
    words = sys.argv[1:]
    child = words[:1] == ["--child"]
    part, *suites = words[child:]
    numbers = [int(word) for word in part.split(":")]
    seed, first, count = {1: (1, 0, *numbers), 2: (numbers[0], 0, numbers[-1])}.get(len(numbers), tuple(numbers))
    unknown = set(suites) - set(GRIDS)
    if unknown:
        sys.exit(f"suite {sorted(unknown)[0]} is none of {', '.join(GRIDS)}")
    run = main_child if child else main
    sys.exit(run(seed, first, count, suites or list(GRIDS)))
