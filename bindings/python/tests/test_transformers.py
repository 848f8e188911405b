"""``attn_implementation="fmha"``: small models from a config, random weights, beside transformers' own eager
attention."""

import copy
import os
import random

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import fmha.transformers
from reference import DEVICE

fmha.transformers.install()

SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=96,
)


def pair(config, train=False):
    """The same weights under eager attention and under ours."""
    models = []
    for implementation in ("eager", "fmha"):
        torch.manual_seed(0)
        # The configuration is copied, since a model stores the chosen implementation in it and reads it in each call.
        own = copy.deepcopy(config)
        model = transformers.AutoModelForCausalLM.from_config(own, attn_implementation=implementation)
        assert model.config._attn_implementation == implementation
        models.append(model.train(train))
    return models


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral with a window": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
    "gemma 2 with a soft cap": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "gpt-oss with sinks": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=16, sliding_window=8, num_local_experts=2, num_experts_per_tok=1
    ),
}


def padded(lengths, longest):
    ids = torch.randint(2, 96, (len(lengths), longest))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, longest - length :] = 1
    return ids * mask, mask


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_eager_attentions(config):
    eager, ours = pair(config())
    ids, mask = padded([12, 12, 12], 12)
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, eager(ids).logits, atol=2e-4)
    ids, mask = padded([12, 7, 1], 12)
    with torch.no_grad():
        got, wanted = ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits
    assert torch.allclose(got[mask.bool()], wanted[mask.bool()], atol=2e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_generated_tokens_are_eager_attentions(config):
    eager, ours = pair(config())
    ids, mask = padded([9, 4, 7, 2], 9)
    call = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours.generate(ids, **call), eager.generate(ids, **call))


def test_training_has_the_same_loss():
    models = pair(CONFIGS["llama"](), train=True)
    ids, mask = padded([16, 9, 12], 16)
    # The first token is not predicted either: its row is padding, whose result attention may choose.
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(3), 16 - mask.sum(1)] = -100
    losses = []
    for model in models:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        steps = []
        for _ in range(5):
            loss = model(ids, attention_mask=mask, labels=labels).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][0] > losses[0][-1]
    for a, b in zip(*losses):
        assert abs(a - b) < 1e-3


def test_sequences_packed_into_one_row_do_not_see_each_other():
    _, ours = pair(CONFIGS["llama"]())
    parts = [torch.randint(2, 96, (1, n)) for n in (5, 8)]
    positions = torch.cat([torch.arange(n) for n in (5, 8)])[None]
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
    with torch.no_grad():
        packed = ours(
            torch.cat(parts, 1),
            position_ids=positions,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=8,
            max_length_k=8,
        ).logits
        alone = [ours(part).logits for part in parts]
    assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-4)


def test_a_step_under_autocast_has_the_gradients_of_eager_attention():
    ids = torch.randint(2, 96, (2, 12))
    gradients = []
    for model in pair(CONFIGS["llama"](), train=True):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            model(ids, labels=ids).loss.backward()
        gradients.append([x.grad for x in model.parameters()])
    for ours, theirs in zip(*gradients):
        assert (ours - theirs).norm() <= 3e-2 * theirs.norm()


@pytest.mark.parametrize("recognised", [True, False])
def test_a_mask_keeps_the_offsets_that_it_was_made_with(recognised):
    """A cache may give its offsets as tensors, and adds to them before a layer asks for the mask."""
    from transformers import masking_utils

    offsets = [torch.tensor(7, device="cpu"), torch.tensor(3, device="cpu")]
    see = masking_utils.causal_mask_function if recognised else lambda b, h, q, k: (k <= q) & (k != 5)
    call = dict(batch_size=1, q_length=2, kv_length=6, mask_function=see)
    mask = fmha.transformers.attention_mask(**call, q_offset=offsets[0], kv_offset=offsets[1])
    wanted = masking_utils.eager_mask(**call, q_offset=7, kv_offset=3)
    offsets[0] += 2
    offsets[1] += 1
    assert torch.equal(mask + 0, wanted)


FLEX = ("llama", "mistral with a window", "gemma 2 with a soft cap")


@pytest.mark.parametrize("config", [CONFIGS[name] for name in FLEX], ids=FLEX)
def test_masks_of_flex_attention_are_computed_as_code(config, monkeypatch):
    from transformers.masking_utils import AttentionMaskInterface

    seen = []
    held = [interface._global_mapping.copy() for interface in (transformers.AttentionInterface, AttentionMaskInterface)]
    for interface, mapping in zip((transformers.AttentionInterface, AttentionMaskInterface), held):
        monkeypatch.setattr(interface, "_global_mapping", mapping)
    fmha.transformers.install_flex_attention()
    forward = fmha.transformers.flex_attention_forward
    spy = lambda module, *args, **kwargs: seen.append(type(args[3]).__name__) or forward(module, *args, **kwargs)
    transformers.AttentionInterface.register("flex_attention", spy)
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    torch.manual_seed(0)
    ours = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="flex_attention")
    ids, mask = padded([12, 7, 1], 12)
    with torch.no_grad():
        got, wanted = ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits
    assert torch.allclose(got[mask.bool()], wanted[mask.bool()], atol=2e-4)
    tokens = [model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False) for model in (eager, ours)]
    assert torch.equal(*tokens) and set(seen) == {"_OfAFunction"}
    for model in (eager.train(), ours.train()):
        # A padding row differs from eager attention's, and no loss reads the row.
        model(ids, attention_mask=mask).logits[mask.bool()].square().mean().backward()
    for x, y in zip(eager.parameters(), ours.parameters()):
        assert torch.allclose(x.grad, y.grad, atol=2e-4)


def test_what_flex_attentions_hook_has_not_is_refused_by_its_name():
    q = torch.randn(1, 2, 4, 8)
    module = torch.nn.Module()
    for words, call in (
        ("kernel_options: BLOCK_M 64", dict(attention_mask=None, kernel_options={"BLOCK_M": 64})),
        ("cu_seq_lens_q is given", dict(attention_mask=None, cu_seq_lens_q=torch.zeros(2))),
    ):
        with pytest.raises(NotImplementedError, match=words):
            fmha.transformers.flex_attention_forward(module, q, q, q, **call)


def test_flex_attentions_mask_keeps_the_offsets_that_it_was_made_with():
    offsets = [torch.tensor(7, device="cpu"), torch.tensor(3, device="cpu")]
    mask = fmha.transformers.flex_attention_mask(1, 2, 6, *offsets)
    offsets[0] += 2
    offsets[1] += 1
    q, k, v = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 6, 16), torch.randn(1, 1, 6, 16)
    seen = torch.arange(7, 9)[:, None] >= torch.arange(3, 9)[None]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    got = fmha.transformers.flex_attention_forward(torch.nn.Module(), q, k, v, mask)[0].transpose(1, 2)
    assert torch.allclose(got, wanted, atol=2e-3)


def drawn_mask(draw, batch, rows, past):
    """A mask function of transformers', and padding."""
    from transformers import masking_utils as made

    keys = rows + past
    function = draw.choice(
        [
            made.causal_mask_function,
            made.bidirectional_mask_function,
            made.sliding_window_causal_mask_function(draw.randint(1, 9)),
            made.chunked_causal_mask_function(draw.randint(1, 8), torch.randint(0, 4, (batch,))),
        ]
    )
    if draw.random() < 0.5:
        blocks = torch.full((batch, keys), -1)
        for b in range(batch):
            at = number = 0
            while at < keys:
                length = draw.randint(1, 6)
                if draw.random() < 0.5:
                    blocks[b, at : at + length] = number
                    number += 1
                at += length
        function = made.or_masks(function, made.blockwise_overlay(blocks))
    if past == 0 and draw.random() < 0.4:
        sequences = (torch.rand(batch, rows) < 0.2).long().cumsum(1)
        function = made.and_masks(function, made.packed_sequence_mask_function(sequences))
    return function, torch.rand(batch, keys) < 0.8 if draw.random() < 0.5 else None


def test_drawn_masks_are_data_that_shows_what_transformers_spells(monkeypatch):
    from transformers import masking_utils as made

    monkeypatch.setattr(fmha.transformers, "_as_bias", None)
    first, _, count = (os.environ.get("FMHA_DRAWN") or "1:80").rpartition(":")
    for seed in range(int(first or 1), int(first or 1) + int(count)):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        batch, rows, past = draw.randint(1, 3), draw.randint(1, 20), draw.choice([0, 0, draw.randint(0, 15)])
        function, padding = drawn_mask(draw, batch, rows, past)
        sizes = (batch, rows, rows + past, past, 0, function, padding)
        device = str(torch.get_default_device())
        spelt = made.eager_mask(*sizes, dtype=torch.float32, device=device, allow_is_bidirectional_skip=False)
        mask = fmha.transformers.attention_mask(*sizes, device=device)
        assert isinstance(mask, fmha.transformers.Visible)
        q, k, v = (torch.randn(batch, 2, n, 16) for n in (rows, rows + past, rows + past))
        scores = (q.double() @ k.double().mT / 4).masked_fill(spelt != 0, -torch.inf)
        wanted = torch.softmax(scores, -1).nan_to_num(0) @ v.double()
        o = fmha.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask.facts.data())
        assert (o.transpose(1, 2) - wanted).abs().max() < 1e-5, seed
        if mask.facts.way() is not None:
            # With a band, lengths or packed rows the padding mask describes a chunk's left padding.
            continue
        o, _ = fmha.transformers.attention_forward(torch.nn.Module(), q, k, v, mask)
        in_use = torch.ones(batch, rows, dtype=torch.bool) if padding is None else padding[:, past:]
        gone = (o - wanted.transpose(1, 2))[in_use]
        assert gone.numel() == 0 or gone.abs().max() < 1e-5, seed


def test_amds_gpus_take_a_bias_where_masks_as_data_are_slow(monkeypatch):
    from transformers import masking_utils as made

    sequences = torch.tensor([[0, 0, 1, 1]])
    function = made.and_masks(made.causal_mask_function, made.packed_sequence_mask_function(sequences))
    padding = torch.tensor([[True, True, True, False]])
    mask = lambda: fmha.transformers.attention_mask(1, 4, 4, 0, 0, function, padding, device=DEVICE)
    assert mask().facts.way() is None and mask().facts.data() is not None
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    assert mask().facts.data() is None


def test_numbers_of_blocks_that_come_again_are_no_ranges():
    from transformers import masking_utils as made

    blocks = torch.tensor([[0, 0, 1, 0]])
    function = made.or_masks(made.causal_mask_function, made.blockwise_overlay(blocks))
    mask = fmha.transformers.attention_mask(1, 4, 4, 0, 0, function, device=str(torch.get_default_device()))
    assert mask.facts.way() is None and mask.facts.data() is None
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    o, _ = fmha.transformers.attention_forward(torch.nn.Module(), q, k, v, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask + 0)
    assert torch.allclose(o.transpose(1, 2), wanted, atol=2e-3)
