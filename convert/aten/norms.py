"""Rows: norms and softmax."""

import torch

from mlxconv.runtime.program import Arg

from .builder import Builder, lowers, shape_of


def _flat_norm(b: Builder, op: str, x: Arg, shape: Arg, affine: dict[str, Arg], eps: Arg) -> Arg:
    """Norms over several trailing axes become norms over one."""
    count = len(shape)  # type: ignore[arg-type]
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
    b: Builder, x: Arg, shape: Arg, weight: Arg = None, bias: Arg = None, eps: Arg = 1e-5,
    cudnn: bool = True,
) -> Arg:  # fmt: skip
    return _flat_norm(b, "layer_norm", x, shape, {"weight": weight, "bias": bias}, eps)


@lowers("rms_norm")
def _rms_norm(b: Builder, x: Arg, shape: Arg, weight: Arg = None, eps: Arg = None) -> Arg:
    if eps is None:  # PyTorch accumulates in fp32 and takes fp32's epsilon, also for bf16 input
        eps = torch.finfo(torch.float32).eps
    return _flat_norm(b, "rms_norm", x, shape, {"weight": weight}, eps)


@lowers("group_norm")
def _group_norm(
    b: Builder, x: Arg, groups: int, weight: Arg = None, bias: Arg = None, eps: Arg = 1e-5,
    cudnn: bool = True,
) -> Arg:  # fmt: skip
    return b.emit("group_norm", x=x, groups=groups, weight=weight, bias=bias, eps=eps)


@lowers("batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(b: Builder, x: Arg, weight: Arg, bias: Arg, mean: Arg, var: Arg, *args: Arg) -> Arg:
    eps = args[-2] if len(args) > 2 else args[-1]
    shape = (-1,) + (1,) * (b.rank(x) - 2)

    def per_channel(value: Arg) -> Arg:
        return b.emit("reshape", x=value, shape=shape)

    scale: Arg = b.emit("rsqrt", x=b.emit("add", a=per_channel(var), b=eps))
    y = b.emit("mul", a=b.emit("sub", a=x, b=per_channel(mean)), b=scale)
    if weight is not None:
        y = b.emit("mul", a=y, b=per_channel(weight))
    return y if bias is None else b.emit("add", a=y, b=per_channel(bias))


@lowers("softmax", "_softmax")
def _softmax(b: Builder, x: Arg, dim: int, dtype: Arg = None) -> Arg:
    return b.emit("softmax", x=b.cast(x, b.result.dtype), axis=dim)
