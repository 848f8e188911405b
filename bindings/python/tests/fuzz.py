"""Random calls, seeded: each is right, or an exception that names an argument. ``python fuzz.py CALLS [SEED]``.

A call starts as a sound one, which is compared with float64, and then usually has something done to it. Prints a line
for each call that is neither, and what was counted. Runs in a process of its own, so that a crash is seen.
"""

import faulthandler
import json
import math
import random
import re
import sys

import torch

import fmha
from fmha import _arguments, _native, flash_attn, flash_attn_3, flash_attn_4
from reference import DEVICE, attention as by_definition, slow_kernels_serve, tolerance

faulthandler.enable()
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)

NAMES = {
    *_native.SLOTS,
    *_native.NUMBERS,
    *_arguments.TENSORS,
    "accuracy",
    "window_size",
    "batch",
    "seqlen_q",
    "seqlen_k",
    "seqlen_new",
    "num_heads_q",
    "num_heads_kv",
    "head_dim_qk",
    "head_dim_v",
    "page_size",
    "num_pages",
    "max_pages",
    "total_q",
    "total_k",
    "rotary_dim",
    "k_cache",
    "v_cache",
    "workspace",
    "max_pos",
    "workspace_bytes",
    "mask",
    "causal",
    "return_lse",
    "backward",
    "nonsense",
    "allow_fallback",
    "deterministic",
    "batch_invariant",
    "row_invariant",
    "check_lengths",
}
#: Errors that torch itself raises before an operator is called: a layout without a kernel, or too little memory.
TORCHS_OWN = re.compile(r"Could not run 'fmha::\w+' with arguments from|\[enforce fail at alloc_cpu")
#: Errors of calls that only the CPU's kernels take: f32 rows that are appended to a cache or rotated.
OF_A_GPU = re.compile(r"rows that are appended or turned are of 16 bits or FP8")
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, OverflowError, IndexError)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Calls:
    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __getattr__(self, name):
        return getattr(self.rng, name)

    def maybe(self, chance, value):
        return value() if self.rng.random() < chance else None

    def dims(self):
        heads_kv = self.randint(1, 3)
        return dict(
            b=self.randint(1, 3),
            sq=self.randint(0, 9),
            sk=self.randint(0, 12),
            hk=heads_kv,
            hq=heads_kv * self.randint(1, 3),
            d=self.choice([1, 3, 8, 16, 40]),
            dv=self.choice([1, 8, 16, 24]),
            dtype=self.choice(DTYPES),
        )

    def tensor(self, *shape, dtype=torch.float32):
        """Contiguous, or a view of a larger tensor with its axes in another order."""
        if self.random() < 0.5 or len(shape) < 3:
            return torch.randn(*shape).to(dtype)
        order = list(range(len(shape) - 1))
        self.shuffle(order)
        made = torch.randn(*[shape[axis] for axis in order], shape[-1] + self.choice([0, 8])).to(dtype)[
            ..., : shape[-1]
        ]
        return made.permute(*[order.index(axis) for axis in range(len(shape) - 1)], len(shape) - 1)

    def modifiers(self, n):
        of = dict(
            softmax_scale=self.maybe(0.3, lambda: self.uniform(-1, 1)),
            softcap=self.maybe(0.2, lambda: self.uniform(0.5, 5)),
            sink=self.maybe(0.2, lambda: torch.randn(n["hq"])),
            mask=self.choice([None, "causal", "t", "b:3,1", "t:-1,2", "g:2,5", fmha.Mask(2, 2, 0, 1)]),
        )
        kind = self.random()
        if kind < 0.2:
            of["alibi_slopes"] = torch.rand(*self.choice([(n["hq"],), (n["b"], n["hq"])]))
        elif kind < 0.4 and n["sk"]:
            of["bias"] = torch.randn(
                *self.choice([(n["b"], n["hq"]), (1, n["hq"]), (1, 1), (n["hq"],), ()]), n["sq"], n["sk"]
            )
        return {name: value for name, value in of.items() if value is not None}

    def dense(self):
        n = self.dims()
        q, k, v = (
            self.tensor(*shape, dtype=n["dtype"])
            for shape in (
                (n["b"], n["sq"], n["hq"], n["d"]),
                (n["b"], n["sk"], n["hk"], n["d"]),
                (n["b"], n["sk"], n["hk"], n["dv"]),
            )
        )
        options = self.modifiers(n)

        def check(given):
            o, lse = given
            same = {**options, "mask": fmha.mask(options.get("mask"))}
            wanted, wanted_lse = by_definition(q, k, v, **same)
            return wrong(o, wanted, 4 * tolerance(n["dtype"])) or wrong(lse, wanted_lse, 20 * tolerance(n["dtype"]))

        return fmha.attention, dict(q=q, k=k, v=v, return_lse=True, **options), check

    def packed(self):
        n = self.dims()
        rows = {side: [self.randint(0, 6) for _ in range(n["b"])] for side in "qk"}
        q = self.tensor(sum(rows["q"]), n["hq"], n["d"], dtype=n["dtype"])
        k = self.tensor(sum(rows["k"]), n["hk"], n["d"], dtype=n["dtype"])
        v = self.tensor(sum(rows["k"]), n["hk"], n["dv"], dtype=n["dtype"])
        offsets = {side: [sum(rows[side][:i]) for i in range(n["b"] + 1)] for side in "qk"}
        mask = self.choice([None, "causal", "b:2,1"])
        call = dict(
            q=q,
            k=k,
            v=v,
            mask=mask,
            max_seqlen_q=6,
            max_seqlen_k=6,
            return_lse=True,
            cu_seqlens_q=torch.tensor(offsets["q"], dtype=torch.int32),
            cu_seqlens_k=torch.tensor(offsets["k"], dtype=torch.int32),
        )

        def check(given):
            for b in range(n["b"]):
                i, j = (slice(offsets[side][b], offsets[side][b + 1]) for side in "qk")
                wanted, _ = by_definition(q[None, i], k[None, j], v[None, j], mask=fmha.mask(mask))
                bad = wrong(given[0][i], wanted[0], 4 * tolerance(n["dtype"]))
                if bad:
                    return bad
            return None

        return fmha.attention, call, check

    def cache(self):
        n = self.dims()
        size, pages = self.randint(1, 5), self.randint(2, 4)
        q = self.tensor(n["b"], n["sq"], n["hq"], n["d"], dtype=n["dtype"])
        k = torch.randn(n["b"] * pages, size, n["hk"], n["d"]).to(n["dtype"])
        v = torch.randn(n["b"] * pages, size, n["hk"], n["dv"]).to(n["dtype"])
        table = list(range(n["b"] * pages))
        self.shuffle(table)
        table = torch.tensor(table, dtype=torch.int32).view(n["b"], pages)
        used = [self.randint(0, size * pages - 2) for _ in range(n["b"])]
        call = dict(
            q=q,
            k_cache=k,
            v_cache=v,
            block_table=table,
            seqused_k=torch.tensor(used, dtype=torch.int32),
            check_lengths=True,
        )
        if self.random() < 0.5:
            call.update(
                k=torch.randn(n["b"], 2, n["hk"], n["d"]).to(n["dtype"]),
                v=torch.randn(n["b"], 2, n["hk"], n["dv"]).to(n["dtype"]),
            )
            used = [length + 2 for length in used]

        def check(given):
            for b in range(n["b"]):
                rows_k, rows_v = (x[table[b].long()].flatten(0, 1)[: used[b]] for x in (k, v))
                wanted, _ = by_definition(q[b : b + 1], rows_k[None], rows_v[None], mask=fmha.CAUSAL)
                bad = wrong(given[b : b + 1], wanted, 4 * tolerance(n["dtype"]))
                if bad:
                    return bad
            return None

        return fmha.attention_with_kvcache, call, check

    def others(self):
        """Functions whose values other tests have: here they must not crash."""
        n = self.dims()
        q, k, v = (
            torch.randn(n["b"], s, h, n["d"]).to(n["dtype"])
            for s, h in ((n["sq"], n["hq"]), (n["sk"], n["hk"]), (n["sk"], n["hk"]))
        )
        window = self.choice([(-1, -1), (3, 0), (0, 0), (2, -1)])
        parts = torch.randn(3, n["b"], n["sq"], n["hq"], n["dv"]).to(n["dtype"])
        return (
            *self.choice(
                [
                    (
                        flash_attn.flash_attn_func,
                        dict(
                            q=q,
                            k=k,
                            v=v,
                            causal=self.random() < 0.5,
                            window_size=window,
                            dropout_p=self.choice([0.0, 0.3]),
                        ),
                    ),
                    (flash_attn_3.flash_attn_func, dict(q=q, k=k, v=v, window_size=window, return_attn_probs=True)),
                    (flash_attn_4.flash_attn_func, dict(q=q, k=k, v=v, softcap=self.choice([0.0, 2.0]))),
                    (
                        flash_attn.flash_attn_with_kvcache,
                        dict(q=q, k_cache=k, v_cache=v, cache_seqlens=n["sk"] // 2, causal=True),
                    ),
                    (fmha.combine, dict(o_parts=parts, lse_parts=torch.randn(3, n["b"], n["hq"], n["sq"]))),
                    (fmha.add_parts, dict(o_parts=parts, o=torch.zeros_like(parts[0]))),
                    (fmha.explain, dict(q=q, k=k, v=v, mask="causal", backward=self.random() < 0.5)),
                    (fmha.attention_out, dict(o=torch.empty_like(q), q=q, k=k, v=v)),
                ]
            ),
            lambda given: None,
        )

    def harm(self, call, done):
        """Something is done to an argument that is still as it was; its name and what."""
        name = self.choice([name for name in call if not any(word.startswith(f"{name}:") for word in done)])
        value = call[name]
        if isinstance(value, torch.Tensor):
            harms = {
                "another type": lambda: value.to(
                    self.choice(
                        [
                            torch.float64,
                            torch.int64,
                            torch.int32,
                            torch.bool,
                            torch.uint8,
                            torch.complex64,
                            torch.float16,
                            torch.float32,
                        ]
                    )
                ),
                "an axis more": lambda: value[None],
                "an axis less": lambda: (
                    value.select(0, 0) if value.dim() and value.shape[0] else value[None, None, None]
                ),
                "an axis longer": lambda: (
                    torch.cat([value, value], self.randrange(value.dim())) if value.dim() else value
                ),
                "an axis cut": lambda: value.narrow(*self.cut(value)) if value.dim() else value,
                "axes transposed": lambda: value.transpose(0, -1) if value.dim() else value,
                "broadcast": lambda: value[..., :1].expand(value.shape) if value.dim() and value.shape[-1] else value,
                "every other element": lambda: torch.cat([value, value], -1)[..., ::2] if value.dim() else value,
                "huge": lambda: torch.empty((), dtype=value.dtype).expand(
                    *[1 << self.choice([20, 31, 40])] * 2, *value.shape[2:]
                ),
                "storage freed": lambda: freed(value),
                "storage shrunk": lambda: freed(value, 8),
                "nowhere": lambda: torch.empty(value.shape, dtype=value.dtype, device="meta"),
                "sparse": lambda: value.float().to_sparse(),
                "NaN": lambda: value.clone().fill_(float("nan")) if value.is_floating_point() else value + (1 << 30),
                "negative": lambda: -value - 1 if not value.dtype == torch.bool else value,
                "none": lambda: None,
                "an array": lambda: value.detach().cpu().float().numpy(),
                "a number": lambda: 1.5,
                "a list": lambda: [1, 2],
                "a requirement of gradients": lambda: value.detach().clone().requires_grad_(value.is_floating_point()),
            }
        else:
            harms = {
                "a number": lambda: self.choice([-1, 0, 1 << 31, 1 << 63, -(1 << 70), math.nan, math.inf, 1e300, 7]),
                "a word": lambda: "word",
                "none": lambda: None,
                "a tensor": lambda: torch.randn(3),
                "a tuple": lambda: (1, -5, "x", None),
                "an object": lambda: object(),
            }
        what = self.choice(list(harms))
        try:
            call[name] = harms[what]()
        except (RuntimeError, IndexError, NotImplementedError) as error:
            # torch can not make the drawn tensor.
            return f"{name}: not {what}: {str(error)[:60]}"
        return f"{name}: {what}"

    def cut(self, value):
        axis = self.randrange(value.dim())
        return axis, 0, value.shape[axis] // 2

    def stray(self, call):
        """An argument that the call did not have."""
        name, value = self.choice(
            [
                ("seqused_k", torch.tensor([99, -5], dtype=torch.int32)),
                ("seqused_q", torch.ones(2, dtype=torch.int32)),
                ("block_table", torch.zeros(2, 3, dtype=torch.int32)),
                ("cu_seqlens_k", torch.tensor([0, 5, 3], dtype=torch.int32)),
                ("descale_q", torch.rand(2, 2)),
                ("p_drop", self.choice([0.5, 1.0, -0.1])),
                ("seed", self.choice([-1, 2**64 - 1])),
                ("max_seqlen_k", self.choice([-3, 1 << 40])),
                ("dtype_o", self.choice([torch.float64, "bfloat16", 3])),
                ("deterministic", True),
                ("batch_invariant", True),
                ("row_invariant", True),
                ("accuracy", "exact"),
                ("bias", torch.randn(4, 4)),
                ("head_dim_v", 8),
                ("softmax_scale", math.nan),
                ("softcap", -1.0),
                ("nonsense", 1),
            ]
        )
        call[name] = value
        return f"{name} added"


def freed(value, left=0):
    copy = value.detach().clone()
    copy.untyped_storage().resize_(min(left, copy.untyped_storage().nbytes()))
    return copy


def wrong(given, wanted, bound):
    given, wanted = given.detach().double(), wanted.detach().double()
    if given.shape != wanted.shape:
        return f"shape {tuple(given.shape)}, not {tuple(wanted.shape)}"
    finite = torch.isfinite(wanted)
    if not torch.equal(given[~finite], wanted[~finite]):
        return "what is not finite differs"
    error = (given - wanted)[finite].abs().max().item() if finite.any() else 0.0
    return None if error <= bound else f"error {error} > {bound}"


def main(calls, seed):
    torch.manual_seed(seed)
    random_ = Calls(seed)
    counts = dict(right=0, ran=0, refused=0, bad=0)
    for i in range(calls):
        function, call, check = random_.choice(
            [random_.dense, random_.dense, random_.packed, random_.cache, random_.others]
        )()
        done = []
        for _ in range(random_.choice([0, 1, 1, 1, 2])):
            done.append(random_.harm(call, done) if random_.random() < 0.8 else random_.stray(call))
        bad = None
        try:
            given = function(**call)
            if done:
                counts["ran"] += 1
            else:
                bad = check(given)
                counts["right"] += not bad
        except REFUSALS as error:
            counts["refused"] += 1
            if not done and not (DEVICE != "cpu" and OF_A_GPU.search(str(error))):
                bad = f"a sound call is refused: {error}"
            elif done and not TORCHS_OWN.match(str(error)) and not (NAMES | set(call)) & set(
                re.findall(r"\w+", str(error)[:300])
            ):
                bad = f"names no argument: {type(error).__name__}: {error}"
        except Exception as error:
            bad = f"{type(error).__name__}: {error}"
        if bad:
            counts["bad"] += 1
            print(f"call {i} of seed {seed}: {function.__name__}, {done}: {bad[:600]}", flush=True)
    print(json.dumps(counts))
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    slow_kernels_serve()
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
