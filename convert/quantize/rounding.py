"""How near quantized values are to the weights that they were made of."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxconv.runtime.exec.weights import Quantization

# A group may be this much worse than rounding to nearest; a wrong scale is worse by far more.
_WORSE = 1.25
# Relative error of one group that no correct encoding exceeds, where rounding is not redone.
_MX_LIMIT = {"mxfp4": 0.35, "nvfp4": 0.35, "mxfp8": 0.1}


def dequantize(parts: Sequence[mx.array | None], spec: Quantization) -> mx.array:
    """Packed values, scales and biases in float32."""
    packed, scales, biases = parts
    assert packed is not None and scales is not None
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(
        packed, scales, biases, spec.group_size, spec.bits, spec.mode, dtype=mx.float32
    )


def group_error(value: mx.array, wanted: mx.array, spec: Quantization) -> mx.array:
    """Norm of the difference, for each group of each row."""
    gap = (value - wanted).reshape(value.shape[0], -1, spec.group_size)
    return mx.sqrt(mx.sum(gap * gap, axis=-1))


def group_limit(
    exact: mx.array, wanted: mx.array, spec: Quantization, dtype: mx.Dtype | None
) -> mx.array:
    """What `group_error` may be: rounding to nearest, and a little more. dtype: of the scales."""
    groups = wanted.reshape(wanted.shape[0], -1, spec.group_size)
    norm = mx.sqrt(mx.sum(groups * groups, axis=-1))
    if spec.mode != "affine":
        return _MX_LIMIT.get(spec.mode, 0.35) * norm + 1e-12
    rounded = exact.astype(dtype or mx.bfloat16)
    made = list(mx.quantize(rounded, spec.group_size, spec.bits))
    nearest = group_error(dequantize(made, spec), wanted, spec)
    return _WORSE * nearest + 1e-6 * norm + 1e-30
