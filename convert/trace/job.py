"""What one trace needs: a module without weights, its example inputs and which sizes are free."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from ..recipe.examples import example_inputs, place
from ..recipe.recipe import Expression, ProgramRecipe, Recipe, RecipeInput, evaluate, names_in
from .decisions import find
from .fake_module import build_module, merged_config
from .kinds import KindsRead
from .multiples import multiple
from .patches.multiples import Axis


@dataclass(frozen=True)
class Job:
    """One trace."""

    module: nn.Module
    recipe: Recipe
    entry: ProgramRecipe
    config: dict[str, Any]
    dims: dict[str, int]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    arguments: tuple[str, ...]
    kinds: KindsRead
    asked: frozenset[str] = frozenset()  # dims whose size is not the recipe's

    def inputs(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """The program's example inputs where some dims differ from those traced."""
        sizes = {**self.dims, **dims}
        return example_inputs(self.recipe, self.entry.name, self.config, sizes, dtype=self.dtype)

    def free(self, expression: Any) -> bool:
        """Whether a size may vary: its expression reads a dim that is not declared fixed."""
        return any(not self.recipe.dims[n].fixed for n in names_in(expression) if n in self.dims)

    def multiple(self, expression: Expression) -> tuple[int, str] | None:
        """``(32, "rows")`` where a size is declared as ``32 * rows`` and the dim is free."""
        free = [name for name, dim in self.recipe.dims.items() if not dim.fixed]
        return multiple(expression, free, {**self.config, **self.dims})

    def assumed(self, spec: RecipeInput) -> int | dict[str, int] | None:
        """What the trace takes for granted of an input's elements."""
        if spec.known:
            return int(spec.value[0])
        bounds = {"below": spec.below, "reaches": spec.reaches}
        names = {**self.config, **self.dims}
        return {k: int(evaluate(v, names)) for k, v in bounds.items() if v is not None} or None

    def size(self, expression: Expression) -> int | str:
        """The expression if it reads a dim, else its value; ``32 * rows`` with its number."""
        if known := self.multiple(expression):
            return f"{known[0]} * {known[1]}"
        if names_in(expression) & set(self.dims):
            return expression
        return int(evaluate(expression, self.config))


def job_of(
    cls: type[nn.Module],
    config: Mapping[str, Any],
    recipe: Recipe,
    program: str,
    dims: Mapping[str, int] | None,
    dtype: torch.dtype | None,
) -> Job:
    entry = recipe.program(program)
    module, _ = build_module(cls, config, dtype=dtype or torch.bfloat16)
    if dtype is None:
        dtype = torch.float16 if _rounds_to_bfloat16(module) else torch.bfloat16
        if dtype == torch.float16:
            module, _ = build_module(cls, config, dtype=dtype)
    merged = merged_config(cls, config)
    kwargs = example_inputs(recipe, program, merged, dims, dtype=dtype)
    method = entry.callable(module)
    arguments, kinds = _positional(method), KindsRead()
    module.forward = _given(_of_named(method, kwargs), entry, kinds)
    return Job(
        module,
        recipe,
        entry,
        merged,
        recipe.trace_dims(merged, dims),
        kwargs,
        dtype,
        arguments,
        kinds,
        frozenset(dims or ()),
    )


def _positional(method: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(method).parameters
    return tuple(name for name, parameter in found.items() if parameter.kind in kinds)


def _rounds_to_bfloat16(module: nn.Module) -> bool:
    """Whether a forward of it, or an attention processor, names bfloat16 and not float16.

    Such a rounding is part of the class at every precision; in a graph of bf16 it would not show.
    """

    def names(code: types.CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from names(constant)

    functions = {type(part).forward for part in module.modules()}
    functions |= {
        type(part.processor).__call__ for part in module.modules() if hasattr(part, "processor")
    }
    found = [set(names(f.__code__)) for f in functions if hasattr(f, "__code__")]
    return any("bfloat16" in each and "float16" not in each for each in found)


def _of_named(forward: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """A function of these arguments, as torch.export wants it, where there are ``**kwargs``."""
    kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return forward

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    listed = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    named.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    return named


def _given(
    forward: Callable[..., Any], entry: ProgramRecipe, kinds: KindsRead
) -> Callable[..., Any]:
    """A function that makes the inputs whose value is known, and has `kinds` watch all of them."""
    values = {spec.name: int(spec.value[0]) for spec in entry.inputs.values() if spec.known}

    @functools.wraps(forward)
    def given(*args: Any, **kwargs: Any) -> Any:
        made = {n: torch.full(kwargs[n].shape, v, dtype=kwargs[n].dtype) for n, v in values.items()}
        inputs = {**kwargs, **made}
        kinds.given(inputs)
        return forward(*args, **inputs)

    return given


def dynamic_shapes(job: Job) -> dict[str, Any]:
    """AUTO for each axis whose expression reads a free dim, and for each such Python int."""

    def auto(expression: Any) -> Any:
        return Dim.AUTO if job.free(expression) else None

    def of_tensor(name: str) -> dict[int, Any]:
        sizes = job.entry.inputs[name].shape
        return {i: Dim.AUTO if job.free(size) else Dim.STATIC for i, size in enumerate(sizes)}

    shapes: dict[str, Any] = {}
    for name in job.kwargs:
        if name in job.entry.arguments:
            shapes[name] = pytree.tree_map(auto, job.entry.arguments[name])
    for name, spec in job.entry.inputs.items():
        value = find(job.kwargs, spec.path)
        if value is not None:
            axes = of_tensor(name)
            place(shapes, spec.path, [axes] * len(value) if isinstance(value, list) else axes)
    return shapes


def multiples_of(job: Job) -> dict[Axis, int]:
    """The axes whose expression is a number times a free dim, with that number."""
    found: dict[Axis, int] = {}
    for spec in job.entry.inputs.values():
        value = find(job.kwargs, spec.path)
        if value is None:
            continue
        listed = isinstance(value, list)
        paths = [(*spec.path, i) for i in range(len(value))] if listed else [spec.path]
        for axis, size in enumerate(spec.shape):
            if known := job.multiple(size):
                found.update(((path, axis), known[0]) for path in paths)
    return found
