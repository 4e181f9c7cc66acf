"""Reductions, running sums and sorting. Sums in half precision are accumulated in fp32."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from . import long_sums
from .elementwise import in_fp32
from .long_sums import Axes
from .registry import OPS, Number, op


def _as_axes(axis: Axes) -> int | tuple[int, ...] | None:
    """None for an empty sequence: no axis named means all."""
    return (tuple(axis) or None) if isinstance(axis, Sequence) else axis


# MLX 0.32's CPU kernels now and then never return from a sum over an axis of length zero.
_OF_NOTHING = {"sum": 0, "prod": 1, "mean": math.nan, "logsumexp": -math.inf, "any": 0, "all": 1}


def _reduction(name: str, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def reduce(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
        if x.size == 0 and name in _OF_NOTHING:
            shape = np.sum(np.empty(x.shape), axis=_as_axes(axis), keepdims=keepdims).shape
            is_flag = name in ("any", "all")
            dtype = mx.bool_ if is_flag else mx.int32 if x.dtype == mx.bool_ else x.dtype
            return mx.full(shape, _OF_NOTHING[name]).astype(dtype)  # full ignores bool
        return function(x, axis=_as_axes(axis), keepdims=keepdims)

    return reduce


for _name in ("max", "min", "any", "all"):
    OPS[_name] = _reduction(_name, getattr(mx, _name))
_SUMS: dict[str, Callable[..., mx.array]] = {
    "sum": long_sums.total,
    "mean": long_sums.mean,
    "prod": mx.prod,
    "logsumexp": long_sums.logsumexp,
}
for _name, _function in _SUMS.items():
    OPS[_name] = in_fp32(_reduction(_name, _function))


@op
@in_fp32
def var(x: mx.array, axis: Axes = None, keepdims: bool = False, ddof: Number = 1) -> mx.array:
    """Variance with divisor n - ddof."""
    return long_sums.var(x, axis, keepdims, int(ddof))


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
    return long_sums.cumsum(x, axis)


@op
@in_fp32
def cumprod(x: mx.array, axis: int) -> mx.array:
    """Running product along `axis`."""
    return mx.cumprod(x, axis=axis)


@op
def argsort(x: mx.array, axis: int = -1, descending: bool = False) -> mx.array:
    """Indices that sort x, int32; equal elements keep their order."""
    return mx.argsort(-x if descending else x, axis=axis).astype(mx.int32)
