"""A scheduler's options, read off the signature of its function.

Each keyword is an option. One whose type is a dataclass stands for that dataclass's fields: what
several schedulers share. A `Literal` lists the supported values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import MlxconvError
from .schedule import Request, Schedule

MOST_STEPS = 100_000
Build = Callable[..., Schedule]


@dataclass(frozen=True)
class Option:
    """Its type, as annotated, and its default."""

    type: Any
    default: Any

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The supported values; None where any of the type is."""
        return get_args(self.type) if get_origin(self.type) is Literal else None

    def check(self, value: Any, name: str, where: str) -> None:
        """MlxconvError for a value that is not supported."""
        if self.choices is not None and value not in self.choices:
            supported = ", ".join(str(choice) for choice in self.choices)
            raise MlxconvError(
                f"{where}: {name} {value!r} is not supported; supported: {supported}"
            )
        infinite = isinstance(self.default, float) and value == self.default
        if self.choices is None and not infinite and not _is_a(value, self.type):
            kind = "number" if self.default is None else type(self.default).__name__
            raise MlxconvError(f"{where}: {name} must be a {kind}, found {value!r}")


@cache
def options_of(build: Build) -> Mapping[str, Option]:
    """All options of a scheduler's function, by name."""
    found = {}
    for name, keyword in _keywords(build).items():
        if not is_dataclass(keyword.annotation):
            found[name] = Option(keyword.annotation, keyword.default)
            continue
        default, types = _group(keyword), get_type_hints(keyword.annotation)
        for part in fields(keyword.annotation):
            found[part.name] = Option(types[part.name], getattr(default, part.name))
    return found


def built(build: Build, request: Request, options: Mapping[str, Any]) -> Schedule:
    """The schedule that a function makes of options by name."""
    given = {}
    for name, keyword in _keywords(build).items():
        group = keyword.annotation
        if is_dataclass(group):
            given[name] = type(_group(keyword))(**{f.name: options[f.name] for f in fields(group)})
        else:
            given[name] = options[name]
    return build(request, **given)


def _keywords(build: Build) -> dict[str, inspect.Parameter]:
    _, *keywords = inspect.signature(build, eval_str=True).parameters.values()
    return {keyword.name: keyword for keyword in keywords}


def _group(keyword: inspect.Parameter) -> Any:
    """A dataclass with the function's defaults."""
    return keyword.annotation() if keyword.default is keyword.empty else keyword.default


def _is_a(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and _is_number(value) and abs(value) <= MOST_STEPS
    if kind is float:
        return _is_number(value)
    if type(None) in get_args(kind):
        return value is None or _is_a(value, get_args(kind)[0])
    return isinstance(value, list | tuple) and all(_is_number(v) for v in value)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -math.inf < value < math.inf
    )
