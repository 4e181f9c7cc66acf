"""More sizes for a bundle of a class that fixes its size: a new program, the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxconv.runtime.bundle import open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.sizes import dims_of
from mlxconv.runtime.files import whole
from mlxconv.runtime.program.program import (
    CONSTANTS_FILE,
    PROGRAM_FILE,
    Program,
    load_program,
    to_json,
)

from ..lower.compile import Compiled, Size, fixed_dims
from .bundle_folder import changing
from .on_demand import Traceable, extended, stored_constants


def add_sizes(
    bundle: str | Path,
    component: str,
    sizes: Sequence[Size] = (),
    dims: Mapping[str, int] | None = None,
) -> list[dict[str, int]]:
    """Trace a component at further sizes; gives the sizes it has now.

    sizes: pixels, width and height; dims: by the recipe's names, those that the class fixes or
    decides by. Weights are neither read nor written. Raises MlxconvError where there are none, or
    where the new program would read other weights than the bundle has.
    """
    opened = open_bundle(bundle)
    if opened.remote is not None:
        raise MlxconvError(f"{bundle}: sizes are added in place; download the bundle to a folder")
    folder = opened.component(component)
    if not (folder / PROGRAM_FILE).is_file():
        raise MlxconvError(f"{folder}: has no program; convert it with a recipe")
    source = Traceable.of(folder)

    def with_more(old: Program) -> Compiled:
        wanted = _wanted(source, old, sizes, dims or {})
        known = [dict(entry.sizes) for entry in old.entries]
        choices = [{**one, **choice} for one in known for choice in wanted]
        unique = [c for i, c in enumerate(choices) if c not in known and c not in choices[:i]]
        values = stored_constants(folder)
        if not unique:
            return Compiled(old, values, {})
        return extended(old, values, source.traced(unique), folder)

    return [entry.sizes for entry in replace_program(folder, with_more).entries]


def add_programs(folder: Path, made: Compiled) -> None:
    """Add traced entries to a bundle's component; those of sizes that it has are left out."""
    replace_program(folder, lambda old: extended(old, stored_constants(folder), made, folder))


def replace_program(folder: Path, make: Callable[[Program], Compiled]) -> Program:
    """Replace a component's program by what `make` gives for the present one; gives the new one.

    Processes that do this at once wait for each other, so each builds on the other's result.
    """
    with changing(folder.parent):
        old = load_program(folder / PROGRAM_FILE)
        made = make(old)
        _write(folder, made)
    return made.program


def _wanted(
    source: Traceable, old: Program, sizes: Sequence[Size], dims: Mapping[str, int]
) -> list[dict[str, int]]:
    recipe, folder = source.recipe, source.folder
    table = recipe.sizes_table(source.config)
    decided = set[str]().union(*(dims_of(table, e.name, e.axes()) for e in old.entries))
    fixed = [dim.name for dim in recipe.dims.values() if dim.fixed or dim.name in decided]
    if not fixed:
        raise MlxconvError(f"{folder}: {recipe.class_name} takes every size already")
    unknown = sorted(set(dims) - set(fixed))
    if unknown:
        raise MlxconvError(f"{folder}: {', '.join(unknown)} is not fixed, only {', '.join(fixed)}")
    if sizes and not recipe.fixed_sizes():
        raise MlxconvError(
            f"{folder}: its recipe derives no dim from pixels: give --dim, of {', '.join(fixed)}"
        )
    return [{**choice, **dims} for choice in fixed_dims(recipe, sizes)] if sizes else [dict(dims)]


def _write(folder: Path, made: Compiled) -> None:
    """The program last, so that what it names is there."""
    from safetensors.numpy import save_file

    if made.constants:
        with whole(folder / CONSTANTS_FILE) as partial:
            save_file(made.constants, str(partial))
    with whole(folder / PROGRAM_FILE) as partial:
        partial.write_text(to_json(made.program), encoding="utf-8")
