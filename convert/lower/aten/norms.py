"""Rows: norms and softmax."""

import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg

from .builder import Builder, lowers, shape_of


def _flat_norm(b: Builder, op: str, x: Arg, shape: Arg, affine: dict[str, Arg], eps: Arg) -> Arg:
    """Norms over several trailing axes become norms over one."""
    count = len(shape) if isinstance(shape, tuple) else 1
    if count == 1:
        return b.emit(op, x=x, **affine, eps=eps)
    full = shape_of(b, x)
    flat = b.emit("reshape", x=x, shape=(*full[:-count], -1))
    affine = {
        k: None if v is None else b.emit("reshape", x=v, shape=(-1,)) for k, v in affine.items()
    }
    return b.emit("reshape", x=b.emit(op, x=flat, **affine, eps=eps), shape=full)


@lowers("layer_norm")
def _layer_norm(
    b: Builder,
    x: Arg,
    shape: Arg,
    weight: Arg = None,
    bias: Arg = None,
    eps: Arg = 1e-5,
    cudnn: bool = True,
) -> Arg:
    return _flat_norm(b, "layer_norm", x, shape, {"weight": weight, "bias": bias}, eps)


@lowers("rms_norm")
def _rms_norm(b: Builder, x: Arg, shape: Arg, weight: Arg = None, eps: Arg = None) -> Arg:
    if eps is None:  # PyTorch accumulates in fp32 and takes fp32's epsilon, also for bf16 input
        eps = torch.finfo(torch.float32).eps
    return _flat_norm(b, "rms_norm", x, shape, {"weight": weight}, eps)


@lowers("group_norm")
def _group_norm(
    b: Builder,
    x: Arg,
    groups: int,
    weight: Arg = None,
    bias: Arg = None,
    eps: Arg = 1e-5,
    cudnn: bool = True,
) -> Arg:
    return b.emit("group_norm", x=x, groups=groups, weight=weight, bias=bias, eps=eps)


@lowers("instance_norm")
def _instance_norm(
    b: Builder,
    x: Arg,
    weight: Arg,
    bias: Arg,
    mean: Arg,
    var: Arg,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Arg:
    if not use_input_stats:
        return _per_channel_norm(b, x, weight, bias, mean, var, eps)
    groups = b.value(x).shape[1]
    return b.emit("group_norm", x=x, groups=int(groups), weight=weight, bias=bias, eps=eps)


@lowers("_native_batch_norm_legit_no_training")
def _batch_norm(
    b: Builder, x: Arg, weight: Arg, bias: Arg, mean: Arg, var: Arg, momentum: float, eps: float
) -> Arg:
    # The other results are statistics that only training reads.
    return (_per_channel_norm(b, x, weight, bias, mean, var, eps), None, None)


def _per_channel_norm(
    b: Builder, x: Arg, weight: Arg, bias: Arg, mean: Arg, var: Arg, eps: float
) -> Arg:
    """(x - mean) / sqrt(var + eps) * weight + bias, in fp32 and rounded once."""
    shape = (-1,) + (1,) * (b.rank(x) - 2)

    def per_channel(value: Arg) -> Arg:
        return b.emit("reshape", x=b.cast(value, torch.float32), shape=shape)

    scale: Arg = b.emit("rsqrt", x=b.emit("add", a=per_channel(var), b=eps))
    if weight is not None:
        scale = b.emit("mul", a=scale, b=per_channel(weight))
    y = b.emit("sub", a=b.cast(x, torch.float32), b=per_channel(mean))
    y = b.emit("mul", a=y, b=scale)
    y = y if bias is None else b.emit("add", a=y, b=per_channel(bias))
    return b.emit("cast", x=y, dtype=b.dtype_name(b.value(x).dtype))


@lowers("_weight_norm")
def _weight_norm(b: Builder, v: Arg, g: Arg, dim: int = 0) -> Arg:
    """g v / |v|, the norm over all axes but one (Salimans & Kingma 2016)."""
    axes = tuple(a for a in range(b.rank(v)) if a != dim % b.rank(v))
    squares = b.emit("sum", x=b.emit("square", x=v), axis=axes, keepdims=True)
    return b.emit("mul", a=v, b=b.emit("div", a=g, b=b.emit("sqrt", x=squares)))


@lowers("linalg_vector_norm")
def _vector_norm(
    b: Builder, x: Arg, order: Arg = 2, dim: Arg = None, keepdim: bool = False, *, dtype: Arg = None
) -> Arg:
    size = b.emit("abs", x=b.cast(x, b.result.dtype))
    over = {"axis": (dim,) if isinstance(dim, int) else dim, "keepdims": keepdim}
    if order == 2:
        return b.emit("sqrt", x=b.emit("sum", x=b.emit("square", x=size), **over))
    if order == 1:
        return b.emit("sum", x=size, **over)
    if order in (float("inf"), float("-inf")):
        return b.emit("max" if order == float("inf") else "min", x=size, **over)
    if not isinstance(order, (int, float)) or order == 0:
        raise MlxconvError(f"a norm of order {order} is not supported")
    total = b.emit("sum", x=b.emit("pow", a=size, b=order), **over)
    return b.emit("pow", a=total, b=1 / order)


@lowers("softmax")
def _softmax(b: Builder, x: Arg, dim: int, dtype: Arg = None) -> Arg:
    return b.emit("softmax", x=b.cast(x, b.result.dtype), axis=dim)


@lowers("log_softmax")
def _log_softmax(b: Builder, x: Arg, dim: int, dtype: Arg = None) -> Arg:
    x = b.cast(x, b.result.dtype)
    return b.emit("sub", a=x, b=b.emit("logsumexp", x=x, axis=(dim,), keepdims=True))
