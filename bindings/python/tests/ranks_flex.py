"""FlexAttention over ranks: drawn calls against float64 and one process, and what is refused.

``ranks_flex.py SIZE FOLDER``: `rank_processes.py` forks the ranks. All draw the same numbers.
"""

import random

import rank_processes
import torch
import torch.distributed as dist
from ranks_drawn import INF, close, with_gradients
from torch.nn.attention import flex_attention as torchs

import fmha
import fmha.dist as ranks
import fmha.flex as flex

def distances(tables):
    return lambda s, b, h, q, k: s + tables["table"][h, (q - k).clamp(-3, 3) + 3]


def of_keys(tables):
    return lambda s, b, h, q, k: torch.tanh(s / 4) * 4 * tables["factors"][k] + tables["slopes"][b, h] * (k - q)


def documents(tables):
    return lambda b, h, q, k: tables["ids"][b, q] == tables["ids"][b, k]


def causal(tables):
    return lambda b, h, q, k: q >= k


def some(tables):
    return lambda b, h, q, k: (k % 3 != q % 2) | (h == 1)


class Drawn:
    """A call of the whole, ``[B, H, L, E]``."""

    def __init__(self, seed, size):
        draw = random.Random(seed)
        noise = torch.Generator().manual_seed(seed)
        self.batch, self.heads, self.dim = draw.choice((1, 2)), (2 * size, draw.choice((size, 2 * size))), 8
        # Rows of which some are cut at blocks and some are not.
        self.rows = draw.choice((16 * size, 32 * size, 12 * size, 9 * size + 1))
        self.columns = draw.choice((self.rows, 16 * size, 10 * size + 3))
        self.scheme = draw.choice((None, None, "gather", "ring", "ulysses"))
        self.partition = draw.choice(("zig_zag", "contiguous"))
        self.score = draw.choice((None, distances, of_keys))
        self.mask = draw.choice((None, documents, causal, some))
        self.kind = draw.choice(("ours", "torchs", "changed"))
        self.block = draw.choice((4, 8, (8, 4), 128))
        self.wants = draw.choice(("nothing", "lse", "aux"))

        def floats(*sizes):
            return torch.randn(*sizes, generator=noise)

        longest = max(self.rows, self.columns)
        of_q, of_k = self.heads
        self.qkv = [
            floats(self.batch, heads, rows, self.dim)
            for heads, rows in ((of_q, self.rows), (of_k, self.columns), (of_k, self.columns))
        ]
        self.dout = floats(*self.qkv[0].shape)
        self.tables = {
            "table": floats(of_q, 7),
            "slopes": floats(self.batch, of_q) / 8,
            "factors": floats(longest),
            "ids": torch.randint(0, 2, (self.batch, longest), generator=noise),
        }
        of_batch, of_heads = draw.choice((None, self.batch)), draw.choice((None, of_q))
        if self.mask is documents:
            of_batch = self.batch
        elif self.mask is some:
            of_heads = of_q
        self.block_mask, self.seen = None, torch.ones(self.rows, self.columns, dtype=torch.bool)
        if self.mask is not None:
            self._draw_mask(of_batch, of_heads, noise)

    def _draw_mask(self, of_batch, of_heads, noise):
        function = self.mask(self.tables)
        made = flex.create_block_mask if self.kind == "ours" else torchs.create_block_mask
        sizes = (of_batch, of_heads, self.rows, self.columns)
        self.block_mask = made(function, *sizes, device="cpu", BLOCK_SIZE=self.block)
        b, h = torch.arange(self.batch).view(-1, 1, 1, 1), torch.arange(self.heads[0]).view(-1, 1, 1)
        q, k = torch.arange(self.rows).view(-1, 1), torch.arange(self.columns)
        self.seen = function(b, h, q, k)
        if self.kind != "changed":
            return
        # Lists that say something else than the function: torch's kernels take their word.
        block_q, block_k = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        blocks = -(-self.rows // block_q), -(-self.columns // block_k)
        kinds = torch.randint(0, 3, (of_batch or 1, of_heads or 1, *blocks), generator=noise)
        lists = []
        for kind in (1, 2):
            counts = (kinds == kind).sum(-1, dtype=torch.int32)
            lists += [counts, torch.argsort((kinds == kind).int(), dim=-1, descending=True, stable=True).int()]
        self.block_mask = torchs.BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=(block_q, block_k), mask_mod=function, seq_lengths=(self.rows, self.columns)
        )
        kinds = kinds.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)[..., : self.rows, : self.columns]
        self.seen = (kinds == 2) | (kinds == 1) & self.seen

    def moving(self):
        return {distances: ["table"], of_keys: ["factors", "slopes"], None: []}[self.score]

    def by_definition(self, q, k, v, tables):
        k, v = (x.repeat_interleave(self.heads[0] // self.heads[1], 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * self.dim**-0.5
        if self.score is not None:
            b, h = torch.arange(self.batch).view(-1, 1, 1, 1), torch.arange(self.heads[0]).view(-1, 1, 1)
            i, j = torch.arange(self.rows).view(-1, 1), torch.arange(self.columns)
            s = self.score(tables)(s, b, h, i, j)
        s = torch.where(self.seen, s, -INF)
        lse = torch.logsumexp(s, -1)
        return torch.exp(s - torch.where(lse == -INF, 0.0, lse).unsqueeze(-1)) @ v, lse


def drawn(seed, size):
    call = Drawn(seed, size)
    what = f"seed {seed}: {call.scheme}, {call.kind}, {call.block}, {call.partition}, {call.rows} x {call.columns}"
    names = call.moving()
    wide = {name: x.double() if x.is_floating_point() else x for name, x in call.tables.items()}
    exact = with_gradients(call.by_definition, [x.double() for x in call.qkv], call.dout.double(), wide, names)

    def over_ranks(q, k, v, tables):
        wants = dict(return_lse=True) if call.wants == "lse" else {}
        if call.wants == "aux":
            wants = dict(return_aux=flex.AuxRequest(lse=True))
        lengths = {} if call.block_mask is not None else dict(seqlen_q=call.rows, seqlen_k=call.columns)
        score = None if call.score is None else call.score(tables)
        beside = dict(scheme=call.scheme, partition=call.partition, **lengths)
        found = ranks.flex_attention(q, k, v, score, call.block_mask, None, True, **wants, **beside)
        if call.wants == "nothing":
            return found, None
        return found if call.wants == "lse" else (found[0], found[1].lse)

    own = [ranks.shard(x, 2, partition=call.partition) for x in (*call.qkv, call.dout)]
    found = with_gradients(over_ranks, own[:3], own[3], call.tables, names)
    again = with_gradients(over_ranks, own[:3], own[3], call.tables, names)
    for x, y in zip(found, again):
        assert x is None or torch.equal(x, y), f"{what}: not the same bits in two runs"
    for at, (x, y) in enumerate(zip(found, exact)):
        if x is not None:
            close(x, y if at > 4 else ranks.shard(y, 2, partition=call.partition), f"{what}: result {at}")
    for x in found[5:]:
        of_all = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(of_all, x)
        assert all(torch.equal(x, y) for y in of_all), f"{what}: captured gradients of other bits"


def masks_that_ranks_cut(size):
    """Blocks of torch's own size, lists of which the ranks cut, with and without a function; and a batch of one."""
    rows = 24 * size
    noise = torch.Generator().manual_seed(7)
    q = torch.randn(2, 2, rows, 8, generator=noise)
    k, v = (torch.randn(1, 1, rows, 8, generator=noise) for _ in range(2))
    own = [ranks.shard(x, 2) for x in (q, k, v)]
    near = lambda b, h, q, k: (q - k).abs() < 9
    for block in (8, 16, 128):
        mask = torchs.create_block_mask(near, None, None, rows, rows, device="cpu", BLOCK_SIZE=block)
        bare = torchs.BlockMask.from_kv_blocks(
            mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=block,
            seq_lengths=(rows, rows),
        )
        for one in (mask, bare, flex.create_block_mask(near, None, None, rows, rows, device="cpu")):
            for scheme in (None, "gather", "ring"):
                found = ranks.flex_attention(*own, block_mask=one, enable_gqa=True, scheme=scheme)
                wanted = flex.flex_attention(q, k, v, block_mask=one, enable_gqa=True)
                close(found, ranks.shard(wanted, 2), f"blocks of {block}")
    # The result of torch's function where there is no mask.
    none = torchs._create_empty_block_mask(q, k)
    found = ranks.flex_attention(*own, block_mask=none, enable_gqa=True)
    close(found, ranks.shard(flex.flex_attention(q, k, v, block_mask=none, enable_gqa=True), 2), "no mask")
    # A step of decoding: all ranks have the queries, each has some of the keys.
    mask = flex.create_block_mask(lambda b, h, q, k: k < 3 * rows // 4, None, None, 2, rows, device="cpu")
    call = dict(block_mask=mask, enable_gqa=True)
    beside = dict(partition="replicated", partition_k="contiguous")
    keys = [ranks.shard(x, 2, partition="contiguous") for x in (k, v)]
    with torch.no_grad():
        found = ranks.flex_attention(q[:, :, :2], *keys, **call, **beside)
    close(found, flex.flex_attention(q[:, :, :2], k, v, **call), "decoding")


def refusals(size):
    # The barrier keeps a rank's first, failing call from a rank that is still in the call before.
    dist.barrier()
    rank = dist.get_rank()
    rows = 8 * size
    x, two = torch.randn(1, 2, 8, 8), torch.randn(1, 1, 8, 8)
    of_own = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")
    of_all = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, rows, rows, device="cpu")
    heads = flex.create_block_mask(lambda b, h, q, k: q >= k, None, 3, rows, rows, device="cpu")
    for operands, options, said in (
        ((x, x[0], x), {}, "key"),
        ((x, None, x), {}, "key: NoneType is no tensor"),
        ((x, two, two), {}, "enable_gqa is False"),
        ((x, x, two), dict(enable_gqa=True), "value has 1 heads, but key 2"),
        ((x, x, x), dict(block_mask=of_own, seqlen_q=rows, seqlen_k=rows), f"(8, 8), but query and key have ({rows}, "),
        ((x, x, x), dict(block_mask=of_own), "own_rows_q 8 is not the"),
        ((x, x, x), dict(block_mask=heads), "block_mask has H 3"),
        ((x, x, x), dict(block_mask=torch.ones(8, 8)), "is no BlockMask"),
        ((x, x, x), dict(kernel_options={"BLOCK_M": 64}), "kernel_options: BLOCK_M"),
        ((x, x, x), dict(return_lse=True, return_aux=flex.AuxRequest(lse=True)), "return_lse and return_aux"),
        ((x, x, x), dict(return_aux=flex.AuxRequest(max_scores=True)), "max_scores"),
        ((x, x, x), dict(return_lse=torch.ones(2)), "return_lse"),
        ((x, x, x), dict(scheme="star"), "star"),
        ((x, x, x), dict(partition="star"), "star"),
        ((x, x, x), dict(seqlen_q=3), "own_rows_q 8 is not the"),
        ((x, x, x), dict(score_mod=lambda s, b, h, q, k: s if q > k else -s), "score_mod"),
        ((x, x, x), dict(score_mod=lambda s, b, h, q, k: s * rank), "rank "),
        ((x, x, x), dict(score_mod=lambda s, b, h, q, k: s + 1 if rank else 1 / 0), "division"),
    ):
        refused(said, lambda: ranks.flex_attention(*operands, **options))
    y = x.clone().requires_grad_()
    o, lse = ranks.flex_attention(y, y, y, block_mask=of_all, return_lse=True)
    dist.barrier()
    refused("lse: a gradient", lambda: (o.sum() + lse.sum()).backward())
    o, lse = ranks.flex_attention(y, y, y, block_mask=of_all, return_lse=True)
    (o.sum() + lse.detach().sum()).backward()
    assert y.grad is not None
    dist.barrier()


def refused(said, call):
    """An error of this rank, or another's that came first, on every rank."""
    try:
        call()
    except (NotImplementedError, TypeError, ValueError, RuntimeError, ArithmeticError, fmha.FmhaError) as error:
        assert said in str(error), f"{said}: {error!r}"
    else:
        raise AssertionError(f"taken: {said}")
    dist.barrier()


def program(rank, size):
    masks_that_ranks_cut(size)
    for seed in range(30):
        drawn(1000 * size + seed, size)
    refusals(size)
    drawn(1, size)
    ranks.leave()


rank_processes.main(program)
