"""Rows: reductions, running sums and sorting."""

import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import Arg

from .builder import TABLE, Builder, Lowering, lowers, target_name


def _reduce(op: str) -> Lowering:
    def row(
        b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False, *, dtype: Arg = None
    ) -> Arg:
        if op in ("sum", "mean", "prod"):
            x = b.cast(x, b.result.dtype)
        if op in ("any", "all"):
            x = b.cast(x, torch.bool)
        axes = None if dim == () else (dim,) if isinstance(dim, int) else dim
        return b.emit(op, x=x, axis=axes, keepdims=keepdim)

    return row


for _aten in ("sum", "mean", "prod", "any", "all", "logsumexp"):
    TABLE[_aten] = _reduce(_aten)
TABLE["amax"], TABLE["amin"] = _reduce("max"), _reduce("min")


def _extreme(op: str) -> Lowering:
    def row(b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False) -> Arg:
        if dim is None:
            return b.emit(op, x=x, axis=None, keepdims=False)
        values = b.emit(op, x=x, axis=(dim,), keepdims=keepdim)
        return (values, b.emit(f"arg{op}", x=x, axis=dim, keepdims=keepdim))

    return row


TABLE["max"], TABLE["min"] = _extreme("max"), _extreme("min")


@lowers("argmax", "argmin")
def _arg_extreme(b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False) -> Arg:
    name = target_name(b.current.target).split(".")[0] if b.current else "argmax"
    return b.emit(name, x=x, axis=dim, keepdims=keepdim)


@lowers("var", "std")
def _var(
    b: Builder, x: Arg, dim: Arg = None, unbiased: Arg = None, keepdim: bool = False, *,
    correction: Arg = 1,
) -> Arg:  # fmt: skip
    if isinstance(unbiased, bool):
        correction = int(unbiased)
    y = b.emit("var", x=x, axis=dim, keepdims=keepdim, ddof=1 if correction is None else correction)
    name = target_name(b.current.target) if b.current else ""
    return b.emit("sqrt", x=y) if name.startswith("std") else y


@lowers("linalg_vector_norm", "norm")
def _vector_norm(
    b: Builder, x: Arg, order: Arg = 2, dim: Arg = None, keepdim: bool = False, *, dtype: Arg = None
) -> Arg:
    if order not in (2, 2.0, 1, 1.0, None):
        raise MlxconvError(f"norm of order {order} is not supported")
    x = b.cast(x, b.result.dtype)
    axes = (dim,) if isinstance(dim, int) else dim
    if order in (1, 1.0):
        return b.emit("sum", x=b.emit("abs", x=x), axis=axes, keepdims=keepdim)
    return b.emit("sqrt", x=b.emit("sum", x=b.emit("square", x=x), axis=axes, keepdims=keepdim))


@lowers("cumsum")
def _cumsum(b: Builder, x: Arg, dim: int, *, dtype: Arg = None) -> Arg:
    return b.emit("cumsum", x=b.cast(x, b.result.dtype), axis=dim)


@lowers("argsort")
def _argsort(b: Builder, x: Arg, dim: Arg = -1, descending: Arg = False, **kwargs: Arg) -> Arg:
    if "stable" in kwargs:  # argsort.stable(x, *, stable, dim, descending)
        dim, descending = kwargs.get("dim", -1), kwargs.get("descending", False)
    return b.emit("argsort", x=x, axis=dim, descending=descending)


@lowers("sort")
def _sort(b: Builder, x: Arg, dim: Arg = -1, descending: Arg = False, **kwargs: Arg) -> Arg:
    order = b.emit("argsort", x=x, axis=dim, descending=descending)
    return (b.emit("take_along", x=x, index=order, axis=dim), order)


@lowers("topk")
def _topk(
    b: Builder, x: Arg, k: Arg, dim: Arg = -1, largest: bool = True, sorted: bool = True
) -> Arg:
    order = b.emit("argsort", x=x, axis=dim, descending=largest)
    best = b.emit("slice", x=order, axis=dim, start=0, stop=k, step=1)
    return (b.emit("take_along", x=x, index=best, axis=dim), best)
