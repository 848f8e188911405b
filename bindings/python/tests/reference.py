"""Attention by definition, in float64, as CONTRACT.md says it: what every test compares with."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch

DEVICE = os.environ.get("FMHA_TEST_DEVICE", "cpu")


def slow_kernels_serve(set_attribute=setattr):
    """`allow_fallback` is True by default on a GPU: most of these tests compute in f32, which no fast kernel takes."""
    if DEVICE == "cpu":
        return
    from fmha import _arguments, sparse

    names = _arguments.bind.__code__.co_varnames
    given = [name == "allow_fallback" or value for name, value in zip(names, _arguments.bind.__defaults__)]
    set_attribute(_arguments.bind, "__defaults__", tuple(given))
    for chooses in (sparse.index_scores, sparse.index_lists):
        set_attribute(chooses, "__kwdefaults__", {**chooses.__kwdefaults__, "allow_fallback": True})


appends_in_f32 = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's kernels append to a cache in 16 bits alone")


def visible(mask, seqlen_q, seqlen_k):
    """Which keys a query sees: bool [seqlen_q, seqlen_k]."""
    kind, left, right, sink_columns = mask
    i = torch.arange(seqlen_q).view(-1, 1)
    j = torch.arange(seqlen_k).view(1, -1)
    if kind == 0:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if kind == 3:
        return (j >= i - left + 1) & (j < i + right)
    diagonal = 0 if kind == 1 else seqlen_k - seqlen_q
    below = j >= i + diagonal - left if left >= 0 else torch.ones_like(j - i, dtype=torch.bool)
    above = j <= i + diagonal + right if right >= 0 else torch.ones_like(j - i, dtype=torch.bool)
    return (below | (j < sink_columns)) & above


def attention(
    q,
    k,
    v,
    mask=(0, -1, -1, 0),
    softmax_scale=None,
    softcap=None,
    bias=None,
    alibi_slopes=None,
    sink=None,
    keep=None,
    p_drop=0.0,
):
    """Q [b, s, h, d], any type; O [b, s, h, dv] and LSE [b, h, s] in float64, differentiable. ``mask`` is a band, or bool
    [seqlen_q, seqlen_k]: whether a query sees a key."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    seqlen_q, seqlen_k = s.shape[-2:]
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.double()
    if alibi_slopes is not None:
        i = torch.arange(seqlen_q, device=s.device).view(-1, 1)
        j = torch.arange(seqlen_k, device=s.device).view(1, -1)
        diagonal = 0 if mask[0] == 1 else seqlen_k - seqlen_q
        slopes = alibi_slopes.double().view(-1, s.shape[1], 1, 1)
        s = s - slopes * (i + diagonal - j).abs()
    seen = mask if isinstance(mask, torch.Tensor) else visible(mask, seqlen_q, seqlen_k)
    s = s.masked_fill(~seen.to(s.device), -math.inf)
    whole = s
    if sink is not None:
        whole = torch.cat([s, sink.double().view(1, -1, 1, 1).expand(*s.shape[:2], seqlen_q, 1)], -1)
    if whole.shape[-1] == 0:
        lse = s.new_full(s.shape[:-1], -math.inf)
    else:
        lse = torch.logsumexp(whole, -1)
    p = torch.where(
        torch.isneginf(s),
        torch.zeros((), dtype=s.dtype),
        torch.exp(s - lse.masked_fill(torch.isneginf(lse), 0).unsqueeze(-1)),
    )
    if keep is not None:
        p = p * keep.double() / (1 - p_drop)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def turned(x, angle, positions, interleaved, conjugate=False):
    """Rotary embedding of rows ``(..., heads, d)`` by the angles ``[positions, rotary_dim / 2]`` of their positions, or by
    complex numbers where tables are rounded: pairs as complex numbers, multiplied by ``exp(i angle)``; float64."""
    turns = 2 * angle.shape[-1]
    front = x[..., :turns].double()
    pairs = front.unflatten(-1, (-1, 2)) if interleaved else front.unflatten(-1, (2, -1)).transpose(-1, -2)
    unit = angle if angle.is_complex() else torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())
    unit = unit[positions][..., None, :]
    made = torch.view_as_complex(pairs.contiguous()) * (unit.conj() if conjugate else unit)
    made = torch.view_as_real(made)
    made = made if interleaved else made.transpose(-1, -2)
    return torch.cat((made.flatten(-2), x[..., turns:].double()), -1)


def tolerance(dtype, gradients=False):
    """Bounds that attention in the type itself keeps on inputs of order 1."""
    unit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    return unit * (6 if gradients else 2)


def tensors(b=2, sq=7, sk=11, hq=4, hk=2, d=16, dv=None, dtype=torch.float32, grad=False):
    """Q, K and V."""

    def make(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_(grad)

    return make(b, sq, hq, d), make(b, sk, hk, d), make(b, sk, hk, dv or d)


def offsets(lengths):
    """First rows of packed sequences, i32."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def close(given, wanted, bound):
    """Equal where one is not finite, and elsewhere within a bound."""
    assert given.shape == wanted.shape
    given, wanted = given.detach().double(), wanted.detach().double()
    finite = torch.isfinite(wanted)
    assert torch.equal(torch.isfinite(given), finite)
    if finite.any():
        error = (given - wanted)[finite].abs().max().item()
        assert error <= bound, f"{error} > {bound}"
    assert torch.equal(given[~finite], wanted[~finite])
