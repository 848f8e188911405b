"""Masks as data and functions over ranks: drawn calls against float64 and one process, and what is refused.

``ranks_masks.py SIZE FOLDER``: `rank_processes.py` forks the ranks. All draw the same numbers.
"""

import random

import rank_processes
import torch
import torch.distributed as dist
from ranks_drawn import INF, close, with_gradients
from torch.nn.attention.flex_attention import create_block_mask

import fmha
import fmha.dist as ranks

BLOCK = 4


def distances(tables):
    return lambda s, b, h, q, k: s + tables["table"][h, (q - k).clamp(-3, 3) + 3]


def slopes(tables):
    return lambda s, b, h, q, k: torch.tanh(s / 4) * 4 + tables["slopes"][b, h] * (k - q)


def of_keys(tables):
    return lambda s, b, h, q, k: s * tables["factors"][k] + tables["slopes"][b, h]


def some(tables):
    return lambda b, h, q, k: (k % 3 != q % 2) | (h == 1)


def documents(tables):
    return lambda b, h, q, k: tables["ids"][b, q] == tables["ids"][b, k]


def near(tables):
    reach = 5
    return lambda b, h, q, k: (q - k <= reach) & (k - q <= reach)


class Drawn:
    """A call of the whole. Masks as data are `[B, Hq, Sq, Sk]` of bools here, hidden by each kind."""

    def __init__(self, seed, size):
        draw = random.Random(seed)
        noise = torch.Generator().manual_seed(seed)
        self.scheme = draw.choice((None, "gather", "ring", "ulysses", "decode"))
        self.kinds = draw.sample(("intervals", "bits", "lists", "score", "mask", "band"), draw.randint(1, 3))
        is_packed = self.scheme != "decode" and not {"lists", "bits"} & set(self.kinds) and draw.random() < 0.4
        # Runs of keys begin at a multiple of a word's bits or of a block.
        rows = 64 * size if "bits" in self.kinds else draw.choice((8, 16)) * size
        if not {"lists", "bits"} & set(self.kinds):
            rows += draw.randint(0, 7)
        self.partition = draw.choice(("zig_zag", "contiguous"))
        self.cu = None
        if is_packed:
            self.cu = [0, *sorted(draw.randint(0, rows) for _ in range(2)), rows]
        self.batch, self.heads, self.dim = draw.choice((1, 2)), (2 * size, size), 8
        self.sequences = [(0, rows)] * self.batch if self.cu is None else list(zip(self.cu, self.cu[1:]))
        self.rows, self.size = rows, size
        shape = (rows,) if is_packed else (self.batch, rows)

        def floats(*sizes):
            return torch.randn(*sizes, generator=noise)

        def integers(limit, *sizes):
            return torch.randint(0, limit, sizes, generator=noise, dtype=torch.int32)

        self.qkv = [floats(*shape, heads, self.dim) for heads in (self.heads[0], self.heads[1], self.heads[1])]
        self.dout = floats(*shape, self.heads[0], self.dim)
        longest = max(b - a for a, b in self.sequences)
        self.longest, count = longest, len(self.sequences)
        self.tables = {
            "table": floats(self.heads[0], 7),
            "slopes": floats(count, self.heads[0]) / 8,
            "factors": floats(max(longest, 1)),
            "ids": integers(2, count, max(longest, 1)),
        }
        self.score = draw.choice((distances, slopes, of_keys)) if "score" in self.kinds else None
        self.mask = draw.choice((some, documents, near)) if "mask" in self.kinds else None
        of_heads, of_batch = draw.choice((1, *self.heads)), draw.choice((1, self.batch))
        front = (of_heads,) if is_packed else (of_batch, of_heads)
        self.given = []
        self.dense = {}
        if "band" in self.kinds:
            self.given.append("b:-1,2")
        if "intervals" in self.kinds:
            ends = torch.sort(integers(longest + 2, *front, 4, rows), -2).values
            self.given.append(fmha.Intervals(ends))
            at = torch.arange(longest)
            pairs = [(at >= ends[..., p, :, None]) & (at < ends[..., p + 1, :, None]) for p in (0, 2)]
            self.dense["intervals"] = pairs[0] | pairs[1]
        if "bits" in self.kinds:
            self.dense["bits"] = torch.rand(*front, rows, longest, generator=noise) < 0.6
            self.given.append(fmha.MaskBits.of(self.dense["bits"]))
        if "lists" in self.kinds:
            of_heads = draw.choice((1, self.heads[0]))
            kinds = integers(3, of_batch, of_heads, -(-rows // BLOCK), -(-rows // BLOCK))
            self.lists = kinds.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :rows, :longest]
            parts = []
            for kind in (1, 2):
                counts = (kinds == kind).sum(-1, dtype=torch.int32)
                parts += [counts, torch.argsort((kinds == kind).int(), dim=-1, descending=True, stable=True).int()]
            self.given.append(fmha.BlockLists(*parts, block_size=BLOCK))

    def options(self, tables):
        found = {"mask": self.given} if self.given else {}
        if self.score is not None:
            found["score_code"] = self.score(tables)
        if self.mask is not None:
            found["mask_code"] = self.mask(tables)
        return found

    def moving(self):
        """Names of the tables whose gradients the score gives."""
        return {distances: ["table"], slopes: ["slopes"], of_keys: ["factors", "slopes"], None: []}[self.score]

    def seen(self, at, tables):
        """Which keys a sequence's rows see: `[Hq, rows, keys]`."""
        begin, end = self.sequences[at]
        rows = end - begin
        h = torch.arange(self.heads[0]).view(-1, 1, 1)
        q, k = torch.arange(rows).view(-1, 1), torch.arange(rows)

        def of_heads(x):
            if x.dim() == 4:
                x = x[at if x.shape[0] > 1 else 0]
            else:
                x = x[:, begin:end]
            return x[..., :rows, :rows].repeat_interleave(self.heads[0] // x.shape[0], 0)

        seen = torch.ones(self.heads[0], rows, rows, dtype=torch.bool)
        for dense in self.dense.values():
            seen = seen & of_heads(dense)
        if self.mask is not None:
            seen = seen & self.mask(tables)(torch.tensor(at), h, q, k)
        if "lists" in self.kinds:
            kinds = of_heads(self.lists)
            seen = (kinds == 2) | (kinds == 1) & seen
        return seen & (k <= q + 2) if "band" in self.kinds else seen

    def by_definition(self, q, k, v, tables):
        """O and LSE of float64 in the layouts of the call."""
        o, lse = [], []
        for at, (begin, end) in enumerate(self.sequences):
            one = [x[begin:end] if self.cu else x[at] for x in (q, k, v)]
            a, b, c = (x.transpose(0, 1).repeat_interleave(self.heads[0] // x.shape[1], 0) for x in one)
            s = a @ b.transpose(-1, -2) * self.dim**-0.5
            if self.score is not None:
                h, i = torch.arange(self.heads[0]).view(-1, 1, 1), torch.arange(end - begin)
                s = self.score(tables)(s, torch.tensor(at), h, i.view(-1, 1), i)
            s = torch.where(self.seen(at, tables), s, -INF)
            sums = torch.logsumexp(s, -1) if s.numel() else s.new_zeros(s.shape[:-1])
            weights = torch.exp(s - torch.where(sums == -INF, 0.0, sums).unsqueeze(-1))
            o.append((weights @ c).transpose(0, 1))
            lse.append(sums)
        return (torch.cat(o), torch.cat(lse, -1)) if self.cu else (torch.stack(o), torch.stack(lse))


def drawn(seed, size):
    call = Drawn(seed, size)
    what = f"seed {seed}: {call.scheme}, {call.kinds}, {call.partition}, {call.cu}"
    names = call.moving()
    wide = {name: x.double() if x.is_floating_point() else x for name, x in call.tables.items()}
    doubled = [x.double() for x in call.qkv]
    exact = with_gradients(call.by_definition, doubled, call.dout.double(), wide, names)

    def on_one(q, k, v, tables):
        lengths = {}
        if call.cu:
            cu = torch.tensor(call.cu, dtype=torch.int32)
            lengths = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=call.longest, max_seqlen_k=call.longest)
        return fmha.attention(q, k, v, return_lse=True, **lengths, **call.options(tables))

    whole = with_gradients(on_one, call.qkv, call.dout, call.tables, names)
    for x, y in zip(whole, exact):
        close(x, y, f"{what}: one process")
    axis = 0 if call.cu else 1
    lengths = dict(cu_seqlens_q=call.cu, cu_seqlens_k=call.cu) if call.cu else {}
    if not call.cu:
        lengths = dict(seqlen_q=call.rows, seqlen_k=call.rows)

    def over_ranks(q, k, v, tables, partition=call.partition):
        beside = dict(scheme=call.scheme, partition=partition, partition_k=call.partition)
        return ranks.attention(q, k, v, return_lse=True, **lengths, **beside, **call.options(tables))

    if call.scheme == "decode":
        own = [call.qkv[0], *(ranks.shard(x, axis, partition=call.partition) for x in call.qkv[1:])]
        with torch.no_grad():
            found = over_ranks(*own, call.tables, partition="replicated")
        for x, y in zip(found, exact):
            close(x, y, what)
        return
    own = [ranks.shard(x, axis, partition=call.partition) for x in (*call.qkv, call.dout)]
    found = with_gradients(over_ranks, own[:3], own[3], call.tables, names)
    again = with_gradients(over_ranks, own[:3], own[3], call.tables, names)
    for x, y in zip(found, again):
        assert torch.equal(x, y), f"{what}: not the same bits in two runs"
    for at, (x, y) in enumerate(zip(found, exact)):
        dim = axis if at in (0, 2, 3, 4) else axis + 1
        close(x, y if at > 4 else ranks.shard(y, dim, partition=call.partition), f"{what}: result {at}")
    for x in found[5:]:
        of_all = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(of_all, x)
        assert all(torch.equal(x, y) for y in of_all), f"{what}: captured gradients of other bits"


def texts_and_torchs_masks(size):
    """Texts with captured tensors and numbers, of which another value is no other plan, and torch's block mask."""
    rows = 8 * size
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, rows, heads, 8, generator=generator) for heads in (4, 2, 2))
    own = [ranks.shard(x) for x in (q, k, v)]
    text = "by: float; last: int; bias: bf16[_]; s * by + float(bias[k]) * float(k < last)"
    bias = torch.randn(rows, generator=generator).bfloat16()
    for by, last in ((0.5, 3), (2, rows)):
        options = dict(score_code=text, captured=dict(bias=bias, by=by, last=last))
        close(ranks.attention(*own, **options), ranks.shard(fmha.attention(q, k, v, **options)), "a text")
    joined = ranks._ours(None, q.device)
    assert len(joined.plans) == 1, len(joined.plans)
    # The text is the same and the tensors' strides differ, so each call has a plan of its own.
    steps = torch.randn(2 * rows, generator=generator)
    for read in (steps[:rows], steps[::2], steps[:1].expand(rows), steps[-5:]):
        options = dict(score_code="t: f32[_]; s + t[k]", captured=dict(t=read))
        close(ranks.attention(*own, **options), ranks.shard(fmha.attention(q, k, v, **options)), "steps")
    # A document mask as programs for flex attention write it, which torch splits into blocks.
    ids = torch.arange(rows) // 5
    mask = create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q), 1, 1, rows, rows, device="cpu", BLOCK_SIZE=BLOCK
    )
    options = dict(mask=fmha.BlockLists.of(mask), mask_code=mask.mask_mod)
    close(ranks.attention(*own, **options), ranks.shard(fmha.attention(q, k, v, **options)), "a block mask")
    assert "scheme" in ranks.explain(*own, **options)
    # The tensor is read in another type, and is the only input that needs a gradient.
    wide = torch.randn(rows, generator=generator, dtype=torch.float64).requires_grad_()
    o = ranks.attention(*own, score_code=lambda s, b, h, q, k: s + wide[k])
    (found,) = torch.autograd.grad(o.sum(), wide, create_graph=True)
    (wanted,) = torch.autograd.grad(
        fmha.attention(q, k, v, score_code=lambda s, b, h, q, k: s + wide[k]).sum(), wide
    )
    close(found.detach(), wanted, "a gradient of float64")
    try:
        torch.autograd.grad(found.sum(), wide)
    except (NotImplementedError, RuntimeError) as error:
        assert "no second derivative" in str(error), error
    else:
        raise AssertionError("a second derivative is taken")
    dist.barrier()


def refusals(size):
    # The barrier keeps a rank's first call, which fails, apart from the call before it on a slower rank.
    dist.barrier()
    rank = dist.get_rank()
    rows = 8 * size
    x = torch.randn(1, 8, 2, 8)
    whole = torch.randn(1, rows, 2, 8)
    ends = torch.zeros(1, 1, 2, rows, dtype=torch.int32)
    words = torch.zeros(1, 1, rows, -(-rows // 32), dtype=torch.int32)
    blocks = rows // BLOCK
    counts = torch.zeros(1, 1, blocks, dtype=torch.int32)
    indices = torch.zeros(1, 1, blocks, blocks, dtype=torch.int32)
    lists, reads = fmha.BlockLists, dict(score_code="t: f32[_]; s + t[k]")
    function = dict(score_code="by: float; s * by")
    for options, said in (
        (dict(mask=fmha.Intervals(ends[..., 1:])), f"intervals has {rows - 1} queries, but the whole has {rows}"),
        (dict(mask=fmha.Intervals(ends[:, :, :0])), "intervals has 0 endpoints"),
        (dict(mask=fmha.Intervals(ends[:, :, :1])), "intervals"),
        (dict(mask=fmha.Intervals(ends[0])), "intervals has shape"),
        (dict(mask=fmha.Intervals(ends.expand(3, -1, -1, -1))), "intervals has batch 3"),
        (dict(mask=fmha.Intervals(ends.expand(-1, 3, -1, -1))), "3"),
        (dict(mask=fmha.Intervals(ends.long())), "intervals is of torch.int64, not of int32"),
        (dict(mask=fmha.Intervals(ends.numpy())), "is no tensor of torch"),
        (dict(mask=fmha.Intervals(ends.to("meta"))), "intervals is on meta, but q is on cpu"),
        (dict(mask=[fmha.Intervals(ends)] * 2), "Intervals is given twice"),
        (dict(mask=fmha.MaskBits(torch.cat([words, words], -1))), "words a query"),
        (dict(mask=fmha.MaskBits(words[:, :, 1:])), f"mask_bits has {rows - 1} queries"),
        (dict(mask=lists(counts[..., 1:], indices[:, :, 1:], block_size=BLOCK)), "rows of blocks"),
        (dict(mask=lists(counts, None, block_size=BLOCK)), "kv_indices is missing beside kv_num_blocks"),
        (dict(mask=lists(None, indices, counts, indices, block_size=BLOCK)), "kv_num_blocks is missing"),
        (dict(mask=lists(counts, indices[:, :, 1:], block_size=BLOCK)), "kv_indices has shape"),
        (dict(mask=fmha.MaskObject(whole, whole, whole, fmha.Intervals(ends))), "fmha.MaskObject"),
        (dict(mask=[fmha.Intervals(ends), "b:1,0"], causal=True), "mask is given beside causal"),
        (dict(reads, captured=dict(t=torch.randn(2, 2))), "captured t has 2 axes"),
        (dict(reads, captured=dict(t=torch.ones(2, dtype=torch.int32))), "captured t is of torch.int32"),
        (dict(reads, captured=dict(t=torch.ones(2, device="meta"))), "captured t is on meta"),
        (reads, "captured: t is missing"),
        (dict(captured=dict(t=1)), "captured: t is given"),
        (dict(function, captured=dict(by=1e300)), "captured by 1e+300 is inf"),
        (dict(score_code="s +"), "score_code"),
        (dict(mask_code="k"), "mask_code"),
        (dict(mask_code=lambda b, h, q, k: k > 1 if rank else 1 / 0), "ZeroDivisionError" if rank else "division"),
    ):
        refused(said, lambda: ranks.attention(x, x, x, **options))
    # The call names a capture that the other ranks do not have; a further call has positions that a scheme can not cut.
    runs = [[(0, 6)], [(6, 2 * 6 + 4)], *([(8 * r, 8 * r + 8)] for r in range(2, size))]
    y = torch.randn(1, 6 if rank == 0 else 10 if rank == 1 else 8, 2, 8)
    for options, said in (
        (dict(function, captured=dict(by=1.0 + rank)), "rank "),
        (dict(mask=fmha.Intervals(ends) if rank == 1 else None), "rank 1"),
        (dict(mask_code="k > 2" if rank == 1 else "k > 3"), "rank 1"),
    ):
        refused(said, lambda: ranks.attention(x, x, x, **options))
    for scheme, mask in (("gather", lists(counts, indices, block_size=BLOCK)), ("ring", fmha.MaskBits(words))):
        refused("6", lambda: ranks.attention(y, y, y, mask=mask, scheme=scheme, partition=runs, seqlen_q=rows))


def refused(said, call):
    """An error of this rank, or another's that came first, on every rank."""
    try:
        call()
    except (NotImplementedError, TypeError, ValueError, ArithmeticError, fmha.FmhaError) as error:
        text = str(error)
        assert said in text or "ZeroDivisionError" in said and "division" in text, f"{said}: {error!r}"
    else:
        raise AssertionError(f"taken: {said}")
    dist.barrier()


def program(rank, size):
    texts_and_torchs_masks(size)
    for seed in range(40):
        drawn(100 * size + seed, size)
    refusals(size)
    drawn(1, size)
    ranks.leave()


rank_processes.main(program)
