"""Lists of keys by fmha.attention, against the definition in float64, with gradients."""

from typing import Any, Dict, Iterator, Optional, Tuple

import numpy
import pytest
import torch

import fmha
from reference import DEVICE


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Tensors of a test are made on the device that the tests are run for."""
    with torch.device(DEVICE):
        yield


def defined(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    topk_length: Optional[torch.Tensor] = None,
    sink: Optional[torch.Tensor] = None,
    block: int = 1,
    causal: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """O and LSE in float64, a token and a kv head at a time."""
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    o, lse = [], []
    for b, i, h in ((b, i, h) for b in range(batch) for i in range(seqlen_q) for h in range(heads)):
        used = None if topk_length is None else int(topk_length[b] if topk_length.dim() == 1 else topk_length[b, i])
        entries = indices[b, i, h // group, :used].tolist()
        keys = [e * block + at for e in entries if e >= 0 for at in range(block) if e * block + at < seqlen_k]
        keys = [j for j in keys if not causal or j <= i + seqlen_k - seqlen_q]
        if not keys:
            o.append(torch.zeros(v.shape[-1], dtype=torch.float64) + 0 * q.sum())
            lse.append((torch.tensor(-torch.inf).double() if sink is None else sink[h].double()) + 0 * q.sum())
            continue
        scores = k[b, keys, h // group] @ q[b, i, h] * dim**-0.5
        whole = scores.logsumexp(0)
        if sink is not None:
            whole = torch.logaddexp(whole, sink[h].double())
        o.append((scores - whole).exp() @ v[b, keys, h // group])
        lse.append(whole)
    return torch.stack(o).reshape(batch, seqlen_q, heads, -1), torch.stack(lse).reshape(batch, seqlen_q, heads)


CASES: Dict[str, Dict[str, Any]] = {
    "lengths of sequences": {"lengths": 1},
    "lengths of tokens, a sink": {"lengths": 2, "sink": True},
    "blocks under a band": {"block": 8, "causal": True},
    "one list for all heads, in f32": {"shared": True, "dtype": torch.float32},
    "latent": {"dims": (576, 512), "heads": (20, 1)},
    "in one order": {"deterministic": True},
}


@pytest.mark.parametrize("name", CASES)
def test_lists_and_their_gradients_are_the_definition(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    dtype, block = case.get("dtype", torch.bfloat16), case.get("block", 1)
    (dim, dim_v), (heads, heads_kv) = case.get("dims", (64, 32)), case.get("heads", (4, 2))
    batch, seqlen_q, seqlen_k, topk = 2, 5, 50, 12
    q = torch.randn(batch, seqlen_q, heads, dim).to(dtype).requires_grad_()
    k = torch.randn(batch, seqlen_k, heads_kv, dim).to(dtype).requires_grad_()
    v = torch.randn(batch, seqlen_k, heads_kv, dim_v).to(dtype).requires_grad_()
    sink = torch.randn(heads, requires_grad=True) if "sink" in case else None
    indices = torch.randint(-2, seqlen_k // block + 2, (batch, seqlen_q, heads_kv, topk), dtype=torch.int32)
    indices[0, 1] = -1
    if case.get("shared"):
        indices = indices[:, :, :1].expand(-1, -1, heads_kv, -1)
    lengths = {
        0: None,
        1: torch.tensor([9, 400], dtype=torch.int32),
        2: torch.randint(-1, topk + 2, (batch, seqlen_q), dtype=torch.int32).clamp(0, topk),
    }[case.get("lengths", 0)]
    causal = case.get("causal", False)
    o, lse = fmha.attention(
        q,
        k,
        v,
        indices=indices,
        topk_length=lengths,
        index_block=block,
        causal=causal,
        sink=sink,
        deterministic=case.get("deterministic", False),
        return_lse=True,
    )
    exact, exact_lse = defined(q, k, v, indices, lengths, sink, block, causal)
    close = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(o.double(), exact, rtol=close, atol=close)
    torch.testing.assert_close(lse.transpose(1, 2).double(), exact_lse, rtol=1e-3, atol=1e-3)
    of_o = torch.randn(exact.shape)
    given = [x for x in (q, k, v, sink) if x is not None]
    found = torch.autograd.grad(o, given, of_o.to(o.dtype))
    wanted = torch.autograd.grad(exact, given, of_o.to(o.dtype).double())
    for gradient, exactly in zip(found, wanted):
        scale = float(exactly.abs().max()) + 1e-9
        error = (gradient.double() - exactly.double()).abs().max()
        assert float(error) / scale < close, name


def test_what_lists_do_not_go_with_is_refused_by_name() -> None:
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 9, 2, 16)
    indices = torch.zeros(1, 2, 2, 3, dtype=torch.int32)
    for keywords, error, text in (
        ({"topk_length": indices}, ValueError, "topk_length is given, but indices are None"),
        ({"indices": indices, "index_block": 0}, RuntimeError, "index_block 0"),
        ({"indices": indices, "score_code": "s + 1"}, NotImplementedError, "score_code is given beside indices"),
        ({"indices": indices[:, :1]}, RuntimeError, "indices has shape"),
        ({"indices": indices.long()}, RuntimeError, "indices is of int64"),
        ({"indices": indices, "topk_length": indices[0, 0, 0]}, RuntimeError, "topk_length has shape"),
    ):
        with pytest.raises(error, match=text):
            fmha.attention(q, k, k, **keywords)
    with pytest.raises(NotImplementedError, match="indices beside ndarray"):
        fmha.attention(*[numpy.zeros((1, 2, 2, 16), numpy.float32)] * 3, indices=numpy.zeros((1, 2, 2, 3), "i4"))
