"""The table of ops, and what all of them share: registration, dtypes, sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..dtypes import BY_MLX, BY_NAME
from ..errors import MlxconvError

Number = int | float
Value = mx.array | Number

OPS: dict[str, Callable[..., Any]] = {}


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register `function` under its own name, without a trailing underscore."""
    OPS[function.__name__.rstrip("_")] = function
    return function


def dtype_of(name: str) -> mx.Dtype:
    """The MLX dtype called `name`. (`compute` is replaced by the executor when it binds.)"""
    found = BY_NAME.get(name)
    if found is None or BY_MLX[found.mlx] is not found:
        known = ", ".join(dtype.name for dtype in BY_MLX.values())
        raise MlxconvError(f"unknown dtype {name!r}; known: {known}")
    return found.mlx


def on_cpu() -> bool:
    """Whether MLX computes on the CPU by default."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def ints(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in shape)


MAX_COUNT = 1 << 26


def counted(count: Number) -> int:
    """How many elements or pieces an op makes at once, outside of MLX: at most MAX_COUNT."""
    if count > MAX_COUNT:
        raise ValueError(f"{count} elements are more than {MAX_COUNT}")
    return int(count)


def within(index: Any, size: int) -> Any:
    """An index, or an array of them, that stays on an axis of `size`: from -size to size - 1.

    MLX reads and writes whatever lies beyond. A number is checked; values that are computed are
    clamped, since they are not known while the graph is built.
    """
    if not isinstance(index, mx.array):
        if not -size <= int(index) < size:
            raise ValueError(f"index {index!s:.30} on an axis of {size}")
        return int(index)
    if not mx.issubdtype(index.dtype, mx.integer):
        raise TypeError(f"an index of {index.dtype}, expected whole numbers")
    if size == 0 and index.size:
        raise ValueError("an index on an axis of 0")
    if index.dtype not in (mx.int32, mx.int64, mx.uint32):
        index = index.astype(mx.int32)  # in which `size` has its place
    low = 0 if index.dtype == mx.uint32 else -size
    return mx.clip(index, low, max(0, size - 1))


def from_numpy(values: Any, dtype: str) -> mx.array:
    return mx.array(np.asarray(values), dtype=dtype_of(dtype))
