"""Rows: arrays from nothing."""

import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg

from .builder import TABLE, Builder, Lowering, lowers, out_dtype, shape_of


@lowers("arange")
def _arange(b: Builder, *args: Arg, dtype: Arg = None) -> Arg:
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    return b.emit("arange", start=start, stop=stop, step=step, dtype=out_dtype(b))


@lowers("linspace")
def _linspace(b: Builder, start: Arg, stop: Arg, steps: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("linspace", start=start, stop=stop, count=steps, dtype=out_dtype(b))


@lowers("logspace")
def _logspace(
    b: Builder, start: Arg, stop: Arg, steps: Arg, base: Arg = 10.0, *, dtype: Arg = None
) -> Arg:
    exponent = b.emit("linspace", start=start, stop=stop, count=steps, dtype="float64")
    return b.cast(b.emit("pow", a=base, b=exponent), b.result.dtype)


def _filled(value: Arg) -> Lowering:
    """Rows whose last tuple is the shape: zeros(shape), new_zeros(x, shape), new_empty_strided."""

    def row(b: Builder, *args: Arg, dtype: Arg = None) -> Arg:
        shape = next(a for a in args if isinstance(a, tuple))
        return b.emit("full", shape=shape, value=value, dtype=out_dtype(b))

    return row


def _filled_like(value: Arg) -> Lowering:
    def row(b: Builder, x: Arg, *, dtype: Arg = None) -> Arg:
        return b.emit("full", shape=shape_of(b, x), value=value, dtype=out_dtype(b))

    return row


for _name in ("zeros", "empty", "new_zeros", "new_empty", "empty_permuted", "new_empty_strided"):
    TABLE[_name] = _filled(0)
TABLE["ones"] = TABLE["new_ones"] = _filled(1)
TABLE["zeros_like"] = TABLE["empty_like"] = TABLE["zero"] = _filled_like(0)
TABLE["ones_like"] = _filled_like(1)


@lowers("full", "new_full")
def _full(b: Builder, *args: Arg, dtype: Arg = None) -> Arg:
    shape, value = args[-2:]
    return b.emit("full", shape=shape, value=value, dtype=out_dtype(b))


@lowers("full_like", "fill")
def _full_like(b: Builder, x: Arg, value: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=shape_of(b, x), value=value, dtype=out_dtype(b))


@lowers("scalar_tensor")
def _scalar_tensor(b: Builder, value: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=(), value=value, dtype=out_dtype(b))


@lowers("eye")
def _eye(b: Builder, rows: Arg, columns: Arg = None, *, dtype: Arg = None) -> Arg:
    columns = rows if columns is None else columns
    return b.emit("eye", rows=rows, columns=columns, dtype=out_dtype(b))


@lowers("one_hot")
def _one_hot(b: Builder, x: Arg, classes: Arg = -1) -> Arg:
    if classes == -1:
        raise MlxconvError("one_hot without a number of classes has a data-dependent shape")
    wide = b.emit("expand_dims", x=x, axis=-1)
    every = b.emit("arange", start=0, stop=classes, step=1, dtype="int32")
    return b.cast(b.emit("eq", a=wide, b=every), torch.int64)


@lowers("diag_embed")
def _diag_embed(b: Builder, x: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Arg:
    if offset or {dim1 % (b.rank(x) + 1), dim2 % (b.rank(x) + 1)} != {b.rank(x) - 1, b.rank(x)}:
        raise MlxconvError("diag_embed other than on the diagonal of the last two axes")
    size = shape_of(b, x)[-1]
    diagonal = b.emit("eye", rows=size, columns=size, dtype="bool")
    wide = b.emit("expand_dims", x=x, axis=-1)
    zero = b.emit("full", shape=(), value=0, dtype=out_dtype(b))
    return b.emit("where", condition=diagonal, a=wide, b=zero)
