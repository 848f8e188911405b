"""Torch's flash attention operators under this library's kernels. Torch asks for them on GPUs alone, so here they are
put under the CPU's key and called by name; ``test_cuda.py`` has what torch's own functions do with them."""

import pytest
import torch

import fmha
import fmha.sdpa
from reference import DEVICE, attention as by_definition, close, offsets, tensors, tolerance

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="torch has kernels of its own on a GPU: test_cuda.py")

aten = torch.ops.aten


@pytest.fixture
def kernels():
    handle = fmha.sdpa._Handle("CPU")
    yield
    handle.remove()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_calls_and_their_gradients(kernels, causal):
    q, k, v = (x.transpose(1, 2) for x in tensors(sq=9, sk=9, hk=4, grad=True))
    o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=0.3)
    twins = [x.detach().transpose(1, 2).double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = by_definition(*twins, mask=fmha.mask("t" if causal else None), softmax_scale=0.3)
    close(o.transpose(1, 2), wanted, tolerance(torch.float32))
    close(lse, wanted_lse, 1e-5)
    assert o.stride() == q.stride()
    dout = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), dout)
    for a, b in zip(got, torch.autograd.grad(wanted, twins, dout.transpose(1, 2).double())):
        close(a.transpose(1, 2), b, 2e-5)


def test_rows_first_and_packed(kernels):
    q, k, v = tensors(grad=True)
    call = dict(dropout_p=0.0, is_causal=True, return_debug_mask=False)
    o, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, 7, 11, **call)
    close(o, by_definition(q, k, v, mask=fmha.CAUSAL)[0], tolerance(torch.float32))
    cu_q, cu_k = offsets([7, 7]), offsets([11, 11])
    rows = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    packed, packed_lse, state, *_ = aten._flash_attention_forward(*rows, cu_q, cu_k, 7, 11, **call)
    assert torch.equal(packed, o.flatten(0, 1)) and packed_lse.shape == (4, 14)
    dout = torch.randn_like(packed)
    got = torch.autograd.grad(packed, rows, dout)
    for a, b in zip(got, torch.autograd.grad(fmha.attention(q, k, v, mask="causal"), (q, k, v), dout.view_as(q))):
        close(a, b.flatten(0, 1).double(), 1e-5)
    windowed, *_ = aten._flash_attention_forward(
        q, k, v, None, None, 7, 11, 0.0, False, False, window_size_left=2, window_size_right=0
    )
    close(windowed, by_definition(q, k, v, mask=fmha.mask("b:2,0"))[0], tolerance(torch.float32))


def test_dropout_of_backward_is_forwards(kernels):
    q, k, v = (x.transpose(1, 2) for x in tensors(sq=9, sk=9, hk=4, grad=True))
    torch.manual_seed(3)
    o, _, _, _, _, _, seed, _, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.4, False, False)
    again = fmha.attention(*(x.transpose(1, 2) for x in (q, k, v)), p_drop=0.4, seed=int(seed[0]))
    assert torch.equal(o.transpose(1, 2), again)
    dout = torch.randn_like(o)
    for a, b in zip(
        torch.autograd.grad(o, (q, k, v), dout), torch.autograd.grad(again, (q, k, v), dout.transpose(1, 2))
    ):
        assert torch.equal(a, b)


def test_what_comes_back_is_what_torch_tells_its_compiler(kernels):
    inputs = [x.transpose(1, 2) for x in tensors(sq=9, sk=9, hk=4)]
    given, told = (
        aten._scaled_dot_product_flash_attention(*(x.to(device) for x in inputs), 0.0, True, False)
        for device in ("cpu", "meta")
    )
    kinds = [[(x.shape, x.dtype) if torch.is_tensor(x) else x for x in outputs] for outputs in (given, told)]
    assert kinds[0] == kinds[1]
    assert (given[0].stride(), given[1].stride()) == (told[0].stride(), told[1].stride())


@pytest.mark.parametrize("heads_first", [False, True])
def test_compiled_it_has_the_results_of_eager(kernels, heads_first):
    def attention(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]

    inputs = [x.transpose(1, 2) for x in tensors(sq=9, sk=9, hk=4)]
    inputs = [(x.contiguous() if heads_first else x).requires_grad_() for x in inputs]
    results = []
    for function in (attention, torch.compile(attention, fullgraph=True)):
        o = function(*inputs)
        results.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*results))


def test_the_registry_knows_it_and_forgets_it():
    from torch.nn import attention as registry

    assert "fmha" in registry.list_flash_attention_impls()
    fmha.sdpa.activate()
    try:
        assert registry.current_flash_attention_impl() == "fmha"
        fmha.sdpa.activate()
    finally:
        fmha.sdpa.deactivate()
    assert fmha.sdpa._active is None
    if hasattr(registry, "restore_flash_attention_impl"):
        assert registry.current_flash_attention_impl() is None


def test_rows_behind_the_last_offset_are_zero(kernels):
    q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
    first = torch.tensor([0, 3, 7], dtype=torch.int32)
    # With this setting torch fills new tensors with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        call = dict(dropout_p=0.0, is_causal=True, return_debug_mask=False)
        o, lse, *rest = torch.ops.aten._flash_attention_forward(q, k, v, first, first, 4, 4, **call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not o[7:].any() and not lse[:, 7:].any() and o[:7].all()
