"""The package as a user meets it: its command, its help, its README's first calls."""

import importlib.util
import inspect
import pathlib
import re

import pytest

import fmha
from fmha import _arguments, _native
from run import run_python

HERE = pathlib.Path(__file__).parents[1]


def test_the_command_says_what_there_is_and_passes():
    text = run_python("-m", "fmha")
    assert "cpu: " in text and "PASS" in text


def test_the_command_takes_no_words_and_a_missing_library_is_named(monkeypatch):
    assert "usage: python -m fmha" in run_python("-m", "fmha", "--help")
    with pytest.raises(AssertionError, match="(?s)ended with 2.*unrecognized arguments: nonsense"):
        run_python("-m", "fmha", "nonsense")
    monkeypatch.setenv("FMHA_NATIVE", "/nowhere/at.so")
    with pytest.raises(AssertionError, match="ImportError: FMHA_NATIVE: /nowhere/at.so"):
        run_python("import fmha")


def test_help_shows_every_argument_and_the_types_are_the_same_list():
    bound = inspect.signature(_arguments.bind).parameters
    shown = inspect.signature(fmha.attention).parameters
    assert set(bound) <= set(shown) and list(shown)[:3] == ["q", "k", "v"]
    assert set(_arguments.Options.__annotations__) == set(bound)
    assert set(_arguments.TENSORS) <= set(bound)
    for name in bound:
        assert re.search(rf"\b{name}\b", fmha.attention.__doc__), f"{name} is not explained"
    assert inspect.signature(fmha.attention_with_kvcache).parameters["mask"].default == "causal"


def test_every_public_function_has_a_docstring_and_types():
    for name in fmha.__all__:
        value = getattr(fmha, name)
        if callable(value) and not inspect.isclass(value):
            assert value.__doc__, name
            assert "return" in value.__annotations__, name
    assert (pathlib.Path(fmha.__file__).parent / "py.typed").exists()


def test_the_library_bears_its_own_soname():
    """A process that has the C library too would take one for the other."""
    library = _native._path().read_bytes()
    assert b"\0libfmha_native.so\0" in library and b"\0libfmha.so." not in library


def test_the_packages_types_are_right(tmp_path):
    """By mypy, which sees the package alone: torch's types take it half a minute."""
    pytest.importorskip("mypy", reason="mypy is not installed: the package's types are not checked")
    words = ["--no-site-packages", "--ignore-missing-imports", "--check-untyped-defs", "--cache-dir", str(tmp_path)]
    run_python("-m", "mypy", *words, str(HERE / "fmha"))


def test_the_texts_snippets_run():
    """Each Python block of the pages below, after those before it on its page."""
    root = HERE.parents[1]
    pages = [HERE / "README.md", root / "README.md", *sorted((root / "docs/guide").glob("*.md"))]
    blocks = [re.findall(r"```python\n(.*?)```", page.read_text(), re.S) for page in pages]
    for package in ("jax", "transformers"):
        if importlib.util.find_spec(package) is None:
            blocks = [[block for block in page if f"import {package}" not in block] for page in blocks]
    programs = ["\n".join(page) for page in blocks]
    assert all(programs) and len(programs) >= 5
    for program in programs:
        run_python(program)
