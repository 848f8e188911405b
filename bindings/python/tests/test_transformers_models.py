"""Sixteen architectures of transformers with ``attn_implementation="fmha"``: tiny, with random weights, in f32, beside
eager attention with the same weights. Rows of padding are compared nowhere: no model uses them.

Each architecture reaches another part of the hook: chunks (Llama 4), images that see themselves both ways (Gemma 3),
sinks (gpt-oss), unequal head dimensions (DeepSeek V3), a position bias (T5), cross attention over padding (BART, T5),
both-way windows (ModernBERT), no mask at all (ViT), and static caches longer than what is written.

``FMHA_TRANSFORMERS=all`` compiles every decoder, which takes three minutes, and serves three; by default it is one.
"""

import copy
import inspect
import os

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import fmha.transformers

fmha.transformers.install()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices of 32 columns take longer to deal out than to multiply."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


VOCABULARY = 60
IMAGE = 55

TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=0.25,
)


def gemma3():
    text = dict(TEXT, head_dim=8, sliding_window=6, query_pre_attn_scalar=8,
                layer_types=["sliding_attention", "full_attention"])
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                  patch_size=2)
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=56,
        eoi_token_index=57, initializer_range=0.25
    )


DECODERS = {
    "Llama": lambda: transformers.LlamaConfig(**TEXT),
    "Llama 4": lambda: transformers.Llama4TextConfig(
        **dict(TEXT, num_key_value_heads=2), intermediate_size_mlp=40, head_dim=8, attention_chunk_size=5,
        num_local_experts=2, num_experts_per_tok=1, layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "Mistral": lambda: transformers.MistralConfig(**TEXT, sliding_window=5),
    "Gemma 2": lambda: transformers.Gemma2Config(
        **TEXT, head_dim=8, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "Gemma 3": lambda: gemma3().text_config,
    "gpt-oss": lambda: transformers.GptOssConfig(
        **TEXT, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    ),
    "Qwen 3": lambda: transformers.Qwen3Config(**TEXT, head_dim=8),
    "DeepSeek V3": lambda: transformers.DeepseekV3Config(
        **dict(TEXT, num_key_value_heads=4), q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1, moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "GPT-2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.25,
    ),
    "Phi 3": lambda: transformers.Phi3Config(**TEXT, sliding_window=7),
}


def pair(make, of):
    """The same weights under eager attention and under ours."""
    models = []
    for implementation in ("eager", "fmha"):
        torch.manual_seed(0)
        config = copy.deepcopy(make())
        model = of._from_config(config, attn_implementation=implementation).eval()
        assert model.config._attn_implementation == implementation
        models.append(model)
    # Sinks and biases that begin at 0 would hide a fault, so parameters are drawn.
    for a, b in zip(*(model.parameters() for model in models)):
        if not a.any():
            a.data.normal_()
            b.data.copy_(a.data)
    return models


@pytest.fixture(scope="module")
def decoders():
    kept = {}

    def get(name):
        if name not in kept:
            config = DECODERS[name]()
            kept[name] = pair(lambda: config, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
        return kept[name]

    return get


def eager_or_absent(eager, ids, call):
    try:
        return eager.generate(ids, **call)
    except TypeError as error:
        pytest.skip(f"this transformers cannot, eager neither: {error}")


def draw(batch, rows):
    return torch.randint(2, 54, (batch, rows))


def side(lengths, rows, left):
    """A mask of rows in use, on the right of its padding (``left``) or on the left."""
    at = torch.arange(rows)[None]
    lengths = torch.tensor(lengths)[:, None]
    return (at >= rows - lengths if left else at < lengths).long()


def alike(got, wanted, rows=None):
    if rows is not None:
        got, wanted = got[rows], wanted[rows]
    torch.testing.assert_close(got, wanted, atol=_rounding(wanted), rtol=0.0)


def _rounding(logits):
    """Logits are sums: what rounding does to one goes by the largest."""
    return 2e-4 * max(1.0, logits.detach().abs().max().item())


def _close(got, wanted):
    return torch.allclose(got, wanted, atol=_rounding(wanted), rtol=0.0)


def logits(models, **call):
    with torch.no_grad():
        return [model(**call).logits for model in models]


ALL = pytest.mark.parametrize("name", DECODERS)


@ALL
def test_a_batch_has_eager_logits_without_padding_and_with_it_on_either_side(decoders, name):
    eager, ours = decoders(name)
    ids = draw(3, 13)
    alike(*logits((ours, eager), input_ids=ids))
    for left in (True, False):
        mask = side([13, 8, 2], 13, left)
        alike(*logits((ours, eager), input_ids=ids, attention_mask=mask), mask.bool())
    both = side([13, 8, 11], 13, True) & side([10, 13, 6], 13, False)
    alike(*logits((ours, eager), input_ids=ids, attention_mask=both), both.bool())


@ALL
def test_sequences_packed_by_position_ids_do_not_see_each_other(decoders, name):
    eager, ours = decoders(name)
    positions = torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]
    ids = draw(1, 13)
    alike(*logits((ours, eager), input_ids=ids, position_ids=positions, use_cache=False))
    two = torch.cat([positions, torch.arange(13)[None]])
    alike(*logits((ours, eager), input_ids=draw(2, 13), position_ids=two, use_cache=False))
    # gpt-oss passes no positions to its mask, with any attention, so offsets have to separate its sequences.
    offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    apart = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets) if name == "gpt-oss" else {}
    alone = ours(ids[:, 6:], use_cache=False).logits
    if name == "Llama 4" and not _close(eager(ids, position_ids=positions, use_cache=False).logits[:, 6:], alone):
        pytest.skip("Llama 4 of this transformers packs nothing: eager's sequences see each other")
    alike(ours(ids, position_ids=positions, use_cache=False, **apart).logits[:, 6:], alone)
    # The flattening collator passes these keywords on request.
    call = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=7, max_length_k=7)
    (got,) = logits((ours,), input_ids=ids, position_ids=positions, use_cache=False, **call)
    for first, end in ((0, 5), (5, 6), (6, 13)):
        alike(got[:, first:end], *logits((eager,), input_ids=ids[:, first:end], use_cache=False))


@ALL
def test_a_mask_of_four_axes_is_the_callers(decoders, name):
    eager, ours = decoders(name)
    seen = torch.rand(2, 1, 9, 9) < 0.6
    seen |= torch.eye(9, dtype=torch.bool)
    added = torch.where(seen, torch.randn(2, 1, 9, 9), torch.finfo(torch.float32).min)
    config = ours.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [None])
    as_given = lambda mask: mask if kinds == {None} else {kind: mask for kind in kinds}
    ids = draw(2, 9)
    alike(*logits((ours, eager), input_ids=ids, attention_mask=as_given(added)))
    wanted = eager(ids, attention_mask=as_given(torch.where(seen, 0.0, torch.finfo(torch.float32).min))).logits
    alike(ours(ids, attention_mask=as_given(seen)).logits, wanted)


@ALL
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", ["left", "right"])
def test_generation_has_eager_tokens_and_logits(decoders, name, cache, padded):
    """Padding on the right is among the keys of the tokens that come; a window of 5 rows has one in use still."""
    eager, ours = decoders(name)
    mask = side([9, 4, 7], 9, True) if padded == "left" else side([9, 6, 7], 9, False)
    call = dict(
        attention_mask=mask, max_new_tokens=7, do_sample=False, return_dict_in_generate=True, output_logits=True,
        cache_implementation=None if cache == "dynamic" else cache,
    )
    ids = draw(3, 9)
    wanted = eager_or_absent(eager, ids, call)
    got = ours.generate(ids, **call)
    alike(torch.stack(got.logits), torch.stack(wanted.logits))
    assert torch.equal(got.sequences, wanted.sequences)


@ALL
@pytest.mark.parametrize("cache", [None, "static"])
def test_beams_are_eager_ones(decoders, name, cache):
    call = dict(
        attention_mask=side([9, 6], 9, True), max_new_tokens=5, num_beams=3, do_sample=False,
        cache_implementation=cache, output_scores=True, return_dict_in_generate=True,
    )
    ids = draw(2, 9)
    eager, ours = decoders(name)
    wanted, got = eager_or_absent(eager, ids, call), ours.generate(ids, **call)
    alike(got.sequences_scores, wanted.sequences_scores)
    assert torch.equal(got.sequences, wanted.sequences)


@ALL
def test_tokens_that_were_guessed_from_the_prompt_are_eager_ones(decoders, name):
    """Some rows at once over a cache, whose end is cut off again."""
    ids = draw(1, 6).repeat(1, 3)
    call = dict(max_new_tokens=7, do_sample=False, prompt_lookup_num_tokens=3)
    wanted, got = (model.generate(ids, **call) for model in decoders(name))
    assert torch.equal(got, wanted)


@ALL
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_in_parts_has_eager_logits(decoders, name, cache):
    eager, ours = decoders(name)
    ids, mask = draw(2, 14), side([14, 10], 14, True)
    outputs = []
    for model in (ours, eager):
        text = model.config.get_text_config()
        kept = (
            transformers.DynamicCache(config=text)
            if cache == "dynamic"
            else transformers.StaticCache(config=text, max_cache_len=20)
        )
        parts, before = [], 0
        for rows in (6, 1, 4, 3):
            upto = before + rows
            positions = (mask[:, :upto].cumsum(-1) - 1).clamp(min=0)[:, before:]
            with torch.no_grad():
                parts.append(
                    model(
                        ids[:, before:upto], attention_mask=mask[:, :upto], position_ids=positions,
                        past_key_values=kept,
                    ).logits
                )
            before = upto
        outputs.append(torch.cat(parts, 1))
    alike(*outputs, mask.bool())


def same_gradients(models, **call):
    """Of the same weights by eager attention, which comes first, and by ours."""
    gradients = []
    for model in models:
        model.zero_grad()
        model(**call).loss.backward()
        gradients.append({at: x.grad for at, x in model.named_parameters() if x.grad is not None})
        model.zero_grad()
    theirs, ours = gradients
    assert ours.keys() == theirs.keys()
    for at, wanted in theirs.items():
        assert (ours[at] - wanted).norm() <= 1e-3 * wanted.norm() + 1e-5, at


def labelled(ids, mask):
    """Labels of rows in use, but for the first: a row of padding would have to tell it."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(len(ids)), mask.argmax(1)] = -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def trained(models):
    """Copies that train without dropout, which draws other numbers in each attention."""
    models = [copy.deepcopy(model).train() for model in models]
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return models


def again(models, reentrant):
    """Such copies, whose layers are computed again in backward."""
    models = trained(models)
    for model in models:
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    return models


@ALL
@pytest.mark.parametrize("padded", ["left", "right", "packed"])
def test_gradients_are_eager_ones(decoders, name, padded):
    ids = draw(2, 12)
    call = labelled(ids, side([12, 7], 12, padded == "left"))
    if padded == "packed":
        positions = torch.stack([torch.arange(12), torch.cat([torch.arange(7), torch.arange(5)])])
        call = dict(input_ids=ids, labels=ids, position_ids=positions)
    same_gradients(decoders(name), use_cache=False, **call)


@ALL
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_have_eager_gradients(decoders, name, reentrant):
    same_gradients(again(decoders(name), reentrant), use_cache=False, **labelled(draw(2, 12), side([12, 7], 12, True)))


@ALL
def test_sixteen_bits_are_as_near_as_eager_ones(decoders, name):
    eager, ours = decoders(name)
    call = dict(input_ids=draw(3, 13), attention_mask=(mask := side([13, 8, 2], 13, True)))
    (wanted,) = logits((eager,), **call)
    got, theirs = (x[mask.bool()] for x in logits([copy.deepcopy(x).bfloat16() for x in (ours, eager)], **call))
    error, bound = ((x - wanted[mask.bool()]).norm() for x in (got, theirs))
    assert got.dtype is torch.bfloat16 and error <= 1.5 * bound


@pytest.mark.parametrize("name", DECODERS if os.environ.get("FMHA_TRANSFORMERS") == "all" else ["Llama"])
def test_a_compiled_model_has_eager_results(decoders, name):
    eager, ours = decoders(name)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for mask in (side([9, 6], 9, True), side([9, 6], 9, False)):
        alike(*logits((compiled, eager), input_ids=draw(2, 9), attention_mask=mask, use_cache=False), mask.bool())
    # Sequences are found from the values of positions, which breaks the graph but no result.
    compiled = torch.compile(ours, backend="aot_eager")
    positions = torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]
    alike(*logits((compiled, eager), input_ids=draw(1, 13), position_ids=positions, use_cache=False))
    outputs, ids, mask = [], draw(2, 9), side([9, 6], 9, True)
    for model, step in ((ours, compiled), (eager, eager)):
        kept = transformers.StaticCache(config=model.config.get_text_config(), max_cache_len=16)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        parts = [logits((model,), input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=kept)[0]]
        for row in range(3):
            used = torch.cat([mask, mask.new_ones(2, row + 1)], 1)
            call = dict(attention_mask=used, position_ids=used.sum(-1, keepdim=True) - 1, past_key_values=kept)
            parts += logits((step,), input_ids=ids[:, row : row + 1], **call)
        outputs.append(torch.cat([part[:, -1:] for part in parts], 1))
    alike(*outputs)


def test_gemma_3_sees_an_image_both_ways():
    eager, ours = pair(gemma3, transformers.Gemma3ForConditionalGeneration)
    ids = draw(2, 14)
    ids[0, 3:7] = IMAGE
    ids[1, 8:12] = IMAGE
    call = dict(pixel_values=torch.randn(2, 3, 8, 8), token_type_ids=(ids == IMAGE).long())
    alike(*logits((ours, eager), input_ids=ids, **call))
    for mask in (side([14, 12], 14, False), side([14, 11], 14, True)):
        call["attention_mask"] = mask
        alike(*logits((ours, eager), input_ids=ids, **call), mask.bool())
        given = labelled(ids, mask)
        given["labels"][ids == IMAGE] = -100
        same_gradients((eager, ours), **{**call, **given})
    for cache in (None, "static"):
        for beams in (1, 2):
            got, wanted = (
                model.generate(
                    ids, **call, max_new_tokens=5, do_sample=False, cache_implementation=cache, num_beams=beams
                )
                for model in (ours, eager)
            )
            assert torch.equal(got, wanted)


def t5():
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, pad_token_id=0, decoder_start_token_id=0,
        eos_token_id=None, dropout_rate=0.0, initializer_factor=3.0,
    )


def bart():
    return transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, forced_eos_token_id=None, decoder_start_token_id=2, dropout=0.0, init_std=0.25,
    )


@pytest.mark.parametrize(
    "make, of",
    [(t5, transformers.T5ForConditionalGeneration), (bart, transformers.BartForConditionalGeneration)],
    ids=["T5", "BART"],
)
def test_an_encoder_and_a_decoder_have_eager_results_over_padding(make, of):
    eager, ours = models = pair(make, of)
    ids, answers = draw(3, 11), draw(3, 7)
    alike(*logits((ours, eager), input_ids=ids, decoder_input_ids=answers))
    for left in (False, True):
        mask, answered = side([11, 5, 8], 11, left), side([7, 4, 6], 7, left)
        call = dict(input_ids=ids, attention_mask=mask)
        alike(*logits((ours, eager), **call, decoder_input_ids=answers))
        padded = dict(call, decoder_input_ids=answers, decoder_attention_mask=answered)
        alike(*logits((ours, eager), **padded), answered.bool())
        labels = answers.masked_fill(answered == 0, -100)
        same_gradients(models, **padded, labels=labels)
        same_gradients(again(models, reentrant=left), **padded, labels=labels, use_cache=False)
        for cache in (None, "static"):
            beams = [
                model.generate(**call, max_new_tokens=5, num_beams=3, do_sample=False, cache_implementation=cache)
                for model in models
            ]
            assert torch.equal(*beams)
            got, wanted = (
                model.generate(
                    **call, max_new_tokens=6, do_sample=False, cache_implementation=cache, output_logits=True,
                    return_dict_in_generate=True,
                )
                for model in (ours, eager)
            )
            alike(torch.stack(got.logits), torch.stack(wanted.logits))
    masks_of_four_axes(models, input_ids=ids)
    seen = mask.bool()[:, None, None]
    call = dict(input_ids=ids, decoder_input_ids=answers)
    (wanted,) = logits((eager,), attention_mask=added_where(seen), **call)
    alike(*logits((ours,), attention_mask=seen, **call), wanted)
    alike(*logits((ours,), attention_mask=added_where(seen), **call), wanted)


def added_where(seen):
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def masks_of_four_axes(models, **given):
    """Of a decoder beside an encoder."""
    eager, ours = models
    batch = len(next(iter(given.values())))
    seen = (torch.rand(batch, 1, 7, 7) < 0.6) | torch.eye(7, dtype=torch.bool)
    call = dict(given, decoder_input_ids=draw(batch, 7), use_cache=False)
    (wanted,) = logits((eager,), decoder_attention_mask=added_where(seen), **call)
    alike(*logits((ours,), decoder_attention_mask=seen, **call), wanted)
    added = added_where(seen) + torch.randn(batch, 1, 7, 7)
    alike(*logits((ours, eager), decoder_attention_mask=added, **call))


def test_whisper_has_eager_results():
    make = lambda: transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40,
        max_source_positions=20, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, init_std=0.25,
    )
    eager, ours = models = pair(make, transformers.WhisperForConditionalGeneration)
    sound, answers = torch.randn(2, 8, 40), draw(2, 7)
    alike(*logits((ours, eager), input_features=sound, decoder_input_ids=answers))
    for left in (True, False):
        answered = side([7, 4], 7, left)
        call = dict(input_features=sound, decoder_input_ids=answers, decoder_attention_mask=answered)
        alike(*logits((ours, eager), **call), answered.bool())
        labels = answers.masked_fill(answered == 0, -100)
        same_gradients(models, **call, labels=labels)
        same_gradients(again(models, reentrant=left), **call, labels=labels, use_cache=False)
    masks_of_four_axes(models, input_features=sound)
    for cache in (None, "static"):
        for beams in (1, 3):
            got, wanted = (
                model.generate(sound, max_new_tokens=6, do_sample=False, cache_implementation=cache, num_beams=beams)
                for model in (ours, eager)
            )
            assert torch.equal(got, wanted)


ENCODERS = {
    "BERT": lambda: transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=64, initializer_range=0.25,
    ),
    "ModernBERT": lambda: transformers.ModernBertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=64, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, initializer_range=0.25,
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_eager_results(name):
    config = ENCODERS[name]()
    eager, ours = pair(lambda: config, transformers.MODEL_FOR_MASKED_LM_MAPPING[type(config)])
    ids = draw(3, 13)
    alike(*logits((ours, eager), input_ids=ids))
    for left in (True, False):
        mask = side([13, 8, 2], 13, left)
        alike(*logits((ours, eager), input_ids=ids, attention_mask=mask), mask.bool())
        same_gradients((eager, ours), input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    holes = side([13, 8, 11], 13, True) & (torch.rand(3, 13) < 0.7).long()
    holes[:, -1] = 1
    alike(*logits((ours, eager), input_ids=ids, attention_mask=holes), holes.bool())
    seen = (torch.rand(3, 1, 13, 13) < 0.6) | torch.eye(13, dtype=torch.bool)
    kinds = set(getattr(config, "layer_types", None) or [])
    as_given = lambda mask: {kind: mask for kind in kinds} if kinds else mask
    (wanted,) = logits((eager,), input_ids=ids, attention_mask=as_given(added_where(seen)))
    alike(*logits((ours,), input_ids=ids, attention_mask=as_given(seen)), wanted)
    added = as_given(added_where(seen) + torch.randn(3, 1, 13, 13))
    alike(*logits((ours, eager), input_ids=ids, attention_mask=added))
    # An encoder does not separate sequences by positions, with any attention; offsets do.
    positions = torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]
    alike(*logits((ours, eager), input_ids=ids[:1], position_ids=positions))
    offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    (got,) = logits((ours,), input_ids=ids[:1], position_ids=positions, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    for first, end in ((0, 5), (5, 6), (6, 13)):
        alike(got[:, first:end], *logits((eager,), input_ids=ids[:1, first:end]))


def test_bert_as_a_decoder_has_eager_results_over_an_encoder():
    def make():
        config = ENCODERS["BERT"]()
        config.is_decoder = config.add_cross_attention = True
        return config

    eager, ours = pair(make, transformers.BertLMHeadModel)
    call = dict(encoder_hidden_states=torch.randn(2, 7, 32), encoder_attention_mask=side([7, 3], 7, True))
    for left in (True, False):
        mask = side([9, 5], 9, left)
        alike(*logits((ours, eager), input_ids=draw(2, 9), attention_mask=mask, **call), mask.bool())


def test_vit_has_no_mask_and_sees_all():
    make = lambda: transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=16, patch_size=4,
        initializer_range=0.25,
    )
    eager, ours = pair(make, transformers.ViTForImageClassification)
    image = torch.randn(2, 3, 16, 16)
    alike(*logits((ours, eager), pixel_values=image))
    same_gradients((eager, ours), pixel_values=image, labels=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.25
        ),
        lambda: transformers.MptConfig(
            vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.25
        ),
    ],
    ids=["Bloom", "MPT"],
)
def test_a_model_that_does_not_ask_the_interface_is_left_alone(make, monkeypatch):
    eager, ours = pair(make, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(make())])
    monkeypatch.setattr(fmha.transformers, "attention", None)
    ids = draw(3, 9)
    for mask in (None, side([9, 5, 2], 9, True), side([9, 5, 2], 9, False)):
        got, wanted = logits((ours, eager), input_ids=ids, attention_mask=mask)
        assert torch.equal(got, wanted)


def test_transformers_refuses_a_model_whose_attention_is_in_a_table_of_its_own():
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(KeyError, match="fmha"):
        transformers.FalconForCausalLM._from_config(config, attn_implementation="fmha")


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Gemma 2"] if os.environ.get("FMHA_TRANSFORMERS") == "all" else ["Mistral"]
)
def test_continuous_batching_gives_the_tokens_of_each_request_alone(decoders, name):
    """Requests of unlike lengths, more than a batch has room for, over transformers' own cache of pages."""
    config = getattr(transformers, "ContinuousBatchingConfig", None)
    if config is None or "page_size" not in inspect.signature(config).parameters:
        pytest.skip("this transformers serves its own names alone over its pages")
    eager, ours = decoders(name)
    ours = copy.deepcopy(ours)
    ours.set_attn_implementation("fmha_flash")
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    requests = [draw(1, n)[0].tolist() for n in (3, 1, 17, 9, 2)]
    batching = transformers.ContinuousBatchingConfig(
        page_size=8, num_blocks=16, max_batch_tokens=24, max_requests_per_batch=4
    )
    served = ours.generate_batch(
        requests, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    got = {tuple(one.prompt_ids): one.generated_tokens for one in served.values()}
    for request in requests:
        ids = torch.tensor([request])
        wanted = eager.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(request) :]
        assert got[tuple(request)] == wanted.tolist(), request


def test_continuous_batching_refuses_the_name_that_is_not_for_it(decoders):
    _, ours = decoders("Llama")
    config = transformers.GenerationConfig(max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="fmha.* is not supported"):
        ours.generate_batch([[3, 4, 5], [6, 7]], generation_config=config)
    module = ours.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match="block_table is given"):
        fmha.transformers.attention_forward(module, q, k, k, None, block_table=torch.zeros(5, 1, dtype=torch.int32))


def test_an_exported_model_has_eager_results(decoders):
    eager, ours = decoders("Llama")
    ids, mask = draw(2, 9), side([9, 6], 9, True)
    call = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    rows = {"input_ids": {1: torch.export.Dim.DYNAMIC}, "attention_mask": {1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(ours, (), call, dynamic_shapes={**rows, "use_cache": None})
    exported = program.module()
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(name.startswith("fmha.") for name in names), names
    for length in (9, 14):
        mask = side([length, 6], length, True)
        other = dict(input_ids=draw(2, length), attention_mask=mask, use_cache=False)
        alike(exported(**other).logits, *logits((eager,), **other), mask.bool())


def test_a_keyword_that_would_change_the_result_is_refused_by_name(decoders):
    _, ours = decoders("Llama")
    module = ours.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    call = lambda **options: fmha.transformers.attention_forward(module, q, k, k, None, **options)[0]
    plain = call()
    assert torch.equal(plain, call(indices=None, **{name: 1 for name in fmha.transformers.HARMLESS}))
    for name, value, said in (
        ("indices", torch.zeros(5), "indices is given \\(Tensor\\)"),
        ("sinks", torch.zeros(4), "sinks is given"),
        ("window", 3, "window is given \\(3\\)"),
        ("causal", False, "causal is given \\(False\\)"),
        ("output_attentions", True, "output_attentions is True"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            call(**{name: value})
    for mask, error in ((torch.zeros(5, 5), "2 axes"), (torch.zeros(1, 3, 5, 5), "3 on axis 1, neither 1 nor 4")):
        with pytest.raises(ValueError, match=error):
            fmha.transformers.attention_forward(module, q, k, k, mask)
    with pytest.raises(TypeError, match="attention_mask is of torch.int64"):
        fmha.transformers.attention_forward(module, q, k, k, torch.zeros(1, 1, 5, 5, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="output_attentions is True"):
        ours(draw(1, 5), output_attentions=True)
