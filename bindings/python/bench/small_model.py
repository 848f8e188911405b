"""A small Llama of transformers, from a config, random weights: its attention by this library's hook and by torch's.

    python bindings/python/bench/small_model.py [cpu] [f32]

In f32, where no two scores tie, tokens of 100 prompts and losses of training steps are equal to those by torch's
plain attention; with the word `f32` that is all. In bf16 it prints how far each model's logits are from those in f64,
how many prompts are continued by equal tokens, losses, and tokens a second. torch's own two backends (FlashAttention
and the plain one) are compared likewise: that is how far torch is from itself.
"""

from __future__ import annotations

import pathlib
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fmha.transformers  # noqa: E402

DEVICE = "cpu" if "cpu" in sys.argv or not torch.cuda.is_available() else "cuda"
WIDTH, LAYERS, HEADS, HEADS_KV = (512, 4, 8, 2) if DEVICE == "cuda" else (64, 2, 4, 2)
PROMPTS, LENGTH, NEW, STEPS = (100, 64, 32, 100) if DEVICE == "cuda" else (4, 16, 4, 4)
KINDS = {
    "fmha": ("fmha", None),
    "torch, FlashAttention": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "torch, plain": ("sdpa", SDPBackend.MATH),
}


def model(attention, dtype, state=None):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        max_position_embeddings=2048,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation=attention,
    )
    made = LlamaForCausalLM(config)
    if state is not None:
        made.load_state_dict(state)
    return made.to(DEVICE, dtype)


def synchronized():
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def backend(kind):
    return sdpa_kernel([kind] if DEVICE == "cuda" else [kind, SDPBackend.MATH]) if kind else sdpa_kernel(list(ALL))


ALL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def generated(made, prompts):
    shared = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return made.generate(prompts, attention_mask=torch.ones_like(prompts), **shared)


def in_f32(state, prompts):
    """Tokens and losses in the type in which they can be held to be equal."""
    kinds = ("fmha", "torch, plain")
    tokens, losses = {}, {}
    for kind in kinds:
        attention, how = KINDS[kind]
        made = model(attention, torch.float32, state)
        with torch.no_grad(), backend(how):
            tokens[kind] = generated(made.eval(), prompts)
        made.train()
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(made.parameters(), lr=3e-4)
        losses[kind] = []
        for _ in range(10):
            batch = torch.randint(0, 1024, (4, 2 * LENGTH), device=DEVICE)
            with backend(how):
                loss = made(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
    equal = (tokens[kinds[0]] == tokens[kinds[1]]).all(-1).sum().item()
    apart = max(abs(a - b) / b for a, b in zip(*losses.values()))
    print(f"f32: {equal} of {PROMPTS} prompts continued by {NEW} equal tokens; losses of 10 steps within {apart:.1e}")


def main():
    fmha.transformers.install()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    import transformers

    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; {LAYERS} layers of width {WIDTH},"
    )
    print(f"{HEADS} heads over {HEADS_KV}, head dimension {WIDTH // HEADS}, bf16, {PROMPTS} prompts of {LENGTH} tokens")
    exact = model("eager", torch.float64)
    state = {key: value.to(torch.bfloat16) for key, value in exact.state_dict().items()}
    exact.load_state_dict(state)
    prompts = torch.randint(0, 1024, (PROMPTS, LENGTH), device=DEVICE)
    with torch.no_grad():
        wanted = torch.cat([exact(part).logits.cpu() for part in prompts.split(10)])
    del exact
    in_f32(state, prompts)
    if "f32" in sys.argv:
        return
    tokens, errors = {}, {}
    for kind, (attention, how) in KINDS.items():
        made = model(attention, torch.bfloat16, state).eval()
        with torch.no_grad(), backend(how):
            logits = made(prompts).logits
            errors[kind] = (logits.cpu().double() - wanted).abs().max().item()
            generated(made, prompts[:2])
            start = synchronized()
            tokens[kind] = generated(made, prompts)
            seconds = synchronized() - start
        print(f"{kind}: logits within {errors[kind]:.4f} of f64; {PROMPTS * NEW / seconds:.0f} tokens/s generated")
    torch_same = errors["torch, plain"]
    print(f"rule: {errors['fmha']:.4f} <= 2 x {torch_same:.4f}: {errors['fmha'] <= 2 * torch_same}")
    pairs = [("fmha", "torch, FlashAttention"), ("fmha", "torch, plain"), ("torch, FlashAttention", "torch, plain")]
    for a, b in pairs:
        equal = (tokens[a] == tokens[b]).all(-1).sum().item()
        first = (tokens[a][:, LENGTH] == tokens[b][:, LENGTH]).sum().item()
        print(f"{a} and {b}: {equal} of {PROMPTS} continued by {NEW} equal tokens, {first} by an equal first one")
    # Counting sequences, which a model learns: token i + 1 follows token i, from a random start by a random stride.
    losses = {}
    for kind, (attention, how) in KINDS.items():
        made = model(attention, torch.float32, state)
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(made.parameters(), lr=3e-4)
        length = 8 * LENGTH
        losses[kind] = []
        for step in range(STEPS):
            if step == STEPS // 2:
                start = synchronized()
            at = torch.randint(0, 1024, (8, 1), device=DEVICE) + torch.arange(length, device=DEVICE)
            batch = (at * torch.randint(1, 4, (8, 1), device=DEVICE)) % 1024
            with torch.autocast(DEVICE, torch.bfloat16), backend(how):
                loss = made(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.detach())
        seconds = synchronized() - start
        trained = 8 * length * (STEPS - STEPS // 2) / seconds
        values = [x.item() for x in losses[kind]]
        shown = ", ".join(f"{values[at]:.4f}" for at in (0, STEPS // 4, STEPS // 2, STEPS - 1))
        print(
            f"{kind}: losses {shown} (steps 0, {STEPS // 4}, {STEPS // 2}, {STEPS - 1}); {trained:.0f} tokens/s trained"
        )
        losses[kind] = values
        if kind == "torch, plain":
            learned = made.state_dict()
    for a, b in pairs:
        apart = max(abs(x - y) for x, y in zip(losses[a], losses[b]))
        print(f"{a} and {b}: losses at most {apart:.4f} apart")
    # Prompts that the model has learned: its scores lie far apart, unlike those of random weights.
    at = torch.randint(0, 1024, (PROMPTS, 1), device=DEVICE) + torch.arange(LENGTH, device=DEVICE)
    prompts = (at * torch.randint(1, 4, (PROMPTS, 1), device=DEVICE)) % 1024
    for kind, (attention, how) in KINDS.items():
        made = model(attention, torch.bfloat16, learned).eval()
        with torch.no_grad(), backend(how):
            tokens[kind] = generated(made, prompts)
    for a, b in pairs:
        equal = (tokens[a] == tokens[b]).all(-1).sum().item()
        print(f"trained, {a} and {b}: {equal} of {PROMPTS} continued by {NEW} equal tokens")


if __name__ == "__main__":
    main()
