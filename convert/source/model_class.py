"""The diffusers or transformers class behind a component."""

from __future__ import annotations

import difflib
import importlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeGuard

from mlxconv.runtime.errors import MlxconvError


class CannotBuild(MlxconvError):
    """A class whose constructor does not take a configuration."""

    def __init__(self, class_name: str, reason: str, file: str = "config.json") -> None:
        super().__init__(
            f"{file}: {class_name} cannot be built from it ({reason}); correct it, or get the "
            "original one"
        )
        self.class_name, self.reason = class_name, reason


@contextmanager
def constructing(cls: type) -> Iterator[None]:
    """Around a constructor or `from_pretrained`: whatever it raises becomes CannotBuild."""
    try:
        yield
    except (MlxconvError, MemoryError):
        raise
    except Exception as error:  # each class fails in its own way
        raise CannotBuild(cls.__name__, in_one_line(error)) from error


def in_one_line(error: Exception) -> str:
    """An exception's kind and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}".removesuffix(": ")


@contextmanager
def named_config(folder: Path) -> Iterator[None]:
    """Name the config.json of a component's folder in CannotBuild."""
    try:
        yield
    except CannotBuild as error:
        file = str(folder / "config.json")
        raise CannotBuild(error.class_name, error.reason, file) from error.__cause__


LEGACY_CLASSES = frozenset({"Transformer2DModel"})  # what diffusers' LegacyModelMixin serves


def current_class_name(class_name: str, config: dict[str, Any]) -> str:
    """The class that diffusers loads in place of a legacy one (by `norm_type`), else the same.

    diffusers is imported for legacy names only.
    """
    if class_name not in LEGACY_CLASSES or "norm_type" not in config:
        return class_name
    from diffusers.models.model_loading_utils import _CLASS_REMAPPING_DICT

    remapped = _CLASS_REMAPPING_DICT.get(class_name, {}).get(config["norm_type"])
    return str(remapped) if remapped else class_name


def find_class(library: str, class_name: str, where: Path) -> type:
    """The torch module class of that name; `where` is named in the error.

    `library` is diffusers, transformers or, as in model_index.json, a module of
    diffusers.pipelines.
    """
    module = _library(library, class_name, where)
    found: Any = getattr(module, class_name, None)
    if not is_model(found):
        hint = _placeholder_hint(found) or close_classes(class_name, module)
        raise MlxconvError(
            f"{where}: {library_version(library)} has no model class {class_name!r}{hint}; "
            f"{_own_class_hint(where, 'MODULE', class_name)}"
        )
    return found


def _own_class_hint(where: Path, module: str, class_name: str) -> str:
    command = shlex.join(["mlxconv", "convert", str(where), "--class", f"{module}:{class_name}"])
    return f"a class of your own is converted by: {command}"


def close_classes(class_name: str, *libraries: Any) -> str:
    """` (did you mean A or B?)`: model classes whose names are like this one, if any."""
    near = [
        name
        for library in libraries
        for name in difflib.get_close_matches(class_name, dir(library), 2, 0.85)
        if is_model(getattr(library, name))
    ]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def is_model(found: Any) -> TypeGuard[type]:
    """Whether something is a torch module class."""
    import torch

    return isinstance(found, type) and issubclass(found, torch.nn.Module)


def named_class(module: str, class_name: str) -> type:
    """The torch module class that a user named by its module, which is imported; the current folder
    is searched last."""
    try:
        found = getattr(_imported(module), class_name, None)
    except (ImportError, TypeError, ValueError) as error:
        raise MlxconvError(
            f"--class {module}:{class_name}: cannot import {module} ({error}); run mlxconv in the "
            "folder that has it, install it, or set PYTHONPATH"
        ) from error
    if not is_model(found):
        raise MlxconvError(f"--class {module}:{class_name}: {module} has no such torch module")
    return found


def _imported(module: str) -> Any:
    """A console script has its own folder on the path, not the current one, as `python -m` has."""
    here = str(Path.cwd())
    if {"", here} & set(sys.path):
        return importlib.import_module(module)
    sys.path.append(here)
    try:
        return importlib.import_module(module)
    except BaseException:
        sys.path.remove(here)
        raise


def bundled_class(library: str, class_name: str, folder: Path) -> type:
    """The torch module class that a bundle's component at `folder` was converted from."""
    import diffusers

    if library in ("diffusers", "transformers") or hasattr(diffusers.pipelines, library):
        return find_class(library, class_name, folder)
    recorded_class(library, class_name, [folder.parent])
    return named_class(library, class_name)


def recorded_class(module: str, class_name: str, folders: Sequence[Path]) -> str:
    """`module:Class` as a bundle names it. A bundle is data: MlxconvError where the module would be
    imported from one of these folders, which may have come with it."""
    here = str(Path.cwd())
    places = sys.path if {"", here} & set(sys.path) else [*sys.path, here]
    found = PathFinder.find_spec(module.partition(".")[0], places)
    origins = (found.submodule_search_locations or [found.origin or ""]) if found else []
    roots = [Path(p) for p in origins]
    inside = [r for r in roots for f in folders if r.resolve().is_relative_to(f.resolve())]
    if inside:
        raise MlxconvError(
            f"the bundle was converted by {module}:{class_name}, which is in {inside[0]}, next "
            f"to the weights; if you trust that code, add --class {module}:{class_name}"
        )
    return f"{module}:{class_name}"


def _library(library: str, class_name: str, where: Path) -> Any:
    import diffusers
    import transformers

    if library in ("diffusers", "transformers"):
        return {"diffusers": diffusers, "transformers": transformers}[library]
    module = getattr(diffusers.pipelines, library, None)
    if module is None:
        raise MlxconvError(
            f"{where}: library {library!r} is neither diffusers, transformers nor a module of "
            f"diffusers.pipelines; {_own_class_hint(where, library, class_name)}"
        )
    return module


def library_version(library: str) -> str:
    """Name and installed version of diffusers or transformers."""
    import diffusers
    import transformers

    module = transformers if library == "transformers" else diffusers
    return f"{module.__name__} {module.__version__}"


def _placeholder_hint(found: Any) -> str:
    """diffusers puts placeholder classes where an optional package is not installed."""
    backends = getattr(found, "_backends", None)
    return f" without {', '.join(backends)}, which has to be installed for it" if backends else ""
