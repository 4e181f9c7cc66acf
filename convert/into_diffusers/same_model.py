"""Whether a module of a diffusers pipeline is the one that a bundle's component was made from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import mlx.core as mx
from torch import nn

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.weights import Quantization, Specs

from ..quantize.rounding import dequantize, group_error, group_limit
from ..recipe.recipe import Recipe
from ..store.bundle_files import bundle_tensors
from .parameters import CHANGE_FIRST, BundleParameter, StoredWeights, named_tensors

_FUSE = (
    "pipe.fuse_lora(); pipe.unload_lora_weights(); pipe.save_pretrained(FOLDER), then "
    "mlxconv convert FOLDER"
)
# Of transformers' configurations: what describes the file, not the model.
_ABOUT_THE_FILE = ("architectures", "dtype", "torch_dtype", "transformers_version")
_ROWS = 8  # of each weight that is compared
_ROUNDING = 2**-7  # that of bf16, on both sides
_TINY = 1e-7  # what float16 rounds to nothing


def check_same_model(module: nn.Module, stored: StoredWeights, recipe: Recipe) -> None:
    """MlxconvError where class, configuration or parameters differ; a warning where only the
    weights' values do."""
    label, own = stored.label, type(module).__name__
    if own != stored.class_name:
        raise MlxconvError(
            f"{label}: the pipeline's is a {own}, the bundle's a {stored.class_name}"
        )
    if any(hasattr(child, "_hf_hook") for child in module.modules()):
        raise MlxconvError(
            f"{label}: offloading is already set up; call pipe.remove_all_hooks() before "
            "into_diffusers, and enable offloading again afterwards"
        )
    adapters = list(getattr(module, "peft_config", None) or ())
    if adapters:
        raise MlxconvError(
            f"{label}: has the LoRA {', '.join(map(repr, adapters))}, which the bundle does not "
            f"have; unload it (pipe.unload_lora_weights()), or convert it fused: {_FUSE}"
        )
    _check_config(module, stored.config, label)
    _check_parameters(module, stored, recipe)
    differing = next(_differing_weights(module, stored), None)
    if differing is not None:
        warnings.warn(
            f"{label}: the pipeline's weights are not those that the bundle was made from "
            f"({differing} differs); the bundle's are used",
            stacklevel=3,
        )


def _check_config(module: nn.Module, config: dict[str, Any], label: str) -> None:
    own: Any = getattr(module, "config", None)
    values = own.to_dict() if hasattr(own, "to_dict") else dict(own or {})
    values = json.loads(json.dumps(values, default=str))
    for key, wanted, found in _config_differences(config, values):
        raise MlxconvError(
            f"{label}: the pipeline's configuration has {key} = {found!r}, the bundle's "
            f"{wanted!r}; load the pipeline that the bundle was converted from"
        )


def _config_differences(
    wanted: dict[str, Any], found: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in wanted.keys() & found.keys():
        if key.startswith("_") or key in _ABOUT_THE_FILE:
            continue
        a, b, at = wanted[key], found[key], f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _config_differences(a, b, f"{at}.")
        elif a != b:
            yield at, a, b


def _check_parameters(module: nn.Module, stored: StoredWeights, recipe: Recipe) -> None:
    tensors = named_tensors(module)
    for name, parameter in stored.parameters.items():
        found = tuple(tensors[name].shape) if name in tensors else "no such weight"
        if found != tuple(parameter.shape):
            raise MlxconvError(
                f"{stored.label}: {name} is {tuple(parameter.shape)} in the bundle, the pipeline "
                f"has {found}; if it was changed after loading, {CHANGE_FIRST}"
            )
    known = {id(p) for n, p in tensors.items() if n in stored.names}
    for name, own in module.named_parameters():
        unused = any(fnmatchcase(name, pattern) for pattern in recipe.unused)
        if id(own) not in known and not unused:
            raise MlxconvError(
                f"{stored.label}: the pipeline has the weight {name}, the bundle does not; if it "
                f"was changed after loading, {CHANGE_FIRST}"
            )


def refuse_adapters(module: nn.Module, label: str) -> None:
    """Refuse the methods by which diffusers and transformers add a LoRA to a module."""
    from diffusers.loaders import PeftAdapterMixin
    from transformers.integrations import PeftAdapterMixin as TransformersAdapterMixin

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise MlxconvError(
            f"{label}: takes no LoRA, since its weights come from the bundle; fuse it in a "
            f"pipeline of diffusers alone, and convert that: {_FUSE}"
        )

    for mixin in (PeftAdapterMixin, TransformersAdapterMixin):
        for name in vars(mixin) if isinstance(module, mixin) else ():
            if name.startswith(("load_", "add_")):
                object.__setattr__(module, name, refuse)


# ---- values --------------------------------------------------------------------------------------


def _differing_weights(module: nn.Module, stored: StoredWeights) -> Iterator[str]:
    """Matrices whose first rows are further from the bundle's than rounding."""
    own, theirs = named_tensors(module), bundle_tensors(stored.folder)
    specs = Specs(stored.config.get("quantization") or {}, str(stored.folder))
    for name, parameter in stored.parameters.items():
        tensor = own[name]
        if parameter.kind != "linear" or tensor.is_meta or isinstance(tensor, BundleParameter):
            continue
        rows = mx.array(tensor.detach()[:_ROWS].float().cpu().numpy())
        path = name.removesuffix(".weight")
        parts = [theirs.get(n) for n in (name, f"{path}.scales", f"{path}.biases")]
        values = [None if part is None else part.read_rows(0, len(rows)) for part in parts]
        spec = specs.of(path) if parts[1] else None
        if not _agree(rows, values, spec):
            yield name


def _agree(own: mx.array, values: list[mx.array | None], spec: Quantization | None) -> bool:
    if spec is None:
        assert values[0] is not None
        gap, limit, size = mx.abs(values[0].astype(mx.float32) - own), mx.array(0), mx.abs(own)
    else:
        gap = group_error(dequantize(values, spec), own, spec)
        limit = group_limit(own, own, spec, values[1].dtype if values[1] is not None else None)
        size = mx.sqrt(mx.sum(own.reshape(*gap.shape, -1) ** 2, axis=-1))
    return bool(mx.all(gap <= limit + _ROUNDING * size + _TINY))
