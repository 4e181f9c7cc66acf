"""Every family's pictures are those of diffusers' own pipeline for the same prompt and seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mlxconv.convert.conversion import convert
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.pipeline import Pipeline, load

from .test_generate import NEGATIVE, PROMPT, psnr
from .tiny_families import CALLED_WITH, TINY

pytestmark = pytest.mark.slow
TOKENS = 16
SIZE = {"width": 64, "height": 32}


@dataclass
class Pair:
    """A tiny pipeline in MLX and in diffusers."""

    name: str
    ours: Pipeline
    theirs: Any


@pytest.fixture(scope="module", params=list(TINY))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from diffusers import DiffusionPipeline

    folder = tmp_path_factory.mktemp(request.param)
    TINY[request.param](folder / "checkpoint")
    convert(folder / "checkpoint", folder / "bundle", "fp32")
    theirs = DiffusionPipeline.from_pretrained(folder / "checkpoint")
    theirs.set_progress_bar_config(disable=True)
    return Pair(request.param, load(folder / "bundle", keep=True), theirs)


def by_diffusers(pair: Pair, steps: int, **options: Any) -> np.ndarray[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(7)
    found = pair.theirs(
        PROMPT, **SIZE, num_inference_steps=steps, generator=generator, output_type="np",
        max_sequence_length=TOKENS, **CALLED_WITH.get(pair.name, {}), **options,
    )  # fmt: skip
    return np.asarray(found.images)


@pytest.mark.parametrize("steps", [4, 20])
@pytest.mark.parametrize("negative", [None, NEGATIVE])
def test_the_same_seed_gives_the_same_picture(pair: Pair, steps: int, negative: str | None) -> None:
    ours = pair.ours(PROMPT, **SIZE, negative=negative, steps=steps, seed=7, tokens=TOKENS).pixels
    options = {} if negative is None else {"negative_prompt": negative}
    theirs = by_diffusers(pair, steps, **options)
    assert theirs.std() > 0.02
    decibels = psnr(ours, theirs)
    print(f"\n{pair.name} {steps} steps, negative {negative!r}: {decibels:.1f} dB")
    assert decibels >= 50


def test_both_prompts_are_read(pair: Pair) -> None:
    def made(prompt: str, negative: str | None = None) -> np.ndarray[Any, Any]:
        return pair.ours(prompt, **SIZE, steps=4, tokens=TOKENS, negative=negative).pixels

    one = made(PROMPT)
    others = psnr(one, made(NEGATIVE)), psnr(one, made(PROMPT, NEGATIVE))
    print(f"\n{pair.name} other prompts: {others[0]:.1f} and {others[1]:.1f} dB")
    assert max(others) < 48


def test_guidance_can_be_off(pair: Pair) -> None:
    off = {"qwen_image": {"cfg": 1.0}, "z_image": {"guidance": 0.0}}
    ours = pair.ours(
        PROMPT, **SIZE, steps=2, seed=7, tokens=TOKENS, negative=NEGATIVE,
        **off.get(pair.name, {"guidance": 1.0}),
    )  # fmt: skip
    scale = {"qwen_image": {}, "z_image": {"guidance_scale": 0.0}}
    theirs = by_diffusers(pair, 2, **scale.get(pair.name, {"guidance_scale": 1.0}))
    assert psnr(ours.pixels, theirs) >= 50
    assert any("the negative prompt is not read" in note for note in ours.notes)


def test_several_pictures_are_those_of_one_batch(pair: Pair) -> None:
    ours = pair.ours(PROMPT, **SIZE, steps=2, seed=7, tokens=TOKENS, count=2)
    theirs = by_diffusers(pair, 2, num_images_per_prompt=2)
    assert psnr(ours.pixels, theirs) >= 50


def test_a_negative_prompt_may_be_the_prompt(pair: Pair) -> None:
    made = pair.ours(PROMPT, negative=PROMPT, **SIZE, steps=1, tokens=TOKENS)
    assert made.pixels.std() > 0.02


def test_cfg_is_of_pipelines_with_two_kinds_of_guidance(pair: Pair) -> None:
    if pair.ours.family.embedded:
        pytest.skip("this pipeline has both")
    with pytest.raises(MlxconvError, match=r"cfg=3: this pipeline .* pass that"):
        pair.ours(PROMPT, **SIZE, steps=1, cfg=3.0)


def test_stable_diffusion_3_goes_without_t5(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if pair.name != "stable_diffusion_3":
        pytest.skip("only there it may be left out")
    monkeypatch.delitem(pair.ours.parts.bundle.manifest["components"], "text_encoder_3")
    for part in ("text_encoder_3", "tokenizer_3"):
        monkeypatch.setattr(pair.theirs, part, None)
    for negative in (None, NEGATIVE):
        ours = pair.ours(PROMPT, **SIZE, negative=negative, steps=4, seed=7, tokens=TOKENS)
        assert psnr(ours.pixels, by_diffusers(pair, 4, negative_prompt=negative)) >= 50


def test_another_scheduler_is_taken_by_name(pair: Pair) -> None:
    options: dict[str, Any] = {**SIZE, "steps": 3, "tokens": TOKENS}
    other = pair.ours(PROMPT, **options, scheduler="unipc").pixels
    assert np.isfinite(other).all()
    assert not np.array_equal(other, pair.ours(PROMPT, **options).pixels)
