"""Each operation of the language on many values, held to the table of errors on the guide's page."""

import pathlib
import re

import numpy as np
import pytest
import torch

import fmha
from conftest import DEVICE

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/guide/8-masks-and-scores-of-your-own.md"


def bounds():
    """Largest errors in units of the last place, by operation."""
    rows = re.findall(r"^\| (`[^|]+`) \| ([0-9.]+) \|", PAGE.read_text(), re.M)
    return {name: float(bound) for names, bound in rows for name in re.findall(r"`([^`]+)`", names)}


def value(text, x, other=None):
    """What a score becomes: the LSE of a row with one key is its score."""
    q = torch.zeros(1, len(x), 1, 8, device=DEVICE)
    q[0, :, 0, 0] = torch.from_numpy(x)
    k = torch.zeros(1, 1, 1, 8, device=DEVICE)
    k[..., 0] = 1
    captured = None if other is None else {"y": torch.from_numpy(other).to(DEVICE)}
    text = text if other is None else f"y: f32[_]; let y_ = y[q]; {text}"
    lse = fmha.attention(q, k, k, softmax_scale=1.0, score_code=text, captured=captured, return_lse=True)[1]
    return lse[0, 0].cpu().numpy().astype(np.float64)


def spread(low, high, count=4000):
    x = np.random.default_rng(0).uniform(low, high, count)
    tiny = np.geomspace(1e-6, max(abs(low), abs(high)), 500)
    x = np.concatenate([x, tiny, -tiny, [0.0, 1.0, -1.0, 0.5]])
    return x[(x >= low) & (x <= high)].astype(np.float32)


def erf(x):
    return torch.erf(torch.from_numpy(x)).numpy()


ONE = {
    "abs": (np.abs, -50, 50),
    "sign": (np.sign, -50, 50),
    "floor": (np.floor, -50, 50),
    "ceil": (np.ceil, -50, 50),
    "round": (np.round, -50, 50),
    "relu": (lambda x: np.maximum(x, 0), -50, 50),
    "sqrt": (np.sqrt, 1e-6, 1e4),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-6, 1e4),
    "exp": (np.exp, -80, 80),
    "exp2": (np.exp2, -120, 120),
    "log": (np.log, 1e-6, 1e4),
    "log2": (np.log2, 1e-6, 1e4),
    "sin": (np.sin, -100, 100),
    "cos": (np.cos, -100, 100),
    "tanh": (np.tanh, -20, 20),
    "erf": (erf, -5, 5),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -60, 60),
}

TWO = {
    "+": ("s + y_", np.add),
    "-": ("s - y_", np.subtract),
    "*": ("s * y_", np.multiply),
    "/": ("s / y_", np.divide),
    "min": ("min(s, y_)", np.minimum),
    "max": ("max(s, y_)", np.maximum),
    "pow": ("pow(abs(s), y_)", lambda x, y: np.abs(x) ** y),
}


def held(name, found, exact):
    """The bound counts in the last place of the exact result's f32."""
    unit = np.maximum(np.spacing(np.abs(exact).astype(np.float32)), np.finfo(np.float32).tiny).astype(np.float64)
    assert np.isfinite(found).all(), name
    worst = (np.abs(found - exact) / unit).max()
    assert worst <= bounds()[name], f"{name}: {worst} units in the last place"
    return worst


@pytest.mark.parametrize("name", ONE)
def test_an_operation_of_one_value_is_within_its_bound(name):
    exact, low, high = ONE[name]
    x = spread(low, high)
    held(name, value(f"{name}(s)", x), exact(x.astype(np.float64)))


@pytest.mark.parametrize("name", TWO)
def test_an_operation_of_two_values_is_within_its_bound(name):
    text, exact = TWO[name]
    x, y = spread(-8, 8), spread(-8, 8)[::-1].copy()
    y[y == 0] = 1
    x[x == 0] = 1
    found, wanted = value(text, x, y), exact(x.astype(np.float64), y.astype(np.float64))
    inside = (np.abs(wanted) < 1e37) & (np.abs(wanted) > 1e-37)
    held(name, found[inside], wanted[inside])


def test_every_operation_of_the_table_is_tried():
    assert set(bounds()) == {*ONE, *TWO}
