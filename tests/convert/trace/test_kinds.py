"""Inputs of another kind or value than traced: the answer is PyTorch's, or there is none."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.examples import example_inputs
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.convert.source.arrays import torch_to_mlx
from mlxconv.convert.source.model_class import find_class
from mlxconv.convert.trace.fake_module import merged_config
from mlxconv.runtime.bundle import LoadedComponent, load_component
from mlxconv.runtime.errors import MlxconvError

pytestmark = [pytest.mark.usefixtures("shared_programs"), pytest.mark.xdist_group("kinds")]

Inputs = dict[str, Any]
MASK = "encoder_attention_mask"


def cast(name: str, dtype: torch.dtype) -> Callable[[Inputs], Inputs]:
    return lambda given: {**given, name: given[name].to(dtype)}


def padded(dtype: torch.dtype, tokens: int = 3) -> Callable[[Inputs], Inputs]:
    def change(given: Inputs) -> Inputs:
        mask = torch.ones_like(given[MASK], dtype=dtype)
        mask[:, -tokens:] = 0
        return {**given, MASK: mask}

    return change


def ones(dtype: torch.dtype) -> Callable[[Inputs], Inputs]:
    return lambda given: {**given, MASK: torch.ones_like(given[MASK], dtype=dtype)}


def put(name: str, item: Any) -> Callable[[Inputs], Inputs]:
    return lambda given: {**given, name: item}


# Of each class: what is given, and the refusal, or None where it must be answered.
CASES: list[tuple[str, str, Callable[[Inputs], Inputs], str | None]] = [
    ("ChromaTransformer2DModel", "as traced", dict, None),
    ("ChromaTransformer2DModel", "a boolean mask", cast("attention_mask", torch.bool),
     "attention_mask is bool, and was traced as float"),
    ("ChromaTransformer2DModel", "a mask of integers", cast("attention_mask", torch.int64),
     "attention_mask is integer, and was traced as float"),
    ("ChromaTransformer2DModel", "ids as integers", cast("img_ids", torch.int64), None),
    ("Lumina2Transformer2DModel", "as traced", dict, None),
    ("Lumina2Transformer2DModel", "padded", padded(torch.bool),
     "traced as 1 throughout, and 3 of the 11 elements given are not"),
    ("Lumina2Transformer2DModel", "padded with integers", padded(torch.int64), "3 of the 11"),
    ("Lumina2Transformer2DModel", "integers", ones(torch.int64), None),
    ("Lumina2Transformer2DModel", "floats", ones(torch.float32),
     "is float, and was traced as bool"),
    ("QwenImageTransformer2DModel", "an integer time", cast("timestep", torch.int64), None),
    ("QwenImageTransformer2DModel", "a mask", put("encoder_hidden_states_mask", torch.ones(2, 11)),
     "traced without encoder_hidden_states_mask"),
    ("QwenImageTransformer2DModel", "shapes for each sample", put("img_shapes", [[(1, 6, 4)]] * 2),
     None),
    ("QwenImageTransformer2DModel", "two pictures", put("img_shapes", [[(1, 3, 4), (1, 3, 4)]]),
     r"traced without img_shapes\.0\.1"),
    ("QwenImageTransformer2DModel", "frames", put("img_shapes", [[(2, 3, 4)]]),
     r"img_shapes\.0\.0\.0 was traced as 1, given 2"),
    ("QwenImageTransformer2DModel", "frames in an array",
     put("img_shapes", [[(torch.tensor(2), 3, 4)]]), r"img_shapes\.0\.0\.0 was traced as 1, given"),
    ("QwenImageTransformer2DModel", "a size in floats", put("img_shapes", [[(1, 6.0, 4)]]),
     r"img_shapes\.0\.0\.1 is 6\.0, expected an integer"),
    *[(name, str(dtype), cast(mask, dtype), None)
      for name, mask in (
          ("PixArtTransformer2DModel", MASK), ("SanaTransformer2DModel", MASK),
          ("BertModel", "attention_mask"), ("T5EncoderModel", "attention_mask"))
      for dtype in (torch.bool, torch.int64, torch.float32)],
    ("PixArtTransformer2DModel", "an integer time", cast("timestep", torch.int64), None),
    ("BertModel", "ids in floats", cast("input_ids", torch.float32), "input_ids is float"),
    ("T5EncoderModel", "boolean ids", cast("input_ids", torch.bool), "input_ids is bool"),
]  # fmt: skip


@functools.cache
def sides(class_name: str) -> tuple[Any, LoadedComponent, Inputs]:
    """The tiny model in PyTorch and in MLX, and the inputs of its recipe."""
    recipe = load_recipe(class_name)
    with tempfile.TemporaryDirectory() as name:
        source = tiny_checkpoint(recipe, None, Path(name) / "source")
        convert(source, Path(name) / "bundle", "fp32")
        loaded = load_component(Path(name) / "bundle")
        cls: Any = find_class(recipe.library, class_name, source)
        config = merged_config(cls, recipe.tiny_config())
        inputs = example_inputs(recipe, recipe.programs_for(config)[0], config, seed=3)
        model = cls.from_pretrained(str(source)).eval()
        loaded.executor.run(loaded.entries[0], torch_to_mlx(inputs))  # reads the weights
    return model, loaded, inputs


@pytest.mark.parametrize(
    ("class_name", "given", "change", "refusal"), CASES, ids=[f"{c}-{g}" for c, g, *_ in CASES]
)
def test_another_kind_or_value(
    class_name: str, given: str, change: Callable[[Inputs], Inputs], refusal: str | None
) -> None:
    model, loaded, inputs = sides(class_name)
    changed = change(inputs)
    if refusal is not None:
        with pytest.raises(MlxconvError, match=refusal):
            loaded.executor.run(loaded.entries[0], torch_to_mlx(changed))
        return
    found, _ = loaded.executor.run(loaded.entries[0], torch_to_mlx(changed))
    with torch.no_grad():
        wanted = pytree.tree_leaves(model(**changed))[0].numpy()
    assert np.linalg.norm(np.array(found[0]) - wanted) <= 1e-4 * np.linalg.norm(wanted)
