"""Times the backward of modified scores beside what people use for them: `FMHA_LIB=libfmha_c.so python3 modifiers_bwd.py KIT PLAN [BUDGET]`.

KIT holds peers.py, compare.py and bench/ours.py. PLAN is words with commas, `WHAT:DIM`, WHAT one of plain, softcap, alibi,
bias (with dBias), dropout, with `-causal` behind it or not. B4 H16 S4096, bf16, TFLOP/s of 2.5 times the forward's operations
(half the pairs for causal): FlexAttention compiled, FlashAttention-2, cuDNN and memory-efficient attention as torch calls
them, and ours, in turns, bursts with the L2 flushed before each call. Gradients but dropout's, whose masks are not alike, are
held to float64 of one head; a peer whose gradients are wrong or that fails is named, not timed. With WARM set, FlexAttention
is compiled and nothing timed: torch keeps what it compiled.
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

BATCH, HEADS, SEQLEN, SOFTCAP, P_DROP, HEAD = 4, 16, 4096, 30.0, 0.1, 3
flex = torch.compile(flex_attention, dynamic=False)


class Row:
    """What compare.burst asks of a workload."""

    decode = False


def reference(what, causal, q, k, v, dout, bias, slopes, dim):
    """(dQ, dK, dV) of one head of the first sequence, in float64."""
    q, k, v = (x[0, :, HEAD].double().requires_grad_() for x in (q, k, v))
    s = q @ k.T * dim**-0.5
    j = torch.arange(SEQLEN, device="cuda")
    if what == "softcap":
        s = SOFTCAP * torch.tanh(s / SOFTCAP)
    if what == "alibi":
        s = s - slopes[HEAD].double() * (j[:, None] - j).abs()
    if what == "bias":
        s = s + bias[HEAD].double()
    if causal:
        s = s.masked_fill(j > j[:, None], float("-inf"))
    return torch.autograd.grad(torch.softmax(s, -1) @ v, (q, k, v), dout[0, :, HEAD].double())


def peers_of(what, causal, q, k, v, dout, bias, slopes):
    """{name: call that returns (dQ, dK, dV, ...), [batch, seqlen, heads, dim]}; the forward has been run."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    qt, kt, vt = (x.transpose(1, 2) for x in leaves)
    learned = bias.detach().clone().requires_grad_() if bias is not None else None
    wanted = leaves + ([learned] if bias is not None else [])
    mods = {
        "plain": None,
        "softcap": lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP),
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        "bias": lambda s, b, h, i, j: s + learned[h, i, j],
    }

    def backward_of(forward):
        def prepare():
            out = forward().transpose(1, 2)
            return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)

        return prepare

    def sdpa(backend, **words):
        def forward():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(qt, kt, vt, is_causal=causal, **words)

        return backward_of(forward)

    peers = {}
    if what in mods:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, SEQLEN, SEQLEN) if causal else None
        peers["flex"] = backward_of(lambda: flex(qt, kt, vt, score_mod=mods[what], block_mask=block_mask))
    if what == "plain":
        peers["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if what == "dropout":
        peers["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION, dropout_p=P_DROP)
        peers["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, dropout_p=P_DROP)
    if what == "bias":
        mask = lambda: learned[None].expand(BATCH, -1, -1, -1)  # noqa: E731
        peers["efficient"] = lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION, attn_mask=mask())()
    return peers


def through_library(what, causal, q, k, v, dout, bias, slopes):
    """One backward call of the library, after its forward: returns (dQ, dK, dV)."""
    from ours import DTYPE, Call, _options, _runner

    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1].numel(), device="cuda")
    call = Call(
        batch=BATCH, seqlen_q=SEQLEN, seqlen_k=SEQLEN, num_heads_q=HEADS,
        num_heads_kv=HEADS, head_dim_qk=q.shape[-1], head_dim_v=q.shape[-1], mask=b"b" if causal else b"0",
        dtype_qk=DTYPE[q.dtype], dtype_v=DTYPE[v.dtype], dtype_o=DTYPE[o.dtype],
        stream=torch.cuda.current_stream().cuda_stream, write_lse=1,
    )  # fmt: skip
    call.tensors(q=q, k=k, v=v, o=o)
    call.args.lse = lse.data_ptr()
    # [batch, query, head, key], in the order of FmhaStrides
    of_all = lambda x: x[None].expand(BATCH, -1, -1, -1).transpose(1, 2)  # noqa: E731
    if what == "softcap":
        call.problem.softcap = pointer(c_float(SOFTCAP))
    if what == "alibi":
        call.problem.bias_kind, call.args.alibi_slopes = 2, slopes.data_ptr()
    if what == "bias":
        call.tensors(bias=of_all(bias))
        call.problem.bias_kind, call.problem.dtype_bias = 1, DTYPE[bias.dtype]
    if what == "dropout":
        call.problem.p_drop, call.args.dropout_seed, call.args.dropout_seeded = P_DROP, 1, 1
    _runner(call, _options(timed=False, backward=False))()
    grads = [torch.empty_like(x) for x in (q, k, v)]
    back = call.backward(DTYPE[q.dtype], **dict(zip(("dout", "dq", "dk", "dv"), (dout, *grads))))
    dbias = torch.empty_like(bias) if bias is not None else None
    if dbias is not None:
        back.tensors(back.gradients, dbias=of_all(dbias))
        back.gradients.write_dbias, back.gradients.dtype_dbias = 1, DTYPE[dbias.dtype]
    queue = _runner(back, _options(timed=True, backward=True))

    def run():
        queue()
        return grads

    run.held = o, lse, dbias
    return run


def main():
    budget, warm = float(sys.argv[3]) if len(sys.argv) > 3 else 1e9, bool(os.environ.get("WARM"))
    started = time.monotonic()
    for words, dim in (word.split(":") for word in sys.argv[2].split(",")):
        if time.monotonic() - started > budget:
            print("out of budget")
            return
        what, causal, dim = words.removesuffix("-causal"), words.endswith("-causal"), int(dim)
        generator = torch.Generator("cuda").manual_seed(1)
        q, k, v, dout = (
            torch.randn(BATCH, SEQLEN, HEADS, dim, device="cuda", generator=generator).bfloat16() for _ in range(4)
        )
        bias = torch.randn(HEADS, SEQLEN, SEQLEN, device="cuda", generator=generator).bfloat16() if what == "bias" else None
        slopes = torch.tensor([2.0 ** (-(h + 1) / 2) for h in range(HEADS)], device="cuda")
        operands = (what, causal, q, k, v, dout, bias, slopes)
        expected = None if what == "dropout" or warm else reference(*operands, dim)
        makers = peers_of(*operands) | ({} if warm else {"ours": lambda: through_library(*operands)})
        fns = {}
        for name, make in makers.items():
            try:
                fn = make()
                got = fn()
                torch.cuda.synchronize()
            except Exception as failure:
                print(f"  {name}: {' '.join(repr(failure).split())[:200]}", flush=True)
                continue
            errors = [] if expected is None else [
                ((x[0, :, HEAD].double() - y).norm() / y.norm()).item() for x, y in zip(got, expected)
            ]  # fmt: skip
            if all(error < 1e-2 for error in errors):
                fns[name] = fn
            else:
                print(f"  {name}: wrong, relative errors {errors}", flush=True)
        if not warm:
            times = compare.burst(fns, Row, 3)
            flops = 10 * BATCH * HEADS * SEQLEN * SEQLEN * dim / (2 if causal else 1)
            print(f"{words} D{dim}:", *(f"{name} {flops / t['ms'] * 1e-9:.0f}" for name, t in times.items()), flush=True)
        del fns, bias
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
