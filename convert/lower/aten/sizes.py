"""Rows: Python's own operators on sizes, and bookkeeping."""

import math
import operator
from collections.abc import Sequence

import torch

from mlxconv.runtime.program.program import Arg

from .builder import TABLE, Builder, Lowering, lowers


def _size_row(op: str) -> Lowering:
    def row(b: Builder, *args: Arg) -> Arg:
        given = [a for a in args if a is not None]  # round(x, None)
        names = ("a", "b") if len(given) == 2 else ("x",)
        return b.emit(op, **dict(zip(names, given, strict=True)))

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
    math.trunc: "trunc",
    round: "size_round",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
    torch.sym_float: "size_float",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
}.items():
    TABLE[f"py.{_python.__name__}"] = _size_row(_op)


@lowers("py.getitem")
def _getitem(b: Builder, xs: Sequence[Arg], index: int) -> Arg:
    return xs[index]


@lowers("sym_size.int")
def _sym_size(b: Builder, x: Arg, axis: int) -> Arg:
    return b.emit("dim", x=x, axis=axis)


@lowers("mlxconv.tap")
def _tap(b: Builder, x: Arg, path: str, index: int) -> Arg:
    b.taps[path][index] = x
    return x


@lowers("mlxconv.enter")
def _enter(b: Builder, x: Arg, call: str, index: int) -> Arg:
    return b.enter(x, call, index)


@lowers("mlxconv.leave")
def _leave(b: Builder, x: Arg, call: str, index: int) -> Arg:
    return b.leave(x, call, index)


@lowers("mlxconv.again")
def _again(b: Builder, inputs: Sequence[Arg], path: str, call: str) -> tuple[Arg, ...]:
    return b.again(inputs, path, call)


@lowers("item")
def _item(b: Builder, x: Arg) -> Arg:
    return b.emit("item", x=x)
