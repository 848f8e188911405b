"""Sound calls, drawn by a seed, at each door against float64: ``python drawn.py [SEED:]COUNT [DOOR...]``.

Doors are torch's ``attention`` with its gradients, by autograd and by ``torch.func``, ``attention_out``, NumPy's, JAX's
with its gradients, and caches through torch and NumPy: in pages, appended to, turned, under a tree. Rows that lengths
leave out are NaN in inputs, 0 in results and gradients, and as they were in a caller's outputs. Prints a line for each call that
is wrong, then what was counted.
"""

import collections
import json
import math
import random
import sys
import traceback

import numpy
import torch

import fmha
from reference import DEVICE, attention as by_definition, slow_kernels_serve

try:
    import jax
    import jax.numpy as jnp
    import ml_dtypes

    import fmha.jax
except ImportError:
    jax = None

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Largest error of a number that was rounded to a type once, relative to the largest number near it.
UNIT = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAN = float("nan")
POISON = 77.0


def kept(seed, offset, p_drop, batch, heads, rows, keys):
    """Which elements dropout keeps, by CONTRACT.md's Philox: bool [batch, heads, rows, keys]."""
    b, h, i, j = numpy.ogrid[:batch, :heads, :rows, :keys]
    counter = numpy.broadcast_arrays(j // 4, i, b * heads + h, offset % 2**32)
    c0, c1, c2, c3 = (x.astype(numpy.uint64) for x in counter)
    k0, k1, low, shift = seed % 2**32, seed >> 32, numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    for turn in range(10):
        x, y = c0 * numpy.uint64(0xD2511F53), c2 * numpy.uint64(0xCD9E8D57)
        key0, key1 = ((k + turn * step) % 2**32 for k, step in ((k0, 0x9E3779B9), (k1, 0xBB67AE85)))
        c0, c1, c2, c3 = (
            (y >> shift) ^ c1 ^ numpy.uint64(key0),
            y & low,
            (x >> shift) ^ c3 ^ numpy.uint64(key1),
            x & low,
        )
    words = numpy.choose(numpy.broadcast_to(j % 4, c0.shape), [c0, c1, c2, c3])
    # The library holds the probability as f32.
    return torch.from_numpy(words < math.floor((1 - float(numpy.float32(p_drop))) * 2**32))


class Side:
    """Rows of queries or of keys: where each sequence's begin and how many there are."""

    def __init__(self, draw, batch, most, packed, used):
        # Packed rows need a bound of their lengths, and 0 is no bound.
        self.packed, self.most = packed, max(most, int(packed))
        self.physical = [draw.randint(0, most) if packed else most for _ in range(batch)]
        self.lengths = [draw.randint(0, rows) if used else rows for rows in self.physical]
        self.firsts = [sum(self.physical[:i]) for i in range(batch)]
        self.offsets = torch.tensor([*self.firsts, sum(self.physical)], dtype=torch.int32) if packed else None
        self.used = torch.tensor(self.lengths, dtype=torch.int32) if used else None
        self.rows = sum(self.physical) + draw.choice([0, 0, 3]) if packed else most

    def of(self, x, i_batch):
        """A sequence's rows of a tensor."""
        first = self.firsts[i_batch] if self.packed else 0
        rows = x if self.packed else x[i_batch]
        return rows[first : first + self.lengths[i_batch]]

    def left_out(self, batch):
        """Which rows no sequence has."""
        out = torch.ones((self.rows,) if self.packed else (batch, self.rows), dtype=torch.bool)
        for i in range(batch):
            self.of(out, i).fill_(False)
        return out


class Draw(random.Random):
    def maybe(self, chance, value):
        return value() if self.random() < chance else None

    def tensor(self, shape, dtype, may_share=(), dim_last=True):
        """Numbers of order 1 whose axes lie in memory in any order, with gaps, or repeat along an axis."""
        how = self.random()
        if how < 0.3 or not math.prod(shape):
            return torch.randn(shape).to(dtype)
        shared = [axis for axis in may_share if self.random() < 0.15]
        made = [1 if axis in shared else size for axis, size in enumerate(shape)]
        order = list(range(len(shape) - 1)) + [len(shape) - 1]
        if how < 0.7:
            front = order[:-1]
            self.shuffle(front)
            order = front + order[-1:]
        wide = [made[axis] for axis in order]
        wide[-1] += self.choice([0, 0, 1, 8])
        if len(wide) > 2:
            wide[-2] += self.choice([0, 0, 2])
        x = torch.randn(wide).to(dtype)
        x = x[..., : made[order[-2]], : made[order[-1]]] if len(wide) > 1 else x[: made[-1]]
        x = x.permute([order.index(axis) for axis in range(len(shape))])
        if not dim_last and self.random() < 0.15:
            x = x.transpose(-1, -3).contiguous().transpose(-1, -3)
        return x.expand(shape)


class Call:
    """A call and what it means."""

    def __init__(self, draw, caches=False):
        self.draw = draw
        self.dtype = draw.choice(DTYPES)
        self.batch = 0 if draw.random() < 0.02 else draw.randint(1, 3)
        self.heads_kv = draw.randint(1, 3)
        self.heads = self.heads_kv * draw.randint(1, 3)
        self.d, self.dv = draw.choice([1, 3, 8, 16, 40, 64]), draw.choice([1, 8, 16, 24, 64])
        most = draw.choice([4, 12, 12, 70])
        rows, keys = draw.randint(0, most), draw.randint(0, most)
        lengths = draw.choice(["dense", "dense", "used", "packed", "packed", "mixed"])
        if caches:
            lengths = "cache"
        packed = {"packed": (True, True), "mixed": (draw.random() < 0.5, draw.random() < 0.5)}.get(
            lengths, (False,) * 2
        )
        if caches:
            packed = (draw.random() < 0.3, False)
        used = [lengths in ("used", "packed", "mixed") and draw.random() < 0.4 for _ in "qk"]
        self.of_q = Side(draw, self.batch, rows, packed[0], used[0])
        self.of_k = Side(draw, self.batch, keys, packed[1], used[1] or caches)
        self.q = self.rows(self.of_q, self.heads, self.d, share=False)
        self.k = self.rows(self.of_k, self.heads_kv, self.d, share=not caches)
        self.v = self.rows(self.of_k, self.heads_kv, self.dv, share=not caches, dim_last=caches)
        self.options = self.modifiers()
        self.dtype_o = self.options.get("dtype_o", self.dtype)

    def rows(self, side, heads, dim, share, dim_last=True):
        shape = (side.rows, heads, dim) if side.packed else (self.batch, side.rows, heads, dim)
        out = side.left_out(self.batch)
        # Sequences share no rows where lengths leave rows out: one sequence may leave out a row that another reads.
        x = self.draw.tensor(shape, self.dtype, (0, 2) if share and not (out.any() or side.packed) else (), dim_last)
        if out.any():
            x[out] = NAN
        return x

    def modifiers(self):
        draw, most_q, most_k = self.draw, self.of_q.most, self.of_k.most
        bound = lambda: draw.choice([-1, 0, 1, 3, 20])
        mask = draw.choice(
            [
                None,
                None,
                "causal",
                "causal",
                "t",
                f"b:{bound()},{bound()}",
                f"t:{bound()},{bound()}",
                f"b:{bound()},{bound()},2",
                f"g:{draw.randint(1, 9)},{draw.randint(1, 9)}",
                fmha.Mask(2, 2, 0, 1),
            ]
        )
        of = dict(
            mask=mask,
            softmax_scale=draw.maybe(0.3, lambda: draw.choice([0.0, draw.uniform(-1, 1)])),
            softcap=draw.maybe(0.2, lambda: draw.uniform(0.5, 5)),
            sink=draw.maybe(0.2, lambda: torch.randn(self.heads)),
            cu_seqlens_q=self.of_q.offsets,
            cu_seqlens_k=self.of_k.offsets,
            seqused_q=self.of_q.used,
            seqused_k=self.of_k.used,
            max_seqlen_q=self.of_q.most if self.of_q.packed else None,
            max_seqlen_k=self.of_k.most if self.of_k.packed else None,
            deterministic=draw.maybe(0.2, lambda: True),
            batch_invariant=draw.maybe(0.1, lambda: True),
            # No GPU kernel offers row invariance in f32.
            row_invariant=draw.maybe(0.1, lambda: DEVICE == "cpu" or self.dtype != torch.float32 or None),
            accuracy=draw.maybe(0.2, lambda: "exact"),
            check_lengths=draw.maybe(0.2, lambda: True),
            dtype_o=draw.maybe(0.1, lambda: draw.choice(DTYPES)),
        )
        kind = draw.random()
        if kind < 0.15:
            of["alibi_slopes"] = torch.rand(*draw.choice([(self.heads,), (self.batch, self.heads)]))
        elif kind < 0.45:
            front = draw.choice(
                [(self.batch, self.heads), (1, self.heads), (self.batch, 1), (1, 1), (self.heads,), (1,), ()]
            )
            dtype = draw.choice([torch.float32, self.dtype])
            of["bias"] = draw.tensor((*front, most_q, most_k), dtype, tuple(range(len(front))))
        if draw.random() < 0.15:
            of.update(
                p_drop=draw.choice([0.1, 0.5, 0.9]), seed=draw.getrandbits(64), offset=draw.choice([0, 5, 1 << 33])
            )
        return {name: value for name, value in of.items() if value is not None}

    def told(self):
        tensors = {n: (tuple(x.shape), x.stride(), str(x.dtype)) for n, x in self.tensors().items()}
        numbers = {n: x for n, x in self.options.items() if not isinstance(x, torch.Tensor)}
        return f"{tensors} {numbers} lengths {self.of_q.lengths} {self.of_k.lengths}"

    def tensors(self):
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            **{n: x for n, x in self.options.items() if isinstance(x, torch.Tensor)},
        }

    def meaning(self, q, k, v, bias=None, sink=None):
        """O and LSE in float64; of rows that lengths leave out, 0."""
        of = self.options
        o = q.new_zeros((*q.shape[:-1], self.dv), dtype=torch.float64)
        lse = q.new_zeros(
            (self.heads, q.shape[0]) if self.of_q.packed else (self.batch, self.heads, q.shape[1]), dtype=torch.float64
        )
        slopes = of.get("alibi_slopes")
        keep = None
        if of.get("p_drop"):
            keep = kept(of["seed"], of["offset"], of["p_drop"], self.batch, self.heads, self.of_q.most, self.of_k.most)
        if bias is not None:
            bias = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
        for b in range(self.batch):
            mine_q, (mine_k, mine_v) = self.of_q.of(q, b), (self.of_k.of(x, b) for x in (k, v))
            i, j = mine_q.shape[0], mine_k.shape[0]
            given, sums = by_definition(
                mine_q[None],
                mine_k[None],
                mine_v[None],
                mask=fmha.mask(of.get("mask")),
                softmax_scale=of.get("softmax_scale"),
                softcap=of.get("softcap"),
                bias=None if bias is None else bias[b if bias.shape[0] > 1 else 0, ..., :i, :j][None],
                alibi_slopes=None if slopes is None else slopes if slopes.dim() == 1 else slopes[b],
                sink=sink,
                keep=None if keep is None else keep[b : b + 1, :, :i, :j],
                p_drop=of.get("p_drop", 0.0),
            )
            first = self.of_q.firsts[b] if self.of_q.packed else 0
            if self.of_q.packed:
                o[first : first + i], lse[:, first : first + i] = given[0], sums[0]
            else:
                o[b, :i], lse[b, :, :i] = given[0], sums[0]
        return o, lse

    def exact(self):
        """Leaves in float64, in the order of the gradients, and what the call gives of them."""
        leaves = {
            name: x.detach().double().requires_grad_()
            for name, x in self.tensors().items()
            if name in ("q", "k", "v", "bias", "sink")
        }
        return leaves, self.meaning(**leaves)


def near(name, given, wanted, unit):
    """What is wrong with a result, if anything."""
    given, wanted = given.detach().double(), wanted.detach()
    if given.shape != wanted.shape:
        return f"{name}: shape {tuple(given.shape)}, not {tuple(wanted.shape)}"
    finite = torch.isfinite(wanted)
    if not torch.equal(given[~finite], wanted[~finite]):
        return f"{name}: what is not finite differs"
    if not finite.any():
        return None
    error = (given - wanted)[finite].abs()
    bound = unit * max(1.0, wanted[finite].abs().max().item())
    return None if error.max().item() <= bound else f"{name}: error {error.max().item():.3g} > {bound:.3g}"


def results(call, o, lse, exact, loose=1):
    scale = max(
        1.0, *(x.detach().nan_to_num(0, 0, 0).abs().max().item() if x.numel() else 0 for x in (call.v, o.nan_to_num(0)))
    )
    unit = (UNIT[call.dtype_o] + UNIT[call.dtype]) * loose
    of_lse = 2e-6 if loose == 1 else UNIT[call.dtype] * loose
    return near("o", o, exact[0], unit * scale) or (near("lse", lse, exact[1], of_lse) if lse is not None else None)


def gradients(call, given, leaves, exact, dout, dlse):
    # Lengths also leave out rows of O's gradient, which a caller may leave undefined.
    loss = (exact[0] * torch.where(dout.isnan(), 0.0, dout.double())).sum()
    if dlse is not None:
        finite = torch.isfinite(exact[1])
        loss = loss + (torch.where(finite, exact[1], 0.0) * torch.where(dlse.isnan(), 0.0, dlse.double())).sum()
    # With a batch of 0, O depends on no input.
    wanted = (
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if call.batch else (None,) * len(leaves)
    )
    for name, mine, theirs in zip(leaves, given, wanted):
        theirs = torch.zeros_like(leaves[name]) if theirs is None else theirs
        # Rounding of O changes each element of dS through a sum over its row. Dropout enlarges the elements that it
        # keeps.
        unit = (
            (UNIT[call.dtype] + UNIT[call.dtype_o])
            * max(math.sqrt(call.dv), 8)
            / 2
            / (1 - call.options.get("p_drop", 0.0))
        )
        bad = near(f"d{name}", mine, theirs, unit)
        if bad:
            return bad
    return None


def gradient_of(call, shape, dtype, rows_out, packed_lse=False):
    """A gradient with NaN where lengths leave rows out, half of the time."""
    x = torch.randn(shape).to(dtype)
    if call.draw.random() < 0.5:
        if packed_lse is None:
            x[rows_out] = NAN
        elif call.of_q.packed:
            x[:, rows_out] = NAN
        else:
            x.transpose(1, 2)[rows_out] = NAN
    return x


def of_torch(draw):
    call = Call(draw)
    leaves, exact = call.exact()
    inputs = {name: x.detach().requires_grad_() for name, x in call.tensors().items() if name in leaves}
    options = {**call.options, **{name: inputs[name] for name in ("bias", "sink") if name in inputs}}
    wants_lse = draw.random() < 0.5
    given = fmha.attention(inputs["q"], inputs["k"], inputs["v"], return_lse=wants_lse, **options)
    o, lse = given if wants_lse else (given, None)
    bad = results(call, o, lse, exact)
    if bad:
        return call, bad
    out = call.of_q.left_out(call.batch)
    dout = gradient_of(call, o.shape, o.dtype, out, None)
    dlse = gradient_of(call, lse.shape, lse.dtype, out) if wants_lse else None
    found = torch.autograd.grad(
        [x for x in (o, lse) if x is not None], list(inputs.values()), [x for x in (dout, dlse) if x is not None]
    )
    return call, gradients(call, found, leaves, exact, dout, dlse)


def of_func(draw):
    """Gradients by ``torch.func``."""
    call = Call(draw)
    leaves, exact = call.exact()

    def function(*given):
        named = dict(zip(leaves, given))
        q, k, v = (named.pop(name) for name in "qkv")
        return fmha.attention(q, k, v, return_lse=True, **{**call.options, **named})

    (o, lse), back = torch.func.vjp(function, *(call.tensors()[name] for name in leaves))
    bad = results(call, o, lse, exact)
    if bad:
        return call, bad
    dout, dlse = (torch.randn(x.shape).to(x.dtype) for x in (o, lse))
    return call, gradients(call, back((dout, dlse)), leaves, exact, dout, dlse)


def into(draw):
    """attention_out: what lengths leave out stays as it was."""
    call = Call(draw)
    _, exact = call.exact()
    o = (
        draw.tensor(exact[0].shape, call.dtype_o).contiguous()
        if draw.random() < 0.5
        else draw.tensor(exact[0].shape, call.dtype_o)
    )
    o.fill_(POISON)
    lse = torch.full(exact[1].shape, POISON) if draw.random() < 0.5 else None
    v = call.v
    last = [x for x in (call.q, call.k) if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1]
    assert not last
    options = {
        name: x.contiguous() if name not in ("bias",) and isinstance(x, torch.Tensor) else x
        for name, x in call.options.items()
    }
    fmha.attention_out(o, call.q, call.k, v, lse=lse, **options)
    out = call.of_q.left_out(call.batch)
    for name, x, rows in (("o", o, out), ("lse", lse, out)):
        if x is None:
            continue
        turned = x if name == "o" else (x.transpose(0, 1) if call.of_q.packed else x.transpose(1, 2))
        if not (turned[rows] == POISON).all():
            return call, f"{name}: rows that lengths leave out were written"
        turned[rows] = 0
    return call, results(call, o, lse, exact)


def array(x):
    """NumPy's view of a tensor, with its strides."""
    if x.dtype is torch.bfloat16:
        return x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.detach().numpy()


def tensor(x):
    x = numpy.array(x, copy=True, order="C")
    return (
        torch.from_numpy(x.view(numpy.int16)).view(torch.bfloat16)
        if x.dtype.name == "bfloat16"
        else torch.from_numpy(x)
    )


def named(dtype):
    return str(dtype).rpartition(".")[2]


def _foreign(call, convert):
    options = {name: convert(x) if isinstance(x, torch.Tensor) else x for name, x in call.options.items()}
    if "dtype_o" in options:
        options["dtype_o"] = named(options["dtype_o"])
    return options


def of_numpy(draw):
    call = Call(draw)
    _, exact = call.exact()
    o, lse = fmha.attention(*map(array, (call.q, call.k, call.v)), return_lse=True, **_foreign(call, array))
    return call, results(call, tensor(o), tensor(lse), exact)


def of_jax(draw):
    call = Call(draw)
    leaves, exact = call.exact()
    put = lambda x: jnp.asarray(array(x.contiguous()))
    options = _foreign(call, put)
    names = [name for name in leaves if name not in "qkv"]
    wants_lse = draw.random() < 0.5

    def function(q, k, v, *rest):
        return fmha.jax.attention(q, k, v, return_lse=wants_lse, **{**options, **dict(zip(names, rest))})

    given, back = jax.vjp(function, *(put(call.tensors()[name]) for name in leaves))
    o, lse = map(tensor, given) if wants_lse else (tensor(given), None)
    bad = results(call, o, lse, exact)
    if bad:
        return call, bad
    out = call.of_q.left_out(call.batch)
    dout = gradient_of(call, o.shape, o.dtype, out, None)
    dlse = gradient_of(call, lse.shape, lse.dtype, out) if wants_lse else None
    found = back((put(dout), put(dlse)) if wants_lse else put(dout))
    return call, gradients(call, [tensor(x) for x in found], leaves, exact, dout, dlse)


def turned(x, cos, sin, positions, interleaved):
    """Rows of a sequence by the angles of their positions, in f32 and rounded once."""
    half = cos.shape[1]
    rows = x.float()
    c, s = (table.float()[positions].unsqueeze(1) for table in (cos, sin))
    first, second = (
        (rows[..., 0 : 2 * half : 2], rows[..., 1 : 2 * half : 2])
        if interleaved
        else (rows[..., :half], rows[..., half : 2 * half])
    )
    pair = first * c - second * s, first * s + second * c
    front = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([front, rows[..., 2 * half :]], -1).to(x.dtype)


def tree(draw, call, options):
    """A mask of bits over as many last keys as there are queries, and what is added to the scores by its meaning."""
    most = call.of_q.most
    bits = torch.rand(call.batch, most, most) < 0.5
    words = torch.zeros(call.batch, most, (most + 31) // 32, dtype=torch.int64)
    for j in range(most):
        words[:, :, j // 32] |= bits[:, :, j].long() << (j % 32)
    hidden = torch.zeros(call.batch, 1, most, call.of_k.most, dtype=torch.float64)
    for b in range(call.batch):
        rows, keys = call.of_q.lengths[b], call.of_k.lengths[b]
        for i in range(rows):
            for j in range(max(keys - rows, 0), keys):
                if not bits[b, i, j - (keys - rows)]:
                    hidden[b, 0, i, j] = -math.inf
    options.pop("bias", None)
    words = (words - ((words >> 31) << 32)).to(torch.int32)
    if call.of_q.packed:
        rows = torch.zeros(call.of_q.rows, *words.shape[2:], dtype=torch.int32)
        for b in range(call.batch):
            call.of_q.of(rows, b).copy_(words[b, : call.of_q.lengths[b]])
        words = rows
    options.update(mask="causal", tree_mask=words)
    return hidden


def cache(draw, convert=lambda x: x, back=lambda x: x):
    """A cache, dense or in pages, with rows appended to it half of the time; turned, under a tree, V in K's rows."""
    call = Call(draw, caches=True)
    for name in ("dtype_o", "deterministic"):
        call.options.pop(name, None)
    call.dtype_o = call.dtype
    front = draw.random() < 0.2
    if front:
        call.dv = draw.randint(1, call.d)
        call.v = call.k[..., : call.dv]
    before, most = call.of_k.lengths, call.of_k.most
    room = [most - rows for rows in before]
    packed_new = draw.random() < 0.3
    new = [0] * call.batch
    if draw.random() < 0.6 and max(room, default=0):
        new = [draw.randint(0, rows) for rows in room] if packed_new else [draw.randint(0, min(room))] * call.batch
    appends = max(new, default=0) > 0
    firsts = [sum(new[:i]) for i in range(call.batch + 1)]
    k_new, v_new = (
        draw.tensor(
            (firsts[-1], call.heads_kv, dim) if packed_new else (call.batch, new[0], call.heads_kv, dim), call.dtype
        )
        if appends
        else None
        for dim in (call.d, call.dv)
    )
    added = [
        [x[firsts[b] : firsts[b + 1]] if packed_new else x[b] for b in range(call.batch)] if appends else None
        for x in (k_new, v_new)
    ]
    call.of_k.lengths = [rows + more for rows, more in zip(before, new)]
    options = dict(call.options)
    options.setdefault("mask", None)
    if appends and packed_new:
        options.update(cu_seqlens_new=torch.tensor(firsts, dtype=torch.int32), max_seqlen_new=max(new))
    if front:
        options["head_dim_v"] = call.dv
    hidden = tree(draw, call, options) if draw.random() < 0.15 and call.of_q.most else None
    queries, angles = call.q.clone(), None
    if appends and call.d > 1 and draw.random() < 0.4:
        half, interleaved = draw.randint(1, call.d // 2), draw.random() < 0.5
        angles = torch.rand(most + call.of_q.most + 1, half) * 6
        cos, sin = (x.to(draw.choice([torch.float32, call.dtype])) for x in (angles.cos(), angles.sin()))
        sin = sin.to(cos.dtype)
        options.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
        moves = fmha.mask(options["mask"]).kind in (1, 2)
        for b in range(call.batch):
            rows = call.of_q.of(queries, b)
            positions = before[b] + torch.arange(rows.shape[0]) * moves
            rows.copy_(turned(rows, cos, sin, positions, interleaved))
            added[0][b] = turned(added[0][b], cos, sin, before[b] + torch.arange(new[b]), interleaved)
    k, v = call.k.clone(), call.v.clone()
    if draw.random() < 0.5 and most:
        size = draw.choice([size for size in (1, 2, 3, 4, 8, 16) if most % size == 0])
        pages = most // size
        order = torch.randperm(call.batch * pages)
        pools = []
        for x in (k, v):
            pool = torch.full((call.batch * pages, size, *x.shape[2:]), NAN, dtype=x.dtype)
            pool[order] = x.reshape(call.batch * pages, size, *x.shape[2:])
            pools.append(pool)
        k, v = pools
        options["block_table"] = order.view(call.batch, pages).to(torch.int32)
    options = {
        name: convert(x.contiguous() if name != "bias" else x) if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
    }
    k, v = convert(k), None if front else convert(v)
    news = () if k_new is None else (convert(k_new),) if front else (convert(k_new), convert(v_new))
    o, lse = fmha.attention_with_kvcache(convert(call.q), k, v, *news, return_lse=True, **options)
    # The expected result is computed from the cache's rows with the appended rows.
    call.q, call.k, call.v = queries, call.k.clone(), call.v.clone()
    for whole, rows in (
        (call.k, added[0]),
        (call.v, [x[..., : call.dv] for x in added[0]] if front and appends else added[1]),
    ):
        for b in range(call.batch):
            if appends:
                whole[b, before[b] : before[b] + new[b]] = rows[b]
    if hidden is not None:
        call.options.pop("bias", None)
        call.options.update(bias=hidden, mask=None)
    _, exact = call.exact()
    # A rotated element that is rounded the other way changes its row's scores.
    loose = 1 if angles is None else 4 * math.sqrt(call.d)
    return call, results(call, back(o), back(lse), exact, loose=loose)


def cache_of_numpy(draw):
    return cache(draw, array, tensor)


DOORS = {"torch": of_torch, "func": of_func, "into": into, "cache": cache}
if jax is not None:
    DOORS.update(numpy=of_numpy, numpy_cache=cache_of_numpy, jax=of_jax)
#: Number of calls of each kind among a hundred; JAX's are few, since JAX compiles each.
WEIGHTS = {"torch": 40, "func": 5, "into": 10, "cache": 22, "numpy": 12, "numpy_cache": 6, "jax": 5}


def main(seed, count, doors):
    counts, bad = collections.Counter(), 0
    for at in range(count):
        draw = Draw(f"{seed}:{at}")
        torch.manual_seed(draw.getrandbits(32))
        door = draw.choices(doors, [WEIGHTS[name] for name in doors])[0]
        try:
            call, wrong = DOORS[door](draw)
            told = call.told()
        except Exception as error:
            wrong, told = f"{type(error).__name__}: {error}", traceback.format_exc(limit=-2)
        counts[door] += 1
        if wrong:
            bad += 1
            print(f"call {at} of seed {seed} at {door}: {wrong[:600]}\n    {told}", flush=True)
    print(json.dumps({"wrong": bad, **counts}))
    return 1 if bad else 0


if __name__ == "__main__":
    slow_kernels_serve()
    *seed, count = sys.argv[1].split(":")
    sys.exit(main(int(seed[0]) if seed else 1, int(count), sys.argv[2:] or list(DOORS)))
