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
    bound = dict(inspect.signature(_arguments.bind).parameters)
    assert bound.pop("wrong").kind is inspect.Parameter.VAR_KEYWORD
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


def test_what_comes_back_has_a_type_by_return_lse(tmp_path, monkeypatch):
    """mypy takes O alone from a pair, and refuses a wrong keyword. torch and JAX are of any type to it here."""
    pytest.importorskip("mypy", reason="mypy is not installed: the package's types are not checked")
    monkeypatch.setenv("MYPYPATH", str(HERE))
    program = tmp_path / "program.py"
    words = ["--no-site-packages", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "kept"), str(program)]
    sound = """
from typing import Tuple, Union
from typing_extensions import assert_type
import fmha, fmha.dist, fmha.jax
class Mine: ...
def calls(x: Mine, either: bool) -> None:
    assert_type(fmha.attention(x, x, x, softcap=2.0), Mine)
    assert_type(fmha.attention(x, x, x, return_lse=True), Tuple[Mine, Mine])
    assert_type(fmha.attention(x, x, x, return_lse=either), Union[Mine, Tuple[Mine, Mine]])
    assert_type(fmha.attention_with_kvcache(x, x, x, mask=None), Mine)
    assert_type(fmha.attention_with_kvcache(x, x, x, return_lse=True, seqused_k=x), Tuple[Mine, Mine])
"""
    program.write_text(sound)
    run_python("-m", "mypy", *words)
    for line in (
        "fmha.attention(x, x, x)[0]",
        "fmha.attention(x, x, x, is_causal=True)",
        "fmha.attention_with_kvcache(x, x, x, return_lse=True).shape",
        "one, two, three = fmha.jax.attention(x, x, x, return_lse=True)",
        "fmha.jax.attention(x, x, x, scale=1.0)",
    ):
        program.write_text(f"{sound}    {line}\n")
        with pytest.raises(AssertionError, match="ended with 1"):
            run_python("-m", "mypy", *words)


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
