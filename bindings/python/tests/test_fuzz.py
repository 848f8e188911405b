"""Random calls in a process of their own: ``FMHA_FUZZ_CALLS`` of them, 10,000 by default, and 150 on a GPU, where most have a
kernel to compile."""

import json
import os
import pathlib

from reference import DEVICE
from run import run_python

PROGRAM = pathlib.Path(__file__).with_name("fuzz.py")


def test_random_calls_are_right_or_refused_by_an_arguments_name():
    calls = int(os.environ.get("FMHA_FUZZ_CALLS", "10000" if DEVICE == "cpu" else "150"))
    counts = json.loads(run_python(str(PROGRAM), str(calls), "1").strip().splitlines()[-1])
    # About one call in five is valid, and each sort of fault occurs: neither all calls pass nor all are refused.
    assert counts["right"] > calls // 10 and counts["refused"] > calls // 4
