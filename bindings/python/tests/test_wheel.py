"""The wheel as a new user meets it: installed where there is nothing but NumPy, two lines, a result."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from fmha import _native

PACKAGE = pathlib.Path(__file__).parents[1]


def test_a_wheel_is_built_installed_and_computes(tmp_path):
    pytest.importorskip("setuptools", minversion="70", reason="setuptools 70 is not installed: no wheel is built")
    source = tmp_path / "source"
    shutil.copytree(PACKAGE / "fmha", source / "fmha", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_native._path(), source / "fmha" / "libfmha_native.so")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PACKAGE / name, source)

    def run(*words, **environment):
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FMHA_NATIVE")}
        ran = subprocess.run(
            [sys.executable, *map(str, words)],
            env={**kept, **environment},
            cwd=tmp_path,
            text=True,
            capture_output=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run(
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        "--config-settings=--build-option=--plat-name=linux_x86_64",
        source,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "fmha-0.1.0-py3-none-linux_x86_64.whl"
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    text = run(
        "-c",
        "import numpy as np, fmha; x = np.ones((1, 4, 2, 8), 'f4'); "
        "print(fmha.attention(x, x, x).sum(), fmha.__file__)",
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert text.split() == ["64.0", str(tmp_path / "site/fmha/__init__.py")]
