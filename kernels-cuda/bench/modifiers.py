"""Times modified scores beside what people use for them: `python3 modifiers.py FOLDER KIT PLAN.txt [BUDGET]`.

FOLDER holds kernels as nvrtc.py leaves them, KIT peers.py and compare.py. A line of PLAN is `WHAT DIM KERNEL...`, WHAT one
of plain, softcap, alibi, bias, dropout, with `-causal` behind it or not; a kernel named `ours` is what the
library in $FMHA_LIB chooses, through its C ABI (KIT's ours.py is then bench/ours.py). B4 H16 S4096, bf16, TFLOP/s (half the pairs for
causal): FlexAttention compiled, FlashAttention-2 and cuDNN as torch calls them, and the kernels, in turns, bursts with
the L2 flushed before each call. Each output but dropout's, whose masks are not alike, is held to float64 on some rows.
"""

import math
import sys
import time
from ctypes import c_float, pointer
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, sys.argv[2])
import compare  # noqa: E402

from launch import UNBOUNDED_HI, UNBOUNDED_LO, Kernel  # noqa: E402

BATCH, HEADS, SEQLEN, SOFTCAP, P_DROP = 4, 16, 4096, 30.0, 0.1
flex = torch.compile(flex_attention, dynamic=False)


class Row:
    """What compare.burst asks of a workload."""

    decode = False


def reference(what, causal, q, k, v, bias, slopes, rows, scale):
    s = q[0, rows, 3].double() @ k[0, :, 3].double().T * scale
    j = torch.arange(SEQLEN, device="cuda")
    if what == "softcap":
        s = SOFTCAP * torch.tanh(s / SOFTCAP)
    if what == "alibi":
        s = s - slopes[3].double() * (rows[:, None] - j).abs()
    if what == "bias":
        s = s + bias[3, rows].double()
    if causal:
        s = s.masked_fill(j > rows[:, None], -math.inf)
    return torch.softmax(s, -1) @ v[0, :, 3].double()


def peers_of(what, causal, q, k, v, bias, slopes):
    """{name: call that returns [batch, seqlen, heads, dim]}."""
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    mods = {
        "plain": None,
        "softcap": lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP),
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        "bias": lambda s, b, h, i, j: s + bias[h, i, j],
    }
    calls = {}
    if what in mods:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, SEQLEN, SEQLEN) if causal else None
        calls["flex"] = lambda: flex(qt, kt, vt, score_mod=mods[what], block_mask=block_mask).transpose(1, 2)

    def sdpa(backend, **words):
        def run():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(qt, kt, vt, is_causal=causal, **words).transpose(1, 2)

        return run

    if what == "dropout":
        calls["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION, dropout_p=P_DROP)
        calls["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, dropout_p=P_DROP)
    if what == "bias" and not causal:
        calls["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, attn_mask=bias[None].expand(BATCH, -1, -1, -1))
    return calls


def through_library(what, causal, q, k, v, bias, slopes):
    """One call of the library: returns O."""
    from ours import DTYPE, Call, _options, _runner

    o = torch.empty_like(q)
    call = Call(
        batch=BATCH, seqlen_q=SEQLEN, seqlen_k=SEQLEN, num_heads_q=HEADS,
        num_heads_kv=HEADS, head_dim_qk=q.shape[-1], head_dim_v=q.shape[-1], mask=b"b" if causal else b"0",
        dtype_qk=DTYPE[q.dtype], dtype_v=DTYPE[v.dtype], dtype_o=DTYPE[o.dtype],
        stream=torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    call.tensors(q=q, k=k, v=v, o=o)
    if what == "softcap":
        call.problem.softcap = pointer(c_float(SOFTCAP))
    if what == "alibi":
        call.problem.bias_kind, call.args.alibi_slopes = 2, slopes.data_ptr()
    if what == "bias":  # [batch, query, head, key], in the order of FmhaStrides
        call.tensors(bias=bias[None].expand(BATCH, -1, -1, -1).transpose(1, 2))
        call.problem.bias_kind, call.problem.dtype_bias = 1, DTYPE[bias.dtype]
    if what == "dropout":
        call.problem.p_drop, call.args.dropout_seed, call.args.dropout_seeded = P_DROP, 1, 1
    queue = _runner(call, _options(timed=True, backward=False))

    def run():
        queue()
        return o

    return run


def main():
    root, budget = Path(sys.argv[1]), float(sys.argv[4]) if len(sys.argv) > 4 else 1e9
    started = time.monotonic()
    for line in Path(sys.argv[3]).read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if time.monotonic() - started > budget:
            print("out of budget")
            return
        words, dim, *kernels = line.split()
        what, causal = words.removesuffix("-causal"), words.endswith("-causal")
        dim = int(dim)
        generator = torch.Generator("cuda").manual_seed(1)
        q, k, v = (
            torch.randn(BATCH, SEQLEN, HEADS, dim, device="cuda", generator=generator).bfloat16() for _ in range(3)
        )
        bias = torch.randn(HEADS, SEQLEN, SEQLEN, device="cuda", generator=generator).bfloat16() if what == "bias" else None
        slopes = torch.tensor([2.0 ** (-(h + 1) / 2) for h in range(HEADS)], device="cuda")
        mask = (UNBOUNDED_LO, 0, 1, 0) if causal else (UNBOUNDED_LO, UNBOUNDED_HI, 0, 0)
        fns = peers_of(what, causal, q, k, v, bias, slopes)
        for name in kernels:
            if name == "ours":
                fns[name] = through_library(what, causal, q, k, v, bias, slopes)
                continue
            options = dict(mask=mask)
            if what == "softcap":
                options["softcap"] = SOFTCAP
            if what == "alibi":
                options |= dict(alibi=slopes)
            if what == "bias":
                options |= dict(bias=bias[None].expand(BATCH, -1, -1, -1))
            if what == "dropout":
                options |= dict(p_drop=P_DROP)
            fns[name] = Kernel(root / name).prepare(q, k, v, **options)[0]
        rows = torch.tensor([0, 1, 77, 2048, SEQLEN - 1], device="cuda")
        expected = None if what == "dropout" else reference(what, causal, q, k, v, bias, slopes, rows, dim**-0.5)
        for name in list(fns):
            try:
                got = fns[name]()[0, rows, 3].double()
                torch.cuda.synchronize()
                error = 0.0 if expected is None else ((got - expected).norm() / expected.norm()).item()
            except Exception as failure:
                print(f"  {name}: {' '.join(repr(failure).split())[:200]}")
                del fns[name]
                continue
            if not error < 1e-2:
                print(f"  {name}: wrong, relative error {error:.1e}")
                del fns[name]
        times = compare.burst(fns, Row, 3)
        flops = 4 * BATCH * HEADS * SEQLEN * SEQLEN * dim / (2 if causal else 1)
        cells = " ".join(f"{name} {flops / t['ms'] * 1e-9:.0f}" for name, t in times.items())
        print(f"{words} D{dim}: {cells}", flush=True)
        del fns, bias
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
