"""Elementwise ops. Those written with Python's own operators also take plain sizes.

In bf16 and fp16 a number is not rounded before it meets an array, and activations are computed in
fp32 and rounded once, as PyTorch does both.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from . import elementary, long_sums
from .registry import OPS, Number, Value, dtype_of, op

_HALF = (mx.bfloat16, mx.float16)


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x: function(x)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, b)


def _exact(number: Any) -> bool:
    """Whether a number has no digits that bf16 would lose."""
    return bool(np.float32(number) == number and np.float32(number).view(np.uint32) & 0xFFFF == 0)


def _with_numbers(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`function` of arrays and numbers; a number that bf16 would round is met in fp32."""

    def apply(a: Value, b: Value) -> Value:
        array, number = (a, b) if isinstance(a, mx.array) else (b, a)
        if (
            isinstance(number, float)
            and isinstance(array, mx.array)
            and array.dtype in _HALF
            and not _exact(number)
        ):
            wide = (x.astype(mx.float32) if isinstance(x, mx.array) else x for x in (a, b))
            return function(*wide).astype(array.dtype)  # type: ignore[no-any-return]
        return function(a, b)  # type: ignore[no-any-return]

    return apply


def in_fp32(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`function(x, ...)` computed in fp32 and rounded once, for x in half precision."""

    @functools.wraps(function)
    def apply(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if x.dtype not in _HALF:
            return function(x, *args, **kwargs)
        return function(x.astype(mx.float32), *args, **kwargs).astype(x.dtype)

    return apply


for _name in """expm1 log log10 log1p log2 tan arcsin arccos arctan sinh cosh
    arcsinh arccosh arctanh sqrt rsqrt square abs floor ceil sign logical_not isnan
    isinf isfinite reciprocal real imag conjugate""".split():
    OPS[_name] = _unary(getattr(mx, _name))
for _name, _curve in elementary.ELEMENTARY.items():
    OPS[_name] = _unary(_curve)
OPS["neg"] = _unary(operator.neg)

for _name, _function in {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "matmul": long_sums.matmul,
    "logical_and": mx.logical_and,
    "logical_or": mx.logical_or,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "right_shift": operator.rshift,
    "arctan2": mx.arctan2,
    "logaddexp": mx.logaddexp,
}.items():
    OPS[_name] = _binary(_function)

# True division; of two sizes it is a Python float.
for _name, _function in {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}.items():
    OPS[_name] = _with_numbers(_function)


@op
@in_fp32
def exp(x: mx.array) -> mx.array:
    """e ** x. By expm1, as MLX's exp is off by 5e-7: half a radian thousandth at timestep 1000."""
    if x.dtype == mx.float64:
        return math.e**x
    if x.dtype == mx.complex64:
        return mx.exp(x)
    grown = 1 + mx.expm1(mx.abs(x))
    return mx.where(x < 0, 1 / grown, grown)


def _of_angle(function: Callable[[mx.array], mx.array], quarter: float) -> Callable[..., mx.array]:
    """sin or cos. MLX's are off by 2e-4 at 5000 in float64 (7e-8 in fp32): reduce the angle."""

    def apply(x: mx.array) -> mx.array:
        if x.dtype != mx.float64:
            return function(x)
        turn = 2 * math.pi
        angle = x - mx.round(x / turn) * turn
        high = angle.astype(mx.float32)
        low = (angle - high.astype(mx.float64)).astype(mx.float32)
        slope = mx.sin(high + quarter)
        return (function(high) + low * slope).astype(mx.float64)

    return apply


OPS["sin"] = _of_angle(mx.sin, math.pi / 2)
OPS["cos"] = _of_angle(mx.cos, math.pi)


def _is_integer(a: Value) -> bool:
    if isinstance(a, mx.array):
        return bool(mx.issubdtype(a.dtype, mx.integer))
    return isinstance(a, int)


def _is_array(a: Value, b: Value) -> bool:
    return isinstance(a, mx.array) or isinstance(b, mx.array)


def _exactly(function: Callable[[mx.array, mx.array], mx.array]) -> Callable[..., Any]:
    """`function` of two arrays, in fp32 where the result is in half precision.

    The processor traps whole numbers divided by 0, and the lowest one by -1: both become
    divisions by 1, the latter of -a.
    """

    def apply(a: Value, b: Value) -> mx.array:
        dtype = (a + b).dtype  # type: ignore[union-attr]
        wide = mx.float32 if dtype in _HALF else dtype
        x, y = (mx.array(value).astype(wide) for value in (a, b))
        if not (mx.issubdtype(dtype, mx.inexact) or (isinstance(b, (int, float)) and b > 0)):
            if dtype == mx.bool_:
                raise TypeError("division of bool")
            if isinstance(b, (int, float)) and b == 0:
                raise ZeroDivisionError("division by 0")
            negated = (y == -1) & mx.array(mx.issubdtype(dtype, mx.signedinteger))
            x, y = mx.where(negated, -x, x), mx.where(negated | (y == 0), 1, y)
        return function(x, y).astype(dtype)

    return apply


@op
def floor_div(a: Value, b: Value) -> Value:
    """Division rounded down (PyTorch's `rounding_mode="floor"`, Python's `//`)."""
    if not _is_array(a, b):
        return a // b
    return _floor_quotient(a, b)  # type: ignore[no-any-return]


@_exactly
def _floor_quotient(a: mx.array, b: mx.array) -> mx.array:
    """The quotient of what the remainder leaves: 1 // 0.1 is 9, though 1 / 0.1 rounds to 10."""
    whole = a - mx.remainder(a, b)
    return whole // b if _is_integer(whole) else mx.round(whole / b)


@op
def trunc_div(a: Value, b: Value) -> Value:
    """Division rounded toward zero (PyTorch's `rounding_mode="trunc"`)."""
    return _trunc_quotient(a, b)  # type: ignore[no-any-return]


@_exactly
def _trunc_quotient(a: mx.array, b: mx.array) -> mx.array:
    if _is_integer(a):
        return mx.sign(a) * mx.sign(b) * (mx.abs(a) // mx.abs(b))
    return trunc(a / b)  # type: ignore[no-any-return]


@op
def mod(a: Value, b: Value) -> Value:
    """Remainder with the sign of the divisor, as Python's `%`."""
    if not _is_array(a, b):
        return a % b
    return _exactly(mx.remainder)(a, b)  # type: ignore[no-any-return]


@op
def fmod(a: Value, b: Value) -> mx.array:
    """Remainder with the sign of the dividend, as C's `fmod`."""
    return _signed_remainder(a, b)  # type: ignore[no-any-return]


@_exactly
def _signed_remainder(a: mx.array, b: mx.array) -> mx.array:
    return mx.sign(a) * mx.remainder(mx.abs(a), mx.abs(b))


@op
def pow_(a: Value, b: Value) -> Value:
    """a ** b. Small whole exponents are products, which keep fp32's last digit."""
    if isinstance(a, mx.array) and isinstance(b, (int, float)):
        if b == 2:
            return mx.square(a)
        if b == 0.5:
            return mx.sqrt(a)
        return _power(a, b)
    if isinstance(b, mx.array) and b.dtype in _HALF:
        return (a ** b.astype(mx.float32)).astype(b.dtype)
    return a ** (b if isinstance(b, mx.array) else _bits(b))


def _bits(count: Number) -> Number:
    """An exponent or shift of a size: at most 64, or the number alone would fill the memory."""
    if count > 64:
        raise ValueError(f"a power or shift by {count}")
    return count


@op
def left_shift(a: Value, b: Value) -> Value:
    """a * 2 ** b, of whole numbers."""
    return operator.lshift(a, b if isinstance(b, mx.array) else _bits(b))  # type: ignore[no-any-return]


@in_fp32
def _power(a: mx.array, b: Number) -> mx.array:
    return a * a * a if b == 3 else a**b


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
    return mx.maximum(a, b) if _is_array(a, b) else max(a, b)


@op
def minimum(a: Value, b: Value) -> Value:
    """The smaller, elementwise; NaN wins."""
    return mx.minimum(a, b) if _is_array(a, b) else min(a, b)


@op
def size_floor(x: Number) -> int:
    """The whole number at or below a computed size."""
    return math.floor(x)


@op
def size_ceil(x: Number) -> int:
    """The whole number at or above a computed size."""
    return math.ceil(x)


@op
def size_round(x: Number) -> int:
    """The whole number next to a computed size; halves go to the even one."""
    return round(x)


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
    """x limited to [low, high]; either may be absent. High wins where they cross, NaN stays."""
    return mx.clip(x, low, high)


@op
def where(condition: mx.array, a: Value, b: Value) -> mx.array:
    """a where condition, else b."""
    return mx.where(condition, a, b)


@op
@in_fp32
def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)."""
    return elementary.silu(x)


@op
def relu(x: mx.array) -> mx.array:
    """max(x, 0)."""
    return mx.maximum(x, 0)


@op
@in_fp32
def gelu(x: mx.array, approximate: bool = False) -> mx.array:
    """x * Phi(x), exact by erf, or the tanh approximation (Hendrycks & Gimpel 2016)."""
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + elementary.tanh(inner))
    return x * (1 + elementary.erf(x * (1 / math.sqrt(2)))) * 0.5


@op
@in_fp32
def softplus(x: mx.array, beta: float = 1.0, threshold: float = 20.0) -> mx.array:
    """log(1 + exp(beta x)) / beta, and x itself above threshold."""
    scaled = x * beta
    return mx.where(scaled > threshold, x, mx.logaddexp(scaled, mx.zeros_like(x)) / beta)


@op
@in_fp32
def leaky_relu(x: mx.array, slope: float = 0.01) -> mx.array:
    """x, or slope * x below zero."""
    return mx.where(x >= 0, x, x * slope)


@op
@in_fp32
def elu(x: mx.array, alpha: float = 1.0) -> mx.array:
    """x, or alpha * (exp(x) - 1) below zero."""
    return mx.where(x > 0, x, alpha * mx.expm1(x))


@op
@in_fp32
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
def view_bits(x: mx.array, dtype: str) -> mx.array:
    """The bits of x read as another `dtype` of the same width."""
    return x.view(dtype_of(dtype))


@op
def nan_to_num(
    x: mx.array, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> mx.array:
    """NaN and infinities replaced by finite numbers (the largest of the dtype when None)."""
    return mx.nan_to_num(x, nan, posinf, neginf)


@op
def complex_(real: mx.array, imag: mx.array) -> mx.array:
    """real + i imag, complex64."""
    return real.astype(mx.float32) + 1j * imag.astype(mx.float32)
