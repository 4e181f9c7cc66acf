"""More sizes for a bundle of a class that fixes its size: a new program, the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxconv.runtime.bundle import open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import read_json, whole
from mlxconv.runtime.program import CONSTANTS_FILE, PROGRAM_FILE, Program, load_program, to_json

from .bundle_folder import changing
from .model_class import find_class
from .programs import Compiled, Size, compile_program, fixed_dims
from .recipe import Recipe, bundle_recipe


def add_sizes(
    bundle: str | Path,
    component: str,
    sizes: Sequence[Size] = (),
    dims: Mapping[str, int] | None = None,
) -> list[dict[str, int]]:
    """Trace a component again at its sizes and at further ones; gives the sizes it has now.

    sizes: pixels, width and height; dims: fixed dims by the recipe's names. Weights are neither
    read nor written. Raises MlxconvError where the class fixes no size, or where the new program
    would read other weights than the bundle has.
    """
    opened = open_bundle(bundle)
    if opened.remote is not None:
        raise MlxconvError(f"{bundle}: sizes are added in place; download the bundle to a folder")
    folder = opened.component(component)
    if not (folder / PROGRAM_FILE).is_file():
        raise MlxconvError(f"{folder}: has no program; convert it with a recipe")
    listed = opened.manifest["components"][component]
    recipe = bundle_recipe(folder, listed["class"])
    wanted = _wanted(recipe, sizes, dims or {}, folder)
    config = read_json(folder / "config.json")
    for key in ("mlxconv", "quantization", "quantization_config"):
        config.pop(key, None)
    cls = find_class(listed["library"], listed["class"], folder)

    def with_more(old: Program) -> Compiled:
        known = [dict(entry.sizes) for entry in old.entries]
        choices = [*known, *({**one, **choice} for one in known for choice in wanted)]
        unique = [choice for i, choice in enumerate(choices) if choice not in choices[:i]]
        return compile_program(cls, config, recipe, choices=unique)

    return [entry.sizes for entry in replace_program(folder, with_more).entries]


def replace_program(folder: Path, make: Callable[[Program], Compiled]) -> Program:
    """Replace a component's program by what `make` gives for the present one; gives the new one.

    Processes that do this at once wait for each other, so each builds on the other's result.
    Raises MlxconvError where the new program would read other weights than the bundle has.
    """
    with changing(folder.parent):
        old = load_program(folder / PROGRAM_FILE)
        made = make(old)
        _check_weights(old, made.program, folder)
        _write(folder, made)
    return made.program


def _wanted(
    recipe: Recipe, sizes: Sequence[Size], dims: Mapping[str, int], folder: Path
) -> list[dict[str, int]]:
    fixed = [dim.name for dim in recipe.dims.values() if dim.fixed]
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


def _check_weights(old: Program, new: Program, folder: Path) -> None:
    differing = sorted(
        name for name, parameter in new.parameters.items() if old.parameters.get(name) != parameter
    )
    if differing:
        raise MlxconvError(
            f"{folder}: at that size {differing[0]} is not what the bundle has; "
            "convert the checkpoint again with --size"
        )


def _write(folder: Path, made: Compiled) -> None:
    """The program last, so that what it names is there."""
    from safetensors.numpy import save_file

    if made.constants:
        with whole(folder / CONSTANTS_FILE) as partial:
            save_file(made.constants, str(partial))
    with whole(folder / PROGRAM_FILE) as partial:
        partial.write_text(to_json(made.program), encoding="utf-8")
