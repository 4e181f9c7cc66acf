"""Sizes known to torch.export as multiples (2.13: `torch.export._trace.make_fake_inputs`)."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.export import _trace
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .replaced import replaced

# An axis of an argument: the keys that lead to the tensor, and the axis' number.
Axis = tuple[tuple[str | int, ...], int]


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

    with replaced((_trace, "make_fake_inputs", made)):
        yield


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
