"""The loss that trains an indexer: against its definition in float64, by the library and by torch's operators."""

import pytest
import torch

import fmha
from fmha import _index_loss, sparse
from reference import DEVICE, attention


def by_definition(q, k, weights, indices, target):
    """KL divergences of lists, differentiable."""
    losses = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            at = [n for n, j in enumerate(indices[b, i].tolist()) if 0 <= j < k.shape[1]]
            p = target[b, i, at].double()
            if not at or p.sum() == 0:
                losses.append((q[b, i] * 0).sum())
                continue
            keys = k[b, indices[b, i, at].long()]
            scores = ((keys @ q[b, i].T).relu() * weights[b, i]).sum(-1)
            p = p / p.sum()
            losses.append((torch.where(p > 0, p * p.log(), 0) - p * scores.log_softmax(0)).sum())
    return torch.stack(losses).view(q.shape[:2])


def drawn(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    batch, seqlen_q, seqlen_k, heads, dim, topk = 2, 5, 19, 3, 8, 7
    q, k = torch.randn(batch, seqlen_q, heads, dim).to(dtype), torch.randn(batch, seqlen_k, dim).to(dtype)
    weights = torch.randn(batch, seqlen_q, heads).to(torch.float64 if dtype == torch.float64 else torch.float32)
    # The lists have absent and repeated entries, one has no keys, and one target has no weight.
    indices = torch.randint(-4, seqlen_k + 4, (batch, seqlen_q, topk), dtype=torch.int32)
    indices[0, 1] = -1
    indices[1, 2, 1:3] = indices[1, 2, 0] = 3
    target = torch.rand(batch, seqlen_q, topk).to(weights.dtype)
    target[0, 3] = 0
    target[1, 1, 0] = 0
    return q, k, weights, indices, target


def check(call, bound, **options):
    q, k, weights, indices, target = call
    given = [x.clone().requires_grad_() for x in (q, k, weights)]
    wide = [x.double().requires_grad_() for x in (q, k, weights)]
    loss = sparse.index_loss(*given, indices, target, **options)
    wanted = by_definition(*wide, indices, target)
    factors = torch.linspace(-1, 2, loss.numel()).view(loss.shape)
    (loss * factors).sum().backward()
    (wanted * factors.double()).sum().backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    for name, x, of in zip(("q", "k", "weights"), given, wide):
        assert x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad.double(), of.grad, rtol=bound, atol=bound, msg=lambda text: f"{name}: {text}")
    return loss


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_are_those_of_the_definition(seed, dtype, bound):
    options = {} if DEVICE == "cpu" else dict(allow_fallback=True)
    call = drawn(seed, dtype)
    loss = check(call, bound, **options)
    assert loss.dtype == torch.float32 and loss[0, 1] == 0 and loss[0, 3] == 0
    assert torch.equal(loss, sparse.index_loss(*call, **options))


@pytest.mark.skipif(DEVICE != "cpu", reason="the library's loss is the CPU's")
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torchs_defaults_change_no_loss(default):
    call = drawn(2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        check(call, 1e-5)
    finally:
        torch.set_default_dtype(before)


def test_torchs_operators_read_nothing_that_no_list_names():
    q, k, weights, indices, target = drawn(3)
    k, q = k.clone(), q.clone()
    indices = torch.where(indices == 0, -1, indices)
    k[:, 0], q[:, 1], indices[:, 1] = torch.nan, torch.nan, -1
    given = [x.clone().requires_grad_() for x in (q, k, weights)]
    _index_loss._Loss.apply(*given, indices, target, _index_loss._by_torch).sum().backward()
    assert not any(x.grad.isnan().any() for x in given)


def test_torchs_operators_compute_the_same(monkeypatch):
    monkeypatch.setattr(_index_loss, "_by_library", _index_loss._by_torch)
    # A small limit makes the loss gather some queries at a time.
    monkeypatch.setattr(_index_loss, "_GATHERED", 200)
    for seed in range(5):
        check(drawn(seed), 1e-5, allow_fallback=True)


def test_torchs_operators_serve_what_no_kernel_takes_and_no_fault(monkeypatch):
    said = "cuda:0 has no kernel for this problem: sm80_index_loss: dtype_q f32 is not bf16"

    def refuse(*_):
        raise fmha.FmhaError(said)

    monkeypatch.setattr(_index_loss, "_by_library", refuse)
    operands, wanted = drawn(4), (True, True, True, True)
    made = _index_loss._by_library_or_torch(*operands, None, wanted)
    for x, y in zip(made, _index_loss._by_torch(*operands, None, wanted)):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    said = "launch failed with 700: an illegal access"
    with pytest.raises(fmha.FmhaError, match="700"):
        _index_loss._by_library_or_torch(*operands, None, wanted)


def test_gradients_in_float64_are_finite_differences():
    q, k, weights, indices, target = drawn(7, torch.float64)
    given = [x.clone().requires_grad_() for x in (q, k, weights)]
    loss = lambda *operands: sparse.index_loss(*operands, indices, target, allow_fallback=True)
    assert torch.autograd.gradcheck(loss, given)
    assert loss(*given).dtype == torch.float64
    first = torch.autograd.grad(loss(*given).sum(), given[0], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_the_target_is_the_sum_of_attentions_probabilities(heads_kv, monkeypatch):
    monkeypatch.setattr(_index_loss, "_GATHERED", 500)
    q, k, v = torch.randn(2, 6, 4, 16), torch.randn(2, 9, heads_kv, 16), torch.randn(2, 9, heads_kv, 16)
    indices = torch.randint(-1, 9, (2, 6, 5), dtype=torch.int32)
    options = {} if DEVICE == "cpu" else dict(allow_fallback=True)
    lists = indices[:, :, None].expand(-1, -1, heads_kv, -1)
    _, lse = fmha.attention(q, k, v, indices=lists, return_lse=True, **options)
    target = sparse.index_target(q, k, lse, indices)
    # Lists name every key that a head sees, so each head's probabilities sum to 1.
    torch.testing.assert_close(target.sum(-1), torch.where((indices >= 0).any(-1), 4.0, 0.0))
    o, whole = attention(q, k, v)
    every = torch.arange(9, dtype=torch.int32).expand(2, 6, 9)
    # The identity matrix as V makes O the probabilities.
    p, _ = attention(q, k, torch.eye(9).view(1, 9, 1, 9).expand(2, 9, heads_kv, 9))
    torch.testing.assert_close(sparse.index_target(q, k, whole, every).double(), p.sum(2), rtol=1e-5, atol=1e-5)


def test_an_indexer_learns_which_keys_attention_looks_at():
    """A newcomer's training loop: lists of all keys up to each query, and an indexer that starts at random."""
    options = {} if DEVICE == "cpu" else dict(allow_fallback=True)
    q, k, v = (torch.randn(1, 24, 2, 16) * 1.5 for _ in range(3))
    _, lse = fmha.attention(q, k, v, causal=True, return_lse=True, **options)
    every = torch.arange(24, dtype=torch.int32)
    lists = torch.where(every[None, None] <= every[None, :, None], every, -1).expand(1, 24, 24).int().contiguous()
    target = sparse.index_target(q, k, lse, lists)
    parameters = [torch.randn(1, 24, 4, 16), torch.randn(1, 24, 16), torch.randn(1, 24, 4)]
    parameters = [x.mul(0.3).requires_grad_() for x in parameters]
    optimizer = torch.optim.Adam(parameters, lr=0.05)

    def found():
        """Part of attention's weight that lists of 4 keys have."""
        chosen = sparse.index_lists(*(x.detach() for x in parameters), 4, **options)
        return sparse.index_target(q, k, lse, chosen).sum().item() / (2 * 24)

    before, losses = found(), []
    for _ in range(60):
        loss = sparse.index_loss(*parameters, lists, target, **options).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    best = target.topk(4).values.sum().item() / (2 * 24)
    assert losses[-1] < 0.3 * losses[0]
    assert found() > max(before + 0.05, 0.9 * best)


def test_what_is_wrong_is_named():
    q, k, weights, indices, target = drawn(1)
    for error, said, call in [
        (TypeError, "q: list is no tensor", ([], k, weights, indices, target)),
        (ValueError, "k has 2 axes", (q, k[0], weights, indices, target)),
        (ValueError, "k has shape (2, 19, 7), not (2, 19, 8)", (q, k[..., :7], weights, indices, target)),
        (ValueError, "weights has shape (2, 5, 2), not (2, 5, 3)", (q, k, weights[..., :2], indices, target)),
        (TypeError, "weights is of torch.float16", (q, k, weights.half(), indices, target)),
        (TypeError, "k is of torch.float8_e4m3fn", (q, k.to(torch.float8_e4m3fn), weights, indices, target)),
        (TypeError, "indices is of torch.int64", (q, k, weights, indices.long(), target)),
        (ValueError, "target has shape (2, 5, 6), not (2, 5, 7)", (q, k, weights, indices, target[..., :6])),
        (ValueError, "target requires a gradient", (q, k, weights, indices, target.clone().requires_grad_())),
        (ValueError, "q has 0 heads", (q[:, :, :0], k, weights[..., :0], indices, target)),
    ]:
        with pytest.raises(error) as refusal:
            sparse.index_loss(*call)
        assert said in str(refusal.value)
    with pytest.raises(NotImplementedError, match="q is of float64: no kernel computes an indexer's loss in float64"):
        sparse.index_loss(*drawn(1, torch.float64))
    nowhere = [x.to("meta") for x in drawn(1)]
    with pytest.raises(NotImplementedError, match="q is on meta: no kernel computes an indexer's loss in meta"):
        sparse.index_loss(*nowhere)
    lse, two_heads = torch.zeros(2, 4, 5), k[:, :, None].expand(-1, -1, 2, -1)
    for said, call in [
        ("lse has shape (2, 4, 5), not (2, 3, 5)", (q, k[:, :, None], lse, indices)),
        ("num_heads_q 3 is not a multiple of num_heads_kv 2", (q, two_heads, lse[:, :3], indices)),
    ]:
        with pytest.raises(ValueError) as refusal:
            sparse.index_target(*call)
        assert said in str(refusal.value)


def test_calls_without_keys_or_queries_have_losses_of_zero():
    for q, k, topk in [((1, 3, 2, 4), (1, 0, 4), 5), ((1, 0, 2, 4), (1, 6, 4), 5), ((0, 3, 2, 4), (0, 6, 4), 5)]:
        indices = torch.zeros(*q[:2], topk, dtype=torch.int32)
        given = [torch.randn(shape, requires_grad=True) for shape in (q, k, q[:3])]
        options = {} if DEVICE == "cpu" else dict(allow_fallback=True)
        loss = sparse.index_loss(*given, indices, torch.rand(indices.shape), **options)
        assert loss.shape == q[:2] and loss.sum() == 0
        loss.sum().backward()
        assert all(x.grad.abs().sum() == 0 for x in given)
    q, k, lse = torch.ones(1, 2, 1, 4), torch.ones(1, 0, 1, 4), torch.zeros(1, 1, 2)
    assert sparse.index_target(q, k, lse, indices.new_zeros(1, 2, 3)).sum() == 0
