"""The choice of keys against its definition in float64."""

import itertools
import os
import re

import pytest
import torch

from fmha import FmhaError, sparse
from reference import DEVICE


def _whole(shape, seed, dtype=torch.float32):
    """Small whole numbers: every sum is exact, and many are equal."""
    made = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=made).to(dtype)


def _scores(q, k, weights, scale=None):
    products = torch.einsum("bihd,bjd->bihj", q.double(), k.double())
    if scale is not None:
        products = products * scale.double()[:, None, None, :]
    return torch.einsum("bihj,bih->bij", products.relu(), weights.double())


def _best(scores, ends, topk):
    """Lists by sorting: greater scores first, equal ones by position."""
    lists = []
    for row, end in zip(scores.flatten(0, 1).tolist(), ends):
        best = sorted(range(end), key=lambda j: (-row[j], j))[:topk]
        lists.append(sorted(best) + [-1] * (topk - len(best)))
    return torch.tensor(lists, dtype=torch.int32).view(*scores.shape[:2], topk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_lists_are_those_of_the_definition(dtype):
    q, k = _whole((2, 5, 3, 32), 1, dtype), _whole((2, 40, 32), 2, dtype)
    weights, scale = _whole((2, 5, 3), 3), _whole((2, 40), 4)
    scores = _scores(q.float(), k.float(), weights, scale)
    ends = [36 + i for i in range(5)] * 2
    found = sparse.index_lists(q, k, weights, 7, k_scale=scale)
    assert torch.equal(found, _best(scores, ends, 7))
    hidden = torch.arange(40)[None, None, :] >= torch.tensor(ends).view(2, 5, 1)
    written = sparse.index_scores(q, k, weights, k_scale=scale)
    assert torch.equal(written, scores.float().masked_fill(hidden, -torch.inf))
    # Scores computed by this function choose the same keys.
    every = sparse.index_scores(q, k, weights, k_scale=scale, causal=False)
    assert torch.equal(sparse.choose(every, 7, causal=True), found)


def test_pages_with_scales_behind_their_keys():
    pages, page_size, dim = 5, 16, 32
    made = torch.Generator(DEVICE).manual_seed(5)
    cache = torch.zeros(pages, page_size, 1, dim + 4, dtype=torch.uint8)
    k, scale = sparse.split_pages(cache, dim)
    k.copy_(_whole(k.shape, 6).to(torch.float8_e4m3fn))
    scale.copy_(_whole(scale.shape, 7))
    table = torch.randperm(pages, generator=made)[:4].view(2, 2).to(torch.int32)
    used = torch.tensor([20, 32], dtype=torch.int32)
    q, weights = _whole((2, 1, 4, dim), 8, torch.bfloat16), _whole((2, 1, 4), 9)
    found = sparse.index_lists(q, k, weights, 6, k_scale=scale, block_table=table, seqused_k=used)
    # NumPy can not index FP8.
    rows = k.float()[table.long()].flatten(1, 2)
    scores = _scores(q.float(), rows, weights, scale[table.long()].flatten(1, 2))
    assert torch.equal(found, _best(scores, used.tolist(), 6))


def test_ranges_and_an_output_of_the_callers():
    scores = _whole((1, 4, 30), 10)
    first, end = (torch.tensor([x], dtype=torch.int32) for x in ([0, 5, 9, -3], [30, 9, 9, 99]))
    out = torch.full((1, 4, 8), 7, dtype=torch.int32)
    assert sparse.choose(scores, 8, first=first, end=end, out=out) is out
    for row, (low, high) in enumerate([(0, 30), (5, 9), (9, 9), (0, 30)]):
        best = sorted(range(low, high), key=lambda j: (-scores[0, row, j].item(), j))[:8]
        assert out[0, row].tolist() == sorted(best) + [-1] * (8 - len(best))


def test_blocks_by_their_maxima():
    scores = _whole((1, 2, 50), 11)
    scores[0, 0, 33] = torch.nan
    maxima = sparse.block_maxima(scores, 16)
    wanted = torch.stack([scores[..., at : at + 16].amax(-1) for at in range(0, 50, 16)], -1)
    assert torch.equal(maxima.isnan(), wanted.isnan()) and torch.equal(maxima.nan_to_num(), wanted.nan_to_num())
    found = sparse.choose_blocks(scores, 2, 16, first_blocks=1, last_blocks=1)
    assert found.tolist() == [[[0, 3], [0, 3]]]
    q, k, weights = _whole((1, 3, 2, 16), 12), _whole((1, 70, 16), 13), _whole((1, 3, 2), 14)
    every = sparse.index_scores(q, k, weights)
    assert torch.equal(sparse.index_scores(q, k, weights, block=8), sparse.block_maxima(every, 8))
    lists = sparse.index_lists(q, k, weights, 4, block=8, last_blocks=1)
    assert torch.equal(lists, sparse.choose_blocks(every, 4, 8, causal=True, last_blocks=1))


def test_sums_of_compressed_blocks():
    p = torch.rand(1, 2, 40)
    sums = sparse.block_sums(p, 10)
    for j, row in itertools.product(range(10), range(2)):
        at = [4 * j + m - n for m in range(4) for n in range(2)]
        wanted = sum(p[0, row, c].double().item() for c in at if 0 <= c < 40)
        assert abs(sums[0, row, j].item() - wanted) < 1e-5


def test_a_row_of_nothing_and_nan():
    assert sparse.choose(torch.zeros(1, 2, 0), 3).tolist() == [[[-1] * 3] * 2]
    assert sparse.choose(torch.zeros(0, 2, 5), 3).shape == (0, 2, 3)
    scores = torch.tensor([[[torch.nan, -torch.inf, 1.0, torch.nan, torch.inf]]])
    assert sparse.choose(scores, 3).tolist() == [[[1, 2, 4]]]
    assert sparse.choose(scores, 4).tolist() == [[[0, 1, 2, 4]]]


@pytest.mark.parametrize(
    "said, call",
    [
        ("topk -1", lambda q, k, w: sparse.index_lists(q, k, w, -1)),
        ("topk 0 without write_scores", lambda q, k, w: sparse.index_lists(q, k, w, 0)),
        ("blocks.first 3", lambda q, k, w: sparse.index_lists(q, k, w, 2, block=4, first_blocks=3)),
        ("first_blocks 1: keys are chosen", lambda q, k, w: sparse.index_lists(q, k, w, 2, first_blocks=1)),
        ("no such", lambda q, k, w: sparse.index_lists(q, k, w, 2, kernel="sm80_indices")),
        ("accuracy: 'best'", lambda q, k, w: sparse.index_lists(q, k, w, 2, accuracy="best")),
        ("head_dim 8, but q has 16", lambda q, k, w: sparse.index_lists(q, k[..., :8], w, 2)),
        ("k_scale has shape", lambda q, k, w: sparse.index_lists(q, k, w, 2, k_scale=torch.ones(1, 9))),
        ("first and end go together", lambda q, k, w: sparse.index_lists(q, k, w, 2, first=torch.zeros(1, 2))),
        ("weights is of torch.float64", lambda q, k, w: sparse.index_lists(q, k, w.double(), 2)),
        ("k is of torch.int32", lambda q, k, w: sparse.index_lists(q, k.int(), w, 2)),
        ("block -1", lambda q, k, w: sparse.index_scores(q, k, w, block=-1)),
        ("stride 7", lambda q, k, w: sparse.block_sums(torch.ones(1, 1, 4), 2, stride=7)),
    ],
)
def test_a_wrong_call_is_refused_by_name(said, call):
    q, k, weights = _whole((1, 2, 2, 16), 20), _whole((1, 10, 16), 21), _whole((1, 2, 2), 22)
    with pytest.raises((FmhaError, TypeError, ValueError, NotImplementedError), match=re.escape(said)):
        call(q, k, weights)


def test_a_compiler_is_refused():
    scores = torch.ones(1, 1, 4)
    with pytest.raises(Exception, match="not traced"):
        torch.compile(lambda x: sparse.choose(x, 2), fullgraph=True, backend="eager")(scores)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.skipif(DEVICE != "cpu", reason="a forked child cannot use the GPU that its parent uses")
def test_a_forked_child_chooses():
    scores = _whole((1, 3, 64), 23)
    wanted = sparse.choose(scores, 5)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(sparse.choose(scores, 5), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
