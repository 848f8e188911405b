"""vLLM's own classes, from its wheel without dependencies, around this package's backend: `python engine_vllm.py
FOLDER`, the folder in which `vllm` lies. Prints what was stubbed; `test_engines_real.py` runs it."""

import dataclasses
import importlib
import inspect
import os
import pathlib
import sys
import types

import torch

HERE = pathlib.Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from engine_parts import Finder  # noqa: E402
from reference import DEVICE  # noqa: E402

#: Head dimension, rows of a page, and by how much sequences are longer than those of the CPU.
SIZES = ((16, 4, 1),) if DEVICE == "cpu" else ((64, 16, 40), (128, 16, 100), (128, 64, 200), (256, 32, 50))

BARE = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.utils")
STUBBED = (
    "vllm.model_executor",
    "vllm.platforms",
    "vllm.config",
    "vllm.distributed",
    "vllm.logger",
    "vllm.envs",
    "vllm.utils.torch_utils",
    "vllm._custom_ops",
)


def write_rows(key, value, k_cache, v_cache, slots, dtype, k_scale, v_scale):
    """vLLM's compiled write into pages, of 16 bits. A slot below 0 is padding."""
    size, kept = k_cache.shape[1], slots >= 0
    places = (slots[kept] // size, slots[kept] % size)
    k_cache[places], v_cache[places] = key[kept], value[kept]


def no_group():
    raise AssertionError("no group of ranks")


def stand_in():
    """What the stubs say where the engine asks."""
    sys.modules["vllm.envs"] = importlib.import_module("vllm.envs")
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = False
    importlib.import_module("vllm._custom_ops").reshape_and_cache_flash = write_rows
    importlib.import_module("vllm.utils.torch_utils").get_dtype_size = lambda dtype: dtype.itemsize
    import_utils = types.ModuleType("vllm.utils.import_utils")

    def resolve(path):
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    import_utils.resolve_obj_by_qualname = resolve
    sys.modules["vllm.utils.import_utils"] = import_utils
    ranks = importlib.import_module("vllm.distributed.parallel_state")
    ranks.get_dcp_world_size_and_rank, ranks.get_pcp_group = lambda *_: (1, 0), no_group
    importlib.import_module("vllm.config").get_current_vllm_config_or_none = lambda: None


def main(root):
    finder = Finder(root, BARE, STUBBED)
    finder.install()
    stand_in()
    backend = importlib.import_module("vllm.v1.attention.backend")
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    serve(backend, registry)
    print("stubbed:", *sorted(name for name in {*finder.used, "vllm.utils.import_utils"} if name not in BARE))


def chosen_by(registry):
    """The class that the engine's registry gives for the plugin's name, which older ones call CUSTOM."""
    from fmha import _plugins

    _plugins.vllm()
    names = registry.AttentionBackendEnum
    found = names["FMHA" if "FMHA" in names.__members__ else "CUSTOM"].get_class()
    import fmha.vllm

    assert found is fmha.vllm.Backend
    return found


def serve(backend, registry):
    """The plugin is found by the engine's registry, its classes are of the engine's, and a step runs."""
    chosen = chosen_by(registry)
    assert issubclass(chosen, backend.AttentionBackend) and issubclass(chosen.get_impl_cls(), backend.AttentionImpl)
    assert issubclass(chosen.get_builder_cls(), backend.AttentionMetadataBuilder)
    assert chosen.get_builder_cls().get_cudagraph_support(None, None) is backend.AttentionCGSupport.ALWAYS
    assert reasons(chosen, backend) == []
    assert reasons(chosen, backend, head_size=12) == ["head_size not supported"]
    assert any("7 is below 8" in said for said in reasons(chosen, backend, major=7))
    assert reasons(chosen, backend, use_mla=True)
    assert any("lists of keys" in said for said in reasons(chosen, backend, use_sparse=True))
    for dim, size, long in SIZES:
        steps(chosen, backend, dim, size, long)
    lists(backend, registry)
    print(f"steps: {3 * len(SIZES)} on {DEVICE}")


def lists(backend, registry):
    """The backend of lists by a name of the engine's own, in its check and over its metadata."""
    os.environ["FMHA_VLLM_SPARSE"] = "FLASHMLA_SPARSE"
    from fmha import _plugins

    _plugins.vllm()
    chosen = registry.AttentionBackendEnum["FLASHMLA_SPARSE"].get_class()
    import fmha.vllm_sparse
    from reference import attention as by_definition, close, tolerance

    assert chosen is fmha.vllm_sparse.FLASHMLA_SPARSE and issubclass(chosen.get_impl_cls(), backend.MLAAttentionImpl)
    if "FMHA_SPARSE" in registry.AttentionBackendEnum.__members__:
        assert registry.AttentionBackendEnum["FMHA_SPARSE"].get_class() is fmha.vllm_sparse.Backend
    sparse = dict(use_mla=True, use_sparse=True, head_size=576)
    assert reasons(chosen, backend, **sparse) == []
    assert reasons(chosen, backend, **sparse, kv_cache_dtype="fp8_ds_mla") == []
    assert reasons(chosen, backend, **sparse, kv_cache_dtype="nvfp4_ds_mla") == ["kv_cache_dtype not supported"]
    assert any("7 is below 8" in said for said in reasons(chosen, backend, **sparse, major=7))
    assert reasons(chosen, backend, head_size=576)
    heads, size, topk = 2, 16, 5
    buffer = torch.randint(-1, 7, (4, topk), dtype=torch.int32, device=DEVICE)
    words = dict(alibi_slopes=None, sliding_window=None, logits_soft_cap=None, attn_type="decoder")
    words.update(kv_sharing_target_layer_name=None, kv_cache_dtype="auto", indexer=None, topk_indices_buffer=buffer)
    dims = dict(q_lora_rank=8, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192)
    impl = chosen.get_impl_cls()(heads, 576, 0.05, 1, **words, **dims, v_head_dim=128, kv_b_proj=None)
    builder = chosen.get_builder_cls()(
        types.SimpleNamespace(block_size=size), ["layer.0"], types.SimpleNamespace(), torch.device(DEVICE)
    )
    assert chosen.get_builder_cls().get_cudagraph_support(None, None) is backend.AttentionCGSupport.NEVER
    starts, lengths = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([9, 7], dtype=torch.int32)
    table = torch.tensor([[2], [0]], dtype=torch.int32)
    common = common_metadata(backend, starts, lengths, 4, 3, 9, table, torch.arange(4))
    cache = torch.randn(3, size, 576).to(DEVICE, torch.bfloat16)
    q = torch.randn(4, heads, 576).to(DEVICE, torch.bfloat16)
    o, _ = impl.forward_mqa(q.split((512, 64), -1), cache, builder.build(0, common), None)
    for token in range(4):
        listed = [j for j in buffer[token].tolist() if j >= 0]
        k = cache[table[token // 3, 0], listed][None, :, None]
        wanted, _ = by_definition(q[None, token : token + 1], k, k[..., :512], softmax_scale=0.05)
        close(o[token], wanted[0, 0], tolerance(torch.bfloat16))


def steps(chosen, backend, dim, size, long):
    """Two sequences over pages of `size` rows: two chunks of a prompt, then a token each; a GPU replays a graph of the
    last step for lengths that it was not captured with."""
    heads, heads_kv = 4, 2
    # Creating the object raises an error if an abstract method is missing.
    sizes = dict(num_heads=heads, head_size=dim, scale=0.3, num_kv_heads=heads_kv)
    impl = chosen.get_impl_cls()(**sizes, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto")
    spec = types.SimpleNamespace(block_size=size)
    builder = chosen.get_builder_cls()(spec, ["layer.0"], types.SimpleNamespace(), torch.device(DEVICE))
    pages = -(-9 * long // size)
    pool = torch.zeros(4 * pages, heads_kv, size, 2 * dim, dtype=torch.bfloat16, device=DEVICE)
    layer = types.SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    table = torch.randperm(4 * pages)[: 2 * pages].view(2, pages).int()
    rows = torch.randn(2, 2, 9 * long, heads_kv, dim).to(DEVICE, torch.bfloat16)
    before = [0, 0]
    for new in ((5 * long, 3 * long), (long, 4 * long), (1, 1)):
        after = [a + n for a, n in zip(before, new)]
        places = [(b, i) for b in range(2) for i in range(before[b], after[b])]
        slots = torch.tensor([int(table[b, i // size]) * size + i % size for b, i in places])
        starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32)
        common = common_metadata(
            backend, starts, torch.tensor(after, dtype=torch.int32), len(places), max(new), max(after), table, slots
        )
        metadata = builder.build(0, common)
        k, v = (torch.stack([x[b, i] for b, i in places]) for x in rows)
        impl.do_kv_cache_update(layer, k, v, pool, metadata.slot_mapping)
        q = torch.randn(len(places), heads, dim).to(DEVICE, torch.bfloat16)
        o = torch.empty_like(q)
        impl.forward(layer, q, k, v, pool, metadata, o)
        compare(o, q, rows, new, after)
        before = after
    if DEVICE != "cpu":
        replay(builder, impl, layer, common, pool, rows, after)


def replay(builder, impl, layer, common, pool, rows, after):
    """A step's graph, replayed with fewer keys of each sequence, is right for those."""
    q = torch.randn(2, impl.num_heads, impl.head_size).to(DEVICE, torch.bfloat16)
    o, metadata = torch.empty_like(q), builder.build_for_cudagraph_capture(common)
    call = lambda: impl.forward(layer, q, q, q, pool, metadata, o)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        call()
    for lengths in (after, [after[0] // 2, 1], [1, after[1] - 1]):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        o.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        compare(o, q, rows, (1, 1), lengths)


def compare(o, q, rows, new, after):
    """O of each sequence's new rows is attention by definition over the keys that it has after the step."""
    from reference import attention as by_definition, close, tolerance

    for b, (first, n) in enumerate(((0, new[0]), (new[0], new[1]))):
        part = slice(first, first + n)
        k, v = (x[b : b + 1, : after[b]] for x in rows)
        wanted, _ = by_definition(q[None, part], k, v, mask=(2, -1, 0, 0), softmax_scale=0.3)
        close(o[part], wanted[0], tolerance(torch.bfloat16))


def reasons(chosen, backend, major=9, **changes):
    """What the engine's own check says against the backend."""
    known = dict(
        head_size=64,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        device_capability=types.SimpleNamespace(major=major, minor=0),
        attn_type=backend.AttentionType.DECODER,
    )
    parameters = inspect.signature(chosen.validate_configuration).parameters.values()
    options = {one.name: known.get(one.name, False) for one in parameters if one.default is one.empty}
    return chosen.validate_configuration(**{**options, **changes})


def common_metadata(backend, starts, lengths, tokens, longest_q, longest_k, table, slots):
    """The engine's own metadata class, with what it asks for."""
    known = dict(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(DEVICE),
        seq_lens_cpu=lengths,
        num_computed_tokens_cpu=lengths - starts.diff(),
        num_reqs=len(lengths),
        num_actual_tokens=tokens,
        max_query_len=longest_q,
        max_seq_len=longest_k,
        block_table_tensor=table.to(DEVICE),
        slot_mapping=slots.to(DEVICE),
        causal=True,
    )
    return filled(backend.CommonAttentionMetadata, **known)


def filled(kind, **known):
    """An object of a data class, with those of its fields that are known."""
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{name: x for name, x in known.items() if name in fields})


if __name__ == "__main__":
    torch.manual_seed(0)
    main(pathlib.Path(sys.argv[1]))
