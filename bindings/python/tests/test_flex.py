"""FlexAttention's door against torch's own, forward, and against float64, with gradients; and what it refuses."""

import functools
import gc
import pickle
import random
import types
import warnings
import weakref

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import fmha
import fmha.flex as flex
from fmha import _code
from conftest import DEVICE

INF = float("inf")


def by_definition(query, key, value, score_mod, mask_mod, scale=None):
    """``[B, H, S, D]`` in float64, whole matrices: O and LSE."""
    batch, heads, rows, dim = query.shape
    columns, group = key.shape[2], heads // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).expand(batch, -1, -1, -1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    places = (torch.arange(n).view([-1 if i == at else 1 for i in range(4)]) for at, n in enumerate(scores.shape))
    b, h, q, k = places
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    if mask_mod is not None:
        seen = mask_mod(b, h, q, k)
        scores = torch.where(torch.as_tensor(seen), scores, -INF)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -INF, 0.0, lse).unsqueeze(-1))
    return weights @ value, lse


def inputs(batch=2, heads=(4, 2), rows=9, columns=13, dim=8, dtype=torch.float32, moves=True):
    shapes = ((batch, heads[0], rows, dim), (batch, heads[1], columns, dim), (batch, heads[1], columns, dim))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(moves) for shape in shapes]


def close(found, wanted, what, unit=2e-5):
    wanted = wanted.to(torch.float64)
    assert found.shape == wanted.shape, what
    hidden = wanted == -INF
    assert torch.equal(found == -INF, hidden), what
    error = (
        (found.double() - wanted).masked_fill(hidden, 0.0).abs() / (1 + wanted.masked_fill(hidden, 0.0).abs())
    ).max()
    assert error < unit, f"{what}: {error}"


def compare(make_score, make_mask, tables, unit=2e-5, **sizes):
    """``make_*`` give a function of tables; forward with LSE, and the gradients of all that is a float."""
    qkv = inputs(**sizes)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    wide = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in tables.items()}
    score, mask = (None if make is None else make(tables) for make in (make_score, make_mask))
    rows, columns = qkv[0].shape[2], qkv[1].shape[2]
    block = None if mask is None else flex.create_block_mask(mask, None, None, rows, columns, device=DEVICE)
    o, lse = flex.flex_attention(*qkv, score, block, enable_gqa=True, return_lse=True)
    wide_functions = [None if make is None else make(wide) for make in (make_score, make_mask)]
    wanted = by_definition(*exact, *wide_functions)
    close(o, wanted[0], "o", unit)
    close(lse, wanted[1], "lse", unit)
    gradient = torch.randn_like(o)
    of_lse = torch.randn_like(lse).masked_fill(lse == -INF, 0.0)
    moving = {name: x for name, x in tables.items() if x.requires_grad}
    sources = [*qkv, *moving.values()]
    wide_sources = [*exact, *(wide[name] for name in moving)]
    found = torch.autograd.grad([o, lse], sources, [gradient, of_lse], allow_unused=True)
    loss = (wanted[0] * gradient.double()).sum() + (wanted[1].masked_fill(lse == -INF, 0.0) * of_lse.double()).sum()
    sums = torch.autograd.grad(loss, wide_sources, allow_unused=True)
    for name, x, y in zip([*"qkv", *moving], found, sums):
        assert (x is None) <= (y is None or not y.any()), name
        if x is not None:
            close(x, torch.zeros_like(x) if y is None else y, f"d{name}", 10 * unit)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def learned_alibi(tables):
    slopes = tables["slopes"]

    def score(score, b, h, q_idx, kv_idx):
        return 20 * torch.tanh((score + slopes[h] * (kv_idx - q_idx)) / 20)

    return score


def relative(tables):
    table = tables["table"]
    return lambda score, b, h, q, k: score + table[h, (q - k).clamp(-4, 4) + 4]


def documents(tables):
    ids = tables["ids"]
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)


def moving(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("dtype, unit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_learned_slopes_under_a_soft_cap_have_their_gradients(dtype, unit):
    compare(learned_alibi, lambda _: causal, {"slopes": moving(4)}, unit, columns=9, dtype=dtype)


def test_a_table_of_distances_and_documents():
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3], [5] * 13])
    compare(relative, documents, {"table": moving(4, 9), "ids": ids})
    # The views are: one that repeats its rows, one in another order, one whose type is widened, and one in 16 bits.
    tables = {"table": moving(1, 9).expand(4, 9).transpose(0, 1).clone(memory_format=torch.preserve_format).t()}
    compare(relative, documents, {**{k: v.detach().requires_grad_() for k, v in tables.items()}, "ids": ids.short()})


def test_a_captured_tensor_may_be_read_in_steps(monkeypatch):
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    qkv, bias, place = inputs(2, (2, 2), 5, 6, moves=False), torch.randn(2, 2, 5, 6), torch.tensor([3, 1, 0, 2, 5, 4])

    def score(score, b, h, q_idx, kv_idx):
        unused = bias[b, h, q_idx]
        return (
            score + bias[b][h][q_idx, place[kv_idx]] + bias[..., 2][1, h][q_idx].mul(2.0) + bias.mean() + 0 * place[-1]
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = torchs.flex_attention(*qkv, score)
    close(flex.flex_attention(*qkv, score), wanted, "o")


def test_rows_without_keys_and_scores_of_minus_infinity():
    def mask(_):
        return lambda b, h, q, k: (q % 3 != 1) & (k > 2)

    def score(_):
        return lambda s, b, h, q, k: torch.where((k % 2 == 0) | (q == 5), -INF, s)

    compare(score, mask, {})


class Drawn:
    """Functions whose trees a seed draws: continuous in the score, which several operations and reads follow."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def whole(self, depth):
        r = self.draw
        if depth == 0 or r.random() < 0.3:
            leaf = r.choice("bhqkqkn")
            number = r.randint(-3, 6)
            return {
                "b": lambda e: e[1],
                "h": lambda e: e[2],
                "q": lambda e: e[3],
                "k": lambda e: e[4],
                "n": lambda e: number,
            }[leaf]
        a, b = self.whole(depth - 1), self.whole(depth - 1)
        return r.choice(
            [
                lambda e: a(e) + b(e),
                lambda e: a(e) - b(e),
                lambda e: a(e) * 2,
                lambda e: e[3] // 3 + a(e),
                lambda e: (a(e) - e[4]) % 5,
                lambda e: torch.where(e[3] > e[4], a(e), b(e)),
            ]
        )

    def truth(self, depth):
        r = self.draw
        if depth == 0 or r.random() < 0.5:
            a, b = self.whole(2), self.whole(1)
            return r.choice(
                [
                    lambda e: a(e) + e[3] >= b(e) + e[4],
                    lambda e: e[3] - e[4] < b(e),
                    lambda e: e[5]["ids"][e[1], e[3]] == e[5]["ids"][e[1], e[4]],
                    lambda e: e[5]["ids"][e[1], e[4]] != a(e),
                ]
            )
        a, b = self.truth(depth - 1), self.truth(depth - 1)
        return r.choice(
            [lambda e: a(e) & b(e), lambda e: a(e) | b(e), lambda e: ~a(e) ^ b(e), lambda e: torch.logical_not(a(e))]
        )

    def real(self, depth):
        r = self.draw
        if depth == 0 or r.random() < 0.2:
            number, a = r.uniform(-2, 2), self.whole(1)
            return r.choice(
                [
                    lambda e: e[0],
                    lambda e: e[0] * number,
                    lambda e: e[5]["slopes"][e[2]] * a(e) * 0.1,
                    lambda e: e[5]["table"][e[2], (e[3] - e[4]).clamp(-4, 4)],
                    lambda e: e[5]["bias"][e[1], e[3], e[4]] + number,
                    lambda e: e[5]["one"] - 1,
                ]
            )
        a, b, c, t = self.real(depth - 1), self.real(depth - 1), self.real(0), self.truth(1)
        return r.choice(
            [
                lambda e: a(e) + b(e),
                lambda e: b(e) - c(e),
                lambda e: torch.tanh(a(e)) * b(e),
                lambda e: torch.sin(a(e)) + torch.sigmoid(b(e)),
                lambda e: torch.exp(-torch.abs(a(e))) * c(e),
                lambda e: a(e) / (1 + b(e) ** 2),
                lambda e: torch.where(t(e), a(e), c(e)),
                lambda e: torch.maximum(a(e), b(e)).clamp(max=5.0),
                lambda e: torch.nn.functional.relu(a(e)) + torch.minimum(c(e), b(e)),
                lambda e: torch.sqrt(1.0 + torch.square(a(e))) - torch.erf(c(e)),
                lambda e: torch.log(2.5 + a(e).abs()).neg() + torch.cos(b(e)),
            ]
        )

    def functions(self):
        tree, seen = self.real(3), self.truth(2)

        def make_score(tables):
            return lambda score, b, h, q, k: score * 0.5 + 2 * torch.tanh(tree((score, b, h, q, k, tables)))

        def make_mask(tables):
            return lambda b, h, q, k: seen((None, b, h, q, k, tables)) & (b < 9)

        return make_score, make_mask


@pytest.mark.parametrize("seed", range(24))
def test_drawn_functions_have_torchs_values_and_exact_gradients(seed, monkeypatch):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    make_score, make_mask = Drawn(seed).functions()
    sizes = {
        "batch": draw.randint(1, 3),
        "heads": draw.choice([(2, 2), (4, 2), (6, 1)]),
        "rows": draw.choice([1, 7, 20]),
        "columns": draw.choice([1, 17, 33]),
        "dim": draw.choice([8, 16]),
    }
    longest = max(sizes["rows"], sizes["columns"])
    tables = {
        "ids": torch.arange(sizes["batch"] * longest).view(sizes["batch"], longest) // 5 % 3,
        "slopes": moving(sizes["heads"][0]),
        "table": moving(sizes["heads"][0], 9),
        "bias": moving(sizes["batch"], sizes["rows"], sizes["columns"]),
        "one": torch.tensor(1.5, requires_grad=True),
    }
    compare(make_score, make_mask, tables, 5e-5, **sizes)
    # torch's own flex attention has no gradients on the CPU.
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    still = {name: x.detach() for name, x in tables.items()}
    qkv = inputs(**sizes, moves=False)
    block = torchs.create_block_mask(
        make_mask(still), sizes["batch"], sizes["heads"][0], sizes["rows"], sizes["columns"], DEVICE
    )
    call = functools.partial(fmha.flex.flex_attention, *qkv, make_score(still), enable_gqa=True, return_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = torchs.flex_attention(*qkv, make_score(still), block, enable_gqa=True, return_lse=True)
    for mask in (block, flex.create_block_mask(make_mask(still), None, None, sizes["rows"], sizes["columns"], DEVICE)):
        for what, found, theirs in zip(("o", "lse"), call(block_mask=mask), wanted):
            close(found, theirs.nan_to_num() if what == "o" else theirs, what, 5e-5)


def test_block_lists_mean_what_torchs_kernels_make_of_them():
    q, k, v = inputs(1, (2, 2), 12, 12, moves=False)
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 9, 9], [2, 0, -5], [0, 1, 2]]]], dtype=torch.int32)
    full = torch.tensor([[[1, 0, 1]]], dtype=torch.int32)
    full_indices = torch.tensor([[[[0, 1, 2], [0, 1, 2], [2, 0, 0]]]], dtype=torch.int32)

    def seen(mask_mod, with_full):
        def mask(b, h, q, k):
            listed = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 0, 0]])[q // 4, k // 4] == 1
            whole = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 1]])[q // 4, k // 4] == 1
            inner = listed & mask_mod(b, h, q, k)
            return inner | whole if with_full else inner

        return mask

    for mask_mod in (None, causal):
        for lists in ((), (full, full_indices)):
            block = flex.BlockMask.from_kv_blocks(counts, indices, *lists, BLOCK_SIZE=4, mask_mod=mask_mod)
            wanted = by_definition(*(x.double() for x in (q, k, v)), None, seen(mask_mod or flex.noop_mask, lists))
            o, lse = flex.flex_attention(q, k, v, block_mask=block, return_lse=True)
            close(o, wanted[0], "o")
            close(lse, wanted[1], "lse")
    # Lists that are changed are read again.
    counts.fill_(0)
    assert (
        flex.flex_attention(q, k, v, block_mask=flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4)) == 0
    ).all()


def test_a_mask_of_a_function_makes_its_lists_when_they_are_asked_for():
    ours = flex.create_block_mask(causal, None, 2, 200, 300, DEVICE, BLOCK_SIZE=(64, 32))
    theirs = torchs.create_block_mask(causal, None, 2, 200, 300, DEVICE, BLOCK_SIZE=(64, 32))
    assert isinstance(ours, torchs.BlockMask) and ours.shape == theirs.shape and "kv_indices" not in vars(ours)
    assert torch.equal(ours.kv_indices, theirs.kv_indices) and torch.equal(ours.full_q_indices, theirs.full_q_indices)
    assert ours.sparsity() == theirs.sparsity()
    q, k, v = inputs(1, (2, 2), 200, 300, moves=False)
    bare = flex.flex_attention(q, k, v, block_mask=ours)
    assert torch.equal(bare, flex.flex_attention(q, k, v, block_mask=flex.create_block_mask(causal, 1, 2, 200, 300)))
    close(flex.flex_attention(q, k, v, block_mask=theirs), bare, "lists")
    # A mask function other than that of the lists is called only in the lists' blocks.
    ours.mask_mod = lambda b, h, q, k: k >= 0
    found = flex.flex_attention(q, k, v, block_mask=ours)
    theirs.mask_mod = ours.mask_mod
    assert torch.equal(found, flex.flex_attention(q, k, v, block_mask=theirs)) and not torch.equal(found, bare)


def test_lists_of_a_mask_of_a_function_that_are_changed_are_read():
    q, k, v = inputs(1, (2, 2), 200, 300, moves=False)
    made = torchs.create_block_mask(causal, None, 2, 200, 300, DEVICE, BLOCK_SIZE=64)
    for change in (
        lambda mask: mask.kv_num_blocks.zero_(),
        lambda mask: setattr(mask, "kv_num_blocks", torch.zeros_like(made.kv_num_blocks)),
        lambda mask: setattr(mask, "full_kv_num_blocks", torch.zeros_like(made.full_kv_num_blocks)),
    ):
        ours = flex.create_block_mask(causal, None, 2, 200, 300, DEVICE, BLOCK_SIZE=64)
        theirs = torchs.create_block_mask(causal, None, 2, 200, 300, DEVICE, BLOCK_SIZE=64)
        bare = flex.flex_attention(q, k, v, block_mask=ours)
        change(ours), change(theirs)
        found = flex.flex_attention(q, k, v, block_mask=ours)
        assert torch.equal(found, flex.flex_attention(q, k, v, block_mask=theirs)) and not torch.equal(found, bare)


def test_batches_heads_options_and_aux():
    q, k, v = inputs(3, (4, 2), 5, 6, moves=False)
    first = flex.create_block_mask(causal, None, None, 5, 6)
    found = flex.flex_attention(q, k[:1], v[:1], block_mask=first, enable_gqa=True)
    close(found, by_definition(q.double(), k[:1].double(), v[:1].double(), None, causal)[0], "one batch of keys")
    o, aux = flex.flex_attention(q, k, v, enable_gqa=True, return_aux=torchs.AuxRequest(lse=True))
    assert torch.equal(o, fmha.attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2))
    assert aux.lse.shape == (3, 4, 5) and aux.max_scores is None
    fine = {"BACKEND": "AUTO", "ROWS_GUARANTEED_SAFE": True, "BLOCK_M": None}
    assert torch.equal(flex.flex_attention(q, k, v, None, None, None, True, False, fine), o)
    scaled = flex.flex_attention(q, k, v, scale=0.0, enable_gqa=True)
    close(scaled, by_definition(q.double(), k.double(), v.double(), None, None, 0.0)[0], "scale 0")


def test_a_new_value_of_a_number_is_the_same_text():
    from fmha import _code, _torch

    def bound(window, cap, by):
        held = {"by": by}
        sizes = (window, 2)

        def score(s, b, h, q, k):
            return (
                torch.where(q - k <= window, cap * torch.tanh(s / cap), -INF)
                + held["by"] * 0
                + sizes[1]
                + math_of(window)
            )

        def math_of(window):
            return window**0.5

        return _code.bind(_torch, score, None, None)

    one, other = bound(3, 20.0, 1), bound(4, 30.0, 1)
    # A number that Python computes becomes a constant of the text.
    assert one.names == other.names and {"window", "cap"} <= set(one.names)
    assert one.numbers == (3.0, 20.0) and other.numbers == (4.0, 30.0)
    # A number on a GPU is not read: it stays a tensor.
    two, three = torch.tensor(2.0, device="cpu"), torch.tensor(3, device="cpu")
    for value, kind in ((two, "float"), (three, "int"), (5, "int"), (2.5, "float")):
        code = _code.bind(_torch, lambda s, b, h, q, k: s * value, None, None)
        assert code.names == ("value",) and code.numbers == (float(value),)
        assert code.score == f"value: {kind}; s * {'value' if kind == 'float' else 'float(value)'}"
    global GLOBAL
    GLOBAL = 7
    assert _code.bind(_torch, None, lambda b, h, q, k: q - k < GLOBAL, None).numbers == (7.0,)


def test_functions_that_kernels_have_are_planned_as_such():
    def window(width):
        return lambda b, h, q, k: (q >= k) & (q - k <= width) & ((q + k) % 3 != 1)

    def capped(cap):
        return lambda s, b, h, q, k: cap * torch.tanh(s / cap)

    for width, cap in ((3, 4.0), (5, 0.5), (-2, 9.0)):
        compare(lambda _: capped(cap), lambda _: window(width), {})
        # Numbers of a band and of a soft-cap are part of the text, so each value has a plan of its own.
        code = flex._traced(capped(cap), window(width), ("score_mod", "mask_mod"), torch.device(DEVICE))
        assert code.numbers == () and code.score == f"{cap} * tanh(s / {cap})", code
        assert f"q - k <= {width}" in code.mask
    slopes = torch.rand(4, device=DEVICE)
    compare(lambda _: lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda _: causal, {}, rows=13)
    compare(lambda tables: lambda s, b, h, q, k: s - tables["slopes"][h] * (k - q).abs(), None, {"slopes": moving(4)}, rows=13)
    rows = [x.transpose(1, 2) for x in inputs(heads=(4, 4), rows=13, moves=False)]
    said = fmha.explain(*rows, score_code="slopes: f32[_]; 2 * tanh(s / 2) + slopes[h] * (k - q)", mask_code="k <= q", captured={"slopes": slopes})
    assert "the mask is the band t; the score is ALiBi by slopes, softcap 2" in said, said
    # Numbers of parts that kernels do not have built in stay arguments.
    code = flex._traced(None, lambda b, h, q, k: (q - k) % slopes_of <= 1, ("score_mod", "mask_mod"), torch.device(DEVICE))
    assert code.numbers == (3.0,), code


def test_lists_of_a_mask_that_are_kept_are_those_of_its_numbers():
    sizes = dict(heads=(4, 2), rows=150, columns=130, dim=32, dtype=torch.bfloat16)
    for side in (7, 11, 7):
        for _ in range(2):
            near = lambda _: lambda b, h, q, k: (q // side - k // side).abs() <= 1  # noqa: E731, B023
            compare(None, near, {}, 2e-2, **sizes)
    stream = torch.cuda.Stream() if DEVICE == "cuda" else None
    with torch.cuda.stream(stream):
        compare(None, near, {}, 2e-2, **sizes)


slopes_of = 3


class Unseen:
    rate = 3.0


def told(s):
    return s


told.rate = 3.0


def imports_late(s, b, h, q, k):
    import math

    return s * math.pi


def by_rate(s, b, h, q, k, by):
    return s * by


def test_a_trace_is_kept_while_all_that_it_read_is_the_same():
    traced = lambda score, mask=None: flex._traced(score, mask, ("score_mod", "mask_mod"), torch.device(DEVICE))  # noqa: E731
    table, factor, held = torch.rand(4, device=DEVICE), 2.0, [1.0]

    def score(s, b, h, q, k):
        return s * factor + table[h] + slopes_of

    first = traced(score)
    assert traced(score) is first and first.numbers == (2.0, 3.0)
    table += 1
    assert traced(score) is first
    factor = 5.0
    assert traced(score).numbers == (5.0, 3.0)
    table = torch.rand(4, device=DEVICE)
    assert traced(score).tensors[0] is table
    table.requires_grad_()
    assert traced(score).tensors[0].requires_grad
    global slopes_of
    slopes_of = 4
    assert traced(score).numbers == (5.0, 4.0)
    slopes_of = 3
    # A function is traced in each call if it reads an object that may change unnoticed.
    number = torch.tensor(2.0, device="cpu")
    for unseen in (lambda s, b, h, q, k: s * held[0], lambda s, b, h, q, k: s * number):
        one = traced(unseen)
        assert traced(unseen) is not one
    table_of = {1: 2.0}
    for unseen in (
        lambda s, b, h, q, k: s * Unseen.rate,
        lambda s, b, h, q, k, get=table_of.get: s * get(1),
        lambda s, b, h, q, k: s * told.rate,
        imports_late,
    ):
        one = traced(unseen)
        assert traced(unseen) is not one
    before = traced(lambda s, b, h, q, k: s + number)
    number += 1
    assert before.numbers == (2.0,) and traced(lambda s, b, h, q, k: s + number).numbers == (3.0,)
    partial = functools.partial(by_rate, by=2.5)
    assert traced(partial) is traced(partial)
    assert pickle.loads(pickle.dumps(partial)).keywords == {"by": 2.5}
    # Facts kept for a function are dropped with it.
    passing = lambda s, b, h, q, k: s * 2.0  # noqa: E731
    traced(passing)
    gone = weakref.ref(passing)
    del passing
    assert gone() is None
    mask = lambda b, h, q, k: q >= k  # noqa: E731
    both = traced(score, mask)
    assert traced(score, mask) is both and traced(score, lambda b, h, q, k: q >= k) is not both


def near(q, k, reach=2):
    return q - k <= reach


def test_a_mask_of_which_something_changes_is_traced_again():
    traced = lambda mask: flex._traced(None, mask, ("score_mod", "mask_mod"), torch.device(DEVICE))  # noqa: E731
    width, table, inner = 2, torch.rand(4, device=DEVICE), near

    def mask(b, h, q, k, least=1):
        return (q - k <= width) & (table[h] >= 0) & inner(q, k) & (k >= least + slopes_of)

    def changes():
        """Whether another trace is made, and that it is the one of a function with the same parts."""
        before, after = traced_before[0], traced(mask)
        again = types.FunctionType(mask.__code__, globals(), "mask", mask.__defaults__, mask.__closure__)
        assert after == traced(again) and traced(mask) is after
        traced_before[0] = after
        return after is not before

    traced_before = [traced(mask)]
    assert traced(mask) is traced_before[0]
    table += 1
    assert not changes()
    width = 3
    assert changes() and not changes()
    table = torch.rand(4, device=DEVICE)
    assert changes() and traced(mask).tensors[0] is table
    table.requires_grad_()
    assert changes()
    mask.__defaults__ = (2,)
    assert changes()
    inner = lambda q, k: q - k <= 5  # noqa: E731
    assert changes()
    inner.__code__ = (lambda q, k: q - k <= 6).__code__
    assert changes()
    global slopes_of
    slopes_of = 4
    assert changes()
    slopes_of = 3
    assert changes() and not changes()
    mask.rate = 1.0
    assert traced(mask) is not traced(mask)
    del mask.rate

    def passing(b, h, q, k):
        return passing is not None and q >= k

    traced(passing)
    gone = weakref.ref(passing)
    del passing
    gc.collect()
    assert gone() is None


def truth(score, b, h, q, k):
    return score if q > k else -score


def late(score, b, h, q, k):
    return score + max(q, k)


TABLE = torch.ones(4, 9)

REFUSED = [
    (truth, TypeError, "score_mod: a Python `if`.*torch.where"),
    (late, TypeError, "score_mod: a Python `if`.*torch.where"),
    (lambda s, b, h, q, k: torch.lgamma(s), NotImplementedError, "score_mod: lgamma: the language"),
    (lambda s, b, h, q, k: s.cumsum(0), NotImplementedError, "score_mod: cumsum: the language"),
    (lambda s, b, h, q, k: s + TABLE, NotImplementedError, r"score_mod: operand: .* shape \[4, 9\]"),
    (lambda s, b, h, q, k: s + TABLE[h], NotImplementedError, r"shape \[4, 9\] with 1 of its indices has axes left"),
    (lambda s, b, h, q, k: s + TABLE[h, 9], IndexError, "score_mod: index 9 is not in an axis of 9"),
    (lambda s, b, h, q, k: s + TABLE[h, :], NotImplementedError, r"score_mod: \[\]: slice.* is no index"),
    (lambda s, b, h, q, k: s + TABLE[h, s], NotImplementedError, r"score_mod: \[\]: an index is float"),
    (lambda s, b, h, q, k: s + TABLE[h, q, k], IndexError, "score_mod: 2 axes have 3 indices"),
    (lambda s, b, h, q, k: s.half(), NotImplementedError, "score_mod: half: the language"),
    (lambda s, b, h, q, k: s.to(torch.float64), NotImplementedError, r"score_mod: to\(torch.float64\)"),
    (lambda s, b, h, q, k: q**k, NotImplementedError, "score_mod: pow: whole numbers"),
    (lambda s, b, h, q, k: s.round(decimals=2), NotImplementedError, "score_mod: round: its arguments"),
    (lambda s, b, h, q, k: [1.0, 2.0][k], TypeError, "score_mod: a Python number is asked"),
    (lambda s, b, h, q, k: s > 0, TypeError, "score_mod gives a bool, which is a mask"),
    (lambda s, b, h, q, k: "s", NotImplementedError, "score_mod: str: a value of the language"),
    (lambda s, b, h, q, k: s + TABLE.to(torch.complex64)[h, q], TypeError, "torch.complex64 is none"),
    (3, TypeError, "score_mod: 3 is no function"),
]


@pytest.mark.parametrize("score, kind, words", REFUSED)
def test_what_the_language_has_not_is_refused_by_its_name(score, kind, words):
    with pytest.raises(kind, match=words):
        flex.flex_attention(*inputs(1, (4, 4), 9, 9, moves=False), score)


def test_wrong_arguments_are_named():
    q, k, v = inputs(2, (4, 2), 5, 6, moves=False)
    mask = flex.create_block_mask(causal, None, None, 5, 6, DEVICE)
    cases = [
        (dict(enable_gqa=False), ValueError, "enable_gqa is False, but query has 4 heads and key 2"),
        (dict(kernel_options={"BLOCK_M": 64}), NotImplementedError, "kernel_options: BLOCK_M 64"),
        (dict(kernel_options={"BACKEND": "FLASH"}), NotImplementedError, "kernel_options: BACKEND 'FLASH'"),
        (dict(return_aux=torchs.AuxRequest(), return_lse=True), ValueError, "return_lse and return_aux"),
        (dict(return_aux=3), TypeError, "return_aux: 3"),
        (dict(block_mask=causal), TypeError, "block_mask: .* is no BlockMask"),
        (dict(block_mask=flex.create_block_mask(causal, 3, None, 5, 6)), ValueError, "block_mask has B 3"),
        (dict(block_mask=flex.create_block_mask(causal, None, 2, 5, 6)), ValueError, "block_mask has H 2"),
        (
            dict(block_mask=flex.create_block_mask(causal, None, None, 6, 6)),
            ValueError,
            r"block_mask is of lengths \(6, 6\)",
        ),
        (dict(block_mask=mask[:, :, :1]), RuntimeError, "block_mask is a slice"),
        (dict(scale="x"), TypeError, "softmax_scale"),
    ]
    for options, kind, words in cases:
        with pytest.raises(kind, match=words):
            flex.flex_attention(q, k, v, **{"enable_gqa": True, **options})
    for bad, words in (
        ((q[0], k, v), "query"),
        ((q, k[:, :, :, 0], v), "key"),
        ((q, k, v[:1]), "value has a batch of 1"),
    ):
        with pytest.raises(ValueError, match=words):
            flex.flex_attention(*bad, enable_gqa=True)
    with pytest.raises(TypeError, match="mask_mod: 3 is no function"):
        flex.create_block_mask(3, None, None, 5, 6)


def test_one_graph_of_a_compiler_has_functions_lists_and_gradients():
    qkv = inputs(2, (4, 2), 9, 9)
    table, ids = moving(4, 9), torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [5] * 9])
    score, mask, window = relative({"table": table}), documents({"ids": ids}), 3
    lists = torchs.create_block_mask(causal, None, None, 9, 9, DEVICE, BLOCK_SIZE=4)
    lazy = flex.create_block_mask(mask, None, None, 9, 9, DEVICE)

    def layers(q, k, v):
        near = flex.flex_attention(
            q,
            k,
            v,
            lambda s, b, h, q, k: torch.where(q - k < window, score(s, b, h, q, k), -INF),
            lists,
            enable_gqa=True,
        )
        own = flex.create_block_mask(lambda b, h, q, k: q != k + 1, None, None, 9, 9, DEVICE)
        return (
            near
            + flex.flex_attention(near, k, v, None, lazy, enable_gqa=True)
            - flex.flex_attention(q, k, v, None, own, enable_gqa=True)
        )

    wanted = layers(*qkv)
    found = torch.compile(layers, backend="aot_eager", fullgraph=True)(*qkv)
    assert torch.equal(found, wanted)
    sources, gradient = [*qkv, table], torch.randn_like(wanted)
    for x, y in zip(torch.autograd.grad(found, sources, gradient), torch.autograd.grad(wanted, sources, gradient)):
        assert torch.equal(x, y)
    with pytest.raises(Exception, match="lgamma: the language of scores and masks has no such operation"):
        torch.compile(
            lambda q, k, v: flex.flex_attention(q, k, v, lambda s, *_: torch.lgamma(s), enable_gqa=True),
            backend="eager",
            fullgraph=True,
        )(*qkv)
    made = torch.compile(torchs.create_block_mask, backend="eager")(causal, None, None, 9, 9, DEVICE, BLOCK_SIZE=4)
    assert torch.equal(
        flex.flex_attention(*qkv, None, made, enable_gqa=True), flex.flex_attention(*qkv, None, lists, enable_gqa=True)
    )


def test_second_derivatives_and_transforms_say_so():
    q, k, v = inputs(1, (2, 2), 4, 4)
    (first,) = torch.autograd.grad(flex.flex_attention(q, k, v, lambda s, *_: s * 2).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="score_code, mask_code: torch.func"):
        torch.func.grad(lambda x: flex.flex_attention(x, k, v, lambda s, *_: s * 2).sum())(q)


def test_code_beside_packed_sequences_pages_sinks_and_bands():
    slopes, sink = moving(4), moving(4)
    lengths_q, lengths_k = [3, 0, 5], [4, 2, 5]
    offsets = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (lengths_q, lengths_k)]
    q, k, v = torch.randn(8, 4, 16, requires_grad=True), *(torch.randn(11, 2, 16, requires_grad=True) for _ in "kv")
    score = "slopes: f32[_]; s + slopes[h] * (b + k - seqlen_k - (q - seqlen_q))"
    options = dict(score_code=score, mask_code="k % 3 != 1 or b == 2", captured={"slopes": slopes}, sink=sink)
    packed = fmha.attention(
        q,
        k,
        v,
        mask="causal",
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
        max_seqlen_q=5,
        max_seqlen_k=5,
        **options,
    )
    rows = []
    for b, (i, j) in enumerate(zip(lengths_q, lengths_k)):
        of_q, of_k = slice(*offsets[0][b : b + 2].tolist()), slice(*offsets[1][b : b + 2].tolist())
        place_q, place_k = torch.arange(i)[:, None], torch.arange(j)
        bias = slopes[:, None, None] * (b + place_k - j - (place_q - i))
        seen = ((place_k % 3 != 1) | torch.tensor(b == 2)) & (place_k - j <= place_q - i)
        bias = bias.masked_fill(~seen, -INF)
        rows.append(fmha.attention(q[None, of_q], k[None, of_k], v[None, of_k], bias=bias[None], sink=sink)[0])
    wanted = torch.cat(rows)
    close(packed, wanted.double(), "o")
    gradient, sources = torch.randn_like(packed), [q, k, v, slopes, sink]
    for x, y in zip(*(torch.autograd.grad(o, sources, gradient) for o in (packed, wanted))):
        close(x, y.double(), "gradient", 1e-4)
    # Keys lie in pages, as decoding reads them.
    with torch.no_grad():
        pages_k, pages_v = (torch.zeros(4, 4, 2, 16) for _ in "kv")
        table = torch.tensor([[3, 1]], dtype=torch.int32)
        for pages, x in ((pages_k, k), (pages_v, v)):
            pages[3], pages[1, :1] = x[6:10], x[10:]
        decoded = fmha.attention(
            q[None, 7:8],
            pages_k,
            pages_v,
            block_table=table,
            seqused_k=torch.tensor([5], dtype=torch.int32),
            score_code=score.replace("b + k", "2 + k"),
            captured={"slopes": slopes},
            sink=sink,
        )
        close(decoded[0], wanted[7:8].double(), "a page's row")
    with pytest.raises(TypeError, match="unexpected keyword argument 'score_code'"):
        fmha.attention_with_kvcache(q[None], k[None], v[None], score_code="s")


@pytest.mark.parametrize("served", [True, False])
def test_lists_beside_functions_are_data_or_a_table_by_what_kernels_take(monkeypatch, served):
    """As on a GPU, where a kernel has both or not: the result is one."""
    if served and DEVICE != "cpu":
        pytest.skip("no kernel of a GPU has functions beside lists in f32")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    window = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 11
    mask = torchs.create_block_mask(window, None, None, 40, 40, device=DEVICE, BLOCK_SIZE=8)
    score = lambda s, b, h, q_idx, kv_idx: s - 0.25 * (q_idx - kv_idx).abs()
    asked = []
    monkeypatch.setattr(flex, "_takes_lists", lambda *call: asked.append(call) or served)
    o = flex.flex_attention(q, k, v, score, mask)
    i = torch.arange(40, device=DEVICE)
    away = (i.view(-1, 1) - i).abs()
    scores = (q.double() @ k.double().mT) / 4 - 0.25 * away
    wanted = torch.softmax(scores.masked_fill(away >= 11, -INF), -1) @ v.double()
    assert len(asked) == 1 and asked[0][2].masks.tensors[2] is mask.kv_num_blocks
    assert (o.double() - wanted).abs().max() < 1e-5
    made = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    exact = torch.autograd.grad(wanted, (q, k, v), torch.ones_like(wanted))
    assert all((a.double() - b.double()).abs().max() < 1e-4 for a, b in zip(made, exact))


def test_whether_kernels_take_lists_beside_functions_is_planned_once(monkeypatch):
    """A refusal of a plan is the table's, and asks no second time."""
    q, k, v = (torch.empty(1, 40, 2, 16, device="meta", dtype=torch.bfloat16) for _ in range(3))
    code = _code.NOTHING._replace(mask="k <= q")
    planned = []

    def refuse(request):
        planned.append(request)
        raise fmha.FmhaError("sm80: intervals: a mask as data is not in this kernel")

    monkeypatch.setattr(flex, "described", lambda *call: (call[5], []))
    monkeypatch.setattr(flex._native, "plan", refuse)
    bound = ((), (fmha._native.OPTIONS["allow_fallback"],))
    assert [flex._takes_lists((q, k, v), bound, code) for _ in range(2)] == [False, False]
    assert len(planned) == 1
    monkeypatch.setattr(flex._native, "plan", planned.append)
    moving = q.detach().requires_grad_()
    assert flex._takes_lists((moving, k, v), bound, code) and len(planned) == 3, "forward and backward"
