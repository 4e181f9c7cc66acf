"""Products: linear, matmul, attention, convolutions."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from . import long_sums
from .registry import on_cpu, op, within

_SLACK = 64  # elements: some models pad kernels of one element


def _product(x: mx.array, weight: Any) -> mx.array:
    return x @ weight.T if isinstance(weight, mx.array) else weight.product(x)


@op
def linear(x: mx.array, weight: Any, bias: mx.array | None = None) -> mx.array:
    """x (..., in) by weight (out, in), dense or quantized, plus bias (out,) -> (..., out)."""
    if bias is not None and isinstance(weight, mx.array) and x.ndim > 1:
        return mx.addmm(bias, x, weight.T)
    y = _product(x, weight)
    return y if bias is None else y + bias


@op
def linears(x: mx.array, weights: Sequence[Any], biases: Sequence[Any]) -> list[mx.array]:
    """Several `linear` over one input. The executor may hold them as one stacked weight.

    Weights of different makes are held apart, and so are biases; one may be stacked, the other not.
    """
    stacked, bias = getattr(weights, "stacked", None), getattr(biases, "stacked", None)
    if stacked is None:
        apart = biases if bias is None else mx.split(bias, biases.bounds)  # type: ignore[attr-defined]
        return [linear(x, w, b) for w, b in zip(weights, apart, strict=True)]
    parts = mx.split(linear(x, stacked, bias), weights.bounds, axis=-1)  # type: ignore[attr-defined]
    if bias is not None:
        return list(parts)
    return [y if b is None else y + b for y, b in zip(parts, biases, strict=True)]


@op
def addmm(c: mx.array, a: mx.array, b: mx.array, alpha: float = 1, beta: float = 1) -> mx.array:
    """alpha (a @ b) + beta c."""
    return mx.addmm(c, a, b, alpha, beta)


@op
def embedding(weight: mx.array, ids: mx.array) -> mx.array:
    """Rows of weight (rows, width) by ids (...) -> (..., width)."""
    return weight[within(ids, weight.shape[0])]


@op
def einsum(equation: str, operands: Sequence[mx.array]) -> mx.array:
    """Einstein summation."""
    return mx.einsum(equation, *operands)


@op
def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> mx.array:
    """softmax(q k^T scale + mask) v; q (..., heads, tokens, width), k and v may have fewer heads.

    `mask` is boolean (True: attend) or added; a query that may attend to nothing gives zeros.
    `causal` lets query i attend to keys 0 to i. Leading axes before heads are flattened to one.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    if 0 in (q.size, k.size):
        return mx.zeros(shape, q.dtype)
    if causal and q.shape[-2] != k.shape[-2]:
        # MLX's own causal mask is aligned to the last key, PyTorch's to the first.
        mask = mx.tri(q.shape[-2], k.shape[-2], dtype=mx.float32) > 0
        causal = False
    if mask is not None:
        mask = _batched_mask(mask, q)
    q, k, v = (_batched(x) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if on_cpu():
        # Over strided views MLX's CPU product is ten times slower.
        q, k, v = mx.contiguous(q), mx.contiguous(k), mx.contiguous(v)
    given = "causal" if causal else mask
    out = long_sums.attention(q, k, v, scale, given)
    if mask is not None and mask.dtype == mx.bool_:
        out = mx.where(mx.any(mask, axis=-1, keepdims=True), out, mx.array(0, out.dtype))
    return out.reshape(shape)


def _batched(x: mx.array) -> mx.array:
    """(..., heads, tokens, width) as (batch, heads, tokens, width)."""
    heads = x.shape[-3] if x.ndim > 2 else 1
    return x if x.ndim == 4 else x.reshape(-1, heads, *x.shape[-2:])


def _batched_mask(mask: mx.array, q: mx.array) -> mx.array:
    """A mask that broadcasts over q's leading axes as one over its flattened ones."""
    if q.ndim > 4 and mask.ndim > 3:
        mask = mx.broadcast_to(mask, (*q.shape[:-3], *mask.shape[-3:]))
        mask = mask.reshape(-1, *mask.shape[-3:])
    return mask if mask.dtype == mx.bool_ else mask.astype(q.dtype)


def _to_channels_last(x: mx.array) -> mx.array:
    return x.transpose(0, *range(2, x.ndim), 1)


def _to_channels_first(x: mx.array, bias: mx.array | None) -> mx.array:
    if bias is not None:
        x = x + bias
    return x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))


def _check_window(
    x: mx.array, weight: mx.array, steps: Sequence[int], dilation: Sequence[int]
) -> None:
    """Dtypes that MLX refuses only when it evaluates; and no step far beyond the kernel's reach."""
    wrong = [a.dtype for a in (x, weight) if a.dtype not in (mx.float32, mx.float16, mx.bfloat16)]
    if wrong:
        raise TypeError(f"a convolution of {wrong[0]}")
    reach = max(weight.shape[1:-1], default=0) * max(dilation, default=1)
    if max(steps, default=0) > reach + _SLACK:
        raise ValueError(f"a padding or stride of {max(steps)} for a kernel that reaches {reach}")


@op
def conv(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> mx.array:
    """Convolution over 1 to 3 axes: x (batch, in, *size), weight (out, *kernel, in/groups).

    The weight is stored channels-last; x and the result (batch, out, *size) are channels-first.
    """
    _check_window(x, weight, padding, dilation)
    settings: dict[str, Any] = {"stride": stride, "padding": padding, "kernel_dilation": dilation}
    last = _to_channels_last(x)
    if groups > 1 and weight.ndim == 5:  # MLX has groups over one and two axes only
        pairs = zip(mx.split(last, groups, axis=-1), mx.split(weight, groups, axis=0))
        y = mx.concatenate([mx.conv_general(a, b, **settings) for a, b in pairs], axis=-1)
    else:
        y = mx.conv_general(last, weight, groups=groups, **settings)
    return _to_channels_first(y, bias)


@op
def qr(x: mx.array) -> list[mx.array]:
    """Reduced QR decomposition of (..., m, n): (..., m, k) and (..., k, n). CPU only in MLX."""
    return list(mx.linalg.qr(x, stream=mx.cpu))


@op
def conv_transpose(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> mx.array:
    """Transposed convolution; weight (out/groups, *kernel, in), x (batch, in, *size)."""
    _check_window(x, weight, (*padding, *stride, *output_padding), dilation)
    function: Any = (mx.conv_transpose1d, mx.conv_transpose2d, mx.conv_transpose3d)[x.ndim - 3]
    settings: list[Any] = [tuple(v) for v in (stride, padding, dilation, output_padding)]
    if x.ndim == 3:
        settings = [value[0] for value in settings]
    pairs = zip(mx.split(_to_channels_last(x), groups, axis=-1), mx.split(weight, groups, axis=-1))
    parts = [function(a, b, *settings) for a, b in pairs]
    return _to_channels_first(mx.concatenate(parts, axis=-1) if groups > 1 else parts[0], bias)
