"""The diffusers or transformers class behind a component, and its configuration made complete."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import read_json


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
    import torch

    found = getattr(_library(library, where), class_name, None)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise MlxconvError(
            f"{where}: unknown class {class_name!r} of {library} (installed: {_version(library)});"
            f"{_placeholder_hint(found)} add a recipe TOML (see docs/ADDING_A_MODEL.md), "
            "or pass --recipe FILE"
        )
    return found


def named_class(module: str, class_name: str) -> type:
    """The torch module class that a user named by its module, which is imported; the current folder
    is searched last."""
    import torch

    try:
        found = getattr(_imported(module), class_name, None)
    except (ImportError, TypeError, ValueError) as error:
        raise MlxconvError(
            f"--class {module}:{class_name}: cannot import {module} ({error}); run mlxconv in the "
            "folder that has it, install it, or set PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
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
            f"the bundle was converted by {module}:{class_name}, which is in {inside[0]}, beside "
            f"the weights; if you trust that code, add --class {module}:{class_name}"
        )
    return f"{module}:{class_name}"


def constructor_config(cls: Any, config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Constructor defaults overlaid with config.json, as diffusers' `from_config` merges them.

    Keys that the constructor does not take are dropped, as diffusers drops them (`unknown_keys`).
    Raises MlxconvError where an argument without default is not configured, and where a newer
    diffusers wrote a key that the installed one does not know: its class computes with it.
    """
    with named_config(where):
        _refuse_newer(cls, config, where, "diffusers", config.get("_diffusers_version"))
        given = _extracted(cls, config)[0] if hasattr(cls, "extract_init_dict") else config
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    merged = {p.name: given.get(p.name, p.default) for p in named}
    missing = [name for name, value in merged.items() if value is inspect.Parameter.empty]
    if missing:
        raise MlxconvError(
            f"{where / 'config.json'}: {cls.__name__} needs {', '.join(missing)}, which have no "
            "default; get the complete config.json"
        )
    merged["_class_name"] = cls.__name__
    if "_diffusers_version" in config:
        merged["_diffusers_version"] = config["_diffusers_version"]
    return _as_json(merged, where)


def _refuse_newer(
    cls: Any, config: Mapping[str, Any], where: Path, library: str, written: Any
) -> None:
    newer = unknown_keys(cls, config) if _is_newer(written, library) else {}
    if newer := {k: v for k, v in newer.items() if v is not None}:
        listed = ", ".join(f"{key} = {value!r:.40}" for key, value in newer.items())
        raise MlxconvError(
            f"{where / 'config.json'}: written by {library} {written}, {cls.__name__} of the "
            f"installed {_version(library)} does not know {listed}; upgrade it (pip install -U "
            f"{library}), or remove the key if the model does not need it"
        )


def unknown_keys(cls: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a config.json, the entries that the class neither takes nor makes itself."""
    if hasattr(cls, "extract_init_dict"):
        used, left = _extracted(cls, config)
        unknown = {k: v for k, v in left.items() if k in config}
        made = _registered(cls, used) if unknown else {}
        return {k: v for k, v in unknown.items() if k not in made}
    if hasattr(cls, "config_class"):
        modules = {sys.modules[each.__module__] for each in (cls, cls.config_class)}
        words = set(re.findall(r"\w+", "".join(map(inspect.getsource, modules))))
        return _unknown_of_transformers(cls.config_class, config, words)
    known = inspect.signature(cls.__init__).parameters
    return {k: v for k, v in config.items() if k not in known and not k.startswith("_")}


def _extracted(cls: Any, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What diffusers gives the constructor of a configuration, and what is left."""
    with constructing(cls):
        used, left, _ = cls.extract_init_dict(dict(config))
    return used, left


def _unknown_of_transformers(
    cls: Any, config: Mapping[str, Any], words: Container[str]
) -> dict[str, Any]:
    """Keys that transformers keeps, as whatever it finds, though the class has no such field.

    words: of the model's source, which may read a key that is no field. Keys of a part are named
    with the part's name. Settings of text generation, and what is null, have no effect here.
    """
    from transformers import GenerationConfig

    try:
        made, plain = cls.from_dict(dict(config)), cls()
    except Exception:  # `transformers_config` says what is wrong
        return {}
    kept, parts = made.to_dict(), dict(getattr(cls, "sub_configs", {}))
    known = [plain, *(getattr(plain, name, None) for name in parts), GenerationConfig()]
    unknown = {
        key: value
        for key, value in config.items()
        if key in kept
        and key not in words
        and value is not None
        and not key.startswith("_")
        and not any(hasattr(each, key) for each in known)
    }
    for name in parts:
        part, inner = getattr(made, name, None), config.get(name)
        if part is not None and isinstance(inner, dict):
            inside = _unknown_of_transformers(type(part), inner, words)
            unknown |= {f"{name}.{key}": value for key, value in inside.items()}
    return unknown


def _registered(cls: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration that the constructor makes, which may have more than it takes."""
    from .fake_module import build_module

    try:
        made: Any = build_module(cls, config)[0]
    except MlxconvError:
        return {}
    return dict(made.config)


def _is_newer(written: Any, library: str) -> bool:
    """Whether a version in a file is above the installed one."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(str(written)) > Version(_version(library).partition(" ")[2])
    except InvalidVersion:
        return False


def transformers_config(cls: Any, path: Path) -> dict[str, Any]:
    """The configuration that transformers reads from the folder, with its defaults."""
    if getattr(cls, "config_class", None) is None:
        raise MlxconvError(
            f"{path}: {cls.__name__} has no configuration class; name the model's own class in "
            "model_index.json or in config.json's architectures"
        )
    with named_config(path), constructing(cls):
        config = cls.config_class.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    written = read_json(path / "config.json")
    _refuse_newer(cls, written, path, "transformers", written.get("transformers_version"))
    loaded: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return loaded


def _as_json(config: dict[str, Any], where: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads(json.dumps(config))
    except TypeError as error:
        raise MlxconvError(
            f"{where / 'config.json'}: the merged configuration is not JSON ({error})"
        ) from error
    return loaded


def _library(library: str, where: Path) -> Any:
    import diffusers
    import transformers

    if library in ("diffusers", "transformers"):
        return {"diffusers": diffusers, "transformers": transformers}[library]
    module = getattr(diffusers.pipelines, library, None)
    if module is None:
        raise MlxconvError(
            f"{where}: library {library!r} is neither diffusers, transformers nor a module of "
            "diffusers.pipelines; add a recipe TOML (see docs/ADDING_A_MODEL.md), "
            "or pass --recipe FILE"
        )
    return module


def _version(library: str) -> str:
    import diffusers
    import transformers

    module = transformers if library == "transformers" else diffusers
    return f"{module.__name__} {module.__version__}"


def _placeholder_hint(found: Any) -> str:
    """diffusers puts placeholder classes where an optional package is not installed."""
    backends = getattr(found, "_backends", None)
    return f" install {', '.join(backends)} for it, or" if backends else ""
