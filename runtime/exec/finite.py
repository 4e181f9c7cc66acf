"""Values that are not finite: whether there are any, and at which node of a program they begin."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import MlxconvError
from ..program.program import Node, weights
from .steps import observed
from .strips import Strips
from .weights import QuantizedWeight, Stack, arrays_of

HALF_MAX = 65504.0  # the largest float16


class NotFinite(MlxconvError):
    """A computation gave NaN or infinity."""


def is_finite(*arrays: mx.array) -> mx.array:
    """A lazy boolean (): no NaN and no infinity in any of the floating-point arrays."""
    found = mx.array(True)
    for array in floats(arrays):
        found = mx.logical_and(found, mx.all(mx.isfinite(array)))
    return found


def check_finite(
    arrays: Mapping[str, mx.array], again: Callable[[], Any], dtype: mx.Dtype | None = None
) -> None:
    """Raise NotFinite where one of these arrays is not finite.

    again: repeats the computation, to name the node at which it begins. dtype: in which it was
    computed, if not that of the arrays.
    """
    for name, array in arrays.items():
        if not is_finite(array).item():
            raise NotFinite(f"{name}: NaN or infinity{explained(again, dtype or array.dtype)}")


def explained(again: Callable[[], Any], dtype: mx.Dtype) -> str:
    """The end of an error message: where a repeated run first goes wrong, and what to do."""
    where = first_fault(again)
    found = "" if where is None else f", which begins at {where}"
    if dtype == mx.float16:
        return (
            f"{found}; float16 ends at {HALF_MAX:,.0f}: run in bfloat16 (--dtype bfloat16, in "
            'Python dtype="bfloat16")'
        )
    return f"{found}; `mlxconv verify` compares the bundle with its checkpoint"


class _Fault(Exception):
    """Ends a repeated run: its message is the place."""


def first_fault(run: Callable[[], Any]) -> str | None:
    """The first node of a run that makes NaN or infinity of values without any.

    Minus infinity alone does not count: masks are made of it, and logarithms of zero. None: nothing
    was found this time.
    """

    def see(node: Node, path: str, args: Mapping[str, Any], result: Any) -> None:
        if not _overflowed([result]):
            return
        place = f"{'.'.join(filter(None, (path, node.module))) or 'the entry itself'} ({node.op})"
        held = {key for key in args if any(weights([node.args[key]]))}
        for key in held:
            if _overflowed([args[key]]):
                names = (".".join(filter(None, (path, n))) for n in weights([node.args[key]]))
                raise _Fault(f"{place}: its weights are not finite ({', '.join(names)})")
        given = [value for key, value in args.items() if key not in held]
        if not _overflowed(given):
            raise _Fault(f"{place}, whose inputs reach {largest_of(*floats(given)):.3g}")

    try:
        with observed(see):
            run()
    except _Fault as fault:
        return str(fault)
    return None


def floats(values: Iterable[Any]) -> Iterator[mx.array]:
    """The floating-point arrays in values: those of lists, quantized weights and strips too."""
    for value in values:
        if isinstance(value, mx.array):
            if mx.issubdtype(value.dtype, mx.floating):
                yield value
        elif isinstance(value, Strips):
            yield from floats(value.parts)
        elif isinstance(value, (QuantizedWeight, Stack)):
            yield from floats(arrays_of(value))
        elif isinstance(value, (list, tuple)):
            yield from floats(value)


def largest_of(*arrays: mx.array) -> float:
    """The largest magnitude in any of these; NaN where there is one."""
    found = [np.array(mx.max(mx.abs(a.astype(mx.float32)))) for a in arrays if a.size]
    return float(np.max(found)) if found else 0.0


def _overflowed(values: Iterable[Any]) -> bool:
    """Whether there is NaN or plus infinity in any of these."""
    return any(bool(mx.any(mx.isnan(a) | mx.isposinf(a)).item()) for a in floats(values))
