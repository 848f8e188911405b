"""Mask objects: one build serves calls of many layers, forward and backward; later changes change nothing."""

from __future__ import annotations

import gc

import pytest
import torch

import fmha
from conftest import DEVICE


def rows(count=96, heads=4, kv=2, seed=0, packed=False):
    torch.manual_seed(seed)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    shape = (2 * count,) if packed else (2, count)
    return [
        torch.randn(*shape, n, 64, device=DEVICE, dtype=dtype, requires_grad=True) for n in (heads, kv, kv)
    ]


def documents(count, length, packed=False):
    row = torch.arange(count, dtype=torch.int32, device=DEVICE)
    first = row // length * length
    ends = torch.stack([first, torch.minimum(first + length, torch.tensor(count, device=DEVICE))]).to(torch.int32)
    return ends.repeat(1, 2).view(1, 2, -1).contiguous() if packed else ends.view(1, 1, 2, count).contiguous()


def results(qkv, mask, **options):
    o = fmha.attention(*qkv, mask=mask, **options)
    gradients = torch.autograd.grad(o, qkv, torch.ones_like(o))
    return [o.detach(), *gradients]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("packed", [False, True])
def test_calls_read_what_was_last_built(packed):
    qkv = rows(packed=packed)
    options = {}
    if packed:
        lengths = torch.tensor([0, 96, 192], dtype=torch.int32, device=DEVICE)
        options = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=96, max_seqlen_k=96)
    ends, other = documents(96, 40, packed), documents(96, 17, packed)
    by_ends = results(qkv, fmha.Intervals(ends), **options)
    by_other = results(qkv, fmha.Intervals(other), **options)
    assert not equal(by_ends, by_other)
    built = fmha.MaskObject(*qkv, fmha.Intervals(ends), **options)
    assert equal(results(qkv, built, **options), by_ends)
    ends.copy_(other)
    assert equal(results(qkv, built, **options), by_ends), "changed, and not built"
    layer = rows(seed=1, packed=packed)
    assert not equal(results(layer, built, **options), by_ends)
    built.build()
    assert equal(results(qkv, built, **options), by_other)


def test_a_band_bits_and_lists_are_kept_too():
    qkv = rows()
    seen = torch.rand(1, 4, 96, 96, device=DEVICE) < 0.7
    counts = torch.full((1, 1, 3), 2, dtype=torch.int32, device=DEVICE)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 1, 0]]]], dtype=torch.int32, device=DEVICE)
    masks = ["causal", fmha.MaskBits.of(seen), fmha.BlockLists(counts, indices, block_size=32)]
    built = fmha.MaskObject(*qkv, masks)
    assert equal(results(qkv, built), results(qkv, masks))
    o, lse = fmha.attention(*qkv, mask=built, return_lse=True)
    assert lse.shape == (2, 4, 96)


def test_a_function_beside_the_masks_is_the_objects():
    qkv = rows()
    masks = fmha.Intervals(documents(96, 40))
    built = fmha.MaskObject(*qkv, masks, mask_code="k <= q")
    with_code = results(qkv, built, mask_code="k <= q")
    assert equal(with_code, results(qkv, masks, mask_code="k <= q"))
    with pytest.raises(RuntimeError, match="mask: built for function k <= q, but the call has none"):
        fmha.attention(*qkv, mask=built)
    limits = torch.tensor([3, 5], dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match="its function captures .*, of which a mask object has no copy"):
        fmha.MaskObject(*qkv, masks, mask_code=lambda b, h, q, k: k <= q + limits[b])


def test_what_an_object_was_not_built_for_is_refused():
    qkv = rows()
    built = fmha.MaskObject(*qkv, fmha.Intervals(documents(96, 40)))
    q, k, v = rows(heads=6)
    with pytest.raises(RuntimeError, match="mask: built for num_heads_q 4, but the call has 6"):
        fmha.attention(q, k, v, mask=built)
    with pytest.raises(ValueError, match="mask is given beside causal"):
        fmha.attention(*qkv, mask=fmha.MaskObject(*qkv, ["causal", fmha.Intervals(documents(96, 40))]), causal=True)
    with pytest.raises(TypeError, match="MaskObject: mask: 'causal' is no mask as data"):
        fmha.MaskObject(*qkv, "causal")
    with pytest.raises(TypeError, match="MaskObject: q: .* is no tensor of torch's"):
        fmha.MaskObject(qkv[0].detach().cpu().float().numpy(), *qkv[1:], fmha.Intervals(documents(96, 40)))


def test_an_object_that_is_gone_leaves_its_calls_right():
    qkv = rows()
    ends = documents(96, 40)
    wanted = results(qkv, fmha.Intervals(ends))
    built = fmha.MaskObject(*qkv, fmha.Intervals(ends))
    o = fmha.attention(*qkv, mask=built)
    del built
    gc.collect()
    gradients = torch.autograd.grad(o, qkv, torch.ones_like(o))
    assert equal([o, *gradients], wanted)
