"""The plugins inside of an engine's own classes: `FMHA_VLLM` and `FMHA_SGLANG` name folders (a list as in `PATH`) in
which the engines' wheels are unpacked, without their dependencies; `cargo xtask test` unpacks the newest and the one
before. What is not Python there, and what imports the rest of the engine, is stubbed; the programs print which."""

import os
import pathlib

import pytest
from reference import DEVICE
from run import run_python

#: Text that a program prints after its steps: it runs one size on the CPU and four on a GPU.
STEPS = "steps: 3" if DEVICE == "cpu" else "steps: 12"


def folders(variable):
    found = [path for path in os.environ.get(variable, "").split(os.pathsep) if path]
    return found or [pytest.param("", marks=pytest.mark.skip(f"{variable} names no folder with its wheel"))]


#: What stands in for vLLM's own and for packages: compiled operators, configuration, ranks, logging, what asks hubs or
#: other processes, and what serves other models.
STUBBED = set("""
    vllm._custom_ops vllm.config vllm.distributed vllm.envs vllm.logger vllm.model_executor
    vllm.utils.import_utils vllm.utils.torch_utils vllm.compilation vllm.multimodal vllm.platforms
    vllm.pooling_params vllm.sampling_params vllm.usage vllm.utils.hashing vllm.utils.mem_utils
    vllm.utils.network_utils vllm.v1.engine vllm.v1.hisparse vllm.v1.metrics.perf vllm.v1.spec_decode
    vllm.v1.structured_output cachetools cbor2 cloudpickle cpuinfo msgspec psutil uvloop zmq
""".split())


def program(name, folder):
    """What a program says of an engine, and what it stubbed."""
    said = run_python(str(pathlib.Path(__file__).with_name(name)), folder).strip()
    return said, said.splitlines()[-1].removeprefix("stubbed: ").split()


@pytest.mark.parametrize("folder", folders("FMHA_VLLM"))
def test_vllms_classes_find_choose_build_and_run_the_backend_and_its_scheduler_serves_a_model(folder):
    said, stubbed = program("engine_vllm_served.py", folder)
    assert f"{STEPS} on {DEVICE}" in said and "served: 6 requests" in said
    assert not [name for name in stubbed if not any(name == one or name.startswith(f"{one}.") for one in STUBBED)]


@pytest.mark.parametrize("folder", folders("FMHA_SGLANG"))
def test_sglangs_classes_find_build_and_run_the_backend(folder):
    said, stubbed = program("engine_sglang.py", folder)
    assert f"{STEPS} on {DEVICE}" in said
    real = "base_attn_backend attention_registry memory_pool forward_batch_info".split()
    assert stubbed and not any(name.rpartition(".")[2] in real for name in stubbed), stubbed
