"""Accuracy beside the peers: `FMHA_LIB=libfmha_c.so python3 rmse.py KIT [PEER,...]`.

RMSE against float64, B2 H4 S4096 D128. O of each type without a mask: standard normal inputs, and the same with N(0,
100) added to one element of a thousand (FlashAttention-3, section 4.3). Then dQ, dK and dV in bf16, full and causal;
ours also deterministic. KIT holds peers.py and bench/ours.py.
"""

import os
import sys

import torch

sys.path.insert(0, sys.argv[1])
import peers  # noqa: E402

names = sys.argv[2].split(",") if len(sys.argv) > 2 else ["fa3", "cudnn"]
generator = torch.Generator("cuda").manual_seed(1)


def drawn(dtype, outliers=False):
    x = torch.randn(2, 4096, 4, 128, device="cuda", generator=generator, dtype=torch.float64)
    if outliers:
        rare = torch.rand(x.shape, device="cuda", generator=generator) < 1e-3
        x += 10 * torch.randn(x.shape, device="cuda", generator=generator, dtype=torch.float64) * rare
    return x.to(dtype)


def exact(q, k, v, causal=False):
    s = torch.einsum("bihd,bjhd->bhij", q, k) * 128**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v)


def workload(dtype, **more):
    dims = dict(seqlen_q=4096, seqlen_k=4096, num_heads_q=4, num_heads_kv=4, head_dim_qk=128, head_dim_v=128)
    return peers.Workload(batch=2, dtype=dtype, **dims, **more)


def rmse(x, expected):
    return f"{(x.double() - expected).square().mean().sqrt():.2e}"


for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn)):
    for outliers in (False, True):
        inputs = [drawn(dtype, outliers) for _ in range(3)]
        expected, cells = exact(*(x.double() for x in inputs)), []
        for who in [*names, "ours"]:
            fn = peers.make(who, workload(name), inputs)
            cells.append(f"{who} {rmse(fn().double() / getattr(fn, 'scale_o', 1.0), expected)}")
        print(name, "outliers" if outliers else "normal", *cells, sep="  ")

for causal in (False, True):
    inputs = [drawn(torch.bfloat16) for _ in range(4)]
    *operands, dout = (x.double().requires_grad_() for x in inputs)
    expected = torch.autograd.grad(exact(*operands, causal), operands, dout)
    w = workload("bf16", causal=causal, backward=True)
    for who in [*names, "ours", "ours deterministic"]:
        os.environ["OURS_DETERMINISTIC"] = "1" if "deterministic" in who else ""
        grads = peers.make(who.split()[0], w, inputs)()
        cells = (rmse(x, y) for x, y in zip(grads, expected))
        print("causal" if causal else "full", who, *cells, sep="  ", flush=True)
