"""Resampling and pooling."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .elementwise import in_fp32
from .indexing import slices
from .registry import OPS, counted, op


def _nearest_index(size: int, out: int, scale: float | None, exact: bool) -> mx.array:
    ratio = 1 / scale if scale else size / out
    position = np.arange(counted(out), dtype=np.float32)
    picked = np.floor((position + (0.5 if exact else 0.0)) * np.float32(ratio))
    return mx.array(np.clip(picked, 0, size - 1).astype(np.int32))


MAX_GROWTH = 1024  # times the elements that one op makes of its input by `scales`


def _lengths(
    x: mx.array, sizes: Sequence[int] | None, scales: Sequence[float] | None
) -> list[tuple[int, int, int, float | None]]:
    """Of each resampled axis: its number, its length, the length wanted, the scale if given."""
    growth = math.prod(scale or 1 for scale in scales or ())
    if not growth <= MAX_GROWTH:
        raise ValueError(f"scales {scales} make {growth} elements of one, more than {MAX_GROWTH}")
    count = len(sizes if sizes is not None else scales or ())
    found = []
    for i, axis in enumerate(range(x.ndim - count, x.ndim)):
        size, scale = x.shape[axis], scales[i] if scales is not None else None
        out = int(sizes[i]) if sizes is not None else math.floor(size * (scale or 1))
        found.append((axis, size, out, scale))
    return found


@op
def upsample_nearest(
    x: mx.array,
    sizes: Sequence[int] | None,
    scales: Sequence[float] | None = None,
    exact: bool = False,
) -> mx.array:
    """x (batch, channels, *size) resampled to `sizes`, or by `scales`, by the nearest element."""
    for axis, size, out, scale in _lengths(x, sizes, scales):
        if not size:
            continue  # an empty array stays empty along any axis
        if out % size == 0 and scale in (None, out / size):
            x = mx.repeat(x, out // size, axis) if out != size else x
        else:
            x = mx.take(x, _nearest_index(size, out, scale, exact), axis=axis)
    return x


def _positions(size: int, out: int, scale: float | None, align_corners: bool) -> Any:
    """Where each of `out` elements lies in the `size` of the source (PyTorch's convention)."""
    target = np.arange(counted(out), dtype=np.float64)
    if align_corners:
        return target * ((size - 1) / (out - 1) if out > 1 else 0.0)
    return (target + 0.5) * (1 / scale if scale else size / out) - 0.5


def _linear_taps(source: Any, size: int) -> tuple[Any, Any]:
    """Indices and weights (out, 2) of the neighbours of each position."""
    source = np.maximum(source, 0)
    low = np.floor(source)
    part = (source - low)[:, None]
    return low[:, None] + np.arange(2), np.concatenate([1 - part, part], axis=1)


def _cubic(distance: Any, a: float) -> Any:
    """The cubic convolution kernel (Keys 1981)."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _cubic_taps(source: Any, size: int) -> tuple[Any, Any]:
    """Indices and weights (out, 4), with PyTorch's a = -0.75."""
    index = np.floor(source)[:, None] + np.arange(-1, 3)
    return index, _cubic(source[:, None] - index, -0.75)


def _antialiased_taps(
    kernel: Callable[[Any], Any], reach: float, size: int, out: int, scale: float | None
) -> tuple[Any, Any]:
    """Pillow's filters: the kernel stretched over the source when the image shrinks."""
    ratio = 1 / scale if scale else size / out
    stretch = max(ratio, 1.0)
    centre = ratio * (np.arange(counted(out)) + 0.5)
    first = np.maximum(np.trunc(centre - reach * stretch + 0.5), 0)
    last = np.minimum(np.trunc(centre + reach * stretch + 0.5), size)
    width = int((last - first).max())
    index = first[:, None] + np.arange(counted(out * width) // out)
    weight = kernel((index - centre[:, None] + 0.5) / stretch) * (index < last[:, None])
    return index, weight / weight.sum(axis=1, keepdims=True)


def _tent(distance: Any) -> Any:
    return np.maximum(1 - np.abs(distance), 0.0)


def _weighted(x: mx.array, axis: int, index: Any, weight: Any) -> mx.array:
    """sum_k weight[:, k] x[index[:, k]] along an axis; indices beyond the border stop there."""
    shape = [1] * x.ndim
    shape[axis] = -1
    index = mx.array(np.clip(index, 0, x.shape[axis] - 1).astype(np.int32))
    weights = mx.array(weight.astype(np.float32))
    taps = (
        mx.take(x, index[:, k], axis=axis) * weights[:, k].reshape(shape)
        for k in range(index.shape[1])
    )
    return functools.reduce(operator.add, taps)


def _resampling(
    taps: Callable[..., tuple[Any, Any]], kernel: Callable[[Any], Any], reach: float
) -> Callable[..., mx.array]:
    @in_fp32
    def resample(
        x: mx.array,
        sizes: Sequence[int] | None,
        scales: Sequence[float] | None = None,
        align_corners: bool = False,
        antialias: bool = False,
    ) -> mx.array:
        for axis, size, out, scale in _lengths(x, sizes, scales):
            if antialias and not align_corners:
                chosen = _antialiased_taps(kernel, reach, size, out, scale)
            else:
                chosen = taps(_positions(size, out, scale, align_corners), size)
            x = _weighted(x, axis, *chosen)
        return x

    return resample


# x (batch, channels, *size) resampled along each axis to `sizes`, or by `scales`.
OPS["upsample_linear"] = _resampling(_linear_taps, _tent, 1.0)
OPS["upsample_cubic"] = _resampling(_cubic_taps, lambda d: _cubic(d, -0.5), 2.0)


@op
@in_fp32
def adaptive_avg_pool(x: mx.array, sizes: Sequence[int | None]) -> mx.array:
    """The last axes averaged down to `sizes`: element i over floor(i n/m) to ceil((i+1) n/m)."""
    for axis, wanted in enumerate(sizes, x.ndim - len(sizes)):
        size = x.shape[axis]
        if wanted is None or wanted == size:
            continue
        if size % wanted == 0:
            shape = (*x.shape[:axis], wanted, size // wanted, *x.shape[axis + 1 :])
            x = x.reshape(shape).mean(axis=axis + 1)
            continue
        first = np.arange(counted(wanted)) * size // wanted
        last = -(-(np.arange(wanted) + 1) * size // wanted)
        index = first[:, None] + np.arange((last - first).max())
        weight = (index < last[:, None]) / (last - first)[:, None]
        x = _weighted(x, axis, index, weight)
    return x


@op
@in_fp32
def avg_pool(
    x: mx.array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = ()
) -> mx.array:
    """Mean over windows of the last axes, padding counted."""
    return _pool(x, kernel, stride, padding, operator.add, 0) / math.prod(kernel)


@op
def max_pool(
    x: mx.array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = ()
) -> mx.array:
    """Largest over windows of the last axes."""
    return _pool(x, kernel, stride, padding, mx.maximum, -math.inf)


def _pool(
    x: mx.array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    combine: Callable[[mx.array, mx.array], mx.array],
    border: float,
) -> mx.array:
    """The k-th elements of all windows are a strided slice: combine one such slice per k."""
    steps, edges = tuple(stride) or tuple(kernel), tuple(padding) or (0,) * len(kernel)
    first = x.ndim - len(kernel)
    if any(edges):
        widths = [(0, 0)] * first + [(p, p) for p in edges]
        x = mx.pad(x, widths, constant_values=mx.array(border, x.dtype))
    for axis, width, step in zip(range(first, x.ndim), kernel, steps):
        reach = (x.shape[axis] - width) // step * step + 1
        parts = (x[slices(x, axis, slice(k, k + reach, step))] for k in range(width))
        x = functools.reduce(combine, parts)
    return x
