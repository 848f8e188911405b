"""Drawn calls in a process of their own: 120 at all doors, or ``FMHA_DRAWN=[SEED:]COUNT``."""

import json
import os
import pathlib

from run import run_python

PROGRAM = pathlib.Path(__file__).with_name("drawn.py")


def test_drawn_calls_are_right_at_every_door():
    said = os.environ.get("FMHA_DRAWN")
    counts = json.loads(run_python(str(PROGRAM), said or "1:120").strip().splitlines()[-1])
    assert counts.pop("wrong") == 0
    assert said or min(counts.values()) > 0 and sum(counts.values()) == 120
