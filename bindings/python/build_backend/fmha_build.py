"""The package's build backend: setuptools', after Cargo has built the library that the wheel carries.

A wheel and an editable install run ``cargo build --release -p fmha-py``. An sdist carries the Cargo workspace beside
the package, so that it builds where there is Rust. A package that has its library beside it already, as
``cargo xtask wheel`` stages it, is packed as it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile

from setuptools import build_meta

HERE = pathlib.Path(__file__).resolve().parents[1]

#: Names of the library's file by system, as Cargo writes it, and the name on this system.
FILES = {"win32": "fmha_native.dll", "darwin": "libfmha_native.dylib", "linux": "libfmha_native.so"}
FILE = FILES.get(sys.platform, FILES["linux"])

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable


def _workspace() -> pathlib.Path:
    """The Cargo workspace: two folders up in a checkout, beside the package in an unpacked sdist."""
    for folder in (HERE / "workspace", HERE.parents[1]):
        if (folder / "bindings/python/Cargo.toml").is_file() and (folder / "Cargo.toml").is_file():
            return folder
    tried = f"{HERE / 'workspace'} or {HERE.parents[1]}"
    raise RuntimeError(f"fmha: no Cargo workspace at {tried}: the library cannot be built from this folder")


def _built() -> pathlib.Path:
    """Builds the library and gives its path."""
    workspace = _workspace()
    cargo = os.environ.get("CARGO", "cargo")
    words = [cargo, "build", "--release", "--locked", "-p", "fmha-py", "--message-format=json-render-diagnostics"]
    command = f"`{' '.join(words[:6])}` in {workspace}"
    try:
        ran = subprocess.run(words, cwd=workspace, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        reason = f"{cargo} does not start ({error}): the library needs Rust to build, https://rustup.rs"
        raise RuntimeError(f"fmha: {reason}") from None
    if ran.returncode != 0:
        raise RuntimeError(f"fmha: {command} ended with {ran.returncode}: its words are above")
    for line in ran.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        for name in message.get("filenames", []) if message.get("reason") == "compiler-artifact" else []:
            if pathlib.Path(name).name == FILE:
                return pathlib.Path(name)
    raise RuntimeError(f"fmha: {command} names no {FILE}")


@contextlib.contextmanager
def _staged():
    """A copy of the package with its library, as the current folder: nothing is left in the source tree."""
    # A library beside the package may be for another system, for which a wheel is built here.
    beside = [path for path in (HERE / "fmha" / name for name in (FILE, *FILES.values())) if path.is_file()]
    library = beside[0] if beside else _built()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        stage = pathlib.Path(folder)
        shutil.copytree(HERE / "fmha", stage / "fmha", ignore=shutil.ignore_patterns("__pycache__", "*fmha_native*"))
        shutil.copy(library, stage / "fmha" / library.name)
        licences = [path for place in (HERE, HERE / "workspace", HERE.parents[1]) for path in place.glob("LICENSE-*")]
        for path in [HERE / "pyproject.toml", HERE / "README.md", *licences]:
            shutil.copy(path, stage)
        os.chdir(stage)
        try:
            yield
        finally:
            os.chdir(before)


def _for_this_system(config_settings):
    """The settings, with this system's tag where none is asked for: setuptools sees no extension module."""
    settings = dict(config_settings or {})
    asked = settings.get("--build-option", [])
    options = [asked] if isinstance(asked, str) else list(asked)
    if not any("--plat-name" in option for option in options):
        options.append("--plat-name=" + sysconfig.get_platform().replace("-", "_").replace(".", "_"))
    return {**settings, "--build-option": options}


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    wheel_directory = os.path.abspath(wheel_directory)
    with _staged():
        return build_meta.build_wheel(wheel_directory, _for_this_system(config_settings))


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The package finds its library in the workspace's ``target/release``, where Cargo puts it anew at each build."""
    if not (HERE / "fmha" / FILE).is_file():
        library = _built()
        found = HERE.parents[1] / "target/release" / FILE
        if not found.is_file() or not library.samefile(found):
            shutil.copy(library, HERE / "fmha" / FILE)
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _sources(workspace):
    """Files of the workspace that Cargo reads: what Git tracks, or all but what is built."""
    try:
        words = ["git", "ls-files", "-z"]
        ran = subprocess.run(words, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        names = ran.stdout.decode().split("\0") if ran.returncode == 0 else []
    except OSError:
        names = []
    if not any(names):
        for folder, folders, files in os.walk(workspace):
            folders[:] = [name for name in folders if name != "target" and not name.startswith((".", "__pycache__"))]
            names += [os.path.relpath(os.path.join(folder, name), workspace) for name in files]
    left_out = (".ci/", "bench/", "docs/", "bindings/candle/", "tools/", "tests/emulators/")
    return sorted(name for name in names if name and not name.startswith(left_out) and (workspace / name).is_file())


def build_sdist(sdist_directory, config_settings=None):
    """The package, this backend, and the workspace that its library is built of."""
    workspace = _workspace()
    name = build_meta.build_sdist(sdist_directory, config_settings)
    path = pathlib.Path(sdist_directory) / name
    root = name[: -len(".tar.gz")]
    whole = io.BytesIO()
    with tarfile.open(path) as own, tarfile.open(fileobj=whole, mode="w:gz") as to:
        for member in own:
            if not member.name.startswith((f"{root}/workspace/", f"{root}/build_backend/")):
                to.addfile(member, own.extractfile(member) if member.isfile() else None)
        to.add(__file__, f"{root}/build_backend/fmha_build.py")
        for source in _sources(workspace):
            to.add(workspace / source, f"{root}/workspace/{source}")
    path.write_bytes(whole.getvalue())
    return name
