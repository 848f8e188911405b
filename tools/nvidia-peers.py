"""Times what is installed beside `fmha run` on the same problems, forward, backward and decode: nvidia-peers.py FMHA

FlashAttention-2 and cuDNN as PyTorch has them, and the packages flash-attn (2) and flash-attn-4. Needs PyTorch. One process
for the peers, one a row for fmha: a table to start from, not a comparison in one process.
"""

import json
import subprocess
import sys

# Calls: (kind, batch, queries, keys, query heads, kv heads, head_dim, causal).
ROWS = [
    (kind, b, s, s, 16 * 128 // d, 16 * 128 // d, d, causal)
    for kind in ("forward", "backward")
    for d in (64, 128)
    for causal in (False, True)
    for b, s in ((16, 1024), (4, 4096), (1, 16384))
]
ROWS += [("forward", 2, 8192, 8192, 32, 8, 128, causal) for causal in (False, True)]
ROWS += [("forward", 4, 4096, 4096, 8, 8, 256, causal) for causal in (False, True)]
ROWS += [("decode", b, 1, keys, 32, 8, 128, False) for b, keys in ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (16, 32768))]


def amount(kind, b, sq, sk, h, hk, d, causal):
    """FLOPs of the products; of decode the bytes of Q, K, V and O."""
    if kind == "decode":
        return 2 * b * d * (2 * sq * h + 2 * sk * hk)
    forward = 4 * b * h * sq * sk * d / (2 if causal else 1)
    return forward * 2.5 if kind == "backward" else forward


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

    def of_torch(backend):
        def attend(q, k, v, causal):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
                )

        return attend

    found = {
        "FA2 of torch": of_torch(SDPBackend.FLASH_ATTENTION),
        "cuDNN": of_torch(SDPBackend.CUDNN_ATTENTION),
    }
    try:
        from flash_attn import flash_attn_func as two

        found["flash-attn 2"] = lambda q, k, v, causal: two(q, k, v, causal=causal)
    except ImportError as error:
        print(f"absent: flash-attn ({error})")
    try:
        from flash_attn.cute import flash_attn_func as four

        found["flash-attn-4"] = lambda q, k, v, causal: four(q, k, v, causal=causal)
    except ImportError as error:
        print(f"absent: flash-attn-4 ({error})")
    return found


def time_of(call, kind, q, k, v, causal):
    """Milliseconds of a peer's forward or backward."""
    import torch

    if kind != "backward":
        with torch.no_grad():
            return timed(lambda: call(q, k, v, causal))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = call(*inputs, causal)
    out = out[0] if isinstance(out, tuple) else out
    grad = torch.randn_like(out)
    return timed(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))


def command(program, kind, b, sq, sk, h, hk, d, causal):
    """The call of `fmha run` for a row."""
    words = f"run --backend cuda --verify none --json -b {b} --heads {h} --heads-kv {hk} -s {sq} --seqlen-k {sk} -d {d}"
    backward = ["--backward"] if kind == "backward" else []
    return [program, *words.split(), "--prec", "bf16", "--mask", "b" if causal else "0", *backward]


def seconds(words):
    """The median of a call of `fmha run`, or nothing where it is refused."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout)["median_seconds"]
    print(f"absent: fmha ({done.stderr.strip().splitlines()[0] if done.stderr.strip() else done.returncode})")
    return None


def table(others, command_of):
    """Prints a line a row: of fmha by its command, then of each other."""
    import torch

    print("kind b queries keys heads kv d causal |", " | ".join(["fmha", *others]), "| TFLOP/s, of decode GB/s")
    for row in ROWS:
        kind, b, sq, sk, h, hk, d, causal = row
        work = amount(*row) / (1e9 if kind == "decode" else 1e12)
        ours = seconds(command_of(row))
        figures = [ours and work / ours]
        for name, call in others.items():
            try:
                q, k, v = (
                    torch.randn(b, s, heads, d, device="cuda", dtype=torch.bfloat16)
                    for s, heads in ((sq, h), (sk, hk), (sk, hk))
                )
                figures.append(work * 1e3 / time_of(call, kind, q, k, v, causal))
            except (RuntimeError, TypeError) as error:
                print(f"absent: {name} ({str(error).splitlines()[0]})")
                figures.append(None)
        print(kind, b, sq, sk, h, hk, d, int(causal), "|", said(figures), flush=True)


def said(figures):
    return " | ".join("-" if figure is None else f"{figure:.0f}" for figure in figures)


def main():
    try:
        import torch
    except ImportError as error:
        sys.exit(f"absent: PyTorch ({error})")
    if not torch.cuda.is_available():
        sys.exit(f"absent: a GPU for PyTorch {torch.__version__}")
    table(peers(), lambda row: command(sys.argv[1], *row))


if __name__ == "__main__":
    main()
