"""Rows: elementwise arithmetic, logic and activations."""

import torch

from mlxconv.runtime.program import Arg

from .builder import TABLE, Builder, Lowering, is_bool, is_float, lowers, promoted, target_name


def _binary(op: str) -> Lowering:
    def row(b: Builder, x: Arg, y: Arg, *, alpha: Arg = 1) -> Arg:
        if alpha != 1:
            y = b.emit("mul", a=y, b=alpha) if not isinstance(y, (int, float)) else y * alpha  # type: ignore[operator]
        x, y = promoted(b, x, y)
        if op in ("add", "mul", "sub") and is_bool(b, x) and is_bool(b, y):
            x = b.cast(x, b.result.dtype)
        return b.emit(op, a=x, b=y)

    return row


for _aten, _op in {
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "mul": "mul",
    "multiply": "mul",
    "maximum": "maximum",
    "minimum": "minimum",
    "max.other": "maximum",
    "min.other": "minimum",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "floor_divide": "floor_div",
    "remainder": "mod",
    "atan2": "arctan2",
    "pow.Tensor_Tensor": "pow",
    "pow.Tensor_Scalar": "pow",
}.items():
    TABLE[_aten] = _binary(_op)


@lowers("pow.Scalar")
def _pow_scalar(b: Builder, base: Arg, exponent: Arg) -> Arg:
    return b.emit("pow", a=base, b=b.cast(exponent, b.result.dtype))


@lowers("div", "true_divide")
def _div(b: Builder, x: Arg, y: Arg, *, rounding_mode: str | None = None) -> Arg:
    x, y = promoted(b, x, y)
    return b.emit(
        {None: "div", "floor": "floor_div", "trunc": "trunc_div"}[rounding_mode], a=x, b=y
    )


@lowers("rsub")
def _rsub(b: Builder, x: Arg, y: Arg, alpha: Arg = 1) -> Arg:
    return _binary("sub")(b, y, x if alpha == 1 else b.emit("mul", a=x, b=alpha))


@lowers("logical_and", "logical_or", "logical_xor", "logical_not")
def _logical(b: Builder, *args: Arg) -> Arg:
    name = target_name(b.current.target).split(".")[0] if b.current else ""
    flags = [b.cast(a, torch.bool) for a in args]
    if name == "logical_not":
        return b.emit("logical_not", x=flags[0])
    if name == "logical_xor":
        return b.emit("ne", a=flags[0], b=flags[1])
    return b.emit(name, a=flags[0], b=flags[1])


@lowers("bitwise_and", "__and__", "bitwise_or", "__or__")
def _bitwise(b: Builder, x: Arg, y: Arg) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    return b.emit("bitwise_and" if "and" in name else "bitwise_or", a=x, b=y)


@lowers("bitwise_not")
def _bitwise_not(b: Builder, x: Arg) -> Arg:
    if is_bool(b, x):
        return b.emit("logical_not", x=x)
    return b.emit("sub", a=-1, b=x)


_UNARY = {
    "acos": "arccos",
    "asin": "arcsin",
    "atan": "arctan",
    "neg": "neg",
    "erf": "erf",
    "sgn": "sign",
    "absolute": "abs",
    "trunc": "trunc",
    **{
        name: name
        for name in [
            "exp",
            "expm1",
            "log",
            "log1p",
            "log2",
            "sin",
            "cos",
            "tan",
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
            "reciprocal",
            "isnan",
            "isinf",
            "isfinite",
            "real",
            "imag",
        ]
    },
}
_FLOATING = {
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "tanh",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "reciprocal",
    "erf",
}


def _unary(op: str) -> Lowering:
    def row(b: Builder, x: Arg) -> Arg:
        value = b.value(x)
        if op in _FLOATING and isinstance(value, torch.Tensor) and not is_float(value):
            x = b.cast(x, b.result.dtype)
        return b.emit(op, x=x)

    return row


for _aten, _op in _UNARY.items():
    TABLE[_aten] = _unary(_op)


@lowers("conj", "_conj", "conj_physical")
def _conj(b: Builder, x: Arg) -> Arg:
    value = b.value(x)
    return b.emit("conjugate", x=x) if value is not None and value.is_complex() else x


@lowers("round")
def _round(b: Builder, x: Arg, *, decimals: int = 0) -> Arg:
    return b.emit("round", x=x, decimals=decimals)


@lowers("silu", "swish")
def _silu(b: Builder, x: Arg) -> Arg:
    return b.emit("silu", x=x)


@lowers("relu")
def _relu(b: Builder, x: Arg) -> Arg:
    return b.emit("relu", x=x)


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


@lowers("hardswish")
def _hardswish(b: Builder, x: Arg) -> Arg:
    return b.emit("hard_swish", x=x)


@lowers("log_sigmoid")
def _log_sigmoid(b: Builder, x: Arg) -> Arg:
    return b.emit("neg", x=b.emit("softplus", x=b.emit("neg", x=x)))


@lowers("glu")
def _glu(b: Builder, x: Arg, dim: int = -1) -> Arg:
    first, gate = b.emit_many("chunk", 2, x=x, chunks=2, axis=dim)
    return b.emit("mul", a=first, b=b.emit("sigmoid", x=gate))


@lowers("clamp", "clip")
def _clamp(b: Builder, x: Arg, min: Arg = None, max: Arg = None) -> Arg:
    return b.emit("clip", x=x, low=min, high=max)


@lowers("clamp_min")
def _clamp_min(b: Builder, x: Arg, low: Arg) -> Arg:
    return b.emit("clip", x=x, low=low, high=None)


@lowers("clamp_max")
def _clamp_max(b: Builder, x: Arg, high: Arg) -> Arg:
    return b.emit("clip", x=x, low=None, high=high)


@lowers("where")
def _where(b: Builder, condition: Arg, x: Arg = None, y: Arg = None) -> Arg:
    x, y = promoted(b, x, y)
    if not any(isinstance(b.value(a), torch.Tensor) for a in (x, y)):
        x = b.emit("full", shape=(), value=x, dtype=b.dtype_name(b.result.dtype))
    return b.emit("where", condition=condition, a=x, b=y)


@lowers("masked_fill")
def _masked_fill(b: Builder, x: Arg, mask: Arg, value: Arg) -> Arg:
    if isinstance(b.value(value), torch.Tensor):
        value = b.cast(value, b.result.dtype)
    return b.emit("where", condition=mask, a=value, b=x)


@lowers("nan_to_num")
def _nan_to_num(b: Builder, x: Arg, nan: Arg = None, posinf: Arg = None, neginf: Arg = None) -> Arg:
    return b.emit("nan_to_num", x=x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@lowers("lerp")
def _lerp(b: Builder, x: Arg, end: Arg, weight: Arg) -> Arg:
    return b.emit("add", a=x, b=b.emit("mul", a=b.emit("sub", a=end, b=x), b=weight))


@lowers("addcmul")
def _addcmul(b: Builder, x: Arg, y: Arg, z: Arg, *, value: Arg = 1) -> Arg:
    product = b.emit("mul", a=y, b=z)
    return b.emit("add", a=x, b=product if value == 1 else b.emit("mul", a=product, b=value))
