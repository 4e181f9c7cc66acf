"""A component's config.json read and completed as its diffusers or transformers class does."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import read_json

from ..source.checkpoint import Component, component_class
from ..source.model_class import constructing, library_version, named_config


def full_config(component: Component) -> dict[str, Any]:
    """config.json made self-contained: constructor defaults filled in, unknown keys dropped.

    JSON-serialisable. For diffusers classes with `_class_name` and `_diffusers_version`.
    """
    cls = component_class(component)
    ours = hasattr(cls, "extract_init_dict") or (
        component.named and not hasattr(cls, "config_class")
    )
    if ours:
        return constructor_config(cls, component.config, component.path)
    return transformers_config(cls, component.path)


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
            f"installed {library_version(library)} does not know {listed}; "
            f"upgrade it (pip install -U {library}), or remove the key if the model does not "
            "need it"
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
    from .fake_module import build_module  # needs torch

    try:
        made: Any = build_module(cls, config)[0]
    except MlxconvError:
        return {}
    return dict(made.config)


def _is_newer(written: Any, library: str) -> bool:
    """Whether a version in a file is above the installed one."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(str(written)) > Version(library_version(library).partition(" ")[2])
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
