"""FP8: all three inputs in eight bits, or a cache in eight bits under queries in sixteen."""

import torch

import fmha
from model import DEVICE

LARGEST = 448  # of float8_e4m3fn


def quantised(x, axes):
    """``x`` in FP8 and what it is multiplied by to be ``x`` again: a number for all that ``axes`` leave."""
    descale = x.float().abs().amax(axes, keepdim=True) / LARGEST
    return (x / descale).to(torch.float8_e4m3fn), descale


def off_by(given, right):
    return ((given.float() - right.float()).norm() / right.float().norm()).item()


def main():
    torch.manual_seed(0)
    q = torch.randn(2, 128, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 128, 2, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v[:, :, 1] *= 10  # values of one head are ten times the other's: each has a number of its own
    right = fmha.attention(q, k, v, mask="causal")

    (k8, scale_k), (v8, scale_v) = (quantised(x, (1, 3)) for x in (k, v))  # [batch, 1, heads_kv, 1]
    scales = dict(descale_k=scale_k.view(2, 2), descale_v=scale_v.view(2, 2))
    # Q's scale belongs to the key head that query heads share, so its shape is [batch, heads_kv].
    q8, scale_q = quantised(q.unflatten(2, (2, 4)), (1, 3, 4))
    o = fmha.attention(q8.flatten(2, 3), k8, v8, mask="causal", descale_q=scale_q.view(2, 2), **scales)
    print(f"Q, K and V in FP8: O in {o.dtype}, off by {off_by(o, right):.1%}")
    assert o.dtype == torch.bfloat16 and off_by(o, right) < 0.1

    # An FP8 cache has half the memory to read for each token; queries and O keep their type.
    used = torch.tensor([128, 100], dtype=torch.int32, device=DEVICE)
    o = fmha.attention_with_kvcache(q[:, -1:], k8, v8, seqused_k=used, **scales)
    as_it_was = fmha.attention_with_kvcache(q[:, -1:], k, v, seqused_k=used)
    print(f"a cache in FP8: {k8.nbytes + v8.nbytes} bytes for {k.nbytes + v.nbytes}, off by {off_by(o, as_it_was):.1%}")
    assert o.dtype == torch.bfloat16 and off_by(o, as_it_was) < 0.1


if __name__ == "__main__":
    main()
