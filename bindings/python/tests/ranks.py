"""Ranks of a process group on the CPU: each holds its rows of every case against one process that has all of them.

``ranks.py SIZE FOLDER``: this process imports torch once and forks the ranks.
"""

import rank_processes
import torch
import torch.distributed as dist

import fmha
import fmha.dist as ranks


def attend(function, tensors, dout, **options):
    """O, LSE, and the gradients of the tensors."""
    tensors = [None if x is None else x.detach().requires_grad_() for x in tensors]
    q, k, v, sink = tensors
    o, lse = function(q, k, v, sink=sink, return_lse=True, **options)
    o.backward(dout)
    return [o.detach(), lse.detach(), *(None if x is None else x.grad for x in tensors)]


def case(name, partition="zig_zag", partition_k=None, tolerance=1e-4, sq=24, sk=None, heads=(4, 2), dim_v=8, **given):
    """One call of a rank and of one process: equal within the tolerance."""
    size = dist.get_world_size()
    sk, over, dim = sk or sq, dict(given.pop("over", {})), given.pop("dim", 8)
    partition_k = partition if partition_k is None else partition_k
    dtype, cu, sinks = given.pop("dtype", torch.float32), given.pop("cu", None), given.pop("sinks", False)
    batch, rows_axis = (1, 0) if cu else (2, 1)
    generator = torch.Generator().manual_seed(len(name))

    def noise(rows, heads, dim):
        x = torch.randn(batch, rows, heads, dim, generator=generator).to(dtype)
        return x[0] if cu else x

    q, k, v = noise(sq, heads[0], dim), noise(sk, heads[1], dim), noise(sk, heads[1], dim_v)
    dout = noise(sq, heads[0], dim_v)
    sink = torch.randn(heads[0], generator=generator) if sinks else None

    def mine(x, partition, axis=rows_axis):
        if isinstance(partition, str):
            return ranks.shard(x, axis, partition=partition)
        runs = [x.narrow(axis, a, b - a) for a, b in partition[dist.get_rank()]]
        return torch.cat(runs or [x.narrow(axis, 0, 0)], axis)

    one = dict(given)
    if cu:
        offsets = torch.tensor(cu, dtype=torch.int32)
        longest = max(b - a for a, b in zip(cu, cu[1:]))
        one.update(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
        over.update(cu_seqlens_q=cu, cu_seqlens_k=offsets)
    elif sq % size or sk % size:
        over.update(seqlen_q=sq, seqlen_k=sk)
    over.update(partition=partition, partition_k=partition_k, **given)
    if one.get("causal"):
        one["mask"] = "causal"
    one.pop("causal", None)
    wanted = attend(fmha.attention, (q, k, v, sink), dout, **one)
    own = [mine(q, partition), mine(k, partition_k), mine(v, partition_k)]
    if partition == "replicated":
        with torch.no_grad():
            got = [*ranks.attention(*own, sink=sink, return_lse=True, **over)]
    else:
        got = attend(ranks.attention, (*own, sink), mine(dout, partition), **over)
    lse_axis = 1 if cu else 2
    cut = [
        mine(wanted[0], partition),
        mine(wanted[1], partition, lse_axis),
        mine(wanted[2], partition),
        mine(wanted[3], partition_k),
        mine(wanted[4], partition_k),
        wanted[5],
    ]
    for what, a, b in zip(("o", "lse", "dq", "dk", "dv", "dsink"), got, cut):
        if b is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {what} {a.shape} {a.dtype}, not {b.shape}"
            off = (a.float() - b.float()).abs().max().item() if a.numel() else 0.0
            assert off <= tolerance, f"{name}: {what} is off by {off}"


def biased(name, sq, scheme, sk=10):
    """A bias of this rank's queries, of which some ranks have none, forward and backward, and without LSE."""
    generator = torch.Generator().manual_seed(sq)
    q, k, v = (torch.randn(2, rows, 2, 8, generator=generator) for rows in (sq, sk, sk))
    bias = torch.randn(1, 2, sq, sk, generator=generator)
    dout = torch.randn(2, sq, 2, 8, generator=generator)
    wanted = attend(fmha.attention, (q, k, v, None), dout, bias=bias)
    own = [ranks.shard(q), ranks.shard(k), ranks.shard(v), None]
    got = attend(
        ranks.attention, own, ranks.shard(dout), bias=ranks.shard(bias, 2), seqlen_q=sq, seqlen_k=sk, scheme=scheme
    )
    for what, a, b, dim in zip(("o", "lse", "dq", "dk", "dv"), got, wanted, (1, 2, 1, 1, 1)):
        torch.testing.assert_close(a, ranks.shard(b, dim), atol=1e-4, rtol=1e-4, msg=lambda m: f"{name}: {what}: {m}")


def cases(size):
    case("causal, grouped heads", causal=True)
    case("all keys, plan kept", mask=None)
    case("uneven rows", sq=37, partition="contiguous", mask="b:9,0", dim=16)
    case("more keys than queries", sq=24, sk=40, mask="b:30,0", softmax_scale=0.3, softcap=5.0)
    case("packed sequences", sq=41, cu=[0, 13, 13, 30, 41], causal=True)
    case("dropout", p_drop=0.2, seed=(1 << 63) + 5, offset=7, causal=True)
    case("sinks and slopes", sinks=True, causal=True, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    case("bf16", dtype=torch.bfloat16, causal=True, tolerance=0.05, dim_v=16)
    case("ring", causal=True, over=dict(scheme="ring"), deterministic=True)
    case("ulysses", heads=(8, 4), causal=True, over=dict(scheme="ulysses"))
    runs = [[(2 * r, 2 * r + 2), (2 * size + 3 * r, 2 * size + 3 * r + 3)] for r in range(size)]
    case("runs of one's own", sq=5 * size, partition=runs, causal=True)
    for sq in (1, size - 1):
        for scheme in ("gather", "ring", "ulysses", None):
            heads = (8, 4) if scheme == "ulysses" else (4, 2)
            case(f"{sq} queries, {scheme}", sq=sq, sk=9, causal=True, heads=heads, over=dict(scheme=scheme))
            case(f"{sq} rows, {scheme}", sq=sq, causal=True, sinks=True, heads=heads, over=dict(scheme=scheme))
    case("few packed rows", sq=2, cu=[0, 1, 2], causal=True)
    case("few keys", sq=24, sk=1, mask=None)
    case("a split cache of a key", sq=1, sk=1, partition="replicated", partition_k="contiguous", mask=None)
    few = [[(0, 5)]] + [[] for _ in range(size - 1)]
    case("one rank has all queries", sq=5, sk=12, partition=few, partition_k="zig_zag", causal=True)
    for scheme in ("gather", "ring", None):
        biased("a bias of few queries", 1, scheme)
        biased("a bias of more", size + 1, scheme)
    case("a split cache", sq=1, sk=33, partition="replicated", partition_k="contiguous", mask="b:-1,0")


def alike(text):
    """The same on every rank."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    assert len(set(said)) == 1, said
    return text


def refused_at_once(leaf, x):
    """What a call says before it runs, on every rank alike: its own error, or another rank's that came first."""

    def differentiated_forward():
        with torch.autograd.forward_ad.dual_level():
            ranks.attention(torch.autograd.forward_ad.make_dual(x, x), x, x)

    def asked_by_the_context():
        with fmha.row_invariant():
            ranks.attention(leaf, x, x)

    for call, words in (
        (differentiated_forward, "q has a tangent"),
        (lambda: torch.jit.trace(lambda q: ranks.attention(q, x, x), (x,)), "dist.attention is not traced"),
        (asked_by_the_context, "row_invariant True is not kept by gradients"),
        (lambda: ranks.attention(leaf, x, x, batch_invariant=True), "batch_invariant True is not kept by gradients"),
    ):
        try:
            call()
        except (NotImplementedError, ValueError, fmha.FmhaError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"taken: {words}")
        dist.barrier()
    # Queries that are a negative view must be read with their sign, and so must their gradient.
    negative = torch._neg_view(leaf)
    o = ranks.attention(negative, x, x)
    assert torch.equal(o, ranks.attention(-x, x, x))
    wanted, of_o = (-x).requires_grad_(), torch._neg_view(x)
    (found,) = torch.autograd.grad(o, leaf, of_o)
    (exact,) = torch.autograd.grad(ranks.attention(wanted, x, x), wanted, -x)
    assert torch.equal(found, -exact)


def refusals(size):
    rank = dist.get_rank()
    x = torch.randn(1, 4, 2, 8)
    for options, words in (
        (dict(mask="b:3,0" if rank == 1 else None), "rank 1, mask"),
        (dict(seqlen_q=4 * size + (rank == 1)), "rank 1"),
        (dict(scheme="star"), "scheme `star` is none of"),
        (dict(p_drop=1.5, seed=1), "p_drop"),
    ):
        try:
            ranks.attention(x, x, x, **options)
        except fmha.FmhaError as error:
            assert words in alike(str(error)), error
        else:
            raise AssertionError(f"{options}: taken")
    try:
        ranks.attention(x, x, x, p_drop=0.5)
    except (ValueError, fmha.FmhaError) as error:
        assert "seed: none is given beside p_drop 0.5" in str(error), error
    else:
        raise AssertionError("dropout without a seed is taken")
    leaf = x.clone().requires_grad_()
    refused_at_once(leaf, x)
    (gradient,) = torch.autograd.grad(ranks.attention(leaf, x, x).sum(), leaf, create_graph=True)
    try:
        torch.autograd.grad(gradient.sum(), leaf)
    except NotImplementedError as error:
        assert "q: attention has no second derivative" in str(error), error
    else:
        raise AssertionError("a second derivative is taken")
    # The barrier keeps a rank's next call, which fails, apart from this call on a slower rank.
    dist.barrier()
    # A rank with an argument of a wrong type raises its own exception, and the other ranks report it.
    try:
        ranks.attention(x, x, x, softmax_scale="x" if rank == 0 else None)
    except TypeError as error:
        assert rank == 0 and "softmax_scale" in str(error)
    except fmha.FmhaError as error:
        assert rank != 0 and "rank 0, arguments: TypeError: softmax_scale" in str(error), error
    else:
        raise AssertionError("a text is taken for a number")
    # The next call sets up the group again.
    case("after errors", causal=True)


def program(rank, size):
    cases(size)
    refusals(size)
    # The group has only some of the ranks.
    pair = dist.new_group([size - 2, size - 1])
    if rank >= size - 2:
        assert ranks.rows(7, pair) == ([(0, 2), (6, 7)] if rank == size - 2 else [(2, 4), (4, 6)])
        x = torch.full((1, 3, 1, 4), float(rank))
        assert torch.allclose(ranks.attention(x * 0, x * 0, x, group=pair), torch.full_like(x, size - 1.5))
        text = ranks.explain(x, x, x, group=pair, causal=True)
        assert "scheme" in text and "of 2" in text, text
    ranks.leave(pair if rank >= size - 2 else None)
    dist.barrier()
    ranks.leave()


rank_processes.main(program)
