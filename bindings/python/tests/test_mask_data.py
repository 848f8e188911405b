"""Masks as data at every door: drawn by a seed against float64, with gradients; torch's own ``BlockMask``; refusals."""

import os
import random
import types

import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import fmha
import fmha.flash_attn_4 as fa4
import fmha.flex as flex
from conftest import DEVICE
from reference import attention as by_definition, close, offsets, tensors, tolerance, visible

try:
    import jax
    import jax.numpy as jnp

    import fmha.jax
except ImportError:
    jax = None


def seen_by_intervals(endpoints, keys):
    """i32 ``[.., 2 n, rows]`` as bools ``[.., rows, keys]``, as CONTRACT.md says it."""
    j = torch.arange(keys)
    seen = torch.zeros(*endpoints.shape[:-2], endpoints.shape[-1], keys, dtype=torch.bool)
    before = torch.zeros_like(endpoints[..., 0, :])
    for at in range(0, endpoints.shape[-2], 2):
        begin = torch.maximum(endpoints[..., at, :], before).clamp(max=keys)
        before = torch.maximum(endpoints[..., at + 1, :], begin).clamp(max=keys)
        seen |= (j >= begin.unsqueeze(-1)) & (j < before.unsqueeze(-1))
    return seen


def seen_by_lists(counts, indices, block, rows, keys):
    """Which pairs stand in a block of a list: bools ``[b, h, rows, keys]``."""
    seen = torch.zeros(*counts.shape[:2], rows, keys, dtype=torch.bool)
    for b, h, row in numpy.ndindex(*counts.shape):
        for at in range(int(counts[b, h, row])):
            column = int(indices[b, h, row, at])
            rect = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])
            seen[(b, h, *rect)] = True
    return seen


def draw_lists(draw, batch, heads, block, rows, keys):
    """Two lists without a block in common; garbage behind their counts."""
    blocks_q, blocks_k = -(-rows // block[0]), -(-keys // block[1])
    most = blocks_k + draw.randint(0, 2)
    lists = [torch.zeros(batch, heads, blocks_q, dtype=torch.int32) for _ in range(2)]
    indices = [torch.full((batch, heads, blocks_q, most), 1 << 30, dtype=torch.int32) for _ in range(2)]
    for at in numpy.ndindex(batch, heads, blocks_q):
        columns = draw.sample(range(blocks_k), draw.randint(0, blocks_k))
        cut = draw.randint(0, len(columns))
        for one, some in enumerate((columns[:cut], columns[cut:])):
            lists[one][at] = len(some)
            indices[one][at][: len(some)] = torch.tensor(some, dtype=torch.int32)
    return lists, indices


class Drawn:
    """A call with masks, and which pairs it shows: bools ``[batch, heads, rows, keys]`` of each sequence's extents."""

    def __init__(self, seed):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.packed = draw.random() < 0.35
        self.batch, kv, group = draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 2)
        heads = kv * group
        most_q, most_k = draw.randint(1, 70), draw.randint(1, 90)
        self.lengths_q = [draw.randint(0, most_q) if self.packed else most_q for _ in range(self.batch)]
        self.lengths_k = [draw.randint(0, most_k) if self.packed else most_k for _ in range(self.batch)]
        self.most = most_q, most_k
        shapes = ((sum(self.lengths_q), heads), (sum(self.lengths_k), kv)) if self.packed else (
            (self.batch, most_q, heads),
            (self.batch, most_k, kv),
        )
        self.q, self.k, self.v = (torch.randn(*shapes[at > 0], 8, requires_grad=True) for at in range(3))
        rows = shapes[0][0] if self.packed else most_q
        of_batch, of_heads = draw.choice([1, self.batch]), draw.choice([1, kv, heads])
        front = () if self.packed else (of_batch,)
        kinds = draw.sample(["intervals", "bits", "lists"], draw.randint(1, 3))
        band = draw.choice([None, "causal", "t:9,3"])
        self.masks, self.code = [] if band is None else [band], None
        shown = torch.ones(self.batch, heads, most_q, most_k, dtype=torch.bool)
        if "intervals" in kinds:
            count = 2 * draw.randint(1, 3)
            ends = torch.randint(-3, most_k + 4, (*front, of_heads, count, rows), dtype=torch.int32)
            self.masks.append(fmha.Intervals(self.strided(draw, ends)))
            shown &= self.spread(seen_by_intervals(ends, most_k), heads)
        if "bits" in kinds:
            bits = torch.rand(*front, of_heads, rows, most_k) < 0.8
            self.masks.append(fmha.MaskBits.of(bits))
            shown &= self.spread(bits, heads)
        if "lists" in kinds:
            of_heads, block = draw.choice([1, heads]), (draw.choice([1, 7, 16, 64]), draw.choice([3, 16, 128]))
            counts, indices = draw_lists(draw, of_batch, of_heads, block, *self.most)
            which = draw.choice([(0,), (1,), (0, 1)])
            given = [x if at in which else None for at in (0, 1) for x in (counts[at], indices[at])]
            self.masks.append(fmha.BlockLists(*given, block_size=block))
            if DEVICE == "cpu" and draw.random() < 0.5:
                self.code = lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 != 0
                i, j = torch.arange(most_q).view(-1, 1), torch.arange(most_k)
                shown = shown & ((i + j) % 3 != 0)
            seen = [seen_by_lists(counts[at], indices[at], block, *self.most) for at in (0, 1)]
            partial = seen[0] & shown if 0 in which else torch.zeros_like(shown)
            # Pairs in a full block are hidden only by lengths and the band.
            shown = partial | seen[1] if 1 in which else partial
        kind = {None: (0, -1, -1, 0), "causal": (2, -1, 0, 0), "t:9,3": (1, 9, 3, 0)}[band]
        self.seen = [
            shown[b, :, :rows, :keys] & visible(kind, rows, keys)
            for b, (rows, keys) in enumerate(zip(self.lengths_q, self.lengths_k))
        ]
        self.options = {}
        if self.packed:
            self.options = {
                "cu_seqlens_q": offsets(self.lengths_q),
                "cu_seqlens_k": offsets(self.lengths_k),
                "max_seqlen_q": most_q,
                "max_seqlen_k": most_k,
            }

    @staticmethod
    def strided(draw, x):
        """The same numbers in memory of another order."""
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if draw.random() < 0.5 else x

    def spread(self, seen, heads):
        """A mask's bools for each sequence and query head, packed rows apart: ``[batch, heads, most_q, most_k]``."""
        seen = seen.repeat_interleave(heads // seen.shape[-3], -3)
        if not self.packed:
            return seen.expand(self.batch, -1, -1, -1)
        whole = seen.new_ones(self.batch, heads, *self.most)
        first = 0
        for b, rows in enumerate(self.lengths_q):
            whole[b, :, :rows] = seen[:, first : first + rows]
            first += rows
        return whole

    def exact(self):
        """O, LSE and the leaves in float64."""
        leaves = [x.detach().double().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        if not self.packed:
            parts = [(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(self.batch)]
        else:
            q, k, v = (x.split(n) for x, n in zip(leaves, (self.lengths_q, self.lengths_k, self.lengths_k)))
            parts = [(q[b][None], k[b][None], v[b][None]) for b in range(self.batch)]
        made = [by_definition(*part, mask=seen) for part, seen in zip(parts, self.seen)]
        axis = (1, 2) if self.packed else (0, 0)
        o, lse = (torch.cat([one[at] for one in made], axis[at]) for at in (0, 1))
        return (o[0], lse[0], leaves) if self.packed else (o, lse, leaves)


def seeds():
    """``FMHA_DRAWN=[SEED:]COUNT`` draws so many, from its seed on."""
    first, _, count = (os.environ.get("FMHA_DRAWN") or "1:24").rpartition(":")
    return range(int(first or 1), int(first or 1) + int(count))


def test_drawn_masks_show_what_they_say_at_torchs_and_numpys_doors():
    for seed in seeds():
        drawn = Drawn(seed)
        o, lse, leaves = drawn.exact()
        options = {**drawn.options, "mask": drawn.masks, "mask_code": drawn.code, "return_lse": True}
        given = fmha.attention(drawn.q, drawn.k, drawn.v, **options)
        bound = tolerance(torch.float32)
        for found, wanted in zip(given, (o, lse)):
            close(found, wanted, bound)
        dout, dlse = torch.randn_like(given[0]), torch.randn_like(given[1])
        # A row that sees no key has LSE -inf, which has no gradient.
        dlse = dlse.masked_fill(torch.isneginf(lse), 0.0)
        finite = lse.masked_fill(torch.isneginf(lse), 0.0)
        wanted = torch.autograd.grad((o * dout).sum() + (finite * dlse).sum(), leaves, allow_unused=True)
        found = torch.autograd.grad(given, (drawn.q, drawn.k, drawn.v), (dout, dlse))
        for one, exact, leaf in zip(found, wanted, leaves):
            close(one, torch.zeros_like(leaf) if exact is None else exact, 10 * tolerance(torch.float32, True))
        if DEVICE != "cpu" or drawn.code is not None:
            continue
        arrays = [x.detach().numpy() for x in (drawn.q, drawn.k, drawn.v)]
        lengths = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in drawn.options.items()}
        masks = [one if isinstance(one, str) else of_arrays(one, lambda x: x.numpy()) for one in drawn.masks]
        for one, exact in zip(fmha.attention(*arrays, mask=masks, return_lse=True, **lengths), (o, lse)):
            close(torch.from_numpy(one), exact, bound)


def of_arrays(mask, convert):
    """A mask with another library's tensors."""
    if isinstance(mask, fmha.Intervals):
        return fmha.Intervals(convert(mask.endpoints))
    if isinstance(mask, fmha.MaskBits):
        return fmha.MaskBits(convert(mask.words))
    lists = [None if x is None else convert(x) for x in mask.lists]
    return fmha.BlockLists(*lists, block_size=(mask.block_q, mask.block_k))


@pytest.mark.skipif(jax is None or DEVICE != "cpu", reason="jax on the CPU")
def test_drawn_masks_show_what_they_say_at_jaxs_door():
    array = lambda x: jnp.asarray(x.detach().numpy())
    for seed in seeds()[::5]:
        drawn = Drawn(seed)
        if drawn.code is not None:
            continue
        o, lse, leaves = drawn.exact()
        lengths = {name: array(x) if isinstance(x, torch.Tensor) else x for name, x in drawn.options.items()}
        masks = [one if isinstance(one, str) else of_arrays(one, array) for one in drawn.masks]
        call = lambda q, k, v: fmha.jax.attention(q, k, v, mask=masks, return_lse=True, **lengths)
        qkv = [array(x) for x in (drawn.q, drawn.k, drawn.v)]
        found = jax.jit(call)(*qkv)
        for one, exact in zip(found, (o, lse)):
            close(torch.from_numpy(numpy.array(one)), exact, tolerance(torch.float32))
        dout = torch.randn_like(o)
        wanted = torch.autograd.grad((o * dout).sum(), leaves)
        loss = lambda q, k, v: (call(q, k, v)[0] * array(dout)).sum()
        for one, exact in zip(jax.grad(loss, (0, 1, 2))(*qkv), wanted):
            close(torch.from_numpy(numpy.array(one)), exact, 10 * tolerance(torch.float32, True))


@pytest.mark.parametrize("block", [(8, 8), (128, 128), (16, 32)])
def test_a_block_mask_of_torchs_and_its_function_show_what_it_shows(block):
    q, k, v = tensors(sq=37, sk=53)
    window = lambda b, h, q_idx, kv_idx: (q_idx + 16 - kv_idx).abs() < 11
    mask = create_block_mask(window, None, None, 37, 53, device=DEVICE, BLOCK_SIZE=block)
    i, j = torch.arange(37).view(-1, 1), torch.arange(53)
    wanted, _ = by_definition(q, k, v, mask=(i + 16 - j).abs() < 11)
    bits = fmha.MaskBits.of(window(0, 0, i, j)[None, None])
    close(fmha.attention(q, k, v, mask=[fmha.BlockLists.of(mask), bits]), wanted, tolerance(torch.float32))
    if DEVICE == "cpu":
        found = fmha.attention(q, k, v, mask=fmha.BlockLists.of(mask), mask_code=window)
        close(found, wanted, tolerance(torch.float32))


def test_lists_of_flash_attention_4_and_of_flex_are_the_same_data():
    q, k, v = tensors(sq=37, sk=53, hk=4)
    window = lambda b, h, q_idx, kv_idx: (q_idx + 16 - kv_idx).abs() < 11
    mask = create_block_mask(window, None, 4, 37, 53, device=DEVICE, BLOCK_SIZE=16)
    lists = types.SimpleNamespace(
        mask_block_cnt=mask.kv_num_blocks[:, :1],
        mask_block_idx=mask.kv_indices[:, :1],
        full_block_cnt=mask.full_kv_num_blocks,
        full_block_idx=mask.full_kv_indices,
        block_size=(16, 16),
    )
    i, j = torch.arange(37).view(-1, 1), torch.arange(53)
    whole = seen_by_lists(*mask_lists(mask, ""), (16, 16), 37, 53) | seen_by_lists(
        *mask_lists(mask, "full_"), (16, 16), 37, 53
    )
    for function, seen in ((None, whole), (window, (i + 16 - j).abs() < 11)):
        if function is not None and DEVICE != "cpu":
            continue
        wanted, lse = by_definition(q, k, v, mask=seen)
        of_4 = None if function is None else lambda b, h, q_idx, kv_idx, *_: window(b, h, q_idx, kv_idx)
        found = fa4.flash_attn_func(q, k, v, block_sparse_tensors=lists, mask_mod=of_4, return_lse=True)
        close(found[0], wanted, tolerance(torch.float32))
        close(found[1], lse, tolerance(torch.float32))
        # Lists of torch's BlockMask are passed without a copy, and a mask_mod that sees every pair becomes no code.
        mask.mask_mod = function or flex.noop_mask
        code, data = flex.mask_of(mask, *(x.transpose(1, 2) for x in (q, k)))
        assert (code is None) is (function is None) and data.tensors[2] is mask.kv_num_blocks
        o = flex.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
        close(o.transpose(1, 2), wanted, tolerance(torch.float32))


def mask_lists(mask, which):
    return getattr(mask, which + "kv_num_blocks"), getattr(mask, which + "kv_indices")


def test_a_cache_in_pages_is_read_by_its_sequences_keys():
    q, k, v = tensors(b=2, sq=3, sk=12)
    table = torch.tensor([[2, 0, 4], [1, 3, 5]], dtype=torch.int32)
    pages = [torch.full((6, 4, *x.shape[2:]), float("nan")) for x in (k, v)]
    used = torch.tensor([12, 7], dtype=torch.int32)
    for x, to in zip((k, v), pages):
        for b, page in numpy.ndindex(2, 3):
            rows = max(0, min(4, int(used[b]) - 4 * page))
            to[int(table[b, page]), :rows] = x[b, 4 * page : 4 * page + rows]
    ends = torch.randint(0, 13, (2, 1, 4, 3), dtype=torch.int32)
    options = {"block_table": table, "seqused_k": used, "mask": fmha.Intervals(ends)}
    o, lse = fmha.attention(q, *pages, return_lse=True, **options)
    seen = seen_by_intervals(ends, 12)
    for b, keys in enumerate(used.tolist()):
        one = by_definition(q[b : b + 1], k[b : b + 1, :keys], v[b : b + 1, :keys], mask=seen[b, :, :, :keys])
        close(o[b : b + 1], one[0], tolerance(torch.float32))
        close(lse[b : b + 1], one[1], tolerance(torch.float32))


def test_packed_sequences_without_a_query_have_lists_all_the_same():
    q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (0, 5, 5))
    counts, indices = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lengths = {"cu_seqlens_q": offsets([0]), "cu_seqlens_k": offsets([5]), "max_seqlen_q": 2, "max_seqlen_k": 5}
    for lists in ((counts, indices), (None, None, counts, indices)):
        o = fmha.attention(q, k, v, mask=fmha.BlockLists(*lists, block_size=8), **lengths)
        gradients = torch.autograd.grad(o.sum(), (q, k, v))
        assert o.shape == q.shape and all((x == 0).all() for x in gradients)


def test_a_compiled_call_takes_another_mask_without_another_graph():
    q, k, v = tensors(sq=9, sk=9)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(
        lambda q, k, v, ends: fmha.attention(q, k, v, mask=fmha.Intervals(ends)), backend=backend, fullgraph=True
    )
    for shift in (1, 3):
        ends = torch.stack([torch.zeros(9), torch.arange(9) + shift]).int()[None, None]
        i, j = torch.arange(9).view(-1, 1), torch.arange(9)
        wanted, _ = by_definition(q, k, v, mask=j < i + shift)
        close(call(q, k, v, ends), wanted, tolerance(torch.float32))
    assert len(graphs) == 1


def test_a_mask_that_is_no_mask_is_refused_by_its_field_and_its_number():
    q, k, v = tensors(b=2, sq=7, sk=40)
    ends = torch.zeros(1, 1, 2, 7, dtype=torch.int32)
    words = torch.zeros(1, 1, 7, 2, dtype=torch.int32)
    counts, indices = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32)
    lists = lambda *given, size=4: fmha.BlockLists(*given, block_size=size)
    cases = [
        (RuntimeError, "^intervals has 3 endpoints a row", fmha.Intervals(ends[:, :, [0, 0, 0]])),
        (RuntimeError, "^intervals has 0 endpoints a row", fmha.Intervals(ends[:, :, :0])),
        (RuntimeError, "^intervals has 6 queries on its last axis, but q has 7", fmha.Intervals(ends[..., :6])),
        (RuntimeError, "^intervals has batch 3", fmha.Intervals(ends.expand(3, -1, -1, -1))),
        (RuntimeError, "^intervals has 3 heads", fmha.Intervals(ends.expand(-1, 3, -1, -1))),
        (RuntimeError, "^intervals is of int64, not of int32", fmha.Intervals(ends.long())),
        (RuntimeError, "^intervals has 3 axes of", fmha.Intervals(ends[0])),
        (TypeError, "^mask: intervals: .* is no tensor of torch's", fmha.Intervals(ends.cpu().numpy())),
        (RuntimeError, "^mask_bits has 1 words a query, not 2 for 40 keys", fmha.MaskBits(words[..., :1])),
        (RuntimeError, "^mask_bits has 6 queries", fmha.MaskBits(words[:, :, :6])),
        (RuntimeError, "^mask_bits is of float32", fmha.MaskBits(words.float())),
        (RuntimeError, "^mask_bits has 3 heads", fmha.MaskBits(words.expand(-1, 3, -1, -1))),
        (RuntimeError, "^kv_num_blocks has 2 rows of blocks, but 7 queries are 1 blocks", lists(counts, indices, size=8)),
        (RuntimeError, "^kv_indices is missing beside kv_num_blocks", lists(counts, None)),
        (RuntimeError, "^full_kv_num_blocks is missing beside", lists(counts, indices, None, indices)),
        (RuntimeError, "^kv_indices has shape .1, 1, 1, 3., but kv_num_blocks", lists(counts, indices[:, :, :1])),
        (RuntimeError, "^kv_num_blocks is of int64", lists(counts.long(), indices)),
        (RuntimeError, "^block_lists has 2 heads", lists(counts.expand(-1, 2, -1), indices.expand(-1, 2, -1, -1))),
        (ValueError, "^mask: Intervals is given twice", [fmha.Intervals(ends), fmha.Intervals(ends)]),
        (ValueError, "^mask: 't:1,1' is the second band", ["causal", "t:1,1"]),
    ]
    for kind, said, mask in cases:
        with pytest.raises(kind, match=said):
            fmha.attention(q, k, v, mask=mask)
    for kind, said, make in [
        (ValueError, "^BlockLists: kv_num_blocks and full", lambda: lists(None, None)),
        (ValueError, "^BlockLists: block_size 0 is below 1", lambda: lists(counts, indices, size=0)),
        (TypeError, "^Intervals: endpoints: 3 is no tensor", lambda: fmha.Intervals(3)),
        (ValueError, "^MaskBits.of: seen is a single number", lambda: fmha.MaskBits.of(numpy.array(True))),
        (TypeError, "^BlockLists.of: block_mask: 3 is no BlockMask", lambda: fmha.BlockLists.of(3)),
        (TypeError, "^window: left: 'a' is no whole number", lambda: fmha.window("a", 0)),
        (TypeError, "^MaskBits.of: seen is of torch.int32", lambda: fmha.MaskBits.of(words)),
    ]:
        with pytest.raises(kind, match=said):
            make()
    for other in (
        lambda mask: fmha.attention_out(torch.empty_like(q), q, k, v, mask=mask),
        lambda mask: fmha.attention_with_kvcache(q, k, v, mask=mask),
    ):
        with pytest.raises(NotImplementedError, match="^mask: Intervals is a mask as data, which fmha.attention"):
            other(fmha.Intervals(ends))
    with pytest.raises(NotImplementedError, match="^mask: torch.func's transforms"):
        torch.func.grad(lambda q: fmha.attention(q, k, v, mask=fmha.Intervals(ends)).sum())(q)


def test_a_list_of_a_band_alone_is_that_band():
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    causal = fmha.attention(q, k, v, mask="causal")
    assert torch.equal(fmha.attention(q, k, v, mask=["causal"]), causal)
    assert torch.equal(fmha.attention(q, k, v, mask=[None, "causal"]), causal)
    assert torch.equal(fmha.attention(q, k, v, mask=[]), fmha.attention(q, k, v))
    assert fmha.explain(q, k, v, mask=["causal"]) == fmha.explain(q, k, v, mask="causal")
