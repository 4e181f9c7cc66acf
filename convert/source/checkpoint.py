"""Checkpoints on disk: a pipeline folder or one component's folder, opened by headers alone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import ArgumentError, MlxconvError
from mlxconv.runtime.files import read_json

from .keys import KeyMatch, match_keys, tied_weights
from .model_class import current_class_name, find_class, named_class
from .safetensors_io import StoredTensor
from .weight_files import Stamp, file_names, has_weights, read_weights

__all__ = [
    "Checkpoint",
    "Component",
    "KeyMatch",
    "StoredTensor",
    "component_class",
    "match_keys",
    "open_checkpoint",
    "open_component",
    "tied_weights",
]

INDEX_NAMES = ("model_index.json", "modular_model_index.json")
LOOSE = re.compile(r"(license|notice|readme|copying).*|.*\.(md|txt)", re.IGNORECASE)
_WEIGHTLESS_CLASS = re.compile(r"Tokenizer|Processor|Scheduler|FeatureExtractor|Guider|Guidance")
# Class names of a model index that stand for "whatever config.json says".
_ANY_CLASS = re.compile(r"Auto(?!encoder)\w*|\w*PreTrainedModel|ModelMixin")
_NAMES_BY_CLASS = (
    (re.compile(r"Autoencoder"), "vae"),
    (re.compile(r"Transformer"), "transformer"),
    (re.compile(r"UNet"), "unet"),
)


@dataclass
class Component:
    """One model folder: its class by name, its raw config.json, its tensors by header.

    `variant` is that of the weight files in use (None for plain ones). `library` is diffusers,
    transformers, a module of diffusers.pipelines, or, where `named`, the module that the user
    named the class in. `stamps`: of the weight files, as they were opened; {} for the Hub's, which
    do not change.
    """

    name: str
    path: Path
    library: str
    class_name: str
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    variant: str | None
    files: list[Path]
    stamps: dict[Path, Stamp]
    named: bool = False


@dataclass
class Checkpoint:
    """A pipeline folder, or one component's folder (then `class_name` is None).

    `others` are folders without weights, `loose_files` licences and notes at the root, `skipped`
    the names in the index or in the folder that are not in use, with the reason. `source` is what
    it is called, the folder or the Hub's id; `revision` the commit, where that is known.
    """

    path: Path
    class_name: str | None
    index: dict[str, Any]
    components: dict[str, Component]
    others: dict[str, Path]
    loose_files: list[Path]
    skipped: dict[str, str] = field(default_factory=dict)
    source: str = ""
    revision: str | None = None

    def __post_init__(self) -> None:
        self.source = self.source or str(self.path)
        resolved = self.path.absolute()
        if self.revision is None and resolved.parent.name == "snapshots":
            self.revision = resolved.name  # it lies in the Hub's cache


def open_checkpoint(
    source: str | Path, variant: str | None = None, model_class: str | None = None
) -> Checkpoint:
    """Open a diffusers pipeline folder or a single component's folder; no weight is read.

    `variant` (`fp16`, ...) chooses among weight files; a component without it falls back to its
    plain files. Without `variant` plain files are taken, or the only variant there is.
    `model_class` ("package.module:Class") is the class of a single component, whatever its
    config.json says; its module is imported.
    Raises MlxconvError for all that is missing, damaged, already quantized or already converted.
    """
    path = _folder(source)
    _refuse_bundle(path)
    index_file = next((path / n for n in INDEX_NAMES if (path / n).is_file()), None)
    if index_file is not None:
        if model_class is not None:
            raise ArgumentError(
                f"{path}: is a pipeline, and --class {model_class} names the class of one "
                "component: give that component's folder"
            )
        return _open_pipeline(path, index_file, variant)
    if not (path / "config.json").is_file():
        found = sorted(p.name for p in path.iterdir())
        lora = [n for n in found if n == "adapter_config.json" or "lora" in n.lower()]
        if lora:
            raise MlxconvError(
                f"{path}: holds a LoRA ({lora[0]}), not a model; load it into its pipeline in "
                "diffusers, call fuse_lora() and save_pretrained(FOLDER), and convert that folder"
            )
        names = ", ".join(found[:8])
        raise MlxconvError(
            f"{path}: {'holds ' + names if names else 'is empty'}; expected model_index.json (a "
            "pipeline) or config.json with weights (one component)"
        )
    component = open_component(path, variant, model_class)
    loose = _loose_files(path)
    return Checkpoint(path, None, {}, {component.name: component}, {}, loose)


def open_component(
    path: str | Path, variant: str | None = None, model_class: str | None = None
) -> Component:
    """Open one model's folder (`config.json` and weights); no weight is read."""
    folder = _folder(path)
    if model_class is None:
        return _open_component(folder, None, None, variant, fallback=False)
    module, colon, name = model_class.partition(":")
    if not (module and colon and name):
        raise MlxconvError(f"--class {model_class}: expected package.module:Class")
    component = _open_component(folder, None, name, variant, fallback=False)
    return replace(component, name=_derived_name(folder, module, name), library=module, named=True)


def component_class(component: Component) -> type:
    """The torch module class that diffusers or transformers loads for this component."""
    if component.named:
        return named_class(component.library, component.class_name)
    return find_class(component.library, component.class_name, component.path)


def refuse_foreign_links(folder: Path, root: Path) -> None:
    """MlxconvError for a symbolic link in `folder`, or beside it in `root`, that leaves `root`.

    root: the folder that the checkpoint was published as. What a link points to would be copied
    into the bundle, and published with it. The Hub's cache links its snapshots to its own blobs:
    those are the repository's files.
    """
    home = root.resolve()
    cache = next((above.parent for above in home.parents if above.name == "snapshots"), home)
    inside = (home, cache / "blobs")
    below = (
        Path(place, name)
        for place, folders, files in os.walk(folder)
        for name in (*folders, *files)
    )
    for path in (*root.iterdir(), *below):
        if not path.is_symlink():
            continue
        try:
            there = path.resolve()
        except (OSError, RuntimeError) as error:  # RuntimeError before Python 3.13
            raise MlxconvError(f"{path}: is a symbolic link to itself; remove it") from error
        if not any(there.is_relative_to(place) for place in inside):
            raise MlxconvError(
                f"{path}: is a symbolic link to {there}, outside of {root}, and would be copied "
                "into the bundle; put the file itself there, or remove the link"
            )


def _folder(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        weights = path.suffix in (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
        what = (
            "load it with diffusers' from_single_file and save_pretrained it first"
            if (weights)
            else f"give its folder, {path.absolute().parent}, if that is one"
        )
        raise MlxconvError(
            f"{path}: is a file, expected a folder as save_pretrained writes it; {what}"
        )
    raise MlxconvError(
        f"{path}: no such folder; check the path, or give a repository of the Hub as ORG/NAME"
    )


def _refuse_bundle(path: Path) -> None:
    for folder in (path, path.absolute().parent):
        if (folder / "mlxconv.json").is_file():
            raise MlxconvError(
                f"{path}: is an mlxconv bundle ({folder / 'mlxconv.json'}), already converted; "
                "give the original diffusers checkpoint"
            )


def _open_pipeline(path: Path, index_file: Path, variant: str | None) -> Checkpoint:
    index = read_json(index_file)
    checkpoint = Checkpoint(path, _text(index.get("_class_name"), index_file), index, {}, {}, [])
    for name, (library, class_name) in listed_components(index, index_file).items():
        folder = path / name
        if not folder.is_dir():
            checkpoint.skipped[name] = f"listed in {index_file.name}, but there is no such folder"
        elif has_weights(file_names(folder)) or _must_have_weights(folder, class_name):
            checkpoint.components[name] = _open_component(
                folder, library, class_name, variant, fallback=True
            )
    _add_other_folders(checkpoint, index_file)
    checkpoint.loose_files = _loose_files(path)
    _check_opened(checkpoint, variant)
    return checkpoint


def listed_components(index: dict[str, Any], index_file: Path) -> dict[str, tuple[str, str]]:
    """Name -> (library, class). Absent components ([null, null]) and plain settings are left out.

    Modular indexes add a third element, where the component came from.
    """
    listed = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) < 2:
            continue
        library, class_name = value[:2]
        if not (isinstance(library, str) and isinstance(class_name, str)):
            continue
        if name in (".", "..") or "/" in name or "\\" in name:
            raise MlxconvError(
                f"{index_file}: component {name!r} is not a folder's name; "
                "get the index from its source again"
            )
        listed[name] = (library, class_name)
    return listed


def _must_have_weights(folder: Path, class_name: str) -> bool:
    return (folder / "config.json").is_file() and not _WEIGHTLESS_CLASS.search(class_name)


def _add_other_folders(checkpoint: Checkpoint, index_file: Path) -> None:
    for folder in sorted(p for p in checkpoint.path.iterdir() if p.is_dir()):
        name = folder.name
        if name.startswith((".", "__")) or name in checkpoint.components:
            continue
        if has_weights(file_names(folder)):
            checkpoint.skipped[name] = f"has weights, but is not in {index_file.name}"
        else:
            checkpoint.others[name] = folder


def _check_opened(checkpoint: Checkpoint, variant: str | None) -> None:
    if not checkpoint.components:
        reasons = "; ".join(f"{n}: {why}" for n, why in checkpoint.skipped.items())
        raise MlxconvError(
            f"{checkpoint.path}: no component with weights{': ' if reasons else ''}{reasons}; "
            "download the folder again"
        )
    if variant and all(c.variant != variant for c in checkpoint.components.values()):
        raise MlxconvError(
            f"{checkpoint.path}: no component has weights of variant {variant!r}; "
            "leave variant= out for the plain files"
        )


def _open_component(
    path: Path, library: str | None, listed_class: str | None, variant: str | None, fallback: bool
) -> Component:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise MlxconvError(f"{path}: has weights but no config.json; download the folder again")
    config = read_json(config_file)
    _refuse_quantized(config, config_file)
    if library is None:
        library = "diffusers" if "_class_name" in config else "transformers"
    class_name = current_class_name(_class_name(config, config_file, listed_class), config)
    weights = read_weights(path, library, variant, fallback)
    return Component(
        name=path.name if listed_class else _derived_name(path, library, class_name),
        path=path,
        library=library,
        class_name=class_name,
        config=config,
        tensors=weights.tensors,
        variant=weights.variant,
        files=weights.files,
        stamps=weights.stamps,
    )


def _class_name(config: dict[str, Any], config_file: Path, listed: str | None) -> str:
    """The index decides, as it does in diffusers, unless it names a base or Auto class."""
    if listed and not _ANY_CLASS.fullmatch(listed):
        return listed
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    name = _text(config.get("_class_name"), config_file) or _text(first, config_file)
    if name is None:
        raise MlxconvError(
            f"{config_file}: has neither _class_name (diffusers) nor architectures "
            "(transformers); name the model's class with --class MODULE:CLASS"
        )
    return name


def _text(value: Any, where: Path) -> str | None:
    """Custom pipelines give [module, class]; only the class is of interest."""
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, str) and value and not value.isidentifier():
        raise MlxconvError(
            f"{where}: the class name {value[:80]!r} is not a Python identifier; get the file from "
            "the model's source again"
        )
    return value if isinstance(value, str) and value else None


def _derived_name(path: Path, library: str, class_name: str) -> str:
    if library == "diffusers":
        for pattern, name in _NAMES_BY_CLASS:
            if pattern.search(class_name):
                return name
    return path.absolute().name


def _refuse_quantized(config: dict[str, Any], config_file: Path) -> None:
    # mlx-lm writes both keys, so MLX's own is asked for first.
    mark = next((key for key in ("mlxconv", "quantization") if config.get(key)), None)
    if mark:
        raise MlxconvError(
            f"{config_file}: has the entry {mark!r}, so these weights are already converted for "
            "MLX; give the original diffusers checkpoint"
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise MlxconvError(
            f"{config_file}: has a quantization_config ({method or 'unknown method'}), so these "
            "weights are already quantized; give the bf16 or fp16 checkpoint"
        )


def _loose_files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file() and LOOSE.fullmatch(p.name))
