"""Small outputs of forward at torch's and NumPy's doors: beside float64, under autograd and a compiler; refusals."""

import os
import random

import numpy
import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import fmha
import fmha.flex as flex
from conftest import DEVICE
from reference import close, offsets, tensors, visible

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's kernels refuse small outputs")

MASKS = {None: (0, -1, -1, 0), "causal": (2, -1, 0, 0), "t:5,2": (1, 5, 2, 0)}


def by_definition(q, k, mask, sink=None, softcap=None):
    """Row maxima and sums of keys, float64, of ``[rows, heads, dim]`` rows of one sequence."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(MASKS[mask], q.shape[0], k.shape[0]), -torch.inf)
    sinks = torch.full((q.shape[1],), -torch.inf) if sink is None else sink
    whole = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)], -1)
    lse = torch.logsumexp(whole, -1, keepdim=True)
    p = torch.where(torch.isneginf(scores), 0.0, torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)))
    greatest = torch.full(scores.shape[:2], -torch.inf, dtype=torch.float64) if not k.shape[0] else scores.amax(-1)
    return greatest, p.sum(1)


def seeds():
    """``FMHA_DRAWN=[SEED:]COUNT`` draws so many, from its seed on."""
    first, _, count = (os.environ.get("FMHA_DRAWN") or "1:24").rpartition(":")
    return range(int(first or 1), int(first or 1) + int(count))


def test_drawn_calls_write_what_float64_has():
    for seed in seeds():
        draw = random.Random(seed)
        torch.manual_seed(seed)
        batch, heads, kv = draw.randint(1, 3), *draw.choice([(4, 2), (2, 2), (3, 1)])
        most = draw.randint(1, 40), draw.randint(1, 60)
        packed, mask = draw.random() < 0.4, draw.choice(list(MASKS))
        lengths = [[draw.randint(0, n) if packed else n for _ in range(batch)] for n in most]
        shape = (lambda side: (sum(lengths[side]),)) if packed else (lambda side: (batch, most[side]))
        q, k, v = (torch.randn(*shape(at > 0), n, 8, requires_grad=True) for at, n in enumerate((heads, kv, kv)))
        sink = torch.randn(heads) if draw.random() < 0.5 else None
        options = {"mask": mask, "sink": sink, "softcap": draw.choice([None, 1.5])}
        if packed:
            options["cu_seqlens_q"], options["cu_seqlens_k"] = map(offsets, lengths)
            options["max_seqlen_q"], options["max_seqlen_k"] = most
        row_max = torch.full((heads, sum(lengths[0])) if packed else (batch, heads, most[0]), 9.0)
        head_max, key_sum = torch.full((heads,), 9.0), torch.full((batch, heads, most[1]), 9.0)
        small = {"row_max": row_max, "head_max": head_max, "key_sum": key_sum}
        wanted = draw.sample(list(small), draw.randint(1, 3))
        plain = fmha.attention(q, k, v, **options)
        o = fmha.attention(q, k, v, **options, **{name: small[name] for name in wanted})
        assert torch.equal(o, plain)
        dout = torch.randn_like(o)
        both = [torch.autograd.grad(x, (q, k, v), dout) for x in (o, plain)]
        assert all(torch.equal(*pair) for pair in zip(*both))
        begins = [offsets(one).tolist() for one in lengths]
        exact = []
        for b in range(batch):
            rows = [x[begins[at][b] : begins[at][b + 1]] if packed else x[b] for at, x in enumerate((q, k))]
            exact.append(by_definition(*(x.detach() for x in rows), mask, sink, options["softcap"]))
        of_rows = torch.cat([one[0] for one in exact], 1) if packed else torch.stack([one[0] for one in exact])
        if "row_max" in wanted:
            close(row_max, of_rows, 2e-5)
        if "head_max" in wanted:
            flat = of_rows if packed else of_rows.transpose(0, 1).flatten(1)
            close(head_max, flat.amax(1) if flat.shape[1] else torch.full((heads,), -torch.inf), 2e-5)
        if "key_sum" in wanted:
            for b, (_, sums) in enumerate(exact):
                close(key_sum[b, :, : sums.shape[1]], sums, 1e-4)
                assert (key_sum[b, :, sums.shape[1] :] == 0).all()
        # NumPy's interface writes to the caller's arrays.
        arrays = {name: numpy.full(small[name].shape, 9.0, numpy.float32) for name in wanted}
        lists = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        fmha.attention(*(x.detach().numpy() for x in (q, k, v)), **lists, **arrays)
        again = {name: torch.full_like(small[name], 9.0) for name in wanted}
        fmha.attention_out(torch.empty_like(o), *(x.detach() for x in (q, k, v)), **options, **again)
        for name in wanted:
            assert torch.equal(torch.from_numpy(arrays[name]), small[name]) and torch.equal(again[name], small[name])


def test_they_go_with_masks_as_data_and_functions():
    q, k, v = tensors(b=1, sq=9, sk=13)
    bits = torch.rand(1, 1, 9, 13) < 0.6
    row_max = torch.empty(1, 4, 9)
    fmha.attention(q, k, v, mask=fmha.MaskBits.of(bits), score_code="s * 2", row_max=row_max)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.repeat_interleave(2, 2).double()) * 0.5
    close(row_max, scores.masked_fill(~bits, -torch.inf).amax(-1), 2e-5)


def test_flex_attentions_max_scores_are_torchs():
    q, k, v = (torch.randn(2, 3, 17, 16) for _ in range(3))
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    double = lambda score, b, h, q_idx, kv_idx: score * 2
    mask = torchs.create_block_mask(causal, None, None, 17, 17, device=DEVICE)
    request = torchs.AuxRequest(max_scores=True)
    if "max_scores" not in torchs.AuxRequest._fields:
        pytest.skip("this torch has no max_scores")
    for score_mod in (None, double):
        o, aux = flex.flex_attention(q, k, v, score_mod, mask, return_aux=request)
        scores = q.double() @ k.double().mT / 4 * (1 if score_mod is None else 2)
        close(aux.max_scores, scores.masked_fill(~torch.ones(17, 17).tril().bool(), -torch.inf).amax(-1), 2e-5)
        assert aux.lse is None and torch.equal(o, flex.flex_attention(q, k, v, score_mod, mask))


def test_a_compiled_call_writes_them():
    q, k, v = tensors(b=1, sq=5, sk=7)

    def step(q, k, v):
        head_max = torch.empty(4)
        return fmha.attention(q, k, v, head_max=head_max), head_max

    o, head_max = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v)
    wanted = step(q, k, v)
    assert torch.equal(o, wanted[0]) and torch.equal(head_max, wanted[1])


def test_what_is_wrong_is_named():
    q, k, v = tensors(b=2, sq=5, sk=7)
    cases = [
        (RuntimeError, "^row_max has shape .2, 4, 6., not .2, 4, 5.", dict(row_max=torch.empty(2, 4, 6))),
        (RuntimeError, "^head_max has shape .2., not .4.", dict(head_max=torch.empty(2))),
        (RuntimeError, "^key_sum is of float64, not of float32", dict(key_sum=torch.empty(2, 4, 7).double())),
        (RuntimeError, "^key_sum is not contiguous", dict(key_sum=torch.empty(2, 7, 4).mT)),
        (TypeError, "^head_max: 3 is no tensor", dict(head_max=3)),
        (ValueError, "^head_max requires a gradient", dict(head_max=torch.empty(4, requires_grad=True))),
        (RuntimeError, "^o overlaps|row_max", dict(row_max=q.view(-1)[:40].view(2, 4, 5))),
    ]
    for kind, said, given in cases:
        with pytest.raises(kind, match=said):
            fmha.attention(q, k, v, **given)
    read_only = numpy.zeros(4, numpy.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="^head_max is read-only"):
        fmha.attention(*(x.numpy() for x in (q, k, v)), head_max=read_only)
