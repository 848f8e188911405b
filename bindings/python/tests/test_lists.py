"""Lists of keys by fmha.attention, against the definition in float64, with gradients."""

from typing import Any, Dict, Optional, Tuple

import numpy
import pytest
import torch

import fmha
import fmha.flash_mla


pytestmark = pytest.mark.usefixtures("on_the_device")


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


def drawn_lists() -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(1, 3, 4, 16), torch.randn(1, 9, 2, 16), listed()


def listed() -> torch.Tensor:
    return (torch.arange(24) * 5 % 9).int().view(1, 3, 2, 4)


def by_flash_mla(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return fmha.flash_mla.flash_mla_sparse_fwd(q[0], k[0], listed()[0], 0.3, 16)[0]


def by_attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return fmha.attention(q, k, k, indices=listed())


@pytest.mark.parametrize("call", [by_attention, by_flash_mla])
def test_a_tracer_of_a_call_with_lists_is_refused_by_name(call: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, _ = drawn_lists()
    with pytest.raises(NotImplementedError, match="indices: .* torch.jit.trace"):
        torch.jit.trace(call, (q, k))
    for pre_dispatch in (False, True):
        with pytest.raises(NotImplementedError, match="indices: .* ProxyTorchDispatchMode"):
            make_fx(call, pre_dispatch=pre_dispatch)(q, k)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with pytest.raises(NotImplementedError, match="indices: .* FakeTensorMode"):
            call(mode.from_tensor(q), mode.from_tensor(k))
    with pytest.raises(NotImplementedError, match="indices: .* torch.func"):
        torch.func.vmap(call)(q[None], k[None])
    # A compiler does not trace into the call.
    assert torch.equal(torch.compile(call, backend="eager")(q, k), call(q, k))


def test_a_mode_that_watches_alone_may_watch_a_call_with_lists() -> None:
    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    q, k, _ = drawn_lists()
    wanted = by_attention(q, k)
    with Watching():
        assert torch.equal(by_attention(q, k), wanted)


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("call, moves", [(by_attention, False), (by_attention, True), (by_flash_mla, False)])
def test_a_tangent_beside_lists_is_refused_by_name(call: Any, moves: bool, name: str) -> None:
    fa = torch.autograd.forward_ad
    q, k, _ = drawn_lists()
    with fa.dual_level():
        given = {"q": q.requires_grad_(moves), "k": k}
        given[name] = fa.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
            call(**given)


def test_a_negative_view_is_its_numbers_in_every_tensor_beside_lists() -> None:
    q, k, indices = drawn_lists()
    sink, lengths = torch.randn(4), torch.tensor([3], dtype=torch.int32)
    of_o, of_lse = torch.randn(1, 3, 4, 16), torch.randn(1, 4, 3)
    given = dict(q=q, k=k, v=k.flip(1), sink=sink, indices=indices, topk_length=lengths, dout=of_o, dlse=of_lse)

    def run(view: Any) -> Any:
        call = {name: view(x) for name, x in given.items()}
        dout = call.pop("dout"), call.pop("dlse")
        moved = [call[name].requires_grad_() for name in ("q", "k", "v", "sink")]
        with torch.no_grad():
            alone = fmha.attention(**call)
        results = fmha.attention(**call, return_lse=True)
        return (alone, *results, *torch.autograd.grad(results, moved, dout))

    wanted, found = (run(view) for view in (torch.clone, lambda x: torch._neg_view(-x)))
    for at, (x, exact) in enumerate(zip(found, wanted)):
        assert torch.equal(x.resolve_neg(), exact), at
    views = [torch._neg_view(-x) for x in (q, k)]
    assert torch.equal(by_flash_mla(*views), by_flash_mla(q, k))


def test_packed_lengths_are_of_tokens_where_there_are_as_many_as_sequences() -> None:
    torch.manual_seed(6)
    q, k, indices = torch.randn(3, 4, 16), torch.randn(9, 2, 16), torch.randint(0, 3, (3, 2, 4), dtype=torch.int32)
    # The three sequences have two tokens, none and one.
    offsets = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    of_keys = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    lengths = torch.tensor([1, 2, 4], dtype=torch.int32)
    packed = dict(cu_seqlens_q=offsets, cu_seqlens_k=of_keys, max_seqlen_q=2, max_seqlen_k=3)
    o = fmha.attention(q, k, k, indices=indices, topk_length=lengths, **packed)
    for token, first in ((0, 0), (1, 0), (2, 6)):
        keys = k[None, first : first + 3]
        wanted, _ = defined(q[None, None, token], keys, keys, indices[None, None, token], lengths[None, None, token])
        torch.testing.assert_close(o[token].double(), wanted[0, 0], rtol=1e-5, atol=1e-5)


# The type of Q decides which library's interface is used.
@pytest.mark.parametrize("name, wrong", [(x, w) for x in "qkv" for w in (None, [1], 0, 1) if x != "q" or w in (0, 1)])
def test_an_operand_of_another_kind_is_named(name: str, wrong: Any) -> None:
    given = dict(q=torch.randn(1, 8, 2, 16), k=torch.randn(1, 8, 2, 16), v=torch.randn(1, 8, 2, 16))
    if isinstance(wrong, int):
        wrong = given[name][(0,) * (4 - wrong)] if wrong else torch.tensor(1.0)
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        fmha.attention(**{**given, name: wrong}, indices=torch.zeros(1, 8, 2, 4, dtype=torch.int32))


@pytest.mark.parametrize("name, wrong", [("sm_scale", None), ("d_v", -3), ("d_v", 17), ("topk_length", 3), ("kv", [1])])
def test_an_argument_of_flash_mla_is_named(name: str, wrong: Any) -> None:
    indices = torch.zeros(4, 1, 2, dtype=torch.int32)
    given = dict(q=torch.randn(4, 2, 16), kv=torch.randn(8, 1, 16), indices=indices, sm_scale=1.0, d_v=8)
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        fmha.flash_mla.flash_mla_sparse_fwd(**{**given, name: wrong})
