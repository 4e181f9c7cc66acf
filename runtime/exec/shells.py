"""Weights apart from their arrays, so that one compiled function serves all of one make."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .weights import Held, Stack, arrays_of, rebuild, spec_of


def make_of(held: Any) -> Any:
    if isinstance(held, Stack):
        whole = None if held.stacked is None else spec_of(held.stacked)
        return ("stack", held.stacked is None, whole, *(h is not None and make_of(h) for h in held))
    return (spec_of(held), [a.dtype for a in arrays_of(held)].__repr__())


def shell_of(held: Any) -> Callable[[list[mx.array]], tuple[Any, list[mx.array]]]:
    """A function that rebuilds a weight of this make from the front of a list of arrays."""
    if isinstance(held, Stack) and held.stacked is not None:
        inner, bounds, count = shell_of(held.stacked), held.bounds, len(held)

        def stacked(arrays: list[mx.array]) -> tuple[Any, list[mx.array]]:
            stack = Stack((None,) * count)
            stack.bounds = bounds
            stack.stacked, rest = inner(arrays)
            return stack, rest

        return stacked
    if isinstance(held, Stack):
        shells = [None if h is None else shell_of(h) for h in held]

        def separate(arrays: list[mx.array]) -> tuple[Any, list[mx.array]]:
            items = []
            for shell in shells:
                item, arrays = (None, arrays) if shell is None else shell(arrays)
                items.append(item)
            return Stack(items), arrays

        return separate
    count, make = len(arrays_of(held)), _bare(held)
    return lambda arrays: (rebuild(make, arrays[:count]), arrays[count:])


def _bare(held: Held) -> Held:
    """A stand-in with the same spec and no data."""
    empty = mx.zeros(())
    return empty if isinstance(held, mx.array) else rebuild(held, [empty] * len(held.arrays()))
