"""The examples, as their README says to start them: each compares its results itself."""

import importlib.util
import pathlib
import sys

import pytest

from run import run_python

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def names():
    spec = importlib.util.spec_from_file_location("examples", EXAMPLES / "__main__.py")
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module.EXAMPLES


def test_the_readme_has_every_example_and_no_other():
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - {"__main__", "model"}
    assert programs == set(names())
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in readme for name in programs)


def test_all_of_them_run_by_one_command_and_say_what_they_did():
    said = run_python(str(EXAMPLES / "__main__.py"))
    parts = dict(part.split("\n", 1) for part in said.removeprefix("== ").split("\n== "))
    assert list(parts) == names(), said
    assert all(len(part.splitlines()) > 1 for part in parts.values()), said


def test_an_example_that_there_is_not_is_refused_by_its_name():
    with pytest.raises(AssertionError, match="teleport: the examples are first_call"):
        run_python(str(EXAMPLES / "__main__.py"), "teleport")
