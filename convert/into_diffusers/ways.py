"""The programs of a replaced module's method, and which of them runs a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from torch.utils import _pytree as pytree

from mlxconv.runtime.bundle import LoadedComponent, load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.binding import NotTaken, at
from mlxconv.runtime.generate.staging import Begun, Staged
from mlxconv.runtime.program.program import Entry

from ..recipe.examples import place
from ..recipe.recipe import ProgramRecipe, Recipe, evaluate
from ..source.arrays import torch_to_mlx
from ..store.call_recipe import base_of_part
from ..store.on_demand import trace_call, trace_when_called


@dataclass
class Way:
    """One of a method's programs, and what its last prompts decided: guidance has two in turn."""

    staged: Staged
    program: ProgramRecipe
    begun: list[tuple[list[Any], Begun]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The arguments that it knows."""
        entry = self.staged.component.program.entry(self.staged.name)
        return {i.path.split(".")[0] for i in entry.inputs} | set(self.program.arguments)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Without flags that choose what is returned, which the method's own result is checked for;
        a mask that is not passed is all ones."""
        taken = {k: v for k, v in given.items() if not k.startswith(CHOOSES_OUTPUT)}
        sizes = self._sizes(taken)
        for name, spec in self.program.inputs.items():
            if spec.mask is not None and name not in taken and name in self.names:
                shape = tuple(int(evaluate(size, sizes)) for size in spec.shape)
                kinds = {"bool": torch.bool, "int64": torch.int64}
                ones = torch.ones(shape, dtype=kinds.get(spec.dtype, torch.float32))
                place(taken, spec.path, ones)
        return taken

    def _sizes(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Dims that a given tensor has as a size of its own."""
        return {
            size: given[name].shape[axis]
            for name, spec in self.program.inputs.items()
            if isinstance(given.get(name), torch.Tensor)
            for axis, size in enumerate(spec.shape)
            if isinstance(size, str) and size.isidentifier()
        }

    def run(self, given: Mapping[str, Any]) -> list[mx.array]:
        """The outputs. What the prompt decides is kept while the same tensors come."""
        inputs = torch_to_mlx(given)
        entry = self.staged.entry_for(inputs)
        begun = self._begin(entry, given, inputs)
        rows = {i.path: at(inputs, i.path)[None] for i in entry.inputs if i.stage == "schedule"}
        output = begun.at(rows)(0, **inputs)
        return list(output) if isinstance(output, tuple) else [output]

    def _begin(self, entry: Entry, given: Mapping[str, Any], inputs: dict[str, Any]) -> Begun:
        decided = _decided_by(entry, given)
        for kept, begun in self.begun:
            if _identical(kept, decided):
                return begun
        begun = self.staged.begin(inputs)
        self.begun = [(decided, begun), *self.begun[: _KEPT - 1]]
        return begun


_KEPT = 2
CHOOSES_OUTPUT = ("output_", "return_", "use_cache")  # as diffusers and transformers name them


def _decided_by(entry: Entry, given: Mapping[str, Any]) -> list[Any]:
    """What kept results depend on: the prompt's tensors themselves, and the others' shapes."""
    moving = {i.path.split(".")[0] for i in entry.inputs if i.stage in ("step", "schedule")}
    found: list[Any] = [id(entry)]
    for name, value in given.items():
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                found.append((name, leaf))
            elif name in moving:
                found.append((name, tuple(leaf.shape)))
            else:
                found.append((name, leaf, leaf._version))
    return found


@dataclass
class Model:
    """A component's programs, loaded in the precision that is asked for."""

    path: Path
    recipe: Recipe
    first: torch.dtype  # that of the module when it was replaced
    dtype: str | None
    compile: str
    local: bool  # not in the Hub's cache: sizes traced on demand are added to the bundle
    _loaded: dict[str | None, LoadedComponent] = field(default_factory=dict)  # by precision
    _ways: dict[tuple[str, str | None], list[Way]] = field(default_factory=dict)
    _refused: dict[str, MlxconvError] = field(default_factory=dict)  # calls that cannot be traced

    def run(
        self, method: str, now: torch.dtype, given: Callable[[Way | None], dict[str, Any]]
    ) -> list[mx.array]:
        """The outputs of the first program that takes a call; one is traced for it if none does.

        now: see `ways`; given: a call's arguments as a program gets them, or as they are.
        """
        ways = self.ways(method, now)
        refused: dict[str, MlxconvError] = {}
        for index, way in enumerate(ways):
            try:
                found = way.run(given(way))
            except MlxconvError as error:
                refused[way.program.name] = error
            else:
                ways.insert(0, ways.pop(index))  # tried first next time
                return found
        for reason in refused.values():
            if not isinstance(reason, NotTaken):
                raise reason
        own = [way for way in ways if way.program in self.recipe.programs.values()]
        nearest = max(own, key=lambda way: len(way.names & given(way).keys()), default=None)
        call = given(nearest)
        base = nearest.program if nearest else base_of_part(self.recipe, method, call)
        key = repr((method, pytree.tree_map_only(torch.Tensor, _signature, call)))
        if key not in self._refused:
            loaded = self.loaded(self._precision(now))
            try:
                program = trace_call(loaded, base, call)
            except MlxconvError as error:
                self._refused[key] = error
            else:
                ways.insert(0, self._way(loaded, program.name, program))
                return ways[0].run(call)
        lacking = f"{str(refused[base.name]).rstrip('.')}. Nor can it" if nearest else "It cannot"
        raise MlxconvError(f"{lacking} be traced for this call: {self._refused[key]}.")

    def _way(self, loaded: LoadedComponent, entry: str, program: ProgramRecipe) -> Way:
        return Way(Staged(loaded, entry, compile=self.compile, keep=True), program)

    def ways(self, method: str, now: torch.dtype) -> list[Way]:
        """A method's programs. now: the module's dtype; once that was changed, it is followed, as
        pipelines decode in float32 where a VAE overflows."""
        dtype = self._precision(now)
        if (method, dtype) not in self._ways:
            loaded = self.loaded(dtype)
            self._ways[method, dtype] = [
                self._way(loaded, entry, program)
                for entry in loaded.entries
                if (program := self.recipe.programs.get(entry)) and program.method == method
            ]
        return self._ways[method, dtype]

    def _precision(self, now: torch.dtype) -> str | None:
        return self.dtype if now == self.first else str(now).removeprefix("torch.")

    def loaded(self, dtype: str | None) -> LoadedComponent:
        """The component in one precision; all methods read the same weights."""
        if dtype not in self._loaded:
            self._loaded[dtype] = load_component(self.path, dtype=dtype)
            trace_when_called(self._loaded[dtype], keep=self.local)
        return self._loaded[dtype]


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _identical(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Equal, where tensors have to be the same ones, unchanged."""
    if len(a) != len(b):
        return False
    return all(_alike(x, y) for x, y in zip(a, b))


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(_alike(i, j) for i, j in zip(x, y))
    return x is y if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else x == y
