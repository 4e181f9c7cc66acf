"""More sizes for a bundle of a class that fixes its size: a new program, the same weights.

Such a class (by frames of a video, or a batch) has one entry per size. Weights are neither read nor
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxconv.runtime.bundle import MANIFEST, Bundle, denoiser_of, open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.sizes import dims_of
from mlxconv.runtime.files import read_json, whole
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.generate.families.images import vae_scale
from mlxconv.runtime.generate.families.parts import Parts
from mlxconv.runtime.program.expressions import names_in, pixel_multiple
from mlxconv.runtime.program.program import (
    CONSTANTS_FILE,
    PROGRAM_FILE,
    Program,
)
from mlxconv.runtime.program.stored import load_program, to_json, validate

from ..lower.compile import Compiled, Size, compile_program, fixed_dims, merge_kinds, with_constants
from ..lower.outline import merged
from ..recipe.reading import bundle_recipe
from ..recipe.recipe import Recipe
from ..source.model_class import bundled_class
from .bundle_folder import changing

Array = np.ndarray[Any, Any]
_RECIPE_SCALE = 8  # pixels a latent in the expressions of recipes that fix sizes


@dataclass(frozen=True)
class Traceable:
    """What a bundle's component is traced from: its class, configuration and recipe."""

    folder: Path
    cls: type
    config: dict[str, Any]
    recipe: Recipe

    @classmethod
    def of(cls, folder: Path) -> Traceable:
        """The component in a bundle's folder."""
        listed = read_json(folder.parent / MANIFEST)["components"][folder.name]
        config = read_json(folder / "config.json")
        for key in ("mlxconv", "quantization", "quantization_config"):
            config.pop(key, None)
        found = bundled_class(listed["library"], listed["class"], folder)
        return cls(folder, found, config, bundle_recipe(folder, listed["class"]))

    def traced(self, choices: Sequence[Mapping[str, int]], names: Sequence[str] = ()) -> Compiled:
        """The programs at these sizes, or those of `names` alone."""
        return compile_program(self.cls, self.config, self.recipe, choices=choices, names=names)


def add_sizes(
    bundle: str | Path,
    component: str | None = None,
    sizes: Sequence[Size] = (),
    dims: Mapping[str, int] | None = None,
) -> tuple[str, list[dict[str, int]]]:
    """Trace a component at further sizes; gives its name and the sizes it has now.

    component: by default the denoiser. sizes: pixels of the bundle's own VAE, width and height;
    dims: by the recipe's names, those that the class fixes or decides by. Weights are neither read
    nor written. Raises MlxconvError where there are none, or where the new program would read other
    weights than the bundle has.
    """
    opened = open_bundle(bundle)
    if opened.remote is not None:
        raise MlxconvError(f"{bundle}: sizes are added in place; download the bundle to a folder")
    folder = opened.component(component or denoiser_of(opened))
    if not (folder / PROGRAM_FILE).is_file():
        raise MlxconvError(f"{folder}: has no program; convert it with a recipe")
    source = Traceable.of(folder)

    def with_more(old: Program) -> Compiled:
        wanted = _wanted(source, old, _recipe_pixels(opened, source, sizes), dims or {})
        known = [dict(entry.sizes) for entry in old.entries]
        choices = [{**one, **choice} for one in known for choice in wanted]
        unique = [c for i, c in enumerate(choices) if c not in known and c not in choices[:i]]
        values = stored_constants(folder)
        if not unique:
            return Compiled(old, values, {})
        return extended(old, values, source.traced(unique), folder)

    return folder.name, [entry.sizes for entry in replace_program(folder, with_more).entries]


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


def extended(old: Program, values: Mapping[str, Array], more: Compiled, folder: Path) -> Compiled:
    """A program with further entries, and all constants; `values` are those of the old one.

    Raises MlxconvError where the new entries would read other weights than the bundle has.
    """
    have = {(entry.name, *sorted(entry.sizes.items())) for entry in old.entries}
    new = [e for e in more.program.entries if (e.name, *sorted(e.sizes.items())) not in have]
    differing = [n for n, p in more.program.parameters.items() if old.parameters.get(n) != p]
    renamed = _renamed(values, more.constants)
    if differing or renamed.keys() & _in_blocks(more.program):
        name = min([*differing, *renamed])
        raise MlxconvError(
            f"{folder}: at that size {name} differs from the bundle's; convert the checkpoint "
            "again, with a recipe that lists the size (--recipe FILE)"
        )
    new = [with_constants(entry, renamed) for entry in new]
    entries, blocks = merged(old, Program(old.class_name, new, more.program.blocks, {}, {}))
    listed = {renamed.get(n, n): dtype for n, dtype in more.program.constants.items()}
    program = Program(
        old.class_name,
        entries,
        blocks,
        merge_kinds([old.parameters, more.program.parameters]),
        {**old.constants, **listed},
    )
    validate(program, str(folder))
    constants = {**values, **{renamed.get(n, n): value for n, value in more.constants.items()}}
    return Compiled(program, constants, {})


def _renamed(values: Mapping[str, Array], more: Mapping[str, Array]) -> dict[str, str]:
    """New names for constants that share a name with another value."""
    names: dict[str, str] = {}
    for name, value in more.items():
        new, number = name, 1
        while new in values and not _same(values[new], value):
            new, number = f"{name}.{number}", number + 1
        if new != name:
            names[name] = new
    return names


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b)


def _in_blocks(program: Program) -> set[str]:
    """Constants that a block reads, under the path of a module that calls it."""
    calls = [n for body in program.bodies() for n in body.nodes if n.op == "call"]
    prefixes = tuple(f"{node.args['prefix']}." for node in calls)
    return {name for name in program.constants if name.startswith(prefixes)}


def stored_constants(folder: Path) -> dict[str, Array]:
    """The values of a component's constants."""
    from safetensors.numpy import load_file

    file = folder / CONSTANTS_FILE
    return dict(load_file(file)) if file.is_file() else {}


def _wanted(
    source: Traceable, old: Program, sizes: Sequence[Size], dims: Mapping[str, int]
) -> list[dict[str, int]]:
    recipe, folder = source.recipe, source.folder
    table = recipe.sizes_table(source.config)
    decided = set[str]().union(*(dims_of(table, e.name, e.axes()) for e in old.entries))
    fixed = [dim.name for dim in recipe.dims.values() if dim.fixed or dim.name in decided]
    if not fixed:
        raise MlxconvError(
            f"{folder}: {recipe.class_name} takes every size already, nothing to add"
        )
    unknown = sorted(set(dims) - set(fixed))
    if unknown:
        raise MlxconvError(
            f"{folder}: {', '.join(unknown)} is not fixed; the fixed dims are {', '.join(fixed)}"
        )
    if sizes and not recipe.fixed_sizes():
        free = [n for n, text in recipe.sizes.items() if {"W", "H"} & names_in(text)]
        already = f"{' and '.join(free)} are already free" if free else "no dim follows from pixels"
        raise MlxconvError(
            f"{folder}: {already}, so --size adds nothing; --dim adds a size of {', '.join(fixed)}"
        )
    return [{**choice, **dims} for choice in fixed_dims(recipe, sizes)] if sizes else [dict(dims)]


def _recipe_pixels(bundle: Bundle, source: Traceable, sizes: Sequence[Size]) -> list[Size]:
    """The sizes as a recipe counts them, at 8 pixels a latent, of sizes at the bundle's own number.

    MlxconvError for a size that is not a whole number of latents or patches.
    """
    expressions = source.recipe.fixed_sizes().values()
    if not expressions:
        return list(sizes)
    part = bundle.path / "vae" / "config.json"
    own = vae_scale(read_json(part)) if part.is_file() else _RECIPE_SCALE
    per = _RECIPE_SCALE / own
    multiple, pipeline = pixel_multiple(expressions, per=per), bundle.manifest.get("pipeline")
    if pipeline in FAMILIES:
        multiple = math.lcm(multiple, FAMILIES[pipeline].defaults(Parts(bundle)).multiple)
    square = not any("W" in names_in(text) for text in expressions)
    for width, height in sizes:
        check_divisible((width, height), multiple)
        if square and width != height:
            raise MlxconvError(
                f"--size {width}x{height}: {source.recipe.class_name} takes square images only; "
                f"give {height}x{height}"
            )
    return [(int(width * per), int(height * per)) for width, height in sizes]


def check_divisible(size: Size, multiple: int) -> None:
    """MlxconvError, with the nearest size, where width or height is not a multiple."""
    if any(side % multiple for side in size):
        near = (max(1, round(side / multiple)) * multiple for side in size)
        raise MlxconvError(
            f"--size {size[0]}x{size[1]}: width and height have to be divisible by {multiple}; "
            f"{'x'.join(map(str, near))} is the nearest"
        )


def _write(folder: Path, made: Compiled) -> None:
    """The program last, so that what it names is there."""
    from safetensors.numpy import save_file

    if made.constants:
        with whole(folder / CONSTANTS_FILE) as partial:
            save_file(made.constants, str(partial))
    with whole(folder / PROGRAM_FILE) as partial:
        partial.write_text(to_json(made.program), encoding="utf-8")
