"""Times FlashAttention-4 and cuDNN, where they are installed, and `fmha run` on the same problems: nvidia-peers.py FMHA

Needs PyTorch. One process for the peers, one a row for fmha: a table to start from, not a comparison in one process.
"""

import re
import subprocess
import sys

# (batch, seqlen, query heads, kv heads, head_dim, causal)
ROWS = [
    (b, s, 16 * 128 // d, 16 * 128 // d, d, causal)
    for d in (64, 128)
    for causal in (False, True)
    for b, s in ((16, 1024), (4, 4096), (1, 16384))
] + [(2, 8192, 64, 8, 128, True), (2, 8192, 64, 8, 128, False)]


def flops(b, s, h, d, causal):
    return 4 * b * h * s * s * d // (2 if causal else 1)


def timed(call):
    """Milliseconds of a call, the median of 15."""
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def peers():
    """Name to a function of q, k, v (b, s, h, d) and causal; what is absent says so."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = {}
    try:
        from flash_attn.cute import flash_attn_func

        found["flash-attn-4"] = lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)
    except ImportError as error:
        print(f"absent: flash-attn-4 ({error})")

    def cudnn(q, k, v, causal):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
            )

    found["cuDNN"] = cudnn
    return found


def ours(program, b, s, h, hk, d, causal):
    words = f"run --backend cuda --verify none -b {b} --heads {h} --heads-kv {hk} -s {s} -d {d} --prec bf16"
    mask = "b" if causal else "0"
    done = subprocess.run([program, *words.split(), "--mask", mask], capture_output=True, text=True)
    rate = re.search(r"([\d.]+) TFLOP/s", done.stdout)
    return float(rate[1]) if rate else None


def main():
    try:
        import torch
    except ImportError as error:
        sys.exit(f"absent: PyTorch ({error})")
    others = peers()
    print("b s heads kv d causal |", " | ".join(["fmha", *others]), "| TFLOP/s")
    for b, s, h, hk, d, causal in ROWS:
        make = lambda heads: torch.randn(b, s, heads, d, device="cuda", dtype=torch.bfloat16)
        q, k, v = make(h), make(hk), make(hk)
        figures = [ours(sys.argv[1], b, s, h, hk, d, causal)]
        for name, call in others.items():
            try:
                figures.append(flops(b, s, h, d, causal) / timed(lambda: call(q, k, v, causal)) / 1e9)
            except RuntimeError as error:
                print(f"absent: {name} ({str(error).splitlines()[0]})")
                figures.append(None)
        words = " | ".join("-" if figure is None else f"{figure:.0f}" for figure in figures)
        print(b, s, h, hk, d, int(causal), "|", words, flush=True)


if __name__ == "__main__":
    main()
