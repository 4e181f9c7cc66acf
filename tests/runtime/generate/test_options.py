"""What a pipeline call takes: seeds, several prompts, diffusers' names, and what it refuses."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.options import DIFFUSERS_NAMES, Options
from mlxconv.runtime.generate.pipeline import Pipeline, load

from ...conftest import Bundles

SHORT: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "tokens": 16}


@pytest.fixture(scope="module")
def pipe(pipeline_bundle: Bundles) -> Pipeline:
    return load(pipeline_bundle("fp32"), keep=True)


def test_a_picture_of_several_is_that_of_its_seed_alone(pipe: Pipeline) -> None:
    several = pipe("a cat", **SHORT, seed=7, count=2)
    assert several.seeds == [7, 8]
    alone = [pipe("a cat", **SHORT, seed=seed).pixels[0] for seed in several.seeds]
    assert np.array_equal(several.pixels, alone)
    assert not np.array_equal(*alone)


def test_a_stochastic_scheduler_draws_from_each_picture_s_own_seed(pipe: Pipeline) -> None:
    asked = {**SHORT, "steps": 3, "scheduler": "FlowMatchLCMScheduler"}
    several = pipe("a cat", **asked, seed=7, count=2)
    assert np.array_equal(several.pixels[1], pipe("a cat", **asked, seed=8).pixels[0])


def test_each_of_several_prompts_gets_its_own_picture(pipeline_bundle: Bundles) -> None:
    """Without `keep`: all are encoded before the encoders are released."""
    pipe = load(pipeline_bundle("fp32"))
    made = pipe(["a cat", "a dog in a storm"], **SHORT, seed=3)
    assert [(r.prompt, r.seed) for r in made.requests] == [("a cat", 3), ("a dog in a storm", 3)]
    alone = [load(pipeline_bundle("fp32"))(r.prompt, **SHORT, seed=3) for r in made.requests]
    assert np.array_equal(made.pixels, np.concatenate([each.pixels for each in alone]))
    assert made.weight_bytes == alone[0].weight_bytes


def test_without_a_seed_there_is_a_random_one(pipe: Pipeline) -> None:
    one, other = pipe("a cat", **SHORT), pipe("a cat", **SHORT)
    assert one.seeds != other.seeds
    assert np.array_equal(one.pixels, pipe("a cat", **SHORT, seed=one.seeds[0]).pixels)
    assert not np.array_equal(one.pixels, other.pixels)


def test_diffusers_names_are_taken(pipe: Pipeline) -> None:
    ours = pipe("a cat", **SHORT, negative="rain", cfg=2.0, guidance=3.0, count=2, seed=5)
    theirs = pipe(
        "a cat", width=48, height=32, num_inference_steps=2, max_sequence_length=16,
        negative_prompt="rain", true_cfg_scale=2.0, guidance_scale=3.0, num_images_per_prompt=2,
        generator=[torch.Generator().manual_seed(seed) for seed in (5, 6)],
    )  # fmt: skip
    assert np.array_equal(ours.pixels, theirs.pixels)
    assert DIFFUSERS_NAMES.keys() <= inspect.signature(type(_flux()).__call__).parameters.keys()


def _flux() -> Any:
    from diffusers import FluxPipeline

    return FluxPipeline.__new__(FluxPipeline)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_steps": 2}, "unknown keyword 'num_steps'; did you mean 'steps'"),
        ({"num_inference_step": 2}, "did you mean 'num_inference_steps'"),
        ({"xyz": 2}, "unknown keyword 'xyz'; there are prompt, negative, steps"),
        ({"steps": 2, "num_inference_steps": 2}, "'steps' and 'num_inference_steps' are the same"),
    ],
)
def test_unknown_and_double_keywords_are_type_errors(
    pipe: Pipeline, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        pipe("a cat", **options)


USED = torch.Generator().manual_seed(0)
torch.rand(1, generator=USED)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed is -1: 0 or more"),
        ({"seed": "7"}, "seed is '7': an integer, or a torch.Generator"),
        ({"seed": 1.5}, "seed is 1.5: an integer, or a torch.Generator"),
        ({"seed": [1, 2]}, "2 seeds for 3 pictures of 3 prompts: give one seed, or one per image"),
        ({"seed": []}, "0 seeds for 3 pictures"),
        ({"generator": USED}, "has drawn numbers before: pass a new one, or seed"),
        ({"generator": SimpleNamespace(initial_seed=int, device="mps")}, "the generator is on mps"),
        ({"count": 0}, "count is 0: at least 1"),
        ({"prompt": ["a", 1]}, r"prompt is \['a', 1\]: a string, or a list of strings"),
        ({"prompt": []}, "a list of strings"),
        ({"negative": ["a"]}, r"negative is \['a'\]: one string, for all prompts"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(
    pipe: Pipeline, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(MlxconvError, match=says):
        pipe(**{"prompt": ["a", "b", "c"], **options})


def test_seeds_are_shared_out_in_order() -> None:
    assert Options(["a", "b"], seed=[1, 2, 3, 4]).seeds() == [[1, 2], [3, 4]]
    assert Options(["a", "b"], seed=[1, 2, 3, 4], count=2).seeds() == [[1, 2], [3, 4]]
    assert Options("a", seed=[5, 9]).seeds() == [[5, 9]]
    assert Options(["a", "b"], seed=4, count=2).seeds() == [[4, 5], [4, 5]]


def test_the_signature_has_names_types_and_defaults() -> None:
    called = dict(inspect.signature(Pipeline.__call__).parameters)
    assert list(called)[:3] == ["self", "prompt", "negative"]
    assert (called["cfg_end"].default, called["cfg_end"].annotation) == (1.0, float)
    del called["self"]
    assert all(each.annotation is not inspect.Parameter.empty for each in called.values())
    assert "guidance: the pipeline's" in str(Pipeline.__call__.__doc__)


def test_results_have_a_short_repr(pipe: Pipeline) -> None:
    shown = repr(pipe("a cat", **SHORT, seed=7, count=2))
    assert shown.startswith("<Pictures: 2 of 48x32, 2 steps, seed 7, 8, ")
    assert len(shown) < 100
