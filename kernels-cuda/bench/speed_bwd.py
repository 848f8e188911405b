"""Times compiled sm90 backward kernels beside the peers: `python3 speed_bwd.py FOLDER KIT PLAN.txt [PEER,...] [BUDGET] [ROUNDS]`.

As speed.py. Each variant's gradients are checked by the kit before it is timed; `PLAN` lines are `TABLE REGEX VARIANT...`.
A last part times the launches of each variant apart, and repeats it: how many gradients' bits change.
"""

import re
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, sys.argv[2])
import compare  # noqa: E402
import peers  # noqa: E402

from launch import UNBOUNDED_HI, UNBOUNDED_LO  # noqa: E402
from launch_bwd import Backward  # noqa: E402

root = Path(sys.argv[1])
loaded = {}


def forward(w, q, k, v):
    """O and LSE, by torch's FlashAttention-2, a sequence at a time where they are packed."""
    ratio = w.num_heads_q // w.num_heads_kv
    pad = w.head_dim_qk - w.head_dim_v

    def one(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(ratio, 2), v.repeat_interleave(ratio, 2)))
        v = torch.nn.functional.pad(v, (0, pad)) if pad > 0 else v
        if w.window is not None:
            raise peers.Unsupported("window")
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, w.causal, scale=w.softmax_scale)
        return o[..., : w.head_dim_v].transpose(1, 2).contiguous(), lse.contiguous()

    if not w.lengths:
        return one(q, k, v)
    parts = [one(*(compare.sequence(w, x, i)[None] for x in (q, k, v))) for i in range(len(w.lengths))]
    return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1).contiguous()


def maker(name):
    if name not in loaded:
        loaded[name] = Backward(root, name)

    def make(w, q, k, v, dout):
        mask = (UNBOUNDED_LO, UNBOUNDED_HI, 1, 0)
        if w.causal:
            mask = (UNBOUNDED_LO, 0, 1, 0)
        o, lse = forward(w, q, k, v)
        options = dict(mask=mask, scale=w.softmax_scale)
        if w.lengths:
            options |= dict(cu=peers.cu_seqlens(w, q.device), longest=max(w.lengths))
        return loaded[name].prepare(q, k, v, o, lse, dout, **options)

    return make


def apart(name, w):
    """Microseconds of each launch, and of how many of 20 repeats the bits differ."""
    inputs = peers.make_inputs(w)
    run = maker(name)(w, *inputs)
    first = [x.clone() for x in run()]
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    samples = []
    for _ in range(7):
        flush.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(run.number + 1)]
        events[0].record()
        for which in range(run.number):
            run.launch(which)
            events[which + 1].record()
        torch.cuda.synchronize()
        samples.append([a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:])])
    times = " ".join(f"{sorted(launch)[3]:.1f}" for launch in zip(*samples))
    changed = sum(any(not torch.equal(a, b) for a, b in zip(first, run())) for _ in range(20))
    return f"launches {times} us, bits changed in {changed} of 20"


def main():
    names = sys.argv[4].split(",") if len(sys.argv) > 4 and sys.argv[4] != "-" else []
    budget = float(sys.argv[5]) if len(sys.argv) > 5 else 1e9
    rounds = int(sys.argv[6]) if len(sys.argv) > 6 else 3
    started = time.monotonic()
    for line in Path(sys.argv[3]).read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        table, pattern, *variants = line.split()
        for variant in variants:
            peers.PEERS[variant] = (None, maker(variant))
        for w in peers.TABLES[table]:
            if not re.search(pattern, str(w)):
                continue
            if time.monotonic() - started > budget:
                print("out of budget")
                return
            results = compare.measure(w, "normal", [*names, *variants], "burst", rounds, 0)
            best = max((results[n].get("speed", 0) for n in names), default=0)
            cells = " ".join(f"{n} {compare.cell(results[n])}" for n in [*names, *variants])
            ours = max((results[n].get("speed", 0), n) for n in variants)
            ratio = f"{ours[0] / best:.3f} ({ours[1]})" if best else ""
            print(f"{table} {w!s}: {cells} | {ratio}", flush=True)
            for n in [*names, *variants]:
                if "speed" not in results[n]:
                    print("   ", n, results[n], flush=True)
            del results
            torch.cuda.empty_cache()
            print("   ", ours[1], apart(ours[1], w), flush=True)


if __name__ == "__main__":
    main()
