"""Accuracy of gradients beside the peers: `FMHA_LIB=libfmha_c.so python3 rmse_bwd.py KIT [PEER,...]`.

RMSE against float64 of dQ, dK and dV, B2 H4 S4096 D128, bf16, standard normal inputs, full and causal; ours also
deterministic. KIT holds peers.py and bench/ours.py.
"""

import os
import sys

import torch

sys.path.insert(0, sys.argv[1])
import peers  # noqa: E402

names = sys.argv[2].split(",") if len(sys.argv) > 2 else ["fa3", "cudnn"]
generator = torch.Generator("cuda").manual_seed(1)


def exact(q, k, v, dout, causal):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * 128**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v), (q, k, v), dout.double())


for causal in (False, True):
    inputs = [torch.randn(2, 4096, 4, 128, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    expected = exact(*inputs, causal)
    w = peers.Workload(batch=2, seqlen_q=4096, seqlen_k=4096, num_heads_q=4, num_heads_kv=4, head_dim_qk=128,
                       head_dim_v=128, dtype="bf16", causal=causal, backward=True)  # fmt: skip
    for name in [*names, "ours", "ours deterministic"]:
        os.environ["OURS_DETERMINISTIC"] = "1" if "deterministic" in name else ""
        grads = peers.make(name.split()[0], w, inputs)()
        errors = [(x.double() - y).square().mean().sqrt().item() for x, y in zip(grads, expected)]
        print("causal" if causal else "full", name, *(f"{e:.2e}" for e in errors), sep="  ", flush=True)
