"""Generation over a paged cache: requests of several lengths share a pool of pages; each step adds a token to each."""

import torch

import fmha
from model import CONTEXT, DEVICE, DTYPE, HEAD_DIM, HEADS_KV, LAYERS, Transformer
from train import fused

PAGE = 16
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7, 1], [1, 4, 1, 4, 2, 1, 3, 5, 6]]
STEPS = 8


class Cache:
    """Keys and values of every layer in pages; which pages are whose, and how many rows each request has."""

    def __init__(self, requests):
        pages = CONTEXT // PAGE
        shape = LAYERS, requests * pages, PAGE, HEADS_KV, HEAD_DIM
        self.k, self.v = (torch.zeros(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
        # Pages lie in any order, as in a long-running server.
        order = torch.randperm(requests * pages).to(torch.int32)
        self.table = order.view(requests, pages).to(DEVICE)
        self.rows = torch.zeros(requests, dtype=torch.int32, device=DEVICE)

    def attend(self, layer, q, k, v):
        """Appends the new rows of each request, and attends to all that it has. Lengths are read on the device."""
        return fmha.attention_with_kvcache(
            q, self.k[layer], self.v[layer], k, v, seqused_k=self.rows, block_table=self.table, max_seqlen_k=CONTEXT
        )


@torch.no_grad()
def generate(model):
    cache = Cache(len(PROMPTS))
    tokens = torch.zeros(len(PROMPTS), dtype=torch.int64, device=DEVICE)
    for request, prompt in enumerate(PROMPTS):  # each prompt at once: a cache of one request is a row of the table
        one = Cache.__new__(Cache)
        one.k, one.v = cache.k, cache.v
        one.table, one.rows = cache.table[request : request + 1], cache.rows[request : request + 1]
        logits = model(torch.tensor([prompt], device=DEVICE), one.attend)
        tokens[request] = logits[0, -1].argmax()
        cache.rows[request] += len(prompt)
    written = [tokens]
    for _ in range(STEPS - 1):  # then a token of every request in each step
        logits = model(tokens[:, None], cache.attend, positions=cache.rows[:, None].long())
        tokens = logits[:, -1].argmax(-1)
        cache.rows += 1
        written.append(tokens)
    return torch.stack(written, dim=1).tolist()


@torch.no_grad()
def without_cache(model, prompt):
    """The same tokens, everything computed anew for each."""
    tokens = list(prompt)
    for _ in range(STEPS):
        tokens.append(model(torch.tensor([tokens], device=DEVICE), fused)[0, -1].argmax().item())
    return tokens[len(prompt) :]


def main():
    torch.manual_seed(0)
    model = Transformer(vocabulary=10).to(DEVICE)
    written = generate(model)
    for prompt, tokens in zip(PROMPTS, written):
        print("".join(map(str, prompt)), "->", "".join(map(str, tokens)))
    # Two near-equal logits may change places in 16 bits, but not in f32.
    if DTYPE == torch.float32:
        assert written == [without_cache(model, prompt) for prompt in PROMPTS]


if __name__ == "__main__":
    main()
