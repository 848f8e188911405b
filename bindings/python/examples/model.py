"""A small transformer whose attention is whatever it is given: the examples train it, and generate with it."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Fast kernels of GPUs take 16 bits; the CPU's kernels take 16 or 32.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

LAYERS, HEADS, HEADS_KV, HEAD_DIM = 2, 4, 2, 32
WIDTH = HEADS * HEAD_DIM
CONTEXT = 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, attend):
        # Slices of one buffer are passed as they lie: attention copies nothing.
        fused = self.qkv(self.before(x)).to(DTYPE).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = fused.split([HEADS, HEADS_KV, HEADS_KV], dim=-2)
        x = x + self.out(attend(q, k, v).flatten(-2).to(x.dtype))
        return x + self.mlp(self.between(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, tokens, attend, positions=None):
        """Logits ``[..., n, vocabulary]``; ``attend(layer, q, k, v)`` gives O."""
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, lambda q, k, v, layer=layer: attend(layer, q, k, v))
        return self.head(x)
