"""Products: linear, matmul, attention, convolutions."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from .registry import op


class MatrixWeight(Protocol):
    """What `linear` needs of a weight: dense arrays and quantized weights both provide it."""

    def product(self, x: mx.array) -> mx.array: ...


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
    """Several `linear` over one input. The executor may hold them as one stacked weight."""
    stacked = getattr(weights, "stacked", None)
    if stacked is None:
        return [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    y = linear(x, stacked, getattr(biases, "stacked", None))
    return list(mx.split(y, weights.bounds, axis=-1))  # type: ignore[attr-defined]


@op
def addmm(c: mx.array, a: mx.array, b: mx.array, alpha: float = 1, beta: float = 1) -> mx.array:
    """alpha (a @ b) + beta c."""
    return mx.addmm(c, a, b, alpha, beta)


@op
def embedding(weight: mx.array, ids: mx.array) -> mx.array:
    """Rows of weight (rows, width) by ids (...) -> (..., width)."""
    return weight[ids]


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

    `mask` is boolean (True: attend) or added. Leading axes before heads are flattened to one.
    """
    lead, width = q.shape[:-3], q.shape[-1]
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    elif q.ndim > 4:
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        if mask is not None and mask.ndim > 4:
            mask = mx.broadcast_to(mask, (*lead, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])
    if mx.default_device().type == mx.DeviceType.cpu:
        # Over strided views MLX's CPU product is ten times slower.
        q, k, v = mx.contiguous(q), mx.contiguous(k), mx.contiguous(v)
    if mask is not None and mask.dtype != mx.bool_:
        mask = mask.astype(q.dtype)
    out = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=width**-0.5 if scale is None else scale, mask="causal" if causal else mask
    )
    return out.reshape(*lead, *out.shape[-3:])


def _to_channels_last(x: mx.array) -> mx.array:
    return x.transpose(0, *range(2, x.ndim), 1)


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
    y = mx.conv_general(
        _to_channels_last(x),
        weight,
        stride=stride,
        padding=padding,
        kernel_dilation=dilation,
        groups=groups,
    )
    if bias is not None:
        y = y + bias
    return y.transpose(0, y.ndim - 1, *range(1, y.ndim - 1))


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
    """Transposed convolution; weight (out, *kernel, in/groups), x (batch, in, *size)."""
    function = (mx.conv_transpose1d, mx.conv_transpose2d, mx.conv_transpose3d)[x.ndim - 3]
    settings = [stride, padding, dilation, output_padding]
    if x.ndim == 3:
        settings = [value[0] for value in settings]  # type: ignore[misc]
    y = function(_to_channels_last(x), weight, *settings, groups)
    if bias is not None:
        y = y + bias
    return y.transpose(0, y.ndim - 1, *range(1, y.ndim - 1))
