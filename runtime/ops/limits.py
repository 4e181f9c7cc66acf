"""What the whole-number arguments of ops may be: read when a program is loaded, and at each call.

MLX trusts its caller: a stride of zero divides by it, pieces beyond an axis end the process. The
rows below are the only place where such limits stand; indices that are arrays are clamped where
they are used (`registry.within`).
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Range = tuple[int, int]

_MOST = 2**31 - 1  # MLX counts in 32 bits
_ANY, _COUNT, _SIZE, _FREE = (-_MOST, _MOST), (1, _MOST), (0, _MOST), (-1, _MOST)
_AXIS = (-64, 63)
_WINDOW = (1, 256)  # elements of a pooling window along one axis: one slice each

# Arguments that mean the same wherever they occur.
_EVERYWHERE: dict[str, Range] = {
    "axis": _AXIS,
    "axes": _AXIS,
    "axis1": _AXIS,
    "axis2": _AXIS,
    "stride": _COUNT,
    "padding": _SIZE,
    "dilation": _COUNT,
    "output_padding": _SIZE,
    "groups": _COUNT,
    "repeats": _SIZE,
    "chunks": _COUNT,
    "widths": _ANY,
    "shifts": _ANY,
    "kernel": _WINDOW,
    "rows": _SIZE,
    "columns": _SIZE,
    "decimals": (-38, 38),
    "ddof": _ANY,
    "offset": _ANY,
    "k": _ANY,
}
_OF_OPS: dict[str, dict[str, Range]] = {
    "adaptive_avg_pool": {"sizes": _COUNT},
    "broadcast": {"shape": _FREE},
    "full": {"shape": _SIZE},
    "reshape": {"shape": _FREE},
    "select": {"index": _ANY},
    "split": {"sizes": _SIZE},
    "split_every": {"size": _COUNT},
    "upsample_cubic": {"sizes": _SIZE},
    "upsample_linear": {"sizes": _SIZE},
    "upsample_nearest": {"sizes": _SIZE},
}


@functools.cache
def limits_of(op: Callable[..., Any], name: str) -> dict[str, Range]:
    """The ranges of an op's arguments, by name."""
    own = inspect.signature(op).parameters
    known = {key: limit for key, limit in _EVERYWHERE.items() if key in own}
    return {**known, **_OF_OPS.get(name, {})}


def problem(limits: Mapping[str, Range], args: Mapping[str, Any]) -> str | None:
    """The first argument with a number out of its range; values of other kinds are skipped."""
    for key, (low, high) in limits.items():
        value = args.get(key)
        if isinstance(value, int):
            if not low <= value <= high:
                return _said(key, value, low, high)
        elif isinstance(value, (list, tuple, float)):
            for item in _numbers(value):
                if item != int(item) or not low <= item <= high:
                    return _said(key, item, low, high)
    return None


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in nested sequences; those that are not finite as a number beyond any range."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield value if abs(value) < 2**63 else 2**63


def _said(key: str, value: float, low: int, high: int) -> str:
    return f"{key} is {value!r:.40}, expected a whole number from {low} to {high}"


def limited(op: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`op`, which raises ValueError for arguments out of range."""
    limits = limits_of(op, name)
    if not limits:
        return op
    names = list(inspect.signature(op).parameters)

    @functools.wraps(op)
    def checked(*given: Any, **args: Any) -> Any:
        wrong = problem(limits, {**dict(zip(names, given)), **args} if given else args)
        if wrong:
            raise ValueError(wrong)
        return op(*given, **args)

    return checked
