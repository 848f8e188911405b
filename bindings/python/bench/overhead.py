"""What a call whose plan is cached costs on the host, beside torch's own and FlashAttention's where they are installed.

    python bindings/python/bench/overhead.py

Microseconds: the least of 200 bursts of 20 calls each. On a GPU a burst is shorter than its queue, so the device's time
does not count.
"""

from __future__ import annotations

import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fmha
import fmha.flash_attn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def microseconds(call):
    best = float("inf")
    for _ in range(200):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        best = min(best, time.perf_counter() - start)
    return best / 20 * 1e6


def main():
    shape, dtype = ((1, 128, 8, 64), torch.bfloat16) if DEVICE == "cuda" else ((1, 1, 1, 16), torch.float32)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(3))
    grads = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    rows = {
        "fmha.attention": fmha.attention,
        "fmha.flash_attn.flash_attn_func": lambda q, k, v: fmha.flash_attn.flash_attn_func(q, k, v, causal=True),
    }
    for name in ("flash_attn", "flash_attn_interface", "fa3_fwd_interface"):
        try:
            module = __import__(name)
        except ImportError:
            print(f"absent: {name}")
            continue
        rows[f"{name}.flash_attn_func"] = lambda q, k, v, f=module.flash_attn_func: f(q, k, v, causal=True)
    if DEVICE == "cuda":
        # The operator that FlashAttention 2's package calls, without the package's own Python.
        forward = torch.ops.aten._flash_attention_forward.default
        rows["torch.ops.aten._flash_attention_forward"] = lambda q, k, v: forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False
        )
    print(f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, torch {torch.__version__}")
    print("| function | no gradient | with a gradient |\n|---|---|---|")
    for name, call in rows.items():
        print(f"| {name} | {microseconds(lambda: call(q, k, v)):.1f} | {microseconds(lambda: call(*grads)):.1f} |")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    print(
        f"| torch's scaled_dot_product_attention | {microseconds(lambda: sdpa(*heads_first)):.1f} | "
        f"{microseconds(lambda: sdpa(*(x.transpose(1, 2) for x in grads))):.1f} |"
    )


if __name__ == "__main__":
    main()
