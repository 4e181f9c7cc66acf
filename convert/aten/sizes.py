"""Rows: Python's own operators on sizes, and bookkeeping."""

import math
import operator

import torch

from mlxconv.runtime.program import Arg

from .builder import TABLE, Builder, Lowering, lowers


def _size_row(op: str) -> Lowering:
    def row(b: Builder, *args: Arg) -> Arg:
        names = ("a", "b") if len(args) == 2 else ("x",)
        return b.emit(op, **dict(zip(names, args, strict=True)))

    return row


for _python, _op in {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floor_div",
    operator.truediv: "div",
    operator.mod: "mod",
    operator.pow: "pow",
    operator.neg: "neg",
    math.floor: "size_floor",
    math.ceil: "size_ceil",
    math.trunc: "size_floor",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
    torch.sym_float: "size_float",
    torch.sym_int: "size_floor",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
}.items():
    TABLE[f"py.{_python.__name__}"] = _size_row(_op)
TABLE["py._sym_sqrt"] = TABLE["py.sym_sqrt"] = _size_row("size_sqrt")


@lowers("py.getitem")
def _getitem(b: Builder, xs: Arg, index: int) -> Arg:
    return xs[index] if isinstance(xs, tuple) else b.emit("item_of", xs=xs, index=index)


@lowers("sym_size.int")
def _sym_size(b: Builder, x: Arg, axis: int) -> Arg:
    return b.emit("dim", x=x, axis=axis)


@lowers("sym_numel")
def _sym_numel(b: Builder, x: Arg) -> Arg:
    total: Arg = 1
    for axis in range(b.rank(x)):
        total = b.emit("mul", a=total, b=b.emit("dim", x=x, axis=axis))
    return total


@lowers("mlxconv.tap")
def _tap(b: Builder, x: Arg, path: str, index: int) -> Arg:
    b.taps[path][index] = x
    return x


@lowers("_local_scalar_dense", "item")
def _item(b: Builder, x: Arg) -> Arg:
    return b.emit("item", x=x)
