"""Reductions, running sums and sorting. Sums in half precision are accumulated in fp32."""

import math
import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from .elementwise import in_fp32
from .registry import OPS, Number, op

Axes = int | Sequence[int] | None


def _as_axes(axis: Axes) -> int | tuple[int, ...] | None:
    """None for an empty sequence: no axis named means all."""
    return (tuple(axis) or None) if isinstance(axis, Sequence) else axis


# MLX 0.32's CPU kernels now and then never return from a sum over an axis of length zero.
_OF_NOTHING = {"sum": 0, "prod": 1, "mean": math.nan, "logsumexp": -math.inf, "any": 0, "all": 1}


def _reduction(
    function: Callable[..., mx.array], of_nothing: float | None = None
) -> Callable[..., mx.array]:
    """`of_nothing` is the value over no elements: MLX's CPU kernels may never return from those."""

    def reduce(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
        if x.size == 0 and of_nothing is not None:
            return mx.full(_reduced(x.shape, axis, keepdims), of_nothing, dtype=x.dtype)
        return function(x, axis=_as_axes(axis), keepdims=keepdims)

    return reduce


def _reduced(shape: Sequence[int], axis: Axes, keepdims: bool) -> tuple[int, ...]:
    named = _as_axes(axis)
    rank = len(shape)
    axes = range(rank) if named is None else (named,) if isinstance(named, int) else named
    gone = {a % rank for a in axes}
    kept = (1 if i in gone else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(kept) if keepdims or i not in gone)


for _name, _nothing in {"max": None, "min": None, "any": 0.0, "all": 1.0}.items():
    OPS[_name] = _reduction(getattr(mx, _name), _nothing)
for _name, _nothing in {"sum": 0.0, "mean": math.nan, "prod": 1.0, "logsumexp": -math.inf}.items():
    OPS[_name] = in_fp32(_reduction(getattr(mx, _name), _nothing))


@op
@in_fp32
def var(x: mx.array, axis: Axes = None, keepdims: bool = False, ddof: Number = 1) -> mx.array:
    """Variance with divisor n - ddof."""
    return mx.var(x, axis=_as_axes(axis), keepdims=keepdims, ddof=int(ddof))


@op
def argmax(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """Index of the first largest element, int32."""
    return mx.argmax(x, axis=axis, keepdims=keepdims).astype(mx.int32)


@op
def argmin(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """Index of the first smallest element, int32."""
    return mx.argmin(x, axis=axis, keepdims=keepdims).astype(mx.int32)


@op
@in_fp32
def cumsum(x: mx.array, axis: int) -> mx.array:
    """Running sum along `axis`."""
    return mx.cumsum(x, axis=axis)


@op
@in_fp32
def cumprod(x: mx.array, axis: int) -> mx.array:
    """Running product along `axis`."""
    return mx.cumprod(x, axis=axis)


@op
def argsort(x: mx.array, axis: int = -1, descending: bool = False) -> mx.array:
    """Indices that sort x, int32; equal elements keep their order."""
    return mx.argsort(-x if descending else x, axis=axis).astype(mx.int32)
