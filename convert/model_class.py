"""The diffusers or transformers class behind a component, and its configuration made complete."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import MlxconvError

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
            f"{_placeholder_hint(found)} add a recipe TOML: see README, or pass --recipe FILE"
        )
    return found


def named_class(module: str, class_name: str) -> type:
    """The torch module class that a user named by its module, which is imported."""
    import importlib

    import torch

    try:
        found = getattr(importlib.import_module(module), class_name, None)
    except (ImportError, TypeError, ValueError) as error:
        raise MlxconvError(
            f"--class {module}:{class_name}: cannot import {module} ({error}); install it, or set "
            "PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise MlxconvError(f"--class {module}:{class_name}: {module} has no such torch module")
    return found


def constructor_config(cls: Any, config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Constructor defaults overlaid with config.json, as diffusers' `from_config` merges them.

    Keys that the constructor does not take are dropped. Raises MlxconvError where an argument
    without default is not configured.
    """
    extract = getattr(cls, "extract_init_dict", None)
    given = extract(dict(config))[0] if extract else config
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


def transformers_config(cls: Any, path: Path) -> dict[str, Any]:
    """The configuration that transformers reads from the folder, with its defaults."""
    if getattr(cls, "config_class", None) is None:
        raise MlxconvError(
            f"{path}: {cls.__name__} has no configuration class; name the model's own class in "
            "model_index.json or in config.json's architectures"
        )
    try:
        config = cls.config_class.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers validates with many kinds of exception
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise MlxconvError(
            f"{path / 'config.json'}: {cls.__name__} does not accept it ({first}); "
            "get the original config.json"
        ) from error
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
            "diffusers.pipelines; add a recipe TOML: see README, or pass --recipe FILE"
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
