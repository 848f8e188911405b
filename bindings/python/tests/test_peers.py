"""Calls of the grids of other libraries' suites (``tests/peers/grids.py``): 24, or ``FMHA_PEERS=SEED:COUNT``."""

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
