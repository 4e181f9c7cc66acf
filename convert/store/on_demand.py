"""Sizes traced when they are called for: a bundle's program, and one that is running, extended.

A class that fixes a size (frames of a video, a batch) has one entry per size. Weights are neither
read nor written here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxconv.runtime.bundle import MANIFEST, LoadedComponent, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.binding import NoSuchSize, bind
from mlxconv.runtime.exec.sizes import dims_of
from mlxconv.runtime.program.program import (
    CONSTANTS_FILE,
    Arg,
    Entry,
    Program,
    Ref,
    Weight,
    substitute,
    validate,
)

from ..lower.compile import Compiled, compile_program, merge_kinds
from ..lower.outline import merged
from ..recipe.recipe import ProgramRecipe, Recipe, bundle_recipe
from ..source.arrays import torch_to_mlx
from ..source.fake_module import merged_config
from ..source.model_class import bundled_class
from .call_recipe import recipes_of_call

Array = np.ndarray[Any, Any]


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
            f"{folder}: at that size {name} is not what the bundle has; convert the checkpoint "
            "again, with a recipe that lists the size (--recipe FILE)"
        )
    new = [_with_constants(entry, renamed) for entry in new]
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


def _with_constants(entry: Entry, names: Mapping[str, str]) -> Entry:
    def read(item: Ref | Weight) -> Arg:
        return Weight(names.get(item.name, item.name)) if isinstance(item, Weight) else item

    nodes = [
        replace(node, args={key: substitute(arg, read) for key, arg in node.args.items()})
        for node in entry.nodes
    ]
    outputs = tuple(substitute(arg, read) for arg in entry.outputs)
    return replace(entry, nodes=nodes, outputs=outputs)


def stored_constants(folder: Path) -> dict[str, Array]:
    """The values of a component's constants."""
    from safetensors.numpy import load_file

    file = folder / CONSTANTS_FILE
    return dict(load_file(file)) if file.is_file() else {}


# ---- while it runs -------------------------------------------------------------------------------


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
    from .add_size import add_programs

    try:
        add_programs(folder, made)
    except (OSError, MlxconvError) as error:
        return f", for this process alone: {error}"
    return "; added to the bundle"
