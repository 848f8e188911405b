"""What the tests share: seeds, the device (``FMHA_TEST_DEVICE``, the CPU by default), and a report that names what is
absent.

NumPy's tests run without torch; the others are reported absent then.
"""

import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

ABSENT = []

try:
    import torch
except ImportError:
    torch = None
    collect_ignore = sorted(
        path.name
        for path in HERE.glob("test_*.py")
        if path.name not in ("test_jax.py", "test_jax_cuda.py", "test_numpy.py", "test_wheel.py")
    )
    ABSENT.append(f"{len(collect_ignore)} files of torch's tests: torch is not installed")
else:
    DEVICE = os.environ.get("FMHA_TEST_DEVICE", "cpu")
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)


@pytest.fixture
def on_the_device():
    """Tensors of a test are made on the device that the tests are run for."""
    with torch.device(DEVICE):
        yield


@pytest.fixture(autouse=True)
def slow_kernels(monkeypatch):
    if torch is not None:
        from reference import slow_kernels_serve

        slow_kernels_serve(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def seeded():
    if torch is not None:
        torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter):
    """Counts as Cargo's test programs print them, which ``cargo xtask test`` adds up."""
    stats = terminalreporter.stats
    count = {name: len(stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    for report in stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        ABSENT.append(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")
    for line in ABSENT:
        terminalreporter.write_line(f"absent: bindings/python: {line}")
    failed = count["failed"] + count["error"]
    verdict = "FAILED" if failed else "ok"
    terminalreporter.write_line(
        f"test result: {verdict}. {count['passed']} passed; {failed} failed; {count['skipped']} ignored"
    )
