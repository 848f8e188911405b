"""What only a device can show: its streams, graphs, allocator. Needs ``FMHA_TEST_DEVICE=cuda``."""

import pytest
import torch

import fmha
from reference import DEVICE, attention as by_definition, close, tensors, tolerance

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="a GPU is not here, or FMHA_TEST_DEVICE does not name it")

BF16 = torch.bfloat16


def big(s=512, b=2, grad=False):
    return tensors(b=b, sq=s, sk=s, hq=8, hk=2, d=128, dtype=BF16, grad=grad)


def test_the_fast_kernel_serves_16_bits_and_is_right():
    q, k, v = big(grad=True)
    assert "fallback" not in fmha.explain(q, k, v, mask="causal", allow_fallback=False).lower()
    o, lse = fmha.attention(q, k, v, mask="causal", return_lse=True, allow_fallback=False)
    twins = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = by_definition(*twins, mask=fmha.CAUSAL)
    close(o, wanted, tolerance(BF16))
    close(lse, wanted_lse, 2e-2)
    dout = torch.randn_like(o)
    for got, want in zip(torch.autograd.grad(o, (q, k, v), dout), torch.autograd.grad(wanted, twins, dout.double())):
        assert (got.double() - want).norm() <= 2e-2 * want.norm()


def test_work_goes_on_the_callers_stream():
    q, k, v = big()
    wanted = fmha.attention(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Long work is queued before the call on this stream alone, so attention on another stream would read zeros.
        late = torch.zeros_like(q)
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        o = fmha.attention(late, k, v)
        event = stream.record_event()
    assert not event.query()
    stream.synchronize()
    assert torch.equal(o, wanted)


def test_two_streams_share_a_plan_and_no_scratch():
    inputs = [big(s=1024) for _ in range(2)]
    wanted = [fmha.attention(*x, mask="causal") for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        got = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                got.append(fmha.attention(*x, mask="causal"))
        torch.cuda.synchronize()
        for a, b in zip(got, wanted):
            assert torch.equal(a, b)


def test_a_graph_replays_with_other_lengths():
    lengths = torch.tensor([100, 300], dtype=torch.int32)
    q, k, v = big(s=300)
    fmha.attention(q, k, v, seqused_k=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fmha.attention(q, k, v, seqused_k=lengths)
    for pair in ((100, 300), (7, 299), (300, 1)):
        lengths.copy_(torch.tensor(pair, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        for b in range(2):
            wanted, _ = by_definition(q[b : b + 1], k[b : b + 1, : pair[b]], v[b : b + 1, : pair[b]])
            close(o[b : b + 1], wanted, tolerance(BF16))


def test_a_graph_over_pages_replays_with_other_lengths_and_pages():
    """What a serving engine does with uniform batches: packed queries, lengths and block table change in place."""
    size, heads_kv = 16, 2
    pool = torch.randn(64, heads_kv, size, 2 * 128, dtype=BF16)
    k, v = pool.transpose(1, 2).split(128, dim=-1)
    q = torch.randn(3, 8, 128, dtype=BF16)
    starts, lengths = torch.arange(4, dtype=torch.int32), torch.tensor([5, 200, 77], dtype=torch.int32)
    table = torch.zeros(3, 20, dtype=torch.int32)
    o = torch.empty_like(q)
    call = dict(
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        seqused_k=lengths,
        block_table=table,
        max_seqlen_k=320,
        mask="causal",
    )
    fmha.attention_out(o, q, k, v, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fmha.attention_out(o, q, k, v, **call)
    for step in ((5, 200, 77), (6, 201, 78), (1, 320, 16)):
        lengths.copy_(torch.tensor(step, dtype=torch.int32))
        table.copy_(torch.randperm(64)[:60].view(3, 20).to(torch.int32))
        q.copy_(torch.randn_like(q))
        graph.replay()
        torch.cuda.synchronize()
        for b, length in enumerate(step):
            rows = [x[table[b].long()].reshape(-1, heads_kv, 128)[:length][None] for x in (k, v)]
            wanted, _ = by_definition(q[b][None, None], *rows)
            close(o[b][None, None], wanted, tolerance(BF16))


def test_a_training_step_in_a_graph_has_the_same_gradients():
    q, k, v = big(grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = torch.autograd.grad(fmha.attention(q, k, v, mask="causal", deterministic=True).sum(), (q, k, v))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(fmha.attention(q, k, v, mask="causal", deterministic=True).sum(), (q, k, v))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, wanted):
        assert torch.equal(a, b)


def test_memory_is_outputs_and_workspace_alone():
    q, k, v = big(s=2048)
    fmha.attention(q, k, v, mask="causal")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = fmha.attention(q, k, v, mask="causal")
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    outputs = o.numel() * 2
    lse = q.shape[0] * q.shape[2] * q.shape[1] * 4
    assert outputs <= kept <= outputs + 4096
    # No score matrix may be allocated: it would have 8 heads of 2048 by 2048.
    assert peak <= outputs + lse + (4 << 20)


def test_tensors_of_two_devices_are_refused():
    q, k, v = big()
    with pytest.raises(RuntimeError, match="k is on cpu, but q is on cuda:0|Expected all tensors"):
        fmha.attention(q, k.cpu(), v)


def test_sdpa_is_computed_here_when_it_is_activated():
    import fmha.sdpa
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v = (torch.randn(2, 8, 256, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = sdpa(q, k, v, is_causal=True)
        wanted = torch.autograd.grad(theirs.float().square().sum(), (q, k, v))
        fmha.sdpa.activate()
        try:
            ours = sdpa(q, k, v, is_causal=True)
            got = torch.autograd.grad(ours.float().square().sum(), (q, k, v))
        finally:
            fmha.sdpa.deactivate()
        again = sdpa(q, k, v, is_causal=True)
    assert not torch.equal(ours, theirs) and torch.equal(again, theirs)
    assert ours.stride() == theirs.stride()
    close(ours, theirs, tolerance(BF16))
    for a, b in zip(got, wanted):
        assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


def test_numpys_door_refuses_a_devices_tensor():
    from fmha import _dlpack, _arguments

    q, k, v = big()
    with pytest.raises((TypeError, RuntimeError, BufferError, ValueError)):
        _dlpack.attention(q, k, v, *_arguments.bind())
