import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

torch = pytest.importorskip("torch", reason="absent: torch is not installed")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
