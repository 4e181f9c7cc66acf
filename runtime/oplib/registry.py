"""The table of ops, and what all of them share: registration, dtypes, sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import MlxconvError

Number = int | float
Value = mx.array | Number

DTYPES: dict[str, mx.Dtype] = {
    "float64": mx.float64,
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
    "int64": mx.int64,
    "uint8": mx.uint8,
    "uint32": mx.uint32,
    "bool": mx.bool_,
    "complex64": mx.complex64,
}

OPS: dict[str, Callable[..., Any]] = {}


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register `function` under its own name, without a trailing underscore."""
    OPS[function.__name__.rstrip("_")] = function
    return function


def dtype_of(name: str) -> mx.Dtype:
    """The MLX dtype called `name`. (`compute` is replaced by the executor when it binds.)"""
    if name not in DTYPES:
        raise MlxconvError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def on_cpu() -> bool:
    """Whether MLX computes on the CPU by default."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def ints(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in shape)


MAX_COUNT = 1 << 26


def counted(count: Number) -> int:
    """How many elements or pieces an op makes at once, outside of MLX: at most MAX_COUNT."""
    if count > MAX_COUNT:
        raise ValueError(f"{count} elements are more than {MAX_COUNT}")
    return int(count)


def from_numpy(values: Any, dtype: str) -> mx.array:
    return mx.array(np.asarray(values), dtype=dtype_of(dtype))
