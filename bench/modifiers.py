"""Times modified scores beside what people use for them: `FMHA_LIB=... python3 modifiers.py KIT PLAN [BUDGET]`.

KIT holds peers.py, compare.py and bench/ours.py. PLAN is words with commas, `WHAT:DIM`, WHAT one of plain, softcap,
alibi, bias (backward with dBias), dropout, with `-causal`, `-bwd` or both in this order behind it. B4 H16 S4096,
bf16, TFLOP/s (half the pairs for causal; backward as 2.5 times the forward's operations): FlexAttention compiled,
FlashAttention-2, cuDNN and memory-efficient attention as torch calls them, and ours, in turns, bursts with the L2
flushed before each call. Results but dropout's, whose masks are not alike, are held to float64 of one head; a peer
whose results are wrong or that fails is named, not timed. With WARM set, FlexAttention is compiled and nothing timed:
torch keeps what it compiled.
"""

import os
import sys
import time
from ctypes import c_float, pointer

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, sys.argv[1])
import compare  # noqa: E402
from ours import DTYPE, Call, _options, _runner  # noqa: E402

BATCH, HEADS, SEQLEN, SOFTCAP, P_DROP, HEAD = 4, 16, 4096, 30.0, 0.1, 3
flex = torch.compile(flex_attention, dynamic=False)


class Row:
    """What compare.burst asks of a workload."""

    decode = False


class Operands:
    """Q, K, V, dO, the bias and the slopes of one word of the plan, drawn by a seed."""

    def __init__(self, words, dim):
        self.what, *more = words.split("-")
        self.causal, self.backward, self.dim = "causal" in more, "bwd" in more, dim
        draw = torch.Generator("cuda").manual_seed(1)
        drawn = lambda *shape: torch.randn(*shape, device="cuda", generator=draw).bfloat16()  # noqa: E731
        self.q, self.k, self.v = (drawn(BATCH, SEQLEN, HEADS, dim) for _ in range(3))
        self.dout = drawn(BATCH, SEQLEN, HEADS, dim) if self.backward else None
        self.bias = drawn(HEADS, SEQLEN, SEQLEN) if self.what == "bias" else None
        self.slopes = torch.tensor([2.0 ** (-(h + 1) / 2) for h in range(HEADS)], device="cuda")

    def flops(self):
        return (10 if self.backward else 4) * BATCH * HEADS * SEQLEN * SEQLEN * self.dim / (2 if self.causal else 1)


def reference(it):
    """(O,) or (dQ, dK, dV) of one head of the first sequence, in float64."""
    q, k, v = (x[0, :, HEAD].double().requires_grad_(it.backward) for x in (it.q, it.k, it.v))
    s = q @ k.T * it.dim**-0.5
    j = torch.arange(SEQLEN, device="cuda")
    if it.what == "softcap":
        s = SOFTCAP * torch.tanh(s / SOFTCAP)
    if it.what == "alibi":
        s = s - it.slopes[HEAD].double() * (j[:, None] - j).abs()
    if it.what == "bias":
        s = s + it.bias[HEAD].double()
    if it.causal:
        s = s.masked_fill(j > j[:, None], float("-inf"))
    o = torch.softmax(s, -1) @ v
    return torch.autograd.grad(o, (q, k, v), it.dout[0, :, HEAD].double()) if it.backward else (o,)


def peers_of(it):
    """{name: maker of a call that returns (O,) or (dQ, dK, dV, ...), each [batch, seqlen, heads, dim]}."""
    leaves = [x.detach().clone().requires_grad_(it.backward) for x in (it.q, it.k, it.v)]
    qt, kt, vt = (x.transpose(1, 2) for x in leaves)
    bias = it.bias if it.bias is None else it.bias.detach().clone().requires_grad_(it.backward)
    wanted = leaves + ([bias] if bias is not None else [])
    mods = {
        "plain": None,
        "softcap": lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP),
        "alibi": lambda s, b, h, i, j: s - it.slopes[h] * (i - j).abs(),
        "bias": lambda s, b, h, i, j: s + bias[h, i, j],
    }

    def maker(forward):
        def make():
            if not it.backward:
                return lambda: (forward().transpose(1, 2),)
            out = forward().transpose(1, 2)
            return lambda: torch.autograd.grad(out, wanted, it.dout, retain_graph=True)

        return make

    def sdpa(backend, **words):
        def forward():
            with sdpa_kernel(backend):
                given = {name: word() if callable(word) else word for name, word in words.items()}
                return scaled_dot_product_attention(qt, kt, vt, is_causal=it.causal, **given)

        return maker(forward)

    peers = {}
    if it.what in mods:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, SEQLEN, SEQLEN) if it.causal else None
        peers["flex"] = maker(lambda: flex(qt, kt, vt, score_mod=mods[it.what], block_mask=block_mask))
    if it.what == "plain":
        peers["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if it.what == "dropout":
        peers["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION, dropout_p=P_DROP)
        peers["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, dropout_p=P_DROP)
    if it.what == "bias" and (it.backward or not it.causal):
        name, backend = ("efficient", "EFFICIENT") if it.backward else ("cudnn", "CUDNN")
        backend = getattr(SDPBackend, f"{backend}_ATTENTION")
        peers[name] = sdpa(backend, attn_mask=lambda: bias[None].expand(BATCH, -1, -1, -1))
    return peers


def through_library(it):
    """One call of the library, a backward after its forward: returns (O,) or (dQ, dK, dV)."""
    o, lse = torch.empty_like(it.q), torch.empty(it.q.shape[:-1].numel(), device="cuda")
    call = Call(
        batch=BATCH, seqlen_q=SEQLEN, seqlen_k=SEQLEN, num_heads_q=HEADS,
        num_heads_kv=HEADS, head_dim_qk=it.dim, head_dim_v=it.dim, mask=b"b" if it.causal else b"0",
        dtype_qk=DTYPE[it.q.dtype], dtype_v=DTYPE[it.v.dtype], dtype_o=DTYPE[o.dtype],
        stream=torch.cuda.current_stream().cuda_stream, write_lse=it.backward,
    )  # fmt: skip
    call.tensors(q=it.q, k=it.k, v=it.v, o=o)
    # [batch, query, head, key], in the order of FmhaStrides
    of_all = lambda x: x[None].expand(BATCH, -1, -1, -1).transpose(1, 2)  # noqa: E731
    if it.backward:
        call.args.lse = lse.data_ptr()
    if it.what == "softcap":
        call.problem.softcap = pointer(c_float(SOFTCAP))
    if it.what == "alibi":
        call.problem.bias_kind, call.args.alibi_slopes = 2, it.slopes.data_ptr()
    if it.what == "bias":
        call.tensors(bias=of_all(it.bias))
        call.problem.bias_kind, call.problem.dtype_bias = 1, DTYPE[it.bias.dtype]
    if it.what == "dropout":
        call.problem.p_drop, call.args.dropout_seed, call.args.dropout_seeded = P_DROP, 1, 1
    queue, results = _runner(call, _options(timed=not it.backward, backward=False)), (o,)
    if it.backward:
        queue()
        results = [torch.empty_like(x) for x in (it.q, it.k, it.v)]
        back = call.backward(DTYPE[it.q.dtype], **dict(zip(("dout", "dq", "dk", "dv"), (it.dout, *results))))
        if it.bias is not None:
            it.dbias = torch.empty_like(it.bias)
            back.tensors(back.gradients, dbias=of_all(it.dbias))
            back.gradients.write_dbias, back.gradients.dtype_dbias = 1, DTYPE[it.dbias.dtype]
        queue = _runner(back, _options(timed=True, backward=True))

    def run():
        queue()
        return results

    run.held = it, o, lse
    return run


def main():
    budget, warm = float(sys.argv[3]) if len(sys.argv) > 3 else 1e9, bool(os.environ.get("WARM"))
    started = time.monotonic()
    for words, dim in (word.split(":") for word in sys.argv[2].split(",")):
        if time.monotonic() - started > budget:
            print("out of budget")
            return
        it = Operands(words, int(dim))
        expected = [] if it.what == "dropout" or warm else reference(it)
        makers = peers_of(it) | ({} if warm else {"ours": lambda: through_library(it)})
        fns = {}
        for name, make in makers.items():
            try:
                fn = make()
                got = fn()
                torch.cuda.synchronize()
            except Exception as failure:
                print(f"  {name}: {' '.join(repr(failure).split())[:200]}", flush=True)
                continue
            errors = [((x[0, :, HEAD].double() - y).norm() / y.norm()).item() for x, y in zip(got, expected)]
            if all(error < 1e-2 for error in errors):
                fns[name] = fn
            else:
                print(f"  {name}: wrong, relative errors {errors}", flush=True)
        if not warm:
            times = compare.burst(fns, Row, 3)
            cells = (f"{name} {it.flops() / t['ms'] * 1e-9:.0f}" for name, t in times.items())
            print(f"{words} D{dim}:", *cells, flush=True)
        del fns, it, makers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
