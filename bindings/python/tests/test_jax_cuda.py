"""fmha.jax on a GPU: XLA calls the handler of its platform, with its own stream, device and scratch.

The reference is :func:`test_jax.by_definition` in f32, on the CPU.
"""

import os
import threading

import numpy as np
import pytest

# JAX must not reserve the whole memory, since torch's tests use the same device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import fmha.jax  # noqa: E402
from test_jax import by_definition  # noqa: E402

try:
    GPU, CPU = (jax.devices(kind)[0] for kind in ("gpu", "cpu"))
except RuntimeError:
    pytest.skip("JAX has no GPU here, so XLA does not call the handlers of one", allow_module_level=True)

F16, BF16, F32 = (jnp.dtype(name) for name in ("float16", "bfloat16", "float32"))
#: Largest errors: of O and LSE in absolute terms, and of a gradient's norm relative to it.
BOUNDS = {F16: (4e-3, 3e-3), BF16: (3e-2, 2e-2), F32: (2e-5, 2e-5)}


def normal(*shape, dtype=F32, seed=0):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), GPU).astype(dtype)


def arrays(dtype=BF16, b=2, sq=300, sk=333, hq=8, hk=2, d=128):
    shapes = (b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d)
    return tuple(normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))


def on_cpu(tree):
    """The same numbers in f32, where the reference is computed."""
    return jax.tree.map(lambda x: jax.device_put(x, CPU).astype(F32), tree)


def near(given, wanted, bound):
    assert given.devices() == {GPU}
    np.testing.assert_allclose(np.asarray(given, np.float64), np.asarray(wanted, np.float64), atol=bound, rtol=bound)


def near_in_norm(given, wanted, bound):
    given, wanted = (np.asarray(x, np.float64) for x in (given, wanted))
    assert np.linalg.norm(given - wanted) <= bound * np.linalg.norm(wanted)


def gradients_of(function, weights):
    """Those of O and LSE weighted, and O and LSE, under ``jit``."""

    def loss(qkv, named):
        o, lse = function(*qkv, **named)
        return jnp.vdot(o.astype(F32), weights[0]) + jnp.vdot(lse, weights[1]), (o, lse)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


def agrees(qkv, named, **options):
    """O, LSE and every gradient of a jitted call, beside the reference's."""
    q = qkv[0]
    weights = normal(*q.shape, seed=8), normal(q.shape[0], q.shape[2], q.shape[1], seed=9)
    fast = lambda *x, **named: fmha.jax.attention(
        *x, return_lse=True, allow_fallback=q.dtype == F32, **named, **options
    )
    got, outputs = gradients_of(fast, weights)(qkv, named)
    exact = lambda *x, **named: by_definition(*x, **named, **options)
    wanted, references = gradients_of(exact, on_cpu(weights))(on_cpu(qkv), on_cpu(named))
    assert outputs[0].dtype == q.dtype
    for given, reference in zip(outputs, references):
        near(given, reference, BOUNDS[q.dtype][0])
    for given, reference in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        near_in_norm(given, reference, BOUNDS[q.dtype][1])


@pytest.mark.parametrize("dtype, mask", [(BF16, None), (BF16, "causal"), (F16, "b:63,0"), (BF16, "b:100,50")], ids=str)
def test_forward_and_gradients_are_the_fast_kernels(dtype, mask):
    agrees(arrays(dtype), {}, mask=mask)


def test_f32_is_the_fallback_kernels():
    agrees(arrays(F32, sq=50, sk=60, d=64), {}, mask="causal")
    with pytest.raises(RuntimeError, match="f32"):
        jax.block_until_ready(fmha.jax.attention(*arrays(F32), allow_fallback=False))


def test_modifiers_and_their_gradients():
    bias, sink = normal(1, 8, 300, 333), normal(8)
    agrees(arrays(), dict(bias=bias, sink=sink), mask="causal", softcap=4.0)


def test_packed_sequences_and_rows_that_lengths_leave_out_are_zero():
    lengths_q, lengths_k = [30, 0, 150], [40, 60, 120]
    at = [np.cumsum([0, *lengths]) for lengths in (lengths_q, lengths_k)]
    (q,), (k,), (v,) = arrays(b=1, sq=200, sk=240)
    offsets = [jax.device_put(x.astype(np.int32), GPU) for x in at]
    call = dict(mask="causal", cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=150, max_seqlen_k=120)

    def loss(q, k, v):
        o = fmha.jax.attention(q, k, v, allow_fallback=False, **call)
        return o.astype(F32).sum(), o

    gradients, o = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    for b in (0, 2):
        rows_q, rows_k = (slice(x[b], x[b + 1]) for x in at)
        one = on_cpu((q[None, rows_q], k[None, rows_k], v[None, rows_k]))
        function = lambda *x: by_definition(*x, "causal")[0]
        near(o[rows_q], function(*one)[0], BOUNDS[BF16][0])
        wanted = jax.grad(lambda *x: function(*x).sum(), (0, 1, 2))(*one)
        for given, reference, rows in zip(gradients, wanted, (rows_q, rows_k, rows_k)):
            near_in_norm(given[rows].astype(F32), reference[0], BOUNDS[BF16][1])
    assert not o[180:].any() and not gradients[0][180:].any()
    assert not gradients[1][40:100].any() and not gradients[2][220:].any()


def test_decoding_over_pages_reads_lengths_on_the_device():
    q, k, v = arrays(sq=1, sk=256)
    table = np.random.default_rng(4).permutation(32).reshape(2, 16).astype(np.int32)
    pages = []
    for x in (k, v):
        pool = np.zeros((32, 16, 2, 128), np.float32)
        pool[table.reshape(-1)] = np.asarray(x, np.float32).reshape(32, 16, 2, 128)
        pages.append(jax.device_put(pool, GPU).astype(BF16))
    run = jax.jit(lambda used, *x: fmha.jax.attention(*x, block_table=jnp.asarray(table), seqused_k=used))
    for lengths in ([5, 256], [200, 1], [256, 77]):
        o = run(jax.device_put(np.asarray(lengths, np.int32), GPU), q, *pages)
        for b, length in enumerate(lengths):
            one = q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length]
            near(o[b : b + 1], by_definition(*on_cpu(one))[0], BOUNDS[BF16][0])


def test_fp8_with_descales():
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in arrays())
    scales = [jnp.full((2, 2), scale, F32) for scale in (0.5, 1.5, 0.75)]
    call = jax.jit(lambda *x: fmha.jax.attention(*x[:3], descale_q=x[3], descale_k=x[4], descale_v=x[5]))
    o = call(q, k, v, *scales)
    wide = [x * float(scale[0, 0]) for x, scale in zip(on_cpu((q, k, v)), scales)]
    near(o.astype(F32), by_definition(*wide)[0], 0.15)


def test_a_call_stands_in_its_place_among_xlas_own_work():
    """Work before and behind it in a loop of one program: on another stream it would read what is not yet written."""
    (q, k, v), weight = arrays(sk=300, hk=8), normal(128, 128, dtype=BF16, seed=3) / 12

    def step(x, wait=lambda x: x):
        x = wait(jnp.matmul(x, weight))
        return wait(wait(fmha.jax.attention(x, k, v, mask="causal")) + x)

    wanted = q
    for _ in range(20):
        wanted = step(wanted, jax.block_until_ready)
    got = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: step(x), x))(q)
    near_in_norm(got.astype(F32), wanted.astype(F32), 2e-2)


def test_many_threads_call_at_once():
    qkv = arrays()
    call = jax.jit(lambda *x: fmha.jax.attention(*x, mask="causal"))
    wanted, wrong = np.asarray(call(*qkv).astype(F32)), []

    def some():
        for _ in range(20):
            if not np.array_equal(np.asarray(call(*qkv).astype(F32)), wanted):
                wrong.append(1)

    threads = [threading.Thread(target=some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_vmap_and_checkpoint_are_one_call_after_another():
    q, k, v = (x.reshape(1, *x.shape) for x in arrays())
    several = [jnp.concatenate([x, x[:, ::-1]]) for x in (q, k, v)]
    loss = lambda *x: jax.checkpoint(lambda *x: fmha.jax.attention(*x, mask="causal"))(*x).astype(F32).sum()
    got = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(*several)
    for i in range(2):
        for given, wanted in zip(got, jax.grad(loss, (0, 1, 2))(*(x[i] for x in several))):
            near_in_norm(given[i].astype(F32), wanted.astype(F32), 1e-2)


def test_no_score_matrix_is_in_the_compiled_program():
    shapes = [jax.ShapeDtypeStruct((1, 8192, 8, 128), BF16)] * 3
    loss = lambda *x: fmha.jax.attention(*x, mask="causal").astype(F32).sum()
    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().memory_analysis()
    # Scores of 8 heads are 1 GB in bf16; O, its gradient and LSE are some 50 MB.
    assert memory.temp_size_in_bytes < 200 << 20


def test_wrong_input_is_refused_by_its_name():
    q, k, v = arrays()
    with pytest.raises(fmha.FmhaError, match="k has batch 1, but q has 2"):
        jax.jit(fmha.jax.attention)(q, k[:1], v)
    used = jnp.asarray([5, 999], jnp.int32)
    with pytest.raises(RuntimeError, match="seqused_k"):
        jax.block_until_ready(fmha.jax.attention(q, k, v, seqused_k=used, check_lengths=True))
