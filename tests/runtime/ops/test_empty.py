"""Operations on nothing return; MLX's CPU kernel for reductions may not."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.ops import OPS


@pytest.mark.parametrize(
    ("op", "value"),
    [("sum", 0), ("prod", 1), ("mean", math.nan), ("logsumexp", -math.inf), ("any", 0), ("all", 1)],
)
@pytest.mark.parametrize(
    ("axis", "keepdims", "shape"),
    [(1, False, (3, 2)), ((0, 1), True, (1, 1, 2)), (None, False, ())],
)  # fmt: skip
def test_a_reduction_of_nothing_has_its_neutral_value(
    op: str, value: float, axis: int | tuple[int, ...] | None, keepdims: bool,
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    found = OPS[op](x=mx.zeros((3, 0, 2)), axis=axis, keepdims=keepdims)
    assert found.shape == shape
    np.testing.assert_array_equal(np.array(found), np.full(shape, value))


def test_nothing_resampled_along_an_axis_is_nothing() -> None:
    found = OPS["upsample_nearest"](x=mx.zeros((1, 2, 0, 3)), sizes=None, scales=(2, 2))
    assert found.shape == (1, 2, 0, 6)
