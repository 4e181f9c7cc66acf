"""The closed op set: name -> MLX function.

Arrays are `mx.array`; sizes are Python ints and may appear wherever an int does. Shapes in the
docstrings are the tensors' logical (PyTorch) shapes; `...` is any number of axes. Where an op is
named like a function of `mlx.core`, it is that function.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from .errors import MlxconvError

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
_NUMPY = {"float64": np.float64, "float32": np.float32, "int32": np.int32, "bool": np.bool_}


class MatrixWeight(Protocol):
    """What `linear` needs of a weight: dense arrays and quantized weights both provide it."""

    def product(self, x: mx.array) -> mx.array: ...


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


def _ints(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in shape)


def _from_numpy(values: Any, dtype: str) -> mx.array:
    return mx.array(np.asarray(values), dtype=dtype_of(dtype))


# ---- elementwise: also on plain sizes, where noted by Python's own operator ----------------------


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


# ---- products -----------------------------------------------------------------------------------


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


# ---- norms --------------------------------------------------------------------------------------


@op
def layer_norm(
    x: mx.array, weight: mx.array | None = None, bias: mx.array | None = None, eps: float = 1e-5
) -> mx.array:
    """LayerNorm over the last axis."""
    return mx.fast.layer_norm(x, weight, bias, eps)


@op
def rms_norm(x: mx.array, weight: mx.array | None = None, eps: float = 1e-6) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, accumulated in fp32."""
    return mx.fast.rms_norm(x, weight, eps)


@op
def modulated_norm(
    x: mx.array, scale: mx.array, shift: mx.array | None = None, eps: float = 1e-5
) -> mx.array:
    """LayerNorm without weights, times `scale` (already 1 + s), plus `shift` (adaLN)."""
    if scale.size == x.shape[-1] and (shift is None or shift.size == x.shape[-1]):
        flat = None if shift is None else shift.reshape(-1)
        return mx.fast.layer_norm(x, scale.reshape(-1), flat, eps)
    y = mx.fast.layer_norm(x, None, None, eps) * scale
    return y if shift is None else y + shift


@op
def group_norm(
    x: mx.array,
    groups: int,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> mx.array:
    """GroupNorm of x (batch, channels, ...): statistics over each group, in fp32."""
    flat = x.reshape(x.shape[0], groups, -1).astype(mx.float32)
    y = mx.fast.layer_norm(flat, None, None, eps).astype(x.dtype).reshape(x.shape)
    per_channel = (x.shape[1],) + (1,) * (x.ndim - 2)
    if weight is not None:
        y = y * weight.reshape(per_channel)
    return y if bias is None else y + bias.reshape(per_channel)


@op
def softmax(x: mx.array, axis: int = -1) -> mx.array:
    """Softmax along one axis, accumulated in fp32."""
    return mx.softmax(x, axis=axis, precise=True)


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


# ---- reductions ---------------------------------------------------------------------------------


def _reduction(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def reduce(
        x: mx.array, axis: int | Sequence[int] | None = None, keepdims: bool = False
    ) -> mx.array:
        axes = tuple(axis) if isinstance(axis, Sequence) else axis
        return function(
            x, axis=axes or None if isinstance(axes, tuple) else axes, keepdims=keepdims
        )

    return reduce


for _name in ["sum", "mean", "max", "min", "prod", "any", "all", "logsumexp"]:
    OPS[_name] = _reduction(getattr(mx, _name))


@op
def var(
    x: mx.array, axis: Sequence[int] | int | None = None, keepdims: bool = False, ddof: Number = 1
) -> mx.array:
    """Variance with divisor n - ddof."""
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    return mx.var(x, axis=axes, keepdims=keepdims, ddof=int(ddof))


@op
def argmax(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """Index of the first largest element, int32."""
    return mx.argmax(x, axis=axis, keepdims=keepdims).astype(mx.int32)


@op
def argmin(x: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
    """Index of the first smallest element, int32."""
    return mx.argmin(x, axis=axis, keepdims=keepdims).astype(mx.int32)


@op
def cumsum(x: mx.array, axis: int) -> mx.array:
    """Running sum along `axis`."""
    return mx.cumsum(x, axis=axis)


@op
def argsort(x: mx.array, axis: int = -1, descending: bool = False) -> mx.array:
    """Indices that sort x, int32."""
    return mx.argsort(-x if descending else x, axis=axis).astype(mx.int32)


# ---- shapes -------------------------------------------------------------------------------------


@op
def dim(x: mx.array, axis: int) -> int:
    """The size of an axis, as a Python int: computed while the MLX graph is built."""
    return x.shape[axis]


@op
def reshape(x: mx.array, shape: Sequence[int]) -> mx.array:
    """x with `shape`; one size may be -1."""
    return x.reshape(_ints(shape))


@op
def transpose(x: mx.array, axes: Sequence[int]) -> mx.array:
    """Axes in a new order."""
    return x.transpose(*_ints(axes))


@op
def broadcast(x: mx.array, shape: Sequence[int]) -> mx.array:
    """x repeated to `shape`, without a copy; -1 keeps the axis."""
    sizes = _ints(shape)
    own = (1,) * (len(sizes) - x.ndim) + tuple(x.shape)
    return mx.broadcast_to(x, tuple(b if a == -1 else a for a, b in zip(sizes, own)))


@op
def expand_dims(x: mx.array, axis: int) -> mx.array:
    """A new axis of size 1."""
    return mx.expand_dims(x, axis)


@op
def squeeze(x: mx.array, axes: Sequence[int] | None = None) -> mx.array:
    """Axes of size 1 dropped: those named, where they are 1, or all."""
    if axes is None:
        return mx.squeeze(x)
    ones = tuple(a for a in _ints(axes) if x.ndim and x.shape[a] == 1)
    return mx.squeeze(x, ones) if ones else x


@op
def concat(xs: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Arrays joined along an axis; legacy empty 1-D arrays are skipped, as PyTorch does."""
    real = [x for x in xs if x.ndim > 1 or x.size > 0] or list(xs[:1])
    return mx.concatenate(real, axis=axis)


@op
def stack(xs: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Arrays joined along a new axis."""
    return mx.stack(list(xs), axis=axis)


def _slices(x: mx.array, axis: int, index: slice) -> tuple[slice, ...]:
    picked = [slice(None)] * x.ndim
    picked[axis] = index
    return tuple(picked)


@op
def slice_(
    x: mx.array, axis: int, start: int | None = None, stop: int | None = None, step: int = 1
) -> mx.array:
    """x[start:stop:step] along an axis, clamped as in Python."""
    size = x.shape[axis]
    return x[_slices(x, axis, slice(*slice(start, stop, step).indices(size)))]


@op
def slice_update(
    x: mx.array,
    update: mx.array,
    axis: int,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> mx.array:
    """x with x[start:stop:step] along an axis replaced by `update`."""
    y = mx.array(x)
    where = slice(*slice(start, stop, step).indices(x.shape[axis]))
    y[_slices(x, axis, where)] = update.astype(x.dtype)
    return y


@op
def select(x: mx.array, axis: int, index: int) -> mx.array:
    """x[index] along an axis, which is dropped."""
    picked: list[Any] = [slice(None)] * x.ndim
    picked[axis] = int(index)
    return x[tuple(picked)]


@op
def split(x: mx.array, sizes: Sequence[int], axis: int = 0) -> list[mx.array]:
    """Consecutive pieces of the sizes given."""
    bounds = np.cumsum(_ints(sizes))[:-1].tolist()
    return list(mx.split(x, bounds, axis=axis)) if bounds else [x]


@op
def split_every(x: mx.array, size: int, axis: int = 0) -> list[mx.array]:
    """Consecutive pieces of `size`, the last one smaller."""
    bounds = list(range(size, x.shape[axis], size))
    return list(mx.split(x, bounds, axis=axis)) if bounds else [x]


@op
def chunk(x: mx.array, chunks: int, axis: int = 0) -> list[mx.array]:
    """At most `chunks` pieces of equal size, the last one smaller."""
    return split_every(x, max(1, -(-x.shape[axis] // chunks)), axis)  # type: ignore[no-any-return]


@op
def unbind(x: mx.array, axis: int = 0) -> list[mx.array]:
    """All slices along an axis, which is dropped."""
    return [mx.squeeze(y, axis) for y in mx.split(x, x.shape[axis], axis=axis)]


@op
def item_of(xs: Sequence[Any], index: int) -> Any:
    """One of several values."""
    return xs[index]


@op
def tile(x: mx.array, repeats: Sequence[int]) -> mx.array:
    """x laid side by side."""
    return mx.tile(x, _ints(repeats))


@op
def repeat(x: mx.array, repeats: int, axis: int | None = None) -> mx.array:
    """Each element repeated along an axis (flattened when None)."""
    return mx.repeat(x, int(repeats), axis)


@op
def flip(x: mx.array, axes: Sequence[int]) -> mx.array:
    """Reversed along axes."""
    reversed_axes = {a % x.ndim for a in _ints(axes)}
    return x[tuple(slice(None, None, -1 if i in reversed_axes else 1) for i in range(x.ndim))]


@op
def roll(x: mx.array, shifts: Sequence[int], axes: Sequence[int]) -> mx.array:
    """Elements moved around along axes."""
    return mx.roll(x, _ints(shifts), _ints(axes)) if axes else mx.roll(x, _ints(shifts))


@op
def pad(
    x: mx.array, widths: Sequence[Sequence[int]], mode: str = "constant", value: Number = 0
) -> mx.array:
    """x padded by (before, after) per axis; negative widths crop. Modes as PyTorch's `F.pad`."""
    pairs = [(int(a), int(b)) for a, b in widths]
    for axis, (before, after) in enumerate(pairs):
        if before < 0 or after < 0:
            size = x.shape[axis]
            x = x[_slices(x, axis, slice(max(0, -before), size - max(0, -after)))]
    pairs = [(max(0, a), max(0, b)) for a, b in pairs]
    if mode == "constant":
        return mx.pad(x, pairs, constant_values=mx.array(value, x.dtype))
    if mode == "replicate":
        return mx.pad(x, pairs, mode="edge")
    for axis, (before, after) in enumerate(pairs):
        if before or after:
            index = _border_index(x.shape[axis], before, after, mode)
            x = mx.take(x, index, axis=axis)
    return x


def _border_index(size: int, before: int, after: int, mode: str) -> mx.array:
    position = np.arange(-before, size + after)
    if mode == "circular":
        return mx.array(position % size)
    period = max(1, 2 * (size - 1))
    folded = np.abs(position) % period
    return mx.array(np.where(folded >= size, period - folded, folded))


@op
def take(x: mx.array, index: mx.array, axis: int) -> mx.array:
    """Slices of x along an axis by a 1-D index."""
    return mx.take(x, index, axis=axis)


@op
def take_along(x: mx.array, index: mx.array, axis: int) -> mx.array:
    """PyTorch's `gather`: index has x's rank and may be smaller along other axes."""
    for i in range(x.ndim):
        if i != axis % x.ndim and index.shape[i] < x.shape[i]:
            x = x[_slices(x, i, slice(0, index.shape[i]))]
    return mx.take_along_axis(x, index, axis=axis)


@op
def index(x: mx.array, indices: Sequence[mx.array | None]) -> mx.array:
    """Advanced indexing; None keeps an axis."""
    return x[tuple(slice(None) if i is None else i for i in indices)]


@op
def index_put(
    x: mx.array, indices: Sequence[mx.array | None], values: mx.array, accumulate: bool = False
) -> mx.array:
    """x with x[indices] replaced by, or increased by, values."""
    where = tuple(slice(None) if i is None else i for i in indices)
    if accumulate:
        return x.at[where].add(values)
    y = mx.array(x)
    y[where] = values
    return y


@op
def triu(x: mx.array, k: int = 0) -> mx.array:
    """The upper triangle of the last two axes, zero elsewhere."""
    return mx.triu(x, k)


@op
def tril(x: mx.array, k: int = 0) -> mx.array:
    """The lower triangle of the last two axes, zero elsewhere."""
    return mx.tril(x, k)


# ---- images -------------------------------------------------------------------------------------


def _nearest_index(size: int, out: int, scale: float | None, exact: bool) -> mx.array:
    ratio = 1 / scale if scale else size / out
    position = np.arange(out, dtype=np.float32)
    picked = np.floor((position + (0.5 if exact else 0.0)) * np.float32(ratio))
    return mx.array(np.clip(picked, 0, size - 1).astype(np.int32))


@op
def upsample_nearest(
    x: mx.array,
    sizes: Sequence[int] | None,
    scales: Sequence[float] | None = None,
    exact: bool = False,
) -> mx.array:
    """x (batch, channels, *size) resampled to `sizes`, or by `scales`, by the nearest element."""
    first = x.ndim - len(sizes if sizes is not None else scales or ())
    for i, axis in enumerate(range(first, x.ndim)):
        size = x.shape[axis]
        scale = scales[i] if scales is not None else None
        out = int(sizes[i]) if sizes is not None else math.floor(size * (scale or 1))
        if out % size == 0 and scale in (None, out / size):
            x = mx.repeat(x, out // size, axis) if out != size else x
        else:
            x = mx.take(x, _nearest_index(size, out, scale, exact), axis=axis)
    return x


def _bilinear_matrix(size: int, out: int, scale: float | None, align_corners: bool) -> mx.array:
    target = np.arange(out, dtype=np.float64)
    if align_corners:
        source = target * ((size - 1) / (out - 1) if out > 1 else 0.0)
    else:
        source = np.maximum((target + 0.5) * (1 / scale if scale else size / out) - 0.5, 0)
    low = np.minimum(source.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    matrix = np.zeros((size, out), np.float32)
    np.add.at(matrix, (low, np.arange(out)), 1 - (source - low))
    np.add.at(matrix, (high, np.arange(out)), source - low)
    return mx.array(matrix)


@op
def upsample_linear(
    x: mx.array,
    sizes: Sequence[int] | None,
    scales: Sequence[float] | None = None,
    align_corners: bool = False,
) -> mx.array:
    """x (batch, channels, *size) resampled linearly along each axis (bilinear, trilinear)."""
    count = len(sizes if sizes is not None else scales or ())
    for i in range(count):
        axis = x.ndim - count + i
        scale = scales[i] if scales is not None else None
        out = int(sizes[i]) if sizes is not None else math.floor(x.shape[axis] * (scale or 1))
        matrix = _bilinear_matrix(x.shape[axis], out, scale, align_corners).astype(x.dtype)
        x = mx.moveaxis(mx.moveaxis(x, axis, -1) @ matrix, -1, axis)
    return x


@op
def avg_pool(
    x: mx.array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = ()
) -> mx.array:
    """Mean over windows of the last axes, padding counted."""
    return _pool(x, kernel, stride, padding, mx.mean, 0)


@op
def max_pool(
    x: mx.array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = ()
) -> mx.array:
    """Largest over windows of the last axes."""
    return _pool(x, kernel, stride, padding, mx.max, -math.inf)


def _pool(
    x: mx.array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    reduce: Callable[..., mx.array],
    border: float,
) -> mx.array:
    n = len(kernel)
    steps, edges = tuple(stride) or tuple(kernel), tuple(padding) or (0,) * n
    x = mx.pad(x, [(0, 0)] * (x.ndim - n) + [(p, p) for p in edges], constant_values=border)
    for i, (width, step) in enumerate(zip(kernel, steps)):
        axis = x.ndim - n + i
        starts = np.arange(0, x.shape[axis] - width + 1, step)
        windows = mx.array(starts[:, None] + np.arange(width)[None])
        x = reduce(mx.take(x, windows, axis=axis), axis=axis + 1)
    return x


# ---- creation -----------------------------------------------------------------------------------


@op
def full(shape: Sequence[int], value: Value, dtype: str) -> mx.array:
    """An array of one value."""
    return mx.full(_ints(shape), value, dtype=dtype_of(dtype))


@op
def arange(start: Number, stop: Number, step: Number, dtype: str) -> mx.array:
    """start, start + step, ... below stop, computed in float64 as PyTorch does."""
    return _from_numpy(np.arange(start, stop, step), dtype)


@op
def linspace(start: float, stop: float, count: int, dtype: str) -> mx.array:
    """`count` evenly spaced numbers from start to stop, both included."""
    return _from_numpy(np.linspace(start, stop, int(count)), dtype)


@op
def eye(rows: int, columns: int, dtype: str) -> mx.array:
    """Ones on the diagonal."""
    return mx.eye(int(rows), int(columns), dtype=dtype_of(dtype))
