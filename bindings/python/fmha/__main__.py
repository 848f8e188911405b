"""``python -m fmha``: what there is to run on, and one call on it, checked."""

from __future__ import annotations

import sys


def main() -> int:
    import fmha

    print(f"fmha {fmha.__version__}")
    print(fmha.devices())
    try:
        import torch
    except ImportError:
        print("torch: absent: NumPy and DLPack tensors on the CPU serve")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 64, 4, 32, device=device, dtype=torch.bfloat16) for _ in range(3))
    o, lse = fmha.attention(q, k, v, mask="causal", return_lse=True)
    by_definition = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    error = (o.double() - by_definition).abs().max().item()
    print(f"attention on {device}: largest error {error:.2e}: {'PASS' if error < 2e-2 else 'FAIL'}")
    return 0 if error < 2e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
