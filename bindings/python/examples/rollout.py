"""Rollout and training with equal bits: tokens are sampled over a paged cache, in steps that mix pieces of prompts and
single tokens; a trainer then computes their log-probabilities with all sequences packed. The difference is 0.

The layers around attention multiply a row at a time, so that theirs do not depend on how many rows come together.
"""

import torch

import fmha

HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 4, 2, 32, 24, 53
PAGE, PIECE, ANSWER = 7, 16, 12
PROMPTS = [3, 50, 21]


class Policy:
    def __init__(self, device):
        draw = torch.Generator().manual_seed(7)
        of = lambda *shape: (torch.rand(*shape, generator=draw) * 4 - 2).to(device).requires_grad_()
        self.embedding = of(VOCABULARY, WIDTH)
        self.q, self.k, self.v = of(HEADS * DIM, WIDTH), of(KV_HEADS * DIM, WIDTH), of(KV_HEADS * DIM, WIDTH)
        self.head = of(VOCABULARY, HEADS * DIM)

    def project(self, by, tokens):
        rows = torch.stack([by @ self.embedding[token] for token in tokens])
        return rows.unflatten(-1, (-1, DIM)).to(torch.bfloat16)

    def log_probabilities(self, row):
        return (self.head @ row.flatten().float()).log_softmax(-1)


def offsets(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def roll_out(policy, device):
    """Tokens of each sequence, and the log-probabilities of those that were sampled."""
    draw = torch.Generator().manual_seed(1)
    sequences = [[(7 * at + length) % VOCABULARY for at in range(length)] for length in PROMPTS]
    sampled, cached = [[] for _ in PROMPTS], [0 for _ in PROMPTS]
    wide = -(-(max(PROMPTS) + ANSWER) // PAGE)
    table = torch.randperm(len(PROMPTS) * wide, generator=draw).view(-1, wide).to(device, torch.int32)
    shape = (table.numel(), PAGE, KV_HEADS, DIM)
    k_pool, v_pool = (torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) for _ in "kv")
    while any(len(own) < ANSWER for own in sampled):
        taken = [
            tokens[at : at + PIECE] if len(own) < ANSWER else []
            for tokens, own, at in zip(sequences, sampled, cached)
        ]
        new = [token for tokens in taken for token in tokens]
        counts = [len(tokens) for tokens in taken]
        rows = dict(cu_seqlens_q=offsets(counts, device), max_seqlen_q=PIECE)
        o = fmha.attention_with_kvcache(
            policy.project(policy.q, new),
            k_pool,
            v_pool,
            policy.project(policy.k, new),
            policy.project(policy.v, new),
            cu_seqlens_new=rows["cu_seqlens_q"],
            max_seqlen_new=PIECE,
            seqused_k=torch.tensor(cached, dtype=torch.int32, device=device),
            block_table=table,
            **rows,
        )
        last = -1
        for at, count in enumerate(counts):
            last += count
            cached[at] += count
            if count and cached[at] == len(sequences[at]):
                chances = policy.log_probabilities(o[last])
                token = int(torch.multinomial(chances.exp().cpu(), 1, generator=draw))
                sequences[at].append(token)
                sampled[at].append(chances[token])
    return sequences, sampled


def train(policy, sequences, device):
    """Log-probabilities of what was sampled, from one packed call."""
    inputs = [tokens[:-1] for tokens in sequences]
    together = [token for tokens in inputs for token in tokens]
    lengths = [len(tokens) for tokens in inputs]
    begins = offsets(lengths, device)
    o = fmha.attention(
        *(policy.project(by, together) for by in (policy.q, policy.k, policy.v)),
        mask="causal",
        cu_seqlens_q=begins,
        cu_seqlens_k=begins,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
    )
    return [
        [policy.log_probabilities(o[begin + at - 1])[tokens[at]] for at in range(prompt, len(tokens))]
        for begin, prompt, tokens in zip(begins.tolist(), PROMPTS, sequences)
    ]


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy(device)
    with fmha.row_invariant():
        with torch.no_grad():
            sequences, sampled = roll_out(policy, device)
        trained = train(policy, sequences, device)
        # The context must cover backward too: a checkpointed layer is computed again there.
        (-sum(chance for own in trained for chance in own)).backward()
    pairs = [(a, b) for own, again in zip(sampled, trained) for a, b in zip(own, again)]
    most = max(float((a - b).detach().abs()) for a, b in pairs)
    print(f"   {len(pairs)} tokens sampled; largest difference of a log-probability in training: {most}")
    assert most == 0, "a row's bits are its own"
    assert all(torch.isfinite(x.grad).all() for x in (policy.embedding, policy.q, policy.k, policy.v, policy.head))


if __name__ == "__main__":
    main()
