"""Rows of `anyshape.py --what decode`: calls as a server makes them, each beside the peers that take it.

A row has a batch of sequences with lengths of their own in caches of 16 bits or FP8, contiguous or in pages, and one
to sixteen tokens of each. The makers follow peers.py: whatever can be prepared is prepared by the maker and not timed.
"""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import dataclass

import compare
import ours
import peers
from peers import Unsupported, torch

MOST_READ = 3 << 30  # bytes of K and V in use
MOST_CACHE = 24 << 30  # bytes of contiguous caches, rows past a sequence's length included
LEAST_READ = 1 << 18
PAGES = (1, 2, 8, 16, 16, 16, 32, 64, 64, 128)
# Rows of served models, drawn without a seed: sequences, heads, tokens, the shortest and the longest length, and words
# of Decode. Logarithms of the lengths are evenly spaced, and both bounds occur.
NAMED = (
    (24, 28, 4, 1, 5000, 5000, {}),
    (7, 96, 8, 1, 3000, 3000, {}),
    (12, 24, 3, 1, 8192, 8192, dict(head_dim=64)),
    (1, 28, 4, 1, 777, 777, {}),
    (1, 28, 4, 1, 9000, 9000, {}),
    (1, 40, 8, 1, 200_000, 200_000, {}),
    (64, 32, 8, 1, 1024, 1024, {}),
    (1, 32, 8, 1, 1024, 1024, {}),
    *((*mixed, dict(page_size=page_size)) for page_size in (0, 16, 64) for mixed in (
        (16, 28, 4, 1, 1, 64574), (64, 32, 8, 1, 10, 18577), (100, 40, 8, 1, 204, 7813), (8, 64, 8, 1, 123, 41834)
    )),
    *((32, 32, 8, tokens, 100, 16000, dict(page_size=64)) for tokens in (3, 5, 7)),
    *((16, 32, 8, 1, length, length, dict(page_size=page_size)) for page_size in (0, 64) for length in (4096, 32768)),
    (16, 32, 8, 1, 4096, 4096, dict(cache="e4m3")),
    (16, 32, 8, 1, 32768, 32768, dict(cache="e4m3")),
    (64, 32, 8, 1, 10, 18577, dict(cache="e4m3", page_size=64)),
)


@dataclass(frozen=True)
class Decode:
    """One call. `lengths` are the keys in use of each sequence, the new tokens' own included; the mask is causal from
    the bottom right."""

    tokens: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: str = "bf16"
    cache: str = "16 bits"  # or e4m3
    page_size: int = 0  # 0: contiguous
    window: int | None = None  # keys left of the diagonal
    softcap: float | None = None
    sink: bool = False
    backward: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def mixed(self) -> bool:
        return min(self.lengths) != self.longest

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def seen(self) -> int:
        """Keys that a call reads of all sequences."""
        if self.window is None:
            return sum(self.lengths)
        return sum(min(n, self.window + self.tokens) for n in self.lengths)

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and its value, of all kv heads."""
        return 2 * self.num_heads_kv * self.head_dim * (1 if self.cache == "e4m3" else 2)

    @property
    def bytes(self) -> int:
        return self.seen * self.row_bytes + 4 * self.batch * self.tokens * self.num_heads_q * self.head_dim

    @property
    def flops(self) -> float:
        return 4.0 * self.tokens * self.num_heads_q * self.head_dim * self.seen

    def __str__(self) -> str:
        lengths = f"S{min(self.lengths)}..{self.longest}" if self.mixed else f"S{self.longest}"
        words = [f"B{self.batch}", f"H{self.num_heads_q}/{self.num_heads_kv}", f"T{self.tokens}", lengths]
        words += [f"D{self.head_dim}", self.dtype]
        words += ["e4m3-cache"] * (self.cache == "e4m3") + [f"page{self.page_size}"] * bool(self.page_size)
        words += [f"window{self.window}"] * (self.window is not None)
        words += [f"softcap{self.softcap}"] * (self.softcap is not None) + ["sink"] * self.sink
        return " ".join(words)


def drawn(draw: random.Random) -> Decode:
    """Batch 1 to 256, groups of 1 to 16 heads, 1 to 16 tokens, lengths even in the logarithm from 1 to 200000."""
    even = lambda least, most: round(math.exp(draw.uniform(math.log(least), math.log(most))))
    while True:
        batch, heads_kv = even(1, 256), draw.choice((1, 2, 3, 4, 5, 8, 8, 8, 16))
        group = draw.choice((1, 2, 4, 4, 8, 8, 16, draw.randint(1, 16), draw.randint(1, 16)))
        head_dim = draw.choice((64, 128, 128, 128, 128, 256, draw.randrange(64, 257, 8)))
        longest = even(1, 200_000)
        lengths = tuple(even(1, longest) for _ in range(batch)) if draw.random() < 0.6 else (longest,) * batch
        w = Decode(
            tokens=draw.choice((1, 1, 1, 1, 1, 2, 3, 4, 5, 7, 8, 16)),
            num_heads_q=heads_kv * group,
            num_heads_kv=heads_kv,
            head_dim=head_dim,
            lengths=lengths,
            dtype=draw.choice(("bf16", "bf16", "fp16")),
            cache="e4m3" if draw.random() < 0.15 and head_dim % 16 == 0 else "16 bits",
            page_size=draw.choice(PAGES) if draw.random() < 0.5 else 0,
            window=even(16, 8192) if draw.random() < 0.1 else None,
            softcap=draw.choice((20.0, 50.0)) if draw.random() < 0.08 else None,
            sink=draw.random() < 0.05,
        )
        # A cache without pages has room for the longest length in every sequence.
        cached = 0 if w.page_size else w.batch * w.longest * w.row_bytes
        if w.num_heads_q <= 128 and LEAST_READ <= w.bytes <= MOST_READ and cached <= MOST_CACHE:
            return w


def named() -> list[Decode]:
    rows = []
    for batch, heads, heads_kv, tokens, least, most, words in NAMED:
        draw = random.Random(f"{batch} {least} {most}")
        between = (round(math.exp(draw.uniform(math.log(least), math.log(most)))) for _ in range(batch - 2))
        lengths = (most, *between, least)[:batch]
        rows.append(Decode(tokens, heads, heads_kv, lengths=lengths, **dict(dict(head_dim=128), **words)))
    return rows


def make_inputs(w: Decode, device="cuda") -> list:
    """Q; K and V, contiguous or pages in random order; the block table or None; keys in use; sinks or None."""
    dtype = peers.torch_dtype(w)

    def normal(*shape):
        x = torch.empty(shape, device=device, dtype=dtype)
        return x if x.is_meta else x.normal_()

    if w.page_size:
        pages = [-(-n // w.page_size) for n in w.lengths]
        extent = (sum(pages), w.page_size)
        table = torch.zeros(w.batch, max(pages), dtype=torch.int32)
        order, begin = torch.randperm(sum(pages), dtype=torch.int32), 0
        for row, n in zip(table, pages):
            row[:n] = order[begin : begin + n]
            begin += n
        table = table.to(device)
    else:
        extent, table = (w.batch, w.longest), None
    q = normal(w.batch, w.tokens, w.num_heads_q, w.head_dim)
    k, v = (normal(*extent, w.num_heads_kv, w.head_dim) for _ in range(2))
    if w.cache == "e4m3":
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    used = torch.tensor(w.lengths, dtype=torch.int32).to(device)
    sink = torch.zeros(w.num_heads_q, device=device) if w.sink else None
    return [q, k, v, table, used, sink]


def make_ours(w: Decode, q, k, v, table, used, sink):
    """`fmha` through its C ABI; the longest sequence is all that the host says of the lengths `used`, if they are given."""
    o = torch.empty_like(q)
    call = ours.Call(
        batch=w.batch, seqlen_q=w.tokens, seqlen_k=w.longest,
        num_heads_q=w.num_heads_q, num_heads_kv=w.num_heads_kv, head_dim_qk=w.head_dim, head_dim_v=w.head_dim,
        mask=b"b" if w.window is None else f"b:{w.window},0".encode(),
        softmax_scale=ctypes.pointer(ctypes.c_float(w.softmax_scale)),
        dtype_qk=ours.DTYPE[q.dtype], dtype_v=ours.DTYPE[q.dtype], dtype_o=ours.DTYPE[q.dtype],
        stream=None if q.is_meta else torch.cuda.current_stream().cuda_stream,
    )
    problem, args = call.problem, call.args
    call.tensors(q=q, k=k, v=v, o=o)
    if used is not None:
        problem.seqused_k, args.seqused_k = 1, ours._address(used)
    if table is not None:
        args.block_table = ours._address(table)
        problem.page_size, args.num_pages, args.max_pages = w.page_size, k.shape[0], table.shape[1]
    if sink is not None:
        problem.sink, args.sink = 1, ours._address(sink)
    if w.softcap is not None:
        problem.softcap = ctypes.pointer(ctypes.c_float(w.softcap))
    ones = None
    if w.cache == "e4m3":
        ones = torch.ones(w.batch, w.num_heads_kv, device=q.device)
        problem.descale_k = problem.descale_v = 1
        args.descale_k = args.descale_v = ours._address(ones)
        cache = ours.FmhaCache(struct_bytes=ctypes.sizeof(ours.FmhaCache), dtype_cache=ours.DTYPE[k.dtype])
        problem.cache = ctypes.pointer(cache)
    queued = ours._runner(call, ours._options(timed=True, backward=False, caller_workspace=q.is_meta))

    def run():
        queued()
        return o

    run.held = q, k, v, table, used, sink, ones
    return run


def make_fa3(w: Decode, q, k, v, table, used, sink):
    """FlashAttention-3 with its own choice of splits. Beside an FP8 cache its Q is FP8 too: it has no other form."""
    peers._require(sink is None, "FA3 has no sinks")
    peers._require(w.head_dim != 96, "this build has no head dim 96")
    forward = peers._load_fa3("forward").fwd.default
    kw = dict(softmax_scale=w.softmax_scale, is_causal=w.window is None, num_splits=0, seqused_k=used)
    if w.window is not None:
        kw |= dict(window_size_left=w.window, window_size_right=0)
    if w.softcap is not None:
        kw |= dict(softcap=w.softcap)
    if table is not None:
        kw |= dict(page_table=table)
    if w.cache == "e4m3":
        q = q.to(k.dtype)
        for name in ("q_descale", "k_descale", "v_descale"):
            kw[name] = torch.ones(w.batch, w.num_heads_kv, device=q.device)
    return lambda: forward(q, k, v, **kw)[0]


def make_cudnn(w: Decode, q, k, v, table, used, sink):
    """cuDNN as torch calls it: one token over whole caches of 16 bits."""
    peers._require(w.tokens == 1 and not w.mixed and table is None, "one token over equal contiguous lengths only")
    peers._require(w.cache != "e4m3" and sink is None, "no FP8 cache, no sinks")
    peers._require(w.window is None and w.softcap is None, "no window, no soft-cap")
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: forward(q, k, v, None, False, 0.0, False, False, scale=w.softmax_scale)[0].transpose(1, 2)


MAKERS = {"fa3": make_fa3, "cudnn": make_cudnn}


def make(peer: str, w: Decode, inputs: list):
    if peer not in MAKERS:
        raise Unsupported(f"{peer} has no decoding here")
    return MAKERS[peer](w, *inputs)


def _keys(w: Decode, x, table, index: int):
    """[length, heads_kv, head_dim] of one sequence."""
    n = w.lengths[index]
    if table is None:
        return x[index, :n]
    return x[table[index, : -(-n // w.page_size)].long()].flatten(0, 1)[:n]


def errors(w: Decode, q, k, v, table, used, sink, outputs: dict, pairs=8) -> dict:
    """Each output's error over all tokens of some (sequence, head) pairs: the longest and the shortest sequence, the
    first and the last head among them."""
    generator = random.Random(1)
    some = [(w.lengths.index(w.longest), 0), (w.lengths.index(min(w.lengths)), w.num_heads_q - 1)]
    some += [(generator.randrange(w.batch), generator.randrange(w.num_heads_q)) for _ in range(pairs - len(some))]
    group = w.num_heads_q // w.num_heads_kv
    actual, expected = {name: [] for name in outputs}, []
    for index, head in some:
        k1, v1 = (_keys(w, x, table, index)[:, head // group].double() for x in (k, v))
        scores = q[index, :, head].double() @ k1.T * w.softmax_scale
        if w.softcap is not None:
            scores = w.softcap * torch.tanh(scores / w.softcap)
        n = w.lengths[index]
        diagonal = torch.arange(w.tokens, device=q.device)[:, None] + (n - w.tokens)
        key = torch.arange(n, device=q.device)
        hidden = key > diagonal
        if w.window is not None:
            hidden |= key < diagonal - w.window
        scores.masked_fill_(hidden, -math.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[head].double().expand(w.tokens, 1)], 1)
        p = torch.softmax(scores, -1).nan_to_num_(0.0)  # a row that sees no key
        expected.append(p[:, :n] @ v1)
        for name, o in outputs.items():
            actual[name].append(o[index, :, head].double())
    return {name: compare.relative_error(torch.cat(o), torch.cat(expected)) for name, o in actual.items()}


def tolerance(w: Decode, name: str) -> float:
    """The kit's; an FP8 cache's peer multiplies in FP8."""
    return compare.TOLERANCE["e4m3" if w.cache == "e4m3" and name in MAKERS else w.dtype]
