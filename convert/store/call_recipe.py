"""A recipe read off a call: what it passes and no program takes, in the dims of the class's recipe.

Whatever the class's forward takes can be traced this way: the tensors that a ControlNet adds, one
more picture in a list. Sizes that follow those of the recipe's own inputs stay free, others are
those of the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.binding import at
from mlxconv.runtime.exec.sizes import solved
from mlxconv.runtime.program.expressions import Expression, evaluate, names_in

from ..recipe.recipe import Dim, DType, ProgramRecipe, Recipe, RecipeInput

_HALVINGS = 6  # of a picture, from the latents to the smallest level of a UNet


def recipes_of_call(
    recipe: Recipe,
    base: ProgramRecipe,
    name: str,
    config: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Iterator[tuple[Recipe, dict[str, int]]]:
    """Recipes whose program `name` takes these arguments, the most general first, each with the
    dims of the call.

    base: the program of the recipe that is nearest. given: the method's arguments by name, of
    torch tensors, lists and dictionaries of them, and Python numbers. The later recipes take the
    call's kinds (boolean, integer, float) for the recipe's and assume nothing of values; the last
    fixes every size.
    """
    reading = _Reading(recipe, base, config, given)
    programs = [reading.program(name, own) for own in (False, True)]
    for program in programs[: 1 if programs[0] == programs[1] else 2]:
        dims = {**recipe.dims, **reading.more}
        yield replace(recipe, dims=dims, programs={name: program}), reading.dims
    known = programs[1].inputs
    inputs = {n: replace(_fixed(n, tensor), stage=known[n].stage) for n, tensor in _tensors(given)}
    program = replace(programs[1], inputs=inputs, arguments={**base.arguments, **_plain(given)})
    yield replace(recipe, dims={}, sizes={}, programs={name: program}), {}


def base_of_part(recipe: Recipe, method: str, given: Mapping[str, Any]) -> ProgramRecipe:
    """A submodule's program, in the terms of the recipe's program that is likely to call it: what
    a `decoder` takes is made as what `decode` takes."""
    alike = [p for p in recipe.programs.values() if p.method.strip("_") in method]
    inputs = {}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            continue
        specs = (s for p in alike for s in p.inputs.values() if len(s.shape) == value.ndim)
        spec = next(specs, None)
        if spec is not None:
            inputs[name] = replace(spec, name=name)
    return ProgramRecipe(method, method, inputs)


@dataclass
class _Reading:
    """A call, read with a program's recipe.

    dims: the sizes that the call has. more: dims of items that a list has beyond the recipe's, and
    `terms`: for each of those items, what the recipe's dims are called in it.
    """

    recipe: Recipe
    base: ProgramRecipe
    config: Mapping[str, Any]
    given: Mapping[str, Any]
    dims: dict[str, int] = field(default_factory=dict)
    more: dict[str, Dim] = field(default_factory=dict)
    terms: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = [(e, n) for spec, tensor in self._known() for e, n in zip(spec.shape, tensor.shape)]
        self.arguments = {**self.base.arguments}
        for name, value in _plain(self.given).items():
            self.arguments[name] = value
            for template in _nestings(self.base.arguments.get(name)):
                known, items = len(pairs), len(self.terms)
                try:
                    self.arguments[name] = self._samples(template, value, pairs)
                    break
                except _Unlike:
                    del pairs[known:], self.terms[items:]
        self.dims |= {n: s for n, s in solved(pairs, self.config).items() if n in self.recipe.dims}

    def _known(self) -> Iterator[tuple[RecipeInput, torch.Tensor]]:
        """The recipe's inputs with the call's tensors, where they have as many axes."""
        for spec in self.base.inputs.values():
            value = at(self.given, spec.name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, torch.Tensor) and value.ndim == len(spec.shape):
                yield spec, value

    def _samples(self, template: Any, value: Any, pairs: list[tuple[Expression, int]]) -> Any:
        """A Python argument; of a list that says the same of each sample one item is enough."""
        listed = isinstance(template, list) and isinstance(value, (list, tuple))
        once = listed and len(template) == 1 and all(item == value[0] for item in value)
        return self._argument(template, value[:1] if once else value, pairs)

    def _argument(self, template: Any, value: Any, pairs: list[tuple[Expression, int]]) -> Any:
        """A Python argument in the recipe's dims; further items of a list get dims of their own."""
        if isinstance(template, str) and type(value) is int:
            pairs.append((template, value))
            return template
        if not isinstance(template, list) or not isinstance(value, (list, tuple)):
            if template == value and type(template) is type(value):
                return value
            raise _Unlike
        if len(value) < len(template):
            raise _Unlike
        items = [self._argument(t, v, pairs) for t, v in zip(template, value)]
        items += [self._item(template[-1], v) for v in value[len(template) :]]
        return tuple(items) if isinstance(value, tuple) else items

    def _item(self, template: Any, value: Any) -> Any:
        """An item that the recipe does not list, made like the last that it does."""
        pairs: list[tuple[Expression, int]] = []
        known = self._argument(template, value, pairs)
        number = len(self.terms) + 1
        names = {str(e): f"{e}_{number}" for e, _ in pairs if str(e) in self.recipe.dims}
        if len(names) < len(pairs):
            raise _Unlike
        for old, size in pairs:
            name = names[str(old)]
            self.dims[name] = size
            self.more[name] = Dim(name, evaluate(self.recipe.dims[str(old)].trace, self.config))
        self.terms.append(names)
        return pytree.tree_map(lambda leaf: names.get(leaf, leaf), known)

    # ---- inputs ----

    def program(self, name: str, own: bool) -> ProgramRecipe:
        """own: the call's kinds, and no value taken for granted."""
        inputs = {}
        listed = {spec.name for spec in self.base.inputs.values() if spec.count is not None}
        for path, tensor in _tensors(self.given):
            parent = path.rpartition(".")[0]
            spec = self.base.inputs.get(parent if parent in listed else path)
            if spec is None or len(spec.shape) != tensor.ndim:
                inputs[path] = replace(_fixed(path, tensor), shape=self._shape(tensor))
                continue
            shape = tuple(self._size(e, n) for e, n in zip(spec.shape, tensor.shape))
            spec = replace(spec, name=path, shape=shape, count=None, when=True)
            if own and _kind(spec.dtype) != _kind(_dtype(tensor)):
                spec = replace(_fixed(path, tensor), shape=shape, stage=spec.stage)
            inputs[path] = replace(spec, known=spec.known and not own)
        truths = self.base.truths
        return ProgramRecipe(name, self.base.method, inputs, self.arguments, truths=truths)

    def _size(self, expression: Expression, size: int) -> Expression:
        """A size of a known input: the recipe's, with a term for each further item."""
        if self._is(expression, size):
            return expression
        longer = str(expression)
        for names in self.terms:
            last = str(expression).rpartition(" + ")[2]
            longer += " + " + _renamed(last, names)
        return longer if self._is(longer, size) else size

    def _is(self, expression: Expression, size: int) -> bool:
        names = {**self.config, **self.dims}
        return names_in(expression) <= names.keys() and evaluate(expression, names) == size

    def _shape(self, tensor: torch.Tensor) -> tuple[Expression, ...]:
        """A new tensor's, like that of the recipe's input whose sizes it has, whole or halved."""
        found: list[tuple[Expression, ...]] = [tuple(tensor.shape)]
        for spec, _ in self._known():
            if len(spec.shape) == tensor.ndim:
                found.append(tuple(map(self._follows, spec.shape, tensor.shape, count())))
        return max(found, key=lambda shape: sum(isinstance(size, str) for size in shape))

    def _follows(self, expression: Expression, size: int, axis: int) -> Expression:
        if not names_in(expression) & self.dims.keys():
            return size
        halvings = range(1, _HALVINGS + 1 if axis > 1 else 1)
        halves = (f"-(-({expression}) // {2**k})" for k in halvings)
        whole = self._size(expression, size)
        return whole if whole != size else next((e for e in halves if self._is(e, size)), size)


def _nestings(template: Any) -> Iterator[Any]:
    """A Python argument of a recipe, and the same without its outer lists of one."""
    yield template
    if isinstance(template, list) and len(template) == 1:
        yield from _nestings(template[0])


def _renamed(expression: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\b[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), expression)


class _Unlike(Exception):
    """An argument is not made as the recipe's."""


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a call by dotted path."""
    for path, leaf in pytree.tree_flatten_with_path(dict(given))[0]:
        if isinstance(leaf, torch.Tensor):
            yield ".".join(str(getattr(p, "key", getattr(p, "idx", ""))) for p in path), leaf


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that hold no tensor, as a recipe writes them.

    MlxconvError for one that has both tensors and numbers, which no recipe can write.
    """
    found = {}
    for name, value in given.items():
        leaves = [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]
        tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if tensors not in (0, len(leaves)):
            raise MlxconvError(f"{name} holds tensors and numbers: it cannot be traced")
        if not tensors:
            found[name] = pytree.tree_map_only(str, repr, value)
    return found


def _fixed(path: str, tensor: torch.Tensor) -> RecipeInput:
    """An input of one shape, of which nothing is known."""
    dtype = _dtype(tensor)
    integers = (0, 2) if dtype == "int64" else None
    return RecipeInput(path, tuple(tensor.shape), dtype, integers=integers)


def _dtype(tensor: torch.Tensor) -> DType:
    if tensor.dtype == torch.bool:
        return "bool"
    return "compute" if tensor.is_floating_point() else "int64"


def _kind(dtype: str) -> str:
    return "float" if dtype in ("compute", "float32") else dtype
