"""Which fixed sizes a call asks for, where a class has one program per size."""

import shlex
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..program.expressions import Expression, evaluate, names_in
from ..program.program import Entry
from .binding import at

_LARGEST = 20_000  # tried for a dim that is part of an expression


def asked_sizes(
    config: Mapping[str, Any],
    entry: Entry,
    inputs: Mapping[str, Any],
    axes: Collection[tuple[str, int]] = (),
) -> dict[str, int]:
    """The dims of `entry.sizes` as these inputs have them; {} where they are not all known.

    `config`: the component's, whose `mlxconv.sizes` has the shapes of inputs as expressions.
    `axes`: of inputs, by path; the dims that they read are asked for too.
    """
    table = (config.get("mlxconv") or {}).get("sizes") or {}
    wanted = {**dict.fromkeys(dims_of(table, entry.name, axes), 0), **entry.sizes}
    pairs = _pairs(table, entry.name, inputs)
    known = solved(pairs, config, wanted)
    found = {name: int(known.get(name, size)) for name, size in wanted.items()}
    given = {**config, **known, **found}
    agreed = all(_fits(e, n, given) for e, n in pairs if names_in(e) <= given.keys())
    return found if agreed and all(found.values()) and found != entry.sizes else {}


def dims_of(table: Mapping[str, Any], entry: str, axes: Collection[tuple[str, int]]) -> set[str]:
    """The dims that these axes of inputs, by path, or Python arguments are made of.

    `table`: as `mlxconv.sizes` of a component's configuration.
    """
    shapes = (table.get("shapes") or {}).get(entry) or {}
    numbers = (table.get("arguments") or {}).get(entry) or {}
    found: set[str] = set()
    for path, axis in axes:
        of_list = path.rpartition(".")[0]
        shape = shapes.get(path) or shapes.get(of_list) or [numbers.get(path, 0)]
        found |= set().union(*map(names_in, shape[axis : axis + 1]))
    return found & (table.get("dims") or {}).keys()


def solved(
    pairs: Iterable[tuple[Expression, int]],
    config: Mapping[str, Any],
    wanted: Collection[str] | None = None,
) -> dict[str, int]:
    """The dims for which expressions have these values: those that stand alone, and of `wanted`
    (by default of all) those that are the one unknown of an expression."""
    names = {e: n for e, n in pairs if isinstance(e, str) and e.isidentifier()}
    known: dict[str, Any] = {name: n for name, n in names.items() if name not in config}
    for expression, size in pairs:
        unknown = names_in(expression) - known.keys() - config.keys()
        if len(unknown) == 1 and (wanted is None or unknown <= set(wanted)):
            name = unknown.pop()
            values = range(1, min(8 * size + 64, _LARGEST))
            fits = (n for n in values if _fits(expression, size, {**config, **known, name: n}))
            known.update((name, n) for n in islice(fits, 1))
    return known


def _pairs(
    table: Mapping[str, Any], entry: str, inputs: Mapping[str, Any]
) -> list[tuple[Expression, int]]:
    """Expressions of shapes and of Python arguments, each with what the call has there."""
    pairs: list[tuple[Expression, int]] = []
    for path, shape in ((table.get("shapes") or {}).get(entry) or {}).items():
        value = at(inputs, path, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        pairs += zip(shape, getattr(value, "shape", ()))
    for path, expression in ((table.get("arguments") or {}).get(entry) or {}).items():
        value = at(inputs, path, None)
        pairs += [(expression, value)] if isinstance(value, int) else []
    return pairs


def _fits(expression: Expression, size: int, names: Mapping[str, Any]) -> bool:
    return bool(evaluate(expression, names) == size)


def add_size_command(folder: Path, sizes: Mapping[str, int]) -> str:
    """The command that adds a size to the component in `folder`."""
    dims = " ".join(f"--dim {name}={size}" for name, size in sizes.items())
    return f"mlxconv add-size {shlex.quote(str(folder.parent))} --component {folder.name} {dims}"
