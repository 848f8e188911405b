"""NumPy's arrays, and DLPack's tensors, in a process that has no torch: what is here imports none."""

import math
import os
import threading
import time

import numpy as np
import pytest

import fmha


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def qkv(rng, b=2, sq=5, sk=7, hq=4, hk=2, d=16, dtype=np.float32):
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d)))


def by_definition(q, k, v, causal=False, bias=None, sink=None):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat(group, 2), v.repeat(group, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if causal:
        i, j = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])
        s = np.where(j <= i + s.shape[-1] - s.shape[-2], s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None, None] - s.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", e / total, v), (np.log(total) + s.max(-1, keepdims=True))[..., 0]


@pytest.mark.parametrize("dtype, bound", [(np.float32, 2e-6), (np.float16, 4e-3)])
@pytest.mark.parametrize("causal", [False, True])
def test_arrays_in_and_out(rng, dtype, bound, causal):
    q, k, v = qkv(rng, dtype=dtype)
    bias, sink = rng.standard_normal((2, 4, 5, 7)).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    o, lse = fmha.attention(q, k, v, mask="causal" if causal else None, bias=bias, sink=sink, return_lse=True)
    wanted, wanted_lse = by_definition(q, k, v, causal, bias, sink)
    assert o.dtype == dtype and np.abs(o - wanted).max() <= bound
    assert lse.dtype == np.float32 and np.abs(lse - wanted_lse).max() <= 4 * bound


def test_any_strides_and_packed_sequences(rng):
    q, k, v = qkv(rng, sq=7)
    heads_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    wanted, _ = by_definition(q, k, v)
    assert np.abs(fmha.attention(*heads_first) - wanted).max() <= 2e-6
    offsets = np.array([0, 7, 14], np.int32)
    o, lse = fmha.attention(
        *(x.reshape(14, *x.shape[2:]) for x in (q, k, v)),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=7,
        max_seqlen_k=7,
        return_lse=True,
    )
    assert lse.shape == (4, 14) and np.abs(o.reshape(wanted.shape) - wanted).max() <= 2e-6


def test_a_cache_is_written_where_it_lies(rng):
    q, k, v = qkv(rng, sq=1)
    new_k, new_v = rng.standard_normal((2, 2, 1, 2, 16)).astype(np.float32)
    used = np.array([3, 6], np.int32)
    o = fmha.attention_with_kvcache(q, k, v, new_k, new_v, seqused_k=used)
    assert np.array_equal(k[0, 3], new_k[0, 0]) and np.array_equal(v[1, 6], new_v[1, 0])
    wanted, _ = by_definition(q[:1], k[:1, :4], v[:1, :4])
    assert np.abs(o[:1] - wanted).max() <= 2e-6
    k.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is read-only"):
        fmha.attention_with_kvcache(q, k, v, new_k, new_v, seqused_k=used)


def test_a_seed_that_nobody_gives_is_numpys_generators(rng):
    q, k, v = (rng.standard_normal((1, 16, 2, 8)).astype(np.float32) for _ in range(3))
    np.random.seed(3)
    first, second = (fmha.attention(q, k, v, p_drop=0.5) for _ in range(2))
    assert not np.array_equal(first, second)
    np.random.seed(3)
    assert np.array_equal(fmha.attention(q, k, v, p_drop=0.5), first)
    assert np.array_equal(*(fmha.attention(q, k, v, p_drop=0.5, seed=1) for _ in range(2)))
    assert fmha.explain(q, k, v, p_drop=0.5) == fmha.explain(q, k, v, p_drop=0.5, seed=1)


def test_a_last_axis_that_is_not_dense_is_copied_and_a_batch_of_nothing_is_nothing(rng):
    q, k, v = (rng.standard_normal((2, 5, 2, 16)).astype(np.float32)[..., ::2] for _ in range(3))
    dense = [x.copy() for x in (q, k, v)]
    assert np.array_equal(fmha.attention(q, k, v), fmha.attention(*dense))
    bias = rng.standard_normal((2, 2, 5, 5)).astype(np.float32).swapaxes(2, 3)
    assert np.array_equal(fmha.attention(q, k, v, bias=bias), fmha.attention(*dense, bias=bias.copy()))
    assert fmha.attention(*(x[:0] for x in dense)).shape == (0, 5, 2, 8)


def test_parts_are_added(rng):
    parts = rng.standard_normal((3, 1, 5, 2, 4)).astype(np.float32)
    assert np.allclose(fmha.add_parts(parts), parts.sum(0), atol=1e-6)
    into = np.ones((1, 5, 2, 4), np.float32)
    assert fmha.add_parts(parts, into) is into
    assert np.allclose(into, 1 + parts.sum(0), atol=1e-6)


def test_parts_are_combined(rng):
    q, k, v = qkv(rng)
    parts = [fmha.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 3), slice(3, 7))]
    o, lse = fmha.combine(np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts]))
    wanted, wanted_lse = by_definition(q, k, v)
    assert np.abs(o - wanted).max() <= 4e-6 and np.abs(lse - wanted_lse).max() <= 4e-6


def test_outputs_of_ones_own(rng):
    q, k, v = qkv(rng)
    o, lse = np.empty((2, 4, 5, 16), np.float32).transpose(0, 2, 1, 3), np.empty((2, 4, 5), np.float32)
    assert fmha.attention_out(o, q, k, v, lse=lse) is o
    assert np.array_equal(o, fmha.attention(q, k, v))
    o.flags.writeable = False
    with pytest.raises(ValueError, match="o is read-only"):
        fmha.attention_out(o, q, k, v)


def test_arrays_without_elements(rng):
    """NumPy gives what it makes of no elements strides of 0."""
    q, k, v = qkv(rng)
    o, lse = fmha.attention(q[:, :0], k, v, return_lse=True)
    assert o.shape == (*q[:, :0].shape[:-1], v.shape[-1]) and lse.size == 0
    no_keys = [np.empty((x.shape[0], 0, *x.shape[2:]), np.float32) for x in (k, v)]
    assert not fmha.attention(q, *no_keys).any()


@pytest.mark.parametrize("batch, sq, sk", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_calls_of_no_elements_have_empty_or_zero_outputs(rng, batch, sq, sk):
    """Whatever of a call has no elements may be null, and is told from what is not given."""
    q, k, v = qkv(rng, b=batch, sq=sq, sk=sk)
    used = np.zeros(batch, np.int32)
    for options in (
        {"alibi_slopes": np.ones((batch, 4), np.float32)},
        {"bias": np.ones((batch, 4, sq, sk), np.float32), "sink": np.ones(4, np.float32)},
        {"seqused_q": used, "seqused_k": used, "check_lengths": True},
        {"p_drop": 0.5},
    ):
        o, lse = fmha.attention(q, k, v, return_lse=True, **options)
        assert o.shape == q.shape and lse.shape == (batch, 4, sq) and not o.any(), options
    angles = np.zeros((9, 4), np.float32)
    new = rng.standard_normal((batch, 0 if batch else 1, 2, 16)).astype(np.float32)
    tree = np.zeros((batch, sq, (sq + 31) // 32), np.uint32)
    for options in ({}, {"rotary_cos": angles, "rotary_sin": angles}, {"tree_mask": tree}):
        o = fmha.attention_with_kvcache(q, k, v, new, new, seqused_k=used, **options)
        assert o.shape == q.shape and not o.any(), options
    parts, lses = np.zeros((2, batch, sq, 4, 16), np.float32), np.zeros((2, batch, 4, sq), np.float32)
    assert fmha.combine(parts, lses)[0].shape == q.shape
    if batch == 0:
        table = np.zeros((0, 2), np.int32)
        pages = np.zeros((3, 4, 2, 16), np.float32)
        assert fmha.attention(q, pages, pages, block_table=table).shape == q.shape
        offsets = np.zeros(1, np.int32)
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": sq, "max_seqlen_k": sk}
        rows = (x.reshape(-1, *x.shape[2:]) for x in qkv(rng))
        assert not fmha.attention(*rows, **packed).any(), "rows of no sequence"


def test_a_stride_of_an_axis_of_one_element_means_nothing(rng):
    q, k, v = qkv(rng, b=1, sq=1)
    bias = rng.standard_normal((1, 4, 1, 7)).astype(np.float32)
    wanted = fmha.attention(q, k, v, bias=bias)
    turned = np.lib.stride_tricks.as_strided(q, q.shape, (-4, -8, *q.strides[2:]))
    biased = np.lib.stride_tricks.as_strided(bias, bias.shape, (-4, bias.strides[1], -8, 4))
    assert np.array_equal(fmha.attention(turned, k, v, bias=biased), wanted)


def test_whatever_speaks_dlpack(rng):
    class Speaks:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **words):
            return self.array.__dlpack__(**words)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    q, k, v = qkv(rng)
    assert np.array_equal(fmha.attention(*map(Speaks, (q, k, v))), fmha.attention(q, k, v))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda q, k, v: fmha.attention(q, k, [1.0]), "v: list is neither"),
        (lambda q, k, v: fmha.attention(q.astype(np.float64), k, v), "q is of float64, not of float16, bfloat16"),
        (lambda q, k, v: fmha.attention(q, k.astype(int), v), "k is of int64"),
        (lambda q, k, v: fmha.attention(q.astype(">f4"), k, v), "q is of >f4"),
        (lambda q, k, v: fmha.attention(q, k, v, softmax_scale="1"), "softmax_scale: '1' is no number"),
        (lambda q, k, v: fmha.attention(q, k[:1], v), "k has batch 1"),
        (lambda q, k, v: fmha.attention(q[:, ::-1], k, v), "q has stride -"),
        (lambda q, k, v: fmha.attention(q, k, v, mask=fmha.Mask(1, "x", 0)), "mask: left: 'x'"),
        (lambda q, k, v: fmha.attention(q, k, v, seed=-1), "seed -1"),
        (lambda q, k, v: fmha.attention(q, k, v, p_drop="half"), "p_drop: 'half'"),
        (lambda q, k, v: fmha.attention(q, k, v, softmax_scale=math.nan), "softmax_scale nan"),
        (lambda q, k, v: fmha.attention(q, k, v, max_seqlen_q=1 << 70), "max_seqlen_q"),
        (lambda q, k, v: fmha.attention(q, k, v, dtype_o="float64"), "dtype_o"),
        (lambda q, k, v: fmha.attention(q[None, None], k, v), "q has 6 axes"),
        (
            lambda q, k, v: fmha.attention(
                np.frombuffer(bytes(q.nbytes + 1), np.float32, offset=0, count=q.size).reshape(q.shape),
                k,
                np.lib.stride_tricks.as_strided(v.view(np.uint8)[..., 1:], v.shape, v.strides),
            ),
            "v is of uint8",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_calls_are_refused_by_name_and_number(rng, call, words):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
        call(*qkv(rng))


def test_misaligned_memory_is_refused_or_right(rng):
    q, k, v = qkv(rng)
    raw = np.zeros(q.nbytes + 1, np.uint8)
    shifted = raw[1:].view(np.float32).reshape(q.shape)
    shifted[...] = q
    try:
        o = fmha.attention(shifted, k, v)
    except RuntimeError as error:
        assert str(error).startswith("q")
    else:
        assert np.array_equal(o, fmha.attention(q, k, v))


def test_other_threads_run_while_it_computes(rng):
    q, k, v = qkv(rng, b=1, sq=2000, sk=2000, hq=8, hk=8, d=64)
    fmha.attention(q[:, :8], k, v)
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
    during = sum(start < at < end for at in ticks)
    # Another thread ran meanwhile, so the interpreter's lock was free, unless the call ended within a few of its steps.
    assert during >= 2 or end - start < 0.01


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_after_fork_computes_too(rng):
    q, k, v = qkv(rng, sq=64, sk=64)
    wanted = fmha.attention(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(fmha.attention(q, k, v), wanted) else 1)
    for _ in range(300):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child hangs after 30 s")


def test_what_there_is_to_run_on_is_said():
    assert fmha.devices().startswith("cpu: ")
    assert "cpu-fwd" in fmha.explain(*qkv(np.random.default_rng(0)), mask="causal")


def test_functions_over_numpy_are_code():
    generator = np.random.default_rng(5)
    q, k, v = (generator.standard_normal((2, 6, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    table, cap, window = generator.standard_normal((4, 9)), 5.0, 3
    ids = np.array([[0, 0, 1, 1, 1, 1], [2] * 6])

    def score(s, b, h, q, k):
        return cap * np.tanh(s / cap) + np.where(q > k, table[h, q - k], 0.5 * np.float32(2.0))

    def mask(b, h, q, k):
        return (ids[b, q] == ids[b][k]) & (q >= k) & (np.abs(q - k) <= window)

    text = fmha.attention(
        q,
        k,
        v,
        score_code="table: f32[_, _]; cap: float; cap * tanh(s / cap) + select(q > k, table[h, q - k], 1.0)",
        mask_code="ids: i64[_, _]; window: int; ids[b, q] == ids[b, k] and q >= k and abs(q - k) <= window",
        captured={"table": table.astype(np.float32), "cap": cap, "ids": ids, "window": window},
    )
    assert np.array_equal(fmha.attention(q, k, v, score_code=score, mask_code=mask), text)
    assert not np.allclose(text, fmha.attention(q, k, v, mask="causal"))
    for options, kind, words in (
        (dict(score_code=lambda s, b, h, q, k: np.cumsum(s)), NotImplementedError, "score_code: cumsum"),
        (dict(score_code=lambda s, b, h, q, k: table + s), NotImplementedError, "score_code"),
        (dict(score_code="s + table[h]"), fmha.FmhaError, "score_code: column 5, `table`"),
        (dict(score_code="k < q"), fmha.FmhaError, "score_code: `k < q` is a bool: it is a mask"),
        (
            dict(mask_code="ids: i32[_, _]; ids[b, k] == 0", captured={"ids": ids}),
            fmha.FmhaError,
            "captured ids is of int64",
        ),
        (dict(mask_code="ids: i64[_]; ids[k] == 0", captured={"ids": ids}), fmha.FmhaError, "captured ids has 2 axes"),
        (dict(score_code="s * cap", captured={"cap": 1}), fmha.FmhaError, "column 5, `cap`"),
        (dict(score_code="cap: int; s * cap", captured={"cap": 1.5}), TypeError, "captured: cap: 1.5"),
        (dict(score_code="cap: float; s * cap", captured={"cap": table}), TypeError, "captured: cap"),
        (dict(score_code="cap: f32[]; s * cap[]", captured={"cap": 1.0}), TypeError, "captured: cap: 1.0 is no tensor"),
        (dict(score_code="s", captured={"1": 1.0}), ValueError, "captured: '1' is no name"),
        (dict(captured={"cap": 1.0}), ValueError, "captured: cap is given, but neither"),
    ):
        with pytest.raises(kind, match=words):
            fmha.attention(q, k, v, **options)
