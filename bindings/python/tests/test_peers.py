"""Calls of the grids of other libraries' suites (``tests/peers/grids.py``): 24, or ``FMHA_PEERS=SEED:COUNT``."""

import collections
import importlib.util
import json
import os
import pathlib

import pytest
from run import run_python

PROGRAM = pathlib.Path(__file__).parents[3] / "tests" / "peers" / "grids.py"


@pytest.mark.skipif(not PROGRAM.exists(), reason="tests/peers is not in a package's own sources")
def test_the_grids_of_other_suites_are_right_or_refused_as_the_page_says(monkeypatch):
    said = os.environ.get("FMHA_PEERS")
    monkeypatch.setenv("FMHA_PEERS_WORK", os.environ.get("FMHA_PEERS_WORK", "2e7"))
    counts = json.loads(run_python(str(PROGRAM), said or "1:24").strip().splitlines()[-1])
    assert counts["bad"] == 0
    assert said or counts["right"] > 10


@pytest.fixture
def grids():
    if not PROGRAM.exists():
        pytest.skip("tests/peers is not in a package's own sources")
    spec = importlib.util.spec_from_file_location("grids", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_value_of_each_list_is_drawn_as_often_as_its_neighbours(grids):
    count = 400
    for suite in grids.GRIDS:
        whole = collections.Counter()
        for at in range(count):
            case, _ = grids.draw(1, at, [suite])
            whole.update((name, str(case[name])) for name in ("causal", "group") if isinstance(case[name], (int, str)))
            assert grids.draw(1, at, [suite])[0] == case
        for name in {name for name, _ in whole}:
            seen = [times for (key, _), times in whole.items() if key == name]
            assert len(seen) == 1 or min(seen) > count // 8, (suite, name, whole)
    cases = [grids.draw(2, at, ["fa4"])[0] for at in range(4000)]
    for grid in grids.GRIDS["fa4"]:
        mine = [case for case in cases if case["kind"] == grid["kind"]]
        for name, values in grid.items():
            if isinstance(values, list):
                assert {str(case.get(name)) for case in mine} >= {str(value) for value in values}, (grid, name)


def test_the_page_sums_parts_and_refuses_a_call_in_two_of_them(grids, tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "PAGE", tmp_path / "page.md")

    def part(first, count, outcomes, causes=(), device="a device"):
        about = {"seed": 3, "first": first, "count": count, "suites": ["fa2"], "device": device}
        text = json.dumps({**about, "by_suite": {"fa2": outcomes}, "causes": dict(causes)})
        (tmp_path / f"{device}-{first}.json").write_text(text)

    part(0, 100, {"right": 90, "large": 10})
    part(100, 50, {"right": 48, "refused": 2}, {"ValueError: no": 2})
    assert grids.main_of(["--page", str(tmp_path)]) == 0
    page = grids.PAGE.read_text()
    assert "| FlashAttention 2 | 150 | 138 | 0 | 2 | 0 | 0 | 0 | 10 | 1.4 % |" in page and "| ValueError: no | 2 |" in page
    part(0, 100, {"right": 100}, device="another")
    assert grids.main_of(["--page", str(tmp_path)]) == 0
    page = grids.PAGE.read_text()
    assert "## On another" in page and "| all | 150 | 138 |" in page and "| all | 100 | 100 |" in page
    part(150, 10, {"right": 9, "wrong": 1})
    assert grids.main_of(["--page", str(tmp_path)]) == 1
    part(140, 10, {"right": 10})
    with pytest.raises(SystemExit, match="call 140 of seed 3 is in two parts"):
        grids.main_of(["--page", str(tmp_path)])
