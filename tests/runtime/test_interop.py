"""What other MLX loaders expect: names, and quantization as mlx-lm and mlx-vlm read it.

Nothing of this package reads the bundle here: `mx.load`, `nn.quantize` by the config, and the
layers of `mlx.nn`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.reading import load_recipe

pytestmark = pytest.mark.usefixtures("shared_programs")


def tree(weights: dict[str, torch.Tensor]) -> Any:
    """Modules by the names of a checkpoint: matrices with a bias or without as `nn.Linear`."""
    names: dict[str, Any] = {}
    for name in weights:
        *path, leaf = name.split(".")
        table = names
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = weights[name].shape
    return _module(names)


def _module(names: dict[str, Any]) -> Any:
    shape = names.get("weight")
    if isinstance(shape, torch.Size) and len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias="bias" in names)
    inner = {k: _module(v) if isinstance(v, dict) else mx.zeros(v) for k, v in names.items()}
    if all(k.isdigit() for k in inner):
        return [inner.get(str(i), nn.Identity()) for i in range(1 + max(map(int, inner)))]
    module = nn.Module()
    for key, value in inner.items():
        module[key] = value
    return module


def loaded(folder: Path, model: nn.Module) -> nn.Module:
    """The way of mlx-lm's `load_model`."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, mx.array] = {}
    for file in folder.glob("model*.safetensors"):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    table = config["quantization"]

    def how(path: str, module: nn.Module) -> Any:
        if path in table:
            return table[path]
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights

    nn.quantize(model, table["group_size"], table["bits"], mode=table["mode"], class_predicate=how)
    return model.load_weights(list(weights.items()), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel"])
@pytest.mark.parametrize("q", ["4bit", "mxfp4"])
def test_a_transformer_loads_with_mlx_alone(name: str, q: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(load_recipe(name), None, tmp_path / "transformer")
    convert(source, tmp_path / q, q)
    weights = load_file(str(source / "diffusion_pytorch_model.safetensors"))
    model = loaded(tmp_path / q / "transformer", tree(weights))

    layers = [(k, m) for k, m in model.named_modules() if isinstance(m, nn.QuantizedLinear)]
    assert len(layers) > 10
    assert {m.bits for _, m in layers} >= {4}
    for path, layer in layers:
        matrix = weights[f"{path}.weight"].float().numpy()
        x = np.random.default_rng(0).standard_normal((5, matrix.shape[1])).astype(np.float32)
        wanted = x @ matrix.T
        if f"{path}.bias" in weights:
            wanted += weights[f"{path}.bias"].float().numpy()
        found = np.array(layer(mx.array(x)).astype(mx.float32))
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < (0.02 if layer.bits == 8 else 0.16), path
