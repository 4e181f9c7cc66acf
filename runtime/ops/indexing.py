"""Parts of arrays: slices, pieces, gathering and replacing by index."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import MlxconvError
from .registry import counted, ints, op, within


def slices(x: mx.array, axis: int, index: slice) -> tuple[slice, ...]:
    picked = [slice(None)] * x.ndim
    picked[axis] = index
    return tuple(picked)


@op
def slice_(
    x: mx.array, axis: int, start: int | None = None, stop: int | None = None, step: int = 1
) -> mx.array:
    """x[start:stop:step] along an axis, clamped as in Python."""
    size = x.shape[axis]
    return x[slices(x, axis, slice(*slice(start, stop, step).indices(size)))]


@op
def slice_update(
    x: mx.array,
    update: mx.array,
    axis: int,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> mx.array:
    """x with x[start:stop:step] along an axis replaced by `update`."""
    y = mx.array(x)
    where = slice(*slice(start, stop, step).indices(x.shape[axis]))
    y[slices(x, axis, where)] = update.astype(x.dtype)
    return y


@op
def select(x: mx.array, axis: int, index: int) -> mx.array:
    """x[index] along an axis, which is dropped."""
    picked: list[Any] = [slice(None)] * x.ndim
    picked[axis] = within(index, x.shape[axis])
    return x[tuple(picked)]


@op
def split(x: mx.array, sizes: Sequence[int], axis: int = 0) -> list[mx.array]:
    """Consecutive pieces of the sizes given."""
    if sum(ints(sizes)) != x.shape[axis]:
        raise ValueError(f"pieces of {list(sizes)!s:.60} of an axis of {x.shape[axis]}")
    bounds = np.cumsum(ints(sizes))[:-1].tolist()
    return list(mx.split(x, bounds, axis=axis)) if bounds else [x]


@op
def split_every(x: mx.array, size: int, axis: int = 0) -> list[mx.array]:
    """Consecutive pieces of `size`, the last one smaller."""
    counted(x.shape[axis] / size)
    bounds = list(range(size, x.shape[axis], size))
    return list(mx.split(x, bounds, axis=axis)) if bounds else [x]


@op
def chunk(x: mx.array, chunks: int, axis: int = 0) -> list[mx.array]:
    """At most `chunks` pieces of equal size, the last one smaller."""
    return split_every(x, max(1, -(-x.shape[axis] // chunks)), axis)  # type: ignore[no-any-return]


@op
def unbind(x: mx.array, axis: int = 0) -> list[mx.array]:
    """All slices along an axis, which is dropped."""
    return [mx.squeeze(y, axis) for y in mx.split(x, counted(x.shape[axis]), axis=axis)]


@op
def take(x: mx.array, index: mx.array, axis: int) -> mx.array:
    """Slices of x along an axis; the axes of `index` take its place."""
    return mx.take(x, within(index, x.shape[axis]), axis=axis)


@op
def take_along(x: mx.array, index: mx.array, axis: int) -> mx.array:
    """PyTorch's `gather`: index has x's rank and may be smaller along other axes."""
    for i in range(x.ndim):
        if i != axis % x.ndim and index.shape[i] < x.shape[i]:
            x = x[slices(x, i, slice(0, index.shape[i]))]
    return mx.take_along_axis(x, within(index, x.shape[axis]), axis=axis)


def _everywhere(x: mx.array, indices: Sequence[mx.array | None]) -> tuple[mx.array | slice, ...]:
    pairs = zip(indices, x.shape[: len(indices)], strict=True)
    return tuple(slice(None) if i is None else within(i, size) for i, size in pairs)


@op
def index(x: mx.array, indices: Sequence[mx.array | None]) -> mx.array:
    """Advanced indexing; None keeps an axis."""
    return x[_everywhere(x, indices)]


@op
def nonzero(x: mx.array) -> mx.array:
    """Places of the elements that are not zero: int32 [n, x.ndim].

    n depends on the values, so x is evaluated here, which `compile` cannot do.
    """
    try:
        found = np.argwhere(np.array(x != 0))
    except ValueError as error:  # mx.compile has no values
        raise MlxconvError("a size depends on an input's values: use compile='off'") from error
    return mx.array(found.astype(np.int32))


@op
def index_put(
    x: mx.array, indices: Sequence[mx.array | None], values: mx.array, accumulate: bool = False
) -> mx.array:
    """x with x[indices] replaced by, or increased by, values."""
    return _put(x, _everywhere(x, indices), values, accumulate)


@op
def put_along(
    x: mx.array, index: mx.array, values: mx.array, axis: int, accumulate: bool = False
) -> mx.array:
    """PyTorch's `scatter`: index has x's rank and may be smaller; values as large or larger."""
    grid: list[mx.array] = []
    for i, size in enumerate(index.shape):
        if i != axis % x.ndim and size > x.shape[i]:
            raise ValueError(f"an index of {size} on an axis of {x.shape[i]}")
        line = mx.arange(size).reshape([-1 if a == i else 1 for a in range(index.ndim)])
        grid.append(mx.broadcast_to(line, index.shape))
    grid[axis] = within(index, x.shape[axis])
    if values.ndim:
        values = values[tuple(slice(0, size) for size in index.shape)]
    return _put(x, tuple(grid), values, accumulate)


def _put(x: mx.array, where: Any, values: mx.array, accumulate: bool) -> mx.array:
    if accumulate:
        return x.at[where].add(values)
    y = mx.array(x)
    y[where] = values
    return y


@op
def triu(x: mx.array, k: int = 0) -> mx.array:
    """The upper triangle of the last two axes, zero elsewhere."""
    return mx.triu(x, k)


@op
def tril(x: mx.array, k: int = 0) -> mx.array:
    """The lower triangle of the last two axes, zero elsewhere."""
    return mx.tril(x, k)
