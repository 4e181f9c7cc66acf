"""Reductions, running sums and sorting. Sums in half precision are accumulated in fp32."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from .elementwise import in_fp32
from .registry import OPS, Number, op

Axes = int | Sequence[int] | None


def _as_axes(axis: Axes) -> int | tuple[int, ...] | None:
    """None for an empty sequence: no axis named means all."""
    return (tuple(axis) or None) if isinstance(axis, Sequence) else axis


def _reduction(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def reduce(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
        return function(x, axis=_as_axes(axis), keepdims=keepdims)

    return reduce


for _name in ("max", "min", "any", "all"):
    OPS[_name] = _reduction(getattr(mx, _name))
for _name in ("sum", "mean", "prod", "logsumexp"):
    OPS[_name] = in_fp32(_reduction(getattr(mx, _name)))


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
