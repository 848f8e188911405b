"""SGLang's own classes, from its wheel without dependencies, around this package's backend: `python engine_sglang.py
FOLDER`, the folder in which `sglang` lies. Prints what was stubbed; `test_engines_real.py` runs it."""

import importlib
import pathlib
import sys
import types

import torch

HERE = pathlib.Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from engine_parts import Finder, Stub  # noqa: E402
from reference import DEVICE, attention as by_definition, close, tolerance  # noqa: E402

#: Head dimension, rows of a page, and the factor by which sequences are longer than on the CPU.
SIZES = ((16, 4, 1),) if DEVICE == "cpu" else ((64, 1, 40), (128, 16, 100), (128, 64, 200), (256, 32, 50))

BARE = (
    "sglang",
    "sglang.srt",
    "sglang.srt.layers",
    "sglang.srt.layers.attention",
    "sglang.srt.mem_cache",
    "sglang.srt.model_executor",
)
#: Modules of the engine that are real. Its other modules are stubbed, and so are compilers and servers.
REAL = (
    "sglang.srt.layers.attention.base_attn_backend",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.model_executor.forward_batch_info",
)
STUBBED = ("sglang", "triton", "torch_memory_saver", "sgl_kernel")


def main(root):
    finder = Finder(root, BARE, STUBBED, REAL)
    finder.install()
    kernels = importlib.import_module("sglang.kernels.kernel_api_logging")
    kernels.debug_kernel_api = lambda function=None, **_rest: function
    utils = importlib.import_module("sglang.srt.utils")
    common = importlib.import_module("sglang.srt.utils.common")
    for module in (utils, common):
        module.is_npu = module.is_hip = module.is_cuda = module.is_cpu = module.is_musa = module.is_xpu = lambda: False
    environment = importlib.import_module("sglang.srt.environ")
    environment.envs = Off()
    choices = []
    importlib.import_module("sglang.srt.server_args").add_attention_backend_choices = choices.extend
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    batches = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    serve(base, registry, batches, pools, choices)
    print("stubbed:", *sorted({name for name in finder.used if name not in BARE}))


class Off(Stub):
    """An environment in which nothing is set."""

    def __getattr__(self, name):
        return types.SimpleNamespace(get=lambda: False)


class Pool:
    """A token pool of 16 bits, in place of the engine's, whose write is compiled."""

    def __init__(self, rows, heads, dim):
        self.buffers = torch.zeros(2, rows, heads, dim, dtype=torch.bfloat16, device=DEVICE)

    def set_kv_buffer(self, layer, where, k, v):
        self.buffers[0][where.loc], self.buffers[1][where.loc] = k, v

    def get_key_buffer(self, layer_id):
        return self.buffers[0]

    def get_value_buffer(self, layer_id):
        return self.buffers[1]


def serve(base, registry, batches, pools, choices):
    """The plugin is in the engine's table, its class is of the engine's, and steps run by the engine's own dispatch."""
    from fmha import _plugins

    _plugins.sglang()
    assert choices == ["fmha"] and "fmha" in registry.ATTENTION_BACKENDS
    for dim, size, long in SIZES:
        run_steps(base, registry, batches, dim, size, long)
    assert pools.KVWriteLoc.__module__ == pools.__name__
    print(f"steps: {3 * len(SIZES)} on {DEVICE}")


def run_steps(base, registry, batches, dim, size, long):
    """Two requests over pages of `size` rows: two chunks of a prompt, then a token each."""
    longest = -(-12 * long // size) * size
    to_token = torch.zeros(5, longest, dtype=torch.int32)
    pool = Pool(4 * longest, 2, dim)
    runner = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(req_to_token=to_token.to(DEVICE)),
        token_to_kv_pool=pool,
        page_size=size,
    )
    pages, requests = (1 + torch.randperm(4 * longest // size - 1)).tolist(), [3, 1]
    for request in requests:
        for i in range(longest):
            page = pages.pop() if i % size == 0 else int(to_token[request, i - 1]) // size
            to_token[request, i] = page * size + i % size
    runner.req_to_token_pool.req_to_token.copy_(to_token)
    backend = registry.ATTENTION_BACKENDS["fmha"](runner)
    assert isinstance(backend, base.AttentionBackend)
    layer = types.SimpleNamespace(
        layer_id=0,
        tp_q_head_num=4,
        tp_k_head_num=2,
        qk_head_dim=dim,
        v_head_dim=dim,
        scaling=0.3,
        logit_cap=0.0,
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=types.SimpleNamespace(value="decoder"),
    )
    rows = torch.randn(2, 2, 12 * long, 2, dim).to(DEVICE, torch.bfloat16)
    before = [0, 0]
    for new in ((5 * long, 3 * long), (long, 4 * long), (1, 1)):
        after = [a + n for a, n in zip(before, new)]
        places = [(b, i) for b in range(2) for i in range(before[b], after[b])]
        mode = batches.ForwardMode.DECODE if new == (1, 1) else batches.ForwardMode.EXTEND
        batch = types.SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.tensor(requests, device=DEVICE),
            seq_lens=torch.tensor(after, device=DEVICE),
            seq_lens_cpu=torch.tensor(after),
            extend_seq_lens=torch.tensor(new, device=DEVICE),
            extend_seq_lens_cpu=list(new),
            out_cache_loc=torch.stack([to_token[requests[b], i] for b, i in places]).long().to(DEVICE),
        )
        backend.init_forward_metadata(batch)
        q = torch.randn(len(places), 4 * dim).to(DEVICE, torch.bfloat16)
        k, v = (torch.stack([x[b, i] for b, i in places]) for x in rows)
        # The engine's own method calls a method of this library's backend.
        o = backend.forward(q, k, v, layer, batch)
        first = 0
        for b, n in enumerate(new):
            keys, values = (x[b : b + 1, : after[b]] for x in rows)
            query = q[None, first : first + n].view(1, n, 4, dim)
            wanted, _ = by_definition(query, keys, values, mask=(2, -1, 0, 0), softmax_scale=0.3)
            close(o[first : first + n].view(n, 4, dim), wanted[0], tolerance(torch.bfloat16))
            first += n
        before = after


if __name__ == "__main__":
    torch.manual_seed(0)
    main(pathlib.Path(sys.argv[1]))
