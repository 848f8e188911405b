"""The wheel as a new user meets it: installed where there is nothing but NumPy, two lines, a result."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from fmha import _native

PACKAGE = pathlib.Path(__file__).parents[1]


def test_bundles_beside_the_library_are_found(tmp_path):
    """The command, started by a program that has imported the package, takes a kernel from the package's bundle on a
    machine without compiler and cache; an emulated device."""
    command = PACKAGE.parents[1] / "target/release/fmha"
    if not command.exists() or not os.environ.get("FMHA_NVRTC"):
        pytest.skip("the command is not built, or there is no NVRTC: no bundle is made")
    shutil.copytree(PACKAGE / "fmha", tmp_path / "fmha", ignore=shutil.ignore_patterns("__pycache__"))
    bundle = tmp_path / "fmha/kernels-0.fmha"
    words = "bundle --arch sm_90a --keep-assembly --filter f16/d64x64/causal/batch/lse/q512k512/gqa1 --out"
    subprocess.run([command, *words.split(), bundle], check=True, capture_output=True)
    problem = "--backend cuda --emulate sm_90a --warmup 0 --repeat 1 -b 1 -h 1 -s 300 -d 64 --prec f16 --mask b --lse"
    program = f"""
import os, subprocess, sys
import fmha
once = os.environ["FMHA_BUNDLE"]
ran = subprocess.run([sys.executable, "-c", "import fmha, os; print(os.environ['FMHA_BUNDLE'])"], capture_output=True)
assert ran.stdout.decode().strip() == once == {str(bundle)!r}, (ran, once)
for words in ("explain --arch sm_90a -b 1 -h 1 -s 300 -d 64 --prec f16 --mask b --lse", {"run " + problem!r}):
    subprocess.run([{str(command)!r}, *words.split()], check=True)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **{name: value for name, value in os.environ.items() if name != "FMHA_BUNDLE"},
            "PYTHONPATH": str(tmp_path),
            "FMHA_NATIVE": str(_native._path()),
            "FMHA_CACHE_DIR": "none",
            "FMHA_NVRTC": "/nowhere",
        },
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    if "no emulated CUDA device" in ran.stderr:
        pytest.skip(ran.stderr.strip().splitlines()[-1])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"bundle {bundle}" in ran.stdout and "PASS" in ran.stdout, ran.stdout


def test_a_wheel_is_built_installed_and_computes(tmp_path):
    pytest.importorskip("setuptools", minversion="70", reason="setuptools 70 is not installed: no wheel is built")
    source = tmp_path / "source"
    shutil.copytree(PACKAGE / "fmha", source / "fmha", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_native._path(), source / "fmha" / "libfmha_native.so")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PACKAGE / name, source)
    shutil.copytree(PACKAGE / "build_backend", source / "build_backend", ignore=shutil.ignore_patterns("__pycache__"))

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


def hook(folder, words, **environment):
    """A hook of the build backend, as pip calls it: in a process of its own, in the package's folder."""
    program = f"import sys; sys.path.insert(0, 'build_backend'); import fmha_build; print(fmha_build.{words})"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FMHA_NATIVE")}
    return subprocess.run(
        [sys.executable, "-c", program], env={**kept, **environment}, cwd=folder, text=True, capture_output=True
    )


def test_without_cargo_or_a_library_no_wheel_is_made_and_the_reason_is_said(tmp_path):
    pytest.importorskip("setuptools", minversion="78", reason="setuptools 78 is not installed: no wheel is built")
    ran = hook(PACKAGE, f"build_wheel({str(tmp_path)!r})", CARGO="/nowhere/cargo")
    assert ran.returncode != 0 and "/nowhere/cargo does not start" in ran.stderr, ran.stdout + ran.stderr
    # The package is copied alone, as an archive without its workspace.
    alone = tmp_path / "alone"
    for name in ("fmha", "build_backend"):
        shutil.copytree(PACKAGE / name, alone / name, ignore=shutil.ignore_patterns("__pycache__", "*fmha_native*"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PACKAGE / name, alone)
    for words in (f"build_wheel({str(tmp_path)!r})", f"build_sdist({str(tmp_path)!r})"):
        ran = hook(alone, words)
        assert ran.returncode != 0 and "no Cargo workspace" in ran.stderr, ran.stdout + ran.stderr
    assert not list(tmp_path.glob("*.whl")) and not list(tmp_path.glob("*.tar.gz"))


def test_a_wheel_for_another_system_has_that_ones_library(tmp_path):
    pytest.importorskip("setuptools", minversion="78", reason="setuptools 78 is not installed: no wheel is built")
    source = tmp_path / "source"
    shutil.copytree(PACKAGE / "fmha", source / "fmha", ignore=shutil.ignore_patterns("__pycache__", "*fmha_native*"))
    shutil.copytree(PACKAGE / "build_backend", source / "build_backend", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PACKAGE / name, source)
    (source / "fmha/fmha_native.dll").write_bytes(b"MZ")
    options = {"--build-option": "--plat-name=win_amd64"}
    ran = hook(source, f"build_wheel({str(tmp_path)!r}, {options!r})", CARGO="/nowhere/cargo")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (wheel,) = tmp_path.glob("*-win_amd64.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert [name for name in packed.namelist() if name.endswith((".dll", ".so"))] == ["fmha/fmha_native.dll"]


def test_a_wheel_has_the_library_that_cargo_names(tmp_path):
    """Cargo is played by a program that names a file, and fails where it is asked for another package."""
    pytest.importorskip("setuptools", minversion="78", reason="setuptools 78 is not installed: no wheel is built")
    cargo = tmp_path / "cargo"
    message = {"reason": "compiler-artifact", "filenames": [str(_native._path())]}
    asked = "'build --release --locked -p fmha-py '*"
    cargo.write_text(f"#!/bin/sh\ncase \"$*\" in {asked}) ;; *) exit 3;; esac\ncat <<'X'\n{json.dumps(message)}\nX\n")
    cargo.chmod(0o755)
    ran = hook(PACKAGE, f"build_wheel({str(tmp_path)!r})", CARGO=str(cargo))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("fmha-0.1.0-py3-none-") and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert packed.read(f"fmha/{_native.FILE}") == _native._path().read_bytes()
    assert not (PACKAGE / "fmha" / _native.FILE).exists(), "nothing is left in the source tree"


def test_an_sdist_has_a_workspace_that_cargo_resolves(tmp_path):
    pytest.importorskip("setuptools", minversion="78", reason="setuptools 78 is not installed: no sdist is built")
    if not shutil.which("cargo"):
        pytest.skip("cargo is not on the path: the sdist's workspace cannot be resolved")
    ran = hook(PACKAGE, f"build_sdist({str(tmp_path)!r})")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = packed.getnames()
        packed.extractall(tmp_path)
    assert not [name for name in names if "/target/" in name or name.endswith(_native.FILE)]
    root = tmp_path / "fmha-0.1.0"
    assert (root / "build_backend/fmha_build.py").exists() and (root / "PKG-INFO").exists()
    words = ["cargo", "tree", "--locked", "--offline", "--quiet", "-p", "fmha-py"]
    found = subprocess.run(words, cwd=root / "workspace", text=True, capture_output=True)
    assert found.returncode == 0, found.stderr
    assert "fmha-py v" in found.stdout and "fmha-cpu v" in found.stdout
