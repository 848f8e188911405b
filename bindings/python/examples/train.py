"""A small transformer learns a text: attention and its gradients by fmha, all else by torch."""

import torch
from torch.nn import functional as F

import fmha
from model import CONTEXT, DEVICE, Transformer

TEXT = (
    "Attention is a mean: each query weighs every key that it may see, and takes that much of its value. The weights "
    "are a softmax of products, so they are positive and sum to one. Nothing of the matrix of weights need be kept. "
)


def fused(_layer, q, k, v):
    return fmha.attention(q, k, v, mask="causal")


def plain(_layer, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def train(attend, steps=20):
    """The losses of each step, and the model."""
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(letter) for letter in TEXT * 2], device=DEVICE)
    starts = torch.arange(0, len(TEXT), 40, device=DEVICE)
    model = Transformer(len(letters)).to(DEVICE)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        rows = ids[starts[:, None] + torch.arange(CONTEXT // 2 + 1, device=DEVICE)]
        logits = model(rows[:, :-1], attend)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, model


def main():
    ours, _ = train(fused)
    print(f"loss {ours[0]:.2f} to {ours[-1]:.2f} in {len(ours)} steps on {DEVICE}")
    assert ours[-1] < 0.5 * ours[0]
    # The first steps equal those with torch's own attention, before small differences grow.
    theirs, _ = train(plain, steps=3)
    assert all(abs(a - b) < 0.02 for a, b in zip(ours, theirs)), (ours[:3], theirs)


if __name__ == "__main__":
    main()
