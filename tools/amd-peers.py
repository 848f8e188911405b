"""Times what is installed beside `fmha run` on the same problems, forward, backward and decode: amd-peers.py FMHA.
`amd-peers.py --list` says which peers are installed, and stops.

AITER (package aiter), CK (package flash-attn, which ROCm builds on it) and PyTorch's own. Rows, times and counts of work are
nvidia-peers.py's; a peer that refuses a row says so. Latent attention is AITER's alone: absorbed, 576/512, pages of one row.
"""

import importlib.util
import pathlib
import sys

spec = importlib.util.spec_from_file_location("peers", pathlib.Path(__file__).with_name("nvidia-peers.py"))
common = importlib.util.module_from_spec(spec)
spec.loader.exec_module(common)

# Names of the peers, each with its package.
PACKAGES = (("PyTorch", "torch"), ("AITER", "aiter"), ("CK (flash-attn)", "flash_attn"))

# Calls of one token over latent rows: (batch, keys, query heads).
LATENT = [(b, keys, h) for b, keys, h in ((1, 8192, 16), (64, 8192, 16), (64, 8192, 128))]


def peers():
    """Name to a function of q, k, v (b, s, h, d) and causal; what is absent says so."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def of_torch(q, k, v, causal):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
            )

    found = {"PyTorch": of_torch}
    for name, package in PACKAGES[1:]:
        try:
            attend = importlib.import_module(package).flash_attn_func
        except (ImportError, AttributeError) as error:
            print(f"absent: {name} ({error})")
            continue
        found[name] = lambda q, k, v, causal, attend=attend: attend(q, k, v, causal=causal)
    return found


def command(program, row):
    """`fmha run` for a row of nvidia-peers.py, on this vendor's device."""
    return ["rocm" if word == "cuda" else word for word in common.command(program, *row)]


def latent_command(program, batch, keys, heads):
    words = f"run --backend rocm --verify none --json -b {batch} --heads {heads} --heads-kv 1 -s 1 --seqlen-k {keys} -d 576"
    return [program, *words.split(), *"--head-dim-v 512 --v-in-k --page-size 64 --prec bf16".split()]


def latent_bytes(batch, keys, heads):
    """Of Q, of K once, and of O."""
    return 2 * batch * (heads * 576 + keys * 576 + heads * 512)


def latent_of_aiter(batch, keys, heads):
    """Milliseconds of AITER's decode of absorbed rows."""
    import torch
    from aiter.mla import mla_decode_fwd

    def on_device(make, *shape, **facts):
        return make(*shape, device="cuda", **facts)

    q = on_device(torch.randn, batch, heads, 576, dtype=torch.bfloat16)
    cache = on_device(torch.randn, batch * keys, 1, 1, 576, dtype=torch.bfloat16)
    o = on_device(torch.empty, batch, heads, 512, dtype=torch.bfloat16)
    of_tokens = on_device(torch.arange, batch + 1, dtype=torch.int32)
    pages = on_device(torch.arange, batch * keys, dtype=torch.int32)
    last = on_device(torch.ones, batch, dtype=torch.int32)
    return common.timed(
        lambda: mla_decode_fwd(q, cache, o, of_tokens, of_tokens * keys, pages, last, 1, sm_scale=576**-0.5)
    )


def latent_rows(program):
    print("latent 576/512: b keys heads | fmha | AITER | GB/s")
    for row in LATENT:
        ours = common.seconds(latent_command(program, *row))
        figures = [ours and latent_bytes(*row) / ours / 1e9]
        try:
            figures.append(latent_bytes(*row) / latent_of_aiter(*row) / 1e6)
        except (ImportError, RuntimeError, TypeError) as error:
            print(f"absent: AITER's latent decode ({str(error).splitlines()[0]})")
            figures.append(None)
        print(*row, "|", common.said(figures), flush=True)


def list_packages():
    """Names every peer, without importing it: AITER builds kernels when it is imported."""
    for name, package in PACKAGES:
        print(f"{'installed' if importlib.util.find_spec(package) else 'absent'}: {name} (package {package})")


def main():
    if sys.argv[1:] == ["--list"]:
        return list_packages()
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"amd-peers.py takes the program fmha or --list, not {sys.argv[1:]}")
    try:
        import torch
    except ImportError:
        list_packages()
        sys.exit("absent: PyTorch, whose tensors the peers take")
    if not torch.cuda.is_available() or not torch.version.hip:
        list_packages()
        sys.exit(f"absent: an AMD GPU for PyTorch {torch.__version__}")
    common.table(peers(), lambda row: command(sys.argv[1], row))
    latent_rows(sys.argv[1])


if __name__ == "__main__":
    main()
