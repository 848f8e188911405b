"""Packed sequences: documents of any length one after another, no padding computed or stored, with gradients."""

import torch

import fmha
from model import DEVICE, DTYPE

LENGTHS = [50, 3, 0, 120, 27]
HEADS, HEADS_KV, HEAD_DIM = 8, 2, 64


def main():
    torch.manual_seed(0)
    total = sum(LENGTHS)

    def rows(heads):
        return torch.randn(total, heads, HEAD_DIM, device=DEVICE).to(DTYPE).requires_grad_()

    q, k, v = rows(HEADS), rows(HEADS_KV), rows(HEADS_KV)
    # Offsets of the documents: each one's first token, and the end of the last. They lie on the device, where the
    # kernel reads them.
    first = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).to(torch.int32)
    longest = dict(max_seqlen_q=max(LENGTHS), max_seqlen_k=max(LENGTHS))
    o = fmha.attention(q, k, v, mask="causal", cu_seqlens_q=first, cu_seqlens_k=first, **longest)
    dout = torch.randn_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), dout)
    print(f"{total} rows instead of the {len(LENGTHS) * max(LENGTHS)} of a padded batch")

    # Each document computed alone gives the same rows.
    for begin, length in zip(first.tolist(), LENGTHS):
        here = slice(begin, begin + length)
        alone = [x[here].detach()[None].requires_grad_() for x in (q, k, v)]
        o_alone = fmha.attention(*alone, mask="causal")
        torch.testing.assert_close(o[here], o_alone[0], atol=2e-2 if DTYPE != torch.float32 else 1e-5, rtol=0)
        for whole, part in zip(gradients, torch.autograd.grad(o_alone, alone, dout[here][None])):
            torch.testing.assert_close(whole[here], part[0], atol=6e-2 if DTYPE != torch.float32 else 1e-4, rtol=0)


if __name__ == "__main__":
    main()
