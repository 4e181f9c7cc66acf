"""The sizes at which `verify` compared forward passes, and those at which it did not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.expressions import pixel_multiple
from mlxconv.runtime.program.program import Program

from ..recipe.recipe import Recipe, evaluate, names_in
from ..store.add_size import check_divisible
from ..trace.class_config import full_config
from .forward import Case, EntryRun, fits

WORKING_SIZE = (1024, 1024)  # pixels at which people work


def pixel_dims(
    recipe: Recipe, config: Mapping[str, Any], size: tuple[int, int], *, exact: bool = False
) -> dict[str, int]:
    """The free sizes that (width, height) pixels give, for one picture.

    exact: MlxconvError for a size that would be rounded.
    """
    names = {**config, "W": size[0], "H": size[1]}
    found = {
        name: int(evaluate(text, names))
        for name, text in recipe.sizes.items()
        if {"W", "H"} & names_in(text) and not recipe.dims[name].fixed
    }
    small = [name for name, value in found.items() if value < 1]
    if small:
        raise MlxconvError(
            f"--size {size[0]}x{size[1]}: too few pixels for {recipe.class_name} "
            f"({small[0]} is 0); give more"
        )
    if exact:
        texts = [recipe.sizes[name] for name in found]
        check_divisible(size, pixel_multiple(texts, config))
    batch = recipe.dims.get("batch")
    return {**({"batch": 1} if found and batch and not batch.fixed else {}), **found}


def sizes_of(case: Case, recipe: Recipe, program: Program) -> dict[str, dict[str, int]]:
    """The sizes of every entry that is run, by its label."""
    entries = (e for e in program.entries if fits(e, case.dims))
    runs = (EntryRun(case, recipe, program, entry) for entry in entries)
    return {run.label: run.dims for run in runs}


def not_covered(case: Case, recipe: Recipe, sizes: Mapping[str, Mapping[str, int]]) -> str:
    """One sentence if an entry ran on fewer pixels than people work with, else nothing."""
    config = full_config(case.component)
    size = _working_size(recipe, config)
    wanted = pixel_dims(recipe, config, size)
    wanted.pop("batch", None)
    if wanted.keys() <= case.dims.keys():  # they were chosen
        return ""
    ran = next((s for s in sizes.values() if any(s[n] < wanted[n] for n in wanted)), None)
    if ran is None:
        return ""
    shown = ", ".join(f"{name} {ran[name]}" for name in wanted)
    pixels = "x".join(map(str, size))
    return f"{case.name}: compared at {shown}; add --size {pixels} to compare at {pixels} pixels"


def _working_size(recipe: Recipe, config: Mapping[str, Any]) -> tuple[int, int]:
    """An autoencoder's `sample_size` is in pixels; diffusers' default of 32 says nothing."""
    side = config.get("sample_size")
    coder = recipe.class_name.startswith("Autoencoder")
    return (side, side) if coder and isinstance(side, int) and side > 32 else WORKING_SIZE
