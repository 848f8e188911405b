"""What torch checks of every implementation of its flash attention, written for this one.

The checks are those of ``FlashAttentionTestMixin`` (pytorch, ``test/nn/attention/_fa_test_common.py``), which torch's
own tests of FlashAttention 3 and 4 inherit; each test names the one whose matter it has. On a GPU they go through
``torch.nn.functional.scaled_dot_product_attention``, as torch's do. Torch asks for a flash kernel on GPUs alone: on the
CPU the same kernels stand under the CPU's key, and the operator that torch would call is called. Errors are taken
against float64, and may be twice those of torch's plain attention in the inputs' type.
"""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as registry

import fmha.sdpa
from reference import DEVICE

ON_CPU = DEVICE == "cpu"
DTYPES = [torch.float16, torch.bfloat16]
SEQLEN = 96 if ON_CPU else 512


@contextlib.contextmanager
def served():
    """While this library is torch's flash attention."""
    if ON_CPU:
        handle = fmha.sdpa._Handle("CPU")
        try:
            yield
        finally:
            handle.remove()
        return
    fmha.sdpa.activate()
    try:
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        fmha.sdpa.deactivate()


def flash(q, k, v, is_causal=False):
    if ON_CPU:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def math(q, k, v, is_causal=False):
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def tensors(dtype, head_dim, seqlen=SEQLEN):
    return [torch.randn(2, 4, seqlen, head_dim, dtype=dtype).requires_grad_() for _ in range(3)]


def same_rule(given, low, exact, what):
    """Twice the error of the plain algorithm in the type, and the type's own rounding of the largest number."""
    assert given.shape == exact.shape and torch.isfinite(given).all()
    errors = [(x.double() - exact).abs().max().item() for x in (given, low)]
    rounding = torch.finfo(given.dtype).eps * exact.abs().max().item()
    assert errors[0] <= 2 * errors[1] + rounding, f"{what}: {errors[0]:.2e}, plain {errors[1]:.2e}"


def compare(function, dtype, is_causal, head_dim):
    inputs = tensors(dtype, head_dim)
    exactly = [x.detach().double().requires_grad_() for x in inputs]
    exact, low = math(*exactly, is_causal), math(*inputs, is_causal)
    with served():
        given = function(*inputs, is_causal)
        dout = torch.randn_like(given)
        gradients = torch.autograd.grad(given, inputs, dout)
    same_rule(given, low, exact.detach(), "O")
    of_low = torch.autograd.grad(low, inputs, dout)
    of_exact = torch.autograd.grad(exact, exactly, dout.double())
    for name, *three in zip(("dQ", "dK", "dV"), gradients, of_low, of_exact):
        same_rule(*three, name)


def compiled():
    # Inductor would call a C++ compiler to compile one operator, and the passes before it are the same without it.
    return torch.compile(flash, fullgraph=True, backend="aot_eager" if ON_CPU else "inductor")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_outputs_and_gradients_are_as_good_as_maths(dtype, is_causal, head_dim):
    """``_assert_flash_matches_math``."""
    compare(flash, dtype, is_causal, head_dim)


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_they_are_as_good(is_causal):
    """``_test_compiled_sdpa_matches_math``, ``_test_compiled_sdpa_backward_matches_math``."""
    compare(compiled(), torch.bfloat16, is_causal, 64)


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_the_output_has_the_same_shape_strides_type_and_device(is_causal):
    """``_test_compiled_sdpa_metadata``; rows first in memory too, where a wrong fake has other strides."""
    for transposed in (False, True):
        inputs = [x.detach() for x in tensors(torch.bfloat16, 64)]
        if transposed:
            inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
        with served():
            eager, other = flash(*inputs, is_causal), compiled()(*inputs, is_causal)
        facts = [(x.shape, x.stride(), x.dtype, x.device) for x in (eager, other)]
        assert facts[0] == facts[1], transposed


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_output_lies_in_memory_as_the_query_does(order):
    """``_test_attention_preserves_query_layout``: every order of batch, head and row, other lengths for keys."""
    order = [*order, 3]
    back = [order.index(axis) for axis in range(4)]

    def laid_out(*shape):
        return torch.randn([shape[axis] for axis in order], dtype=torch.bfloat16).permute(back)

    q, k, v = laid_out(2, 3, 16, 64), laid_out(2, 3, 40, 64), laid_out(2, 3, 40, 64)
    with served():
        o = flash(q, k, v)
    assert o.shape == q.shape and o.permute(order).is_contiguous(), (q.stride(), o.stride())


def test_it_is_this_librarys_operator_that_runs_and_not_with_maths():
    """``_test_kernel_called``: forward and backward, by the names that torch's profiler has."""
    inputs = tensors(torch.float16, 64, 32)

    def names(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function(*inputs).sum().backward()
        return [event.name for event in profile.events()]

    with served():
        ran = names(flash)
    ours = sorted({name for name in ran if name.startswith("fmha::")})
    assert any("out" in name for name in ours) and any("backward" in name for name in ours), ran
    assert not [name for name in names(math) if name.startswith("fmha::")]


@pytest.mark.skipif(not hasattr(registry, "restore_flash_attention_impl"), reason="torch before 2.13 restores nothing")
def test_who_is_activated_next_removes_who_was_before():
    """``_test_multiple_activate_impl``, this library being one of those that come and go."""
    removed = []

    class Handle:
        def __init__(self, name):
            self.name = name

        def remove(self):
            removed.append(self.name)

    for name in ("first", "second"):
        registry.register_flash_attention_impl(name, register_fn=lambda name=name: Handle(name))
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
    try:
        for name in ("first", "fmha", "second", "fmha"):
            registry.activate_flash_attention_impl(name)
            assert registry.current_flash_attention_impl() == name
            # torch's table has this library's kernels only while the library is active.
            assert (fmha.sdpa._active is not None and fmha.sdpa._active.library is not None) == (name == "fmha")
        assert removed == ["first", "second"]
    finally:
        registry.restore_flash_attention_impl()
    assert fmha.sdpa._active is None or fmha.sdpa._active.library is None
