"""``fmha.jax`` on four devices of the CPU: rows that ``jit`` shards, and ``axis_name`` inside ``shard_map``.

Drawn calls are held to float64: ``ranks_jax.py 24`` draws 24 of them, 4 are drawn otherwise.
"""

import os
import random
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import fmha
import fmha.jax

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 4
SIZE = 4
MESH = Mesh(np.array(jax.devices()), ("rows",))
ROWS = P(None, "rows")
BANDS = ("causal", "t:5,3", "b:9,-1", "b:-1,2", "t:4,4,3", "g:3,6", "b:6,1,5", None)


def distances(tables):
    table = tables["table"]
    return lambda s, b, h, q, k: s + table[h, jnp.clip(q - k, -3, 3) + 3]


def of_keys(tables):
    factors, slopes = tables["factors"], tables["slopes"]
    return lambda s, b, h, q, k: jnp.tanh(s / 4) * 4 * factors[k] + slopes[b, h] * (k - q)


def documents(tables):
    ids = tables["ids"]
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def some(tables):
    return lambda b, h, q, k: (k % 3 != q % 2) | (h == 1)


def seen_by_band(band, rows, columns):
    kind, left, right, sinks = fmha._mask.mask(band)
    i, j = np.arange(rows)[:, None], np.arange(columns)
    if kind == 0:
        return np.ones((rows, columns), bool)
    if kind == 3:
        low, high = i + 1 - left, i + right - 1
    else:
        i = i + (columns - rows if kind == 2 else 0)
        low, high = (i - left if left >= 0 else i * 0), (i + right if right >= 0 else i * 0 + columns)
    return (j <= high) & ((j >= low) | (j < sinks))


class Drawn:
    """A call of the whole; ``dense`` is what all its masks show, ``[B, H, Sq, Sk]``."""

    def __init__(self, seed):
        draw, noise = random.Random(seed), np.random.default_rng(seed)
        self.batch, self.heads, self.dim = draw.choice((1, 2)), (4, draw.choice((2, 4))), 8
        self.rows, self.columns = (SIZE * draw.choice((4, 8, 9)) for _ in range(2))
        self.band = draw.choice(BANDS)
        self.causal = self.band == "causal" and draw.random() < 0.5
        kinds = draw.sample(("intervals", "bits", "lists"), draw.randint(0, 2))
        if "lists" in kinds:
            self.band, self.causal = None, False
        if self.band is not None and fmha._mask.mask(self.band).sink_columns:
            kinds = [kind for kind in kinds if kind != "intervals"]
        self.score, self.mask = draw.choice((None, distances, of_keys)), draw.choice((None, documents, some))
        self.sink = draw.random() < 0.3

        def floats(*sizes):
            return noise.standard_normal(sizes).astype(np.float32)

        of_q, of_k = self.heads
        shapes = (self.rows, of_q), (self.columns, of_k), (self.columns, of_k)
        longest = max(self.rows, self.columns)
        self.moving = dict(zip("qkv", (floats(self.batch, *shape, self.dim) for shape in shapes)))
        self.moving["table"], self.moving["factors"] = floats(of_q, 7), floats(longest)
        self.moving["slopes"] = floats(self.batch, of_q) / 8
        if self.sink:
            self.moving["sink"] = floats(of_q)
        self.dout = floats(self.batch, self.rows, of_q, self.dim)
        self.ids = noise.integers(0, 2, (self.batch, longest))
        of_batch, of_heads = draw.choice((1, self.batch)), draw.choice((1, of_q))
        self.given, self.dense = [], np.ones((1, 1, self.rows, self.columns), bool)
        at = np.arange(self.columns)
        if "intervals" in kinds:
            ends = np.sort(noise.integers(0, self.columns + 2, (of_batch, of_heads, 4, self.rows)), 2).astype(np.int32)
            pairs = [(at >= ends[:, :, p, :, None]) & (at < ends[:, :, p + 1, :, None]) for p in (0, 2)]
            self.given.append(fmha.Intervals(jnp.asarray(ends)))
            self.dense = self.dense & (pairs[0] | pairs[1])
        if "bits" in kinds:
            bits = noise.random((of_batch, of_heads, self.rows, self.columns)) < 0.6
            self.given.append(fmha.MaskBits.of(jnp.asarray(bits)))
            self.dense = self.dense & bits
        if self.mask is not None:
            places = np.ix_(*(np.arange(n) for n in (self.batch, of_q, self.rows, self.columns)))
            self.dense = self.dense & np.asarray(self.mask({"ids": jnp.asarray(self.ids)})(*map(jnp.asarray, places)))
        if "lists" in kinds:
            block = SIZE
            blocks = self.rows // block, -(-self.columns // block)
            self.block_kinds = noise.integers(0, 3, (of_batch, of_heads, *blocks)) if self.rows % 16 == 0 else None
            if self.block_kinds is not None:
                lists = []
                for kind in (1, 2):
                    is_kind = self.block_kinds == kind
                    lists += [is_kind.sum(-1).astype(np.int32), np.argsort(~is_kind, -1, "stable").astype(np.int32)]
                self.given.append(fmha.BlockLists(*map(jnp.asarray, lists), block_size=block))
                wide = self.block_kinds.repeat(block, 2).repeat(block, 3)[..., : self.columns]
                self.dense = (wide == 2) | (wide == 1) & self.dense
        self.dense = self.dense & seen_by_band(self.band, self.rows, self.columns)

    def exact(self):
        """O, LSE and gradients in float64."""
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            wide = {name: jnp.asarray(x, jnp.float64) for name, x in self.moving.items()}
            dout = jnp.asarray(self.dout, jnp.float64)

            def attend(moving):
                group = self.heads[0] // self.heads[1]
                k, v = (jnp.repeat(moving[name], group, 2) for name in "kv")
                s = jnp.einsum("bihd,bjhd->bhij", moving["q"], k) * self.dim**-0.5
                if self.score is not None:
                    places = np.ix_(*(np.arange(n) for n in s.shape))
                    s = self.score(moving)(s, *map(jnp.asarray, places))
                s = jnp.where(self.dense, s, -jnp.inf)
                keys = s
                if self.sink:
                    sink = jnp.broadcast_to(moving["sink"][None, :, None, None], (*s.shape[:3], 1))
                    s = jnp.concatenate([s, sink], -1)
                top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(s.max(-1)), 0.0, s.max(-1)))[..., None]
                sums = jnp.exp(s - top).sum(-1, keepdims=True)
                safe = jnp.where(sums == 0.0, 1.0, sums)
                o = jnp.einsum("bhij,bjhd->bihd", jnp.exp(keys - top) / safe, v)
                return o, jnp.where(sums == 0.0, -jnp.inf, jnp.log(safe) + top)[..., 0]

            gradients = jax.grad(lambda moving: (attend(moving)[0] * dout).sum())(wide)
            o, lse = attend(wide)
            return [np.asarray(x) for x in (o, lse)], {name: np.asarray(x) for name, x in gradients.items()}

    def attend(self, moving, **beside):
        masks = list(self.given)
        options = {}
        if self.causal:
            options["causal"] = True
        elif self.band is not None:
            masks.append(self.band)
        if masks:
            options["mask"] = masks
        if self.sink:
            options["sink"] = moving["sink"]
        if self.score is not None:
            options["score_code"] = self.score(moving)
        if self.mask is not None:
            options["mask_code"] = self.mask({"ids": jnp.asarray(self.ids)})
        return fmha.jax.attention(*(moving[name] for name in "qkv"), return_lse=True, **options, **beside)


def close(found, wanted, what, unit=1e-4):
    found, hidden = np.asarray(found, np.float64), np.isneginf(wanted)
    assert found.shape == wanted.shape and (np.isneginf(found) == hidden).all(), what
    off = np.abs(np.where(hidden, 0, found) - np.where(hidden, 0, wanted)) / (1 + np.abs(np.where(hidden, 0, wanted)))
    assert not off.size or off.max() < unit, f"{what} is off by {off.max()}"


def drawn(seed):
    call = Drawn(seed)
    what = f"seed {seed}: {call.band}, {[type(x).__name__ for x in call.given]}, {call.rows} x {call.columns}"
    wanted, of_moving = call.exact()
    moving = {name: jnp.asarray(x) for name, x in call.moving.items()}
    specs = {name: ROWS if name in "qkv" else P() for name in moving}
    for check_vma in (False, True) if seed % 2 else (True,):
        each = jax.shard_map(
            lambda moving: call.attend(moving, axis_name="rows"),
            mesh=MESH,
            in_specs=(specs,),
            out_specs=(ROWS, P(None, None, "rows")),
            check_vma=check_vma,
        )
        for found, exact in zip(jax.jit(each)(moving), wanted):
            close(found, exact, what)
        step = jax.jit(jax.grad(lambda moving: (each(moving)[0] * call.dout).sum()))
        first, again = step(moving), step(moving)
        for name, exact in of_moving.items():
            close(first[name], exact, f"{what}: d{name}")
            assert (first[name] == again[name]).all(), f"{what}: d{name} has other bits in a second run"


def sharded_by_jit():
    """Batch, rows and heads that a program gets on several devices are those of one."""
    for seed in range(min(COUNT, 6)):
        call = Drawn(seed)
        call.batch = 4
        noise = np.random.default_rng(seed)
        call.moving = {name: noise.standard_normal((4, *x.shape[1:])).astype(np.float32) if name in "qkv" else x
                       for name, x in call.moving.items()}
        if call.heads[1] % SIZE or call.score is of_keys or call.mask is documents or any(
            x.shape[0] not in (1, 4) for mask in call.given for x in vars(mask).values() if hasattr(x, "shape")
        ):
            call.score = call.mask = None
            call.given = []
        moving = {name: jnp.asarray(x) for name, x in call.moving.items()}
        loss = lambda moving: (lambda o: ((o * o).sum(), o))(call.attend(moving)[0])
        step = jax.jit(jax.grad(loss, has_aux=True))
        wanted = step(moving)
        for axis in range(2 + (call.heads[1] % SIZE == 0)):
            over = NamedSharding(MESH, P(*(None,) * axis, "rows"))
            placed = {name: jax.device_put(x, over) if name in "qkv" else x for name, x in moving.items()}
            for found, exact in zip(jax.tree.leaves(step(placed)), jax.tree.leaves(wanted)):
                close(found, np.asarray(exact), f"seed {seed}, axis {axis} on {SIZE} devices", 2e-5)


def small_outputs():
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, 16, 4, 8)) for seed in range(3))
    names = ("row_max", "head_max", "key_sum")
    _, wanted = fmha.jax.attention(q, k, v, causal=True, small=names)
    each = jax.shard_map(
        lambda *x: fmha.jax.attention(*x, causal=True, small=names, axis_name="rows"),
        mesh=MESH,
        in_specs=(ROWS,) * 3,
        out_specs=(ROWS, dict(row_max=P(None, None, "rows"), head_max=P(), key_sum=P())),
    )
    _, found = jax.jit(each)(q, k, v)
    for name in names:
        close(found[name], np.asarray(wanted[name]), name)


def refusals():
    q, k, v = (jax.random.normal(jax.random.key(seed), (2, 16, 4, 8)) for seed in range(3))
    ends = jnp.zeros((1, 1, 2, 16), jnp.int32)
    counts, indices = jnp.zeros((1, 1, 2), jnp.int32), jnp.zeros((1, 1, 2, 2), jnp.int32)
    lists = fmha.BlockLists(counts, indices, block_size=8)
    whole = jnp.zeros((1, 1, 4), jnp.int32), jnp.zeros((1, 1, 4, 4), jnp.int32)
    full = fmha.BlockLists(None, None, *whole, block_size=4)
    few = fmha.BlockLists(counts, indices, block_size=4)
    for options, said in (
        (dict(p_drop=0.5, seed=1), "p_drop 0.5"),
        (dict(alibi_slopes=jnp.ones(4)), "alibi_slopes"),
        (dict(seqused_k=jnp.ones(2, jnp.int32)), "seqused_k"),
        (dict(cu_seqlens_q=jnp.zeros(3, jnp.int32)), "cu_seqlens_q"),
        (dict(block_table=jnp.zeros((2, 1), jnp.int32)), "block_table"),
        (dict(score_code="s * 2"), "score_code"),
        (dict(mask_code="k < 3"), "mask_code"),
        (dict(mask=fmha.Intervals(ends[..., :4])), "intervals has shape (1, 1, 2, 4), not 16 queries on axis 3"),
        (dict(mask=fmha.MaskBits(jnp.zeros((1, 1, 4, 1), jnp.uint32))), "mask_bits has shape (1, 1, 4, 1), not 16"),
        (dict(mask=lists), "block_size has 8 queries, of which a device's 4 are no multiple"),
        (dict(mask=few), "kv_num_blocks has shape (1, 1, 2), not 4 rows of blocks"),
        (dict(mask=[full, "causal"]), "(2, -1, 0, 0) beside BlockLists with full lists"),
        (dict(mask=[fmha.Intervals(ends), "b:3,0,2"]), "sink_columns 2 beside Intervals"),
        (dict(mask=fmha.Intervals(ends), causal=True, axis_name="columns"), "axis_name: 'columns'"),
        (dict(mask="b:-7,0"), "mask"),
        (dict(mask="z"), "mask"),
    ):
        each = jax.shard_map(
            lambda *x: fmha.jax.attention(*x, **{"axis_name": "rows", **options}),
            mesh=MESH, in_specs=(ROWS,) * 3, out_specs=ROWS,
        )
        try:
            jax.jit(each)(q, k, v)
        except (NotImplementedError, TypeError, ValueError, fmha.FmhaError) as error:
            assert said in str(error), f"{said}: {error!r}"
        else:
            raise AssertionError(f"taken: {said}")
    try:
        fmha.jax.attention(q, k, v, axis_name="rows")
    except ValueError as error:
        assert "axis_name: 'rows' is no axis of a jax.shard_map" in str(error), error
    else:
        raise AssertionError("an axis of nothing is taken")


assert len(jax.devices()) == SIZE
refusals()
small_outputs()
sharded_by_jit()
for seed in range(COUNT):
    drawn(seed)
