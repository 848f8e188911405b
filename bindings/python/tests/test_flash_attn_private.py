"""FlashAttention's entry points below its functions, the operators of the third generation, marks of dropout, and
windows that are tensors."""

import inspect
import math

import pytest
import torch

import fmha
import fmha.sdpa
from fmha import (
    _flash_attn_2_private as two,
    _flash_attn_3_private as three,
    _flash_attn_4_private as four,
    flash_attn as fa2,
    flash_attn_3 as fa3,
    flash_attn_4 as fa4,
)
from reference import appends_in_f32, attention as by_definition, close, offsets, tensors, tolerance, visible
from run import run_python

i32 = lambda *x: torch.tensor(x, dtype=torch.int32)

SIGNATURES = {
    two._flash_attn_forward: "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap "
    "alibi_slopes return_softmax",
    two._flash_attn_varlen_forward: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False "
    "block_table=None leftpad_k=None seqused_k=None zero_tensors=False num_splits=0",
    two._flash_attn_backward: "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic rng_state=None",
    two._flash_attn_varlen_backward: "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "deterministic rng_state=None zero_tensors=False",
    three._flash_attn_forward: "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
    "cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None "
    "kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None q_descale=None "
    "k_descale=None v_descale=None softmax_scale=None causal=False window_size_left=-1 window_size_right=-1 "
    "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None "
    "sm_margin=0",
    three._flash_attn_backward: "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None "
    "sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None is_causal=False "
    "window_size_left=-1 window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0",
    four._flash_attn_fwd: "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None seqused_q=None seqused_k=None "
    "max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None page_table=None softmax_scale=None causal=False "
    "softcap=None window_size_left=None window_size_right=None learnable_sink=None tile_mn=None mma_pv_is_rs=None "
    "intra_wg_overlap=None num_threads=384 num_splits=1 pack_gqa=None _arch=None score_mod=None mask_mod=None "
    "block_sparse_tensors=None return_lse=False out=None lse=None aux_tensors=None aux_scalars=None q_descale=None "
    "k_descale=None v_descale=None gather_kv_indices=None scheduler_metadata=None seqlen_k_per_split=None "
    "disable_scheduler_metadata=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_arguments_have_their_names_order_and_defaults(function):
    spelt = " ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in inspect.signature(function).parameters.items()
    )
    assert spelt == SIGNATURES[function]


def gradients(o, inputs, dout):
    return torch.autograd.grad(o, inputs, dout)


@pytest.mark.parametrize("p_drop", [0.0, 0.3])
def test_two_forwards_and_backwards_apart_are_the_function(p_drop):
    q, k, v = tensors(grad=True)
    slopes = None if p_drop else torch.rand(4)
    torch.manual_seed(3)
    wanted = fa2.flash_attn_func(q, k, v, p_drop, 0.3, True, (5, -1), alibi_slopes=slopes)
    torch.manual_seed(3)
    out, lse, marks, state = two._flash_attn_forward(q, k, v, p_drop, 0.3, True, 5, -1, 0.0, slopes, p_drop > 0)
    assert torch.equal(out, wanted) and not out.requires_grad and state.dtype == torch.int64 and state.shape == (2,)
    assert marks.numel() == (2 * 4 * 128 * 128 if p_drop else 0)
    dout = torch.randn_like(out)
    into = [torch.full_like(x, math.nan) for x in (q, k, v)]
    sums = two._flash_attn_backward(
        dout, q, k, v, out, lse, *into, p_drop, 0.3, True, 5, -1, 0.0, slopes, True, rng_state=state
    )
    for got, by in zip(into, gradients(wanted, (q, k, v), dout)):
        close(got, by.double(), 1e-6)
    close(sums[..., :7], (dout * out).double().sum(-1).transpose(1, 2), 1e-5)
    assert sums.shape == (2, 4, 128) and not sums[..., 7:].any()
    if p_drop:
        with pytest.raises(RuntimeError, match="rng_state is missing beside dropout_p 0.3"):
            two._flash_attn_backward(dout, q, k, v, out, lse, *into, 0.3, 0.3, True, 5, -1, 0.0, None, True)
    else:
        with pytest.raises(RuntimeError, match="return_softmax is True, but dropout_p is 0"):
            two._flash_attn_forward(q, k, v, 0.0, 0.3, True, 5, -1, 0.0, slopes, True)
        with pytest.raises(RuntimeError, match=r"dq has shape \(2, 7, 4, 8\)"):
            into[0] = into[0][..., :8]
            two._flash_attn_backward(dout, q, k, v, out, lse, *into, 0.0, 0.3, True, 5, -1, 0.0, slopes, True)


def test_packed_forwards_and_backwards_apart_are_the_function():
    cu_q, cu_k = offsets([3, 0, 5]), offsets([4, 6, 5])
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((8, 4), (15, 2), (15, 2)))
    wanted = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, causal=True)
    out, lse, _, state = two._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 5, 6, 0.0, None, True)
    assert torch.equal(out, wanted)
    dout = torch.randn_like(out)
    into = [torch.empty_like(x) for x in (q, k, v)]
    rest = (0.0, None, True, -1, -1, 0.0, None, False, state)
    sums = two._flash_attn_varlen_backward(dout, q, k, v, out, lse, *into, cu_q, cu_k, 5, 6, *rest)
    by = gradients(wanted, (q, k, v), dout)
    assert all(map(torch.equal, into, by))
    products = (dout * out).double().sum(-1).T
    assert sums.shape == (4, 8 + 3 * 128)
    close(sums[:, :3], products[:, :3], 1e-5)
    close(sums[:, 256:261], products[:, 3:], 1e-5)
    three_into = [torch.empty_like(x) for x in (q, k, v)]
    fourth = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=6)
    again = three._flash_attn_backward(
        dout, q, k, v, out, lse, **fourth, **dict(zip(("dq", "dk", "dv"), three_into)), is_causal=True
    )
    assert torch.equal(again, sums) and all(map(torch.equal, three_into, by))
    made = four._flash_attn_bwd(q, k, v, out, dout, lse, causal=True, **fourth)
    assert all(map(torch.equal, made, by))
    assert all(map(torch.equal, four._flash_attn_bwd(q, k, v, out, dout, lse, causal=True, **cu_alone(fourth)), by))


def test_rows_in_front_of_the_first_sequence_are_no_sequences():
    cu_q, cu_k = 2 + offsets([3, 5]), offsets([4, 5])
    q, k, v = (torch.randn(n, h, 16) for n, h in ((11, 4), (9, 2), (9, 2)))
    out, lse, *_ = two._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 5, 5, 0.0, None, True)
    dout, into = torch.randn_like(out), [torch.empty_like(x) for x in (q, k, v)]
    rest = (cu_q, cu_k, 5, 5, 0.0, None, True, -1, -1, 0.0, None, False)
    sums = two._flash_attn_varlen_backward(dout, q, k, v, out, lse, *into, *rest)
    products = (dout * out).double().sum(-1).T
    assert sums.shape == (4, 11 + 2 * 128)
    close(sums[:, :3], products[:, 2:5], 1e-5)
    close(sums[:, 128:133], products[:, 5:10], 1e-5)
    close(sums.sum(1), products[:, 2:10].sum(1), 1e-4)


def cu_alone(lengths):
    return {name: x for name, x in lengths.items() if name.startswith("cu")}


def test_the_third_forward_has_gradients_and_writes_where_it_is_told():
    q, k, v = tensors(grad=True)
    out, lse, *parts = three._flash_attn_forward(q, k, v, causal=True)
    wanted = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, wanted) and lse.shape == (2, 4, 7) and [x.numel() for x in parts] == [0, 0]
    dout = torch.randn_like(out)
    by = gradients(wanted, (q, k, v), dout)
    assert all(map(torch.equal, gradients(out, (q, k, v), dout), by))
    into = torch.empty_like(out)
    got = three._flash_attn_forward(q, k, v, out_=into, causal=True)[0]
    assert got is into and torch.equal(into, wanted)
    assert all(map(torch.equal, gradients(got, (q, k, v), dout), by))


@pytest.mark.parametrize("given", ["k_new", "v_new", "cu_seqlens_k_new", "seqlens_rotary", "rotary_sin", "rotary_cos"])
def test_the_third_forward_leaves_out_nothing_of_a_cache(given):
    q, k, v = tensors(sq=1, sk=12)
    x = {"v": torch.randn(2, 1, 2, 16), "k": torch.randn(2, 1, 2, 16), "r": torch.rand(16, 8)}.get(given[0], i32(0, 1))
    public = {"k_new": "k", "v_new": "v", "seqlens_rotary": "rotary_seqlens"}.get(given, given)
    with pytest.raises(ValueError, match=f"{public} is given, but"):
        three._flash_attn_forward(q, k, v, seqused_k=i32(3, 3), **{given: x})


@appends_in_f32
def test_the_third_forward_over_a_cache_is_its_function():
    q, k, v = tensors(sq=2, sk=12)
    new = torch.randn(2, 2, 2, 16)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    angle, used, index = torch.rand(16, 8), i32(3, 7), i32(1, 0)
    out, *_ = three._flash_attn_forward(
        q,
        *caches[0],
        new,
        -new,
        seqused_k=used,
        kv_batch_idx=index,
        rotary_cos=angle.cos(),
        rotary_sin=angle.sin(),
        causal=True,
        leftpad_k=i32(1, 2),
    )
    wanted = fa3.flash_attn_with_kvcache(
        q,
        *caches[1],
        new,
        -new,
        cache_seqlens=used,
        cache_batch_idx=index,
        rotary_cos=angle.cos(),
        rotary_sin=angle.sin(),
        causal=True,
        cache_leftpad=i32(1, 2),
    )
    assert torch.equal(out, wanted) and all(map(torch.equal, *caches))
    assert not torch.equal(caches[0][0], k)


def test_the_fourth_forward_and_backward_are_the_function():
    q, k, v = tensors(grad=True)
    sink = torch.randn(4).bfloat16().requires_grad_()
    wanted, wanted_lse = fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    out, lse, *rest = four._flash_attn_fwd(q, k, v, causal=True, learnable_sink=sink)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse) and rest == [None, None]
    assert four._flash_attn_fwd(*(x.detach() for x in (q, k, v)))[1] is None
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    made = four._flash_attn_bwd(q, k, v, out, dout, lse, causal=True, learnable_sink=sink, dlse=dlse)
    for got, by in zip(made, torch.autograd.grad((wanted, wanted_lse), (q, k, v, sink), (dout, dlse))):
        close(got, by.double(), 1e-6 if by.dtype == torch.float32 else 1e-2)
    with pytest.raises(NotImplementedError, match="score_mod is given"):
        four._flash_attn_fwd(q, k, v, score_mod=print)


def test_an_output_of_another_shape_is_refused_before_anything_runs():
    q, k, v = tensors(dv=8)
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    cache = torch.randn(2, 12, 2, 16)
    parts = torch.randn(3, 2, 7, 4, 16), torch.randn(3, 2, 7, 4)
    more = lambda *shape: torch.full((2, *shape), math.nan)
    used = i32(3, 4)
    largest = [more(2, 7, 4, 16), more(2, 11, 2, 16), more(2, 11, 2, 8)]
    right = [x[0].clone() for x in largest]

    def two_bwd(*into):
        two._flash_attn_backward(out, q, k, v, out, lse, *into, 0.0, None, False, -1, -1, 0.0, None, False)

    for call, said in (
        (lambda: three._flash_attn_forward(q, k, v, out_=more(2, 7, 4, 8)), "out_ has shape"),
        (lambda: three._flash_attn_forward(q, cache, cache, seqused_k=used, out_=more(2, 7, 4, 16)), "out_ has shape"),
        (lambda: four._flash_attn_fwd(q, k, v, out=more(2, 7, 4, 8)), "out has shape"),
        (lambda: four._flash_attn_fwd(q, k, v, lse=more(2, 4, 7)), "lse has shape"),
        (lambda: fa3.flash_attn_combine(*parts, out=more(2, 7, 4, 16)), "out has shape"),
        (lambda: fa4.flash_attn_combine(*parts, out=more(2, 7, 4, 16)), "out has shape"),
        (lambda: fa4.flash_attn_combine(*parts, out=more(2, 7, 4, 16), seqused=used), "out has shape"),
        (lambda: four._flash_attn_bwd(q, k, v, out, out, lse, dq=largest[0]), "dq has shape"),
        (lambda: four._flash_attn_bwd(q, k, v, out, out, lse, dq=right[0], dk=largest[1]), "dk has shape"),
        (lambda: four._flash_attn_bwd(q, k, v, out, out, lse, dv=largest[2]), "dv has shape"),
        (lambda: two_bwd(right[0], largest[1], right[2]), "dk has shape"),
    ):
        with pytest.raises(RuntimeError, match=said):
            call()
    # A tensor of the right shape stays unwritten as well if the call is refused.
    assert all(x.isnan().all() for x in right)


def test_torchs_operators_of_the_third_are_there_once_installed():
    run_python(
        """
import torch, fmha, fmha.flash_attn, fmha.flash_attn_3, fmha.flash_attn_4
fmha.flash_attn_3.install(); fmha.flash_attn_3.install(); fmha.flash_attn_4.install()
from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_varlen_backward, _get_block_size_n
from flash_attn.flash_attn_interface import USE_TRITON_ROCM
from flash_attn.cute.interface import _flash_attn_fwd, _flash_attn_bwd
from flash_attn_interface import _flash_attn_forward as third, get_scheduler_metadata
ops = torch.ops.flash_attn_3
q, k, v = (torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((7, 4), (11, 2), (11, 2)))
out, lse, *parts = ops.fwd(q, k, v, is_causal=True)
wanted = fmha.attention(q, k, v, mask="causal")
assert torch.equal(out, wanted) and [x.numel() for x in parts] == [0, 0]
dout = torch.randn_like(out)
into = [torch.empty_like(x) for x in (q, k, v)]
sums, base_2, *rest = ops.bwd(dout, q, k, v, out, lse, *into, is_causal=True)
assert all(map(torch.equal, into, torch.autograd.grad(wanted, (q, k, v), dout)))
torch.testing.assert_close(base_2[..., :7], lse / torch.log(torch.tensor(2.0)))
assert sums.shape == base_2.shape == (2, 4, 128)
parts = torch.randn(3, 2, 7, 4, 16), torch.randn(3, 2, 7, 4)
assert torch.equal(ops.fwd_combine(*parts)[0], fmha.flash_attn_3.flash_attn_combine(*parts)[0])
used = torch.tensor([3, 9], dtype=torch.int32)
plan = ops.get_scheduler_metadata(2, 7, 11, 4, 2, 16, 16, torch.bfloat16, used)
assert plan.dtype == torch.int32 and torch.equal(plan, get_scheduler_metadata(2, 7, 11, 4, 2, 16, used))
cache = torch.randn(2, 12, 2, 16)
rows = cache.clone()
got = ops.fwd(q.detach(), cache, cache.clone(), k[:, :2].detach(), v[:, :2].detach(), seqused_k=used, is_causal=True)
assert torch.equal(cache[0, 3:5], k[0, :2]) and torch.equal(cache[1, :9], rows[1, :9])
compiled = torch.compile(lambda q, k, v: ops.fwd(q, k, v, is_causal=True)[0], backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(q, k, v), wanted)
"""
    )


def as_flash_attention_reads(marks, q, k, seen, softcap=0.0, bias=None):
    """P and what is kept, by the block's maximum and the whole LSE: how FlashAttention's tests read S_dmask."""
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)) / 4
    s = (s if bias is None else s + bias).masked_fill(~seen, -math.inf)
    block = two._get_block_size_n(q.device, 16, True, False)
    apart = s.split(block, -1)
    largest = torch.cummax(torch.stack([x.amax(-1) for x in apart], -1).flip(-1), -1).values.flip(-1).unbind(-1)
    lse = torch.logsumexp(s, -1)
    lse = lse.masked_fill(torch.isneginf(lse), math.inf)
    mine = marks.abs().double().split(block, -1)
    return torch.cat([a * torch.exp(m - lse)[..., None] for a, m in zip(mine, largest)], -1), torch.softmax(s, -1)


@pytest.mark.parametrize("option, mask", [({}, None), (dict(causal=True), "b"), (dict(window_size=(3, 1)), "b:3,1")])
def test_marks_are_p_before_its_division_with_the_sign_of_dropout(option, mask):
    q, k, v = tensors()
    seen = visible(fmha.mask(mask), 7, 11)
    out, _, marks = fa2.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True, **option)
    marks = marks[:, :, :7, :11]
    wanted, _ = by_definition(q, k, v, mask=fmha.mask(mask), keep=marks >= 0, p_drop=0.3)
    close(out, wanted, 4 * tolerance(q.dtype))
    got, p = as_flash_attention_reads(marks, q, k, seen)
    close(got, p.nan_to_num(), 1e-5)
    assert not marks.masked_select(~seen).any() and 0.1 < (marks.masked_select(seen) < 0).double().mean() < 0.5
    # Packed sequences give the results that each has alone, except that dropout's mask lies elsewhere.
    cu = offsets([7, 7]), offsets([11, 11])
    torch.manual_seed(5)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    *_, packed = fa2.flash_attn_varlen_func(*rows, *cu, 7, 11, dropout_p=0.3, return_attn_probs=True, **option)
    torch.manual_seed(5)
    *_, dense = fa2.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True, **option)
    assert torch.equal(packed, dense)


def test_marks_of_unlike_packed_sequences():
    lengths_q, lengths_k = [3, 0, 5], [4, 6, 5]
    q, k, v = torch.randn(8, 4, 16), torch.randn(15, 2, 16), torch.randn(15, 2, 16)
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    slopes = torch.rand(4)
    out, _, marks = fa2.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 6, dropout_p=0.3, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    assert marks.shape == (3, 4, 128, 128)
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        mine = marks[b : b + 1, :, :n, :m]
        part, drops = (q[None, rows], k[None, keys], v[None, keys]), dict(keep=mine >= 0, p_drop=0.3)
        wanted, _ = by_definition(*part, mask=fmha.CAUSAL, alibi_slopes=slopes, **drops)
        close(out[rows], wanted[0], 4 * tolerance(q.dtype))
        assert not marks[b, :, n:].any() and not marks[b, :, :, m:].any()


def test_torchs_debug_mask_says_what_dropout_keeps():
    q, k, v = (x.transpose(1, 2) for x in tensors(sq=9, sk=9, hk=4))
    o, *_, debug = fmha.sdpa._sdpa_forward(q, k, v, 0.4, True, True)
    keep = debug[:, :, :9, :9] >= 0
    twins = [x.transpose(1, 2) for x in (q, k, v)]
    wanted, _ = by_definition(*twins, mask=fmha.CAUSAL_TOP_LEFT, keep=keep, p_drop=0.4)
    close(o.transpose(1, 2), wanted, 4 * tolerance(q.dtype))
    o, *_, debug = fmha.sdpa._flash_forward(*twins, None, None, 9, 9, 0.4, True, True)
    wanted, _ = by_definition(*twins, mask=fmha.CAUSAL, keep=debug[:, :, :9, :9] >= 0, p_drop=0.4)
    close(o, wanted, 4 * tolerance(q.dtype))
    with pytest.raises(RuntimeError, match="return_debug_mask is True, but dropout_p is 0.0"):
        fmha.sdpa._sdpa_forward(q, k, v, 0.0, True, True)


def test_marks_that_are_not_made_are_refused_before_attention_runs(monkeypatch):
    q, k, v = tensors()
    table = i32(0, 1).view(2, 1)
    rows, cu_q, cu_k = q.flatten(0, 1), offsets([7, 7]), offsets([11, 11])
    heads = [x.transpose(1, 2) for x in tensors(sq=9, sk=9, hk=4)]
    for module in (fa2, two, fmha.sdpa):
        for name in ("attention", "attention_out"):
            monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("attention ran"), raising=False)
    flash, more = fmha.sdpa._flash_forward, (cu_q, cu_k, 7, 11, 0.3, False, True)
    paged = dict(return_attn_probs=True, block_table=table)
    for call, kind in (
        (lambda: fa2.flash_attn_varlen_func(rows, k, v, cu_q, cu_k, 7, 11, 0.3, **paged), NotImplementedError),
        (
            lambda: two._flash_attn_varlen_forward(
                rows, k, v, cu_q, cu_k, 7, 11, 0.3, None, False, return_softmax=True, block_table=table
            ),
            NotImplementedError,
        ),
        (lambda: fmha.sdpa._sdpa_forward(*heads, 0.0, True, True), RuntimeError),
        (lambda: flash(rows, k, v, *more, block_table=table), NotImplementedError),
        (lambda: flash(rows, k.flatten(0, 1), v.flatten(0, 1), *more, seqused_k=i32(3, 4)), NotImplementedError),
    ):
        with pytest.raises(kind, match="return_.* is (given beside|True, but)"):
            call()


@pytest.mark.parametrize("kind", ["tensor", "list of tensors"])
def test_a_window_may_be_a_tensor(kind):
    q, k, v = tensors()
    window = torch.tensor([3, 1])
    window = window if kind == "tensor" else list(window)
    wanted = fa2.flash_attn_func(q, k, v, window_size=(3, 1))
    assert torch.equal(fa2.flash_attn_func(q, k, v, window_size=window), wanted)
    assert torch.equal(fa3.flash_attn_func(q, k, v, window_size=window), wanted)
    assert torch.equal(fa4.flash_attn_func(q, k, v, window_size=window)[0], wanted)
    with pytest.raises(ValueError, match="window_size"):
        fa2.flash_attn_func(q, k, v, window_size=torch.tensor([1, 2, 3]))
