"""Norms, softmax and rotary embedding."""

import mlx.core as mx

from . import long_sums
from .registry import op


@op
def layer_norm(
    x: mx.array, weight: mx.array | None = None, bias: mx.array | None = None, eps: float = 1e-5
) -> mx.array:
    """LayerNorm over the last axis, accumulated in fp32."""
    wide = x.astype(mx.float32)
    if not long_sums.is_long(wide, x.shape[-1]):
        return mx.fast.layer_norm(x, weight, bias, eps)
    gap = wide - long_sums.mean(wide, -1, True)
    y = gap * mx.rsqrt(long_sums.mean(mx.square(gap), -1, True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).astype(x.dtype)


@op
def rms_norm(x: mx.array, weight: mx.array | None = None, eps: float = 1e-6) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, accumulated in fp32."""
    wide = x.astype(mx.float32)
    if not long_sums.is_long(wide, x.shape[-1]):
        return mx.fast.rms_norm(x, weight, eps)
    y = wide * mx.rsqrt(long_sums.mean(mx.square(wide), -1, True) + eps)
    return (y if weight is None else y * weight).astype(x.dtype)


@op
def modulated_norm(
    x: mx.array, scale: mx.array, shift: mx.array | None = None, eps: float = 1e-5
) -> mx.array:
    """LayerNorm without weights, times `scale` (already 1 + s), plus `shift` (adaLN)."""
    if scale.size == x.shape[-1] and (shift is None or shift.size == x.shape[-1]):
        flat = None if shift is None else shift.reshape(-1)
        return layer_norm(x, scale.reshape(-1), flat, eps)  # type: ignore[no-any-return]
    y: mx.array = layer_norm(x, eps=eps) * scale
    return y if shift is None else y + shift


@op
def group_norm(
    x: mx.array,
    groups: int,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> mx.array:
    """GroupNorm of x (batch, channels, ...): all in fp32, rounded once."""
    flat = x.reshape(x.shape[0], groups, -1).astype(mx.float32)
    y: mx.array = layer_norm(flat, eps=eps).reshape(x.shape)
    per_channel = (x.shape[1],) + (1,) * (x.ndim - 2)
    if weight is not None:
        y = y * weight.reshape(per_channel)
    if bias is not None:
        y = y + bias.reshape(per_channel)
    return y.astype(x.dtype)


@op
def softmax(x: mx.array, axis: int = -1) -> mx.array:
    """Softmax along one axis, accumulated in fp32."""
    return long_sums.softmax(x, axis)


@op
def rotary(x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool) -> mx.array:
    """Rotary embedding (Su et al. 2021): pairs of x's last axis turned by the angle of cos, sin.

    x (..., width); cos and sin broadcast to (..., width / 2), one angle a pair, or to
    (..., width), one an element. Pairs are neighbours (`interleaved`) or the two halves.
    """
    half = x.shape[-1] // 2
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        ca, cb, sa, sb = _per_half(cos, sin, half, slice(0, None, 2), slice(1, None, 2))
        out = mx.stack([a * ca - b * sa, b * cb + a * sb], axis=-1)
        return out.reshape(x.shape)
    a, b = x[..., :half], x[..., half:]
    ca, cb, sa, sb = _per_half(cos, sin, half, slice(0, half), slice(half, None))
    return mx.concatenate([a * ca - b * sa, b * cb + a * sb], axis=-1)


def _per_half(
    cos: mx.array, sin: mx.array, half: int, first: slice, second: slice
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    if cos.shape[-1] == half:
        return cos, cos, sin, sin
    return cos[..., first], cos[..., second], sin[..., first], sin[..., second]
