"""``flash_attn.layers.rotary``, ``flash_attn.ops.triton.rotary`` and ``flash_attn.bert_padding``: values, gradients,
names."""

import inspect

import pytest
import torch

from fmha import bert_padding, rotary
from reference import offsets, turned as by_definition
from run import run_python

SIGNATURES = {
    rotary.apply_rotary: "x cos sin seqlen_offsets=0 cu_seqlens=None max_seqlen=None interleaved=False inplace=False "
    "conjugate=False",
    rotary.apply_rotary_emb: "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None "
    "max_seqlen=None",
    rotary.apply_rotary_emb_torch: "x cos sin interleaved=False",
    rotary.apply_rotary_emb_qkv_: "qkv cos sin cos_k=None sin_k=None interleaved=False seqlen_offsets=0 "
    "num_heads_q=None",
    rotary.apply_rotary_emb_kv_: "kv cos sin interleaved=False seqlen_offsets=0",
    rotary.RotaryEmbedding: "dim base=10000.0 interleaved=False scale_base=None device=None",
    rotary.RotaryEmbedding.forward: "self qkv kv=None seqlen_offset=0 max_seqlen=None num_heads_q=None",
    bert_padding.unpad_input: "hidden_states attention_mask unused_mask=None",
    bert_padding.unpad_input_for_concatenated_sequences: "hidden_states attention_mask_in_length",
    bert_padding.pad_input: "hidden_states indices batch seqlen",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_arguments_have_their_names_order_and_defaults(function):
    spelt = " ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in inspect.signature(function).parameters.items()
    )
    assert spelt == SIGNATURES[function]


def close(got, wanted, dtype):
    assert got.dtype == dtype
    bound = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", ["none", "int", "tensor"])
@pytest.mark.parametrize("half", [8, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_turn_by_their_positions_and_gradients_turn_back(dtype, offset, half, interleaved):
    angle = torch.rand(12, half) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    start = {"none": 0, "int": 3, "tensor": torch.tensor([1, 6])}[offset]
    positions = torch.arange(5) + (start[:, None] if offset == "tensor" else start)
    positions = positions.expand(2, 5)
    x = torch.randn(2, 5, 3, 16).to(dtype).requires_grad_()
    wanted = by_definition(x.detach(), angle, positions, interleaved)
    got = rotary.apply_rotary_emb(x, cos, sin, interleaved=interleaved, seqlen_offsets=start)
    close(got.detach(), wanted, dtype)
    dout = torch.randn_like(got)
    (dx,) = torch.autograd.grad(got, x, dout)
    close(dx, by_definition(dout, angle, positions, interleaved, conjugate=True), dtype)
    # The call works in place: the given tensor is the result, and elements behind rotary_dim stay.
    written = x.detach().clone()
    assert rotary.apply_rotary_emb(written, cos, sin, interleaved, True, start).data_ptr() == written.data_ptr()
    assert torch.equal(written, got.detach())
    back = rotary.apply_rotary(got.detach(), cos, sin, start, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back.float(), x.detach().float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("with_offsets", [False, True])
def test_packed_rows_count_in_their_sequence(with_offsets):
    lengths = [3, 0, 5]
    cu, angle = offsets(lengths), torch.rand(12, 8)
    start = torch.tensor([2, 7, 4], dtype=torch.int32) if with_offsets else 0
    # Two rows behind the last sequence stay unchanged.
    x = torch.randn(10, 3, 16)
    got = rotary.apply_rotary_emb(x, angle.cos(), angle.sin(), seqlen_offsets=start, cu_seqlens=cu, max_seqlen=5)
    first = start.tolist() if with_offsets else [0, 0, 0]
    positions = torch.cat([torch.arange(n) + a for n, a in zip(lengths, first)])
    close(got[:8], by_definition(x[:8], angle, positions, False), torch.float32)
    assert torch.equal(got[8:], x[8:])


def test_a_position_that_the_tables_lack_turns_nothing():
    x, angle = torch.randn(1, 2, 3, 16), torch.rand(4, 8)
    got = rotary.apply_rotary(x, angle.cos(), angle.sin(), torch.tensor([3]))
    close(got[:, :1], by_definition(x[:, :1], angle, torch.tensor([[3]]), False), torch.float32)
    assert torch.equal(got[:, 1], x[:, 1])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("own_k", [False, True])
def test_q_and_k_turn_inside_one_tensor(grouped, own_k):
    angle, angle_k = torch.rand(9, 4), torch.rand(9, 4)
    qkv = torch.randn(*((2, 7, 8, 16) if grouped else (2, 7, 3, 4, 16)), requires_grad=True)
    tables = dict(cos_k=angle_k.cos(), sin_k=angle_k.sin()) if own_k else {}
    given = dict(num_heads_q=4) if grouped else {}
    work = qkv * 1
    got = rotary.apply_rotary_emb_qkv_(work, angle.cos(), angle.sin(), seqlen_offsets=2, **tables, **given)
    assert got.data_ptr() == work.data_ptr()
    parts = lambda x: x.split([4, 2, 2], 2) if grouped else x.unbind(2)
    positions = (torch.arange(7) + 2).expand(2, 7)
    for part, was, turns in zip(parts(got.detach()), parts(qkv.detach()), (angle, angle_k if own_k else angle, None)):
        wanted = was.double() if turns is None else by_definition(was, turns, positions, False)
        close(part, wanted, torch.float32)
    dout = torch.randn_like(got)
    (grad,) = torch.autograd.grad(got, qkv, dout)
    q, k, v = parts(dout)
    close(parts(grad)[0], by_definition(q, angle, positions, False, conjugate=True), torch.float32)
    of_k = angle_k if own_k else angle
    close(parts(grad)[1], by_definition(k, of_k, positions, False, conjugate=True), torch.float32)
    assert torch.equal(parts(grad)[2], v)


def test_k_turns_beside_v():
    angle, kv = torch.rand(9, 8), torch.randn(2, 7, 2, 4, 16, requires_grad=True)
    work = kv * 1
    got = rotary.apply_rotary_emb_kv_(work, angle.cos(), angle.sin(), interleaved=True)
    positions = torch.arange(7).expand(2, 7)
    close(got[:, :, 0].detach(), by_definition(kv.detach()[:, :, 0], angle, positions, True), torch.float32)
    assert torch.equal(got[:, :, 1], kv[:, :, 1])
    dout = torch.randn_like(got)
    (grad,) = torch.autograd.grad(got, kv, dout)
    close(grad[:, :, 0], by_definition(dout[:, :, 0], angle, positions, True, conjugate=True), torch.float32)
    assert torch.equal(grad[:, :, 1], dout[:, :, 1])


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_a_module_makes_the_angles(scale_base):
    made = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    assert not made.state_dict()
    q, kv = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 2, 16)
    was_q, was_k = q.clone(), kv[:, :, 0].clone()
    got_q, got_kv = made(q, kv, seqlen_offset=3)
    assert got_q.data_ptr() == q.data_ptr() and got_kv.data_ptr() == kv.data_ptr()
    angle = torch.outer(torch.arange(9.0), 100.0 ** (-torch.arange(0, 8, 2) / 8))
    positions = (torch.arange(6) + 3).expand(2, 6)
    grown = torch.ones(9, 4)
    if scale_base:
        even = torch.arange(0, 8, 2)
        grown = ((even + 3.2) / 11.2) ** ((torch.arange(9.0) - 4) / scale_base)[:, None]
    wide = torch.cat((grown, grown), -1)[positions][..., None, :].double()
    for got, was, by in ((got_q, was_q, wide), (got_kv[:, :, 0], was_k, 1 / wide)):
        wanted = by_definition(was, angle, positions, False)
        wanted[..., :8] *= by
        close(got, wanted, torch.float32)
    # One tensor with Q, K and V is rotated in the same way.
    qkv = torch.randn(2, 6, 3, 2, 16)
    assert torch.equal(
        made(qkv.clone(), seqlen_offset=torch.tensor([3, 3]), max_seqlen=9), made(qkv.clone(), seqlen_offset=3)
    )


def test_what_flash_attention_asserts_is_asserted_with_its_name_and_number():
    x, angle = torch.randn(2, 5, 3, 16), torch.rand(6, 8)
    cos, sin = angle.cos(), angle.sin()
    for call, said in (
        (lambda: rotary.apply_rotary(x, cos[:4], sin[:4]), "cos has 4 positions, but x has 5"),
        (lambda: rotary.apply_rotary(x, cos, sin[:5]), "sin has shape"),
        (lambda: rotary.apply_rotary(x[..., :8], cos, sin), "rotary_dim 16, but x has headdim 8"),
        (lambda: rotary.apply_rotary(x, cos, sin, 2), "seqlen_offsets 2 and 5 rows are beyond the 6"),
        (lambda: rotary.apply_rotary(x, cos, sin, torch.zeros(3).int()), "seqlen_offsets is of .*\\(3,\\)"),
        (lambda: rotary.apply_rotary(x[0], cos, sin, cu_seqlens=offsets([5])), "max_seqlen is missing"),
        (lambda: rotary.apply_rotary_emb_kv_(torch.randn(2, 5, 3, 4, 16), cos, sin), "kv has shape"),
        (lambda: rotary.apply_rotary_emb_qkv_(torch.randn(2, 5, 8, 16), cos, sin), "num_heads_q is missing"),
    ):
        with pytest.raises(AssertionError, match=said):
            call()


def test_rows_are_found_put_back_and_have_gradients():
    x = torch.randn(7, 3, 4, requires_grad=True)
    indices = torch.tensor([5, 0, 2])
    rows, rest = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(rest, x)
    dout, drest = torch.randn(3, 3, 4), torch.randn(7, 3, 4)
    (grad,) = torch.autograd.grad((rows, rest), x, (dout, drest))
    assert torch.equal(grad, drest.index_add(0, indices, dout))
    values = torch.randn(3, 3, 4, requires_grad=True)
    whole = bert_padding.index_put_first_axis(values, indices, 7)
    assert torch.equal(whole[indices], values) and not whole[[1, 3, 4, 6]].any()
    assert torch.equal(torch.autograd.grad(whole, values, drest)[0], drest[indices])
    hidden, mask = torch.randn(2, 5, 4, requires_grad=True), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    rows, indices, cu, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert cu.tolist() == [0, 3, 7] and used.tolist() == [2, 4] and longest == 4
    back = bert_padding.pad_input(rows, indices, 2, 5)
    kept = (mask | unused)[..., None]
    assert torch.equal(back, hidden * kept)
    assert torch.equal(torch.autograd.grad(back.sum(), hidden)[0], kept.expand_as(hidden).float())


def test_sequences_one_behind_another_in_a_row_are_apart():
    hidden = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    assert cu.tolist() == [0, 2, 5, 8, 10, 16] and cu.dtype == torch.int32 and longest == 6
    assert torch.equal(rows, torch.cat([hidden[0, :5], hidden[1, :5], hidden[2]]))
    assert torch.equal(bert_padding.pad_input(rows, indices, 3, 6)[2], hidden[2])


def test_programs_find_them_where_they_look():
    run_python(
        """
import fmha.flash_attn, fmha.rotary
fmha.flash_attn.install()
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_func
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.bert_padding import index_first_axis_residual, unpad_input_for_concatenated_sequences
import flash_attn
assert flash_attn.layers.rotary.apply_rotary_emb is fmha.rotary.apply_rotary_emb
assert apply_rotary is fmha.rotary.apply_rotary
"""
    )
