"""What FlashAttention has as arguments and this library as layouts: padding in front of a cache, chosen sequences,
chunks, Q's part for V, positions of rotary embeddings; and merges of many parts."""

import math

import pytest
import torch

import fmha
from fmha import flash_attn_3 as fa3, flash_attn_4 as fa4, rotary
from reference import (
    DEVICE,
    appends_in_f32,
    attention as by_definition,
    close,
    offsets,
    tensors,
    tolerance,
    turned,
    visible,
)

i32 = lambda *x: torch.tensor(x, dtype=torch.int32)


def seen_in_chunks(chunk, seqlen_q, seqlen_k, mask=fmha.NONE):
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    first = torch.div(position, chunk, rounding_mode="floor") * chunk
    key = torch.arange(seqlen_k)[None]
    return (key >= first) & (key < first + chunk) & visible(mask, seqlen_q, seqlen_k)


@pytest.mark.parametrize("option, mask", [({}, None), (dict(causal=True), "b"), (dict(window_size=(2, 1)), "b:2,1")])
@pytest.mark.parametrize("sizes", [(7, 11), (11, 7), (8, 8), (1, 9), (5, 0)], ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 20])
def test_a_query_sees_the_chunk_that_its_position_lies_in(option, mask, sizes, chunk):
    q, k, v = tensors(sq=sizes[0], sk=sizes[1], grad=True)
    out, lse = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **option)
    twins = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = by_definition(*twins, mask=seen_in_chunks(chunk, *sizes, fmha.mask(mask)))
    close(out, wanted, tolerance(q.dtype))
    close(lse, wanted_lse, 1e-5)
    dout = torch.randn_like(out)
    for got, by in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, twins, dout.double())):
        close(got, by, tolerance(q.dtype, gradients=True))


@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences_have_chunks_of_their_own(used):
    lengths_q, lengths_k = [3, 0, 9, 1, 6], [7, 4, 5, 9, 0]
    q, k, v = torch.randn(19, 4, 16), torch.randn(25, 2, 16), torch.randn(25, 2, 16)
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    in_q, in_k = ([2, 0, 7, 1, 5], [5, 4, 5, 8, 0]) if used else (lengths_q, lengths_k)
    more = dict(seqused_q=i32(*in_q), seqused_k=i32(*in_k)) if used else {}
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 9, 9, causal=True, attention_chunk=3, return_attn_probs=True, **more
    )
    for b, (n, m) in enumerate(zip(in_q, in_k)):
        rows, keys = slice(cu_q[b], cu_q[b] + n), slice(cu_k[b], cu_k[b] + m)
        wanted, wanted_lse = by_definition(
            q[None, rows], k[None, keys], v[None, keys], mask=seen_in_chunks(3, n, m, fmha.CAUSAL)
        )
        close(out[rows], wanted[0], tolerance(q.dtype))
        close(lse[:, rows], wanted_lse[0], 1e-5)
        assert not out[cu_q[b] + n : cu_q[b + 1]].any()


def test_chunks_of_eighths_have_their_sequences_scales():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(d=32))
    scale = torch.rand(2, 2) + 0.5
    out = fa3.flash_attn_func(q, k, v, k_descale=scale, causal=True, attention_chunk=4)
    twin = k.double() * scale[:, None, :, None].double()
    close(out, by_definition(q.double(), twin, v.double(), mask=seen_in_chunks(4, 7, 11, fmha.CAUSAL))[0], 0.1)
    with pytest.raises(ValueError, match="attention_chunk -1 is below 0"):
        fa3.flash_attn_func(q, k, v, attention_chunk=-1)


CACHES = [
    dict(pages=pages, pad=pad, chosen=chosen, new=new, turns=turns, chunk=chunk, packed=packed)
    for pages, pad, chosen, new, turns, chunk, packed in (
        (None, True, False, 2, None, 0, False),
        (None, True, True, 2, "cache", 0, False),
        (4, True, False, 2, "cache", 0, True),
        (4, True, True, 0, None, 0, False),
        (4, False, True, 2, None, 0, False),
        (4, False, True, 2, "own", 0, False),
        (None, False, False, 2, "same", 0, True),
        (4, False, False, 0, None, 4, False),
        (4, False, True, 2, "cache", 6, True),
        (None, True, True, 2, "own", 5, False),
        (None, False, False, 0, None, 3, False),
        (3, True, False, 2, "cache", 4, True),
    )
]


@appends_in_f32
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CACHES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_a_cache_is_padded_paged_chosen_turned_and_cut(case, causal):
    """Every way at once against the rows that they say, gathered one after another."""
    sizes, held = [3, 1], 12
    used, pad, index = [9, 6], [4, 1], [2, 0]
    size = case["pages"] or held
    pages = 3 * held // size
    caches = torch.randn(2, pages, size, 2, 16)
    table = torch.randperm(pages, dtype=torch.int32).view(3, -1) if case["pages"] else None
    before = caches.clone()
    new = torch.randn(2, 2, case["new"], 2, 16) if case["new"] else (None, None)
    pad = pad if case["pad"] else [0, 0]
    q = torch.randn(2, 3, 4, 16)
    angle, first = torch.rand(20, 8), {"cache": used, "own": [2, 5], "same": used}.get(case["turns"])
    call = dict(cache_seqlens=i32(*used), causal=causal, attention_chunk=case["chunk"], return_softmax_lse=True)
    rows_of = index if case["chosen"] else [0, 1]
    if case["pad"]:
        call["cache_leftpad"] = i32(*pad)
    if case["chosen"]:
        call["cache_batch_idx"] = i32(*index)
    if case["turns"]:
        call.update(rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=False)
        if case["turns"] != "cache":
            call["rotary_seqlens"] = i32(*first)
    if table is not None:
        call["page_table"] = table if case["chosen"] else table[:2]
    elif not case["chosen"]:
        caches = caches[:, :2].contiguous()
        before = before[:, :2]
    given = q
    if case["packed"]:
        given = torch.cat([q[b, :n] for b, n in enumerate(sizes)])
        call.update(cu_seqlens_q=offsets(sizes), max_seqlen_q=3)
    out, lse, *_ = fa3.flash_attn_with_kvcache(given, *caches, *new, **call)
    at = 0
    for b in range(2):
        n = sizes[b] if case["packed"] else 3
        where = (
            [(int(table[rows_of[b], j // size]), j % size) for j in range(held)]
            if case["pages"]
            else [(rows_of[b], j) for j in range(held)]
        )
        k, v = (torch.stack([x[p, r] for p, r in where]) for x in before)
        query, local = q[b, :n], causal or case["chunk"]
        if case["new"]:
            added = new[0][b]
            if case["turns"]:
                added = turned(added, angle, [first[b] + j for j in range(2)], False).float()
                query = turned(query, angle, [first[b] + (i if local else 0) for i in range(n)], False).float()
            k[used[b] : used[b] + 2], v[used[b] : used[b] + 2] = added, new[1][b]
        for x, after in zip((k, v), caches):
            # The appended rows hold the new keys, and no other row has changed.
            close(torch.stack([after[p, r] for p, r in where]), x.double(), 1e-6)
        length = used[b] + case["new"]
        k, v = (x[None, pad[b] : length] for x in (k, v))
        mask = fmha.CAUSAL if causal else fmha.NONE
        seen = seen_in_chunks(case["chunk"] or 1000, n, length - pad[b], mask)
        wanted, wanted_lse = by_definition(query[None], k, v, mask=seen)
        got, got_lse = (out[at : at + n], lse[:, at : at + n]) if case["packed"] else (out[b], lse[b])
        close(got, wanted[0], tolerance(q.dtype))
        close(got_lse, wanted_lse[0], 1e-5)
        at += n


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("beside", [False, True])
def test_qv_is_a_second_product_with_v(beside, chunk):
    latent = torch.randn(2, 11, 1, 24 + 8)
    k, v = (latent[..., 24:], latent[..., :24]) if beside else (torch.randn(2, 11, 1, 8), torch.randn(2, 11, 1, 24))
    q, qv = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 24)
    plain = dict(causal=True, qv=qv, attention_chunk=chunk)
    both = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    seen = seen_in_chunks(chunk or 100, 7, 11, fmha.CAUSAL)
    wanted, wanted_lse = by_definition(*both, v, mask=seen)
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **plain)
    close(out, wanted, tolerance(q.dtype))
    close(lse, wanted_lse, 1e-5)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    packed = fa3.flash_attn_varlen_func(
        *rows, offsets([7, 7]), offsets([11, 11]), 7, 11, **dict(plain, qv=qv.flatten(0, 1))
    )
    close(packed, wanted.flatten(0, 1), tolerance(q.dtype))
    if not chunk:
        out, lse = fa4.flash_attn_func(q, k, v, qv=qv, causal=True, return_lse=True)
        close(out, wanted, tolerance(q.dtype))
        close(lse, wanted_lse, 1e-5)
        used = dict(cu_seqlens_q=offsets([7, 7]), seqused_k=i32(11, 11))
        mixed, _ = fa4.flash_attn_varlen_func(q.flatten(0, 1), k, v, qv=qv.flatten(0, 1), causal=True, **used)
        close(mixed, wanted.flatten(0, 1), tolerance(q.dtype))
    over = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=i32(11, 9), **plain)
    seen = seen_in_chunks(chunk or 100, 7, 9, fmha.CAUSAL)
    close(over[:1], wanted[:1], tolerance(q.dtype))
    short, _ = by_definition(both[0][1:], both[1][1:, :9], v[1:, :9], mask=seen)
    close(over[1:], short, tolerance(q.dtype))
    with pytest.raises(RuntimeError, match="qv has shape"):
        fa3.flash_attn_func(q, k, v, qv=q)


def test_qv_is_compiled():
    latent, q, qv = torch.randn(2, 11, 1, 32), torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 24)

    def dense(latent, q, qv):
        return fa3.flash_attn_func(q, latent[..., 24:], latent[..., :24], qv=qv)

    def cached(latent, q, qv, *new):
        return fa3.flash_attn_with_kvcache(q, latent[..., 24:], latent[..., :24], *new, qv=qv, cache_seqlens=4)

    for function in (dense, cached):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        close(compiled(latent, q, qv), function(latent, q, qv).double(), tolerance(q.dtype))
    new = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 24)
    with pytest.raises(Exception, match="qv is given beside k, but a compiler does not say"):
        torch.compile(cached, fullgraph=True, backend="aot_eager")(latent, q, qv, *new)


def test_qv_has_gradients():
    q, k, v = (torch.randn(2, n, h, d, requires_grad=True) for n, h, d in ((7, 4, 8), (11, 1, 8), (11, 1, 24)))
    qv = torch.randn(2, 7, 4, 24, requires_grad=True)
    out = fa3.flash_attn_func(q, k, v, qv=qv, softmax_scale=0.3)
    twins = [x.detach().double().requires_grad_() for x in (q, k, v, qv)]
    wanted, _ = by_definition(
        torch.cat((twins[0], twins[3]), -1), torch.cat((twins[1], twins[2]), -1), twins[2], softmax_scale=0.3
    )
    dout = torch.randn_like(out)
    given = torch.autograd.grad(out, (q, k, v, qv), dout)
    for got, by in zip(given, torch.autograd.grad(wanted, twins, dout.double())):
        close(got, by, tolerance(q.dtype, gradients=True))


@appends_in_f32
def test_qv_over_a_latent_cache_appends_into_it():
    latent, q, qv = torch.randn(2, 12, 1, 32), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 24)
    new_k, new_v = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 24)
    angle, used = torch.rand(16, 4), [3, 7]
    call = dict(qv=qv, cache_seqlens=i32(*used), causal=True, rotary_cos=angle.cos(), rotary_sin=angle.sin())
    out = fa3.flash_attn_with_kvcache(q, latent[..., 24:], latent[..., :24], new_k, new_v, **call)
    for b, length in enumerate(used):
        rows = slice(length, length + 2)
        close(latent[b, rows, :, 24:], turned(new_k[b], angle, [length, length + 1], True), 1e-6)
        assert torch.equal(latent[b, rows, :, :24], new_v[b])
        query = torch.cat((qv[b].double(), turned(q[b], angle, [length, length + 1], True)), -1)
        keys = latent[b : b + 1, : length + 2]
        close(out[b], by_definition(query[None], keys, keys[..., :24], mask=fmha.CAUSAL)[0][0], tolerance(q.dtype))
    with pytest.raises(NotImplementedError, match="qv is given beside k, but k_cache does not lie behind v_cache"):
        fa3.flash_attn_with_kvcache(q, latent[..., 24:].clone(), latent[..., :24], new_k, new_v, **call)


@appends_in_f32
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("moves", ["q", "k_cache", "k", "v"])
def test_no_gradient_of_a_cache_is_lost(chunk, moves):
    q, k, v = tensors(sq=1, sk=12)
    given = dict(q=q, k_cache=k, v_cache=v, k=torch.randn(2, 1, 2, 16), v=torch.randn(2, 1, 2, 16))
    given[moves] = given[moves].clone().requires_grad_() * 1
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        **given, cache_seqlens=i32(3, 5), attention_chunk=chunk, return_softmax_lse=True
    )
    for x in (out, lse):
        # The result may be changed in place, like a result of attention.
        for changed in (x, x.mul_(2)):
            with pytest.raises(NotImplementedError, match="k_cache is a cache, of which attention has no gradient"):
                changed.sum().backward(retain_graph=True)


@pytest.mark.parametrize("rows_q, chunk", [(0, 1), (0, 4), (3, 1 << 40), (3, 12), (3, 13)])
@pytest.mark.parametrize("paged", [False, True])
def test_a_chunk_takes_no_memory_of_its_own_size(rows_q, chunk, paged):
    q, k, v = tensors(sq=rows_q, sk=12)
    caches, call = (k, v), dict(cache_seqlens=i32(11, 4), causal=True, return_softmax_lse=True)
    if paged:
        caches = [x.reshape(6, 4, 2, 16) for x in caches]
        call["page_table"] = torch.arange(6, dtype=torch.int32).view(2, 3)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, *caches, attention_chunk=chunk, **call)
    wanted, wanted_lse, *_ = fa3.flash_attn_with_kvcache(q, *caches, **call)
    assert out.shape == wanted.shape and lse.shape == wanted_lse.shape
    close(out, wanted.double(), tolerance(q.dtype))
    close(lse, wanted_lse.double(), 1e-5)


class NoWait(torch.overrides.TorchFunctionMode):
    """Refuses what copies between the host and a device, which waits, and which no graph captures."""

    waits = (torch.tensor, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__bool__)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in self.waits, f"{function.__name__} waits for a device"
        return function(*args, **(kwargs or {}))


@appends_in_f32
def test_layouts_wait_for_no_device(monkeypatch):
    monkeypatch.setattr(fmha.flash_attn, "_readable", lambda _: False)
    q, k, v = tensors(sq=1, sk=12)
    new, angle, used, pad = torch.randn(2, 2, 2, 16), torch.rand(12, 8), i32(11, 4), i32(3, 1)
    call = dict(cache_seqlens=used, rotary_cos=angle, rotary_sin=angle, cache_leftpad=pad)
    parts = torch.randn(3, 10, 4, 16), torch.randn(3, 10, 4)
    first = i32(4)
    with NoWait():
        for chunk in (0, 4):
            fa3.flash_attn_with_kvcache(q, k, v, new, new, attention_chunk=chunk, **call)
        fa3.flash_attn_func(q, k, v, attention_chunk=4)
        rotary.apply_rotary_emb(q, angle, angle, seqlen_offsets=used)
        fa4.flash_attn_combine(*parts, seqused=first)


# A length on a GPU is not read by the host, so a table must be as long as the cache.
SHORT = "rotary_cos has 5 positions, fewer than the " + (
    "7 positions of new rows and queries" if DEVICE == "cpu" else "12 rows of the cache"
)
LAYOUTS = ["plain", "attention_chunk", "qv", "cache_leftpad"]


@pytest.mark.parametrize("layout", [*LAYOUTS, "rotary_seqlens"])
@pytest.mark.parametrize(
    "cos, sin, read, said",
    [
        ((5, 8), (5, 8), True, SHORT),
        ((11, 8), (11, 8), False, "rotary_cos has 11 positions, fewer than the 12 rows of the cache"),
        ((12, 8), (12, 4), True, r"rotary_sin has shape \(12, 4\), but rotary_cos has \(12, 8\)"),
        ((12, 9), (12, 9), True, "rotary_cos has rotary_dim 18, but q has headdim 16"),
        ((12,), (12,), True, r"rotary_cos has shape \(12,\), not 2 axes"),
    ],
)
def test_tables_of_angles_are_as_long_as_their_positions(monkeypatch, layout, cos, sin, read, said):
    latent, q, new = torch.randn(2, 12, 1, 32), torch.randn(2, 1, 4, 16), torch.randn(2, 2, 1, 16)
    more = dict(attention_chunk=4, qv=torch.randn(2, 1, 4, 16), cache_leftpad=i32(1, 0), rotary_seqlens=i32(5, 4))
    call = dict(cache_seqlens=i32(3, 5), **{name: x for name, x in more.items() if name == layout})
    if not read:
        monkeypatch.setattr(fmha.flash_attn, "_readable", lambda _: False)
    call.update(rotary_cos=torch.rand(cos), rotary_sin=torch.rand(sin))
    before = latent.clone()
    with pytest.raises(ValueError, match=said):
        fa3.flash_attn_with_kvcache(q, latent[..., 16:], latent[..., :16], new, new, **call)
    assert torch.equal(latent, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "given, said",
    [
        ("k", "k is given, but v is missing"),
        ("v", "v is given, but k is missing"),
        ("rotary_sin", "rotary_sin is given, but rotary_cos is missing"),
        ("rotary_cos", "rotary_cos is given, but rotary_sin is missing"),
    ],
)
def test_no_half_of_a_pair_is_left_out_in_silence(layout, given, said):
    latent, q, new = torch.randn(2, 12, 1, 32), torch.randn(2, 1, 4, 16), torch.randn(2, 1, 1, 16)
    more = dict(attention_chunk=4, qv=torch.randn(2, 1, 4, 16), cache_leftpad=i32(1, 0))
    call = dict(cache_seqlens=3, **{name: x for name, x in more.items() if name == layout})
    if given.startswith("rotary"):
        call.update(k=new, v=new)
    call[given] = torch.rand(16, 8) if given.startswith("rotary") else new
    with pytest.raises(ValueError, match=said):
        fa3.flash_attn_with_kvcache(q, latent[..., 16:], latent[..., :16], **call)


def test_what_a_layout_cannot_say_is_refused_by_name():
    q, k, v = tensors(sq=1, sk=12)
    new = torch.randn(2, 1, 2, 16)
    apart = torch.randn(2, 100)[:, :96].as_strided((2, 3, 2, 16), (100, 32, 16, 1))
    hnd = torch.randn(2, 2, 12, 16).transpose(1, 2)
    table = i32(0, 1).view(2, 1)
    read = lambda said: said if DEVICE == "cpu" else ""
    for call, kind, said in (
        (dict(cache_leftpad=i32(7, 1), cache_seqlens=i32(5, 5)), ValueError, read("cache_leftpad 7 is beyond the 5")),
        (
            dict(k_cache=hnd, v_cache=hnd.clone(), k=new, v=new, cache_leftpad=i32(1, 0), cache_seqlens=3),
            NotImplementedError,
            "cache_leftpad is given beside k, but k_cache has stride 16 from row to row and 192 from head to head",
        ),
        (dict(cache_leftpad=i32(0, -2), cache_seqlens=3), ValueError, read("cache_leftpad -2 is below 0")),
        (dict(cache_leftpad=i32(0, -2), cache_seqlens=3, k=new, v=new), ValueError, read("cache_leftpad -2 is below 0")),
        (dict(cache_leftpad=torch.ones(2), cache_seqlens=3), ValueError, "cache_leftpad is of torch.float32"),
        (dict(cache_leftpad=i32(1), cache_seqlens=3), ValueError, r"cache_leftpad is of .* shape \(1,\)"),
        (dict(rotary_seqlens=i32(7, 1), k=new, v=new, cache_seqlens=3), ValueError, "rotary_seqlens is given, but rot"),
        (dict(rotary_seqlens=i32(7, 1)), ValueError, "rotary_seqlens is given, but k is not"),
        (
            dict(k_cache=apart, v_cache=apart, page_table=table, cache_leftpad=i32(1, 0), cache_seqlens=3),
            NotImplementedError,
            "k_cache has stride 100 from page to page",
        ),
        (
            dict(cache_batch_idx=i32(0, 2), page_table=table, cache_seqlens=3),
            ValueError,
            read("cache_batch_idx 2 is not in 0 .. 2"),
        ),
    ):
        if not said:
            continue  # What lies on a GPU is not read.
        with pytest.raises(kind, match=said):
            fa3.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v, **call})


@pytest.mark.parametrize("layout", [{}, dict(cache_leftpad=i32(2, 1)), dict(attention_chunk=4)], ids=list)
def test_an_append_says_where_its_rows_go(layout):
    q, k, v = tensors(sq=1, sk=12)
    new, before = torch.randn(2, 1, 2, 16), k.clone()
    with pytest.raises(ValueError, match="cache_seqlens is missing beside k"):
        fa3.flash_attn_with_kvcache(q, k, v, new, new, **layout)
    assert torch.equal(k, before)


@appends_in_f32
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_beyond_a_padded_cache_are_left_out_where_lengths_are_not_read(monkeypatch, packed, chunk, paged):
    """A GPU's lengths are not read: its kernels leave out what there is no room for, and no row is overwritten."""
    monkeypatch.setattr(fmha.flash_attn, "_readable", lambda _: False)
    q, k, v = tensors(sq=1, sk=12)
    new, before = torch.randn(2, 2, 2, 16), torch.stack((k, v))
    pad, used = [3, 1], [11, 4]
    call = dict(cache_seqlens=i32(*used), cache_leftpad=i32(*pad), attention_chunk=chunk)
    caches, rows = (k, v), (new, -new)
    if paged:
        caches = [x.reshape(6, 4, 2, 16) for x in caches]
        call["page_table"] = torch.arange(6, dtype=torch.int32).view(2, 3)
    if packed:
        rows, call["cu_seqlens_k_new"] = [x.flatten(0, 1) for x in rows], offsets([2, 2])
    out = fa3.flash_attn_with_kvcache(q, *caches, *rows, **call)
    before[:, 0, 11] = torch.stack((new[0, 0], -new[0, 0]))
    before[:, 1, 4:6] = torch.stack((new[1], -new[1]))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    for b, end in enumerate((12, 6)):
        keys, values = (x[b : b + 1, pad[b] : end] for x in (k, v))
        seen = seen_in_chunks(chunk or 100, 1, end - pad[b])
        close(out[b], by_definition(q[b : b + 1], keys, values, mask=seen)[0][0], tolerance(q.dtype))


@pytest.mark.parametrize("count", [129, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_parts_than_a_kernel_takes_are_merged_by_groups(count, dtype):
    parts = torch.randn(count, 2, 3, 4, 16).to(dtype).requires_grad_()
    lse = torch.randn(count, 2, 4, 3, requires_grad=True)
    with torch.no_grad():
        lse[5], lse[:, 1, 2, 1] = -math.inf, -math.inf
    out, merged = fmha.combine(parts, lse)
    twins = [x.detach().double().requires_grad_() for x in (parts, lse)]
    total = torch.logsumexp(twins[1], 0)
    weights = torch.exp(twins[1] - total.masked_fill(torch.isneginf(total), 0))
    wanted = (weights.transpose(-1, -2)[..., None] * twins[0]).sum(0)
    assert out.dtype == dtype
    close(out, wanted, {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype])
    close(merged, total, 1e-5)
    dout = torch.randn(2, 3, 4, 16)
    (got,) = torch.autograd.grad(out.float(), parts, dout)
    (by,) = torch.autograd.grad(wanted, twins[0], dout.double())
    close(got, by, {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype])
    sums = fmha.add_parts(parts.detach(), dtype_o=torch.float32)
    close(sums, parts.detach().double().sum(0), 1e-4)
    start = torch.randn(2, 3, 4, 16)
    close(fmha.add_parts(parts.detach(), start.clone()), start.double() + parts.detach().double().sum(0), 1e-4)


def test_a_merge_leaves_out_rows_that_are_not_in_use():
    parts, lse = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)
    whole, whole_lse = fa4.flash_attn_combine(parts, lse)
    used = i32(2, 5)
    out, merged = fa4.flash_attn_combine(parts, lse, seqused=used, virtual_batch_idx=i32(1, 0))
    assert torch.equal(out[0, :2], whole[0, :2]) and torch.equal(out[1], whole[1]) and not out[0, 2:].any()
    assert torch.equal(merged[0, :2], whole_lse[0, :2]) and not merged[0, 2:].any()
    kept = torch.full_like(whole, 7.0)
    fa4.flash_attn_combine(parts, lse, out=kept, seqused=used)
    assert (kept[0, 2:] == 7.0).all() and torch.equal(kept[1], whole[1])
    rows = [x.flatten(1, 2) for x in (parts, lse)]
    out, _ = fa4.flash_attn_combine(*rows, cu_seqlens=i32(0, 4, 10), seqused=i32(3, 2))
    assert torch.equal(out[:3], whole.flatten(0, 1)[:3]) and not out[3].any() and not out[6:].any()
    with pytest.raises(ValueError, match="virtual_batch_idx has shape"):
        fa4.flash_attn_combine(parts, lse, virtual_batch_idx=i32(1, 0, 2))
