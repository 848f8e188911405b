"""The hooks of vLLM and SGLang, on a stand-in of what those projects define: base classes, metadata, pools, their write
into the cache. What a real engine does with them is not shown here."""

import dataclasses
import enum
import sys
import types

import pytest
import torch

import fmha
from reference import DEVICE, attention as by_definition, close, tolerance

BF16 = torch.bfloat16


def module(monkeypatch, name, **contents):
    made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        monkeypatch.setattr(sys.modules[parent], child, made, raising=False)
    return made


def nested(monkeypatch, name, **contents):
    parts = name.split(".")
    for i in range(1, len(parts)):
        if ".".join(parts[:i]) not in sys.modules:
            module(monkeypatch, ".".join(parts[:i]))
    return module(monkeypatch, name, **contents)


@pytest.fixture
def vllm(monkeypatch):
    """vLLM 0.33's names, as far as a backend touches them."""
    registered = {}

    class AttentionType(str, enum.Enum):
        DECODER = "decoder"
        ENCODER_ONLY = "encoder_only"

    class Support(enum.Enum):
        ALWAYS = 3
        UNIFORM_BATCH = 2
        UNIFORM_SINGLE_TOKEN_DECODE = 1
        NEVER = 0

    class Builder:
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.kv_cache_spec = kv_cache_spec

    class Names:
        register, __members__ = None, {}

        def __class_getitem__(cls, name):
            return name

    def reshape_and_cache_flash(key, value, k_cache, v_cache, slots, dtype, k_scale, v_scale):
        size = k_cache.shape[1]
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                for cache, given, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
                    if dtype.startswith("fp8"):
                        given = (given[row].float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
                        cache[slot // size, slot % size] = given
                    else:
                        cache[slot // size, slot % size] = given[row]

    nested(
        monkeypatch,
        "vllm.v1.attention.backend",
        AttentionBackend=type("AttentionBackend", (), {}),
        AttentionImpl=type("AttentionImpl", (), {}),
        MLAAttentionImpl=type("MLAAttentionImpl", (), {}),
        AttentionMetadataBuilder=Builder,
        AttentionCGSupport=Support,
        AttentionType=AttentionType,
    )
    nested(
        monkeypatch,
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=Names,
        register_backend=lambda name, path: registered.update({name: path}),
    )
    nested(monkeypatch, "vllm._custom_ops", reshape_and_cache_flash=reshape_and_cache_flash)
    nested(monkeypatch, "vllm.envs", VLLM_BATCH_INVARIANT=False)
    for name in ("fmha.vllm", "fmha.vllm_sparse"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("FMHA_VLLM_SPARSE", "FLASHMLA_SPARSE,FLASH_ATTN_MLA_SPARSE")
    import fmha._plugins

    fmha._plugins.vllm()
    path, _, name = registered["FMHA"].rpartition(".")
    found = getattr(__import__(path, fromlist=[name]), name)
    found.registered = registered
    yield found
    for name in ("fmha.vllm", "fmha.vllm_sparse"):
        sys.modules.pop(name, None)


def vllm_batch(lengths_q, lengths_k, block_size, blocks, padded=0):
    """A step's metadata, and a pool whose pages are dealt out backwards."""
    free = list(range(blocks))
    table = torch.zeros(len(lengths_q), 8, dtype=torch.int32)
    slots = []
    for b, (n, length) in enumerate(zip(lengths_q, lengths_k)):
        for page in range(-(-length // block_size)):
            table[b, page] = free.pop()
        slots += [int(table[b, i // block_size]) * block_size + i % block_size for i in range(length - n, length)]
    starts = torch.tensor([0, *torch.tensor(lengths_q).cumsum(0).tolist()], dtype=torch.int32)
    return types.SimpleNamespace(
        num_actual_tokens=sum(lengths_q),
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths_k, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(lengths_q),
        max_seq_len=max(lengths_k),
        causal=True,
    )


@pytest.mark.parametrize(
    "options, cache_dtype, causal",
    [
        ({}, "auto", True),
        ({"sliding_window": 4}, "auto", True),
        ({"sliding_window": 4}, "auto", False),
        ({"logits_soft_cap": 2.0, "alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, "auto", True),
        ({"sinks": True}, "auto", True),
        ({}, "fp8", True),
    ],
    ids=str,
)
def test_vllm_prompts_then_tokens_over_its_cache(vllm, options, cache_dtype, causal):
    heads, heads_kv, dim, size = 4, 2, 16, 4
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(heads, dtype=BF16)}
    impl = vllm.get_impl_cls()(heads, dim, 0.3, num_kv_heads=heads_kv, kv_cache_dtype=cache_dtype, **options)
    impl.process_weights_after_loading(BF16)
    scale = torch.full((1,), 1.5 if cache_dtype == "fp8" else 1.0)
    layer = types.SimpleNamespace(_k_scale=scale, _v_scale=scale)
    dtype = torch.uint8 if cache_dtype == "fp8" else BF16
    pool = torch.zeros(24, heads_kv, size, 2 * dim, dtype=dtype)
    builder = vllm.get_builder_cls()(types.SimpleNamespace(block_size=size), [], None, DEVICE)
    rows = [(torch.randn(9, heads_kv, dim, dtype=BF16), torch.randn(9, heads_kv, dim, dtype=BF16)) for _ in range(3)]
    # The first step has prompts side by side, one of them continued in a chunk; later steps have one token each.
    for lengths_q, lengths_k in (((5, 3, 8), (5, 3, 8)), ((1, 4, 1), (6, 7, 9)), ((1, 1, 1), (7, 8, 9))):
        common = vllm_batch(lengths_q, lengths_k, size, 24)
        common.causal = causal
        # The whole cache is written again, since pages are dealt out anew in each step.
        whole = vllm_batch(lengths_k, lengths_k, size, 24)
        whole.slot_mapping = torch.cat([whole.slot_mapping, torch.tensor([-1])])
        stacked = [
            torch.cat([*(pair[at][:n] for pair, n in zip(rows, lengths_k)), torch.ones(1, heads_kv, dim)])
            for at in (0, 1)
        ]
        impl.do_kv_cache_update(layer, *(x.to(BF16) for x in stacked), pool, whole.slot_mapping)
        # The query is padded, as an engine's buffers are.
        q = torch.randn(sum(lengths_q) + 2, heads, dim, dtype=BF16)
        o = torch.full_like(q, 7.0)
        metadata = builder.build(0, common)
        assert impl.forward(layer, q, None, None, pool, metadata, o) is o
        at = 0
        for b, (n, length) in enumerate(zip(lengths_q, lengths_k)):
            left = options["sliding_window"] - 1 if "sliding_window" in options else -1
            mask = (2, left, 0) if causal else (2, left, left)
            k, v = (x[:length][None] for x in rows[b])
            if cache_dtype == "fp8":
                k, v = (((x.float() / scale).to(torch.float8_e4m3fn).float() * scale) for x in (k, v))
            wanted, _ = by_definition(
                q[None, at : at + n],
                k,
                v,
                mask=(*mask, 0),
                softmax_scale=0.3,
                softcap=options.get("logits_soft_cap"),
                alibi_slopes=torch.tensor(options["alibi_slopes"]) if "alibi_slopes" in options else None,
                sink=options.get("sinks"),
            )
            close(o[at : at + n], wanted[0], 4 * tolerance(BF16) if cache_dtype == "fp8" else tolerance(BF16))
            at += n
        assert (o[at:] == 7.0).all()


def test_vllm_is_told_what_is_so(vllm):
    assert vllm.get_name() == "FMHA" and not vllm.forward_includes_kv_cache_update
    assert vllm.get_builder_cls()._cudagraph_support.name == "ALWAYS"
    assert not vllm.supports_device_cpu_query_lens_mismatch()
    assert vllm.get_impl_cls().lse_base_on_e
    assert vllm.supports_head_size(128) and not vllm.supports_head_size(12) and not vllm.supports_head_size(512)
    arguments = (128, BF16, "auto", 16, False, False, False, False)
    assert vllm.supports_combination(*arguments, types.SimpleNamespace(major=9, minor=0)) is None
    assert "7 is below 8" in vllm.supports_combination(*arguments, types.SimpleNamespace(major=7, minor=5))
    with pytest.raises(NotImplementedError, match="encoder_only"):
        vllm.get_impl_cls()(4, 16, 1.0, attn_type="encoder_only")
    impl = vllm.get_impl_cls()(4, 16, 1.0)
    o = torch.ones(3, 4, 16)
    assert not impl.forward(None, None, None, None, None, None, o).any()
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward(None, None, None, None, None, None, o, output_scale=torch.ones(1))
    builder = vllm.get_builder_cls()(types.SimpleNamespace(block_size=4), [], None, DEVICE)
    common = vllm_batch((1, 3), (5, 3), 4, 9)
    metadata = builder.build(0, common)
    assert (metadata.max_query_len, metadata.max_seq_len) == (4, 8)
    other = torch.ones(2, 8, dtype=torch.int32)
    assert builder.update_block_table(metadata, other, common.slot_mapping).block_table is other
    common.causal = torch.ones(2, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="causal is a tensor"):
        builder.build(0, common)


def test_vllms_graph_of_a_mixed_batch_serves_whatever_batch_it_is_replayed_for(vllm):
    """A graph replays what was queued, with buffers of other contents: here a call with the captured metadata again."""
    heads, heads_kv, dim, size, tokens = 4, 2, 16, 4, 12
    impl = vllm.get_impl_cls()(heads, dim, 0.3, num_kv_heads=heads_kv)
    builder = vllm.get_builder_cls()(types.SimpleNamespace(block_size=size), [], None, DEVICE)
    pool = torch.randn(40, heads_kv, size, 2 * dim, dtype=BF16)
    # The graph is captured with short sequences. The engine promises nothing, three tokens for each request, or all
    # tokens.
    for captured_q, promised in (((4, 3, 3, 2), None), ((3, 3, 3, 3), 3), ((3, 3, 3, 3), 12)):
        common = vllm_batch(captured_q, captured_q, size, 40)
        if promised is not None:
            common.max_query_len = promised
        captured = builder.build_for_cudagraph_capture(common)
        assert captured.max_seq_len == common.block_table_tensor.shape[1] * size
        # The promised bound is rounded up, as in every plan.
        assert captured.max_query_len == (4 if promised == 3 else tokens)
        mixed = [((12, 0, 0, 0), (30, 1, 1, 1)), ((1, 9, 1, 0), (29, 9, 20, 1)), ((2, 2, 2, 2), (31, 2, 9, 30))]
        uniform = [((3, 3, 3, 3), (30, 3, 7, 31)), ((1, 1, 1, 1), (30, 1, 7, 31))]
        for lengths_q, lengths_k in uniform if promised == 3 else mixed + uniform:
            step = vllm_batch(lengths_q, lengths_k, size, 40)
            for name, now in (
                ("query_start_loc", step.query_start_loc),
                ("seq_lens", step.seq_lens),
                ("block_table", step.block_table_tensor),
            ):
                getattr(captured, name).copy_(now)
            q = torch.randn(tokens, heads, dim, dtype=BF16)
            o = torch.full_like(q, 7.0)
            impl.forward(None, q, None, None, pool, captured, o)
            at = 0
            for b, (n, length) in enumerate(zip(lengths_q, lengths_k)):
                pages = step.block_table_tensor[b, : -(-length // size)].long()
                rows = pool[pages].transpose(1, 2).flatten(0, 1)[None, :length]
                k, v = rows.split(dim, -1)
                wanted, _ = by_definition(q[None, at : at + n], k, v, mask=(2, -1, 0, 0), softmax_scale=0.3)
                close(o[at : at + n], wanted[0], tolerance(BF16))
                at += n


@pytest.mark.parametrize("has_names", [True, False])
def test_vllms_plugin_registers_once_and_by_a_name_that_is_found(monkeypatch, has_names):
    class Names:
        CUSTOM = "its own"
        __members__ = {}

    if has_names:
        Names.register = None
    calls = []

    def register_backend(name, path):
        calls.append((name, path))
        if name in Names.__members__:
            raise ValueError(f"Backend {name} already exists")
        Names.__members__[name] = path

    nested(
        monkeypatch,
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=Names,
        register_backend=register_backend,
    )
    import fmha._plugins

    fmha._plugins.vllm()
    own = [("FMHA", "fmha.vllm.Backend"), ("FMHA_SPARSE", "fmha.vllm_sparse.Backend")]
    assert calls == (own if has_names else [("its own", "fmha.vllm.Backend")])
    if has_names:
        fmha._plugins.vllm()
        assert calls == own


class Mode(enum.Enum):
    DECODE = 1
    EXTEND = 2
    TARGET_VERIFY = 3

    def is_decode(self):
        return self is Mode.DECODE

    def is_target_verify(self):
        return self is Mode.TARGET_VERIFY


class Pool:
    """A token pool: a row of each buffer is a token's."""

    def __init__(self, rows, heads, dim):
        self.buffers = torch.zeros(2, rows, heads, dim, dtype=BF16)

    def set_kv_buffer(self, layer, where, k, v):
        for buffer, rows in zip(self.buffers, (k, v)):
            buffer[where.loc] = rows

    def get_key_buffer(self, layer_id):
        return self.buffers[0]

    def get_value_buffer(self, layer_id):
        return self.buffers[1]


@pytest.fixture
def sglang(monkeypatch):
    """SGLang 0.5.23's names, as far as a backend touches them; the factory that the plugin registers."""
    factories, choices = {}, []

    @dataclasses.dataclass
    class KVWriteLoc:
        loc: torch.Tensor
        swa_loc: object = None

    nested(
        monkeypatch,
        "sglang.srt.layers.attention.base_attn_backend",
        AttentionBackend=type("AttentionBackend", (), {}),
    )
    nested(
        monkeypatch,
        "sglang.srt.layers.attention.attention_registry",
        register_attention_backend=lambda name: lambda factory: factories.setdefault(name, factory),
    )
    nested(monkeypatch, "sglang.srt.server_args", add_attention_backend_choices=choices.extend)
    nested(monkeypatch, "sglang.srt.mem_cache.memory_pool", KVWriteLoc=KVWriteLoc)
    monkeypatch.delitem(sys.modules, "fmha.sglang", raising=False)
    import fmha._plugins

    fmha._plugins.sglang()
    assert choices == ["fmha"]
    yield factories["fmha"]
    sys.modules.pop("fmha.sglang", None)


def layer(**changes):
    settings = dict(
        layer_id=0,
        tp_q_head_num=4,
        tp_k_head_num=2,
        qk_head_dim=16,
        v_head_dim=16,
        scaling=0.3,
        logit_cap=0.0,
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=types.SimpleNamespace(value="decoder"),
    )
    return types.SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("changes", [{}, {"sliding_window_size": 3}, {"logit_cap": 2.0}], ids=str)
def test_sglang_extends_then_decodes_over_its_pool(sglang, page_size, in_graph, changes):
    pool, to_token = Pool(64 + page_size, 2, 16), torch.zeros(5, 16, dtype=torch.int32)
    runner = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(req_to_token=to_token), token_to_kv_pool=pool, page_size=page_size
    )
    backend = sglang(runner)
    requests, pages = [3, 1], list(range(1, 1 + 64 // page_size))
    for request in requests:
        for i in range(12):
            page = pages.pop() if i % page_size == 0 else to_token[request, i - 1] // page_size
            to_token[request, i] = page * page_size + i % page_size
    keys = torch.randn(2, 12, 2, 16, dtype=BF16)
    values = torch.randn(2, 12, 2, 16, dtype=BF16)
    sinks = torch.randn(4) if not changes else None
    one = layer(**changes)
    before = [0, 0]
    for new in ((5, 3), (1, 4), (1, 1), (1, 1)):
        after = [a + n for a, n in zip(before, new)]
        rows = [(b, i) for b in range(2) for i in range(before[b], after[b])]
        decodes = new == (1, 1)
        batch = types.SimpleNamespace(
            forward_mode=Mode.DECODE if decodes else Mode.EXTEND,
            req_pool_indices=torch.tensor(requests),
            seq_lens=torch.tensor(after),
            seq_lens_cpu=torch.tensor(after, device="cpu"),
            extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=list(new),
            out_cache_loc=torch.stack([to_token[requests[b], i] for b, i in rows]).long(),
        )
        if in_graph:
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        q = torch.randn(len(rows), 4 * 16, dtype=BF16)
        k, v = (torch.stack([x[b, i] for b, i in rows]) for x in (keys, values))
        run = backend.forward_decode if decodes else backend.forward_extend
        o = run(q, k, v, one, batch, sinks=sinks)
        assert o.shape == q.shape
        at = 0
        for b, n in enumerate(new):
            wanted, _ = by_definition(
                q[None, at : at + n].view(1, n, 4, 16),
                keys[b : b + 1, : after[b]],
                values[b : b + 1, : after[b]],
                mask=(2, changes.get("sliding_window_size", -1), 0, 0),
                softmax_scale=0.3,
                softcap=changes.get("logit_cap"),
                sink=sinks,
            )
            close(o[at : at + n].view(n, 4, 16), wanted[0], tolerance(BF16))
            at += n
        before = after


def test_sglang_is_refused_by_name(sglang):
    def runner(**pool):
        kept = Pool(8, 2, 16)
        vars(kept).update(pool)
        tokens = types.SimpleNamespace(req_to_token=torch.zeros(2, 4, dtype=torch.int32))
        return types.SimpleNamespace(req_to_token_pool=tokens, token_to_kv_pool=kept, page_size=1)

    with pytest.raises(NotImplementedError, match="sliding windows has 3 layers"):
        sglang(runner(swa_layer_nums=3))
    backend = sglang(runner())
    assert backend.get_cuda_graph_seq_len_fill_value() == 1 and not backend.needs_cpu_seq_lens
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        backend.init_forward_metadata_out_graph(types.SimpleNamespace(forward_mode=Mode.TARGET_VERIFY))
    q = torch.zeros(1, 64, dtype=BF16)
    for one, rest, words in (
        (layer(is_cross_attention=True), {}, "layer 0 is of decoder"),
        (layer(attn_type="encoder_only"), {}, "encoder_only"),
        (layer(), {"q_rope": q}, "q_rope is given"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            backend.forward_extend(q, None, None, one, None, **rest)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        backend.forward_extend(q, None, None, layer(), None)


def test_entry_points_name_functions_that_are_there():
    import pathlib
    import re

    text = (pathlib.Path(fmha.__file__).parents[1] / "pyproject.toml").read_text()
    points = re.findall(r'\[project\.entry-points\."([^"]+)"\]\nfmha = "([^:]+):(\w+)"', text)
    assert [group for group, _, _ in points] == ["vllm.general_plugins", "sglang.srt.plugins"]
    for _, path, name in points:
        assert callable(getattr(__import__(path, fromlist=[name]), name))


def sparse_backend(vllm, name="FMHA_SPARSE"):
    path, _, name = vllm.registered[name].rpartition(".")
    return getattr(__import__(path, fromlist=[name]), name)


def row_of_bytes(x):
    """FlashMLA's row of 656 bytes, and the values that it stands for."""
    groups = x[:512].float().unflatten(0, (4, 128))
    scales = groups.abs().amax(-1) / 448
    narrow = (groups / scales[:, None]).to(torch.float8_e4m3fn)
    parts = [narrow.flatten().view(torch.uint8), scales.view(torch.uint8), x[512:].view(torch.uint8)]
    return torch.cat(parts), torch.cat([(narrow.float() * scales[:, None]).flatten().to(BF16), x[512:]])


@pytest.mark.parametrize("cache_dtype, head_size", [("auto", 576), ("bfloat16", 512), ("fp8_ds_mla", 576)])
def test_vllm_latent_rows_over_lists(vllm, cache_dtype, head_size):
    """A prompt's chunk, a whole prompt and a token, each of which sees the keys that an indexer has listed."""
    backend = sparse_backend(vllm)
    heads, size, topk = 3, 4, 6
    buffer = torch.full((32, topk), -1, dtype=torch.int32)
    indexer = types.SimpleNamespace(topk_indices_buffer=buffer)
    ranks = dict(kv_lora_rank=512, qk_rope_head_dim=head_size - 512)
    impl = backend.get_impl_cls()(heads, head_size, 0.05, 1, kv_cache_dtype=cache_dtype, indexer=indexer, **ranks)
    common = vllm_batch((4, 3, 1), (9, 3, 7), size, 24)
    metadata = backend.get_builder_cls()(types.SimpleNamespace(block_size=size), [], None, DEVICE).build(0, common)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 8, 0)
    width, dtype = (656, torch.uint8) if cache_dtype == "fp8_ds_mla" else (head_size, BF16)
    cache, rows = torch.zeros(24, size, width, dtype=dtype), {}
    for b, length in enumerate((9, 3, 7)):
        for i in range(length):
            x = torch.randn(head_size).to(BF16)
            stored, rows[b, i] = row_of_bytes(x) if cache_dtype == "fp8_ds_mla" else (x, x)
            cache[common.block_table_tensor[b, i // size], i % size] = stored
    q = torch.randn(8, heads, head_size).to(BF16)
    places = [(0, i) for i in range(5, 9)] + [(1, i) for i in range(3)] + [(2, 6)]
    for token, (b, i) in enumerate(places):
        chosen = torch.randperm(i + 1)[:topk].sort().values.int()
        buffer[token, : len(chosen)] = chosen
    # The list has no keys.
    buffer[5] = -1
    o, lse = impl.forward_mqa(q.split((512, head_size - 512), -1), cache, metadata, None)
    assert o.shape == (8, heads, 512) and lse is None
    for token, (b, _) in enumerate(places):
        listed = [j for j in buffer[token].tolist() if j >= 0]
        if not listed:
            assert not o[token].any()
            continue
        k = torch.stack([rows[b, j] for j in listed])[None, :, None]
        wanted, _ = by_definition(q[None, token : token + 1], k, k[..., :512], softmax_scale=0.05)
        close(o[token], wanted[0, 0], tolerance(BF16))
    # The indexer's buffer is read in each call, and an explicit buffer takes precedence.
    impl.topk_indices_buffer = torch.full_like(buffer, -1)
    assert not impl.forward_mqa(q, cache, metadata, None)[0].any()


def test_vllm_sparse_names_lead_here_and_what_they_do_not_take_is_named(vllm, monkeypatch):
    assert set(vllm.registered) == {"FMHA", "FMHA_SPARSE", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"}
    for name in vllm.registered.keys() - {"FMHA"}:
        backend = sparse_backend(vllm, name)
        assert backend.get_name() == name and backend.is_mla() and backend.is_sparse()
    assert "fp8" in sparse_backend(vllm, "FLASHMLA_SPARSE").supported_kv_cache_dtypes
    backend = sparse_backend(vllm)
    lists = dict(topk_indices_buffer=torch.zeros(1, 1, dtype=torch.int32))
    sizes = dict(num_heads=2, head_size=576, scale=1.0, num_kv_heads=1, **lists)
    for said, given in [
        ("alibi_slopes", dict(alibi_slopes=[1.0, 2.0])),
        ("sliding_window", dict(sliding_window=4)),
        ("logits_soft_cap", dict(logits_soft_cap=3.0)),
        ("kv_sharing_target_layer_name", dict(kv_sharing_target_layer_name="layer")),
        ("sinks", dict(sinks=[1.0])),
        ("sinks", dict(sinks=torch.zeros(2))),
        ("attn_type encoder", dict(attn_type="encoder")),
        ("kv_cache_dtype fp8 is none of", dict(kv_cache_dtype="fp8")),
        ("num_kv_heads 2", dict(num_kv_heads=2)),
        ("head_size 640", dict(head_size=640)),
        ("indexer and topk_indices_buffer are None", dict(topk_indices_buffer=None)),
    ]:
        with pytest.raises((NotImplementedError, ValueError)) as error:
            backend.get_impl_cls()(**{**sizes, **given})
        assert said in str(error.value)
    config = lambda **ranks: types.SimpleNamespace(parallel_config=types.SimpleNamespace(**ranks))
    spec = types.SimpleNamespace(block_size=4)
    hisparse = types.SimpleNamespace(attention_config=types.SimpleNamespace(hisparse_config={}))
    for said, given in [
        ("decode_context_parallel_size 2", config(decode_context_parallel_size=2)),
        ("prefill_context_parallel_size 4", config(prefill_context_parallel_size=4)),
        ("hisparse_config", hisparse),
    ]:
        with pytest.raises(NotImplementedError, match=said):
            backend.get_builder_cls()(spec, [], given, DEVICE)
    asked = lambda *given: backend.supports_combination(*given, 64, True, False, True, False, None)
    assert asked(576, BF16, "fp8_ds_mla") is None
    assert "rows of 656 bytes" in asked(576, torch.float16, "fp8_ds_mla")
    impl = backend.get_impl_cls()(**sizes)
    metadata = types.SimpleNamespace(max_query_len=1, max_seq_len=1)
    with pytest.raises(ValueError, match="q has rows of 512 elements, not head_size 576"):
        impl.forward_mqa(torch.zeros(1, 2, 512), torch.zeros(1, 4, 576), metadata, None)
    with pytest.raises(ValueError, match="kv_cache is of torch.float32, but q of torch.bfloat16"):
        impl.forward_mqa(torch.zeros(1, 2, 576).to(BF16), torch.zeros(1, 4, 576), metadata, None)
    monkeypatch.setenv("FMHA_VLLM_SPARSE", "FLASHMLA_DENSE")
    with pytest.raises(ValueError, match="'FLASHMLA_DENSE' is none of FLASHMLA_SPARSE"):
        __import__("fmha._plugins", fromlist=["vllm"]).vllm()


@pytest.fixture
def sglang_sparse(monkeypatch):
    """SGLang's sparse backend by its own name, on a stand-in of the class that it derives from."""
    made = {}

    class Theirs:
        def __init__(self, runner):
            self.dsa_prefill_impl, self.dsa_decode_impl = runner.impls
            self.physical_page_size, self.kv_cache_dim, self.dsa_kv_cache_store_fp8 = 4, 656, runner.is_fp8

    attention = "sglang.srt.layers.attention"
    nested(monkeypatch, f"{attention}.dsa_backend", DeepseekSparseAttnBackend=Theirs)
    register = lambda name: lambda function: made.update({name: function})
    nested(monkeypatch, f"{attention}.attention_registry", register_attention_backend=register)
    nested(monkeypatch, "sglang.srt.server_args", add_attention_backend_choices=lambda names: None)
    monkeypatch.delitem(sys.modules, "fmha.sglang_sparse", raising=False)
    monkeypatch.setenv("FMHA_SGLANG_SPARSE", "dsa")
    import fmha._plugins

    fmha._plugins.sglang()
    assert set(made) == {"dsa", "fmha"}
    yield lambda *impls, is_fp8=False: made["dsa"](types.SimpleNamespace(impls=impls, is_fp8=is_fp8))
    sys.modules.pop("fmha.sglang_sparse", None)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_sglangs_latent_rows_over_lists(sglang_sparse, is_fp8):
    backend = sglang_sparse("flashmla_sparse", "flashmla_kv", is_fp8=is_fp8)
    heads, rows = 3, torch.randn(24, 576).to(BF16)
    stored, values = zip(*(row_of_bytes(x) for x in rows))
    lists = torch.randint(-1, 24, (5, 7), dtype=torch.int32)
    lists[2] = -1
    q, layer = torch.randn(5, heads, 576).to(BF16), types.SimpleNamespace(tp_q_head_num=heads, head_dim=576)

    def check(o, keys, lengths, sink=None):
        for token in range(5):
            listed = [j for j in lists[token, : lengths[token]].tolist() if j >= 0]
            k = torch.stack([keys[j] for j in listed])[None, :, None] if listed else torch.zeros(1, 0, 1, 576)
            given = q[None, token : token + 1], k, k[..., :512]
            wanted, _ = by_definition(*given, softmax_scale=0.05, sink=sink)
            close(o[token], wanted[0, 0], tolerance(BF16))

    words = dict(q_all=q, v_head_dim=512, sm_scale=0.05, page_table_1=lists)
    pool = torch.stack(stored) if is_fp8 else rows
    o = backend._forward_flashmla_kv(kv_cache=pool, layer=layer, metadata=None, **words)
    assert o.shape == (5, 1, heads, 512)
    check(o[:, 0], values if is_fp8 else rows, [7] * 5)
    used, sink = torch.tensor([7, 3, 7, 1, 0], dtype=torch.int32), torch.randn(heads)
    o = backend._forward_flashmla_sparse(kv_cache=rows[:, None], topk_length=used, attn_sink=sink, **words)
    check(o, rows, used.tolist(), sink)
    # Padded metadata describes no tokens beyond its own.
    o = backend._forward_flashmla_sparse(kv_cache=rows[:, None], topk_length=used[:2], **words)
    check(o, rows, [*used[:2].tolist(), 7, 7, 7])
    with pytest.raises(ValueError, match="topk_length has 6 tokens, not 5 as q_all"):
        backend._forward_flashmla_sparse(kv_cache=rows[:, None], topk_length=torch.ones(6, dtype=torch.int32), **words)


def test_sglangs_other_implementations_are_refused_by_name(sglang_sparse, monkeypatch):
    with pytest.raises(NotImplementedError, match="dsa_prefill_impl fa3 is none of flashmla_sparse, flashmla_kv"):
        sglang_sparse("fa3", "flashmla_kv")
    with pytest.raises(NotImplementedError, match="dsa_decode_impl tilelang is none of"):
        sglang_sparse("flashmla_sparse", "tilelang")
    backend = sglang_sparse("flashmla_sparse", "flashmla_kv")
    backend.flashmla_kv_format = "V32_NO_ROPE"
    with pytest.raises(NotImplementedError, match="flashmla_kv_format V32_NO_ROPE is not V32"):
        backend._forward_flashmla_kv(None, None, 512, 1.0, None, None, None)
    monkeypatch.setenv("FMHA_SGLANG_SPARSE", "dsv4")
    with pytest.raises(ValueError, match="'dsv4' is none of dsa, nsa"):
        __import__("fmha._plugins", fromlist=["sglang"]).sglang()
