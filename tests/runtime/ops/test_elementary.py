"""The CPU's own tanh, erf and sigmoid against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.ops import OPS, elementary

POINTS = np.linspace(-30, 30, 20001).astype(np.float32)
EXACT: dict[str, Callable[[float], float]] = {
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.fixture(autouse=True)
def cpu() -> None:
    if not elementary.on_cpu():
        pytest.skip("MLX's own functions run on this device")


@pytest.mark.parametrize("name", EXACT)
def test_is_exact_to_a_few_units_of_the_last_place(name: str) -> None:
    exact = np.array([EXACT[name](float(x)) for x in POINTS])
    ours = np.array(getattr(elementary, name)(mx.array(POINTS))).astype(np.float64)
    np.testing.assert_allclose(ours, exact, rtol=5e-7, atol=1e-37)


@pytest.mark.parametrize("name", ["tanh", "erf", "sigmoid"])
def test_reaches_its_limits_and_keeps_nan(name: str) -> None:
    ends = np.array(OPS[name](x=mx.array([-mx.inf, mx.inf, mx.nan, -1e4, 1e4])))
    low = 0.0 if name == "sigmoid" else -1.0
    np.testing.assert_allclose(ends, [low, 1, np.nan, low, 1], rtol=4e-7, atol=1e-37)
