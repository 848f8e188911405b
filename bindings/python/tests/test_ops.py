"""The operators under torch's own tools: opcheck, compile, export, threads, fork."""

import os
import shutil
import sysconfig
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import fmha
from fmha import _arguments, _torch
from reference import DEVICE, appends_in_f32, tensors
from run import run_python

NUMBERS = _arguments.bind(mask="causal")[1]
NONE7 = (None,) * 7

#: Traces, and has autograd of what it traced: what an operator has to do with a compiler. Inductor's own code is
#: compiled in one test, since its headers take a minute of a busy machine.
TRACER = "aot_eager"


def test_opcheck_forward_and_backward():
    q, k, v = tensors()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_torch.forward, (q, k, v, *NONE7, None, None, None, None, *NUMBERS), test_utils=tests)
    o, lse = fmha.attention(q, k, v, mask="causal", return_lse=True)
    torch.library.opcheck(_torch.backward, (o, q, k, v, o, lse, None, *NONE7, *NUMBERS), test_utils=tests)


def test_opcheck_of_plain_calls_and_their_numbers():
    q, k, v = tensors()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    at = _torch._kept(NUMBERS)
    assert at == _torch._kept(NUMBERS) != _torch._kept(_arguments.bind()[1])
    torch.library.opcheck(_torch.plain, (q, k, v, at), test_utils=tests)
    o, lse = _torch.plain(q, k, v, at)
    wanted = _torch.forward(q, k, v, *NONE7, None, None, None, None, *NUMBERS)
    assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1])
    torch.library.opcheck(_torch.plain_o, (q, k, v, at), test_utils=tests)
    assert torch.equal(_torch.plain_o(q, k, v, at), o)
    torch.library.opcheck(_torch.plain_backward, (o, q, k, v, o, lse, None, at), test_utils=tests)
    for other in (-1, 1 << 40, 4095):
        with pytest.raises(RuntimeError, match=f"numbers {other} is none"):
            _torch.plain(q, k, v, other)


def test_what_no_kernel_computes_is_refused_and_not_answered():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="^k is on meta, but q is on"):
        fmha.attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="^v is on meta, but q is on"):
        fmha.attention(q, k, v.to("meta"), sink=torch.zeros(4))
    assert fmha.attention(*(x.to("meta") for x in (q, k, v))).is_meta
    with pytest.raises(RuntimeError, match="^v is missing"):
        fmha.attention(q, k, None)
    # Forward mode: an operator would drop the tangent, and a derivative be 0.
    for named, given in (("q", (q, k, v)), ("k", (q, k, v))):
        with pytest.raises(NotImplementedError, match=f"^{named} has a tangent"):
            at = "qkv".index(named)
            torch.func.jvp(lambda x: fmha.attention(*given[:at], x, *given[at + 1 :]), (given[at],), (given[at],))


def test_an_lse_that_nobody_asks_for_is_not_made(monkeypatch):
    q, k, v = tensors()
    grad = q.clone().requires_grad_()
    called = []
    for name in ("plain", "plain_o"):
        monkeypatch.setattr(_torch, name, lambda *x, name=name, op=getattr(_torch, name): called.append(name) or op(*x))
    for first, options in ((q, {}), (q, dict(return_lse=True)), (grad, {})):
        fmha.attention(first, k, v, **options)
    with torch.no_grad():
        fmha.attention(grad, k, v)
    fmha.attention(q, k, v, sink=torch.zeros(4))
    assert called == ["plain_o", "plain", "plain", "plain_o"]
    for first, rest, leaves_out in ((q, {}, True), (grad, {}, False), (q, dict(p_drop=0.1), False)):
        assert _torch.leaves_out_lse((first, k, v), *_arguments.bind(**rest)) == leaves_out


def test_where_no_more_numbers_are_kept_calls_go_on():
    run_python("""
import torch, fmha
from fmha import _torch
q, k, v = (torch.randn(1, 3, 1, 8, requires_grad=True) for _ in range(3))
for i in range(5000):
    o = fmha.attention(q, k, v, softmax_scale=i / 1000)
    if i in (1, 4999):
        wanted = torch.softmax(q[0, :, 0] @ k[0, :, 0].T * i / 1000, -1) @ v[0, :, 0]
        assert torch.allclose(o[0, :, 0], wanted, atol=1e-5)
        o.sum().backward()
assert len(_torch._KEPT) == len(_torch._SPELT) == 4096
""")


def test_opcheck_with_outputs_and_cache():
    q, k, v = tensors()
    o, lse = torch.empty_like(q), torch.empty(2, 4, 7)
    schema = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        _torch.forward_out, (q, k, v, *NONE7, None, None, None, None, None, o, lse, None, *NUMBERS), test_utils=schema
    )
    used = torch.tensor([3, 4], dtype=torch.int32)
    # In 16 bits, in which a GPU's kernels append too.
    q, k, v = tensors(dtype=torch.bfloat16)
    new = torch.randn(2, 1, 2, 16).bfloat16()
    rest = (None, None, None, None)
    torch.library.opcheck(
        _torch.kvcache_op,
        (
            q[:, :1].contiguous(),
            k.clone(),
            v.clone(),
            new,
            new.clone(),
            *rest,
            None,
            None,
            None,
            None,
            None,
            None,
            used,
            *rest,
            *NUMBERS,
            0,
            0,
            0,
        ),
        test_utils=schema,
    )
    torch.library.opcheck(_torch.add_parts_op, (torch.stack([o, o]), *NUMBERS), test_utils=schema)
    torch.library.opcheck(_torch.add_parts_to, (torch.stack([o, o]), o.clone(), *NUMBERS), test_utils=schema)
    torch.library.opcheck(
        _torch.combine_op, (torch.stack([o, o]), torch.stack([lse, lse]) * 0, *NUMBERS), test_utils=schema
    )


CAN_COMPILE = shutil.which(os.environ.get("CXX", "g++")) and Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler or no headers of Python: inductor builds nothing")
def test_a_compiled_function_has_the_same_bits_and_gradients():
    def model(q, k, v):
        o, lse = fmha.attention(q * 2, k, v, mask="causal", return_lse=True)
        return o.sum() + lse.sum()

    compiled = torch.compile(model, fullgraph=True)
    results = []
    for function in (model, compiled):
        inputs = tensors(grad=True)
        torch.manual_seed(0)
        inputs = tensors(grad=True)
        loss = function(*inputs)
        loss.backward()
        results.append([loss, *(x.grad for x in inputs)])
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_compiled_function_takes_other_lengths():
    compiled = torch.compile(
        lambda q, k, v: fmha.attention(q, k, v, mask="causal"), fullgraph=True, dynamic=True, backend=TRACER
    )
    for length in (3, 5, 9):
        q, k, v = tensors(sq=length, sk=length)
        assert torch.equal(compiled(q, k, v), fmha.attention(q, k, v, mask="causal"))


def test_an_exported_program_runs():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fmha.attention(q, k, v, mask="causal")

    inputs = tensors()
    program = torch.export.export(Model(), inputs)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))


def test_threads_share_plans_and_agree():
    inputs = [tensors(sq=n, sk=n + 3) for n in range(1, 9)]
    wanted = [fmha.attention(*x, mask="causal") for x in inputs]
    wrong = []

    def work():
        for _ in range(20):
            for x, want in zip(inputs, wanted):
                if not torch.equal(fmha.attention(*x, mask="causal"), want):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(DEVICE != "cpu" or not hasattr(os, "fork"), reason="a device does not outlive fork")
def test_a_child_after_fork_computes_too():
    q, k, v = tensors(sq=64, sk=64)
    wanted = fmha.attention(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(fmha.attention(q, k, v), wanted) else 1)
    for _ in range(300):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child hangs after 30 s")


@pytest.mark.parametrize("options", [dict(), dict(mask="causal", softcap=1.5), dict(bias=True, sink=True)], ids=str)
def test_gradcheck(options):
    """Torch's own differences, of the f32 kernel: the rounding of a difference is divided by its step."""
    q, k, v = (x.requires_grad_() for x in tensors(b=1, sq=3, sk=4, hq=2, hk=1, d=4))
    options = dict(options)
    extra = [name for name in ("bias", "sink") if options.pop(name, False)]
    leaves = [torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(2, requires_grad=True)] if extra else []

    def function(q, k, v, *rest):
        return fmha.attention(q, k, v, return_lse=True, **options, **dict(zip(extra, rest)))

    with warnings.catch_warnings():
        # It warns of inputs that are not float64.
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(function, (q, k, v, *leaves), eps=1e-2, atol=2e-3, rtol=2e-2, nondet_tol=0.0)


def test_a_gradient_is_not_differentiated_again_in_silence():
    q, k, v = tensors(grad=True)
    (grad,) = torch.autograd.grad(fmha.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        grad.sum().backward()


def test_the_lock_of_the_interpreter_is_free_meanwhile():
    q, k, v = tensors(b=1, sq=2000, sk=2000, hq=8, hk=8, d=64)
    fmha.attention(q, k, v)
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    fmha.attention(q, k, v)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(start < at < end for at in ticks) >= 2 or end - start < 0.01


def test_flash_attentions_functions_compile_too():
    from fmha import flash_attn

    def model(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True).square().sum()

    inputs = tensors(grad=True)
    wanted = torch.autograd.grad(model(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(model, fullgraph=True, backend=TRACER)(*inputs), inputs)
    for a, b in zip(got, wanted):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@appends_in_f32
def test_a_cache_that_a_compiled_step_writes_to_is_written():
    """The schema says what is written: a compiler that did not know would drop or reorder it."""

    def step(q, k, v, new, used):
        first = fmha.attention_with_kvcache(q, k, v, new, new, seqused_k=used)
        return first + k.sum() * 0, fmha.attention_with_kvcache(q, k, v, new * 2, new * 2, seqused_k=used + 1)

    q, k, v = tensors(sq=1, sk=8, hq=2)
    new, used = torch.randn(2, 1, 2, 16), torch.tensor([3, 5], dtype=torch.int32)
    caches = [[k.clone(), v.clone()] for _ in range(2)]
    wanted = step(q, *caches[0], new, used)
    got = torch.compile(step, fullgraph=True, backend=TRACER)(q, *caches[1], new, used)
    for a, b in zip((*got, *caches[1]), (*wanted, *caches[0])):
        assert torch.allclose(a, b, atol=1e-6)
    assert torch.equal(caches[1][0][0, 3], new[0, 0]) and torch.equal(caches[1][0][0, 4], new[0, 0] * 2)
