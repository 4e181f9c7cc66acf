"""Shapes: sizes, views, joining, repeating, padding."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .indexing import slices
from .registry import Number, counted, ints, op


@op
def dim(x: mx.array, axis: int) -> int:
    """The size of an axis, as a Python int: computed while the MLX graph is built."""
    return x.shape[axis]


@op
def reshape(x: mx.array, shape: Sequence[int]) -> mx.array:
    """x with `shape`; one size may be -1."""
    return x.reshape(ints(shape))


@op
def transpose(x: mx.array, axes: Sequence[int]) -> mx.array:
    """Axes in a new order."""
    return x.transpose(*ints(axes))


@op
def broadcast(x: mx.array, shape: Sequence[int]) -> mx.array:
    """x repeated to `shape`, without a copy; -1 keeps the axis."""
    sizes = ints(shape)
    own = (1,) * (len(sizes) - x.ndim) + tuple(x.shape)
    return mx.broadcast_to(x, tuple(b if a == -1 else a for a, b in zip(sizes, own)))


@op
def diagonal(x: mx.array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> mx.array:
    """The diagonal of two axes, as the last axis."""
    return mx.diagonal(x, offset, axis1, axis2)


@op
def expand_dims(x: mx.array, axis: int) -> mx.array:
    """A new axis of size 1."""
    return mx.expand_dims(x, axis)


@op
def squeeze(x: mx.array, axes: Sequence[int] | None = None) -> mx.array:
    """Axes of size 1 dropped: those named, where they are 1, or all."""
    if axes is None:
        return mx.squeeze(x)
    ones = tuple(a for a in ints(axes) if x.ndim and x.shape[a] == 1)
    return mx.squeeze(x, ones) if ones else x


@op
def concat(xs: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Arrays joined along an axis; legacy empty 1-D arrays are skipped, as PyTorch does."""
    real = [x for x in xs if x.ndim > 1 or x.size > 0] or list(xs[:1])
    return mx.concatenate(real, axis=axis)


@op
def stack(xs: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Arrays joined along a new axis."""
    return mx.stack(list(xs), axis=axis)


@op
def tile(x: mx.array, repeats: Sequence[int]) -> mx.array:
    """x laid side by side."""
    return mx.tile(x, ints(repeats))


@op
def repeat(x: mx.array, repeats: int, axis: int | None = None) -> mx.array:
    """Each element repeated along an axis (flattened when None)."""
    return mx.repeat(x, int(repeats), axis)


@op
def repeat_each(x: mx.array, counts: mx.array, axis: int | None = None) -> mx.array:
    """Element i repeated counts[i] times. The counts must not depend on a compiled input."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    times = np.broadcast_to(np.array(counts), (x.shape[axis],))
    counted(np.sum(times, dtype=np.float64))
    return mx.take(x, mx.array(np.repeat(np.arange(len(times)), times)), axis=axis)


@op
def flip(x: mx.array, axes: Sequence[int]) -> mx.array:
    """Reversed along axes."""
    reversed_axes = {a % x.ndim for a in ints(axes)}
    return x[tuple(slice(None, None, -1 if i in reversed_axes else 1) for i in range(x.ndim))]


@op
def roll(x: mx.array, shifts: Sequence[int], axes: Sequence[int]) -> mx.array:
    """Elements moved around along axes, or through the flattened array."""
    if not axes:
        return mx.roll(x.reshape(-1), ints(shifts)[0]).reshape(x.shape)
    for shift, axis in zip(ints(shifts), ints(axes), strict=True):
        x = mx.roll(x, shift, axis)
    return x


@op
def pad(
    x: mx.array, widths: Sequence[Sequence[int]], mode: str = "constant", value: Number = 0
) -> mx.array:
    """x padded by (before, after) per axis; negative widths crop. Modes as PyTorch's `F.pad`."""
    pairs = [(int(a), int(b)) for a, b in widths]
    for axis, (before, after) in enumerate(pairs):
        if before < 0 or after < 0:
            size = x.shape[axis]
            x = x[slices(x, axis, slice(max(0, -before), size - max(0, -after)))]
    pairs = [(max(0, a), max(0, b)) for a, b in pairs]
    if mode == "constant":
        return mx.pad(x, pairs, constant_values=mx.array(value, x.dtype))
    if mode == "replicate":
        return mx.pad(x, pairs, mode="edge")
    for axis, (before, after) in enumerate(pairs):
        if before or after:
            index = _border_index(x.shape[axis], before, after, mode)
            x = mx.take(x, index, axis=axis)
    return x


def _border_index(size: int, before: int, after: int, mode: str) -> mx.array:
    position = np.arange(-before, counted(size + after))
    if mode == "circular":
        return mx.array(position % size)
    period = max(1, 2 * (size - 1))
    folded = np.abs(position) % period
    return mx.array(np.where(folded >= size, period - folded, folded))
