"""``python -m fmha``: what there is to run on, and one call, checked."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Sequence, Tuple


def _torch() -> Tuple[str, float]:
    """Where a call of torch's tensors ran, and its largest error."""
    import torch

    import fmha

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 64, 4, 32, device=device, dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.double().transpose(1, 2) for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        heads_first[0], heads_first[1], heads_first[2], is_causal=True
    ).transpose(1, 2)
    error = (fmha.attention(q, k, v, mask="causal").double() - wanted).abs().max().item()
    return f"torch {torch.__version__} on {device}", error


def _numpy() -> Tuple[str, float]:
    """The same of NumPy's arrays."""
    import numpy

    import fmha

    rng = numpy.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 64, 4, 32), dtype=numpy.float32) for _ in range(3))
    scores = numpy.einsum("bihd,bjhd->bhij", q, k, dtype=numpy.float64) / math.sqrt(32)
    scores[:, :, ~numpy.tri(64, dtype=bool)] = -numpy.inf
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    wanted = numpy.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
    return f"numpy {numpy.__version__}", float(abs(fmha.attention(q, k, v, mask="causal") - wanted).max())


def main(words: Sequence[str]) -> int:
    """0: every call was right; 1: one was not; as a command does, 2: a word that it does not know."""
    parser = argparse.ArgumentParser(prog="python -m fmha", description="What there is to run on, and one call, checked.")
    parser.parse_args(words)
    import fmha

    print(f"fmha {fmha.__version__}")
    print(fmha.devices())
    failed = 0
    for name, call in (("torch", _torch), ("numpy", _numpy)):
        try:
            what, error = call()
        except ImportError as reason:
            print(f"{name}: absent: {reason}")
            continue
        right = error < 2e-2
        failed += not right
        print(f"{what}: largest error {error:.1e}: {'PASS' if right else 'FAIL'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
