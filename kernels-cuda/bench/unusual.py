"""Time on inputs that are not normal, beside FlashAttention-3: `FMHA_LIB=libfmha_c.so python3 unusual.py KIT`.

The kernel guesses the maxima of most blocks, so its time depends on the data. B2 H16 S4096 D128, milliseconds a
call, ours / FlashAttention-3: medians of five rounds in turns, each of ten calls in a row. KIT holds peers.py.
"""

import statistics
import sys

import torch

sys.path.insert(0, sys.argv[1])
import ours  # noqa: E402
import peers  # noqa: E402

generator = torch.Generator("cuda").manual_seed(1)
SHAPE = (2, 4096, 16, 128)


def normal():
    return torch.randn(SHAPE, device="cuda", generator=generator)


def with_outliers():
    rare = torch.rand(SHAPE, device="cuda", generator=generator) < 1e-3
    return normal() + 10 * normal() * rare


def falling(first):
    """A factor for each key: `first` at the first key, 1 at the last."""
    return torch.linspace(first, 1, SHAPE[1], device="cuda")[None, :, None, None]


def with_sink():
    """Every query meets the first key at +10, as in models that rest there."""
    q, k = normal(), normal()
    q[..., 0] = 8
    k[:, 0, :, 0] = 10 / 8 * SHAPE[3] ** 0.5
    return q, k, normal()


INPUTS = {
    "normal": lambda: (normal(), normal(), normal()),
    "sink": with_sink,
    "Q x 2": lambda: (normal() * 2, normal(), normal()),
    "Q x 4": lambda: (normal() * 4, normal(), normal()),
    "Q x 8": lambda: (normal() * 8, normal(), normal()),
    "Q x 64": lambda: (normal() * 64, normal(), normal()),
    "Q x 1000": lambda: (normal() * 1000, normal(), normal()),
    "outliers": lambda: (with_outliers(), with_outliers(), with_outliers()),
    "K rising": lambda: (normal(), normal() * falling(6), normal()),
    "K towering": lambda: (normal(), normal() * falling(400), normal()),
    "constant": lambda: (normal(), torch.ones(SHAPE, device="cuda"), normal()),
}


def milliseconds(call, calls=10):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
    for causal in (False, True):
        w = peers.Workload(batch=SHAPE[0], seqlen_q=SHAPE[1], seqlen_k=SHAPE[1], num_heads_q=SHAPE[2],
                           num_heads_kv=SHAPE[2], head_dim_qk=SHAPE[3], head_dim_v=SHAPE[3], causal=causal,
                           dtype=name)  # fmt: skip
        cells = []
        for what, make in INPUTS.items():
            q, k, v = (x.to(dtype) for x in make())
            calls = [maker(w, q, k, v) for maker in (ours.make, peers.PEERS["fa3"][0])]
            rounds = [[milliseconds(call) for call in calls] for _ in range(6)][1:]
            times = [statistics.median(column) for column in zip(*rounds, strict=True)]
            cells.append(f"{what} {times[0]:.3f}/{times[1]:.3f} ms")
        print(name, "causal" if causal else "full", "ours/fa3:", *cells, sep="  ")
