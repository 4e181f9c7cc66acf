"""Resampling and pooling."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from .registry import op


def _nearest_index(size: int, out: int, scale: float | None, exact: bool) -> mx.array:
    ratio = 1 / scale if scale else size / out
    position = np.arange(out, dtype=np.float32)
    picked = np.floor((position + (0.5 if exact else 0.0)) * np.float32(ratio))
    return mx.array(np.clip(picked, 0, size - 1).astype(np.int32))


@op
def upsample_nearest(
    x: mx.array,
    sizes: Sequence[int] | None,
    scales: Sequence[float] | None = None,
    exact: bool = False,
) -> mx.array:
    """x (batch, channels, *size) resampled to `sizes`, or by `scales`, by the nearest element."""
    first = x.ndim - len(sizes if sizes is not None else scales or ())
    for i, axis in enumerate(range(first, x.ndim)):
        size = x.shape[axis]
        scale = scales[i] if scales is not None else None
        out = int(sizes[i]) if sizes is not None else math.floor(size * (scale or 1))
        if out % size == 0 and scale in (None, out / size):
            x = mx.repeat(x, out // size, axis) if out != size else x
        else:
            x = mx.take(x, _nearest_index(size, out, scale, exact), axis=axis)
    return x


def _bilinear_matrix(size: int, out: int, scale: float | None, align_corners: bool) -> mx.array:
    target = np.arange(out, dtype=np.float64)
    if align_corners:
        source = target * ((size - 1) / (out - 1) if out > 1 else 0.0)
    else:
        source = np.maximum((target + 0.5) * (1 / scale if scale else size / out) - 0.5, 0)
    low = np.minimum(source.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    matrix = np.zeros((size, out), np.float32)
    np.add.at(matrix, (low, np.arange(out)), 1 - (source - low))
    np.add.at(matrix, (high, np.arange(out)), source - low)
    return mx.array(matrix)


@op
def upsample_linear(
    x: mx.array,
    sizes: Sequence[int] | None,
    scales: Sequence[float] | None = None,
    align_corners: bool = False,
) -> mx.array:
    """x (batch, channels, *size) resampled linearly along each axis (bilinear, trilinear)."""
    count = len(sizes if sizes is not None else scales or ())
    for i in range(count):
        axis = x.ndim - count + i
        scale = scales[i] if scales is not None else None
        out = int(sizes[i]) if sizes is not None else math.floor(x.shape[axis] * (scale or 1))
        matrix = _bilinear_matrix(x.shape[axis], out, scale, align_corners).astype(x.dtype)
        x = mx.moveaxis(mx.moveaxis(x, axis, -1) @ matrix, -1, axis)
    return x


@op
def avg_pool(
    x: mx.array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = ()
) -> mx.array:
    """Mean over windows of the last axes, padding counted."""
    return _pool(x, kernel, stride, padding, mx.mean, 0)


@op
def max_pool(
    x: mx.array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = ()
) -> mx.array:
    """Largest over windows of the last axes."""
    return _pool(x, kernel, stride, padding, mx.max, -math.inf)


def _pool(
    x: mx.array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    reduce: Callable[..., mx.array],
    border: float,
) -> mx.array:
    n = len(kernel)
    steps, edges = tuple(stride) or tuple(kernel), tuple(padding) or (0,) * n
    x = mx.pad(x, [(0, 0)] * (x.ndim - n) + [(p, p) for p in edges], constant_values=border)
    for i, (width, step) in enumerate(zip(kernel, steps)):
        axis = x.ndim - n + i
        starts = np.arange(0, x.shape[axis] - width + 1, step)
        windows = mx.array(starts[:, None] + np.arange(width)[None])
        x = reduce(mx.take(x, windows, axis=axis), axis=axis + 1)
    return x
