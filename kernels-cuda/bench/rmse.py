"""Accuracy beside the peers: `FMHA_LIB=libfmha_c.so python3 rmse.py KIT [PEER,...]`.

RMSE against float64 of each library's O, B2 H4 S4096 D128, no mask: standard normal inputs, and the same
with N(0, 100) added to one element of a thousand (FlashAttention-3, section 4.3). KIT holds peers.py.
"""

import sys

import torch

sys.path.insert(0, sys.argv[1])
import ours  # noqa: E402
import peers  # noqa: E402

names = sys.argv[2].split(",") if len(sys.argv) > 2 else ["fa3", "cudnn"]
generator = torch.Generator("cuda").manual_seed(1)


def inputs(dtype, outliers):
    x = torch.randn(2, 4096, 4, 128, device="cuda", generator=generator, dtype=torch.float64)
    if outliers:
        rare = torch.rand(x.shape, device="cuda", generator=generator) < 1e-3
        x += 10 * torch.randn(x.shape, device="cuda", generator=generator, dtype=torch.float64) * rare
    return x.to(dtype)


def exact(q, k, v):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.transpose(2, 3) * 128**-0.5, -1) @ v).transpose(1, 2)


for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn)):
    for outliers in (False, True):
        q, k, v = (inputs(dtype, outliers) for _ in range(3))
        reference = exact(q, k, v)
        w = peers.Workload(batch=2, seqlen_q=4096, seqlen_k=4096, num_heads_q=4, num_heads_kv=4, head_dim_qk=128,
                           head_dim_v=128, dtype=name)  # fmt: skip
        makers = {n: peers.PEERS[n][0] for n in names} | {"ours": ours.make}
        cells = []
        for who, make in makers.items():
            fn = make(w, q, k, v)
            error = fn().double() / getattr(fn, "scale_o", 1.0) - reference
            cells.append(f"{who} {error.square().mean().sqrt():.2e}")
        print(name, "outliers" if outliers else "normal", *cells, sep="  ")
