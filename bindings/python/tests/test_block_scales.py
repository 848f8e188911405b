"""Scales by blocks on torch's tensors: against attention in float64 on the values that the formats stand for."""

import pytest
import torch

import fmha
from fmha import _scales

FORMATS = ["mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def values(x, scales, name, axis, descale):
    """What elements, scales by blocks along an axis and a tensor's scale stand for, in float64."""
    if name == "nvfp4":
        codes = torch.stack((x & 0xF, x >> 4), -1).flatten(-2).long()
        elements, block = E2M1[codes].double(), 16
        each = scales.view(torch.float8_e4m3fn).double()
    else:
        elements, block = x.double(), 32
        each = 2.0 ** (scales.double() - 127)
    each = each.repeat_interleave(block, axis).narrow(axis, 0, elements.shape[axis])
    return elements * each * (1.0 if descale is None else descale.double())


def attention(q, k, v, causal):
    """Attention by its definition."""
    q, k, v = (x.movedim(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2]).logical_not()
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).movedim(1, 2), scores.logsumexp(-1)


def made(name, seqlen_k=77, dim=48):
    torch.manual_seed(5)
    q = torch.randn(2, 19, 4, dim)
    k, v = torch.randn(2, seqlen_k, 2, dim), torch.randn(2, seqlen_k, 2, dim)
    return (q, k, v), fmha.BlockScales.quantize(q, k, v, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seqlen_k", [20, 32, 77])
def test_o_and_lse_are_those_of_the_values(name, seqlen_k):
    _, (q, k, v, scales) = made(name, seqlen_k)
    wide = [
        values(x, by, name, axis, descale)
        for x, by, axis, descale in zip((q, k, v), (scales.q, scales.k, scales.v), (-1, -1, 1), scales.descales)
    ]
    right, right_lse = attention(*wide, causal=True)
    scales.values = torch.float32
    o, lse = fmha.attention(q, k, v, mask="causal", block_scales=scales, return_lse=True)
    assert o.dtype == torch.float32
    torch.testing.assert_close(o.double(), right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    scales.values = torch.bfloat16
    o = fmha.attention(q, k, v, mask="causal", block_scales=scales)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_values_and_go_to_what_was_converted(name):
    wide, _ = made(name)
    wide = [x.requires_grad_() for x in wide]
    sink = torch.linspace(-1, 1, 4).requires_grad_()
    q, k, v, scales = fmha.BlockScales.quantize(*wide, name)
    scales.values = torch.float32
    options = dict(mask="causal", return_lse=True, allow_fallback=True)
    o, lse = fmha.attention(q, k, v, sink=sink, block_scales=scales, **options)
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), (*wide, sink), (dout, dlse))
    of_values = [
        values(x, by, name, axis, descale).requires_grad_()
        for x, by, axis, descale in zip((q, k, v), (scales.q, scales.k, scales.v), (-1, -1, 1), scales.descales)
    ]
    of_sink = sink.detach().double().requires_grad_()
    plain, plain_lse = attention(*of_values, causal=True)
    right_lse = torch.logaddexp(plain_lse, of_sink[None, :, None])
    right = plain * (plain_lse - right_lse).exp().movedim(1, 2).unsqueeze(-1)
    wanted = torch.autograd.grad((right, right_lse), (*of_values, of_sink), (dout.double(), dlse.double()))
    for got, want, of in zip(found, wanted, (*wide, sink)):
        assert got.shape == of.shape and got.dtype == of.dtype
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


def test_a_training_step_in_mxfp8_keeps_the_tensors_type_and_has_one_derivative():
    wide = [x.bfloat16().requires_grad_() for x in made("mxfp8_e4m3")[0]]
    q, k, v, scales = fmha.BlockScales.quantize(*wide, "mxfp8_e4m3")
    o = fmha.attention(q, k, v, block_scales=scales, allow_fallback=True)
    found = torch.autograd.grad(o.float().square().sum(), wide, create_graph=True)
    assert all(x.dtype == torch.bfloat16 and x.isfinite().all() for x in found)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(found[0].float().sum(), wide)
    with torch.no_grad():
        assert fmha.BlockScales.quantize(*wide, "mxfp8_e4m3")[3].of == (None, None, None)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_come_back_within_half_a_step_of_their_block(name):
    (q, k, v), (q8, k8, v8, scales) = made(name)
    share = 1 / 6 + 1 / 16 if name == "nvfp4" else 1 / 8
    for x, stored, by, axis, descale in [
        (q, q8, scales.q, -1, scales.descales[0]),
        (k, k8, scales.k, -1, scales.descales[1]),
        (v, v8, scales.v, 1, scales.descales[2]),
    ]:
        back = values(stored, by, name, axis, descale)
        block = 16 if name == "nvfp4" else 32
        rows = torch.nn.functional.pad(x.movedim(axis, -1), (0, -x.shape[axis] % block)).unflatten(-1, (-1, block))
        most = rows.abs().amax(-1, keepdim=True).expand(rows.shape).flatten(-2)[..., : x.shape[axis]].movedim(-1, axis)
        assert ((back - x).abs() <= most * share).all()


def test_scales_of_a_block_are_the_smallest_that_hold_it():
    x = torch.zeros(1, 1, 1, 64)
    x[..., 3], x[..., 40] = 448.0, 449.0
    q, _, _, scales = fmha.BlockScales.quantize(x, x, x, "mxfp8_e4m3")
    assert scales.q.flatten().tolist() == [127, 128]
    assert q.float().flatten()[[3, 40]].tolist() == [448.0, 224.0]
    x = torch.full((1, 1, 1, 16), torch.nan)
    _, _, _, scales = fmha.BlockScales.quantize(x, x, x, "nvfp4")
    assert scales.q.flatten().tolist() == [0x7F]


def test_pages_and_packed_queries_are_the_same_call():
    for name in FORMATS:
        _, (q, k, v, scales) = made(name, seqlen_k=128)
        right = fmha.attention(q, k, v, block_scales=scales)
        paged = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in (k, v, scales.k, scales.v)]
        table = torch.arange(4, dtype=torch.int32).view(2, 2)
        by_pages = fmha.BlockScales(scales.q, paged[2], paged[3], name, descales=scales.descales)
        o = fmha.attention(q, paged[0], paged[1], block_table=table, max_seqlen_k=128, block_scales=by_pages)
        assert torch.equal(o, right), name
        offsets = torch.tensor([0, 19, 38], dtype=torch.int32)
        packed = fmha.BlockScales(scales.q.flatten(0, 1), scales.k, scales.v, name, descales=scales.descales)
        more = dict(cu_seqlens_q=offsets, max_seqlen_q=19, block_scales=packed)
        assert torch.equal(fmha.attention(q.flatten(0, 1), k, v, **more), right.flatten(0, 1)), name


def test_columns_of_v_are_the_same_call():
    for name in FORMATS:
        (_, _, v), (q, k, v8, scales) = made(name, seqlen_k=80)
        right = fmha.attention(q, k, v8, block_scales=scales)
        if name == "nvfp4":
            codes = torch.stack((v8 & 0xF, v8 >> 4), -1).flatten(-2)
            columns = codes[:, 0::2] | codes[:, 1::2] << 4
        else:
            columns = v8
        columns = columns.movedim(1, -1).contiguous().movedim(-1, 1)
        assert columns.stride(1) == 1
        assert torch.equal(fmha.attention(q, k, columns, block_scales=scales), right), name


def test_columns_of_v_are_made_by_the_conversion():
    for name in FORMATS:
        (wide_q, wide_k, wide_v), (q, k, v8, scales) = made(name, seqlen_k=80)
        right = fmha.attention(q, k, v8, block_scales=scales)
        *stored, of = fmha.BlockScales.quantize(wide_q, wide_k, wide_v, name, v_columns=True)
        assert stored[2].stride(1) == 1 and stored[2].shape[1] == (40 if name == "nvfp4" else 80)
        assert torch.equal(of.v, scales.v), name
        assert torch.equal(fmha.attention(*stored, block_scales=of), right), name


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversion_has_the_bits_of_its_definition(name):
    """In float64 with torch's operations: what the contract says, number by number."""
    torch.manual_seed(7)
    x = torch.randn(2, 37, 3, 40) * 2.0 ** torch.randint(-9, 9, (2, 37, 3, 40))
    x[0, 3, 1, 5], x[0, 8, 2, 9], x[1, 2, 0, 7] = torch.inf, -0.0, 1e-40
    for axis, dtype in [(-1, torch.float32), (-3, torch.bfloat16)]:
        values = x.to(dtype)
        found = _scales.quantize(values, name, axis, None)
        # The comparison runs on the CPU, where powers of 2 are exact; on a GPU they are not.
        values, stored, codes, descale = (t.cpu() for t in (values, *found))
        with torch.device("cpu"):
            check_bits(name, axis, values, stored, codes, descale)


def check_bits(name, axis, values, stored, codes, descale):
    four = name == "nvfp4"
    wide = values.double().clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    block, largest = (16, 6.0) if four else (32, 448.0 if name == "mxfp8_e4m3" else 57344.0)
    size = wide.shape[axis]
    rows = torch.nn.functional.pad(wide.movedim(axis, -1), (0, -size % block)).unflatten(-1, (-1, block))
    most = rows.abs().amax(-1)
    of_tensor = (most.max() / 2688).float().double() if four else torch.tensor(1.0, dtype=torch.float64)
    assert descale.double().item() == of_tensor.item()
    wanted = most / largest / of_tensor
    if four:
        by = wanted.clamp(max=448.0).float().to(torch.float8_e4m3fn)
        right, each = by.view(torch.uint8), by.double()
    else:
        exponent = torch.ceil(torch.log2(wanted)).clamp(-127, 127)
        exponent = torch.where(2.0 ** (exponent - 1) >= wanted, exponent - 1, exponent).clamp(-127, 127)
        right, each = (exponent + 127).to(torch.uint8), 2.0**exponent
    assert torch.equal(codes, right.movedim(-1, axis))
    back = values_of(stored, name).cpu()
    exact = (rows / (each * of_tensor).unsqueeze(-1)).flatten(-2)[..., :size].movedim(-1, axis)
    exact = torch.where(exact.isnan() | exact.isinf(), 0.0, exact).clamp(-largest, largest)
    near = E2M1[:8].cpu().double() if four else torch.arange(127, dtype=torch.uint8).view(stored.dtype).double()
    near = near[near.isfinite()].unique()
    nearest = (exact.abs().unsqueeze(-1) - near).abs().amin(-1)
    assert torch.equal((back.abs() - exact.abs()).abs(), nearest)
    assert torch.equal(torch.signbit(back)[exact != 0], torch.signbit(exact)[exact != 0])


def values_of(stored, name):
    """Elements in float64, without scales."""
    if name != "nvfp4":
        return stored.double()
    return E2M1[torch.stack((stored & 0xF, stored >> 4), -1).flatten(-2).long()].double()


def test_typed_tensors_are_taken():
    _, (q, k, v, scales) = made("nvfp4")
    right = fmha.attention(q, k, v, block_scales=scales)
    typed = [x.view(torch.float4_e2m1fn_x2) for x in (q, k, v)]
    by = [x.view(torch.float8_e4m3fn) for x in (scales.q, scales.k, scales.v)]
    o = fmha.attention(*typed, block_scales=fmha.BlockScales(*by, "nvfp4", descales=scales.descales))
    assert torch.equal(o, right)
    _, (q, k, v, scales) = made("mxfp8_e4m3")
    by = [x.view(torch.float8_e8m0fnu) for x in (scales.q, scales.k, scales.v)]
    o = fmha.attention(q, k, v, block_scales=fmha.BlockScales(*by, "mxfp8_e4m3"))
    assert torch.equal(o, fmha.attention(q, k, v, block_scales=scales))


def test_what_does_not_go_with_scales_by_blocks_is_named():
    (wide, _, _), (q, k, v, scales) = made("mxfp8_e4m3")
    bad = fmha.BlockScales(scales.q[..., :1], scales.k, scales.v, "mxfp8_e4m3")
    offsets = torch.tensor([0, 77, 154], dtype=torch.int32)
    one = torch.ones(1)
    packed = fmha.BlockScales(scales.q, scales.k.flatten(0, 1), scales.v.flatten(0, 1)[:0], "mxfp8_e4m3")
    twice = fmha.BlockScales(scales.q, scales.k, scales.v, "mxfp8_e4m3", descales=(one, one, one))
    short = (wide[:, :-1].requires_grad_(), None, None)
    of = fmha.BlockScales(scales.q, scales.k, scales.v, "mxfp8_e4m3", of=short)
    for error, text, call in [
        (ValueError, "block_scales: of q is", lambda: fmha.attention(q, k, v, block_scales=of)),
        (RuntimeError, "block_scales: q has shape", lambda: fmha.attention(q, k, v, block_scales=bad)),
        (TypeError, "q is of torch.float32", lambda: fmha.attention(wide, k, v, block_scales=scales)),
        (TypeError, "block_scales: str", lambda: fmha.attention(q, k, v, block_scales="mxfp8_e4m3")),
        (
            ValueError,
            "format 'mxfp4' is none of",
            lambda: fmha.attention(q, k, v, block_scales=fmha.BlockScales(one, one, one, "mxfp4")),
        ),
        (
            RuntimeError,
            "cu_seqlens_k is given beside block_scales",
            lambda: fmha.attention(
                q, k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_k=offsets, max_seqlen_k=77, block_scales=packed
            ),
        ),
        (
            NotImplementedError,
            "score_code is given beside block_scales",
            lambda: fmha.attention(q, k, v, score_code="s * 2", block_scales=scales),
        ),
        (
            NotImplementedError,
            "mask: masks as data",
            lambda: fmha.attention(q, k, v, mask=fmha.MaskBits(torch.zeros(1, 1, 19, 3)), block_scales=scales),
        ),
        (
            NotImplementedError,
            "torch's tensors",
            lambda: fmha.attention(wide.cpu().numpy(), k, v, block_scales=scales),
        ),
        (
            NotImplementedError,
            "bias beside block_scales has no gradient",
            lambda: fmha.attention(q, k, v, bias=torch.zeros(19, 77, requires_grad=True), block_scales=scales),
        ),
        (
            ValueError,
            "descale_q is given, and",
            lambda: fmha.attention(q, k, v, descale_q=one, block_scales=twice),
        ),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_an_error_of_a_conversion_names_the_tensor_and_its_number():
    x = torch.zeros(1, 8, 2, 32)
    convert = fmha.BlockScales.quantize
    for error, text, call in [
        (TypeError, "^q: str is no tensor", lambda: convert("q", x, x, "nvfp4")),
        (TypeError, "^k: torch.int32 is no floating type", lambda: convert(x, x.int(), x, "nvfp4")),
        (ValueError, r"^v has 2 axes of shape \(2, 32\)", lambda: convert(x, x, x[0, 0], "nvfp4")),
        (ValueError, r"^k.shape\[-1\] 31 is odd", lambda: convert(x, x[..., 1:], x, "nvfp4")),
        (ValueError, r"^v.shape\[-3\] 7 is odd", lambda: convert(x, x, x[:, 1:], "nvfp4", v_columns=True)),
    ]:
        with pytest.raises(error, match=text):
            call()
