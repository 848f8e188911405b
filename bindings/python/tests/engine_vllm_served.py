"""A small random model served by vLLM's own scheduler, cache manager and requests around this package's backend:
`python engine_vllm_served.py FOLDER`, the folder in which `vllm` lies. The tokens are those of the same model without a
cache. Prints what was stubbed; `test_engines_real.py` runs it."""

import importlib
import pathlib
import sys
import types

import torch

HERE = pathlib.Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import engine_vllm  # noqa: E402
from engine_parts import Finder  # noqa: E402
from reference import DEVICE, attention as by_definition  # noqa: E402

#: Head dimension, rows of a page, and the factor by which prompts are longer than on the CPU.
DIM, SIZE, LONG = (16, 4, 1) if DEVICE == "cpu" else (128, 16, 8)
#: Most tokens of a sequence.
LONGEST = 64 * LONG

BARE = (
    "vllm",
    "vllm.v1",
    "vllm.v1.attention",
    "vllm.v1.attention.backends",
    "vllm.v1.core",
    "vllm.v1.core.sched",
    "vllm.v1.metrics",
)
#: Parts of the engine that are compiled, talk to other processes or to hubs, or are for other models; their packages.
_HEAVY = """
    vllm.compilation vllm.forward_context vllm.lora vllm.multimodal vllm.pooling_params vllm.sampling_params
    vllm.tracing vllm.transformers_utils vllm.usage vllm.utils.hashing vllm.utils.mem_utils
    vllm.utils.network_utils vllm.v1.engine vllm.v1.hisparse vllm.v1.metrics.perf vllm.v1.serial_utils
    vllm.v1.spec_decode vllm.v1.structured_output cachetools cbor2 cloudpickle cpuinfo msgspec psutil uvloop zmq
""".split()
STUBBED = (*engine_vllm.STUBBED, *_HEAVY)


class Config(types.SimpleNamespace):
    """A configuration in which nothing is set but what is said."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Model:
    """A decoder of two layers with random weights; ``attend`` is asked for each layer's attention."""

    def __init__(self, vocabulary=61, layers=2, heads=4, heads_kv=2, dim=DIM):
        self.heads, self.heads_kv, self.dim, width = heads, heads_kv, dim, heads * dim
        made = lambda *shape: torch.randn(*shape).to(DEVICE) / shape[0] ** 0.5
        self.embedding, self.head = torch.randn(vocabulary, width).to(DEVICE), made(width, vocabulary)
        self.places = torch.randn(LONGEST, width).to(DEVICE)
        self.layers = [
            (made(width, width), made(width, heads_kv * dim), made(width, heads_kv * dim), made(width, width))
            for _ in range(layers)
        ]

    def __call__(self, tokens, positions, attend):
        x = self.embedding[tokens] + self.places[positions]
        for at, (to_q, to_k, to_v, back) in enumerate(self.layers):
            y = torch.nn.functional.rms_norm(x, x.shape[-1:])
            q = (y @ to_q).unflatten(-1, (self.heads, self.dim)).bfloat16()
            k, v = ((y @ w).unflatten(-1, (self.heads_kv, self.dim)).bfloat16() for w in (to_k, to_v))
            x = x / 2 + 2 * attend(at, q, k, v).flatten(1).float() @ back
        return x @ self.head


def alone(model, prompt, count):
    """The tokens that follow a prompt, and the scores of each, by float64 attention over all rows each time."""
    tokens, scores = list(prompt), []
    for _ in range(count):
        whole = lambda _, q, k, v: by_definition(
            q[None], k[None], v[None], mask=(2, -1, 0, 0), softmax_scale=model.dim**-0.5
        )[0][0]
        places = torch.arange(len(tokens), device=DEVICE)
        scores.append(model(torch.tensor(tokens, device=DEVICE), places, whole)[-1])
        tokens.append(int(scores[-1].argmax()))
    return tokens[len(prompt) :], scores


class Runner:
    """What a worker does with a step of the scheduler's: its batch, the backend's metadata, the model, the tokens."""

    def __init__(self, chosen, backend, model, blocks, size):
        self.backend, self.model, self.size, self.requests = backend, model, size, {}
        self.scores = {}
        heads = dict(num_heads=model.heads, head_size=model.dim, scale=model.dim**-0.5, num_kv_heads=model.heads_kv)
        impl = chosen.get_impl_cls()
        self.impls = [
            impl(**heads, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto") for _ in model.layers
        ]
        shape = (blocks, model.heads_kv, size, 2 * model.dim)
        self.pools = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in model.layers]
        spec = types.SimpleNamespace(block_size=size)
        self.builder = chosen.get_builder_cls()(spec, ["layer"], types.SimpleNamespace(), torch.device(DEVICE))
        self.layer = types.SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))

    def step(self, output):
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = [list(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens]
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if cached.new_block_ids[i] is not None:
                self.requests[name][1] += cached.new_block_ids[i][0]
            self.requests[name][2] = cached.num_computed_tokens[i]
        names = list(output.num_scheduled_tokens)
        counts = [output.num_scheduled_tokens[name] for name in names]
        tokens, positions, slots = [], [], []
        table = torch.zeros(len(names), LONGEST // self.size, dtype=torch.int32)
        for b, (name, count) in enumerate(zip(names, counts)):
            known, blocks, first = self.requests[name]
            table[b, : len(blocks)] = torch.tensor(blocks)
            tokens += known[first : first + count]
            places = range(first, first + count)
            positions += places
            slots += [blocks[i // self.size] * self.size + i % self.size for i in places]
        lengths = torch.tensor([self.requests[n][2] + c for n, c in zip(names, counts)], dtype=torch.int32)
        starts = torch.nn.functional.pad(torch.tensor(counts).cumsum(0, dtype=torch.int32), (1, 0))
        common = engine_vllm.common_metadata(
            self.backend,
            starts,
            lengths,
            len(tokens),
            max(counts),
            int(lengths.max()),
            table,
            torch.tensor(slots),
        )
        metadata = self.builder.build(0, common)

        def attend(at, q, k, v):
            self.impls[at].do_kv_cache_update(self.layer, k, v, self.pools[at], metadata.slot_mapping)
            return self.impls[at].forward(self.layer, q, k, v, self.pools[at], metadata, torch.empty_like(q))

        logits = self.model(torch.tensor(tokens, device=DEVICE), torch.tensor(positions, device=DEVICE), attend)
        sampled = []
        for b, (name, count) in enumerate(zip(names, counts)):
            known, _, first = self.requests[name]
            # A chunk that does not end the prompt produces no token.
            last = first + count == len(known)
            scores = logits[int(starts[b + 1]) - 1]
            token = int(scores.argmax())
            if last:
                self.scores.setdefault(name, []).append(scores)
            sampled.append([token] if last else [])
            known += [token] if last else []
        return names, sampled, counts


def main(root):
    finder = Finder(root, BARE, STUBBED)
    finder.install()
    engine_vllm.stand_in()
    found = lambda name: importlib.import_module(f"vllm.{name}")
    found("v1.structured_output.request").StructuredOutputRequest.from_sampling_params = lambda _: None
    backend, registry = found("v1.attention.backend"), found("v1.attention.backends.registry")
    engine_vllm.serve(backend, registry)
    serve(found, backend, engine_vllm.chosen_by(registry))
    print("stubbed:", *sorted(name for name in {*finder.used, "vllm.utils.import_utils"} if name not in BARE))


def scheduler_of(found, blocks, size, tokens):
    """vLLM's scheduler: four requests at once, `tokens` a step, prompts in chunks, prefixes kept."""
    config = Config(
        scheduler_config=Config(
            max_num_seqs=4,
            max_num_batched_tokens=tokens,
            max_num_scheduled_tokens=tokens,
            policy="fcfs",
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
            watermark=0.0,
            max_num_partial_prefills=1,
            max_long_partial_prefills=1,
        ),
        cache_config=Config(num_gpu_blocks=blocks, block_size=size, enable_prefix_caching=True),
        model_config=Config(max_model_len=LONGEST, runner_type="generate"),
        observability_config=Config(),
        parallel_config=Config(
            data_parallel_index=0,
            data_parallel_rank=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        ec_manager_config=types.SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Config(),
        max_concurrent_batches=1,
        max_in_flight_tokens=0,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
    )
    kinds = found("v1.kv_cache_interface")
    spec = kinds.FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=DIM, dtype=torch.bfloat16)
    groups = [kinds.KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)]
    cache = kinds.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    scheduler = found("v1.core.sched.scheduler").Scheduler
    # No request has a grammar, so the stub of the grammar manager accepts every token.
    grammars = types.SimpleNamespace(accept_tokens=lambda *_: True)
    return scheduler(config, cache, grammars, size)


def serve(found, backend, chosen):
    torch.manual_seed(0)
    model, size, blocks = Model(), SIZE, 40
    scheduler = scheduler_of(found, blocks, size, tokens=12 * LONG)
    utils = found("v1.core.kv_cache_utils")
    utils.init_none_hash(hash_of)
    hasher = utils.get_request_block_hasher(size, hash_of)
    sampling = Config(max_tokens=7, min_tokens=0, stop_token_ids=[])
    shared = torch.randint(61, (9 * LONG,)).tolist()
    longest = torch.randint(61, (30 * LONG,)).tolist()
    prompts = [shared + [1, 2], [5], shared + [3], longest, [7, 8, 9], shared[: 8 * LONG] + [4, 4]]
    for at, prompt in enumerate(prompts):
        request = found("v1.request").Request(
            request_id=str(at),
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher,
        )
        scheduler.add_request(request)
    runner, steps, mixed, reused, got = Runner(chosen, backend, model, blocks, size), 0, 0, 0, {}
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        reused += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        names, sampled, counts = runner.step(output)
        mixed += len(set(counts)) > 1
        for name, new in zip(names, sampled):
            got.setdefault(int(name), []).extend(new)
        made = engine_vllm.filled(
            found("v1.outputs").ModelRunnerOutput,
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            prompt_logprobs_dict={},
        )
        scheduler.update_from_output(output, made)
        steps += 1
        assert steps < 200, "the scheduler does not end"
    assert mixed > 0 and reused > 0, (mixed, reused)
    compared = 0
    for at, prompt in enumerate(prompts):
        wanted, scores = alone(model, prompt, 7)
        assert len(got[at]) == 7
        for i, (ours, exact) in enumerate(zip(runner.scores[str(at)], scores)):
            error = float((ours - exact).abs().max() / exact.abs().max())
            assert error < 0.02, (at, i, error)
            compared += 1
            # Nearly equal scores may be ordered either way in 16 bits, and the later tokens then differ.
            if got[at][i] != wanted[i]:
                assert float(exact.max() - exact[got[at][i]]) < 0.05, (at, i, got[at], wanted)
                break
    assert compared > 25, compared
    print(
        f"served: {len(prompts)} requests, {steps} steps, {mixed} of mixed lengths, {reused} tokens of prefixes kept; "
        f"on {DEVICE}"
    )


def hash_of(value):
    import hashlib

    return hashlib.sha256(repr(value).encode()).digest()


if __name__ == "__main__":
    torch.manual_seed(0)
    main(pathlib.Path(sys.argv[1]))
