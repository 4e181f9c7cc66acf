"""Recipes: what a class takes, which sizes are free, what stays precise. Data only, from TOML.

A recipe never holds Python. Its shapes are small arithmetic expressions over named dims and the
keys of the component's configuration (`runtime/program/expressions.py`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.expressions import Expression as Expression
from mlxconv.runtime.program.expressions import evaluate as evaluate
from mlxconv.runtime.program.expressions import names_in as names_in

if TYPE_CHECKING:
    import torch

Stage = Literal["constant", "prompt", "schedule", "step"]
DType = Literal["compute", "float32", "int64", "bool"]
STAGES = ("constant", "prompt", "schedule", "step")
DTYPES = ("compute", "float32", "int64", "bool")
MASKS = ("ragged", "ragged_left")
RECIPE_FILE = "recipe.toml"  # in a bundle, where the recipe is not one of ours


# --- the recipe -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dim:
    """A named size: ``trace`` for tracing, ``check`` afterwards.

    ``fixed``: the class builds it in, so there is one program a value: those of ``values``, else
    the one traced.
    """

    name: str
    trace: Expression
    check: tuple[int, ...] = ()
    fixed: bool = False
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class RecipeInput:
    """One tensor (or list of tensors) that a program takes, and how to make a plausible one.

    A dot in ``name`` puts it into a dictionary, or at a place of a list where a number follows:
    ``added_cond_kwargs.resolution``, ``visual_rope_pos.0``.

    ``shape`` holds expressions. Values: seeded normal floats, or ``value`` (a number, or
    numbers repeated along the flattened tensor), or ``integers`` (low, high) with high
    excluded, or ``mask = "ragged"`` (row i keeps fewer leading ones; "ragged_left": fewer
    trailing ones). ``count`` makes it a list of that many. ``when`` drops it where the expression
    is false. ``known``: a program has the ``value`` built in, as a mask of ones where nothing is
    padded. ``below``, ``reaches``: what ``truths`` take for granted: that the largest element is
    below a number, or at least that.
    """

    name: str
    shape: tuple[Expression, ...]
    dtype: DType = "compute"
    stage: Stage = "step"
    value: tuple[float, ...] = ()
    integers: tuple[int, int] | None = None
    mask: str | None = None
    count: Expression | None = None
    when: Expression | bool = True
    known: bool = False
    below: Expression | None = None
    reaches: Expression | None = None

    @property
    def path(self) -> tuple[str | int, ...]:
        """Where it goes among the keyword arguments: the name, split at its dots."""
        return tuple(int(part) if part.isdigit() else part for part in self.name.split("."))


@dataclass(frozen=True)
class ProgramRecipe:
    """One entry point of a class: the traced method, its inputs, and its other arguments.

    ``method`` is a path: a method, or a submodule (``model``) whose forward is called.
    """

    name: str
    method: str
    inputs: Mapping[str, RecipeInput]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    when: Expression | bool = True
    truths: tuple[bool, ...] = ()  # of the conditions on tensors' values, in their order
    alike: tuple[str, ...] = ()  # functions whose conditions on sizes change how, not what

    def callable(self, module: torch.nn.Module) -> Callable[..., Any]:
        """What the program is traced from; of a submodule its call, so that hooks run."""
        found: Any = operator.attrgetter(self.method)(module)
        if not hasattr(found, "forward"):
            return cast("Callable[..., Any]", found)

        @functools.wraps(found.forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

        return call


@dataclass(frozen=True)
class PrecisionRules:
    """Anchored globs on module names: kept at the compute dtype; adaLN, 8 bit at the least."""

    keep: tuple[str, ...] = ()
    modulation: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What mlxconv needs to know about a class to trace it."""

    class_name: str
    library: str
    pipelines: tuple[str, ...]
    dims: Mapping[str, Dim]
    programs: Mapping[str, ProgramRecipe]
    precision: PrecisionRules
    tiny: Mapping[str, Any]
    tiny_variants: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, Expression]
    unused: tuple[str, ...] = ()  # globs: tensors that the class has and its forward drops

    def program(self, name: str) -> ProgramRecipe:
        """The program of that name; MlxconvError names those that exist."""
        if name not in self.programs:
            raise MlxconvError(
                f"{self.class_name} has no program {name!r}, only {', '.join(self.programs)}"
            )
        return self.programs[name]

    def programs_for(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The programs that a component with this (merged) configuration has."""
        return tuple(n for n, program in self.programs.items() if evaluate(program.when, config))

    def tiny_config(self, variant: str | None = None) -> dict[str, Any]:
        """Constructor arguments of a model small enough to test with."""
        if variant is not None and variant not in self.tiny_variants:
            raise MlxconvError(f"{self.class_name} has no tiny variant {variant!r}")
        return {**self.tiny, **(self.tiny_variants[variant] if variant else {})}

    def trace_dims(
        self, config: Mapping[str, Any], dims: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Every dim's size: the recipe's for tracing, or what ``dims`` asks for."""
        unknown = sorted(set(dims or {}) - set(self.dims))
        if unknown:
            raise MlxconvError(
                f"{self.class_name} has no dim {', '.join(unknown)}, only {', '.join(self.dims)}"
            )
        sizes = {name: int(evaluate(dim.trace, config)) for name, dim in self.dims.items()}
        return {**sizes, **(dims or {})}

    def fixed_sizes(self) -> dict[str, Expression]:
        """Of the sizes that pixels decide, those that the class builds in."""
        return {name: text for name, text in self.sizes.items() if self.dims[name].fixed}

    def sizes_table(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a bundle keeps of the sizes (`runtime/bench/examples.py` reads it).

        `dims`: each one's size for tracing; `pixels`: the expressions over W and H; `arguments`:
        for each program the expressions of its Python arguments, by dotted path; `shapes`: those of
        its inputs.
        """
        arguments = {
            name: dict(_expressions(dict(self.programs[name].arguments), ""))
            for name in self.programs_for(config)
        }
        shapes = {
            name: {path: list(spec.shape) for path, spec in self.programs[name].inputs.items()}
            for name in arguments
        }
        return {
            "dims": self.trace_dims(config),
            "pixels": dict(self.sizes),
            "arguments": {name: found for name, found in arguments.items() if found},
            "shapes": shapes,
        }


def _expressions(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The strings inside a recipe's argument, each with its dotted path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _expressions(item, f"{path}.{key}".lstrip("."))
