"""Every family's pictures are those of diffusers' own pipeline for the same prompt and seed."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.convert.conversion import convert
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.generate.families.parts import Request
from mlxconv.runtime.generate.picture_files import Pictures
from mlxconv.runtime.generate.pipeline import Pipeline, load

from ...conftest import SENTENCES, Bundles
from ..test_runtime_alone import WITHOUT_TORCH
from .test_generate import NEGATIVE, PROMPT, psnr
from .tiny_families import CALLED_WITH, SIZES, TINY, TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]
Pixels = np.ndarray[Any, Any]
Made = Callable[[str], tuple[Path, Path]]
NAMES = ["flux", *TINY]
UNASKED = ("dit", "flux2", "flux2_klein")  # pipelines without a negative prompt
# bf16: pictures, and decibels. mlx - torch is -0.8 to 1.1 dB in the families, with a deviation of
# up to 0.26 dB over seeds.
SEEDS, MARGIN = 4, 1.5
OFF = {"qwen_image": {}, "z_image": {"guidance_scale": 0.0}}


@dataclass
class Pair:
    """A tiny pipeline in MLX and in diffusers."""

    name: str
    checkpoint: Path
    bundle: Path
    ours: Pipeline
    theirs: Any

    def make(self, prompt: str | None = PROMPT, **options: Any) -> Pictures:
        return self.ours(prompt, **{**asked(self.name), "seed": 7, **options})


def asked(name: str) -> dict[str, Any]:
    """Size and tokens of a tiny family's pictures."""
    width, height = SIZES.get(name, (32, 16))
    return {"width": width, "height": height, "tokens": TOKENS.get(name, 16)}


def diffusers_pipeline(checkpoint: Path, **options: Any) -> Any:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(checkpoint, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def made(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    """`made("sana")`: a tiny checkpoint and its fp32 bundle; "flux" is that of all tests."""
    parent = tmp_path_factory.mktemp("families")

    def folders(name: str) -> tuple[Path, Path]:
        if name == "flux":
            return pipeline_checkpoint, pipeline_bundle("fp32")
        checkpoint, bundle = parent / name / "checkpoint", parent / name / "bundle"
        if not bundle.is_dir():
            TINY[name](checkpoint)
            convert(checkpoint, bundle, "fp32")
        return checkpoint, bundle

    return folders


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, made: Made) -> Pair:
    checkpoint, bundle = made(request.param)
    ours = load(bundle, keep=True)
    return Pair(request.param, checkpoint, bundle, ours, diffusers_pipeline(checkpoint))


def of(name: str) -> pytest.MarkDecorator:
    """For a test of one family."""
    return pytest.mark.parametrize("pair", [name], indirect=True)


def by_diffusers(pair: Pair, steps: int, pipe: Any = None, seed: int = 7, **options: Any) -> Pixels:
    import torch

    pipe, own = pipe or pair.theirs, asked(pair.name)
    tokens, generator = own.pop("tokens"), torch.Generator().manual_seed(seed)
    given = {"prompt": PROMPT, **own, "max_sequence_length": tokens}
    taken = inspect.signature(pipe.__call__).parameters
    given = {k: v for k, v in given.items() if k in taken} | {"generator": generator}
    found = pipe(
        **{**given, **CALLED_WITH.get(pair.name, {}), **options},
        num_inference_steps=steps, output_type="np",
    )  # fmt: skip
    return np.asarray(found.images)


def test_there_is_a_tiny_pipeline_of_each_family(made: Made) -> None:
    indices = (json.loads((made(n)[1] / "model_index.json").read_text()) for n in NAMES)
    assert {index["_class_name"] for index in indices} == set(FAMILIES)


@pytest.mark.parametrize("steps", [4, 20])
def test_the_same_seed_gives_the_same_picture(pair: Pair, steps: int) -> None:
    theirs = by_diffusers(pair, steps)
    assert theirs.std() > 0.02
    decibels = psnr(pair.make(steps=steps).pixels, theirs)
    print(f"\n{pair.name} {steps} steps: {decibels:.1f} dB")
    assert decibels >= 50


def test_with_a_negative_prompt_too(pair: Pair) -> None:
    if pair.name in UNASKED:
        pytest.skip("this pipeline has no negative prompt")
    scale = {"true_cfg_scale": 4.0} if pair.name == "flux" else {}
    theirs = by_diffusers(pair, 4, negative_prompt=NEGATIVE, **scale)
    decibels = psnr(pair.make(steps=4, negative=NEGATIVE).pixels, theirs)
    print(f"\n{pair.name} negative prompt: {decibels:.1f} dB")
    assert decibels >= 50


def test_both_prompts_are_read(pair: Pair) -> None:
    one = pair.make(steps=4).pixels
    others = [pair.make(NEGATIVE, steps=4).pixels, pair.make(steps=4, negative=NEGATIVE).pixels]
    print(f"\n{pair.name} other prompts: {', '.join(f'{psnr(one, o):.1f} dB' for o in others)}")
    assert all(psnr(one, other) < 48 for other in others)


def test_guidance_can_be_off(pair: Pair) -> None:
    """With the keyword that the pipeline has for it."""
    own = {"qwen_image": {"cfg": 1.0}, "flux": {"cfg": 1.0, "guidance": 1.0}}
    off = {"z_image": {"guidance": 0.0}, "flux2": {"cfg": 1.0, "guidance": 1.0}, **own}
    ours = pair.make(steps=2, negative=NEGATIVE, **off.get(pair.name, {"guidance": 1.0}))
    theirs = by_diffusers(pair, 2, **OFF.get(pair.name, {"guidance_scale": 1.0}))
    assert psnr(ours.pixels, theirs) >= 50
    assert any("the negative prompt is not read" in note for note in ours.notes)


def test_several_pictures_are_those_of_so_many_generators(pair: Pair) -> None:
    import torch

    two = {"class_labels": [281, 281]} if pair.name == "dit" else {"num_images_per_prompt": 2}
    seeds = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
    options = {**CALLED_WITH.get(pair.name, {}), **two, "generator": seeds}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CALLED_WITH, pair.name, options)
        theirs = by_diffusers(pair, 2)
    ours = pair.make(steps=2, count=2).pixels
    assert psnr(ours, theirs) >= 50
    assert not np.array_equal(*ours)


def test_a_negative_prompt_may_be_the_prompt(pair: Pair) -> None:
    assert pair.make(negative=PROMPT, steps=1).pixels.std() > 0.02


def test_any_prompt_is_taken(pair: Pair) -> None:
    """Empty, not of the tokenizer's alphabet, or too long: then its end is cut, and it is told."""
    assert pair.make("", steps=1).notes == []
    if pair.name == "dit":
        with pytest.raises(MlxconvError, match=r"'a cat' is not a class .* 0 to 999, or a label"):
            pair.make("a cat")
        return
    assert np.isfinite(pair.make("猫 на диване 🛋", steps=1).pixels).all()
    assert "its end was cut" in pair.make("a cat on a sofa " * 40, steps=1).notes[0]


def test_cfg_is_of_pipelines_with_two_kinds_of_guidance(pair: Pair) -> None:
    if pair.ours.family.embedded(pair.ours.parts):
        pytest.skip("this pipeline has both")
    with pytest.raises(MlxconvError, match=r"cfg=3: .* pass --guidance 3"):
        pair.make(steps=1, cfg=3.0)


def test_another_scheduler_is_taken_by_name(pair: Pair) -> None:
    other = pair.make(steps=3, scheduler="unipc").pixels
    assert np.isfinite(other).all()
    assert not np.array_equal(other, pair.make(steps=3).pixels)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"seed": -1}, {"width": 33}, {"count": 0}])
def test_what_cannot_be_made_is_refused(pair: Pair, wrong: dict[str, int]) -> None:
    with pytest.raises(MlxconvError, match=r"at least 1|0 or more|divisible by"):
        pair.make(**wrong)


# ---- precision -----------------------------------------------------------------------------------


def test_in_bf16_a_picture_loses_what_it_loses_in_torch(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both against torch in fp32, from the noise of torch in bf16."""
    import torch
    from diffusers.utils.torch_utils import randn_tensor

    drawn: list[torch.dtype] = []  # by the bf16 pipeline, which is the first to ask

    def as_in_bf16(shape: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        drawn.append(dtype)
        return randn_tensor(shape, dtype=drawn[0], **options).to(dtype)

    monkeypatch.setattr(sys.modules[type(pair.theirs).__module__], "randn_tensor", as_in_bf16)
    half = diffusers_pipeline(pair.checkpoint, torch_dtype=torch.bfloat16)
    ours = load(pair.bundle, dtype="bfloat16", keep=True)
    errors = []
    for seed in range(SEEDS):
        # The rounding of one prompt's embedding is in all of its pictures: each has its own.
        prompt = PROMPT if pair.name == "dit" else f"{PROMPT} {SENTENCES[seed % 3][: 9 + seed]}"
        words = {} if pair.name == "dit" else {"prompt": prompt}
        in_torch = by_diffusers(pair, 4, half, seed, **words)
        exact = by_diffusers(pair, 4, seed=seed, **words)
        in_mlx = ours(prompt, **asked(pair.name), steps=4, seed=seed).pixels
        errors.append([np.mean((x - exact) ** 2) for x in (in_mlx, in_torch)])
    mlx, torch_ = -10 * np.log10(np.mean(errors, axis=0))
    print(f"\n{pair.name} bf16 against torch fp32: mlx {mlx:.1f} dB, torch {torch_:.1f} dB")
    assert mlx >= torch_ - MARGIN


# ---- the caller's own embeddings -----------------------------------------------------------------


def test_embeddings_stand_for_prompts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the encoders, for a bundle that has none."""
    family, parts = pair.ours.family, pair.ours.parts
    made = pair.make(steps=2, negative=NEGATIVE)
    own = family.encode(parts, PROMPT, made.request)
    negative = family.negative(parts, NEGATIVE, made.request)
    for name in family.encoders:
        monkeypatch.delitem(parts.bundle.manifest["components"], name)
    arrays = {name: np.array(value) for name, value in own.items()}
    again = pair.make(None, steps=2, embeddings=arrays, negative_embeddings=negative)
    assert np.array_equal(again.pixels, made.pixels)
    if family.encoders:
        says = rf"no text_encoder.* pass arrays from Python, embeddings=\{{'{next(iter(own))}': \("
        with pytest.raises(MlxconvError, match=says):
            pair.make()


@of("flux")
def test_embeddings_that_do_not_fit_are_refused(pair: Pair) -> None:
    hidden, pooled = mx.zeros((1, 16, 64)), mx.zeros((1, 32))
    for embeddings, says in (
        ({"encoder_hidden_states": hidden}, "embeddings has .*; expected .*, pooled_projections"),
        ({"encoder_hidden_states": hidden[0], "pooled_projections": pooled},
         r"\['encoder_hidden_states'\] has shape \(16, 64\), expected \(1, tokens, 64\)"),
        ({"encoder_hidden_states": hidden, "pooled_projections": [[0] * 31]},
         r"\['pooled_projections'\] has shape \(1, 31\), expected \(1, 32\)"),
        ({"encoder_hidden_states": hidden, "pooled_projections": [[0], [0, 1]]}, "not an array"),
    ):  # fmt: skip
        with pytest.raises(MlxconvError, match=says):
            pair.make(None, embeddings=embeddings)
    whole = {"encoder_hidden_states": hidden, "pooled_projections": pooled}
    with pytest.raises(MlxconvError, match="pass either a prompt or embeddings"):
        pair.make(embeddings=whole)
    with pytest.raises(MlxconvError, match="pass either negative or negative_embeddings"):
        pair.make(negative="", negative_embeddings=whole)


# ---- what one family has -------------------------------------------------------------------------


def configure(monkeypatch: pytest.MonkeyPatch, theirs: Any, **options: Any) -> None:
    """Other options of a diffusers pipeline or module."""
    from diffusers.configuration_utils import FrozenDict

    monkeypatch.setattr(theirs, "_internal_dict", FrozenDict({**theirs.config, **options}))


@of("stable_diffusion_3")
def test_stable_diffusion_3_goes_without_t5(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(pair.ours.parts.bundle.manifest["components"], "text_encoder_3")
    for part in ("text_encoder_3", "tokenizer_3"):
        monkeypatch.setattr(pair.theirs, part, None)
    for negative in (None, NEGATIVE):
        theirs = by_diffusers(pair, 4, negative_prompt=negative)
        assert psnr(pair.make(negative=negative, steps=4).pixels, theirs) >= 50


@of("stable_diffusion_xl")
def test_stable_diffusion_xl_is_told_sizes(pair: Pair) -> None:
    sizes = {
        "original_size": (64, 48), "crops_coords_top_left": (3, 5), "target_size": (20, 30)
    }  # fmt: skip
    ours = pair.make(steps=4, conditioning=sizes).pixels
    assert psnr(ours, by_diffusers(pair, 4, **sizes)) >= 50
    assert psnr(ours, pair.make(steps=4).pixels) < 48
    with pytest.raises(MlxconvError, match="conditioning size: this pipeline takes original_size"):
        pair.make(conditioning={"size": (1, 1)})
    with pytest.raises(MlxconvError, match=r"target_size is \(1,\): two numbers"):
        pair.make(conditioning={"target_size": (1,)})


@of("stable_diffusion_xl")
def test_no_negative_prompt_is_not_an_empty_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros stand for none, unless the checkpoint says otherwise."""
    zeros, empty = pair.make(steps=2).pixels, pair.make(steps=2, negative="").pixels
    assert psnr(empty, by_diffusers(pair, 2, negative_prompt="")) >= 50
    assert psnr(empty, zeros) < 48
    monkeypatch.setitem(pair.ours.parts.index, "force_zeros_for_empty_prompt", False)
    assert np.array_equal(pair.make(steps=2).pixels, empty)


@of("stable_diffusion_xl")
def test_the_first_text_encoder_may_be_left_out(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, parts = pair.ours.family, pair.ours.parts
    monkeypatch.delitem(parts.bundle.manifest["components"], "text_encoder")
    for part in ("text_encoder", "tokenizer"):
        monkeypatch.setattr(pair.theirs, part, None)
    theirs = pair.theirs.encode_prompt(PROMPT, do_classifier_free_guidance=False)
    ours = family.encode(parts, PROMPT, Request(PROMPT, 32, 16, 1, 1.0))
    for name, other in (("encoder_hidden_states", theirs[0]), ("text_embeds", theirs[2])):
        np.testing.assert_allclose(np.array(ours[name]), other.detach(), rtol=1e-4, atol=1e-5)


@of("stable_diffusion_xl")
def test_a_vae_may_have_means_of_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"latents_mean": [0.1, -0.4, 0.2, 0.0], "latents_std": [1.5, 0.7, 1.0, 0.4]}
    configured, plain = pair.ours.parts.config, pair.make(steps=2).pixels
    monkeypatch.setattr(pair.ours.parts, "config", lambda name: {**configured(name), **own})
    configure(monkeypatch, pair.theirs.vae, **own)
    ours = pair.make(steps=2).pixels
    assert psnr(ours, by_diffusers(pair, 2)) >= 50
    assert psnr(ours, plain) < 48


@of("stable_diffusion_xl")
def test_a_vae_that_overflows_in_fp16_runs_in_fp32(pair: Pair) -> None:
    parts = load(pair.bundle, dtype="float16").parts
    assert [parts.component(name).dtype for name in ("unet", "vae")] == [mx.float16, mx.float32]


@of("stable_diffusion")
def test_guidance_may_be_an_input_of_a_unet(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that was distilled: then there is no other guidance."""
    import torch

    family, parts = pair.ours.family, pair.ours.parts
    configured = parts.config
    monkeypatch.setattr(parts, "config", lambda n: {**configured(n), "time_cond_proj_dim": 32})
    given = family.inputs(parts, Request(PROMPT, 32, 16, 1, guidance=7.5), {})
    theirs = pair.theirs.get_guidance_scale_embedding(torch.tensor([6.5]), 32)
    np.testing.assert_allclose(np.array(given["timestep_cond"]), theirs, atol=1e-3)
    assert family.embedded(parts)


@of("flux2_klein")
def test_a_distilled_checkpoint_is_not_guided(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    guided = pair.make(steps=2).pixels
    monkeypatch.setitem(pair.ours.parts.index, "is_distilled", True)
    configure(monkeypatch, pair.theirs, is_distilled=True)
    ours = pair.make(steps=2, guidance=4.0).pixels
    assert psnr(ours, by_diffusers(pair, 2)) >= 50
    assert psnr(ours, guided) < 48
    assert pair.ours.defaults.steps == 4


@of("dit")
def test_a_class_has_a_label_and_a_number(pair: Pair) -> None:
    one = pair.make(PROMPT, steps=2).pixels
    assert np.array_equal(pair.make("281", steps=2).pixels, one)
    assert not np.array_equal(pair.make("7", steps=2).pixels, one)


# ---- without torch -------------------------------------------------------------------------------

ALONE = f"""{WITHOUT_TORCH}
import json
import mlxconv
import numpy as np
asked = json.loads(sys.argv[1])
np.savez(sys.argv[2], **{{
    name: mlxconv.load(bundle)({PROMPT!r}, **options).pixels
    for name, (bundle, options) in asked.items()
}})
"""


def test_all_families_need_no_torch(made: Made, tmp_path: Path) -> None:
    """In one process, where torch, diffusers and transformers cannot be imported."""
    wanted = {n: (str(made(n)[1]), {**asked(n), "steps": 2, "seed": 7}) for n in NAMES}
    command = [sys.executable, "-c", ALONE, json.dumps(wanted), str(tmp_path / "made.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone = np.load(tmp_path / "made.npz")
    for name, (bundle, options) in wanted.items():
        assert np.array_equal(alone[name], load(bundle)(PROMPT, **options).pixels), name
