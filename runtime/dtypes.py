"""The one table of dtypes: names in programs, codes in safetensors files, and MLX's types."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# What the command line and Python calls also take.
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Dtype(NamedTuple):
    """`name` in programs, `code` in a safetensors header, `size` in bytes.

    `mlx` holds the same values: bfloat16 for 8-bit floats, which MLX lacks.
    """

    name: str
    code: str
    size: int
    mlx: mx.Dtype


_TABLE = (
    Dtype("bool", "BOOL", 1, mx.bool_),
    Dtype("uint8", "U8", 1, mx.uint8),
    Dtype("int8", "I8", 1, mx.int8),
    Dtype("uint16", "U16", 2, mx.uint16),
    Dtype("int16", "I16", 2, mx.int16),
    Dtype("uint32", "U32", 4, mx.uint32),
    Dtype("int32", "I32", 4, mx.int32),
    Dtype("uint64", "U64", 8, mx.uint64),
    Dtype("int64", "I64", 8, mx.int64),
    Dtype("float16", "F16", 2, mx.float16),
    Dtype("bfloat16", "BF16", 2, mx.bfloat16),
    Dtype("float32", "F32", 4, mx.float32),
    Dtype("float64", "F64", 8, mx.float64),
    Dtype("complex64", "C64", 8, mx.complex64),
    Dtype("float8_e4m3", "F8_E4M3", 1, mx.bfloat16),
    Dtype("float8_e5m2", "F8_E5M2", 1, mx.bfloat16),
)
BY_NAME = {dtype.name: dtype for dtype in _TABLE}
BY_CODE = {dtype.code: dtype for dtype in _TABLE}
BY_MLX = {dtype.mlx: dtype for dtype in reversed(_TABLE)}
