"""Reductions, running sums and sorting."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from .registry import OPS, Number, op


def _reduction(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def reduce(
        x: mx.array, axis: int | Sequence[int] | None = None, keepdims: bool = False
    ) -> mx.array:
        axes = tuple(axis) if isinstance(axis, Sequence) else axis
        return function(
            x, axis=axes or None if isinstance(axes, tuple) else axes, keepdims=keepdims
        )

    return reduce


for _name in ["sum", "mean", "max", "min", "prod", "any", "all", "logsumexp"]:
    OPS[_name] = _reduction(getattr(mx, _name))


@op
def var(
    x: mx.array, axis: Sequence[int] | int | None = None, keepdims: bool = False, ddof: Number = 1
) -> mx.array:
    """Variance with divisor n - ddof."""
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    return mx.var(x, axis=axes, keepdims=keepdims, ddof=int(ddof))


@op
def argmax(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """Index of the first largest element, int32."""
    return mx.argmax(x, axis=axis, keepdims=keepdims).astype(mx.int32)


@op
def argmin(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """Index of the first smallest element, int32."""
    return mx.argmin(x, axis=axis, keepdims=keepdims).astype(mx.int32)


@op
def cumsum(x: mx.array, axis: int) -> mx.array:
    """Running sum along `axis`."""
    return mx.cumsum(x, axis=axis)


@op
def argsort(x: mx.array, axis: int = -1, descending: bool = False) -> mx.array:
    """Indices that sort x, int32."""
    return mx.argsort(-x if descending else x, axis=axis).astype(mx.int32)
