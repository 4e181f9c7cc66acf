"""A diffusers pipeline whose modules run in MLX: any pipeline, with no code of its own here.

The modules stay what they are, so that the pipeline finds their configuration, dtype, device and
helper methods; their traced methods are replaced, and their weights are let go. What a module
returns is put into the structure that its own method has, found by running it on tensors without
data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import mlx.core as mx
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils import BaseOutput
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils import _pytree as pytree

from mlxconv.runtime.binding import at
from mlxconv.runtime.bundle import LoadedComponent, load_component, open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.options import several
from mlxconv.runtime.program import PROGRAM_FILE, Entry
from mlxconv.runtime.staging import Begun, Staged

from .forwards import mlx_inputs
from .posteriors import register_posteriors
from .recipe import ProgramRecipe, bundle_recipe, evaluate, place
from .reference import mlx_to_torch

_NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def into_diffusers(
    pipe: Any,
    bundle: str | Path,
    *,
    components: str | Sequence[str] | None = None,
    dtype: str | None = None,
    compile: str = "program",
) -> Any:
    """Replace the modules of a loaded diffusers pipeline by those of its bundle; returns `pipe`.

    components: names to replace; by default all that the bundle has with a program. dtype and
    compile: see `load_component`. Results come in the modules' own dtype. MlxconvError when the
    bundle is of another pipeline.
    """
    opened = open_bundle(bundle)
    found = [n for n in opened.manifest["components"] if (opened.path / n / PROGRAM_FILE).is_file()]
    wanted = list(several(components)) if components is not None else found
    unknown = [name for name in wanted if name not in found]
    if unknown:
        raise MlxconvError(
            f"{opened.path}: has no program for {', '.join(unknown)}; it has {', '.join(found)}"
        )
    opened.need(wanted)
    for name in wanted:
        module = getattr(pipe, name, None)
        if not isinstance(module, nn.Module):
            raise MlxconvError(
                f"{type(pipe).__name__} has no module {name!r}, which {opened.path} has; name "
                "those to replace by components="
            )
        _replace(module, load_component(opened.path, name, dtype=dtype), name, compile)
    return pipe


def _replace(module: nn.Module, loaded: LoadedComponent, name: str, compile: str) -> None:
    traced, own = loaded.program.class_name, type(module).__name__
    if traced != own:
        raise MlxconvError(f"{name}: the pipeline's is a {own}, the bundle's a {traced}")
    register_posteriors(module)
    recipe = bundle_recipe(loaded.path, traced)
    shell = _Shell(module)
    bridges: dict[str, _Bridge] = {}
    for entry in loaded.entries:
        program = recipe.program(entry)
        if program.method not in bridges:
            bridges[program.method] = _Bridge(shell, *_method_of(module, program.method))
        staged = Staged(loaded, entry, compile=compile, keep=True)
        bridges[program.method].ways.append(_Way(staged, program))
    for bridge in bridges.values():
        object.__setattr__(bridge.owner, bridge.name, bridge)
    shell.empty()


def _method_of(module: nn.Module, path: str) -> tuple[Any, str, Callable[..., Any]]:
    """Who has a recipe's method, what it is called there, and the method: `model` is a module's
    forward."""
    *parents, name = path.split(".")
    owner: Any = module.get_submodule(".".join(parents))
    if isinstance(getattr(owner, name), nn.Module):
        owner, name = getattr(owner, name), "forward"
    return owner, name, getattr(owner, name)


# ---- the structure of results --------------------------------------------------------------------


class _Shell:
    """A module without its weights, that can still say what its methods return."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Under all of their names: a tied weight has several.
        tensors = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        with self.mode:
            self.fakes = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """That of the first floating parameter."""
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    def empty(self) -> None:
        """Let the weights go; parameters keep their dtype and device."""
        for tensor in self.module.parameters():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def result(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a method returns for these arguments, its tensors without data."""
        with self.mode, self._filled(), torch.no_grad():
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
            return method(*args, **kwargs)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    @contextmanager
    def _filled(self) -> Iterator[None]:
        from torch.nn.utils.stateless import _reparametrize_module

        with _reparametrize_module(self.module, self.fakes):
            yield


# ---- one method ----------------------------------------------------------------------------------


@dataclass
class _Way:
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
        """Without flags, which the trace has decided; a mask that is not passed is all ones."""
        flags = {k for k, v in self.program.arguments.items() if isinstance(v, bool)}
        taken = {k: v for k, v in given.items() if k not in flags}
        sizes = self._sizes(taken)
        for name, spec in self.program.inputs.items():
            if spec.mask is not None and name not in taken and name in self.names:
                shape = tuple(int(evaluate(size, sizes)) for size in spec.shape)
                place(taken, spec.path, torch.ones(shape, dtype=torch.int64))
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
        inputs = mlx_inputs(given)
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
class _Bridge:
    """A module's method in MLX: torch arguments in, the method's own result out."""

    shell: _Shell
    owner: Any
    name: str
    original: Callable[..., Any]
    ways: list[_Way] = field(default_factory=list)
    _structures: dict[str, Any] = field(default_factory=dict)
    _unread: dict[str, bool] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._outputs(self._named(args, kwargs))
        like = self._like(args, kwargs)
        if like is None:
            return self._plainly(outputs, args, kwargs)
        leaves, spec = pytree.tree_flatten(like)
        values = iter(outputs)
        return pytree.tree_unflatten([self._leaf(leaf, values) for leaf in leaves], spec)

    def _outputs(self, given: Mapping[str, Any]) -> list[mx.array]:
        """Those of the first program that takes these arguments."""
        refused: list[MlxconvError] = []
        for way in self.ways:
            ignored = {k for k in given if k not in way.names and self._ignores(k, given)}
            try:
                return way.run(way.arguments({k: given[k] for k in given if k not in ignored}))
            except MlxconvError as error:
                refused.append(error)
        raise refused[0]

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments that say something, by name."""
        bound = self._signature.bind(*args, **kwargs).arguments
        named: dict[str, Any] = {}
        for name, value in bound.items():
            kind = self._signature.parameters[name].kind
            named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return {k: v for k, v in named.items() if not _says_nothing(v)}

    @property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def _ignores(self, name: str, given: Mapping[str, Any]) -> bool:
        """Whether the class, configured as it is, never looks at an argument."""
        parameter = self._signature.parameters.get(name)
        default = None if parameter is None else parameter.default
        if given[name] is default or (given[name] is False and default is None):
            return True
        if name not in self._unread:
            try:
                self.shell.result(self.original, (), {**given, name: _Untouchable()})
                self._unread[name] = True
            except Exception:  # it was touched, or the class needs data: then it matters
                self._unread[name] = False
        return self._unread[name]

    # ---- results ----

    def _like(self, args: Any, kwargs: Any) -> Any:
        """The result without data; None where the class needs data to get there."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
        key = repr((shapes, str(spec)))
        if key not in self._structures:
            try:
                self._structures[key] = self.shell.result(self.original, args, kwargs)
            except _NEEDS_DATA:
                self._structures[key] = None
        return self._structures[key]

    def _leaf(self, like: Any, values: Iterator[mx.array]) -> Any:
        if not isinstance(like, torch.Tensor):
            return like
        value = next(values, None)
        if value is None or tuple(value.shape) != tuple(like.shape):
            found = "nothing" if value is None else tuple(value.shape)
            raise MlxconvError(
                f"{type(self.shell.module).__name__}.{self.name}: the method returns "
                f"{tuple(like.shape)} here, the program gives {found}: it was traced with other "
                "flags"
            )
        return mlx_to_torch(value).to(like.dtype)

    def _plainly(self, outputs: Sequence[mx.array], args: Any, kwargs: Any) -> Any:
        """A tuple, or the output class that the method's signature names."""
        made = tuple(mlx_to_torch(value).to(self.shell.dtype) for value in outputs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.get("return_dict") is not True:
            return made
        classes = get_args(get_type_hints(self.original).get("return"))
        named = [c for c in classes if isinstance(c, type) and issubclass(c, BaseOutput)]
        return named[0](*made) if named else Transformer2DModelOutput(sample=made[0])


class _Untouchable:
    """Stands for an argument; whatever is done with it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)

    def __bool__(self) -> bool:
        raise TypeError("an argument was read")


def _says_nothing(value: Any) -> bool:
    """Nothing that a trace could depend on: None throughout, or a source of noise, which no traced
    method draws from."""
    leaves = pytree.tree_leaves(value)
    return all(leaf is None or isinstance(leaf, torch.Generator) for leaf in leaves)


def _identical(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Equal, where tensors have to be the same ones, unchanged."""
    if len(a) != len(b):
        return False
    return all(_alike(x, y) for x, y in zip(a, b))


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(_alike(i, j) for i, j in zip(x, y))
    return x is y if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else x == y
