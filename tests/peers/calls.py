"""The calls of `grids.py`: inputs, the peer's function, and what float64 says."""

from __future__ import annotations

import math
import os

import torch

import fmha
from fmha import flash_attn as fa2, flash_attn_3 as fa3, flash_attn_4 as fa4, rotary
from reference import DEVICE, turned, visible

#: Most multiply-adds of a call.
WORK = float(os.environ.get("FMHA_PEERS_WORK", "2e8" if DEVICE == "cpu" else "1e11"))
#: Most multiply-adds of a call that has been reduced to one group of heads.
MOST_WORK = float(os.environ.get("FMHA_PEERS_MOST_WORK", str(4 * WORK)))

if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


class Large(Exception):
    """A call beyond the bound of work."""


class Otherwise(Exception):
    """A right result that differs as the page "What differs from FlashAttention" names."""


class Skipped(Exception):
    """A combination that the suite skips."""


def i32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def offsets(lengths):
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0))


def plain(
    q, k, v, seen, scale, softcap=0.0, bias=None, sink=None, keep=None, p_drop=0.0, wide=torch.float64, between=None
):
    """Attention of one sequence ``(rows, heads, d)`` in the type ``wide``, P rounded to the type ``between``; LSE in f64."""
    q, k, v = (x.to(wide) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q * scale, k)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(wide)
    s = s.masked_fill(~seen, -math.inf)
    columns = s if sink is None else torch.cat((s, sink.to(wide)[:, None, None].expand(-1, s.shape[1], 1)), -1)
    p = torch.softmax(columns, -1)[..., : s.shape[-1]].nan_to_num()
    lse = torch.logsumexp(columns.double(), -1) if columns.shape[-1] else s.new_full(s.shape[:2], -math.inf).double()
    if keep is not None:
        p = p * keep / (1 - p_drop)
    if between is not None:
        p = p.to(between).to(wide)
    return torch.einsum("hij,jhd->ihd", p, v), lse


class Judge:
    """Compares a result's sequences with float64 by the suites' rule."""

    def __init__(self):
        self.said = ""

    def near(self, name, got, exact, same, times=2, floor=1e-4):
        got = got.double()
        if not torch.equal(torch.isfinite(got), torch.isfinite(exact)):
            self.said = self.said or f"{name} is finite elsewhere than its definition"
            return
        difference = lambda x: (x.detach().double() - exact).abs().nan_to_num(0.0, 0.0, 0.0)
        error, allowed = (float(difference(x).max()) if x.numel() else 0.0 for x in (got, same))
        if error > times * allowed + floor and not self.said:
            self.said = f"{name} is off by {error:.3g}, plain attention in its type by {allowed:.3g}"


def sizes_of(case, rows, keys, most_batch, heads=6):
    """A batch and heads that the bound of work leaves."""
    per_kv = {"mha": 1, "gqa": 2, "mqa": heads}[case["group"]]
    per_head = max(rows, 1) * max(keys, 1) * case["d"] * 2 + keys * case["d"]
    heads_kv = heads // per_kv
    batch = most_batch
    while batch > 1 and per_head * batch * heads_kv * per_kv > WORK:
        batch -= 1
    while heads_kv > 1 and per_head * batch * heads_kv * per_kv > WORK:
        heads_kv -= 1
    while per_kv > 2 and per_head * batch * heads_kv * per_kv > WORK:
        per_kv //= 2
    if per_head * batch * heads_kv * per_kv > MOST_WORK:
        raise Large
    return batch, heads_kv * per_kv, heads_kv


def window_of(case, rng, keys):
    """Bounds as the suite gives them, and what they and ``causal`` leave visible of (rows, keys)."""
    kind = case["local"]
    left, right = (rng.randrange(max(keys, 1)), rng.randrange(max(keys, 1))) if kind else (-1, -1)
    # The suites of FlashAttention 3 and 4 use at most one of these options at a time.
    if case["suite"] in ("fa3", "fa4") and kind and case["causal"]:
        raise Skipped
    if case["suite"] != "fa4":
        bound = 0 if case["causal"] else right
        mask = fmha.NONE if left < 0 and bound < 0 else fmha.Mask(2, left, bound)
        return (left, right), lambda n, m: visible(mask, n, m)
    # FlashAttention 4 has windows that begin behind the diagonal or end before it.
    window = [(None, None), (left, right), (None, -right), (-left, None)][kind]

    def seen(n, m):
        apart = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
        low, high = window[0], 0 if case["causal"] else window[1]
        return (apart >= (-m - n if low is None else -low)) & (apart <= (m + n if high is None else high))

    return window, seen


def made(*shape, dtype, grad=False):
    if dtype == torch.float8_e4m3fn:
        return torch.randn(*shape).to(torch.bfloat16).to(dtype)
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def chunk_mask(chunk, n, m):
    if not chunk:
        return torch.ones(n, m, dtype=torch.bool)
    position = torch.arange(n)[:, None] + m - n
    first = torch.div(position, chunk, rounding_mode="floor") * chunk
    key = torch.arange(m)
    return (key >= first) & (key < first + chunk)


def short_sums(q, k, scale):
    """The error of a score whose products are added with 13 bits, as Hopper adds those of FP8. No suite checks that LSE."""
    if not (q.numel() and k.numel()):
        return 0.0
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return scale * 2.0**-13 * float(torch.einsum("ihd,jhd->hij", q.detach().abs(), k.detach().abs()).max())


def compared(judge, got, got_lse, inputs, sequences, scale, base, seen_of, gradients=None, dout=None, more=None):
    """Each of ``sequences``, (q rows, k rows) as slices or tensors of rows, against its definition."""
    q, k, v = inputs
    # The suites compare with sums in a 16-bit type. FP8 is compared in bf16 with P in FP8, as FlashAttention 3's does.
    eighth = base == torch.float8_e4m3fn
    same_type, between = (torch.bfloat16, base) if eighth else (base, None)
    floor = {torch.float16: 1e-4, torch.bfloat16: 1e-3, torch.float32: 1e-5}.get(base, 2e-2)
    for b, (rows, keys) in enumerate(sequences):
        one = [q[rows], k[keys], v[keys]]
        seen = seen_of(one[0].shape[0], one[1].shape[0])
        rest = more(b) if more else {}
        exact_in = [x.detach().double().requires_grad_(gradients is not None) for x in one]
        exact, exact_lse = plain(*exact_in, seen, scale, **rest)
        same_in = [x.detach().to(same_type).requires_grad_(gradients is not None) for x in one]
        same, _ = plain(*same_in, seen, scale, wide=same_type, between=between, **rest)
        judge.near("O", got[rows], exact.detach(), same.detach(), floor=floor)
        if got_lse is not None:
            least = max(1e-3, short_sums(*exact_in[:2], scale)) if eighth else 1e-3
            judge.near("LSE", got_lse[:, rows], exact_lse.detach(), exact_lse.detach(), floor=least)
        if gradients is not None:
            by = torch.autograd.grad(exact, exact_in, dout[rows].double(), allow_unused=True)
            like = torch.autograd.grad(same, same_in, dout[rows].to(same_type), allow_unused=True)
            for name, x, at, a, c in zip(("dQ", "dK", "dV"), gradients, (rows, keys, keys), by, like):
                judge.near(name, x[at], a, c.nan_to_num(), times=3, floor=4 * floor)


def lengths_of(case, rng, most, batch, zero=0):
    """Lengths of packed sequences, as the suite's mode draws them."""
    mode = case.get("lengths", "random")
    lengths = {
        "full": lambda: most,
        "random": lambda: rng.randint(max(0 if zero else 1, most - 20), most),
        "third": lambda: rng.randint(max(most // 3, 1), most),
    }
    drawn = [lengths[mode]() for _ in range(batch)]
    if zero:
        # The suite makes every fifth sequence empty, and the last.
        drawn = [0 if b % 5 == 0 or b == batch - 1 else length for b, length in enumerate(drawn)]
    return drawn


def alibi_bias(slopes, n, m):
    apart = (torch.arange(n)[:, None] + m - n - torch.arange(m)).abs()
    return -slopes[:, None, None].double() * apart


def dense_or_packed(case, rng, call_dense, call_packed):
    """The calls of `dense`, `packed`, `qkv` and `causal` kinds of a generation."""
    n, m = case["sizes"]
    if case.get("swap"):
        n, m = m, n
    generation = case["suite"]
    packs = case["kind"].startswith("packed") or case.get("page")
    pack_q, pack_k = case.get("unpad", (1, 1)) if packs else (0, 0)
    dtype = getattr(torch, case["dtype"])
    if case["suite"] == "fa4":
        dtype = torch.bfloat16
    eighth = dtype == torch.float8_e4m3fn
    d, has_qv = case["d"], case.get("qv") and case["d"] == 64 and not eighth
    if case.get("qv") and not has_qv:
        raise Skipped
    dv = rng.choice([256, 512]) if has_qv else rng.choice([128, d]) if 128 < d <= 192 and generation != "fa2" else d
    if eighth:
        dv = d
    dropout, softcap = case.get("dropout", 0.0), case.get("softcap", 0.0)
    if softcap and dropout:
        raise Skipped
    window, inside = window_of(case, rng, m)
    chunk = rng.randrange(1, 2 * m + 1) if case.get("chunk") and (case["causal"] or case["local"]) else 0
    batch, heads, heads_kv = sizes_of(case, n, m, 4)
    grad = not (eighth or has_qv or chunk or case.get("page"))
    shape = lambda rows, h, dim: made(batch, rows, h, dim, dtype=dtype, grad=False)
    if case["kind"] == "qkv2":
        heads_kv = heads
    q, k, v = shape(n, heads, d), shape(m, heads_kv, d), shape(m, heads_kv, dv)
    if softcap and not eighth:
        q = (q.float() * softcap / 4).to(dtype)
    qv = shape(n, heads, dv) if has_qv else None
    options = dict(causal=bool(case["causal"]), softcap=softcap)
    options["window_size"] = torch.tensor(window) if generation != "fa4" and rng.random() < 0.5 else window
    scale = (d + (dv if has_qv else 0)) ** -0.5
    if has_qv:
        options["qv"] = qv
    if chunk:
        options["attention_chunk"] = chunk
    slopes, scales = None, {}
    if case.get("alibi"):
        slopes = torch.rand(batch, heads) * 0.3
        options["alibi_slopes"] = slopes
    if dropout:
        options["dropout_p"] = dropout
    sink = torch.randn(heads).to(dtype) if case.get("sink") else None
    if sink is not None:
        options["learnable_sink"] = sink
    if eighth:
        scales = {f"{name}_descale": torch.rand(batch, heads_kv) * 2 for name in "qkv"}
        options.update(scales)
    if packs:
        in_q, in_k = (
            lengths_of(case, rng, most, batch, zero) for most, zero in zip((n, m), case.get("zero", (0, 0)))
        )
        flat = lambda x, lengths: torch.cat([x[b, :length] for b, length in enumerate(lengths)])
        first_q, first_k = offsets(in_q), offsets(in_k)
        tensors = [flat(q, in_q), flat(k, in_k), flat(v, in_k)]
        if has_qv:
            options["qv"] = flat(qv, in_q)
        used_q, used_k = in_q, in_k
        if case.get("unused"):
            used_q, used_k = ([max(1, x - rng.randrange(8)) for x in lengths] for lengths in (in_q, in_k))
            options.update(seqused_q=i32(*used_q), seqused_k=i32(*used_k))
        # A side that is not packed has a batch axis, and gives the number of used rows of each sequence.
        if not pack_q:
            tensors[0], first_q = q, torch.arange(batch + 1) * n
            options["seqused_q"] = i32(*used_q)
        if not pack_k:
            tensors[1:], first_k = (k, v), torch.arange(batch + 1) * m
            options["seqused_k"] = i32(*used_k)
        sequences = [
            (slice(int(a), int(a) + x), slice(int(c), int(c) + y))
            for a, x, c, y in zip(first_q, used_q, first_k, used_k)
        ]
        given = [x.detach().requires_grad_(grad) for x in tensors]
        if case.get("page"):
            out, lse, marks = paged_2(case, rng, given, first_q, first_k, n, m, options)
        else:
            offsets_q, offsets_k = (first if pack else None for first, pack in ((first_q, pack_q), (first_k, pack_k)))
            out, lse, marks = call_packed(given, offsets_q, offsets_k, n, m, options, case)
    else:
        sequences = [(slice(b * n, (b + 1) * n), slice(b * m, (b + 1) * m)) for b in range(batch)]
        given = [x.detach().requires_grad_(grad) for x in (q, k, v)]
        out, lse, marks = call_dense(given, options, case)
    flat_out = out if pack_q else out.flatten(0, 1)
    flat_lse = None if lse is None else lse if pack_q else lse.transpose(0, 1).flatten(1, 2)
    gradients = dout = None
    if grad:
        dout = torch.randn_like(flat_out)
        twice = case.get("twice", False)
        gradients_of = lambda: torch.autograd.grad(out, given, dout.view_as(out), retain_graph=twice)
        first = gradients_of()
        # The suites require equal bits of dK and dV in a second run, and dQ within the rounding of an addition of 0.3.
        other_bits = []
        for name, a, b in zip(("dQ", "dK", "dV"), first, gradients_of() if twice else ()):
            if not torch.allclose(b, a, atol=2 * float(((a + 0.3 - 0.3) - a).abs().max())):
                return f"{name} is far from itself the second time"
            if name != "dQ" and not torch.equal(a, b):
                other_bits.append(name)
        gradients = [x if x.dim() == 3 else x.flatten(0, 1) for x in first]
        if twice and dropout and m == 1:
            # With one key dS is 0, and only O's rounding leaves something: the suite compares bits alone.
            gradients = None
    rows = [x.detach() if x.dim() == 3 else x.detach().flatten(0, 1) for x in given]
    if eighth:
        rows = [
            torch.cat(
                [
                    x[s[i > 0]].double()
                    * scales[f"{'qkv'[i]}_descale"][b].repeat_interleave(x.shape[1] // heads_kv)[None, :, None]
                    for b, s in enumerate(sequences)
                ]
            )
            for i, x in enumerate(rows)
        ]
    if has_qv:
        extra = options["qv"] if packs else options["qv"].flatten(0, 1)
        rows = [torch.cat((rows[0], extra), -1), torch.cat((rows[1], rows[2]), -1), rows[2]]
    if eighth and case.get("unused"):
        # The scaled rows were gathered one after another.
        ends = [offsets(x) for x in (used_q, used_k)]
        flat_out, flat_lse = flat_out[torch.cat([torch.arange(s[0].start, s[0].stop) for s in sequences])], None
        sequences = [
            (slice(int(ends[0][b]), int(ends[0][b + 1])), slice(int(ends[1][b]), int(ends[1][b + 1])))
            for b in range(batch)
        ]

    def beside(b):
        rest = dict(softcap=softcap)
        rows_b, keys_b = (s.stop - s.start for s in sequences[b])
        if slopes is not None:
            rest["bias"] = alibi_bias(slopes[b], rows_b, keys_b)
        if sink is not None:
            rest["sink"] = sink
        if dropout:
            rest.update(keep=marks[b, :, :rows_b, :keys_b] >= 0, p_drop=dropout)
        return rest

    judge = Judge()
    seen = lambda a, c: inside(a, c) & chunk_mask(chunk, a, c)
    compared(judge, flat_out, flat_lse, rows, sequences, scale, dtype, seen, gradients, dout, beside)
    if not judge.said and grad and other_bits:
        raise Otherwise(f"{' and '.join(other_bits)} of few keys in another order the second time")
    return judge.said


def paged_2(case, rng, given, first_q, first_k, n, m, options):
    """FlashAttention 2's packed function over pages."""
    size = case["page"]
    batch = first_q.shape[0] - 1
    count = -(-m // size)
    table = torch.randperm(batch * count).view(batch, count)
    q, *caches = given
    pages = []
    for x in caches:
        pool = torch.full((batch * count, size, *x.shape[1:]), math.nan, dtype=x.dtype)
        for b in range(batch):
            for j in range(int(first_k[b + 1] - first_k[b])):
                pool[table[b, j // size], j % size] = x[first_k[b] + j]
        pages.append(pool)
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, *pages, first_q, first_k, n, m, return_attn_probs=True, block_table=table.int(), **options
    )
    return out, lse, None


def dense_2(given, options, case):
    options = dict(options, return_attn_probs=True)
    if case["kind"] == "qkv2":
        return fa2.flash_attn_qkvpacked_func(torch.stack(given, 2), **options)
    if case.get("kvpacked"):
        return fa2.flash_attn_kvpacked_func(given[0], torch.stack(given[1:], 2), **options)
    return fa2.flash_attn_func(*given, **options)


def packed_2(given, first_q, first_k, n, m, options, case):
    if case.get("kvpacked"):
        kv = torch.stack(given[1:], 1)
        return fa2.flash_attn_varlen_kvpacked_func(
            given[0], kv, first_q, first_k, n, m, return_attn_probs=True, **options
        )
    return fa2.flash_attn_varlen_func(*given, first_q, first_k, n, m, return_attn_probs=True, **options)


def dense_3(given, options, case):
    return (*fa3.flash_attn_func(*given, return_attn_probs=True, **options), None)


def packed_3(given, first_q, first_k, n, m, options, case):
    return (*fa3.flash_attn_varlen_func(*given, first_q, first_k, n, m, return_attn_probs=True, **options), None)


def dense_4(given, options, case):
    return (*fa4.flash_attn_func(*given, return_lse=True, **options), None)


def packed_4(given, first_q, first_k, n, m, options, case):
    longest = dict(max_seqlen_q=n, max_seqlen_k=m) if case["longest"] else {}
    lengths = dict(cu_seqlens_q=first_q, cu_seqlens_k=first_k)
    return (*fa4.flash_attn_varlen_func(*given, return_lse=True, **lengths, **longest, **options), None)


def over_cache(case, rng, module):
    """`flash_attn_with_kvcache` of FlashAttention 2 and 3."""
    n, m = case["sizes"]
    dtype, size, d = getattr(torch, case["dtype"]), case["page"], case["d"]
    if module is fa4:
        case = {**dict.fromkeys(("new", "leftpad", "index", "turn", "interleaved", "like_q"), 0), **case}
        dtype = torch.bfloat16
    eighth = dtype == torch.float8_e4m3fn
    if (
        n > m
        and case["new"]
        or not case["new"]
        and case["turn"]
        or (size and (m % size or case["index"] and case["suite"] == "fa2"))
    ):
        raise Skipped
    if case["suite"] == "fa2" and (case["leftpad"] and size or case["alibi"] and eighth):
        raise Skipped
    window, inside = window_of(case, rng, m)
    chunk = rng.randrange(1, 2 * m + 1) if case.get("chunk") and (case["causal"] or case["local"]) else 0
    batch, heads, heads_kv = sizes_of(case, n, m, 3)
    held = 2 * batch if case["index"] else batch
    n_new = (n if case["like_q"] else rng.randint(1, n)) if case["new"] else 0
    local = case["causal"] or case["local"] or chunk
    room = m - (n if local and case["turn"] else n_new) + 1
    used = [rng.randrange(max(room, 1)) if case["new"] else rng.randint(1, m) for _ in range(batch)]
    pad = [rng.randrange(max(x, 1)) if case["leftpad"] else 0 for x in used]
    rows_q = [rng.randint(1, n) if case.get("packed") else n for _ in range(batch)]
    q = made(batch, n, heads, d, dtype=dtype)
    caches = [made(held, m, heads_kv, d, dtype=dtype) for _ in range(2)]
    new = [made(batch, n_new, heads_kv, d, dtype=dtype) for _ in range(2)] if n_new else [None, None]
    # New rows are packed if queries are.
    rows_new = [rng.randint(max(1, n_new - 20), n_new) if n_new and case.get("packed") else n_new for _ in range(batch)]
    index = rng.sample(range(held), batch) if case["index"] else list(range(batch))
    whole = [x.clone() for x in caches]
    call = dict(cache_seqlens=i32(*used), causal=bool(case["causal"]), window_size=window)
    if size:
        # The suites' tables have three times the columns that the longest sequence has pages.
        count = m // size
        table = torch.randperm(3 * held * count).view(held, 3 * count)
        taken = table[:, :count].flatten()
        pools = []
        for x in caches:
            pool = made(3 * held * count, size, heads_kv, d, dtype=x.dtype)
            pool.view(torch.uint8 if eighth else x.dtype)[taken] = x.view(held * count, size, heads_kv, d).view(
                torch.uint8 if eighth else x.dtype
            )
            pools.append(pool)
        caches = pools
        call["block_table" if module is fa2 else "page_table"] = table.int()
    if case["index"]:
        call["cache_batch_idx"] = i32(*index)
    if case["leftpad"]:
        call["cache_leftpad"] = i32(*pad)
    slopes = torch.rand(batch, heads) * 0.3 if case.get("alibi") else None
    if slopes is not None:
        call["alibi_slopes"] = slopes
    dim = int(case["turn"] * d) // 16 * 16
    if dim:
        angle = torch.rand(3 * held * m if size else m, dim // 2) * 2 * math.pi
        call.update(rotary_cos=angle.cos().to(dtype), rotary_sin=angle.sin().to(dtype))
        call["rotary_interleaved"] = bool(case["interleaved"])
        if case["suite"] == "fa3":
            call["rotary_seqlens"] = call["cache_seqlens"]
    if "splits" in case:
        call["num_splits"] = case["splits"]
    if chunk:
        call["attention_chunk"] = chunk
    given = q
    if case.get("packed"):
        given = torch.cat([q[b, :x] for b, x in enumerate(rows_q)])
        call.update(cu_seqlens_q=offsets(rows_q), max_seqlen_q=n)
        if n_new:
            call["cu_seqlens_k_new"] = offsets(rows_new)
    added_rows = new
    if case.get("packed") and n_new:
        added_rows = [torch.cat([x[b, :length] for b, length in enumerate(rows_new)]) for x in new]
    if case.get("ready"):
        call["scheduler_metadata"] = fa3.get_scheduler_metadata(
            batch,
            n,
            call["page_table"].shape[1] * size if size else m,
            heads,
            heads_kv,
            d,
            call["cache_seqlens"],
            dtype,
            cu_seqlens_q=call.get("cu_seqlens_q"),
            cu_seqlens_k_new=call.get("cu_seqlens_k_new"),
            cache_leftpad=call.get("cache_leftpad"),
            max_seqlen_k_new=n_new,
            page_size=size,
            causal=call["causal"],
            window_size=window,
            attention_chunk=chunk,
            num_splits=case["splits"],
        )
    sink = torch.randn(heads).to(dtype) if case.get("sink") else None
    if module is fa4:
        out, lse = fa4.flash_attn_varlen_func(
            given,
            *caches,
            cu_seqlens_q=call.get("cu_seqlens_q"),
            max_seqlen_q=call.get("max_seqlen_q"),
            seqused_k=call["cache_seqlens"],
            page_table=call.get("page_table"),
            causal=call["causal"],
            window_size=window,
            learnable_sink=sink,
            return_lse=True,
        )
    else:
        out, lse, *_ = module.flash_attn_with_kvcache(given, *caches, *added_rows, return_softmax_lse=True, **call)
    judge, at = Judge(), 0
    wanted = [x.double() for x in whole]
    for b in range(batch):
        rows = rows_q[b]
        query, k, v = q[b, :rows], whole[0][index[b]].clone(), whole[1][index[b]].clone()
        if n_new:
            n_new = rows_new[b]
            added = new[0][b, :n_new]
            if dim:
                unit = torch.complex(call["rotary_cos"].double(), call["rotary_sin"].double())
                turn = lambda x, first, counts: turned(
                    x, unit, first + torch.arange(x.shape[0]) * bool(counts), bool(case["interleaved"])
                )
                added, query = turn(added, used[b], True), turn(query, used[b], local).to(dtype)
            written = slice(used[b], used[b] + n_new)
            k[written], v[written] = added.to(dtype), new[1][b, :n_new]
            wanted[0][index[b], written], wanted[1][index[b], written] = added.double(), new[1][b, :n_new].double()
        end = used[b] + n_new
        got = out[at : at + rows] if case.get("packed") else out[b, :rows]
        got_lse = lse[:, at : at + rows] if case.get("packed") else lse[b, :, :rows]
        bias = None if slopes is None else alibi_bias(slopes[b], rows, end - pad[b])
        one = [(query, k[pad[b] : end], v[pad[b] : end])]
        seen = lambda a, c: inside(a, c) & chunk_mask(chunk, a, c)
        compared(
            judge,
            got,
            got_lse,
            one[0],
            [(slice(None), slice(None))],
            d**-0.5,
            dtype,
            seen,
            more=lambda _: dict(bias=bias, sink=sink),
        )
        at += rows
    # The appended rows are compared, and all other rows must be unchanged.
    for name, pool, rows in zip("KV", caches, wanted):
        held_rows = pool.float()[taken].view(rows.shape) if size else pool
        judge.near(f"the cache of {name}", held_rows, rows, rows.to(dtype), floor=1e-6)
    return judge.said


def pages(case, rng):
    """Packed queries over pages, as engines call: FlashAttention 3's function with a table."""
    dtype, size, d = getattr(torch, case["dtype"]), case["page"], case["d"]
    eighth = dtype == torch.float8_e4m3fn
    lengths = case["lengths"]
    if case["causal"] and any(a > b for a, b in lengths):
        raise Skipped
    heads, heads_kv = case["heads"]
    if case["suite"] == "flashinfer" and heads * sum(a * b for a, b in lengths) * d * 2 > WORK:
        # FlashInfer's sequences have equal lengths here, so one stands for all.
        lengths = lengths[:1]
    rows, keys = zip(*lengths)
    work = sum(a * b for a, b in lengths) * d * 2
    while heads_kv > 1 and work * heads > WORK:
        heads, heads_kv = heads * (heads_kv - 1) // heads_kv, heads_kv - 1
    if work * heads > MOST_WORK:
        raise Large
    most = -(-max(keys) // size)
    blocks = most * len(rows)
    pools = [made(blocks, size, heads_kv, d, dtype=dtype) for _ in range(2)]
    table = torch.randint(blocks, (len(rows), most), dtype=torch.int32)
    q = made(sum(rows), heads, d, dtype=dtype)
    left = -1 if case["window"] is None else case["window"] - 1
    window = (left, 0) if case["window"] is not None else (-1, -1)
    mask = fmha.Mask(2, left, 0) if case["causal"] or case["window"] is not None else fmha.NONE
    more = {f"{x}_descale": torch.ones(len(rows), heads_kv) for x in "qkv"} if eighth else {}
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q,
        *pools,
        cache_seqlens=i32(*keys),
        page_table=table,
        cu_seqlens_q=offsets(rows),
        max_seqlen_q=max(rows),
        causal=bool(case["causal"]),
        window_size=window,
        softcap=case["softcap"],
        return_softmax_lse=True,
        **more,
    )
    judge, at = Judge(), 0
    for b, (n, m) in enumerate(lengths):
        # torch can not gather 8-bit types on every device.
        k, v = (x[table[b].long()].flatten(0, 1)[:m] for x in (y.float() for y in pools))
        compared(
            judge,
            out[at : at + n],
            lse[:, at : at + n],
            (q[at : at + n].float(), k, v),
            [(slice(None), slice(None))],
            d**-0.5,
            dtype,
            lambda a, c: visible(mask, a, c),
            more=lambda _: dict(softcap=case["softcap"]),
        )
        at += n
    return judge.said


def combined(case, rng):
    n, d, parts = case["sizes"][0], case["d"], case["parts"]
    dtype = getattr(torch, case["dtype"])
    batch, heads = 5, 16
    while batch * heads > 2 and batch * heads * n * d * parts * 8 > WORK:
        batch, heads = max(batch - 1, 1), max(heads // 2, 2)
    if batch * heads * n * d * parts > MOST_WORK:
        raise Large
    how = case.get("rows")
    o = torch.randn(parts, batch, n, heads, d) * 2
    lse = torch.randn(parts, batch, n, heads) * 3 + 1
    lse[parts // 2 :, : max(batch // 3, 1)] = -math.inf
    # The suites pass parts in f32 and request a type for the result.
    if how in ("cu_seqlens", "both"):
        o, lse = o.flatten(1, 2), lse.flatten(1, 2)
    used = [rng.randint(0, n) for _ in range(batch)]
    call = {}
    if how in ("seqused", "both"):
        call["seqused"] = i32(*used)
    if how in ("cu_seqlens", "both"):
        call["cu_seqlens"] = offsets([n] * batch)
    if how == "order":
        call["virtual_batch_idx"] = torch.randperm(batch, dtype=torch.int32)
    module = fa4 if how else fa3
    out, merged = module.flash_attn_combine(o, lse, out_dtype=dtype, **call)
    total = torch.logsumexp(lse.double(), 0)
    weights = torch.exp(lse.double() - total.masked_fill(torch.isneginf(total), 0))
    exact = (weights[..., None] * o.double()).sum(0)
    if "seqused" in call:
        inside = (torch.arange(n) < i32(*used)[:, None])[..., None]
        inside = inside if how == "seqused" else inside.flatten(0, 1)
        exact, total = torch.where(inside[..., None], exact, 0), torch.where(inside, total, 0)
    judge = Judge()
    judge.near("O", out, exact, exact.to(dtype), floor=1e-4)
    judge.near("LSE", merged, total, total.float(), floor=1e-4)
    return judge.said


def rotated(case, rng):
    dtype, n, d = getattr(torch, case["dtype"]), case["sizes"][0], case["d"]
    batch, heads, dim = 4, 4, int(case["turn"] * d)
    angle = torch.rand(2 * n, dim // 2) * 2 * math.pi
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    start = {0: 0, 1: rng.randrange(n + 1), 2: torch.randint(0, n + 1, (batch,))}[case["offset"]]
    x = made(batch, n, heads, d, dtype=dtype, grad=True)
    more = {}
    given = x
    if case["packed"]:
        given = x.flatten(0, 1)
        more = dict(cu_seqlens=offsets([n] * batch), max_seqlen=n)
    given = given * 1
    out = rotary.apply_rotary_emb(
        given,
        cos,
        sin,
        interleaved=bool(case["interleaved"]),
        inplace=bool(case["inplace"]),
        seqlen_offsets=start,
        **more,
    )
    positions = torch.arange(n) + (start[:, None] if torch.is_tensor(start) else start)
    positions = positions.expand(batch, n)
    exact_in = x.detach().double().requires_grad_()
    exact = turned(exact_in, torch.complex(cos.double(), sin.double()), positions, bool(case["interleaved"]))
    same = exact.detach().to(dtype)
    judge = Judge()
    judge.near("O", out.view_as(x).detach(), exact.detach(), same, floor=1e-3)
    dout = torch.randn(*x.shape).to(dtype)
    (dx,) = torch.autograd.grad(out, x, dout.view_as(out))
    (exact_dx,) = torch.autograd.grad(exact, exact_in, dout.double())
    judge.near("dx", dx, exact_dx, exact_dx.to(dtype), floor=1e-3)
    return judge.said


def run(case, rng):
    """What is wrong with a drawn call; nothing where it is right."""
    torch.manual_seed(rng.getrandbits(31))
    kind = case["kind"]
    if kind == "combine":
        return combined(case, rng)
    if kind == "rotary":
        return rotated(case, rng)
    if kind == "pages":
        return pages(case, rng)
    if kind.startswith("cache"):
        return over_cache(case, rng, {"cache2": fa2, "cache3": fa3, "cache4": fa4}[kind])
    if kind == "causal2":
        case["causal"] = 1
    functions = {"fa2": (dense_2, packed_2), "fa3": (dense_3, packed_3), "fa4": (dense_4, packed_4)}[case["suite"]]
    return dense_or_packed(case, rng, *functions)
