"""Checks compiled sm90 forward kernels against float64 on random shapes: `python3 check.py FOLDER`.

FOLDER holds one folder a kernel (examples/render.rs, nvrtc.py) and `kernels.txt`, the lines that made them.
"""

import math
import random
import sys
from pathlib import Path

import torch

from launch import UNBOUNDED_HI, UNBOUNDED_LO, Kernel


def reference(q, k, v, mask, scale, softcap=0.0, sink=None, alibi=None):
    """One sequence, [rows, heads, dim] in float64: O, LSE [heads, rows]."""
    hq, hkv = q.shape[1], k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(hq // hkv, 0) for x in (k, v))
    s = q @ k.transpose(1, 2) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    sq, sk = s.shape[1:]
    i, j = torch.arange(sq, device=q.device)[:, None], torch.arange(sk, device=q.device)[None]
    if alibi is not None:
        s = s - alibi.double()[:, None, None] * (i + sk - sq - j).abs()
    lo, hi, bottom_right, sinks = mask
    diag = sk - sq if bottom_right else 0
    seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if hi != UNBOUNDED_HI:
        seen &= j - i <= hi + diag
    if lo != UNBOUNDED_LO:
        seen &= (j - i >= lo + diag) | (j < sinks)
    s = s.masked_fill(~seen, -math.inf)
    if sink is not None:
        s = torch.cat([s, sink.double()[:, None, None].expand(-1, sq, 1)], 2)
    lse = torch.logsumexp(s, 2) if s.shape[2] else torch.full((hq, sq), -math.inf, device=q.device, dtype=torch.double)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None])[:, :, :sk]
    return (p @ v).transpose(0, 1), lse


def lengths(n, rng, most):
    return [rng.choice([0, 1, 2, rng.randint(1, most), rng.randint(1, most)]) for _ in range(n)]


def one(kernel, fields, rng):
    """Runs one random problem; returns the worst error relative to what the type's rounding explains."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[fields.get("dtype", "bf16")]
    dqk = int(fields.get("dim", 128))
    dv = int(fields.get("dim_v", dqk))
    hkv = rng.choice([1, 2, 3])
    hq = hkv * rng.choice([1, 2, 4, 8])
    group = fields.get("group") == "1"
    kind = fields.get("mask", "Full")
    mask = [UNBOUNDED_LO, UNBOUNDED_HI, rng.choice([0, 1]), 0]
    if kind != "Full":
        mask[1] = rng.choice([0, 0, rng.randint(-300, 300)])
    if kind == "Band":
        mask[0] = mask[1] - rng.choice([0, 10, rng.randint(0, 700)])
        if rng.random() < 0.3:
            mask[1] = UNBOUNDED_HI
        mask[3] = rng.choice([0, 5, 200]) if fields.get("sink_columns") == "1" else 0
    negative = fields.get("negative_scale") == "1"
    scale = rng.choice([dqk**-0.5, 0.3, 0.0]) * (-1 if negative else 1)
    if negative and scale == 0:
        scale = -0.1
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)
    softcap = 2.0 if fields.get("softcap") == "1" else 0.0
    sink = torch.randn(hq, device="cuda") if fields.get("sink") == "1" else None
    alibi = torch.rand(hq, device="cuda") * 0.1 if fields.get("bias") == "alibi" else None
    options = dict(mask=tuple(mask), scale=scale, softcap=softcap, sink=sink, alibi=alibi)
    if fields.get("dtype_o") == "f32":
        options["dtype_o"] = torch.float32
    if group:
        n = rng.randint(1, 5)
        lq, lk = lengths(n, rng, 700), lengths(n, rng, 900)
        extents = [(a + rng.choice([0, 3]), b + rng.choice([0, 70])) for a, b in zip(lq, lk)]
        cu = lambda xs: torch.tensor([0, *xs], device="cuda").cumsum(0).to(torch.int32)
        cu_q, cu_k = cu([a for a, _ in extents]), cu([b for _, b in extents])
        tq, tk = max(int(cu_q[-1]), 1), max(int(cu_k[-1]), 1)
        q, k, v = make(tq, hq, dqk), make(tk, hkv, dqk), make(tk, hkv, dv)
        for x, cu_x, used in ((k, cu_k, lk), (v, cu_k, lk), (q, cu_q, lq)):
            for b in range(n):
                x[int(cu_x[b]) + used[b] : int(cu_x[b + 1])] = math.nan  # padding may hold anything
        int32 = lambda xs: torch.tensor(xs, dtype=torch.int32, device="cuda")
        run, o, lse = kernel.prepare(
            q, k, v, cu_q=cu_q, cu_k=cu_k, max_q=max(max(lq), 1), max_k=max(lk), used_q=int32(lq), used_k=int32(lk),
            **options,
        )  # fmt: skip
        parts = [
            (q[a : a + x], k[b : b + y], v[b : b + y], o[a : a + x], lse[:, a : a + x])
            for a, b, x, y in zip(cu_q.tolist(), cu_k.tolist(), lq, lk)
        ]
        written = sum(lq)
    else:
        b = rng.randint(1, 3)
        sq, sk = rng.randint(1, 900), rng.choice([0, rng.randint(1, 1200), rng.randint(1, 200)])
        q, k, v = make(b, sq, hq, dqk), make(b, sk, hkv, dqk), make(b, sk, hkv, dv)
        if sk and rng.random() < 0.3:  # broadcast over the batch, or over the heads: stride 0
            axis = rng.choice([0, 2])
            k, v = (x.narrow(axis, 0, 1).expand(x.shape) for x in (k, v))
        used_k = None
        if sk and k.is_contiguous() and rng.random() < 0.4:
            used = [rng.randint(0, sk) for _ in range(b)]
            used_k = torch.tensor(used, dtype=torch.int32, device="cuda")
            for x in range(b):
                k[x, used[x] :] = math.nan
                v[x, used[x] :] = math.nan
        else:
            used = [sk] * b
        run, o, lse = kernel.prepare(q, k, v, used_k=used_k, **options)
        parts = [(q[x], k[x, : used[x]], v[x, : used[x]], o[x], lse[x]) for x in range(b)]
        written = b * sq
    run()
    torch.cuda.synchronize()
    first = o.clone()
    o.fill_(math.nan)
    run()
    torch.cuda.synchronize()
    assert torch.equal(first.nan_to_num(7), o.nan_to_num(7)), "two runs differ"
    assert int((~o.isnan().all(-1)).sum()) == written * hq, "rows written that are none, or none where some are"
    worst = 0.0
    eps = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    if fields.get("poly", "0") != "0":
        eps += 2e-4
    for q1, k1, v1, o1, lse1 in parts:
        if q1.shape[0] == 0:
            continue
        expected, expected_lse = reference(q1, k1, v1, mask, scale, softcap, sink, alibi)
        bound = eps * (expected.abs() * 2 + (v1.double().abs().max() if len(v1) else 0) * 1.0) + 1e-6
        worst = max(worst, ((o1.double() - expected).abs() / bound).max().item())
        gone = expected_lse == -math.inf
        assert torch.equal(gone, lse1 == -math.inf), "LSE of rows that see nothing"
        assert (o1.transpose(0, 1)[gone] == 0).all() or sink is not None, "O of rows that see nothing"
        lse_error = (lse1.double() - expected_lse)[~gone].abs()
        assert not lse1.isnan().any(), "NaN in LSE"
        if lse_error.numel():
            worst = max(worst, (lse_error / (2e-4 if fields.get("poly", "0") != "0" else 1e-5 * (1 + expected_lse[~gone].abs().max()))).max().item())
    return worst


def main():
    root = Path(sys.argv[1])
    cases = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    failed = 0
    for line in (root / "kernels.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, *words = line.split()
        if len(sys.argv) > 3 and not name.startswith(sys.argv[3]):
            continue
        fields = dict(w.split("=") for w in words)
        kernel, rng = Kernel(root / name), random.Random(name)
        torch.manual_seed(0)
        worst, problems = 0.0, []
        for n in range(cases):
            try:
                error = one(kernel, fields, rng)
                worst = max(worst, error)
                if not error <= 1:
                    problems.append(f"case {n}: {error:.2f} of the bound")
            except AssertionError as reason:
                problems.append(f"case {n}: {reason}")
        failed += bool(problems)
        print(f"{name:24} {'FAILED' if problems else 'ok'}  worst {worst:.3f} of the bound  {'; '.join(problems[:3])}", flush=True)
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
