"""Pipelines with all of their components in MLX, text encoders included."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers

from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.into_diffusers.replace import into_diffusers
from mlxconv.convert.recipe.reading import all_recipes, load_recipe
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import PROGRAM_FILE

from .whole_pipelines import FAMILIES, QWEN_IMAGE, run, using

pytestmark = pytest.mark.usefixtures("shared_programs")
Loaded = tuple[Path, Any, Any]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """A family's checkpoint, its pipeline, and the same with all of its modules in MLX."""
    made: dict[str, Loaded] = {}

    def load(name: str) -> Loaded:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            FAMILIES[name].make(folder / "source")
            convert(folder / "source", folder / "fp32", "fp32")
            pipes = [
                diffusers.DiffusionPipeline.from_pretrained(folder / "source") for _ in range(2)
            ]
            into_diffusers(pipes[1], folder / "fp32")
            made[name] = (folder / "source", *pipes)
        return made[name]

    return load


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image-Edit brings every picture to 1024 x 1024 pixels; here to 32 x 32."""
    for name in ("edit", "edit_inpaint", "edit_plus"):
        module = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}")
        sizes = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, sizes=sizes: sizes(32 * 32, ratio)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "use"),
    [
        pytest.param(name, use, marks=pytest.mark.coverage if name == "sd" else ())
        for name, family in FAMILIES.items()
        for use in family.uses
    ],
)
def test_a_whole_pipeline_gives_the_same_pictures(
    loaded: Callable[[str], Loaded], small_pictures: None, family: str, use: str
) -> None:
    folder, plain, replaced = loaded(family)
    for name in plain.components:
        module = getattr(replaced, name)
        if isinstance(module, torch.nn.Module):
            assert (folder.parent / "fp32" / name / PROGRAM_FILE).is_file()
    made = FAMILIES[family].uses[use]
    pictures = [
        run(using(pipe, made, folder, FAMILIES[family].options), made.call())
        for pipe in (plain, replaced)
    ]
    assert pictures[0].std() > 0.01
    assert np.abs(pictures[1] - pictures[0]).max() <= 1e-3


@pytest.mark.slow
def test_a_call_that_cannot_be_traced_is_refused_and_the_hint_runs_it(
    loaded: Callable[[str], Loaded],
) -> None:
    folder, plain, replaced = loaded("qwen_image")
    call = {"attention_kwargs": {"scale": 1.0, "nobody": torch.zeros(1)}}
    wanted = run(plain, call)
    refusal = r"without attention_kwargs; .* holds tensors and numbers.* in PyTorch"
    with pytest.raises(MlxconvError, match=refusal) as refused:
        run(replaced, call)
    hint = re.search(r"load the pipeline again and call (into_diffusers.*)\.", str(refused.value))
    assert hint is not None
    again = diffusers.DiffusionPipeline.from_pretrained(folder)
    given = {"pipe": again, "bundle": folder.parent / "fp32", "into_diffusers": into_diffusers}
    exec(hint[1], given)
    assert np.abs(run(again, call) - wanted).max() <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("use", ["controlnet", "edit_plus_2"])
def test_what_is_traced_for_a_call_serves_other_sizes_too(
    loaded: Callable[[str], Loaded],
    small_pictures: None,
    capfd: pytest.CaptureFixture[str],
    use: str,
) -> None:
    folder, *pipes = loaded("qwen_image")
    made = QWEN_IMAGE.uses[use]
    calls = [
        {},
        {"prompt": "a longer one of a dog", "height": 48, "width": 64},
        {"num_images_per_prompt": 2},
    ]
    built = [using(pipe, made, folder, {}) for pipe in pipes]
    for call in calls:
        wanted, found = (run(pipe, {**made.call(), **call}) for pipe in built)
        assert np.abs(found - wanted).max() <= 1e-3
    assert capfd.readouterr().err.count("tracing") <= 1


@pytest.mark.slow
def test_a_controlnet_runs_in_mlx_too(loaded: Callable[[str], Loaded], tmp_path: Path) -> None:
    folder, *pipes = loaded("qwen_image")
    made = QWEN_IMAGE.uses["controlnet"]
    plain, replaced = (using(pipe, made, folder, {}) for pipe in pipes)
    plain.controlnet.save_pretrained(tmp_path / "controlnet")
    convert(tmp_path / "controlnet", tmp_path / "fp32", "fp32")
    into_diffusers(replaced, tmp_path / "fp32")
    wanted, found = (run(pipe, made.call()) for pipe in (plain, replaced))
    assert np.abs(found - wanted).max() <= 1e-3


@pytest.mark.slow
def test_masks_of_one_shape_are_told_apart(loaded: Callable[[str], Loaded]) -> None:
    """Prompts of different lengths come padded, with a mask that no recipe lists."""
    _, *pipes = loaded("qwen_image")
    for first in ("a cat", "a cat and a dog"):
        call = {"prompt": [first, "a photo of a dog and of a cat"]}
        wanted, found = (run(pipe, call) for pipe in pipes)
        assert np.abs(found - wanted).max() <= 1e-3


_ENCODERS = [
    pytest.param(
        name,
        marks=() if name.startswith(("Gemma3", "Qwen3VLModel")) else pytest.mark.coverage,
    )
    for name, recipe in all_recipes().items()
    if recipe.library == "transformers" and "output_hidden_states" in
    recipe.programs["forward"].arguments and "attention_mask" in recipe.programs["forward"].inputs
]  # fmt: skip


@pytest.mark.parametrize("name", _ENCODERS)
def test_a_text_encoder_is_called_from_outside(name: str, tmp_path: Path) -> None:
    """Pipelines call the whole model: its embedding, its head and what lies between."""
    source = tiny_checkpoint(load_recipe(name), None, tmp_path / "text_encoder")
    convert(source, tmp_path / "bundle", "fp32")
    modules = [getattr(transformers, name).from_pretrained(str(source)) for _ in range(2)]
    into_diffusers(SimpleNamespace(text_encoder=modules[1]), tmp_path / "bundle")
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    with torch.no_grad():
        wanted, found = (
            m(input_ids=ids, attention_mask=mask, output_hidden_states=True) for m in modules
        )
    pairs = [*zip(wanted.hidden_states, found.hidden_states, strict=True), (wanted[0], found[0])]
    for want, got in pairs:
        assert (got - want).norm() <= 1e-5 * want.norm()
