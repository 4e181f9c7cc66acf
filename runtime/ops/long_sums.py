"""Long sums in fp32 on a CPU, added in rows.

MLX's CPU kernels and the BLAS of its Linux wheel add one value after the other: the mean square of
four million values comes out 4e-3 too small. The kernels of Metal and CUDA add in trees. So where
the default device is a CPU, a sum of more than LONG values is taken axis by axis, and an axis
longer than LONG in rows of about its square root; everywhere else MLX's own functions are called.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from .registry import on_cpu

LONG = 4096  # values; up to here the error stays near 1e-6
_BLOCK = 512  # of the axis that a product sums over
Axes = int | Sequence[int] | None


def is_long(x: mx.array, count: int) -> bool:
    """Whether a sum of `count` values of `x` has to be taken in rows."""
    return count > LONG and x.dtype == mx.float32 and on_cpu()


def total(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
    """`mx.sum`."""
    axes = _axes(x, axis)
    if not is_long(x, _count(x, axes)):
        return mx.sum(x, axis=axes, keepdims=keepdims)
    for each in sorted(axes, reverse=True):
        x = _along(x, each)
    return x if keepdims else mx.squeeze(x, axes)


def mean(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
    """`mx.mean`."""
    axes = _axes(x, axis)
    if not is_long(x, _count(x, axes)):
        return mx.mean(x, axis=axes, keepdims=keepdims)
    return total(x, axes, keepdims) / _count(x, axes)


def var(x: mx.array, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> mx.array:
    """`mx.var`."""
    axes = _axes(x, axis)
    count = _count(x, axes)
    if not is_long(x, count):
        return mx.var(x, axis=axes, keepdims=keepdims, ddof=ddof)
    return total(mx.square(x - mean(x, axes, True)), axes, keepdims) / (count - ddof)


def logsumexp(x: mx.array, axis: Axes = None, keepdims: bool = False) -> mx.array:
    """`mx.logsumexp`."""
    axes = _axes(x, axis)
    if not is_long(x, _count(x, axes)):
        return mx.logsumexp(x, axis=axes, keepdims=keepdims)
    top = mx.max(x, axis=axes, keepdims=True)
    top = mx.where(mx.isinf(top), 0, top)
    found = mx.log(total(mx.exp(x - top), axes, True)) + top
    return found if keepdims else mx.squeeze(found, axes)


def softmax(x: mx.array, axis: int = -1) -> mx.array:
    """`mx.softmax`, accumulated in fp32."""
    if not is_long(x, x.shape[axis]):
        return mx.softmax(x, axis=axis, precise=True)
    grown = mx.exp(x - mx.max(x, axis=axis, keepdims=True))
    return grown / total(grown, axis, True)


def cumsum(x: mx.array, axis: int) -> mx.array:
    """`mx.cumsum`."""
    axis, count = axis % x.ndim, x.shape[axis]
    if not is_long(x, count):
        return mx.cumsum(x, axis=axis)
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    row = math.isqrt(count)
    rows = -(-count // row)
    widths = [(0, rows * row - count if a == axis else 0) for a in range(x.ndim)]
    within = mx.cumsum(mx.pad(x, widths).reshape(*before, rows, row, *behind), axis=axis + 1)
    last, first = mx.array([row - 1]), mx.array([0])
    ends = cumsum(mx.squeeze(mx.take(within, last, axis + 1), axis + 1), axis)
    starts = mx.concatenate([mx.zeros_like(mx.take(ends, first, axis)), ends], axis=axis)
    starts = mx.split(starts, [rows], axis=axis)[0]
    whole = (within + mx.expand_dims(starts, axis + 1)).reshape(*before, -1, *behind)
    return mx.split(whole, [count], axis=axis)[0]


def matmul(a: mx.array, b: mx.array) -> mx.array:
    """`a @ b`."""
    count = a.shape[-1]
    if b.ndim < 2 or not is_long(a, count):
        return a @ b
    bounds = list(range(_BLOCK, count, _BLOCK))
    pairs = zip(mx.split(a, bounds, axis=-1), mx.split(b, bounds, axis=-2), strict=True)
    first, *others = (x @ y for x, y in pairs)
    for each in others:
        first = first + each
    return first


def attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`: (batch, heads, tokens, width), k and v fewer heads.

    Over many keys in blocks with a running maximum (Milakov and Gimelshein 2018), which also need
    not hold the weights of all keys at once.
    """
    count = k.shape[-2]
    if not is_long(q, count):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    q = q.reshape(q.shape[0], *heads, *q.shape[2:]) * scale
    if isinstance(mask, mx.array):
        mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
        mask = mx.broadcast_to(mask, (*mask.shape[:-1], count))
        mask = mx.expand_dims(mask, 2) if mask.shape[1] == 1 else mx.unflatten(mask, 1, heads)
    least = mx.finfo(mx.float32).min
    top = mx.full((*q.shape[:-1], 1), least)
    weights = out = mx.array(0.0)
    for low in range(0, count, _BLOCK):
        keys = slice(low, min(low + _BLOCK, count))
        scores = q @ mx.expand_dims(k[:, :, keys], 2).swapaxes(-1, -2)
        part = _part_of_mask(mask, keys, scores)
        if part is not None:
            is_flag = part.dtype == mx.bool_
            scores = mx.where(part, scores, least) if is_flag else scores + part
        above = mx.maximum(top, mx.max(scores, axis=-1, keepdims=True))
        scores, shrink = mx.exp(scores - above), mx.exp(top - above)
        weights = weights * shrink + mx.sum(scores, axis=-1, keepdims=True)
        out = out * shrink + scores @ mx.expand_dims(v[:, :, keys], 2)
        top = above
    return mx.flatten(out / weights, 1, 2)


def _part_of_mask(mask: mx.array | str | None, keys: slice, scores: mx.array) -> mx.array | None:
    if isinstance(mask, mx.array):
        return mask[..., keys]
    if mask is None:
        return None
    return mx.arange(scores.shape[-2])[:, None] >= mx.arange(keys.start, keys.stop)


def _axes(x: mx.array, axis: Axes) -> tuple[int, ...]:
    """The axes, counted from the first; no axis named means all."""
    if isinstance(axis, int):
        axis = [axis]
    return tuple(a % x.ndim for a in axis) if axis else tuple(range(x.ndim))


def _count(x: mx.array, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


def _row(count: int) -> int:
    """About the square root of `count`; a divisor of it where one is near."""
    root = math.isqrt(count)
    return next((n for n in range(root, root // 4, -1) if count % n == 0), root)


def _along(x: mx.array, axis: int) -> mx.array:
    """The sum over one axis, which stays with length one."""
    count, row = x.shape[axis], _row(x.shape[axis])
    if count <= LONG:
        return mx.sum(x, axis=axis, keepdims=True)
    parts = mx.split(x, [count - count % row], axis=axis) if count % row else [x]
    rows = mx.unflatten(parts[0], axis, (count // row, row))
    whole = _along(mx.sum(rows, axis=axis + 1), axis)
    return whole + _along(parts[1], axis) if len(parts) > 1 else whole
