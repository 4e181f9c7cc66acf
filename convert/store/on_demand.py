"""Sizes that a running component lacks, traced when they are called for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxconv.runtime.bundle import LoadedComponent
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.binding import NoSuchSize, bind
from mlxconv.runtime.exec.sizes import dims_of

from ..lower.compile import Compiled
from ..recipe.recipe import ProgramRecipe
from ..source.arrays import torch_to_mlx
from ..trace.fake_module import merged_config
from .add_size import Traceable, add_programs, extended, stored_constants
from .call_recipe import recipes_of_call


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def trace_when_called(
    loaded: LoadedComponent, *, keep: bool, say: Callable[[str], None] = _say
) -> None:
    """Have a running component trace the sizes that it is called with and lacks.

    keep: the bundle gets them too, where its folder can be written to.
    """

    def trace_size(name: str, sizes: dict[str, int]) -> None:
        what = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
        say(f"tracing {loaded.program.class_name}.{name} for {what}, once")
        begun = time.monotonic()
        made = Traceable.of(loaded.path).traced([sizes], [name])
        _extend(loaded, made)
        kept = _added(loaded.path, made) if keep else ""
        say(f"traced in {time.monotonic() - begun:.0f} s{kept}")

    loaded.executor.trace_size = trace_size


def trace_call(
    loaded: LoadedComponent, base: ProgramRecipe, given: Mapping[str, Any]
) -> ProgramRecipe:
    """Give a running component a program that takes this call, and its recipe.

    base: the program of the component's recipe that is nearest; given: see `recipes_of_call`.
    MlxconvError where the class cannot be traced for such a call.
    """
    source, inputs = Traceable.of(loaded.path), torch_to_mlx(given)
    name = f"{base.name}+{len(loaded.entries)}"
    _say(f"tracing {loaded.program.class_name}.{base.name} for {_described(base, given)}, once")
    begun = time.monotonic()
    config = merged_config(source.cls, source.config)
    first: MlxconvError | None = None
    for recipe, dims in recipes_of_call(source.recipe, base, name, config, given):
        try:
            own = replace(source, recipe=recipe)
            made = _at_dims(own, name, dims)
            try:
                bind(made.program, name, inputs, loaded.executor.compute)
            except NoSuchSize as error:
                decided = dims_of(recipe.sizes_table(config), name, error.axes)
                made = _at_dims(own, name, dims, decided)
                bind(made.program, name, inputs, loaded.executor.compute)
            _extend(loaded, made)
        except MlxconvError as error:
            first = first or error
            continue
        _say(f"traced in {time.monotonic() - begun:.0f} s, for this process")
        return recipe.program(name)
    assert first is not None
    raise first


def _described(base: ProgramRecipe, given: Mapping[str, Any]) -> str:
    """What a call passes that a program does not take; else the shapes that it has."""
    known = {n.partition(".")[0] for n in base.inputs} | set(base.arguments)
    more = [name for name in given if name not in known]
    shapes = (f"{k} {tuple(v.shape)}" for k, v in given.items() if hasattr(v, "shape"))
    return f"calls with {', '.join(more)}" if more else ", ".join(shapes)


def _at_dims(
    source: Traceable, name: str, dims: Mapping[str, int], decided: Collection[str] = ()
) -> Compiled:
    """A program at the recipe's sizes; where the class builds one in, or decides by one, at the
    call's."""
    own = source.recipe.dims.items()
    known = {n: dims[n] for n, dim in own if n in dims and (dim.fixed or n in decided)}
    made = source.traced([known], [name])
    built_in = made.program.entry(name).sizes
    other = {n: dims[n] for n, size in built_in.items() if dims.get(n, size) != size}
    return source.traced([{**known, **other}], [name]) if other else made


def _extend(loaded: LoadedComponent, made: Compiled) -> None:
    """Add traced entries to a running component."""
    weights = loaded.executor.weights
    known = {**stored_constants(loaded.path), **weights.added}
    more = extended(loaded.program, known, made, loaded.path)
    weights.add(more.program.parameters, more.program.constants, more.constants)
    loaded.executor.program = more.program


def _added(folder: Path, made: Compiled) -> str:
    """Add the entries to the bundle; what became of it."""
    try:
        add_programs(folder, made)
    except (OSError, MlxconvError) as error:
        return f", for this process alone: {error}"
    return "; added to the bundle"
