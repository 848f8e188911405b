"""The built-in tile beside the best that `fmha tune` finds, over random problems.

    python3 bench/tuned.py FMHA [--problems 50] [--seconds 600] [--seed 1] [--jobs 8] > tuned.md

FMHA is the command. Every tile of a problem is compiled first, in JOBS processes at once, and found in the cache when it
is timed. What was not reached in SECONDS is said to be absent. Nothing is kept for later plans.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

# Tile fields that decide most of a forward kernel's time. Other fields changed it by less than the noise.
FIELDS = ["block_m", "block_n", "stages", "order"]
# Operations of the largest problem, which takes some milliseconds on an H200.
MOST_OPERATIONS = 1.5e12


def problem(rng):
    """A problem as the command's options: short and long, odd lengths, GQA, few heads."""
    while True:
        head_dim = rng.choice([64, 96, 128, 128, 192, 256])
        heads_kv = rng.choice([1, 2, 3, 4, 8])
        heads = heads_kv * rng.choice([1, 1, 2, 3, 4, 8])
        batch = rng.choice([1, 1, 2, 4, 7, 16])
        seqlen_q = round(2 ** rng.uniform(5, 13)) + rng.choice([0, 0, 1, 5])
        seqlen_k = seqlen_q if rng.random() < 0.6 else round(2 ** rng.uniform(6, 14))
        mask = rng.choice(["0", "b", "b", "b:512,0"])
        if 4 * batch * heads * seqlen_q * seqlen_k * head_dim <= MOST_OPERATIONS:
            options = {"-b": batch, "-h": heads, "--heads-kv": heads_kv, "-s": seqlen_q, "--seqlen-k": seqlen_k}
            options |= {"-d": head_dim, "--mask": mask, "--prec": rng.choice(["bf16", "f16"])}
            return [str(word) for pair in options.items() for word in pair]


def tune(command, options, *more):
    """Runs `fmha tune`; its output, or None and its words."""
    words = [command, "tune", "--backend", "cuda", *options, *more]
    words += [word for field in FIELDS for word in ("--field", field)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stdout, "") if done.returncode == 0 else (None, (done.stderr or done.stdout).strip())


def row(options, report):
    """A line of the table, and the best tile's gain."""
    confirmed = report["confirmed"]
    measured = [one["measured"] for one in report["tried"] if "measured" in one]
    own = confirmed["incumbent_seconds"] if confirmed else measured[0]["incumbent_seconds"] if measured else None
    # A gain that the rule does not accept counts as none.
    gain = confirmed["gain"] if confirmed and confirmed["is_gain"] else 0.0
    spread = f"{confirmed['spread'] * 100:.1f} %" if confirmed else ""
    tile = report["tile"]
    best = " ".join(f"{field}={tile[field]}" for field in FIELDS if field in tile) if gain else "the built-in one"
    micros = f"{own * 1e6:.1f}" if own else "absent"
    return f"| `{' '.join(options)}` | {micros} | {gain * 100:.1f} % | {spread} | {len(measured)} | {best} |", gain


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command")
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=8)
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    rng = random.Random(asked.seed)
    problems = [problem(rng) for _ in range(asked.problems)]
    print("| problem | built-in tile, us | best tile ahead by | spread | tiles timed | best tile |")
    print("|---|---|---|---|---|---|")
    gains, absent = [], 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        compiled = [pool.submit(tune, asked.command, options, "--compile") for options in problems]
        for options, ready in zip(problems, compiled):
            if time.monotonic() > end:
                ready.cancel()
                absent += 1
                continue
            ready.result()
            text, why = tune(asked.command, options, "--dry-run", "--json")
            if text is None:
                absent += 1
                print(f"| `{' '.join(options)}` | absent: {why.splitlines()[0] if why else 'no words'} | | | | |")
                continue
            line, gain = row(options, json.loads(text))
            gains.append(gain)
            print(line, flush=True)
    within = sum(gain <= 0.03 for gain in gains)
    print(f"\n{within} of {len(gains)} built-in tiles are within 3 % of the best of those tried; {absent} problems absent.")
    return 0 if gains else 1


if __name__ == "__main__":
    sys.exit(main())
