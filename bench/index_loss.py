"""The loss that trains an indexer on a GPU: `PYTHONPATH=bindings/python python3 bench/index_loss.py [--rows REGEX]`.

Each row draws an indexer's operands and causal lists by the seed. The library's loss and gradients are first held to
torch's operators in f32, and those of some tokens to float64; in one order, a second run must give equal bits. Then
calls are timed, and medians are printed in microseconds: the loss alone, the gradients with dK added in no order and in
one order, and torch's operators, with TFLOP/s of 2 num_heads head_dim operations an entry for the loss and four times
as many for the gradients, scores among them. The exit status is 1 if a row was wrong.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass

import torch

from fmha import _index_loss

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rows", default="")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--repeats", type=int, default=15)
arguments = parser.parse_args()


@dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    keys: int
    topk: int = 2048
    heads: int = 64
    dim: int = 128


ROWS = [
    Row("4096 of 4k", 4096, 4096),
    Row("4096 of 32k", 4096, 32768),
    Row("4096 of 8k, 32 heads", 4096, 8192, heads=32),
    Row("2048 of 8k, 512 entries", 2048, 8192, topk=512),
]

LOSS, GRADIENTS = (True, False, False, False), (False, True, True, True)


def drawn(row: Row):
    torch.manual_seed(arguments.seed)
    there = dict(device="cuda")
    q = torch.randn(1, row.tokens, row.heads, row.dim, **there).bfloat16()
    k = torch.randn(1, row.keys, row.dim, **there).bfloat16()
    weights = torch.randn(1, row.tokens, row.heads, **there) / row.heads
    # Distinct keys up to the token's own position, -1 where there are fewer.
    last = row.keys - row.tokens + torch.arange(row.tokens, **there)
    indices = torch.empty(1, row.tokens, row.topk, dtype=torch.int32, **there)
    for begin in range(0, row.tokens, 256):
        part = last[begin : begin + 256]
        noise = torch.rand(len(part), row.keys, **there)
        noise = noise.masked_fill(torch.arange(row.keys, **there) > part[:, None], -1)
        best, at = noise.topk(min(row.topk, row.keys), dim=-1)
        indices[0, begin : begin + 256] = torch.where(best < 0, -1, at).sort(-1, descending=True).values
    target = torch.rand(indices.shape, **there) ** 8
    dloss = torch.rand(1, row.tokens, **there) / row.tokens
    return q, k, weights, indices, target, dloss


def off(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()


def held(row: Row, call) -> bool:
    *operands, dloss = call
    good = True
    loss = _index_loss._by_library(*operands, None, LOSS)[0]
    wanted = _index_loss._by_torch(*operands, dloss, (True, True, True, True))
    found = [loss, *_index_loss._by_library(*operands, dloss, GRADIENTS)[1:]]
    torch.use_deterministic_algorithms(True)
    ordered = [_index_loss._by_library(*operands, dloss, GRADIENTS)[1:] for _ in range(2)]
    torch.use_deterministic_algorithms(False)
    for name, x, y, bound in zip(("loss", "dq", "dk", "dw"), found, wanted, (1e-4, 1e-2, 1e-2, 1e-3)):
        good &= off(x, y) < bound
        print(f"  {name}: off {off(x, y):.1e} of torch in f32", end="")
    good &= off(ordered[0][1], wanted[2]) < 1e-2
    good &= all(torch.equal(x, y) for x, y in zip(*ordered))
    q, k, weights, indices, target = operands
    some = slice(0, None, max(1, row.tokens // 16))
    wide = [q[:, some].double(), k.double(), weights[:, some].double(), indices[:, some], target[:, some].double()]
    exact = _index_loss._by_torch(*wide, dloss[:, some].double(), (True, True, False, True))
    good &= off(loss[:, some], exact[0]) < 1e-4 and off(found[1][:, some], exact[1]) < 1e-2
    print(f"; dq of some tokens {off(found[1][:, some], exact[1]):.1e} of float64{'' if good else '  WRONG'}")
    return good


def micros(call) -> float:
    call()
    times = []
    for _ in range(arguments.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main() -> int:
    wrong = 0
    print(torch.cuda.get_device_name())
    for row in ROWS:
        if not re.search(arguments.rows, row.name):
            continue
        call = drawn(row)
        *operands, dloss = call
        wrong += not held(row, call)
        loss = micros(lambda: _index_loss._by_library(*operands, None, LOSS))
        free = micros(lambda: _index_loss._by_library(*operands, dloss, GRADIENTS))
        torch.use_deterministic_algorithms(True)
        ordered = micros(lambda: _index_loss._by_library(*operands, dloss, GRADIENTS))
        torch.use_deterministic_algorithms(False)
        theirs = [micros(lambda: _index_loss._by_torch(*operands, dloss, wanted)) for wanted in (LOSS, GRADIENTS)]
        flops = 2.0 * row.heads * row.dim * (operands[3] >= 0).sum().item()
        rate = lambda times, of: f"{of:8.0f} ({times * flops / of / 1e6:4.0f} TFLOP/s)"
        print(
            f"{row.name:24} loss {rate(1, loss)}  gradients {rate(4, free)}  in one order {rate(4, ordered)}  "
            f"torch {theirs[0]:8.0f}, {theirs[1]:8.0f}",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
