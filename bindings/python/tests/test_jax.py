"""fmha.jax on the CPU: every argument against float64, and what JAX does with a call: jit, vmap, grad, sharding."""

import functools
import math
import pathlib

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import fmha  # noqa: E402
import fmha.jax  # noqa: E402
from run import run_python  # noqa: E402

MASKS = [None, "causal", "t", "b:3,0", "t:4,-1", "g:3,5", "b:2,0,2"]


def visible(mask, seqlen_q, seqlen_k):
    kind, left, right, sink_columns = mask
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None]
    if kind == 0:
        return np.ones((seqlen_q, seqlen_k), bool)
    if kind == 3:
        return (j >= i - left + 1) & (j < i + right)
    diagonal = 0 if kind == 1 else seqlen_k - seqlen_q
    below = (j >= i + diagonal - left) | (left < 0)
    return (below | (j < sink_columns)) & ((j <= i + diagonal + right) | (right < 0))


@functools.partial(jax.jit, static_argnames=("mask", "softmax_scale", "softcap"))
def by_definition(q, k, v, mask=None, softmax_scale=None, softcap=None, bias=None, alibi_slopes=None, sink=None):
    """O and LSE by JAX's own operations, in f32 (its gradients are the reference of ours)."""
    ratio = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, ratio, 2), jnp.repeat(v, ratio, 2)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * scale
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    sq, sk = s.shape[-2:]
    mask = fmha.mask(mask)
    if alibi_slopes is not None:
        diagonal = 0 if mask[0] == 1 else sk - sq
        distance = np.abs(np.arange(sq)[:, None] + diagonal - np.arange(sk))
        s = s - jnp.reshape(alibi_slopes, (-1, s.shape[1], 1, 1)) * distance
    seen = visible(mask, sq, sk)
    s = jnp.where(seen, s, -jnp.inf)
    whole = s
    if sink is not None:
        whole = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], -1)
    empty = ~seen.any(-1) if sink is None else np.zeros(sq, bool)
    safe = jnp.where(empty[:, None], 0.0, whole)
    lse = jnp.where(empty, -jnp.inf, jax.nn.logsumexp(safe, -1))
    p = jnp.where(seen & ~empty[:, None], jnp.exp(jnp.where(seen, s, 0) - jnp.where(empty, 0, lse)[..., None]), 0)
    return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest"), lse


def arrays(b=2, sq=7, sk=11, hq=4, hk=2, d=16, dv=16, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
        for shape in ((b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, dv))
    )


def close(given, wanted, bound=1e-5):
    np.testing.assert_allclose(np.asarray(given, np.float64), np.asarray(wanted, np.float64), atol=bound, rtol=bound)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_under_jit(mask):
    q, k, v = arrays(dv=24)
    o, lse = jax.jit(lambda *x: fmha.jax.attention(*x, mask=mask, return_lse=True))(q, k, v)
    wanted, wanted_lse = by_definition(q, k, v, mask)
    close(o, wanted)
    close(lse, wanted_lse)


@pytest.mark.parametrize("dtype, bound", [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_16_bits(dtype, bound):
    q, k, v = (x.astype(dtype) for x in arrays())
    o = fmha.jax.attention(q, k, v, mask="causal")
    assert o.dtype == dtype
    close(o.astype("float32"), by_definition(*(x.astype("float32") for x in (q, k, v)), "causal")[0], bound)
    assert fmha.jax.attention(q, k, v, dtype_o=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_with_descales(dtype):
    q, k, v = (x.astype(dtype) for x in arrays(d=32))
    scales = [jnp.full((2, 2), scale, jnp.float32) for scale in (0.5, 1.5, 0.75)]
    o = fmha.jax.attention(q, k, v, descale_q=scales[0], descale_k=scales[1], descale_v=scales[2])
    assert o.dtype == jnp.bfloat16
    wide = [x.astype("float32") * scale[0, 0] for x, scale in zip((q, k, v), scales)]
    close(o.astype("float32"), by_definition(*wide)[0], 0.15)


@pytest.mark.parametrize(
    "change",
    [
        dict(softmax_scale=-0.3),
        dict(softcap=2.0),
        dict(bias=(2, 4)),
        dict(bias=(1, 4)),
        dict(bias=()),
        dict(alibi_slopes=(4,)),
        dict(alibi_slopes=(2, 4)),
        dict(sink=(4,)),
        dict(sink=(4,), softcap=3.0, bias=(1, 1), mask="causal"),
    ],
    ids=str,
)
def test_modifiers_and_the_gradients_of_o_and_lse(change):
    rng = np.random.default_rng(3)
    named = {}
    for name, tail in (("bias", (7, 11)), ("sink", ()), ("alibi_slopes", ())):
        if name in change:
            named[name] = jnp.asarray(rng.random((*change[name], *tail), dtype=np.float32))
    fixed = {name: value for name, value in change.items() if name not in named}
    slopes = {name: named.pop(name) for name in ("alibi_slopes",) if name in named}
    qkv = arrays()
    weights = by_definition(*arrays(seed=5))

    def loss(function):
        def of(qkv, named):
            o, lse = function(*qkv, **named, **slopes, **fixed)
            return jnp.vdot(o, weights[0]) + jnp.vdot(lse, weights[1])

        return jax.jit(jax.value_and_grad(of, (0, 1)))(qkv, named)

    given = loss(lambda *x, **options: fmha.jax.attention(*x, return_lse=True, **options))
    wanted = loss(by_definition)
    for got, want in zip(jax.tree.leaves(given), jax.tree.leaves(wanted)):
        close(got, want, 1e-4)


def test_gradients_of_o_alone_and_of_lse_alone():
    qkv = arrays()
    for at in (0, 1):
        one = lambda function: jax.grad(lambda *x: function(*x)[at].sum(), (0, 1))(*qkv)
        for got, want in zip(one(lambda *x: fmha.jax.attention(*x, return_lse=True)), one(by_definition)):
            close(got, want, 1e-4)
    plain = jax.grad(lambda *x: fmha.jax.attention(*x).sum(), 2)(*qkv)
    close(plain, jax.grad(lambda *x: by_definition(*x)[0].sum(), 2)(*qkv), 1e-4)


def test_packed_sequences_and_rows_that_lengths_leave_out_are_zero():
    lengths_q, lengths_k = [3, 0, 5], [4, 6, 2]
    offsets = [jnp.asarray(np.cumsum([0, *lengths]), jnp.int32) for lengths in (lengths_q, lengths_k)]
    (q,), (k,), (v,) = arrays(b=1, sq=10, sk=16)
    call = dict(mask="causal", cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=5, max_seqlen_k=6)

    def run(q, k, v):
        o, lse = fmha.jax.attention(q, k, v, return_lse=True, **call)
        return o.sum(), (o, lse)

    gradients, (o, lse) = jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))(q, k, v)
    for b in range(3):
        rows_q, rows_k = (slice(x[b], x[b + 1]) for x in np.asarray(offsets))
        if rows_q.start < rows_q.stop:
            wanted, wanted_lse = by_definition(q[None, rows_q], k[None, rows_k], v[None, rows_k], "causal")
            close(o[rows_q], wanted[0])
            close(lse[:, rows_q], wanted_lse[0])
    assert not o[8:].any() and not lse[:, 8:].any()
    for gradient, rows in zip(gradients, (8, 12, 12)):
        assert gradient[:rows].any() and not gradient[rows:].any() and jnp.isfinite(gradient).all()


def test_pages_and_rows_in_use():
    q, k, v = arrays(sq=1, sk=8)
    table = jnp.asarray([[2, 0], [1, 3]], jnp.int32)
    pages = [jnp.stack([x[0, 4:], x[1, :4], x[0, :4], x[1, 4:]]) for x in (k, v)]
    used = jnp.asarray([5, 8], jnp.int32)
    o = jax.jit(lambda *x: fmha.jax.attention(*x, block_table=table, seqused_k=used))(q, *pages)
    for b in range(2):
        close(o[b : b + 1], by_definition(q[b : b + 1], k[b : b + 1, : used[b]], v[b : b + 1, : used[b]])[0])


def test_dropout_is_the_same_for_the_same_seed_and_in_every_door():
    q, k, v = arrays()
    call = dict(p_drop=0.4, seed=2**63 + 5, offset=7)
    o = fmha.jax.attention(q, k, v, **call)
    # NumPy's arrays are computed on the CPU, whose sums have another order than a GPU's.
    rounding = 0 if jax.default_backend() == "cpu" else 1e-5
    np.testing.assert_allclose(o, fmha.attention(*map(np.asarray, (q, k, v)), **call), rtol=rounding, atol=rounding)
    assert not jnp.array_equal(o, fmha.jax.attention(q, k, v, **{**call, "seed": 6}))


@pytest.mark.parametrize(
    "in_axes, options",
    [
        ((0, 0, 0), {}),
        ((0, None, None), {"mask": "causal"}),
        ((1, 2, 0), {}),
        ((0, 0, 0), {"sink": 0}),
        ((0, 0, 0), {"sink": None}),
        ((0, 0, 0), {"bias": 0}),
        ((0, 0, 0), {"bias": None}),
        ((0, 0, 0), {"alibi_slopes": 0}),
        ((0, 0, 0), {"seqused_k": 0}),
        ((0, 0, 0), {"p_drop": 0.5, "seed": 3}),
    ],
    ids=str,
)
def test_vmap_is_one_call_after_another(in_axes, options):
    n, b, hq = 3, 2, 4
    rng = np.random.default_rng(1)
    shapes = {"sink": (hq,), "bias": (hq, 7, 11), "alibi_slopes": (b, hq), "seqused_k": (b,)}
    extra, axes, fixed = {}, {}, {}
    for name, axis in options.items():
        if name not in shapes:
            fixed[name] = axis
            continue
        shape = shapes[name] if axis is None else (n, *shapes[name])
        value = rng.integers(1, 11, shape) if name == "seqused_k" else rng.random(shape)
        extra[name] = jnp.asarray(value, jnp.int32 if name == "seqused_k" else jnp.float32)
        axes[name] = axis
    qkv = []
    for i, axis in enumerate(in_axes):
        singles = [arrays(seed=s)[i] for s in range(n)]
        qkv.append(singles[0] if axis is None else jnp.stack(singles, axis))

    def step(qkv, extra):
        def loss(qkv, extra):
            o, lse = fmha.jax.attention(*qkv, return_lse=True, **extra, **fixed)
            return (o * o).sum() + lse.sum(), (o, lse)

        without = ("seqused_k", "alibi_slopes")
        real = {name: x for name, x in extra.items() if name not in without}
        rest = {name: x for name, x in extra.items() if name in without}
        return jax.grad(lambda qkv, real: loss(qkv, {**real, **rest}), (0, 1), has_aux=True)(qkv, real)

    given = jax.jit(jax.vmap(step, (list(in_axes), axes)))(qkv, extra)
    for i in range(n):
        one = lambda x, axis: x if axis is None else jnp.take(x, i, axis)
        wanted = step(
            [one(*pair) for pair in zip(qkv, in_axes)], {name: one(x, axes[name]) for name, x in extra.items()}
        )
        for got, want in zip(jax.tree.leaves(given), jax.tree.leaves(wanted)):
            close(got[i], want, 2e-5)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda q, k, v: fmha.jax.attention(q, k[:1], v), "k has batch 1, but q has 2"),
        (lambda q, k, v: fmha.jax.attention(q, k, v[:, :5]), "v has shape"),
        (lambda q, k, v: fmha.jax.attention(q.astype("int32"), k, v), "q is of int32"),
        (lambda q, k, v: fmha.jax.attention(q, k.astype("float16"), v), "k is of float16"),
        (lambda q, k, v: fmha.jax.attention(q[0, 0, 0], k, v), "q has 1 axes"),
        (lambda q, k, v: fmha.jax.attention(q, k, v, bias=jnp.zeros((3, 4, 7, 11))), "bias has shape"),
        (lambda q, k, v: fmha.jax.attention(q, k, v, sink=jnp.zeros(3)), "sink has shape"),
        (lambda q, k, v: fmha.jax.attention(q, k, v, mask="x"), "mask"),
        (lambda q, k, v: fmha.jax.attention(q, k, "v"), "v: str is no array"),
        (lambda q, k, v: fmha.jax.attention(q, k, v, p_drop=q[0, 0, 0, 0]), "p_drop"),
        (lambda q, k, v: fmha.jax.attention(q, k, v, p_drop=1.0, seed=1), "p_drop 1"),
        (lambda q, k, v: fmha.jax.attention(q, k, v, p_drop=0.5), "^seed: none is given beside p_drop 0.5"),
        (
            lambda q, k, v: jax.grad(lambda x: fmha.jax.attention(q, k, v, alibi_slopes=x).sum())(jnp.ones(4)),
            "^alibi_slopes: a gradient is wanted",
        ),
        (lambda q, k, v: fmha.jax.attention(q, k, v, softcap=-1.0), "softcap -1"),
        (
            lambda q, k, v: fmha.jax.attention(q, k, v, seqused_k=jnp.asarray([5, 99], jnp.int32), check_lengths=True),
            "seqused_k",
        ),
        (
            lambda q, k, v: jax.grad(
                lambda q: fmha.jax.attention(q, k, v, descale_v=jnp.ones(()), dtype_o=jnp.float32).sum()
            )(q),
            "descale_v",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("jit", [False, True])
def test_wrong_calls_are_refused_by_argument_and_number(call, words, jit):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
        jax.block_until_ready((jax.jit(call) if jit and "str" not in words else call)(*arrays()))


def test_shapes_are_refused_while_jax_traces():
    q, k, v = arrays()
    with pytest.raises(fmha.FmhaError, match="k has batch 1, but q has 2"):
        jax.eval_shape(fmha.jax.attention, q, k[:1], v)
    with pytest.raises(fmha.FmhaError, match="v is of float16"):
        jax.eval_shape(jax.vmap(fmha.jax.attention), q[None], k[None], v[None].astype("float16"))


@pytest.mark.parametrize(
    "operands, results, numbers, words",
    [
        ([0, 1], [3], 19, "operands has 2 slots of 3 buffers"),
        ([0, 1, 99], [3], 19, "slot 99"),
        ([0, 1, 2], [3], 5, "numbers has 5 words, not 19"),
        ([0, 1, 2], [4], 19, "o is missing"),
    ],
)
def test_attributes_of_another_caller_are_checked(operands, results, numbers, words):
    q, k, v = arrays()
    call = jax.ffi.ffi_call(fmha.jax.TARGET, jax.ShapeDtypeStruct(q.shape, q.dtype))
    attributes = dict(operands=np.array(operands), results=np.array(results), numbers=np.zeros(numbers, np.int64))
    with pytest.raises(RuntimeError, match=words):
        jax.block_until_ready(call(q, k, v, **attributes))
    for name in attributes:
        rest = {key: value for key, value in attributes.items() if key != name}
        with pytest.raises(RuntimeError, match="attribute"):
            jax.block_until_ready(call(q, k, v, **rest))
        with pytest.raises(RuntimeError, match="attribute"):
            jax.block_until_ready(call(q, k, v, **rest, **{name: np.int64(1)}))
        with pytest.raises(RuntimeError, match="attribute|slot"):
            jax.block_until_ready(call(q, k, v, **rest, **{name: attributes[name].astype(np.float64)}))


def test_causal_is_one_word_and_a_keyword_of_another_library_is_answered_with_ours():
    q, k, v = arrays()
    assert (fmha.jax.attention(q, k, v, causal=True) == fmha.jax.attention(q, k, v, mask="causal")).all()
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'; here it is softmax_scale"):
        fmha.jax.attention(q, k, v, scale=1.0)


@pytest.mark.parametrize("name, shape", [("bias", (1, 4, 7, 11)), ("sink", (4,))])
def test_a_batch_of_nothing_is_nothing_and_what_all_share_has_the_gradient_0(name, shape):
    q, k, v = arrays(b=0)
    given = jax.grad(lambda q, k, v, x: fmha.jax.attention(q, k, v, **{name: x}).sum(), (0, 1, 2, 3))(
        q, k, v, jnp.ones(shape)
    )
    assert [x.shape for x in given] == [q.shape, k.shape, v.shape, shape] and not given[3].any()


def test_tensors_of_no_elements():
    q, k, v = arrays(sq=0)
    assert fmha.jax.attention(q, k, v).shape == (2, 0, 4, 16)
    q, k, v = arrays(sk=0)
    o, lse = fmha.jax.attention(q, k, v, return_lse=True)
    assert not o.any() and jnp.isneginf(lse).all()


def test_batch_and_heads_are_divided_over_devices():
    """Four devices of the CPU; what each computes is told by the shapes in the compiled program."""
    run_python("""
import os
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import fmha.jax
from test_jax import arrays, close
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
loss = lambda q, k, v, slopes: (lambda o: ((o * o).sum(), o))(
    fmha.jax.attention(q, k, v, mask="causal", alibi_slopes=slopes))
step = jax.grad(loss, (0, 1, 2), has_aux=True)
for heads_kv in (4, 2, 1):
    q, k, v = arrays(hk=heads_kv)
    slopes = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    wanted = jax.jit(step)(q, k, v, slopes)
    over = NamedSharding(mesh, P("data", None, "model" if heads_kv > 1 else None))
    placed = [jax.device_put(x, over) for x in (q, k, v)]
    program = jax.jit(step).lower(*placed, slopes).compile()
    given = program(*placed, slopes)
    for got, want in zip(jax.tree.leaves(given), jax.tree.leaves(wanted)):
        close(got, want, 2e-5)
    assert given[1].sharding.is_equivalent_to(over, 4), given[1].sharding
    calls = [line for line in program.as_text().splitlines() if 'custom_call_target="fmha"' in line]
    each = f"f32[1,7,{2 if heads_kv > 1 else 4},16]"
    assert len(calls) == 2 and all(each in line for line in calls), calls
    assert "all-gather" not in program.as_text()
each = jax.shard_map(lambda *x: fmha.jax.attention(*x), mesh=mesh, in_specs=P("data", None, "model"),
                     out_specs=P("data", None, "model"), check_vma=False)
q, k, v = arrays()
close(jax.jit(each)(q, k, v), fmha.jax.attention(q, k, v))
""")


def test_rows_over_devices_are_right_by_jit_and_by_a_named_axis():
    """Four devices of the CPU; `ranks_jax.py` has the cases."""
    run_python(str(pathlib.Path(__file__).parent / "ranks_jax.py"))


def by_functions(q, k, v, score, mask):
    """Attention with a score and a mask as JAX's own functions of whole matrices."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[-1] ** -0.5
    places = [jnp.arange(n).reshape([-1 if i == at else 1 for i in range(4)]) for at, n in enumerate(scores.shape)]
    scores = jnp.where(mask(*places), score(scores, *places), -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores, axis=-1), v, precision="highest")


def test_functions_are_code_with_gradients_under_jit_and_vmap():
    keys = jax.random.split(jax.random.key(3), 5)
    q, k, v = (jax.random.normal(key, (2, 7, heads, 16)) for key, heads in zip(keys, (4, 2, 2)))
    slopes, table = jax.random.normal(keys[3], (4,)), jax.random.normal(keys[4], (4, 9))
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1], [2] * 7])

    def mask(b, h, q, k):
        return (ids[b, q] == ids[b, k]) & (q >= k) & ((q - k) // 2 < 3) & (k % 5 != 4)

    def loss(attend, q, k, v, slopes, table):
        def score(s, b, h, q, k):
            near = table[h, jnp.clip(q - k, -4, 4) + 4]
            return (
                5 * jnp.tanh(s / 5)
                + jnp.where(k > 2, slopes[h] * (k - q), near**2)
                + jax.nn.relu(s) * jax.nn.sigmoid(s)
            )

        return (attend(q, k, v, score, mask) ** 2).sum()

    def ours(q, k, v, score, mask):
        return fmha.jax.attention(q, k, v, score_code=score, mask_code=mask)

    given = (q, k, v, slopes, table)
    wanted, exact = jax.value_and_grad(functools.partial(loss, by_functions), range(5))(*given)
    found, gradients = jax.jit(jax.value_and_grad(functools.partial(loss, ours), range(5)))(*given)
    assert abs(found - wanted) < 1e-4 * wanted
    for x, y in zip(gradients, exact):
        assert jnp.abs(x - y).max() < 1e-4 * (1 + jnp.abs(y).max())
    # The function sees the index in the batch, so the mapped call is compared with one call after another.
    mapped = jax.vmap(functools.partial(loss, ours))(*(jnp.stack([x, x + 1]) for x in given))
    assert jnp.allclose(mapped[0], wanted, rtol=1e-4)
    text = fmha.jax.attention(
        q, k, v, score_code="by: float; one: f32[]; s * by * one[]", captured={"by": 2.0, "one": jnp.float32(0.5)}
    )
    assert jnp.allclose(text, fmha.jax.attention(q, k, v), atol=1e-6)


def test_what_a_function_over_jax_has_not_is_refused_by_its_name():
    x = jnp.ones((1, 4, 2, 8))
    table = jnp.ones((2, 4))
    for score, kind, words in (
        (lambda s, b, h, q, k: jax.lax.lgamma(s), NotImplementedError, "score_code: lgamma: the language"),
        (lambda s, b, h, q, k: s + jnp.cumsum(table)[k], TypeError, "CapturedArray"),
        (lambda s, b, h, q, k: s + table.sum(), NotImplementedError, "sum: a function reads elements"),
        (lambda s, b, h, q, k: s.astype(jnp.bfloat16), NotImplementedError, "score_code: astype"),
        (lambda s, b, h, q, k: s if q > k else -s, jax.errors.TracerBoolConversionError, "bool"),
        (lambda s, b, h, q, k: table[h, 0:2], (NotImplementedError, TypeError), "."),
        (lambda s, b, h, q, k: k > q, TypeError, "score_code gives a bool"),
        ("s + slope[h]", fmha.FmhaError, "score_code: column 5, `slope`"),
    ):
        with pytest.raises(kind, match=words):
            fmha.jax.attention(x, x, x, score_code=score)
    with pytest.raises(ValueError, match="captured: slopes is missing"):
        fmha.jax.attention(x, x, x, score_code="slopes: f32[_]; s + slopes[h]")


def small_by_definition(q, k, mask):
    """Row maxima, those of heads, and sums of keys, float64."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(visible(fmha.mask(mask), q.shape[1], k.shape[1]), scores, -np.inf)
    greatest = scores.max(-1)
    p = np.exp(scores - np.where(np.isneginf(greatest), 0, greatest)[..., None])
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return {"row_max": greatest, "head_max": greatest.max((0, 2)), "key_sum": p.sum(2)}


@pytest.mark.parametrize("mask", [None, "causal"])
def test_small_outputs_are_those_of_float64(mask):
    q, k, v = arrays(sq=9)
    every = ("row_max", "head_max", "key_sum")
    plain = fmha.jax.attention(q, k, v, mask=mask)
    o, lse, small = jax.jit(lambda *x: fmha.jax.attention(*x, mask=mask, return_lse=True, small=every))(q, k, v)
    assert (o == plain).all() and sorted(small) == sorted(every)
    for name, wanted in small_by_definition(q, k, mask).items():
        close(small[name], wanted, 1e-4 if name == "key_sum" else 2e-5)
    again, one = fmha.jax.attention(q, k, v, mask=mask, small=["key_sum"])
    assert (again == plain).all() and list(one) == ["key_sum"] and (one["key_sum"] == small["key_sum"]).all()


def test_small_outputs_of_packed_sequences():
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in arrays(b=1, sq=12, sk=15))
    at_q, at_k = (0, 5, 12), (0, 9, 15)
    lengths = {"cu_seqlens_q": jnp.asarray(at_q, jnp.int32), "cu_seqlens_k": jnp.asarray(at_k, jnp.int32)}
    o, small = fmha.jax.attention(
        q, k, v, mask="causal", **lengths, max_seqlen_q=7, max_seqlen_k=9, small=("row_max", "head_max", "key_sum")
    )
    assert small["row_max"].shape == (4, 12) and small["key_sum"].shape == (2, 4, 9)
    greatest = np.full(4, -np.inf)
    for b in range(2):
        rows, keys = slice(*at_q[b : b + 2]), slice(*at_k[b : b + 2])
        wanted = small_by_definition(q[rows][None], k[keys][None], "causal")
        close(small["row_max"][:, rows], wanted["row_max"][0], 2e-5)
        close(small["key_sum"][b, :, : at_k[b + 1] - at_k[b]], wanted["key_sum"][0], 1e-4)
        assert not small["key_sum"][b, :, at_k[b + 1] - at_k[b] :].any()
        greatest = np.maximum(greatest, wanted["head_max"])
    close(small["head_max"], greatest, 2e-5)


def test_small_outputs_under_vmap_and_grad():
    q, k, v = (jnp.stack([x, x + 1]) for x in arrays())
    for every in (("row_max", "key_sum"), ("row_max", "head_max", "key_sum")):
        _, small = jax.vmap(lambda *x: fmha.jax.attention(*x, small=every))(q, k, v)
        for at in range(2):
            wanted = small_by_definition(q[at], k[at], None)
            for name in every:
                close(small[name][at], wanted[name], 1e-4 if name == "key_sum" else 2e-5)

    def loss(q, with_small):
        out = fmha.jax.attention(q, k[0], v[0], small=("row_max", "head_max") if with_small else ())
        return (out[0] ** 2).sum() + out[1]["head_max"].sum() if with_small else (out**2).sum()

    # Small outputs have no gradient and change no gradient.
    assert (jax.grad(loss)(q[0], True) == jax.grad(loss)(q[0], False)).all()


def test_small_outputs_that_are_not_there_are_refused_by_name():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="small: 'row_sum' is none of row_max, head_max, key_sum"):
        fmha.jax.attention(q, k, v, small=["row_sum"])
    with pytest.raises(TypeError, match="small: 'row_max' is no list of names"):
        fmha.jax.attention(q, k, v, small="row_max")
    with pytest.raises(fmha.FmhaError, match="k has shape"):
        fmha.jax.attention(q, k[..., :8], v, small=["row_max", "key_sum"])
