"""Sizes that a recipe declares as multiples, known to torch as such.

torch.export has an opaque symbol ``s`` for each free axis. Where a recipe's shape is a number times
a dim, ``32 * rows``, it becomes ``32 * r`` before anything is traced: halved five times by
convolutions it is ``r``, not ``(s - 1) // 32 + 1``. DC-AE's trace takes half the time.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.export import _trace
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..recipe.recipe import Expression, evaluate, names_in

# An axis of an argument: the keys that lead to the tensor, and the axis' number.
Axis = tuple[tuple[str | int, ...], int]


def multiple(
    expression: Expression, free: Collection[str], names: Mapping[str, Any]
) -> tuple[int, str] | None:
    """``(32, "rows")`` for ``32 * rows``: a product of one free dim and a number above 1.

    ``names`` has the values of all but the free dims. None for any other expression.
    """
    factors = list(_factors(ast.parse(str(expression), mode="eval").body))
    dims = [factor for factor in factors if names_in(factor) & set(free)]
    if len(dims) != 1 or dims[0] not in free:
        return None
    factors.remove(dims[0])
    by = math.prod(int(evaluate(factor, names)) for factor in factors)
    return (by, dims[0]) if by > 1 else None


def _factors(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    else:
        yield ast.unparse(node)


@contextlib.contextmanager
def known_multiples(axes: Mapping[Axis, int]) -> Iterator[None]:
    """Inside, torch.export knows what divides these axes of the keyword arguments."""
    make: Callable[..., Any] = vars(_trace)["make_fake_inputs"]

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        mode, positional, keywords, equalities, *rest = make(*args, **options)
        for (path, axis), by in axes.items():
            size = functools.reduce(operator.getitem, path, keywords).shape[axis]
            place = "".join(f"[{key!r}]" for key in path)
            whole = _divided(mode.shape_env, size, by, f"L{place}.size()[{axis}] // {by}")
            # Known to torch by its source: no input has this size.
            equalities.phantom_symbols.extend(whole)
        return mode, positional, keywords, equalities, *rest

    vars(_trace)["make_fake_inputs"] = made
    try:
        yield
    finally:
        vars(_trace)["make_fake_inputs"] = make


def _divided(shapes: ShapeEnv, size: int | torch.SymInt, by: int, source: str) -> tuple[Any, ...]:
    """The symbol of ``size // by``, of which ``size`` is the multiple from now on."""
    if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
        return ()
    value = int(size.node.hint) // by
    if value < 2:  # torch takes 0 and 1 for constants
        return ()
    symbol = shapes.create_symbol(
        value, ConstantSource(f"({source})"), DimDynamic.DYNAMIC, constraint_dim=None
    )
    shapes._set_replacement(size.node.expr, by * symbol, "multiple")
    return (symbol,)
