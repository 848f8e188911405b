"""Scales of an FP8 cache by rows: against float64, the same call on the dequantised cache, and appended rows."""

import random

import numpy
import pytest
import torch

import fmha
from fmha import _torch
from reference import DEVICE, attention, close, offsets, tolerance

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def wide(x, scale, block, dtype):
    """Elements times their scales in f32, rounded to a 16-bit type once; ``scale`` has rows of ``block``."""
    rows = scale.repeat_interleave(block, -2)[..., : x.shape[-3], :]
    return (x.float() * rows[..., None]).to(dtype)


def strided(x, draw):
    """The same numbers, with a gap between heads or rows."""
    if draw.random() < 0.5:
        return x
    room = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def drawn(seed):
    """A call over a cache that a seed draws: arguments, and K and V of each sequence in Q's type."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layout = draw.choice(["batch", "pages", "packed"])
    dtype, narrow = draw.choice([torch.float16, torch.bfloat16]), draw.choice(FP8)
    hk, group, d, dv = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice([8, 16, 40]), draw.choice([8, 24])
    batch, sq = draw.choice([1, 3]), draw.choice([1, 2, 5])
    lengths = [draw.randint(1, 40) for _ in range(batch)]
    q = torch.randn(batch, sq, hk * group, d).to(dtype)
    of = dict(q=q, seqused_k=torch.tensor(lengths, dtype=torch.int32))
    if layout == "batch":
        block = draw.choice([1, 1, 3, 16, 64])
        rows, held = (batch, 40), (batch, -(-40 // block))
    elif layout == "pages":
        block = draw.choice([1, 1, 2, 4, 8])
        page_size, most = 8, 5
        rows, held = (batch * most, page_size), (batch * most, page_size // block)
        table = torch.randperm(batch * most).view(batch, most).int()
        of["block_table"] = table
    else:
        block, rows = 1, (sum(lengths),)
        held = rows
        of = dict(q=q, cu_seqlens_k=offsets(lengths), max_seqlen_k=max(lengths))
        of.update(q=q.flatten(0, 1), cu_seqlens_q=offsets([sq] * batch), max_seqlen_q=sq)
    k, v = torch.randn(*rows, hk, d).to(narrow), torch.randn(*rows, hk, dv).to(narrow)
    k_scale, v_scale = (torch.rand(*held, hk) * 1.5 + 0.02 for _ in range(2))
    whole = []
    for x, scale in ((k, k_scale), (v, v_scale)):
        values = wide(x, scale, block, dtype)
        if layout == "pages":
            values = values[table.long()].flatten(1, 2)
        each = values.split(lengths) if layout == "packed" else [x[:n] for x, n in zip(values, lengths)]
        whole.append(each)
    scales = dict(k_scale=strided(k_scale, draw), v_scale=strided(v_scale, draw))
    if block > 1 or draw.random() < 0.5:
        scales["scale_block"] = block
    causal = draw.random() < 0.5
    return dict(of, k_cache=k, v_cache=v, causal=causal, **scales), whole


@pytest.mark.parametrize("seed", range(40))
def test_calls_that_a_seed_draws_are_right_in_float64(seed):
    call, (keys, values) = drawn(seed)
    o, lse = fmha.attention_with_kvcache(**call, return_lse=True)
    q = call["q"]
    sq = call.get("max_seqlen_q") or q.shape[1]
    for b, (k, v) in enumerate(zip(keys, values)):
        rows = q[b * sq : (b + 1) * sq] if q.dim() == 3 else q[b]
        mask = (2, -1, 0, 0) if call["causal"] else (0, -1, -1, 0)
        wanted, wanted_lse = attention(rows[None], k[None], v[None], mask=mask)
        got = o[b * sq : (b + 1) * sq] if q.dim() == 3 else o[b]
        got_lse = lse[:, b * sq : (b + 1) * sq] if q.dim() == 3 else lse[b]
        size = max(1.0, v.abs().max().item())
        close(got, wanted[0], tolerance(q.dtype) * size)
        close(got_lse, wanted_lse[0], 1e-3)


@pytest.mark.parametrize("narrow", FP8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_are_those_of_the_dequantised_cache(dtype, narrow):
    q, (k, v) = torch.randn(2, 3, 4, 16).to(dtype), (torch.randn(2, 21, 2, 16).to(narrow) for _ in range(2))
    k_scale, v_scale = torch.rand(2, 6, 2), torch.rand(2, 6, 2)
    o = fmha.attention_with_kvcache(q, k, v, k_scale=k_scale, v_scale=v_scale, scale_block=4)
    values = (wide(x, scale, 4, dtype) for x, scale in ((k, k_scale), (v, v_scale)))
    assert torch.equal(o, fmha.attention_with_kvcache(q, *values))


@pytest.mark.parametrize("narrow", FP8)
@pytest.mark.parametrize("paged", [False, True])
def test_appended_rows_are_quantised_with_scales_of_their_own(narrow, paged):
    used = [5, 0]
    new_k, new_v = torch.randn(2, 3, 2, 16).half(), torch.randn(2, 3, 2, 16).half()
    new_k[0, 0, 0] = 0
    rows = (6, 4) if paged else (2, 12)
    k, v = (torch.randn(*rows, 2, 16).to(narrow) for _ in range(2))
    k_scale, v_scale = torch.rand(*rows, 2), torch.rand(*rows, 2)
    before = [x.clone() for x in (k, v, k_scale, v_scale)]
    table = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32) if paged else None
    q = torch.randn(2, 3, 4, 16).half()
    lengths = torch.tensor(used, dtype=torch.int32)
    o = fmha.attention_with_kvcache(
        q, k, v, new_k, new_v, seqused_k=lengths, block_table=table, k_scale=k_scale, v_scale=v_scale
    )

    def place(b, i):
        return (table[b, i // 4].item(), i % 4) if paged else (b, i)

    for cache, scale, new, old in ((k, k_scale, new_k, before[0]), (v, v_scale, new_v, before[1])):
        for b in range(2):
            for i in range(3):
                at = place(b, used[b] + i)
                # The division runs on the CPU, since torch multiplies by a reciprocal on a GPU.
                numbers = new[b, i].float().cpu()
                wanted = numbers.abs().amax(-1) / LARGEST[narrow]
                wanted = torch.where(wanted > 0, wanted, 1.0)
                assert torch.equal(scale[at].cpu(), wanted)
                stored = (numbers / wanted[:, None]).to(narrow)
                assert torch.equal(cache[at].cpu().view(torch.uint8), stored.view(torch.uint8))
                # The rest of the cache must be unchanged.
                old[at] = cache[at]
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))
    for b in range(2):
        there = [place(b, i) for i in range(used[b] + 3)]
        keys, values = (
            torch.stack([(x[at].float() * s[at][:, None]).half() for at in there])
            for x, s in ((k, k_scale), (v, v_scale))
        )
        wanted, _ = attention(q[b][None], keys[None], values[None], mask=(2, -1, 0, 0))
        close(o[b], wanted[0], tolerance(torch.float16))


def test_what_does_not_go_with_scales_by_rows_is_named():
    q, k, scale = torch.randn(2, 1, 2, 16).half(), torch.randn(2, 9, 2, 16).to(FP8[0]), torch.rand(2, 9, 2)
    both = dict(k_scale=scale, v_scale=scale)
    used, one = torch.tensor([1, 2], dtype=torch.int32), torch.ones(())
    new = dict(k=q, v=q, seqused_k=used)
    for said, beside in [
        ("k_scale is given, but v_scale is missing", dict(k_scale=scale)),
        ("v_scale is given, but k_scale is missing", dict(v_scale=scale)),
        ("k_scale has shape [2, 9, 1], not [2, 9, 2]", dict(both, k_scale=scale[..., :1])),
        ("v_scale has shape [2, 9, 2], not [2, 3, 2]", dict(k_scale=scale[:, :3], v_scale=scale, scale_block=3)),
        ("k_scale is of float16, not of float32", dict(both, k_scale=scale.half())),
        ("scale_block 0 is not 1 or more", dict(both, scale_block=0)),
        ("scale_block 4 is given, but k_scale and v_scale are None", dict(scale_block=4)),
        ("descale_k", dict(both, descale_k=one, descale_v=one)),
        ("append of seqlen_new 1", dict(k_scale=scale[:, :3], v_scale=scale[:, :3], scale_block=3, **new)),
    ]:
        with pytest.raises((RuntimeError, ValueError)) as error:
            fmha.attention_with_kvcache(q, k, k.clone(), **beside)
        assert said in str(error.value)
    with pytest.raises(RuntimeError, match="k_cache is of float16 beside q of float16: scales by rows are those of"):
        fmha.attention_with_kvcache(q, k.half(), k.half(), **both)
    with pytest.raises((TypeError, RuntimeError), match="k_scale"):
        fmha.attention_with_kvcache(q, k, k, k_scale="rows", v_scale=scale)
    o = fmha.attention_with_kvcache(q, k, k.clone(), k_scale=scale.clone().requires_grad_(), v_scale=scale)
    with pytest.raises(NotImplementedError, match="of which attention has no gradient"):
        (o[0] if isinstance(o, tuple) else o).sum().backward()


@pytest.mark.skipif(DEVICE != "cpu", reason="NumPy's arrays are the CPU's")
def test_numpys_arrays_have_scales_too():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, 2, 16) for n in (3, 9, 9))
    k, v, scale = k.to(FP8[0]), v.to(FP8[0]), torch.rand(2, 9, 2)
    new, used = torch.randn(2, 1, 2, 16).half(), torch.tensor([4, 8], dtype=torch.int32)
    narrow = lambda x: x.view(torch.uint8).numpy().copy().view(ml_dtypes.float8_e4m3fn)
    arrays = [narrow(k), narrow(v), scale.numpy().copy(), scale.numpy().copy()]
    given = (q.half().numpy(), *arrays[:2], new.numpy(), new.numpy())
    o = fmha.attention_with_kvcache(*given, seqused_k=used.numpy(), k_scale=arrays[2], v_scale=arrays[3])
    scales = scale.clone(), scale.clone()
    wanted = fmha.attention_with_kvcache(
        q.half(), k, v, new, new, seqused_k=used, k_scale=scales[0], v_scale=scales[1]
    )
    assert numpy.array_equal(o, wanted.numpy())
    assert numpy.array_equal(arrays[2], scales[0].numpy()) and not numpy.array_equal(arrays[2], scale.numpy())
    arrays[2].flags.writeable = False
    with pytest.raises(ValueError, match="k_scale is read-only, but is written"):
        fmha.attention_with_kvcache(*given, seqused_k=used.numpy(), k_scale=arrays[2], v_scale=arrays[3])


def test_the_operator_is_sound():
    # The schema check multiplies arguments, which torch can not do in FP8.
    q, new = torch.randn(2, 1, 4, 16).half(), torch.randn(2, 1, 2, 16).half()
    k, v, scale = torch.randn(2, 9, 2, 16).to(FP8[0]), torch.randn(2, 9, 2, 16).to(FP8[0]), torch.rand(2, 9, 2)
    used = torch.tensor([3, 4], dtype=torch.int32)
    tensors = (q, k, v, new, new.clone(), None, None, None, None, scale, scale.clone())
    lengths = (None, None, None, None, None, None, used, None, None, None, None)
    numbers = (0, 0, None, 0.0, 2, -1, 0, 0, 0.0, 0, 0, -1, 0, 0, 0, 0, 1)
    torch.library.opcheck(
        _torch.kvcache_scaled_op, (*tensors, *lengths, *numbers), test_utils="test_faketensor"
    )
