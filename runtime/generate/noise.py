"""Random numbers equal to torch's on the CPU, bit for bit, without torch: an image has its seed.

Source: PyTorch 2.13, ATen/core/MT19937RNGEngine.h, ATen/core/TransformationHelper.h,
ATen/core/DistributionsHelper.h, ATen/native/cpu/DistributionTemplates.h (`normal_fill`) and
ATen/native/cpu/avx_mathfun.h; batches as `randn_tensor` of diffusers 0.42.

The reference is torch on x86 with AVX2 or AVX-512. There float32, bfloat16 and float16 normals of
16 values or more are exact: each is a product of two functions of 24 random bits, and all 2**24
values of both were compared. Fewer values, and float64, call libm as torch does: exact with glibc,
not measured on macOS. Where torch has no AVX2 (Apple silicon, old x86) its float32 normals are
others: of 2**20 with ATEN_CPU_CAPABILITY=default 38 % differ, by up to 2.2e-6, and rounded to
bfloat16 121 do. Uniforms and integers are equal everywhere. Older versions may differ in bfloat16
and float16, which they once computed in those types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..dtypes import BY_NAME
from ..errors import MlxconvError

Array: TypeAlias = NDArray[Any]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_HALF = ("bfloat16", "float16")
_BLOCK = 16  # normal_fill: 8 radii, then 8 angles
_CHUNK = 1 << 16  # values transformed at once: at 2**24 values twice as fast as without

_F = np.float32
# avx_mathfun.h: cephes_log_p0..p8; cephes_log_q1, q2; minus_cephes_DP1..3; coscof, sincof
_LOG = np.array(
    [
        *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    ],
    dtype=_F,
)
_LN2 = np.array([-2.12194440e-4, 0.693359375], dtype=_F)
_MINUS_PI_4 = np.array([-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8], dtype=_F)
_COS = np.array([2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2], dtype=_F)
_SIN = np.array([-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1], dtype=_F)
_SQRT_HALF, _FOUR_OVER_PI, _TWO_PI = _F(math.sqrt(0.5)), _F(4 / math.pi), _F(2 * math.pi)
_HALVED, _ONE, _MINUS_TWO = _F(0.5), _F(1), _F(-2)


class Generator:
    """`torch.Generator("cpu").manual_seed(seed)`: draws follow each other as torch's do.

    seed: -2**63 to 2**64 - 1, of which torch uses the lowest 32 bits.
    """

    def __init__(self, seed: int) -> None:
        if not -(2**63) <= seed < 2**64:
            raise MlxconvError(f"seed {seed}: give one from -2**63 to 2**64 - 1, as torch takes")
        self._engine = np.random.RandomState(seed & 0xFFFFFFFF)
        self._next_normal: float | None = None

    def normal(self, shape: Sequence[int], dtype: str = "float32") -> mx.array:
        """`torch.randn(shape, generator=self, dtype=dtype)`: standard normal.

        dtype: float32, bfloat16, float16 or float64; the last is for the CPU alone, as MLX's is.
        """
        return _to_mlx(self._normals(_size(shape), dtype), shape, dtype)

    def uniform(self, shape: Sequence[int], dtype: str = "float32") -> mx.array:
        """`torch.rand(shape, generator=self, dtype=dtype)`: from 0 to below 1."""
        _check(dtype)
        values = _to_mlx(self._uniforms(_size(shape), dtype), shape, dtype)
        return mx.where(values == 1, 0, values) if dtype in _HALF else values

    def integers(self, low: int, high: int, shape: Sequence[int]) -> mx.array:
        """`torch.randint(low, high, shape, generator=self)`: int64, from low to below high."""
        if not 0 < high - low < 2**63:
            raise MlxconvError(f"integers from {low} to below {high}: there are none, or too many")
        size, span = _size(shape), high - low
        bits = self._bits64(size) if span >= 2**28 else self._bits32(size).astype(np.uint64)
        return mx.array((bits % np.uint64(span)).astype(np.int64).reshape(shape) + low)

    def _bits32(self, size: int) -> Array:
        return self._engine.randint(0, 2**32, size, dtype=np.uint32)

    def _bits64(self, size: int) -> Array:
        high, low = self._bits32(2 * size).astype(np.uint64).reshape(-1, 2).T
        return (high << np.uint64(32)) | low

    def _uniforms(self, size: int, dtype: str) -> Array:
        """As many random bits as the significand has: float32's for what is shorter."""
        if dtype == "float64":
            return (self._bits64(size) & np.uint64(2**53 - 1)) * 2.0**-53
        return (self._bits32(size) & np.uint32(2**24 - 1)).astype(np.float32) * _F(2.0**-24)

    def _normals(self, size: int, dtype: str) -> Array:
        _check(dtype)
        if size < _BLOCK:
            return np.array([self._one_normal() for _ in range(size)], dtype=np.float64)
        return self._blocks(size, dtype)

    def _blocks(self, size: int, dtype: str) -> Array:
        """`normal_fill`: where the last block is not whole, the last 16 values are drawn anew."""
        box_muller = _box_muller64 if dtype == "float64" else _box_muller32
        whole = size - size % _BLOCK
        drawn = self._uniforms(whole if dtype in _HALF else size, dtype)[:whole]
        if whole == size:
            return box_muller(drawn)
        last = box_muller(self._uniforms(_BLOCK, dtype))
        return np.concatenate([box_muller(drawn)[: size - _BLOCK], last])

    def _one_normal(self) -> float:
        """`normal_distribution<double>`: makes two, and keeps the second for the next call."""
        if self._next_normal is not None:
            kept, self._next_normal = self._next_normal, None
            return kept
        u1, u2 = self._uniforms(2, "float64").tolist()
        radius, theta = math.sqrt(-2 * math.log1p(-u2)), 2 * math.pi * u1
        self._next_normal = radius * math.sin(theta) + 0.0
        return radius * math.cos(theta) + 0.0


def _size(shape: Sequence[int]) -> int:
    if any(n < 0 for n in shape):
        raise MlxconvError(f"shape {tuple(shape)}: sizes are 0 or more")
    return math.prod(shape)


def _check(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise MlxconvError(f"no random numbers of dtype {dtype!r}: use one of {', '.join(_DTYPES)}")


def _to_mlx(values: Array, shape: Sequence[int], dtype: str) -> mx.array:
    """Rounded to nearest even; by way of float32, as torch's conversions from double are."""
    if dtype != "float64":
        values = values.astype(np.float32, copy=False)
    return mx.array(values.reshape(shape), dtype=BY_NAME[dtype].mlx)


def _box_muller64(uniforms: Array) -> Array:
    """`NormalFill16<double>`, whose functions are libm's: Python's `math`, not NumPy's own."""
    u1, u2 = (uniforms.reshape(-1, 2, 8)[:, part].reshape(-1).tolist() for part in (0, 1))
    radius = np.sqrt(-2 * np.array([math.log(1 - u) for u in u1]))
    theta = [2 * math.pi * u for u in u2]
    waves = np.array([[math.cos(t) for t in theta], [math.sin(t) for t in theta]])
    return _interleaved(radius * waves)


def _box_muller32(uniforms: Array) -> Array:
    """`NormalFill16<float, true>`: each 8 radii and 8 angles make 8 cosines and 8 sines."""
    values = np.empty_like(uniforms)
    for begin in range(0, len(uniforms), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        u1, u2 = uniforms[part].reshape(-1, 2, 8).swapaxes(0, 1).reshape(2, -1)
        radius = np.sqrt(_MINUS_TWO * _log(_ONE - u1))
        values[part] = _interleaved(radius * _cos_sin(_TWO_PI * u2))
    return values


def _interleaved(pairs: Array) -> Array:
    """(2, 8 n) to (16 n,), in blocks of 8; plus torch's mean, which turns -0 to 0."""
    blocks: Array = pairs.reshape(2, -1, 8).swapaxes(0, 1).reshape(-1)
    blocks += 0
    return blocks


def _fma(a: Array | _F, b: Array | _F, c: Array | _F) -> Array:
    """a * b + c in float32, rounded once: GCC contracts the products and sums of avx_mathfun.h.

    The float64 product is exact. Its sum is rounded twice, which no result here shows.
    """
    product: Array = np.multiply(a, b, dtype=np.float64)
    product += c
    return product.astype(np.float32)


def _log(x: Array) -> Array:
    """`log256_ps`, for x > 0."""
    fraction, exponent = np.frexp(x)
    small = fraction < _SQRT_HALF
    e = (exponent - small).astype(np.float32)
    x = (fraction - _ONE) + fraction * small
    z = x * x
    y = _polynomial(_LOG, x) * x
    y = _fma(y, z, e * _LN2[0])
    y = _fma(z, -_HALVED, y)
    return _fma(e, _LN2[1], x + y)


def _cos_sin(x: Array) -> Array:
    """`sincos256_ps`, for x >= 0: (2, n), cosines first."""
    octant = ((x * _FOUR_OVER_PI).astype(np.int32) + 1) & ~1
    y = octant.astype(np.float32)
    for part in _MINUS_PI_4:
        x = _fma(y, part, x)
    z = x * x
    cos = _fma(_polynomial(_COS, z) * z, z, z * -_HALVED) + _ONE
    sin = _fma(_polynomial(_SIN, z) * z, x, x)
    swapped = (octant & 2) != 0
    waves = np.stack([np.where(swapped, sin, cos), np.where(swapped, cos, sin)])
    waves.view(np.uint32)[0] ^= _sign_bit(octant + 2)
    waves.view(np.uint32)[1] ^= _sign_bit(octant)
    return waves


def _sign_bit(octant: Array) -> Array:
    return ((octant & 4) << 29).astype(np.uint32)


def _polynomial(coefficients: Array, x: Array) -> Array:
    value: Array | _F = coefficients[0]
    for coefficient in coefficients[1:]:
        value = _fma(value, x, coefficient)
    return np.asarray(value)
