"""Rows: elementwise arithmetic, logic and activations."""

import torch

from mlxconv.runtime.program.program import Arg

from .builder import TABLE, Builder, Lowering, is_bool, is_floating, lowers, promoted

# ---- one argument -------------------------------------------------------------------------------

# Ops that make floats of integers.
_FLOATING = {
    name: name
    for name in """exp expm1 log log10 log1p log2 sin cos tan sinh cosh tanh sqrt rsqrt sigmoid
    reciprocal erf""".split()
} | {
    "acos": "arccos",
    "arccos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "arcsin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "arctan": "arctan",
    "atanh": "arctanh",
    "special_expit": "sigmoid",
}
# Ops that do nothing to integers.
_ROUNDING = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "fix": "trunc"}
_PLAIN = {name: name for name in "neg square abs sign isnan isinf isfinite relu silu".split()} | {
    "negative": "neg",
    "absolute": "abs",
    "sgn": "sign",
    "hardswish": "hard_swish",
}


def _plain(op: str) -> Lowering:
    def row(b: Builder, x: Arg) -> Arg:
        return b.emit(op, x=x)

    return row


def _floating(op: str) -> Lowering:
    def row(b: Builder, x: Arg) -> Arg:
        return b.emit(op, x=x if is_floating(b, x) else b.cast(x, b.result.dtype))

    return row


def _rounding(op: str) -> Lowering:
    def row(b: Builder, x: Arg) -> Arg:
        return b.emit(op, x=x) if is_floating(b, x) else x

    return row


TABLE.update({name: _plain(op) for name, op in _PLAIN.items()})
TABLE.update({name: _floating(op) for name, op in _FLOATING.items()})
TABLE.update({name: _rounding(op) for name, op in _ROUNDING.items()})


@lowers("round")
def _round(b: Builder, x: Arg, *, decimals: int = 0) -> Arg:
    return b.emit("round", x=x, decimals=decimals) if is_floating(b, x) else x


@lowers("frac")
def _frac(b: Builder, x: Arg) -> Arg:
    return b.emit("sub", a=x, b=b.emit("trunc", x=x))


@lowers("exp2")
def _exp2(b: Builder, x: Arg) -> Arg:
    return b.emit("pow", a=2.0, b=b.cast(x, b.result.dtype))


@lowers("logit")
def _logit(b: Builder, x: Arg, eps: Arg = None) -> Arg:
    if isinstance(eps, float):
        x = b.emit("clip", x=x, low=eps, high=1 - eps)
    return b.emit("log", x=b.emit("div", a=x, b=b.emit("sub", a=1, b=x)))


@lowers("nan_to_num")
def _nan_to_num(b: Builder, x: Arg, nan: Arg = None, posinf: Arg = None, neginf: Arg = None) -> Arg:
    if not is_floating(b, x):
        return x
    return b.emit("nan_to_num", x=x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


# ---- two arguments ------------------------------------------------------------------------------


def _binary(op: str) -> Lowering:
    def row(b: Builder, x: Arg, y: Arg) -> Arg:
        x, y = promoted(b, x, y)
        return b.emit(op, a=x, b=y)

    return row


for _op, _names in {
    "mod": "remainder",
    "fmod": "fmod",
    "floor_div": "floor_divide",
    "maximum": "maximum max.other",
    "minimum": "minimum min.other",
    "logaddexp": "logaddexp",
    "eq": "eq",
    "ne": "ne not_equal",
    "lt": "lt less",
    "le": "le less_equal",
    "gt": "gt greater",
    "ge": "ge greater_equal",
    "bitwise_and": "bitwise_and __and__",
    "bitwise_or": "bitwise_or __or__",
    "bitwise_xor": "bitwise_xor __xor__",
    "left_shift": "bitwise_left_shift __lshift__",
    "right_shift": "bitwise_right_shift __rshift__",
}.items():
    TABLE.update(dict.fromkeys(_names.split(), _binary(_op)))


def _scaled(b: Builder, y: Arg, alpha: Arg) -> Arg:
    if isinstance(alpha, (int, float)) and isinstance(y, (int, float)):
        return y * alpha
    return y if alpha == 1 else b.emit("mul", a=y, b=alpha)


def _sum(op: str, logical: str) -> Lowering:
    def row(b: Builder, x: Arg, y: Arg, *, alpha: Arg = 1) -> Arg:
        if is_bool(b, x) and is_bool(b, y):
            return b.emit(logical, a=x, b=y)
        x, y = promoted(b, x, _scaled(b, y, alpha))
        return b.emit(op, a=x, b=y)

    return row


TABLE["add"] = _sum("add", "logical_or")
TABLE["mul"] = TABLE["multiply"] = _sum("mul", "logical_and")
# PyTorch refuses to subtract booleans.
TABLE["sub"] = TABLE["subtract"] = _sum("sub", "ne")


@lowers("rsub")
def _rsub(b: Builder, x: Arg, y: Arg, alpha: Arg = 1) -> Arg:
    x, y = promoted(b, _scaled(b, x, alpha), y)
    return b.emit("sub", a=y, b=x)


@lowers("div", "divide", "true_divide")
def _div(b: Builder, x: Arg, y: Arg, *, rounding_mode: str | None = None) -> Arg:
    x, y = promoted(b, x, y)
    op = {None: "div", "floor": "floor_div", "trunc": "trunc_div"}[rounding_mode]
    return b.emit(op, a=x, b=y)


@lowers("pow")
def _pow(b: Builder, x: Arg, y: Arg) -> Arg:
    """Integers meeting a float exponent, and numbers as bases, take the result's dtype first."""
    x, y = promoted(b, x, y)
    if not isinstance(b.value(x), torch.Tensor):
        y = b.cast(y, b.result.dtype)
    else:
        x = b.cast(x, b.result.dtype)
    return b.emit("pow", a=x, b=y)


@lowers("atan2", "arctan2")
def _atan2(b: Builder, y: Arg, x: Arg) -> Arg:
    y, x = promoted(b, y, x)
    dtype = b.result.dtype
    return b.emit("arctan2", a=b.cast(y, dtype), b=b.cast(x, dtype))


@lowers("hypot")
def _hypot(b: Builder, x: Arg, y: Arg) -> Arg:
    total = b.emit("add", a=b.emit("square", x=x), b=b.emit("square", x=y))
    return b.emit("sqrt", x=total)


def _logical(op: str) -> Lowering:
    def row(b: Builder, x: Arg, y: Arg) -> Arg:
        return b.emit(op, a=b.cast(x, torch.bool), b=b.cast(y, torch.bool))

    return row


TABLE["logical_and"] = _logical("logical_and")
TABLE["logical_or"] = _logical("logical_or")
TABLE["logical_xor"] = _logical("ne")


@lowers("logical_not")
def _logical_not(b: Builder, x: Arg) -> Arg:
    return b.emit("logical_not", x=b.cast(x, torch.bool))


@lowers("bitwise_not")
def _bitwise_not(b: Builder, x: Arg) -> Arg:
    # In two's complement the inverse of x is -1 - x.
    return b.emit("logical_not", x=x) if is_bool(b, x) else b.emit("sub", a=-1, b=x)


# ---- activations --------------------------------------------------------------------------------


@lowers("gelu")
def _gelu(b: Builder, x: Arg, *, approximate: str = "none") -> Arg:
    return b.emit("gelu", x=x, approximate=approximate == "tanh")


@lowers("softplus")
def _softplus(b: Builder, x: Arg, beta: Arg = 1, threshold: Arg = 20) -> Arg:
    return b.emit("softplus", x=x, beta=beta, threshold=threshold)


@lowers("leaky_relu")
def _leaky_relu(b: Builder, x: Arg, slope: Arg = 0.01) -> Arg:
    return b.emit("leaky_relu", x=x, slope=slope)


@lowers("elu")
def _elu(b: Builder, x: Arg, alpha: Arg = 1) -> Arg:
    return b.emit("elu", x=x, alpha=alpha)


@lowers("celu")
def _celu(b: Builder, x: Arg, alpha: Arg = 1.0) -> Arg:
    return b.emit("mul", a=b.emit("elu", x=b.emit("div", a=x, b=alpha), alpha=1), b=alpha)


@lowers("selu")
def _selu(b: Builder, x: Arg) -> Arg:
    # Klambauer et al. 2017, the constants of torch.nn.SELU.
    return b.emit("mul", a=b.emit("elu", x=x, alpha=1.6732632423543772), b=1.0507009873554805)


@lowers("mish")
def _mish(b: Builder, x: Arg) -> Arg:
    return b.emit("mul", a=x, b=b.emit("tanh", x=b.emit("softplus", x=x)))


@lowers("hardsigmoid")
def _hardsigmoid(b: Builder, x: Arg) -> Arg:
    return b.emit("div", a=b.emit("clip", x=b.emit("add", a=x, b=3), low=0, high=6), b=6)


@lowers("relu6")
def _relu6(b: Builder, x: Arg) -> Arg:
    return b.emit("clip", x=x, low=0, high=6)


@lowers("hardtanh")
def _hardtanh(b: Builder, x: Arg, low: Arg = -1, high: Arg = 1) -> Arg:
    return b.emit("clip", x=x, low=low, high=high)


@lowers("log_sigmoid")
def _log_sigmoid(b: Builder, x: Arg) -> Arg:
    return b.emit("neg", x=b.emit("softplus", x=b.emit("neg", x=x)))


@lowers("threshold")
def _threshold(b: Builder, x: Arg, threshold: Arg, value: Arg) -> Arg:
    return b.emit("where", condition=b.emit("gt", a=x, b=threshold), a=x, b=value)


@lowers("prelu")
def _prelu(b: Builder, x: Arg, weight: Arg) -> Arg:
    slope = b.emit("reshape", x=weight, shape=(-1, *[1] * (b.rank(x) - 2)))
    below = b.emit("mul", a=x, b=slope)
    return b.emit("where", condition=b.emit("gt", a=x, b=0), a=x, b=below)


@lowers("glu")
def _glu(b: Builder, x: Arg, dim: int = -1) -> Arg:
    first, gate = b.emit_many("chunk", 2, x=x, chunks=2, axis=dim)
    return b.emit("mul", a=first, b=b.emit("sigmoid", x=gate))


# ---- limits and choices -------------------------------------------------------------------------


@lowers("clamp", "clip")
def _clamp(b: Builder, x: Arg, min: Arg = None, max: Arg = None) -> Arg:
    x, min, max = (a if a is None else b.cast_tensor(a, b.result.dtype) for a in (x, min, max))
    return b.emit("clip", x=x, low=min, high=max)


@lowers("clamp_min")
def _clamp_min(b: Builder, x: Arg, low: Arg) -> Arg:
    return _clamp(b, x, low, None)


@lowers("clamp_max")
def _clamp_max(b: Builder, x: Arg, high: Arg) -> Arg:
    return _clamp(b, x, None, high)


@lowers("where")
def _where(b: Builder, condition: Arg, x: Arg, y: Arg) -> Arg:
    x, y = (b.cast_tensor(a, b.result.dtype) for a in (x, y))
    if not any(isinstance(b.value(a), torch.Tensor) for a in (x, y)):
        x = b.emit("full", shape=(), value=x, dtype=b.dtype_name(b.result.dtype))
    return b.emit("where", condition=b.cast(condition, torch.bool), a=x, b=y)


@lowers("masked_fill")
def _masked_fill(b: Builder, x: Arg, mask: Arg, value: Arg) -> Arg:
    return b.emit("where", condition=mask, a=b.cast_tensor(value, b.result.dtype), b=x)


@lowers("lerp")
def _lerp(b: Builder, x: Arg, end: Arg, weight: Arg) -> Arg:
    return b.emit("add", a=x, b=b.emit("mul", a=b.emit("sub", a=end, b=x), b=weight))


def _added(op: str) -> Lowering:
    def row(b: Builder, x: Arg, y: Arg, z: Arg, *, value: Arg = 1) -> Arg:
        return b.emit("add", a=x, b=_scaled(b, b.emit(op, a=y, b=z), value))

    return row


TABLE["addcmul"], TABLE["addcdiv"] = _added("mul"), _added("div")
