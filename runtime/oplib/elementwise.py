"""Elementwise ops. Those written with Python's own operators also take plain sizes."""

import math
import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .registry import OPS, Number, Value, dtype_of, op


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x: function(x)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, b)


for _name in [
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "sin",
    "cos",
    "tan",
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "sqrt",
    "rsqrt",
    "square",
    "abs",
    "floor",
    "ceil",
    "sign",
    "sigmoid",
    "erf",
    "logical_not",
    "isnan",
    "isinf",
    "isfinite",
    "reciprocal",
    "real",
    "imag",
    "conjugate",
]:
    OPS[_name] = _unary(getattr(mx, _name))
OPS["neg"] = _unary(operator.neg)

for _name, _function in {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "matmul": operator.matmul,
    "logical_and": mx.logical_and,
    "logical_or": mx.logical_or,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "arctan2": mx.arctan2,
    "logaddexp": mx.logaddexp,
}.items():
    OPS[_name] = _binary(_function)


@op
def div(a: Value, b: Value) -> Value:
    """True division. On two sizes the result is a Python float."""
    return a / b


@op
def floor_div(a: Value, b: Value) -> Value:
    """Division rounded down (PyTorch's `rounding_mode="floor"`, Python's `//`)."""
    if _is_integer(a) and _is_integer(b):
        return a // b
    return mx.floor(a / b)


@op
def trunc_div(a: Value, b: Value) -> Value:
    """Division rounded toward zero (PyTorch's `rounding_mode="trunc"`)."""
    return trunc(a / b)


def _is_integer(a: Value) -> bool:
    if isinstance(a, mx.array):
        return bool(mx.issubdtype(a.dtype, mx.integer))
    return isinstance(a, int)


@op
def mod(a: Value, b: Value) -> Value:
    """Remainder with the sign of the divisor, as Python's `%`."""
    if not isinstance(a, mx.array) and not isinstance(b, mx.array):
        return a % b
    return mx.remainder(a, b)


@op
def pow_(a: Value, b: Value) -> Value:
    """a ** b. Small whole exponents are products, which keep fp32's last digit."""
    if isinstance(a, mx.array) and isinstance(b, (int, float)):
        if b == 2:
            return mx.square(a)
        if b == 3:
            return a * a * a
        if b == 0.5:
            return mx.sqrt(a)
    return a**b


@op
def trunc(x: Value) -> Value:
    """Round toward zero."""
    if isinstance(x, mx.array):
        return mx.where(x < 0, mx.ceil(x), mx.floor(x))
    return math.trunc(x)


@op
def round_(x: mx.array, decimals: int = 0) -> mx.array:
    """Round half to even."""
    return mx.round(x, decimals)


@op
def maximum(a: Value, b: Value) -> Value:
    """The larger, elementwise; NaN wins."""
    if isinstance(a, mx.array) or isinstance(b, mx.array):
        return mx.maximum(a, b)
    return max(a, b)


@op
def minimum(a: Value, b: Value) -> Value:
    """The smaller, elementwise; NaN wins."""
    if isinstance(a, mx.array) or isinstance(b, mx.array):
        return mx.minimum(a, b)
    return min(a, b)


@op
def size_floor(x: Number) -> int:
    """The whole number at or below a computed size."""
    return math.floor(x)


@op
def size_ceil(x: Number) -> int:
    """The whole number at or above a computed size."""
    return math.ceil(x)


@op
def size_sqrt(x: Number) -> float:
    """Square root of a computed size."""
    return math.sqrt(x)


@op
def size_float(x: Number) -> float:
    """A computed size as a float."""
    return float(x)


@op
def item(x: mx.array) -> Number:
    """The one element of a constant array as a size. It must not depend on a compiled input."""
    value = x.item()
    return value if isinstance(value, (int, float)) else int(bool(value))


@op
def clip(x: mx.array, low: Value | None = None, high: Value | None = None) -> mx.array:
    """x limited to [low, high]; either may be absent."""
    return mx.clip(x, low, high)


@op
def where(condition: mx.array, a: Value, b: Value) -> mx.array:
    """a where condition, else b."""
    return mx.where(condition, a, b)


@op
def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)."""
    return x * mx.sigmoid(x)


@op
def relu(x: mx.array) -> mx.array:
    """max(x, 0)."""
    return mx.maximum(x, 0)


@op
def gelu(x: mx.array, approximate: bool = False) -> mx.array:
    """x * Phi(x), exact by erf, or the tanh approximation (Hendrycks & Gimpel 2016)."""
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + mx.tanh(inner))
    return x * (1 + mx.erf(x * (1 / math.sqrt(2)))) * 0.5


@op
def softplus(x: mx.array, beta: float = 1.0, threshold: float = 20.0) -> mx.array:
    """log(1 + exp(beta x)) / beta, and x itself above threshold."""
    scaled = x * beta
    return mx.where(scaled > threshold, x, mx.logaddexp(scaled, mx.zeros_like(x)) / beta)


@op
def leaky_relu(x: mx.array, slope: float = 0.01) -> mx.array:
    """x, or slope * x below zero."""
    return mx.where(x >= 0, x, x * slope)


@op
def elu(x: mx.array, alpha: float = 1.0) -> mx.array:
    """x, or alpha * (exp(x) - 1) below zero."""
    return mx.where(x > 0, x, alpha * mx.expm1(x))


@op
def hard_swish(x: mx.array) -> mx.array:
    """x * clip(x + 3, 0, 6) / 6."""
    return x * mx.clip(x + 3, 0, 6) / 6


@op
def cast(x: Value, dtype: str) -> mx.array:
    """x as `dtype`. Floats become integers by truncation, anything becomes bool by != 0."""
    array = x if isinstance(x, mx.array) else mx.array(x)
    target = dtype_of(dtype)
    if target == mx.bool_ and array.dtype != mx.bool_:
        return array != 0
    return array.astype(target)


@op
def nan_to_num(
    x: mx.array, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> mx.array:
    """NaN and infinities replaced by finite numbers."""
    return mx.nan_to_num(x, nan, posinf, neginf)


@op
def complex_(real: mx.array, imag: mx.array) -> mx.array:
    """real + i imag, complex64."""
    return real.astype(mx.float32) + 1j * imag.astype(mx.float32)
