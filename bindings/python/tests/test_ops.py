"""The operators under torch's own tools: opcheck, compile, export, threads, fork."""

import os
import threading

import pytest
import torch

import fmha
from fmha import _arguments, _torch
from reference import DEVICE, tensors

NUMBERS = _arguments.bind(mask="causal")[1]
NONE7 = (None,) * 7


def test_opcheck_forward_and_backward():
    q, k, v = tensors()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_torch.forward, (q, k, v, *NONE7, None, None, None, None, *NUMBERS), test_utils=tests)
    o, lse = fmha.attention(q, k, v, mask="causal", return_lse=True)
    torch.library.opcheck(_torch.backward, (o, q, k, v, o, lse, None, *NONE7, *NUMBERS), test_utils=tests)


def test_opcheck_with_outputs_and_cache():
    q, k, v = tensors()
    o, lse = torch.empty_like(q), torch.empty(2, 4, 7)
    schema = ("test_schema", "test_faketensor")
    torch.library.opcheck(_torch.forward_out, (q, k, v, *NONE7, None, None, None, None, None, o, lse, None, *NUMBERS),
                          test_utils=schema)
    used = torch.tensor([3, 4], dtype=torch.int32)
    new = torch.randn(2, 1, 2, 16)
    rest = (None, None, None, None)
    torch.library.opcheck(
        _torch.kvcache_op, (q[:, :1].contiguous(), k.clone(), v.clone(), new, new.clone(), *rest, None, None, None, None, None,
                          None, used, *rest, *NUMBERS, 0, 0, 0), test_utils=schema)
    torch.library.opcheck(_torch.combine_op, (torch.stack([o, o]), torch.stack([lse, lse]) * 0, *NUMBERS), test_utils=schema)


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
    compiled = torch.compile(lambda q, k, v: fmha.attention(q, k, v, mask="causal"), fullgraph=True, dynamic=True)
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
    import time
    for _ in range(300):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child hangs after 30 s")
