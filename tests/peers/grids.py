"""Calls drawn from the grids of FlashAttention's, vLLM's and FlashInfer's own suites, through this package.

    python tests/peers/grids.py SEED:COUNT [SUITE ...]     # as `2:500`, or `2:500 fa3 fa4`
    python tests/peers/grids.py SEED:FIRST:COUNT           # a part: calls FIRST .. FIRST + COUNT
    python tests/peers/grids.py --into FOLDER SEED:FIRST:COUNT     # and keeps the sum in a file of that folder
    python tests/peers/grids.py --page FOLDER              # docs/measured/peers.md from the files of a folder

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
import datetime
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import traceback

HERE = pathlib.Path(__file__).resolve()
PYTHON = HERE.parents[2] / "bindings" / "python"
sys.path[:0] = [str(PYTHON), str(PYTHON / "tests")]

PAGE = HERE.parents[2] / "docs" / "measured" / "peers.md"

#: Outcomes that are faults of this package.
BAD = ("wrong", "crashed", "refused_unnamed")

#: Names of suites, as the page has them.
SUITES = dict(
    fa2="FlashAttention 2",
    fa3="FlashAttention 3",
    fa4="FlashAttention 4",
    rotary="FlashAttention's rotary embedding",
    vllm="vLLM's paged attention",
    flashinfer="FlashInfer's paged prefill",
)

#: Patterns of refusals, each with its name on the page.
NAMED = (r"qv is given beside k, but k_cache does not lie behind",)


PAIRS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)]
PAIRS += [(1024, 1024), (1023, 1024), (1024, 1023)]
DIMS_2 = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
DIMS_3 = [64, 96, 128, 192, 256]
RACES = [(n, n) for n in (97, 128, 200, 256, 257, 384, 512, 768, 1024, 2048)]
RACES += [(1, 239), (239, 1), (3, 799), (799, 3), (1024, 128)]
CACHED = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128)]
#: Lists of sizes and options. `kind` names the function and how its inputs are made.
GRIDS = {
    "fa2": [
        dict(
            kind="dense2",
            sizes=PAIRS + [(2048, 2048)],
            d=DIMS_2,
            dropout=[0.0, 0.17],
            softcap=[0.0, 50.0],
            alibi=[0, 1],
            kvpacked=[0, 1],
        ),
        dict(
            kind="packed2",
            sizes=PAIRS + [(1, 147), (2048, 2048)],
            d=DIMS_2,
            dropout=[0.0, 0.17],
            alibi=[0, 1],
            softcap=[0.0, 50.0],
            kvpacked=[0, 1],
        ),
        dict(kind="dense2", sizes=[*PAIRS, (3, 799), (127, 512)], d=DIMS_2, alibi=[0, 1], swap=[0, 1], group=["mha"]),
        dict(
            kind="dense2",
            sizes=RACES,
            d=DIMS_2,
            dropout=[0.0, 0.17],
            dtype=["float16"],
            local=[0],
            group=["mha"],
            twice=1,
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
            dtype=["float16"],
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
            splits=[1, 3, 0],
            ready=[0, 1],
        ),
        dict(kind="dense3", sizes=RACES, d=DIMS_2, dtype=["bfloat16"], local=[0], group=["mha"], twice=1),
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
            local=[0, 1, 2, 3],
        ),
        dict(kind="dense4", sizes=[(128, 128), (2048, 2048)], d=[8, 16, 32], local=[0], group=["mha"]),
        dict(
            kind="packed4",
            sizes=[(511, 1), (3, 513), (64, 128), (256, 256), (307, 256), *PAIRS, (64, 1)],
            d=[64, 128, 192, 256],
            softcap=[0.0, 15.0],
            local=[0, 1, 2, 3],
            lengths=["random", "third", "full"],
            zero=[(0, 0), (1, 0), (0, 1), (1, 1)],
            unpad=[(1, 1), (0, 0), (1, 0), (0, 1)],
            longest=[0, 1],
        ),
        dict(
            kind="cache4",
            sizes=CACHED,
            d=[64, 128],
            page=[None, 1, 4, 128],
            sink=[0, 1],
            packed=[0, 1],
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


#: Lists for each suite where a grid has none of its own.
EVERYWHERE = dict(causal=[0, 1], local=[0, 1], dtype=["float16", "bfloat16"], group=["mha", "gqa", "mqa"])


def draw(seed, at, suites):
    """A call: a suite, one of its grids, and one of each list."""
    rng = random.Random(f"{seed}:{at}")
    suite = rng.choice(suites)
    return drawn(suite, rng), rng


def drawn(suite, rng):
    """One of a suite's grids, and one of each of its lists."""
    grid = rng.choice(GRIDS[suite])
    case = {name: rng.choice(list_) if isinstance(list_, list) else list_ for name, list_ in grid.items()}
    for name, list_ in EVERYWHERE.items():
        case.setdefault(name, rng.choice(list_))
    return {**case, "suite": suite}


def main_child(seed, first, count, suites):
    import calls

    for at in range(first, first + count):
        case, rng = draw(seed, at, suites)
        outcome, said = "skipped", ""
        while outcome == "skipped":
            print(json.dumps({"at": at, "case": case}), flush=True)
            outcome, said = outcome_of(case, rng, calls)
            if outcome == "skipped":
                # The suite skips this combination, so another is drawn.
                case = drawn(case["suite"], rng)
        print(json.dumps({"at": at, "outcome": outcome, "said": str(said)[:600]}), flush=True)


def outcome_of(case, rng, calls):
    """What came of a call, and what is said of it."""
    try:
        said = calls.run(case, rng)
    except calls.Skipped:
        return "skipped", ""
    except calls.Large:
        return "large", ""
    except calls.Otherwise as difference:
        return "otherwise", f"otherwise: {difference}"
    except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:
        return "crashed", traceback.format_exc(limit=-3)
    return ("wrong", said) if said else ("right", "")


def cause(said):
    """A refusal's words without its numbers."""
    return re.sub(r"\d+(\.\d+)?", "N", said.splitlines()[0])[:100]


def main(seed, first, count, suites, into=None):
    counts, causes, last = collections.Counter(), collections.Counter(), first + count
    by_suite = {}
    at = first
    while at < last:
        part = f"{seed}:{at}:{last - at}"
        child = subprocess.Popen(
            [sys.executable, str(HERE), "--child", part, *suites],
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parent,
            # Parts run in parallel and calls are small, so each part uses one thread.
            env={"OMP_NUM_THREADS": "1", "FMHA_NUM_THREADS": "1", **os.environ},
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
            if outcome in ("refused", "otherwise"):
                causes[cause(said["said"])] += 1
                if outcome == "refused" and not any(re.search(named, said["said"]) for named in NAMED):
                    outcome = "refused_unnamed"
            counts[outcome] += 1
            by_suite.setdefault(case["case"]["suite"], collections.Counter())[outcome] += 1
            if outcome in ("wrong", "crashed", "refused_unnamed"):
                print(f"call {said['at']} of seed {seed}: {outcome}: {said['said']}\n    {case['case']}", flush=True)
            at, case = said["at"] + 1, None
        child.wait()
        if case is not None:
            counts["crashed"] += 1
            by_suite.setdefault(case["case"]["suite"], collections.Counter())["crashed"] += 1
            print(
                f"call {case['at']} of seed {seed}: the process ended ({child.returncode})\n    {case['case']}",
                flush=True,
            )
            at = case["at"] + 1
        elif at < last:
            print(f"the child ended ({child.returncode}) between calls {at - 1} and {at}", flush=True)
            counts["crashed"] += 1
            break
    bad = sum(counts[name] for name in BAD)
    result = {"bad": bad, **counts, "causes": causes}
    print(json.dumps(result))
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        about = {"seed": seed, "first": first, "count": count, "suites": suites, "device": described()}
        kept = json.dumps({**about, "by_suite": by_suite, "causes": causes}, indent=1)
        into.joinpath(f"{seed}-{first}-{count}.json").write_text(kept + "\n")
    return 1 if bad else 0


def described():
    """The device that calls run on, and the peer's framework."""
    import torch

    kind = os.environ.get("FMHA_TEST_DEVICE", "cpu")
    device = torch.cuda.get_device_name() if kind != "cpu" else "the CPU backend"
    return f"{device}, torch {torch.__version__.partition('+')[0]}, {datetime.date.today().isoformat()}"


def page(folder):
    """`docs/measured/peers.md`, from the sums of parts: nobody types a number of it."""
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not parts:
        sys.exit(f"{folder} has no sums of parts")
    by_device = {}
    for part in parts:
        by_device.setdefault(part["device"], []).append(part)
    sections = [line for device, parts in sorted(by_device.items()) for line in section(device, parts)]
    lines = [
        "# Calls of other libraries' suites",
        "",
        "`python tests/peers/grids.py --page FOLDER` writes this page from the sums of parts, which",
        "`python tests/peers/grids.py --into FOLDER SEED:FIRST:COUNT` leaves. A call is a suite, one of its tests, and",
        "one of each list of that test, each with equal chances; a combination that the suite skips is drawn again.",
        "[testing.md](../testing.md) says what is compared. The share is that of refused calls among those that ran.",
        "`otherwise` is a right result that differs from the suite's rule as",
        "[the guide](../guide/7-what-differs-from-flashattention.md) names; `unnamed` is a refusal that it does not name.",
        "`too large` is a call beyond the bound of work on a device.",
        "",
        "Left out of the lists, since each of their calls is refused: FlashAttention 4's tests of `score_mod`,",
        "`mask_mod`, block sparsity and gathered keys, and what asks which kernel of theirs ran.",
        "",
        *sections,
    ]
    PAGE.write_text("\n".join(lines))
    counts = [counts for part in parts for counts in part["by_suite"].values()]
    return 1 if any(one.get(name) for one in counts for name in BAD) else 0


def section(device, parts):
    """What came of the calls on a device."""
    spans = []
    for part in sorted(parts, key=lambda part: (part["seed"], part["suites"], part["first"])):
        key, first, end = (part["seed"], part["suites"]), part["first"], part["first"] + part["count"]
        if spans and spans[-1][0] == key and first < spans[-1][2]:
            sys.exit(f"call {first} of seed {part['seed']} is in two parts on {device}")
        if spans and spans[-1][0] == key and first == spans[-1][2]:
            spans[-1][2] = end
        else:
            spans.append([key, first, end])
    outcomes = ("right", "otherwise", "refused", "refused_unnamed", "wrong", "crashed", "large")
    rows, total, causes = [], collections.Counter(), collections.Counter()
    for suite, what in SUITES.items():
        counts = collections.Counter()
        for part in parts:
            counts.update(part["by_suite"].get(suite, {}))
        total.update(counts)
        rows.append((what, counts))
    for part in parts:
        causes.update(part["causes"])

    def row(what, counts):
        drawn = sum(counts.values())
        refused = counts["refused"] + counts["refused_unnamed"]
        ran = drawn - counts["large"]
        share = f"{100 * refused / ran:.1f} %" if ran else "-"
        return "| " + " | ".join([what, str(drawn), *(str(counts[name]) for name in outcomes), share]) + " |"

    named = [f"| {cause.replace('|', '/')} | {count} |" for cause, count in causes.most_common()]
    return [
        f"## On {device}",
        "",
        "| suite | drawn | right | otherwise | refused | unnamed | wrong | crashed | too large | refused of all |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row(what, counts) for what, counts in rows),
        row("all", total),
        "",
        *(["| refused with, or otherwise | calls |", "|---|---|", *named] if named else ["No call was refused."]),
        "",
        *(f"Calls {first} to {end - 1} of seed {key[0]}, in {len(parts)} parts." for key, first, end in spans),
        "",
    ]


def main_of(words):
    option = words.pop(0) if words[:1] and words[0] in ("--child", "--into", "--page") else None
    if option == "--page":
        return page(pathlib.Path(words[0]))
    into = pathlib.Path(words.pop(0)) if option == "--into" else None
    part, *suites = words
    numbers = [int(word) for word in part.split(":")]
    seed, first, count = {1: (1, 0, *numbers), 2: (numbers[0], 0, numbers[-1])}.get(len(numbers), tuple(numbers))
    unknown = set(suites) - set(GRIDS)
    if unknown:
        sys.exit(f"suite {sorted(unknown)[0]} is none of {', '.join(GRIDS)}")
    suites = suites or list(GRIDS)
    if option == "--child":
        return main_child(seed, first, count, suites)
    return main(seed, first, count, suites, into)


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:]))
