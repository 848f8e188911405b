"""A small random Llama served by transformers' continuous batching: requests come and go, over one cache of pages."""

import importlib.util
import inspect
import time

import torch

import fmha.transformers

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1], [1, 4, 1, 4, 2], [1], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8]]
STEPS = 6


def made():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.25,
        eos_token_id=None,
        pad_token_id=0,
    )
    fmha.transformers.install()
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="fmha_flash").eval()


def main():
    if importlib.util.find_spec("transformers") is None:
        print("absent: transformers is not installed")
        return
    import transformers

    batching = getattr(transformers, "ContinuousBatchingConfig", None)
    if batching is None or "page_size" not in inspect.signature(batching).parameters:
        print("absent: this transformers serves its own names alone over its pages")
        return
    torch.manual_seed(0)
    model = made().to("cuda" if torch.cuda.is_available() else "cpu")
    options = dict(max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    config = transformers.GenerationConfig(**options)
    batching = transformers.ContinuousBatchingConfig(page_size=8, num_blocks=32, max_batch_tokens=32)
    start = time.perf_counter()
    served = model.generate_batch(
        PROMPTS, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    took = time.perf_counter() - start
    got = {tuple(one.prompt_ids): one.generated_tokens for one in served.values()}
    # Each request is computed alone, with eager attention.
    model.set_attn_implementation("eager")
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert got[tuple(prompt)] == alone[0, len(prompt) :].tolist(), f"{prompt}: other tokens than alone"
        print(f"{prompt} -> {got[tuple(prompt)]}")
    print(f"{len(PROMPTS)} requests, {len(PROMPTS) * STEPS} tokens in {took:.1f} s, each as alone")


if __name__ == "__main__":
    main()
