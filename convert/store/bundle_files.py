"""The files of a bundle beside the weights: configurations, index, tokenizers, licences."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.weights import weight_map

from ..quantize.policy import Decision, Precision
from ..source.checkpoint import Checkpoint
from ..source.safetensors_io import StoredTensor, read_header
from ..source.source_card import LICENCE_FILE, published_root
from .tokenizers import listed_class, write_tokenizer

BUNDLE_FORMAT = "mlxconv-bundle"
BUNDLE_VERSION = 1


def bundle_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a bundle's component by name, from the headers of its files."""
    files = weight_map(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(files.values())):
        tensors |= read_header(folder / file)[0]
    absent = sorted(set(files) - set(tensors))
    if absent:
        raise MlxconvError(f"{folder}: the index names {absent[:3]}, which no file holds")
    return tensors


def quantization_table(default: Precision, decisions: Iterable[Decision]) -> dict[str, Any] | None:
    """`quantization` of config.json, as mlx-lm reads it: defaults, and the modules that differ."""
    quantized = {
        d.name.removesuffix(".weight"): d.precision for d in decisions if d.precision.quantized
    }
    if not quantized:
        return None
    base = default if default.quantized else next(iter(quantized.values()))
    overrides = {k: _spec(p) for k, p in sorted(quantized.items()) if _spec(p) != _spec(base)}
    return {**_spec(base), **overrides}


def _spec(precision: Precision) -> dict[str, Any]:
    return {
        "group_size": precision.group_size,
        "bits": precision.bits,
        "mode": precision.mode,
    }


def component_config(
    merged: dict[str, Any],
    dtype: str,
    quantization: dict[str, Any] | None,
    sizes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The component's config.json: the merged configuration, and how it was converted.

    `sizes`: see `Recipe.sizes_table`.
    """
    ours: dict[str, Any] = {"mlxconv": {"version": BUNDLE_VERSION, "dtype": dtype}}
    if sizes is not None:
        ours["mlxconv"]["sizes"] = sizes
    if quantization is not None:
        ours |= {"quantization": quantization, "quantization_config": quantization}
    return {**merged, **ours}


def copy_rest(checkpoint: Checkpoint, out: Path, warn: list[str]) -> None:
    """Everything that is not a component: scheduler, tokenizers (as tokenizer.json), licences."""
    for file in (*checkpoint.loose_files, *published_root(checkpoint.path).iterdir()):
        if LICENCE_FILE.fullmatch(file.name) and file.is_file():
            shutil.copyfile(file, out / file.name)
    for name, folder in checkpoint.others.items():
        shutil.copytree(folder, out / name, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        if "tokenizer" in name:
            try:
                write_tokenizer(folder, listed_class(checkpoint, name), out / name)
            except MlxconvError as error:
                warn.append(f"{name}: `generate` cannot tokenize prompts with it: {error}")
    index = next(
        (
            f
            for n in ("model_index.json", "modular_model_index.json")
            if (f := checkpoint.path / n).is_file()
        ),
        None,
    )
    if index is not None:
        shutil.copyfile(index, out / index.name)


def refuse_nested(name: str) -> None:
    """A component's name becomes a folder: refuse anything that is not one plain name."""
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise MlxconvError(f"component {name!r} is not a folder's name")
