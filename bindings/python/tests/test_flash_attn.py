"""FlashAttention's functions: names, argument order, defaults, what they return and what it means."""

import inspect
import math

import pytest
import torch

import fmha
from fmha import bert_padding, flash_attn as fa2, flash_attn_3 as fa3, flash_attn_4 as fa4
from reference import DEVICE, appends_in_f32, attention as by_definition, close, offsets, tensors, tolerance
from run import run_python

TAIL2 = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
VARLEN = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
TAIL3 = (
    "softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1, -1) "
    "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
)
SIGNATURES = {
    fa2.flash_attn_func: f"q k v {TAIL2}",
    fa2.flash_attn_qkvpacked_func: f"qkv {TAIL2}",
    fa2.flash_attn_kvpacked_func: f"q kv {TAIL2}",
    fa2.flash_attn_varlen_func: f"{VARLEN} {TAIL2} block_table=None",
    fa2.flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen {TAIL2}",
    fa2.flash_attn_varlen_kvpacked_func: f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {TAIL2}",
    fa2.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None "
    "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    fa3.flash_attn_func: f"q k v {TAIL3}",
    fa3.flash_attn_qkvpacked_func: "qkv softmax_scale=None causal=False q_descale=None k_descale=None v_descale=None "
    "window_size=(-1, -1) "
    "attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    fa3.flash_attn_varlen_func: f"{VARLEN} seqused_q=None seqused_k=None {TAIL3}",
    fa3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None "
    "cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
    "q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1, -1) "
    "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None "
    "sm_margin=0 return_softmax_lse=False",
    fa3.flash_attn_combine: "out_partial lse_partial out=None out_dtype=None",
    fa3.get_scheduler_metadata: "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None "
    "max_seqlen_k_new=0 causal=False window_size=(-1, -1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None "
    "sm_margin=0",
    fa4.flash_attn_func: "q k v qv=None gather_kv_indices=None softmax_scale=None causal=False window_size=(None, "
    "None) "
    "learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False score_mod=None score_mod_bwd=None "
    "mask_mod=None aux_tensors=None aux_scalars=None block_sparse_tensors=None block_sparse_tensors_bwd=None "
    "return_lse=False",
    fa4.flash_attn_varlen_func: "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None "
    "min_seqlen_k=None "
    "seqused_q=None seqused_k=None gather_kv_indices=None page_table=None softmax_scale=None causal=False "
    "window_size=(None, None) learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False "
    "score_mod=None score_mod_bwd=None mask_mod=None aux_tensors=None aux_scalars=None return_lse=False "
    "scheduler_metadata=None seqlen_k_per_split=None disable_scheduler_metadata=False",
    fa4.flash_attn_combine: "out_partial lse_partial out=None out_dtype=None cu_seqlens=None seqused=None "
    "virtual_batch_idx=None "
    "return_lse=True",
}


def spelt(function):
    return " ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in inspect.signature(function).parameters.items()
    )


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_arguments_have_their_names_order_and_defaults(function):
    assert spelt(function) == SIGNATURES[function]


def test_the_fourth_argument_is_another_in_each_generation():
    q, k, v = tensors()
    assert torch.equal(fa2.flash_attn_func(q, k, v, 0.0, 0.5), fa3.flash_attn_func(q, k, v, 0.5))
    qv = torch.randn(2, 7, 4, 16)
    assert torch.equal(fa4.flash_attn_func(q, k, v, qv)[0], fa4.flash_attn_func(q, k, v, qv=qv)[0])


def test_what_each_generation_returns():
    q, k, v = tensors()
    assert isinstance(fa2.flash_attn_func(q, k, v), torch.Tensor)
    out, lse, probs = fa2.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32 and probs.numel() == 0
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (2, 4, 7)
    out, lse = fa4.flash_attn_func(q, k, v)
    assert lse is None
    assert fa4.flash_attn_func(q, k, v, return_lse=True)[1].shape == (2, 4, 7)
    used = torch.tensor([5, 11], dtype=torch.int32)
    assert isinstance(fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=used), torch.Tensor)
    assert len(fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True)) == 2
    assert len(fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True)) == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v, **o: fa2.flash_attn_func(q, k, v, **o),
        lambda q, k, v, **o: fa3.flash_attn_func(q, k, v, **o),
        lambda q, k, v, **o: fa4.flash_attn_func(q, k, v, **o)[0],
    ],
    ids=["2", "3", "4"],
)
@pytest.mark.parametrize(
    "option, mask",
    [
        (dict(), None),
        (dict(causal=True), "b:-1,0"),
        (dict(window_size=(3, 0)), "b:3,0"),
        (dict(window_size=(2, 1)), "b:2,1"),
        (dict(causal=True, window_size=(3, 5)), "b:3,0"),
    ],
    ids=str,
)
def test_causal_and_windows_are_bottom_right_and_inclusive(call, option, mask):
    q, k, v = tensors()
    close(call(q, k, v, **option), by_definition(q, k, v, mask=fmha.mask(mask))[0], tolerance(q.dtype))


def test_a_window_of_w_and_0_sees_w_plus_1_keys():
    q, k, _ = tensors(sq=9, sk=9, hk=4)
    v = torch.eye(9).expand(2, 4, 9, 9).transpose(1, 2)
    seen = fa2.flash_attn_func(q, k, v, window_size=(3, 0)) > 0
    assert seen[0, 8, 0].nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_rows_above_the_diagonal_have_no_output_and_lse_minus_infinity():
    q, k, v = tensors(sq=7, sk=3)
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out[:, :4], torch.zeros_like(out[:, :4])) and torch.isneginf(lse[:, :, :4]).all()


def test_a_window_below_minus_one_is_refused_and_fa4s_empty_one_is_none():
    q, k, v = tensors()
    for module in (fa2, fa3):
        with pytest.raises(ValueError, match="left -2"):
            module.flash_attn_func(q, k, v, window_size=(-2, 0))
    assert torch.equal(fa4.flash_attn_func(q, k, v, window_size=(1, -3))[0], fa4.flash_attn_func(q, k, v)[0])


def test_softcap_alibi_and_scale():
    q, k, v = tensors()
    slopes = torch.rand(2, 4)
    out = fa2.flash_attn_func(q, k, v, softmax_scale=0.3, softcap=2.0, causal=True, alibi_slopes=slopes)
    wanted, _ = by_definition(q, k, v, mask=fmha.CAUSAL, softmax_scale=0.3, softcap=2.0, alibi_slopes=slopes)
    close(out, wanted, tolerance(q.dtype))


def test_packed_forms_are_views_with_gradients():
    qkv = torch.randn(2, 7, 3, 4, 16, requires_grad=True)
    out = fa2.flash_attn_qkvpacked_func(qkv, causal=True)
    close(out, by_definition(*qkv.unbind(2), mask=fmha.CAUSAL)[0], tolerance(qkv.dtype))
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    assert grad.shape == qkv.shape and torch.isfinite(grad).all()
    q, k, v = tensors()
    kv = torch.stack([k, v], 2)
    assert torch.equal(fa2.flash_attn_kvpacked_func(q, kv), fa2.flash_attn_func(q, k, v))
    joined = torch.cat([q, k[:, :7], v[:, :7]], 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(joined, num_heads_q=4), fa3.flash_attn_func(q, k[:, :7], v[:, :7]))
    with pytest.raises(ValueError, match="num_heads_q 3"):
        fa3.flash_attn_qkvpacked_func(joined, num_heads_q=3)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 7, 2, 4, 16\), not 5 axes with 3 on axis 2"):
        fa2.flash_attn_qkvpacked_func(qkv[:, :, :2])
    with pytest.raises(ValueError, match="kv has shape .*not 4 axes with 2 on axis 1"):
        fa2.flash_attn_varlen_kvpacked_func(q[0], kv, None, None, 7, 7)


def test_varlen_of_each_generation():
    cu_q, cu_k = offsets([3, 0, 5]), offsets([4, 6, 5])
    q, k, v = torch.randn(8, 4, 16), torch.randn(15, 2, 16), torch.randn(15, 2, 16)
    out = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, causal=True)
    for b in (0, 2):
        wanted, _ = by_definition(
            *(
                x[None, lo:hi]
                for x, lo, hi in ((q, cu_q[b], cu_q[b + 1]), (k, cu_k[b], cu_k[b + 1]), (v, cu_k[b], cu_k[b + 1]))
            ),
            mask=fmha.CAUSAL,
        )
        close(out[cu_q[b] : cu_q[b + 1]], wanted[0], tolerance(q.dtype))
    # The longest length may be given as a tensor without axes.
    longest = torch.tensor(5), torch.tensor(6)
    assert torch.equal(out, fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, causal=True))
    four = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=6)
    assert torch.equal(out, fa4.flash_attn_varlen_func(q, k, v, causal=True, **four)[0])
    _, lse, _ = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, return_attn_probs=True)
    assert lse.shape == (4, 8)
    # FlashAttention 4 needs no bound of the lengths.
    assert torch.equal(out, fa4.flash_attn_varlen_func(q, k, v, None, cu_q, cu_k, causal=True)[0])
    assert torch.equal(out, fa4.flash_attn_varlen_func(q, k, v, None, cu_q, cu_k, 5, causal=True)[0])
    packed = torch.stack([x[:8] for x in (q[:, :2], k, v)], 1)
    assert torch.equal(
        fa2.flash_attn_varlen_qkvpacked_func(packed, cu_q, 5),
        fa2.flash_attn_varlen_kvpacked_func(packed[:, 0], packed[:, 1:], cu_q, cu_q, 5, 5),
    )


def test_varlen_over_pages_takes_lengths_from_the_offsets():
    pages = torch.randn(2, 4, 8, 2, 16)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    cu_q, cu_k = offsets([3, 2]), offsets([11, 16])
    q = torch.randn(5, 4, 16)
    out = fa2.flash_attn_varlen_func(q, pages[0], pages[1], cu_q, cu_k, 3, 16, causal=True, block_table=table)
    k, v = (x[table.long()].flatten(1, 2) for x in pages)
    wanted, _ = by_definition(q[None, :3], k[:1, :11], v[:1, :11], mask=fmha.CAUSAL)
    close(out[:3], wanted[0], tolerance(q.dtype))


def test_a_forward_without_a_gradient_runs_and_its_backward_says_why():
    pages, table = torch.randn(2, 4, 8, 2, 16), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    rows = (offsets([3, 2]), offsets([11, 16]), 3, 16)
    q = torch.randn(5, 4, 16, requires_grad=True)
    out, lse, _ = fa2.flash_attn_varlen_func(q, *pages, *rows, return_attn_probs=True, block_table=table)
    assert torch.equal(out, fa2.flash_attn_varlen_func(q.detach(), *pages, *rows, block_table=table))
    eighths = [x.to(torch.float8_e4m3fn).requires_grad_() for x in tensors(d=32)]
    scale = torch.full((2, 2), 0.5)
    of_eighths = fa3.flash_attn_func(*eighths, q_descale=scale, v_descale=scale)
    q2, cache, _ = tensors()
    of_cache = fa2.flash_attn_with_kvcache(q2.requires_grad_(), cache, cache)
    for result, said in ((out, "block_table"), (lse, "block_table"), (of_eighths, "descale_q"), (of_cache, "k_cache")):
        with pytest.raises(NotImplementedError, match=f"{said} is .*no gradient"):
            result.float().sum().backward()
    with torch.no_grad():
        assert not fa2.flash_attn_varlen_func(q, *pages, *rows, block_table=table).requires_grad


def test_dropout_marks_what_it_dropped_and_has_torchs_seed():
    q, k, v = tensors()
    torch.manual_seed(5)
    out, _, marks = fa2.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)
    assert marks.shape == (2, 4, 128, 128) and not marks[:, :, 7:].any() and not marks[..., 11:].any()
    marks = marks[:, :, :7, :11]
    assert set(marks.sign().unique().tolist()) == {-1.0, 1.0}
    wanted, _ = by_definition(q, k, v, keep=marks > 0, p_drop=0.3)
    close(out, wanted, 4 * tolerance(q.dtype))
    torch.manual_seed(5)
    assert torch.equal(out, fa2.flash_attn_func(q, k, v, dropout_p=0.3))
    assert not torch.equal(out, fa2.flash_attn_func(q, k, v, dropout_p=0.3))


def test_descales_may_be_expanded():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(d=32))
    scale = torch.full((1,), 0.5).expand(2, 2)
    out = fa3.flash_attn_func(q, k, v, q_descale=scale, k_descale=scale, v_descale=scale)
    assert out.dtype == torch.bfloat16
    close(out, by_definition(*(x.double() * 0.5 for x in (q, k, v)))[0], 0.1)


@appends_in_f32
def test_a_cache_with_new_rows_chosen_by_batch_index():
    cache_k, cache_v = torch.randn(5, 16, 2, 16), torch.randn(5, 16, 2, 16)
    q, new_k, new_v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    index, used = torch.tensor([4, 1]), torch.tensor([3, 9], dtype=torch.int32)
    out, lse = fa2.flash_attn_with_kvcache(
        q,
        cache_k,
        cache_v,
        new_k,
        new_v,
        cache_seqlens=used,
        cache_batch_idx=index,
        causal=True,
        return_softmax_lse=True,
    )
    assert torch.equal(cache_k[4, 3], new_k[0, 0]) and torch.equal(cache_v[1, 9], new_v[1, 0])
    for b in range(2):
        rows = slice(0, int(used[b]) + 1)
        wanted, wanted_lse = by_definition(q[b : b + 1], cache_k[index[b]][None, rows], cache_v[index[b]][None, rows])
        close(out[b : b + 1], wanted, tolerance(q.dtype))
        close(lse[b : b + 1], wanted_lse, 1e-5)
    same = fa2.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=7, cache_batch_idx=index)
    seven = torch.full((2,), 7, dtype=torch.int32)
    assert torch.equal(
        same, fa3.flash_attn_with_kvcache(q, cache_k, cache_v, cache_seqlens=seven, cache_batch_idx=index)[:]
    )
    table = torch.arange(5, dtype=torch.int32).flip(0)[:, None]
    paged = fa2.flash_attn_with_kvcache(
        q, cache_k.flip(0), cache_v.flip(0), cache_seqlens=7, cache_batch_idx=index, block_table=table
    )
    assert torch.equal(paged, same)


def test_padding_in_front_of_a_cache_is_left_out():
    q, k, v = tensors(sq=1, sk=12)
    pad, used = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([9, 12], dtype=torch.int32)
    k[0, :2], k[1, :5], k[0, 9:] = math.nan, math.nan, math.nan
    out = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=pad, causal=True)
    for b in range(2):
        rows = slice(int(pad[b]), int(used[b]))
        close(
            out[b : b + 1], by_definition(q[b : b + 1], k[b : b + 1, rows], v[b : b + 1, rows])[0], tolerance(q.dtype)
        )


@appends_in_f32
def test_rotary_is_interleaved_by_default():
    q, k, v = tensors(sq=1, sk=12, hq=2)
    used = torch.tensor([3, 7], dtype=torch.int32)
    angle = torch.rand(16, 8)
    turns = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), cache_seqlens=used)
    new = torch.randn(2, 1, 2, 16)
    caches = [k.clone() for _ in range(2)]
    for cache, interleaved in zip(caches, (True, False)):
        fa2.flash_attn_with_kvcache(q, cache, v.clone(), new, new, rotary_interleaved=interleaved, causal=True, **turns)
    default = k.clone()
    fa2.flash_attn_with_kvcache(q, default, v.clone(), new, new, causal=True, **turns)
    assert torch.equal(default, caches[0]) and not torch.equal(default, caches[1])
    c, s = angle[3].cos(), angle[3].sin()
    turned = torch.stack(
        [new[0, 0, :, ::2] * c - new[0, 0, :, 1::2] * s, new[0, 0, :, ::2] * s + new[0, 0, :, 1::2] * c], -1
    )
    close(default[0, 3], turned.flatten(-2).double(), 1e-5)


def test_a_sink_is_taken_in_16_bits_and_is_the_lse_of_an_empty_row():
    q, k, v = tensors(sq=7, sk=3)
    sink = torch.randn(4).bfloat16().requires_grad_()
    out, lse = fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    assert torch.equal(lse[0, :, 0], sink.float())
    (grad,) = torch.autograd.grad(out.sum(), sink)
    assert grad.dtype == torch.bfloat16
    wanted, _ = by_definition(q, k, v, mask=fmha.CAUSAL, sink=sink.detach().float())
    close(out.detach(), wanted, tolerance(q.dtype))


def test_combine_of_each_generation():
    q, k, v = tensors()
    whole, lse = fmha.attention(q, k, v, return_lse=True)
    parts = [fmha.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 11))]
    outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts])
    for module in (fa3, fa4):
        got, got_lse = module.flash_attn_combine(outs, lses)
        close(got, whole.double(), 1e-5)
        close(got_lse, lse.transpose(1, 2).double(), 1e-5)
        packed, packed_lse = module.flash_attn_combine(outs.flatten(1, 2), lses.flatten(1, 2))
        assert torch.equal(packed, got.flatten(0, 1)) and torch.equal(packed_lse, got_lse.flatten(0, 1))
        into = torch.empty_like(whole, dtype=torch.bfloat16)
        assert module.flash_attn_combine(outs, lses, out=into)[0] is into
        close(into, whole.double(), 2e-2)
        assert module.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    assert fa4.flash_attn_combine(outs, lses, return_lse=False)[1] is None


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda q, k, v: fa4.flash_attn_func(q, k, v, score_mod=print), "score_mod"),
        (lambda q, k, v: fa4.flash_attn_func(q, k, v, mask_mod=print), "mask_mod"),
        (lambda q, k, v: fa4.flash_attn_func(q, k, v, gather_kv_indices=q), "gather_kv_indices"),
        (lambda q, k, v: fa4.flash_attn_func(None, k, v, qv=q), "q is None beside qv"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_contract_has_not_is_refused_by_name(call, words):
    with pytest.raises(NotImplementedError, match=words):
        call(*tensors())


def test_functions_of_flash_attention_4_are_code_with_gradients():
    q, k, v = tensors()
    slopes = torch.randn(q.shape[2], requires_grad=True)

    def score(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return s + aux_tensors[0][h] * (kv_idx - q_idx - (seqlen_info.seqlen_k - seqlen_info.seqlen_q))

    def mask(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return kv_idx <= q_idx + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)

    # The keywords causal and window have no effect beside a mask_mod.
    options = dict(
        score_mod=score, mask_mod=mask, aux_tensors=[slopes], causal=True, window_size=(0, 0), return_lse=True
    )
    o, lse = fa4.flash_attn_func(q, k, v, **options)
    place = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    bias = slopes[:, None, None] * place
    wanted, of_rows = fmha.attention(q, k, v, mask="causal", bias=bias, return_lse=True)
    close(o, wanted.double(), 1e-5)
    close(lse, of_rows.double(), 1e-5)
    for found, exact in zip(*(torch.autograd.grad(x.square().sum(), slopes, retain_graph=True) for x in (o, wanted))):
        close(found, exact.double(), 1e-4)
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (q.shape[1], k.shape[1])]
    rows = (x.flatten(0, 1) for x in (q, k, v))
    packed, _ = fa4.flash_attn_varlen_func(*rows, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **options)
    close(packed, o.flatten(0, 1).double(), 1e-5)
    with pytest.raises(ValueError, match="softcap 2.0 is given beside score_mod"):
        fa4.flash_attn_func(q, k, v, score_mod=score, aux_tensors=[slopes], softcap=2.0)
    with pytest.raises(NotImplementedError, match="score_mod_bwd is given"):
        fa4.flash_attn_func(q, k, v, score_mod=score, aux_tensors=[slopes], score_mod_bwd=score)
    with pytest.raises(NotImplementedError, match="score_mod: lgamma: the language"):
        fa4.flash_attn_func(q, k, v, score_mod=lambda s, *_: torch.lgamma(s))
    with pytest.raises(NotImplementedError, match="aux_tensors is given"):
        fa4.flash_attn_func(q, k, v, aux_tensors=[slopes])


def test_hints_of_speed_are_taken():
    q, k, v = tensors()
    metadata = fa3.get_scheduler_metadata(2, 7, 11, 4, 2, 16, torch.tensor([5, 11], dtype=torch.int32))
    out = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=11, scheduler_metadata=metadata, pack_gqa=True, sm_margin=4
    )
    close(out, by_definition(q, k, v)[0], tolerance(q.dtype))


def test_padded_batches_are_unpadded_and_padded_again():
    hidden, mask = torch.randn(3, 5, 2, 4), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    rows, indices, cu, longest, used = bert_padding.unpad_input(hidden, mask)
    assert rows.shape == (8, 2, 4) and cu.tolist() == [0, 3, 8, 8] and longest == 5 and used.tolist() == [3, 5, 0]
    assert torch.equal(bert_padding.pad_input(rows, indices, 3, 5), hidden * mask[..., None, None])


def test_installed_modules_are_found_where_programs_look():
    program = """
import fmha.flash_attn, fmha.flash_attn_3, fmha.flash_attn_4, importlib.util
fmha.flash_attn_3.install(); fmha.flash_attn_4.install()
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn.bert_padding import unpad_input
import flash_attn_interface, flash_attn.cute.interface
from flash_attn.cute import flash_attn_func as four
assert flash_attn_func is fmha.flash_attn.flash_attn_func
assert flash_attn_interface.flash_attn_with_kvcache is fmha.flash_attn_3.flash_attn_with_kvcache
assert four is fmha.flash_attn_4.flash_attn_func
assert importlib.util.find_spec("flash_attn") and flash_attn.__version__
import sys, types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
try:
    fmha.flash_attn.install()
    sys.exit(3)
except ImportError as error:
    assert "flash_attn" in str(error)
fmha.flash_attn.install(force=True)
"""
    run_python(program)


BOUNDS = [None, *range(-9, 10)]


def draw_bounds(count):
    at = torch.randint(len(BOUNDS), (count, 2)).tolist()
    return [(BOUNDS[left], BOUNDS[right]) for left, right in at]


def seen_by_fa4(window_size, causal, seqlen_q, seqlen_k):
    """Which keys a query sees by FlashAttention 4's rules."""
    left, right = window_size
    right = 0 if causal else right
    if None not in (left, right) and left + right < 0:
        left, right = None, 0 if causal else None
    diagonal = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k)[None]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        seen &= keys >= diagonal - left
    if right is not None:
        seen &= keys <= diagonal + right
    return seen


def by_fa4(q, k, v, window_size, causal, sink=None):
    seen = seen_by_fa4(window_size, causal, q.shape[1], k.shape[1])
    return by_definition(q, k, v, mask=seen, sink=sink)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_every_number_is_a_bound_of_fa4s_windows(causal, with_sink):
    for window_size in draw_bounds(20) + [(None, -1), (-1, None), (-1, 1), (2, -2), (1, -3), (-9, 0)]:
        sizes = torch.randint(1, 9, (2,)).tolist()
        q, k, v = tensors(sq=sizes[0], sk=sizes[1], grad=True)
        sink = torch.randn(4, requires_grad=True) if with_sink else None
        o, lse = fa4.flash_attn_func(
            q, k, v, causal=causal, window_size=window_size, learnable_sink=sink, return_lse=True
        )
        twins = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wanted, wanted_lse = by_fa4(*twins, window_size, causal, None if sink is None else sink.detach())
        close(o, wanted, tolerance(q.dtype))
        close(lse, wanted_lse, 1e-5)
        dout = torch.randn_like(o)
        for got, by in zip(torch.autograd.grad(o, (q, k, v), dout), torch.autograd.grad(wanted, twins, dout.double())):
            close(got, by, tolerance(q.dtype, gradients=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("layout", ["packed", "used", "paged"])
def test_every_number_is_a_bound_of_sequences_of_fa4(layout, causal, with_sink):
    """Sequences whose diagonals lie apart, and with bounds that some are shorter than."""
    lengths_q, lengths_k = [3, 0, 8, 1, 5], [7, 4, 2, 0, 11]
    most_q, most_k = max(lengths_q), 12
    sink = torch.randn(4) if with_sink else None
    for window_size in draw_bounds(12) + [(None, -1), (-1, None), (-2, 3), (4, -2)]:
        q, k, v = torch.randn(5, most_q, 4, 16), torch.randn(5, most_k, 2, 16), torch.randn(5, most_k, 2, 16)
        call = dict(causal=causal, window_size=window_size, learnable_sink=sink, return_lse=True)
        used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in (lengths_q, lengths_k))
        if layout == "packed":
            packed = [
                torch.cat([x[b, :n] for b, n in enumerate(lengths)]).requires_grad_()
                for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))
            ]
            offsets_q, offsets_k = offsets(lengths_q), offsets(lengths_k)
            o, lse = fa4.flash_attn_varlen_func(
                *packed, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, max_seqlen_q=most_q, max_seqlen_k=11, **call
            )
        elif layout == "used":
            o, lse = fa4.flash_attn_varlen_func(q, k, v, seqused_q=used_q, seqused_k=used_k, **call)
        else:
            pages = [x.unflatten(1, (3, 4)).flatten(0, 1).flip(0) for x in (k, v)]
            table = (14 - torch.arange(15, dtype=torch.int32)).view(5, 3)
            o, lse = fa4.flash_attn_varlen_func(q, *pages, seqused_q=used_q, seqused_k=used_k, page_table=table, **call)
        first = first_k = 0
        if layout == "packed":
            dout = torch.randn_like(o)
            gradients = torch.autograd.grad(o, packed, dout)
        for b, (n, m) in enumerate(zip(lengths_q, lengths_k)):
            twins = [x[b : b + 1, :rows].double().requires_grad_() for x, rows in ((q, n), (k, m), (v, m))]
            wanted, wanted_lse = by_fa4(*twins, window_size, causal, sink)
            if layout == "packed":
                rows, rows_k = slice(first, first + n), slice(first_k, first_k + m)
                got, got_lse = o[rows], lse[:, rows]
                by = torch.autograd.grad(wanted, twins, dout[None, rows].double())
                for a, x, at in zip(gradients, by, (rows, rows_k, rows_k)):
                    close(a[at], x[0], tolerance(q.dtype, gradients=True))
                first, first_k = first + n, first_k + m
            else:
                got, got_lse = o[b, :n], lse[b, :, :n]
            close(got, wanted[0], tolerance(q.dtype))
            close(got_lse, wanted_lse[0], 1e-5)


@pytest.mark.parametrize("window_size", [(None, -1), (-1, None), (-100, None), (500, -30)])
def test_a_long_window_of_fa4_below_zero_in_16_bits(window_size):
    q, k, v = tensors(b=1, sq=799, sk=799, dtype=torch.bfloat16)
    o, _ = fa4.flash_attn_func(q, k, v, window_size=window_size)
    close(o, by_fa4(q, k, v, window_size, False)[0], tolerance(q.dtype))


@pytest.mark.parametrize("window_size", [(None, -1), (-2, 5)], ids=str)
def test_a_bound_below_zero_of_fa4_is_compiled(window_size):
    torch._dynamo.reset()
    dense = lambda q, k, v: fa4.flash_attn_func(q, k, v, window_size=window_size, return_lse=True)
    packed = lambda q, k, v, *cu: fa4.flash_attn_varlen_func(
        q, k, v, None, *cu, 9, 13, window_size=window_size, return_lse=True
    )
    compiled = [torch.compile(x, backend="aot_eager", fullgraph=True, dynamic=True) for x in (dense, packed)]
    for rows in (5, 7):
        q, k, v = tensors(sq=rows, sk=rows + 3)
        assert all(map(torch.equal, compiled[0](q, k, v), dense(q, k, v)))
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu = offsets([rows - 1, rows + 1]), offsets([rows, rows + 6])
        assert all(map(torch.equal, compiled[1](q, k, v, *cu), packed(q, k, v, *cu)))


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
def test_minus_one_is_open_in_fa2s_and_fa3s_windows_and_less_is_refused(module):
    q, k, v = tensors()
    for window_size, mask in (((-1, -1), None), ((-1, 0), "b:-1,0"), ((2, -1), "b:2,-1")):
        got = module.flash_attn_func(q, k, v, window_size=window_size)
        close(got, by_definition(q, k, v, mask=fmha.mask(mask))[0], tolerance(q.dtype))
    for name, window_size in (("left", (-2, 0)), ("right", (0, -7))):
        with pytest.raises(ValueError, match=f"window_size: {name} -[27] is below -1"):
            module.flash_attn_func(q, k, v, window_size=window_size)


@appends_in_f32
@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
def test_a_length_beyond_the_cache_or_its_pages_is_refused(module):
    q, k, v = tensors(sq=1, sk=12)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    pages = torch.randn(2, 4, 5, 2, 16)
    table_as = {("block_table" if module is fa2 else "page_table"): table}
    new = torch.randn(2, 3, 2, 16)
    lengths = lambda *x: torch.tensor(x, dtype=torch.int32)
    module.flash_attn_with_kvcache(q, k, v, cache_seqlens=12)
    module.flash_attn_with_kvcache(q, k.clone(), v.clone(), new, new, cache_seqlens=lengths(9, 0))
    for call, said in (
        (lambda: module.flash_attn_with_kvcache(q, k, v, cache_seqlens=13), "is 13, but k_cache has 12"),
        (lambda: module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths(3, 14)), "is 14, but k_cache has 12"),
        (lambda: module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths(3, -1)), "-1 is below 0"),
        (
            lambda: module.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths(10, 3)),
            "is 13, but k_cache has 12",
        ),
        (
            lambda: module.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=13, cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32)
            ),
            "is 13, but k_cache has 12",
        ),
        (
            lambda: module.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths(11, 2), **table_as),
            "is 11, but the pages of block_table have 10",
        ),
    ):
        with pytest.raises(ValueError, match=f"cache_seqlens.*{said}"):
            call()


def test_our_own_door_clamps_such_a_length_and_refuses_it_with_check_lengths():
    q, pages = torch.randn(2, 1, 4, 16), torch.randn(2, 4, 5, 2, 16)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    call = dict(block_table=table, max_seqlen_k=10)
    beyond, whole = (torch.tensor(used, dtype=torch.int32) for used in ([13, 4], [10, 4]))
    clamped = fmha.attention_with_kvcache(q, *pages, seqused_k=beyond, **call)
    assert torch.equal(clamped, fmha.attention_with_kvcache(q, *pages, seqused_k=whole, **call))
    with pytest.raises(RuntimeError, match="seqused_k.*13"):
        fmha.attention_with_kvcache(q, *pages, seqused_k=beyond, check_lengths=True, **call)


def test_lengths_beyond_the_pages_of_packed_calls_are_refused():
    q, pages = torch.randn(2, 4, 16), torch.randn(2, 4, 5, 2, 16)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    # Offsets on a GPU are not read by the host, so the error is about the longest sequence, which is a number.
    lengths = "cu_seqlens_k's difference.* is 11, but the pages of block_table have 10"
    beyond = (
        pytest.raises(ValueError, match=lengths) if DEVICE == "cpu" else pytest.raises(RuntimeError, match="10 keys")
    )
    with beyond:
        fa2.flash_attn_varlen_func(q, *pages, offsets([1, 1]), offsets([11, 3]), 1, 11, block_table=table)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="seqused_k.* is 12, but the pages of block_table have 10"):
            fa4.flash_attn_varlen_func(
                q[:, None], *pages, seqused_k=torch.tensor([12, 3], dtype=torch.int32), page_table=table
            )


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
def test_a_rotary_embedding_without_new_rows_is_refused(module):
    q, k, v = tensors(sq=1, sk=12)
    angle = torch.rand(16, 8)
    for name in ("rotary_cos", "rotary_sin"):
        with pytest.raises(ValueError, match=f"{name} is given, but k is not"):
            module.flash_attn_with_kvcache(q, k, v, cache_seqlens=7, **{name: angle})
