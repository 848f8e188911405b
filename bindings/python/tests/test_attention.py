"""Every argument of fmha.attention against float64."""

import math

import pytest
import torch

import fmha
from fmha import _arguments, _torch
from reference import DEVICE, appends_in_f32, attention as by_definition, close, offsets, tensors, tolerance

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MASKS = [None, "causal", "t", "b:3,0", "b:2,1", "t:4,-1", "g:3,5", "b:2,0,2"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_and_types(mask, dtype):
    q, k, v = tensors(dtype=dtype, dv=24)
    o, lse = fmha.attention(q, k, v, mask=mask, return_lse=True)
    wanted, wanted_lse = by_definition(q, k, v, mask=fmha.mask(mask))
    close(o, wanted, tolerance(dtype))
    close(lse, wanted_lse, 1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    "change",
    [
        dict(softmax_scale=0.0),
        dict(softmax_scale=-0.3),
        dict(softcap=2.0),
        dict(bias=(2, 4)),
        dict(bias=(1, 4)),
        dict(bias=(1, 1)),
        dict(alibi=(4,)),
        dict(alibi=(2, 4)),
        dict(sink=True),
        dict(sink=True, softcap=3.0, bias=(1, 1), mask="causal"),
    ],
    ids=str,
)
def test_modifiers_and_their_gradients(change):
    q, k, v = tensors(grad=True)
    reference = [x.detach().double().requires_grad_() for x in (q, k, v)]
    options, extra = {}, {}
    for name in ("softmax_scale", "softcap"):
        if name in change:
            options[name] = change[name]
    if "alibi" in change:
        options["alibi_slopes"] = torch.rand(change["alibi"])
    leaves, wanted_leaves = [q, k, v], list(reference)
    for name, shape in (("bias", (*change.get("bias", ()), 7, 11)), ("sink", (4,))):
        if name in change:
            extra[name] = torch.randn(shape, requires_grad=True)
            twin = extra[name].detach().double().requires_grad_()
            leaves.append(extra[name])
            wanted_leaves.append(twin)
            options[name] = twin
    mask = change.get("mask")
    wanted, wanted_lse = by_definition(*reference, mask=fmha.mask(mask), **options)
    o, lse = fmha.attention(q, k, v, mask=mask, return_lse=True, **{**options, **extra})
    close(o, wanted.detach(), tolerance(torch.float32))
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    given = torch.autograd.grad((o, lse), leaves, (dout, dlse))
    exact = torch.autograd.grad((wanted, wanted_lse), wanted_leaves, (dout.double(), dlse.double()))
    for got, want in zip(given, exact):
        close(got, want, 2e-5)


def test_gradients_of_o_alone_and_of_lse_alone():
    q, k, v = tensors(grad=True)
    o, lse = fmha.attention(q, k, v, return_lse=True)
    wanted, wanted_lse = by_definition(q, k, v)
    for given, exact in ((o, wanted), (lse, wanted_lse)):
        out = torch.randn_like(given)
        got = torch.autograd.grad(given, (q, k), out, retain_graph=True)
        want = torch.autograd.grad(exact, (q, k), out.double(), retain_graph=True)
        for a, b in zip(got, want):
            close(a, b.double(), 2e-5)


def packed(lengths_q, lengths_k, hq=4, hk=2, d=16):
    q, k, v = (torch.randn(sum(n), h, d) for n, h in ((lengths_q, hq), (lengths_k, hk), (lengths_k, hk)))
    return q, k, v, offsets(lengths_q), offsets(lengths_k)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_packed_sequences_with_empty_ones(mask):
    lengths_q, lengths_k = [3, 0, 5, 2], [4, 6, 0, 2]
    q, k, v, cu_q, cu_k = packed(lengths_q, lengths_k)
    q.requires_grad_()
    o, lse = fmha.attention(
        q, k, v, mask=mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=6, return_lse=True
    )
    assert lse.shape == (4, 10)
    for b in range(4):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        wanted, wanted_lse = by_definition(q[None, rows_q], k[None, rows_k], v[None, rows_k], mask=fmha.mask(mask))
        close(o[rows_q], wanted[0].detach(), 4e-6)
        close(lse[:, rows_q], wanted_lse[0].detach(), 1e-5)
    o.sum().backward()
    assert torch.isfinite(q.grad).all()


def test_rows_in_use_and_any_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    used = torch.tensor([5, 11], dtype=torch.int32)
    o = fmha.attention(q, k, v, seqused_k=used)
    for b in range(2):
        wanted, _ = by_definition(q[b : b + 1], k[b : b + 1, : used[b]], v[b : b + 1, : used[b]])
        close(o[b : b + 1], wanted, 4e-6)


def test_dropout_repeats_and_has_the_gradient_of_its_own_mask():
    q, k, v = tensors(grad=True)
    call = dict(p_drop=0.4, seed=2**63 + 5, offset=7)
    o = fmha.attention(q, k, v, **call)
    assert torch.equal(o, fmha.attention(q, k, v, **call))
    assert not torch.equal(o, fmha.attention(q, k, v, **{**call, "seed": 6}))
    keep = torch.zeros((2, 4, 7, 11), dtype=torch.uint8)
    fmha.attention_out(torch.empty_like(o).detach(), q.detach(), k.detach(), v.detach(), keep_mask=keep, **call)
    assert 0.4 < keep.float().mean() < 0.8
    wanted, _ = by_definition(q, k, v, keep=keep, p_drop=0.4)
    close(o.detach(), wanted.detach(), 8e-6)
    dout = torch.randn_like(o)
    for got, want in zip(
        torch.autograd.grad(o, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout.double())
    ):
        close(got, want.double(), 4e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_with_descales(dtype):
    q, k, v = (x.to(dtype) for x in tensors(d=32))
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    o = fmha.attention(q, k, v, descale_q=scales[0], descale_k=scales[1], descale_v=scales[2])
    assert o.dtype == torch.bfloat16
    wide = [
        x.double() * s.double().repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, s in zip((q, k, v), scales)
    ]
    wanted, _ = by_definition(*wide)
    close(o, wanted, 0.15)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=appends_in_f32), torch.bfloat16], ids=str)
def test_a_paged_cache_with_new_rows_and_rotary(dtype):
    pages, size, hk, d = 6, 4, 2, 16
    k_cache, v_cache = (torch.randn(pages, size, hk, d).to(dtype) for _ in range(2))
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    used = torch.tensor([5, 9], dtype=torch.int32)
    q, k_new, v_new = (torch.randn(2, 2, heads, d).to(dtype) for heads in (4, hk, hk))
    angles = torch.rand(16, d // 2) * 6
    cos, sin = angles.cos(), angles.sin()

    def turn(x, position):
        a, b = x[..., : d // 2], x[..., d // 2 :]
        c, s = cos[position], sin[position]
        return torch.cat([a * c - b * s, a * s + b * c], -1)

    wanted = []
    for b in range(2):
        rows = torch.cat(
            [
                k_cache[table[b]].reshape(-1, hk, d)[: used[b]],
                torch.stack([turn(k_new[b, i], used[b] + i) for i in range(2)]),
            ]
        )
        values = torch.cat([v_cache[table[b]].reshape(-1, hk, d)[: used[b]], v_new[b]])
        turned = torch.stack([turn(q[b, i], used[b] + i) for i in range(2)])
        wanted.append(by_definition(turned[None], rows[None], values[None], mask=fmha.CAUSAL)[0])
    o = fmha.attention_with_kvcache(
        q, k_cache, v_cache, k_new, v_new, seqused_k=used, block_table=table, rotary_cos=cos, rotary_sin=sin
    )
    close(o, torch.cat(wanted), 2e-5 if dtype == torch.float32 else tolerance(dtype))
    row = used[0] // size, used[0] % size
    assert torch.allclose(v_cache[table[0, row[0]], row[1]], v_new[0, 0])


def test_parts_are_added_in_f32_and_rounded_once():
    parts = torch.randn(3, 1, 5, 2, 4, dtype=torch.bfloat16)
    wanted = parts.float().sum(0)
    assert torch.equal(fmha.add_parts(parts), wanted.to(torch.bfloat16))
    assert torch.equal(fmha.add_parts(parts, dtype_o=torch.float32), wanted)
    into = torch.full((1, 5, 2, 4), 0.5)
    assert fmha.add_parts(parts, into) is into
    assert torch.allclose(into, wanted + 0.5, atol=1e-6)
    assert torch.equal(fmha.add_parts(parts[:0]), torch.zeros_like(parts[0]))
    moving = parts.float().requires_grad_()
    dout = torch.randn(1, 5, 2, 4)
    fmha.add_parts(moving).backward(dout)
    assert torch.equal(moving.grad, dout.expand(3, -1, -1, -1, -1))
    with pytest.raises(ValueError, match="o is given"):
        fmha.add_parts(moving, into)
    with pytest.raises(RuntimeError, match="o has shape"):
        fmha.add_parts(parts, into[:, :4])


@appends_in_f32
def test_a_v_cache_that_is_a_view_of_k_is_the_front_of_its_rows():
    """Address and strides show it: new keys bring their values, which a V of its own would lack."""
    q, k_new = torch.randn(2, 1, 4, 24), torch.randn(2, 1, 1, 24)
    used = torch.tensor([4, 7], dtype=torch.int32)
    told, seen = (torch.arange(2 * 9 * 24.0).sin().reshape(2, 9, 1, 24) for _ in range(2))
    wanted = fmha.attention_with_kvcache(q, told, None, k_new, head_dim_v=16, seqused_k=used)
    o = fmha.attention_with_kvcache(q, seen, seen[..., :16], k_new, seqused_k=used)
    assert torch.equal(o, wanted) and torch.equal(seen, told)
    for other in (seen[..., 8:], seen[..., :16].clone()):
        with pytest.raises(RuntimeError, match="^v is missing"):
            fmha.attention_with_kvcache(q, seen, other, k_new, seqused_k=used)


@appends_in_f32
def test_refusals_over_a_cache_name_its_arguments():
    q, k, v = torch.randn(2, 1, 4, 24), torch.randn(2, 9, 1, 24), torch.randn(2, 9, 1, 24)
    used = torch.tensor([4, 7], dtype=torch.int32)

    def refused(words, *tensors):
        with pytest.raises(RuntimeError, match=words):
            fmha.attention_with_kvcache(q, *tensors, seqused_k=used)

    new = torch.randn(2, 1, 1, 24)
    refused(r"^k_cache \(.*overlaps v_cache \(", k, k, new, new)
    refused(r"^k_cache \(.*overlaps k \(", k, v, k[:, :1], new)
    refused("^k_cache is of float64", k.double(), v)
    refused("^v_cache has shape", k, v[:, :5])
    refused("^k has shape", k, v, new[..., :8], new)
    refused("^v has shape", k, v, new, new[..., :8])
    with pytest.raises(RuntimeError, match="argument 'k' .*\n.*\nValue: 'v'"):
        fmha.attention_with_kvcache(q, k, v, "v", "v", seqused_k=used)
    log = "sm80 does not compile (source and log in /k/v): error: v and k_new are not declared"
    assert fmha._native.as_cache(log) == log


def test_combine_of_halves_is_the_whole_and_differentiable():
    q, k, v = tensors(grad=True)
    whole, whole_lse = fmha.attention(q, k, v, return_lse=True)
    parts = [fmha.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 11))]
    o, lse = fmha.combine(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    close(o, whole.double(), 5e-6)
    close(lse, whole_lse.double(), 5e-6)
    dout = torch.randn_like(o)
    for got, want in zip(torch.autograd.grad(o, (q, k, v), dout), torch.autograd.grad(whole, (q, k, v), dout)):
        close(got, want.double(), 2e-5)


def test_explain_names_the_kernel():
    text = fmha.explain(*tensors(), mask="causal")
    assert "promises" in text and ("cpu-fwd" in text) == (DEVICE == "cpu")
    gradients = fmha.prepare(*tensors(), mask="causal", backward=True)
    assert "promises" in gradients and gradients != text


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda q, k, v: fmha.attention(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1)),
            "num_heads_q 4",
        ),
        (lambda q, k, v: fmha.attention(q, k[:1], v), "k has batch 1"),
        (lambda q, k, v: fmha.attention(q, k, v[:, :5]), "v has shape"),
        (lambda q, k, v: fmha.attention(q.double(), k, v), "q is of float64"),
        (lambda q, k, v: fmha.attention(q, k.half(), v), "k is of float16"),
        (lambda q, k, v: fmha.attention(q[0, 0, 0], k, v), "q has 1 axes"),
        (lambda q, k, v: fmha.attention(q, k, v, bias=torch.zeros(3, 4, 7, 11)), "bias has shape"),
        (lambda q, k, v: fmha.attention(q, k, v, sink=torch.zeros(3)), "sink has shape"),
        (lambda q, k, v: fmha.attention(q, k, v, p_drop=1.0), "p_drop 1"),
        (lambda q, k, v: fmha.attention(q, k, v, softcap=-1.0), "softcap -1"),
        (lambda q, k, v: fmha.attention(q, k, v, softmax_scale=math.inf), "softmax_scale inf"),
        (lambda q, k, v: fmha.attention(q, k, v, mask="b:-2,0"), "left -2"),
        (lambda q, k, v: fmha.attention(q, k, v, mask="x"), "mask"),
        (lambda q, k, v: fmha.attention(q, k, v, accuracy="best"), "accuracy"),
        (
            lambda q, k, v: fmha.attention(q, k, v, cu_seqlens_q=torch.tensor([0, 7, 14], dtype=torch.int32)),
            "q has 4 axes",
        ),
        (
            lambda q, k, v: fmha.attention(q, k, v, seqused_k=torch.tensor([5, 12], dtype=torch.int64)),
            "seqused_k is of",
        ),
        (
            lambda q, k, v: fmha.attention(
                q, k, v, seqused_k=torch.tensor([5, 99], dtype=torch.int32), check_lengths=True
            ),
            "seqused_k",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_calls_are_refused_by_argument_and_number(call, words):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
        call(*tensors())


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(softcap=1e-60), "softcap 1e-60 is 0"),
        (dict(softmax_scale=1e-300), "softmax_scale 1e-300 is 0"),
        (dict(softmax_scale=1e300), "softmax_scale 1e300 is inf"),
        (dict(p_drop=0.9999999999), "p_drop 0.9999999999 is 1"),
    ],
    ids=str,
)
def test_a_number_that_32_bits_do_not_hold_is_refused_and_not_another_one_taken(given, words):
    with pytest.raises(RuntimeError, match=f"^{words} as a 32-bit number"):
        fmha.attention(*tensors(), **given)


def test_packed_rows_without_a_bound_of_their_lengths_are_refused_as_the_call_is_read():
    """On a GPU lengths are read as the kernel runs: nothing would be computed, and nobody told."""
    q, k, v = (x[0] for x in tensors(b=1))
    cu_q, cu_k = offsets([3, 4]), offsets([5, 6])
    call = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=4, max_seqlen_k=6)
    fmha.explain(q, k, v, **call)
    for name, rows in (("max_seqlen_q", "q has 7"), ("max_seqlen_k", "k has 11")):
        with pytest.raises(RuntimeError, match=f"^{name} is 0 .*{rows} packed rows"):
            fmha.explain(q, k, v, **{**call, name: 0})
    empty = dict(cu_seqlens_q=offsets([0, 0]), cu_seqlens_k=offsets([0, 0]))
    assert fmha.attention(q[:0], k[:0], v[:0], **empty).shape == (0, 4, 16)
    cache, new = torch.zeros(2, 9, 2, 16), torch.randn(3, 2, 16)
    with pytest.raises(RuntimeError, match="^max_seqlen_new is 0 .*k has 3 packed rows"):
        fmha.attention_with_kvcache(
            tensors()[0],
            cache,
            cache.clone(),
            new,
            new,
            cu_seqlens_new=offsets([1, 2]),
            seqused_k=torch.zeros(2, dtype=torch.int32),
        )


@pytest.mark.parametrize("sink_columns", [0, 3])
def test_generic_coordinates_have_sink_columns_as_windows_do(sink_columns):
    q, k, v = tensors()
    text = "g:2,3" + (f",{sink_columns}" if sink_columns else "")
    window = f"t:1,2,{sink_columns}"
    assert fmha.mask(text) == fmha.Mask(3, 2, 3, sink_columns)
    assert torch.equal(fmha.attention(q, k, v, mask=text), fmha.attention(q, k, v, mask=window))
    without = fmha.attention(q, k, v, mask="t:1,2")
    assert torch.equal(without, fmha.attention(q, k, v, mask=window)) == (sink_columns == 0)


def test_a_tree_mask_stands_in_for_the_default_mask():
    q, k, v = tensors(sq=4, dtype=torch.bfloat16)
    # The tree has a root, two children of it, and a child of the second. Each node sees its ancestors and the 5 keys
    # before the tree.
    ancestors = [0b0001, 0b0011, 0b0101, 0b1101]
    words = torch.tensor(ancestors, dtype=torch.int32).view(1, 4, 1).repeat(2, 1, 1)
    used = torch.tensor([9, 9], dtype=torch.int32)
    seen = torch.tensor([[j < 5 or ancestors[i] >> (j - 5) & 1 for j in range(9)] for i in range(4)])
    bias = torch.zeros(1, 1, 4, 9).masked_fill(~seen.bool(), -1e30)
    wanted = by_definition(q, k[:, :9], v[:, :9], bias=bias)[0]
    for mask in ({}, dict(mask="b"), dict(mask="b:-1,0")):
        o = fmha.attention_with_kvcache(q, k, v, seqused_k=used, tree_mask=words, **mask)
        close(o, wanted, tolerance(torch.bfloat16))
    with pytest.raises(RuntimeError, match="^tree_mask stands in"):
        fmha.attention_with_kvcache(q, k, v, seqused_k=used, tree_mask=words, mask="b:3,0")


def test_tensors_of_no_elements():
    q, k, v = tensors(sq=0, grad=True)
    o, lse = fmha.attention(q, k, v, return_lse=True)
    assert o.shape == (2, 0, 4, 16) and lse.shape == (2, 4, 0)
    # The gradient of a sum is an expanded tensor whose strides are 0.
    o.sum().backward()
    assert q.grad.shape == q.shape and not k.grad.any() and not v.grad.any()
    q, k, v = tensors(sk=0)
    o, lse = fmha.attention(q, k, v, return_lse=True)
    assert torch.equal(o, torch.zeros_like(o)) and torch.isneginf(lse).all()


def test_rows_that_lengths_leave_out_are_zero_in_outputs_and_gradients():
    """What a caller did not fill never becomes a gradient: freed memory of NaN is handed out again."""

    def check(call, rows_q, rows_k, *shapes):
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
        for _ in range(3):
            poison = [torch.full(x.shape, math.nan) for x in (q, k, v, q, k, v)]
            del poison
            o, lse = fmha.attention(q, k, v, return_lse=True, **call)
            lse_rows = lse.transpose(-1, -2)
            assert not o[~rows_q].any() and not lse_rows[~rows_q].any()
            poison = [torch.full(x.shape, math.nan) for x in (q, k, v, q, k, v)]
            del poison
            dq, dk, dv = torch.autograd.grad(o[rows_q].sum() + lse_rows[rows_q].sum(), (q, k, v))
            for gradient, rows in ((dq, rows_q), (dk, rows_k), (dv, rows_k)):
                assert torch.isfinite(gradient).all() and not gradient[~rows].any()

    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([3, 7], [5, 2]))
    rows_q, rows_k = (torch.arange(n) < used[:, None] for n, used in ((9, used_q), (11, used_k)))
    check(dict(seqused_q=used_q, seqused_k=used_k), rows_q, rows_k, (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 16))
    packed = dict(cu_seqlens_q=offsets([3, 4]), cu_seqlens_k=offsets([5, 4]), max_seqlen_q=4, max_seqlen_k=5)
    check(packed, torch.arange(12) < 7, torch.arange(13) < 9, (12, 2, 16), (13, 2, 16), (13, 2, 16))


@pytest.mark.parametrize(
    "shape, to",
    [
        ((2, 1, 3, 5), None),
        ((1, 2, 3, 5), None),
        ((1, 1, 3, 5), None),
        ((3, 5), None),
        ((1, 2, 3, 5), (2, 2, 3, 5)),
        ((2, 1, 3, 5), (2, 2, 3, 5)),
        ((1, 1, 3, 5), (2, 2, 3, 5)),
        ((1, 1, 3, 5), (2, 1, 3, 5)),
        ((2, 2, 1, 5), (2, 2, 3, 5)),
        ((2, 2, 3, 1), (2, 2, 3, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [2, 0])
def test_a_bias_that_is_shared_or_a_view_that_repeats_has_its_own_gradient(shape, to, batch):
    q, k, v = tensors(b=batch, sq=3, sk=5, hq=2, hk=1, d=8)
    shape = (
        shape
        if batch
        else tuple(0 if len(shape) == 4 and i == 0 and size == 2 else size for i, size in enumerate(shape))
    )
    to = to if batch or to is None else (0, *to[1:])
    weights = torch.randn(batch, 3, 2, 8)
    gradients = []
    for function in (fmha.attention, lambda *x, **y: by_definition(*x, **y)[0]):
        torch.manual_seed(1)
        bias = torch.randn(shape).requires_grad_()
        (function(q, k, v, bias=bias if to is None else bias.expand(to)) * weights).sum().backward()
        gradients.append(bias.grad)
    close(gradients[0], gradients[1], tolerance(torch.float32, gradients=True))


def test_a_batch_of_nothing_has_empty_results_and_what_all_share_has_the_gradient_0():
    q, k, v = tensors(b=0, grad=True)
    sink = torch.randn(4, requires_grad=True)
    o, lse = fmha.attention(q, k, v, sink=sink, return_lse=True)
    (o.sum() + lse.sum()).backward()
    assert o.shape == q.shape and lse.shape == (0, 4, 7) and not sink.grad.any()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    none = offsets([])
    rows = (torch.randn(0, 4, 16), torch.randn(0, 2, 16), torch.randn(0, 2, 16))
    assert fmha.attention(*rows, cu_seqlens_q=none, cu_seqlens_k=none, mask="causal").shape == rows[0].shape
    q, k, v = (x.detach() for x in (q, k, v))
    assert fmha.attention(q, k, v, alibi_slopes=torch.rand(0, 4)).shape == q.shape
    cached = [x.bfloat16() for x in (q, k, v, k[:, :1], v[:, :1])]
    assert fmha.attention_with_kvcache(*cached, seqused_k=none[:0]).shape == q.shape
    assert fmha.attention_out(torch.empty_like(q), q, k, v, p_drop=0.5).shape == q.shape
    assert fmha.combine(torch.randn(3, 0, 4, 2, 8), torch.randn(3, 0, 2, 4))[0].shape == (0, 4, 2, 8)
    assert fmha.add_parts(torch.randn(3, 0, 4, 2, 8)).shape == (0, 4, 2, 8)


def test_autocast_has_one_type_for_q_k_and_v():
    q, k, v = tensors(grad=True)
    kind = q.device.type
    with torch.autocast(kind, dtype=torch.bfloat16):
        o = fmha.attention(q, k, v.bfloat16(), mask="causal")
        cache = torch.zeros(2, 11, 2, 16, dtype=torch.bfloat16)
        new = k[:, :1].detach()
        decoded = fmha.attention_with_kvcache(
            q.detach(), cache, cache.clone(), new, new, seqused_k=torch.tensor([3, 4], dtype=torch.int32)
        )
        compiled = torch.compile(fmha.attention, fullgraph=True, backend="aot_eager")(q, k, v.bfloat16(), mask="causal")
    assert o.dtype == decoded.dtype == torch.bfloat16 and torch.equal(compiled, o)
    wanted, _ = by_definition(*(x.bfloat16() for x in (q, k, v)), mask=fmha.CAUSAL)
    close(o, wanted, tolerance(torch.bfloat16))
    o.float().square().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast(kind, enabled=False):
        assert fmha.attention(q, k, v).dtype == torch.float32


def test_a_view_that_negates_is_read_and_never_written():
    numbers = torch.randn(2, 7, 4, 16, dtype=torch.complex64)
    negated = torch.imag(numbers.conj())
    assert negated.is_neg()
    q, k, v = tensors(sq=7, sk=7, hk=4)
    assert torch.equal(
        fmha.attention(negated, k, negated), fmha.attention(negated.resolve_neg(), k, negated.resolve_neg())
    )
    with pytest.raises(ValueError, match="^o: is_neg.. is true of this view"):
        fmha.attention_out(negated, q, k, v)
    used = torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="^k_cache: is_neg.. is true of this view"):
        fmha.attention_with_kvcache(q[:, :1], negated, v.clone(), k[:, :1], v[:, :1], seqused_k=used)
    with pytest.raises(ValueError, match="^o: is_neg"):
        fmha.add_parts(torch.randn(2, 2, 7, 4, 16), negated)


def test_a_last_axis_that_is_not_dense_is_copied_or_named_with_the_remedy():
    q, k, v = (torch.cat([x, x + 1], -1)[..., ::2] for x in tensors())
    dense = [x.contiguous() for x in (q, k, v)]
    bias = torch.randn(2, 4, 11, 7).transpose(2, 3)
    slopes = torch.rand(8)[::2]
    assert torch.equal(fmha.attention(q, k, v, bias=bias), fmha.attention(*dense, bias=bias.contiguous()))
    assert torch.equal(
        fmha.attention(q, k, v, alibi_slopes=slopes), fmha.attention(*dense, alibi_slopes=slopes.clone())
    )
    assert fmha.explain(q, k, v) == fmha.explain(*dense)
    o = torch.empty_like(dense[0])
    with pytest.raises(RuntimeError, match=r"^k has stride 2 on its last axis, not 1: k.contiguous\(\)"):
        fmha.attention_out(o, dense[0], k, dense[2])
    with pytest.raises(RuntimeError, match="^o has stride 2 on its last axis, not 1: what is written"):
        fmha.attention_out(q.clone().repeat_interleave(2, -1)[..., ::2], *dense)
    # V stored by columns is not copied.
    columns = dense[2].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert _torch.prepared((*dense[:2], columns), _arguments.NO_TENSORS)[0][2] is columns
    assert torch.allclose(fmha.attention(*dense[:2], columns), fmha.attention(*dense), atol=1e-6)


def test_causal_is_one_word_at_every_function_and_contradicts_a_mask():
    q, k, v = tensors()
    wanted = fmha.attention(q, k, v, mask="causal")
    assert torch.equal(fmha.attention(q, k, v, causal=True), wanted) and not torch.equal(
        fmha.attention(q, k, v), wanted
    )
    assert torch.equal(fmha.attention(q, k, v, causal=False, mask="causal"), wanted)
    assert torch.equal(fmha.attention_out(torch.empty_like(q), q, k, v, causal=True), wanted)
    assert fmha.explain(q, k, v, causal=True) == fmha.explain(q, k, v, mask="b")
    cached = fmha.attention_with_kvcache
    assert torch.equal(cached(q, k, v, causal=True), wanted) and torch.equal(cached(q, k, v), wanted)
    assert torch.equal(cached(q, k, v, causal=False), fmha.attention(q, k, v))
    with pytest.raises(ValueError, match="^mask is given beside causal, which is one"):
        fmha.attention(q, k, v, causal=True, mask="t")


@pytest.mark.parametrize(
    "wrong, ours",
    [
        (dict(is_causal=True), "causal .from the last key.*mask='t'"),
        (dict(scale=0.5), "softmax_scale"),
        (dict(dropout_p=0.5), "p_drop"),
        (dict(attn_mask=None), "mask, a band, or bias"),
        (dict(softmax_scal=0.5), "softmax_scale"),
        (dict(cache_seqlens=None), "seqused_k"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [fmha.attention, fmha.attention_with_kvcache, fmha.explain, fmha.prepare])
def test_a_keyword_of_another_library_is_answered_with_ours(function, wrong, ours):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(wrong))}'; here it is {ours}"):
        function(*tensors(), **wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'$"):
        function(*tensors(), nonsense=1)


@pytest.mark.parametrize("name", ["mask", "softmax_scale", "softcap", "max_seqlen_k", "seed", "accuracy", "dtype_o"])
def test_a_tensor_in_place_of_another_argument_is_not_printed_whole(name):
    q, k, v = tensors()
    with pytest.raises((TypeError, ValueError), match=f"^{name}.*(shape .7, 11.|Tensor)") as raised:
        fmha.attention(q, k, v, **{name: torch.rand(7, 11)})
    assert len(str(raised.value)) < 220
    with pytest.raises(TypeError, match="^mask: ndarray of shape .7, 11. is neither.*comes in as fmha.MaskBits"):
        fmha.attention(q, k, v, mask=torch.rand(7, 11).cpu().numpy())


@pytest.mark.parametrize("rows", [0, 1])
def test_the_stride_of_one_packed_row_says_nothing(rows):
    q, k, v = torch.randn(rows, 3, 8), torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    packed = dict(cu_seqlens_q=offsets([rows]), cu_seqlens_k=offsets([4]), max_seqlen_q=2, max_seqlen_k=4)
    o = torch.empty_strided(q.shape, (8, 8, 1))
    assert torch.equal(fmha.attention_out(o, q, k, v, **packed), fmha.attention(q, k, v, **packed))
