"""Python's `int`, `len`, `max`, and more, for sizes that have to stay symbolic in a trace."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._device import _device_constructors

from .replaced import replaced


@contextlib.contextmanager
def symbolic_builtins(module: nn.Module) -> Iterator[None]:
    """Inside, ``int``, ``len``, ``max``, ``min`` and ``[x] * size`` leave sizes symbolic.

    Python's ``int`` and ``len`` have to return a number, and ``max`` has to know which is the
    larger: each would build the traced size into the graph without a word. The stand-ins go into
    the source modules of the traced classes. torch 2.13 has none of its own for these, nor a size
    that can be hashed, nor `.data` in a graph.
    """
    _device_constructors()  # remembered by torch: not with the stand-ins for its functions
    names = {type(child).__module__ for child in module.modules()}
    spaces = [sys.modules[n] for n in names if n.split(".")[0] in _LIBRARIES]
    added = [(space, name) for space in spaces for name in _STAND_INS if name not in vars(space)]
    multiply, tensor, data = torch.SymInt.__rmul__, torch.tensor, vars(torch._C.TensorBase)["data"]

    def repeat_or_multiply(self: torch.SymInt, other: Any) -> Any:
        return _Repeated(other, self) if isinstance(other, list) else multiply(self, other)

    def tensor_of(data: Any, **options: Any) -> torch.Tensor:
        if isinstance(data, _Repeated) and len(data.items) == 1:
            return torch.full((data.count,), data.items[0], **options)
        if isinstance(data, float) and options.get("dtype") in (torch.bfloat16, torch.float16):
            return torch.full((), data, **options)  # the graph has the number, not its rounding
        return tensor(data, **options)

    with replaced(
        *((space, name, _STAND_INS[name]) for space, name in added),
        (torch.SymInt, "__hash__", _hash_of_size),  # for sets, and functools.lru_cache
        (torch.SymInt, "__rmul__", repeat_or_multiply),
        (torch, "tensor", tensor_of),
        (torch, "linspace", _linspace(torch.linspace)),
        (torch.SymFloat, "sqrt", lambda size: size**0.5),  # what numpy.sqrt calls
        (torch.Tensor, "data", property(torch.Tensor.detach, data.__set__)),
    ):
        yield


def _hash_of_size(size: torch.SymInt) -> int:
    """The same for equal expressions of one trace, so that comparing them tells nothing new."""
    expression = size.node.expr
    if expression.is_number:
        return hash(int(expression))
    return hash((str(expression), id(size.node.shape_env)))


@dataclass(frozen=True)
class _Repeated:
    """``items * count`` for a symbolic count."""

    items: list[Any]
    count: torch.SymInt


class _IntType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, int)


class _Int(int, metaclass=_IntType):
    """``int``, but for a symbolic size, which it returns as it is."""

    def __new__(cls, value: Any = 0, *args: Any) -> Any:
        return value if isinstance(value, torch.SymInt) else int(value, *args)


class _FloatType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, float)


class _Float(float, metaclass=_FloatType):
    """``float``, but for a symbolic size, which stays symbolic."""

    def __new__(cls, value: Any = 0.0) -> Any:
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return torch.sym_float(value)  # type: ignore[no-untyped-call]
        return float(value)


def _len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) else len(value)


def _extreme(
    builtin: Callable[..., Any], symbolic: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    def extreme(*values: Any, **options: Any) -> Any:
        items = values if len(values) > 1 else list(values[0])
        if options or not any(isinstance(item, (torch.SymInt, torch.SymFloat)) for item in items):
            return builtin(items, **options)
        return functools.reduce(symbolic, items)

    return extreme


def _linspace(builtin: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.linspace``, whose ``steps`` has to be a number, for symbolic steps as well."""

    def linspace(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
        if not isinstance(steps, torch.SymInt):
            return builtin(start, end, steps, **options)
        options["dtype"] = options.get("dtype") or torch.get_default_dtype()
        place = torch.arange(steps, **options)  # type: ignore[call-overload]
        step = (end - start) / torch.sym_max(steps - 1, 1)  # type: ignore[no-untyped-call]
        half = torch.sym_max(steps // 2, 1)  # type: ignore[no-untyped-call]
        # As torch does, each half from its own end.
        return torch.where(place < half, start + step * place, end - step * (steps - 1 - place))

    return linspace


_LIBRARIES = ("diffusers", "transformers")
_STAND_INS: dict[str, Any] = {
    "int": _Int,
    "float": _Float,
    "len": _len,
    "max": _extreme(max, torch.sym_max),
    "min": _extreme(min, torch.sym_min),
}
