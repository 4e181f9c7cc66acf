"""Arrays from nothing."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .registry import Number, Value, counted, dtype_of, from_numpy, ints, op


@op
def full(shape: Sequence[int], value: Value, dtype: str) -> mx.array:
    """An array of one value, or of the values of an array that broadcasts."""
    target = dtype_of(dtype)
    one = value.astype(target) if isinstance(value, mx.array) else mx.array(value, target)
    return mx.broadcast_to(one, ints(shape))


@op
def arange(start: Number, stop: Number, step: Number, dtype: str) -> mx.array:
    """start, start + step, ... below stop, computed in float64 as PyTorch does."""
    counted((stop - start) / step)
    return from_numpy(np.arange(start, stop, step), dtype)


@op
def linspace(start: float, stop: float, count: int, dtype: str) -> mx.array:
    """`count` evenly spaced numbers from start to stop, both included.

    In float32 with PyTorch's rounding: frequencies are powers of these, so the last bit matters.
    """
    count = counted(count)
    if dtype != "float32" or count < 2:
        return from_numpy(np.linspace(start, stop, count), dtype)
    low, high = np.float32(start), np.float32(stop)
    step = np.float64((high - low) / np.float32(count - 1))
    place = np.arange(count)
    second = place >= count // 2
    return from_numpy(np.where(second, high - step * place[::-1], low + step * place), dtype)


@op
def eye(rows: int, columns: int, dtype: str) -> mx.array:
    """Ones on the diagonal."""
    return mx.eye(int(rows), int(columns), dtype=dtype_of(dtype))
