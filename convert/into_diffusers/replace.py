"""A diffusers pipeline whose modules run in MLX: any pipeline, with no code of its own here.

The modules stay what they are, so that the pipeline finds their configuration, dtype, device and
helper methods. Their traced methods are replaced and their weights freed; PyTorch code that reads a
parameter is given the bundle's (`bundle_parameters.py`). What a module returns is put into the
structure that its own method has, found by running it on tensors without data.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from mlxconv.runtime.bundle import LoadedComponent, load_component, open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.options import several
from mlxconv.runtime.program.program import PROGRAM_FILE

from ..recipe.reading import bundle_recipe
from ..recipe.recipe import Recipe
from ..source.arrays import mlx_to_torch
from ..trace.fake_module import Untouchable
from ..trace.patches.posteriors import posteriors
from .parameters import CHANGE_FIRST, StoredWeights, give_to_bundle, named_tensors
from .same_model import check_same_model, refuse_adapters
from .ways import Model, Way

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
    """Replace the modules of a loaded diffusers pipeline with those of a bundle; returns `pipe`.

    components: names to replace; by default all that the bundle has with a program. dtype and
    compile: see `load_component`. Outputs have the dtype of the replaced modules. Raises
    MlxconvError if the bundle was made from another pipeline.
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
    pairs = []
    for name in wanted:
        module = getattr(pipe, name, None)
        if not isinstance(module, nn.Module):
            raise MlxconvError(
                f"{type(pipe).__name__} has no module {name!r}, which {opened.path} has; name "
                "those to replace by components="
            )
        loaded = load_component(opened.path, name)
        recipe = bundle_recipe(loaded.path, loaded.program.class_name)
        check_same_model(module, StoredWeights(loaded, name), recipe)
        pairs.append((module, loaded, recipe, name))
    for module, loaded, recipe, name in pairs:
        shell = _Shell(module, name, [other for other in wanted if other != name])
        _replace(shell, loaded, recipe, dtype, compile, local=opened.remote is None)
    return pipe


def _replace(
    shell: _Shell,
    loaded: LoadedComponent,
    recipe: Recipe,
    dtype: str | None,
    compile: str,
    local: bool,
) -> None:
    module = shell.module
    if getattr(getattr(module, "config", None), "force_upcast", False):
        dtype = dtype or "float32"  # the class overflows in half precision, says its configuration
    model = Model(loaded.path, recipe, shell.dtype, dtype, compile, local)
    for method in dict.fromkeys(recipe.program(entry).method for entry in loaded.entries):
        bridge = _Bridge(shell, model, method, *_method_of(module, method))
        object.__setattr__(bridge.owner, bridge.name, bridge)
    give_to_bundle(module, StoredWeights(loaded, shell.name))
    refuse_adapters(module, shell.name)
    shell.keep()


def _method_of(module: nn.Module, path: str) -> tuple[Any, str, Callable[..., Any]]:
    """Who has a recipe's method, what it is called there, and the method: `model` is a module's
    forward."""
    *parents, name = path.split(".")
    owner: Any = module.get_submodule(".".join(parents))
    if isinstance(getattr(owner, name), nn.Module):
        owner, name = getattr(owner, name), "forward"
    method = getattr(owner, name)
    return owner, name, method.original if isinstance(method, _Bridge) else method


# ---- the structure of results --------------------------------------------------------------------


class _Shell:
    """A module without its weights, that can still say what its methods return."""

    def __init__(self, module: nn.Module, name: str, others: Sequence[str]) -> None:
        self.module, self.name = module, name
        self.instead = (
            f"To run the {name} in PyTorch instead, load the pipeline again and call "
            f"into_diffusers(pipe, bundle, components={list(others)})."
        )
        self.kept: dict[str, type] = {}
        self.parts: dict[str, _Bridge] = {}
        self.by_parts = True  # the class's own method can call its submodules in MLX
        self.wrote = False  # the last method run wrote into its arguments
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    @property
    def dtype(self) -> torch.dtype:
        """That of the first floating parameter."""
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    def keep(self) -> None:
        """Remember the modules and parameters that the program stands for."""
        self.kept = _parts(self.module)

    def check(self) -> None:
        """MlxconvError where the module was changed since: the program would not notice."""
        now = _parts(self.module)
        if now != self.kept:
            changed = min(
                {n for n in now.keys() | self.kept.keys() if now.get(n) != self.kept.get(n)}
            )
            raise MlxconvError(
                f"{self.name}: {changed} was changed after into_diffusers, which the program "
                f"cannot follow; {CHANGE_FIRST}"
            )

    def result(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a method returns for these arguments, its tensors without data."""
        with self.mode, self._filled(), torch.no_grad():
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
            before = _state(args, kwargs)
            found = method(*args, **kwargs)
            self.wrote = _state(args, kwargs) != before
            return found

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    @contextmanager
    def _filled(self) -> Iterator[None]:
        from torch.nn.utils.stateless import _reparametrize_module

        fakes = {name: self._fake(tensor) for name, tensor in named_tensors(self.module).items()}
        with _reparametrize_module(self.module, fakes):
            yield


def _state(*arguments: Any) -> list[Any]:
    """What is in a method's arguments, and how often its tensors were written to."""
    leaves = pytree.tree_leaves(arguments)
    return [(id(x), x._version) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]


def _parts(module: nn.Module) -> dict[str, type]:
    """The types of a module's modules and parameters."""
    return {
        **{name: type(child) for name, child in module.named_modules()},
        **{name: type(p) for name, p in module.named_parameters(remove_duplicate=False)},
    }


# ---- one method ----------------------------------------------------------------------------------


@dataclass
class _Bridge:
    """A module's method in MLX: torch arguments in, the method's own result out."""

    shell: _Shell
    model: Model
    method: str
    owner: Any
    name: str
    original: Callable[..., Any]
    part: bool = False  # a submodule that the class's own method calls
    _structures: dict[str, Any] = field(default_factory=dict)
    _unread: dict[str, bool] = field(default_factory=dict)

    @property
    def ways(self) -> list[Way]:
        """The programs of this method."""
        return self.model.ways(self.method, self.shell.dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.shell.check()
        wishes = [n for n in ("tiling", "slicing") if getattr(self.shell.module, f"use_{n}", False)]
        if self.owner is not self.shell.module:
            wishes = []  # a part already: it is given one tile
        if wishes and self.shell.by_parts:
            try:
                with self._parts_in_mlx():
                    return self.original(*args, **kwargs)
            except MlxconvError as error:
                self.shell.by_parts = False
                warnings.warn(
                    f"{self.shell.name}: {' and '.join(wishes)} has no effect, since its parts "
                    f"cannot run in MLX one by one ({error}); it is computed whole",
                    stacklevel=2,
                )
        with self._without(wishes), posteriors(self.shell.module):
            return self._whole(args, kwargs)

    @contextmanager
    def _without(self, wishes: Sequence[str]) -> Iterator[None]:
        """Inside, the class takes everything at once."""
        for wish in wishes:
            setattr(self.shell.module, f"use_{wish}", False)
        try:
            yield
        finally:
            for wish in wishes:
                setattr(self.shell.module, f"use_{wish}", True)

    def _whole(self, args: Any, kwargs: Any) -> Any:
        if self.part and (self._like(args, kwargs) is None or self.shell.wrote):
            raise MlxconvError(f"{self.method} writes into its inputs")
        outputs = self._outputs(self._named(args, kwargs))
        like = self._like(args, kwargs)
        if like is None:
            return self._plainly(outputs, args, kwargs)
        leaves, spec = pytree.tree_flatten(like)
        values = iter(outputs)
        device = self._device(args, kwargs)
        made = [self._leaf(leaf, values, device) for leaf in leaves]
        return pytree.tree_unflatten(made, spec)

    @contextmanager
    def _parts_in_mlx(self) -> Iterator[None]:
        """Inside, the module's submodules run in MLX, as far as they have submodules themselves."""
        children = [(n, c) for n, c in self.shell.module.named_children() if any(c.children())]
        own = {n: c for n, c in children if not isinstance(c.forward, _Bridge)}
        for name, child in own.items():
            child.forward = self.shell.parts.setdefault(
                name, _Bridge(self.shell, self.model, name, child, "forward", child.forward, True)
            )
        try:
            yield
        finally:
            for child in own.values():
                del child.forward

    def _outputs(self, named: Mapping[str, Any]) -> list[mx.array]:
        """Those of the first program that takes these arguments; one is traced where none does."""
        try:
            return self.model.run(self.method, self.shell.dtype, lambda way: self._for(way, named))
        except MlxconvError as error:
            raise MlxconvError(f"{error} {self.shell.instead}") from error

    def _for(self, way: Way | None, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as a program gets them: without those that the class never looks at."""
        if way is None:
            return dict(named)
        given = {**self._defaults(way.program.arguments), **named}
        ignored = {k for k in given if k not in way.names and self._ignores(k, given)}
        return way.arguments({k: given[k] for k in given if k not in ignored})

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments that say something, by name."""
        bound = self._signature.bind(*args, **kwargs).arguments
        named: dict[str, Any] = {}
        for name, value in bound.items():
            kind = self._signature.parameters[name].kind
            named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return {k: v for k, v in named.items() if not _says_nothing(v)}

    def _defaults(self, names: Iterable[str]) -> dict[str, Any]:
        """What the method takes for these arguments where they are not passed."""
        parameters = self._signature.parameters
        found = {n: parameters[n].default for n in names if n in parameters}
        empty = inspect.Parameter.empty
        return {k: v for k, v in found.items() if v is not None and v is not empty}

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
                self.shell.result(self.original, (), {**given, name: Untouchable()})
                self._unread[name] = True
            except Exception:  # it was touched, or the class needs data: then it matters
                self._unread[name] = False
        return self._unread[name]

    # ---- results ----

    def _like(self, args: Any, kwargs: Any) -> Any:
        """The result without data; None where the class needs data to get there."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
        key = repr((shapes, str(spec), self.shell.dtype))
        if key not in self._structures:
            try:
                self._structures[key] = self.shell.result(self.original, args, kwargs)
            except _NEEDS_DATA:
                self._structures[key] = None
        return self._structures[key]

    def _device(self, args: Any, kwargs: Any) -> torch.device:
        """Where the results go: to the arguments."""
        given = pytree.tree_leaves((args, kwargs))
        tensors = (x for x in given if isinstance(x, torch.Tensor) and x.ndim)
        return next((x.device for x in tensors), torch.device("cpu"))

    def _leaf(self, like: Any, values: Iterator[mx.array], device: torch.device) -> Any:
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
        return mlx_to_torch(value).to(device, like.dtype)

    def _plainly(self, outputs: Sequence[mx.array], args: Any, kwargs: Any) -> Any:
        """A tuple, or the output class that the method's signature names."""
        device = self._device(args, kwargs)
        made = tuple(mlx_to_torch(value).to(device, self.shell.dtype) for value in outputs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.get("return_dict") is not True:
            return made
        classes = get_args(get_type_hints(self.original).get("return"))
        named = [c for c in classes if isinstance(c, type) and issubclass(c, BaseOutput)]
        return named[0](*made) if named else Transformer2DModelOutput(sample=made[0])


def _says_nothing(value: Any) -> bool:
    """Nothing that a trace could depend on: None throughout, or a source of noise, which no traced
    method draws from."""
    leaves = pytree.tree_leaves(value)
    return all(leaf is None or isinstance(leaf, torch.Generator) for leaf in leaves)
