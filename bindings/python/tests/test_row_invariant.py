"""Rows of equal bits: training, a prompt's chunks and decoding, by an argument and by a context."""

import contextlib

import fmha
import pytest
import torch

from reference import DEVICE

HEADS, KV_HEADS, DIM = 4, 2, 32


def sequence(length, seed=0):
    draw = torch.Generator(DEVICE).manual_seed(seed)
    of = lambda heads: torch.randn(length, heads, DIM, generator=draw, dtype=torch.float32).to(torch.bfloat16)
    return of(HEADS), of(KV_HEADS), of(KV_HEADS)


def trained(sequences, **options):
    """O of all tokens, packed."""
    lengths = torch.tensor([0] + [len(q) for q, _, _ in sequences]).cumsum(0).to(torch.int32)
    longest = max(len(q) for q, _, _ in sequences)
    packed = (torch.cat(of) for of in zip(*sequences))
    return fmha.attention(
        *packed,
        mask="causal",
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **options,
    )


def decoded(q, k, v, page_size, **options):
    """O of the last token, over pages."""
    length = len(k)
    pages = -(-length // page_size)
    cache = torch.full((2, pages, page_size, KV_HEADS, DIM), float("nan"), dtype=k.dtype)
    for tensor, rows in zip(cache, (k, v)):
        tensor.flatten(0, 1)[:length] = rows
    return fmha.attention_with_kvcache(
        q[None, -1:],
        *cache,
        seqused_k=torch.tensor([length], dtype=torch.int32),
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        **options,
    )[0, 0]


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_token_that_is_decoded_has_the_bits_that_it_has_in_training(page_size):
    own, other = sequence(1300), sequence(77, 1)
    of_training = trained([other, own], row_invariant=True)
    for length in (1, 9, 512, 1299):
        o = decoded(*(x[:length] for x in own), page_size, row_invariant=True)
        assert torch.equal(o, of_training[77 + length - 1]), length


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("tokens", [1, 300])
def test_flash_attention_3_s_names_have_a_paged_call_s_bits_in_the_dense_one(page_size, tokens):
    """Queries and keys of 192 elements beside values of 128: a prompt, and one token, over pages and not."""
    from fmha import flash_attn_3

    draw = torch.Generator(DEVICE).manual_seed(7)
    of = lambda *shape: torch.randn(*shape, generator=draw).to(torch.bfloat16)
    length, pages = 2500, -(-2500 // page_size)
    q, k, v = of(1, length, HEADS, 192), of(1, length, KV_HEADS, 192), of(1, length, KV_HEADS, 128)
    table = torch.randperm(pages, generator=draw).to(torch.int32)[None]
    pools = []
    for rows in (k[0], v[0]):
        pool = torch.full((pages, page_size, *rows.shape[1:]), float("nan"), dtype=rows.dtype)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, pages * page_size - length))
        pool[table[0].long()] = padded.view(pool.shape)
        pools.append(pool)
    with fmha.row_invariant():
        whole = flash_attn_3.flash_attn_func(q, k, v, causal=True)
        paged = flash_attn_3.flash_attn_with_kvcache(
            q[:, -tokens:],
            *pools,
            cache_seqlens=torch.tensor([length], dtype=torch.int32),
            page_table=table,
            causal=True,
        )
    assert torch.equal(paged, whole[:, -tokens:])


def differs(**options):
    own = sequence(1300)
    return not torch.equal(decoded(*own, 16, **options), trained([own], **options)[-1])


def test_the_context_asks_for_every_call_that_does_not_say_otherwise():
    assert differs(), "the test shows nothing: the bits are equal without being asked for"
    with fmha.row_invariant():
        assert not differs()
        with fmha.row_invariant():
            pass
        assert not differs(), "the outer context holds on"
        assert differs(row_invariant=False)
    assert differs()


def test_a_plan_says_the_promise_and_gradients_keep_it():
    q, k, v = (x[None].requires_grad_() for x in sequence(40))
    promised = lambda **options: "row-invariant" in fmha.explain(q, k, v, mask="causal", **options)
    assert promised(row_invariant=True) and not promised()
    with fmha.row_invariant():
        assert promised() and promised(backward=True)
        fmha.attention(q, k, v, mask="causal").sum().backward()
    assert q.grad is not None and torch.isfinite(q.grad).all()


def test_a_wish_that_is_no_truth_value_is_refused_by_its_name():
    q, k, v = (x[None] for x in sequence(4))
    with pytest.raises((TypeError, ValueError), match="row_invariant"):
        fmha.attention(q, k, v, row_invariant=torch.zeros(2))


def test_torch_s_compiler_reads_the_context():
    q, k, v = (x[None] for x in sequence(9))
    call = torch.compile(lambda: fmha.attention(q, k, v, mask="causal"), backend="eager", fullgraph=True)
    call()
    with fmha.row_invariant():
        assert torch.equal(call(), fmha.attention(q, k, v, mask="causal", row_invariant=True))


@pytest.fixture
def asked(monkeypatch):
    """Whether each call that is bound asks for rows of equal bits."""
    said, wants = [], fmha._arguments.wants_rows

    def spy(given):
        said.append(wants(given))
        return said[-1]

    monkeypatch.setattr(fmha._arguments, "wants_rows", spy)
    return said


@pytest.mark.skipif(DEVICE != "cpu", reason="torch has kernels of its own on a GPU")
@pytest.mark.parametrize("rows_first", [False, True])
def test_torch_s_registry_obeys_the_context_of_forward_in_backward_too(asked, rows_first):
    import fmha.sdpa

    def ends_outside(**context):
        """What forward asked within a context, and what its backward asks where that has ended."""
        asked.clear()
        # torch has two more functions that take rows first; their autograd exists only for GPUs.
        if rows_first:
            forward, backward = fmha.sdpa._flash_forward, fmha.sdpa._flash_backward
            rows = [x.transpose(1, 2) for x in (q, k, k)]
            with context.get("within", contextlib.nullcontext()):
                o, lse, state, unused, _ = forward(*rows, None, None, 20, 20, 0.0, True, False)
            within = asked[:]
            asked.clear()
            backward(o, *rows, o, lse, None, None, 20, 20, 0.0, True, state, unused)
        else:
            moved = q.detach().requires_grad_()
            with context.get("within", contextlib.nullcontext()):
                o = torch.ops.aten._scaled_dot_product_flash_attention(moved, q, q, 0.0, True, False)[0]
            within = asked[:]
            asked.clear()
            o.sum().backward()
        return set(within), set(asked)

    handle = fmha.sdpa._Handle("CPU")
    try:
        q, k, _ = (x[None].transpose(1, 2) for x in sequence(20))
        assert ends_outside() == ({False}, {False})
        assert ends_outside(within=fmha.row_invariant()) == ({True}, {True})
    finally:
        handle.remove()


def test_numbers_of_an_engine_s_layer_are_asked_for_at_each_call():
    from fmha._serving import Numbers

    with fmha.row_invariant():
        numbers = Numbers(0.3, 0.0, None, False)
        promised = numbers.of(1, 9)[-1]
    asks = fmha._native.OPTIONS["row_invariant"]
    assert promised & asks and not numbers.of(1, 9)[-1] & asks
    with fmha.row_invariant():
        assert numbers.of(1, 9)[-1] == promised


def test_a_checkpoint_keeps_the_promise_where_the_context_covers_backward(asked):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (x[None] for x in sequence(20))

    def run(within_backward):
        asked.clear()
        moved = q.clone().requires_grad_()
        with fmha.row_invariant():
            o = checkpoint(lambda x: fmha.attention(x, k, v, mask="causal"), moved, use_reentrant=False)
            if within_backward:
                o.sum().backward()
        if not within_backward:
            o.sum().backward()
        return asked[:]

    assert run(True) == [True, True]
    # The documented limit: a recomputed layer reads the setting again.
    assert run(False) == [True, False]


def test_a_model_of_transformers_obeys_the_context(asked):
    transformers = pytest.importorskip("transformers")
    import fmha.transformers

    fmha.transformers.install()
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="fmha").eval()
    # GPUs offer row invariance only for 16-bit types.
    model = model.bfloat16()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        model(ids)
        with fmha.row_invariant():
            model(ids)
    assert asked == [False, False, True, True]


@pytest.mark.parametrize("beside", ["masks", "code", "lists"])
def test_what_hides_keys_otherwise_than_a_band_is_refused_by_name(beside):
    q, k, v = (x[None] for x in sequence(12))
    shown = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    options = dict(
        masks=dict(mask=fmha.MaskBits.of(shown)),
        code=dict(mask_code="q // 2 >= k // 2"),
        lists=dict(indices=torch.zeros(1, 12, KV_HEADS, 4, dtype=torch.int32)),
    )[beside]
    assert fmha.attention(q, k, v, **options).isfinite().all()
    with pytest.raises(RuntimeError, match="row_invariant true"):
        fmha.attention(q, k, v, **options, row_invariant=True)
