"""Decoding by a tiny autoencoder or a linear map: `--decoder`, `--preview`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mlxconv.cli import cli
from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.decode import LinearDecoder
from mlxconv.runtime.generate.pipeline import Pipeline, load

from ...bundles import copy
from ...conftest import Bundles
from .test_generate import PROMPT, SIZE, TOKENS, psnr

ASKED: dict[str, Any] = {**SIZE, "tokens": TOKENS, "guidance": 4.0, "seed": 7}


@pytest.fixture(scope="module")
def pipe(pipeline_bundle: Bundles) -> Pipeline:
    return load(pipeline_bundle("fp32"), keep=True)


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe("AutoencoderTiny")
    recipe = replace(recipe, tiny={**recipe.tiny, "latent_channels": 16})
    return tiny_checkpoint(recipe, None, tmp_path_factory.mktemp("tiny") / "taef1", seed=5)


@pytest.fixture(scope="module")
def tiny(tiny_source: Path) -> Path:
    out = tiny_source.with_name("bundle")
    convert(tiny_source, out, "fp32")
    return out


@pytest.mark.slow
def test_a_tiny_autoencoder_decodes_as_in_diffusers(
    pipe: Pipeline, tiny: Path, tiny_source: Path, pipeline_checkpoint: Path
) -> None:
    import torch
    from diffusers import AutoencoderTiny, FluxPipeline

    theirs = FluxPipeline.from_pretrained(
        pipeline_checkpoint, vae=AutoencoderTiny.from_pretrained(tiny_source)
    )
    theirs.set_progress_bar_config(disable=True)
    found = theirs(
        PROMPT, **SIZE, num_inference_steps=2, output_type="np", max_sequence_length=TOKENS,
        guidance_scale=4.0, generator=torch.Generator().manual_seed(7),
    )  # fmt: skip
    ours = pipe(PROMPT, **ASKED, steps=2, decoder=tiny).pixels
    assert found.images.std() > 0.02
    assert psnr(ours, np.asarray(found.images)) >= 50


def test_tiny_names_a_folder_of_the_bundle(
    pipeline_bundle: Bundles, tiny: Path, pipe: Pipeline, tmp_path: Path
) -> None:
    bundle = copy(pipeline_bundle("fp32"), tmp_path)
    with pytest.raises(MlxconvError, match=r"tiny_vae: no such folder; convert a tiny"):
        load(bundle)(PROMPT, **ASKED, steps=1, decoder="tiny")
    copy(tiny, bundle).rename(bundle / "tiny_vae")
    ours = load(bundle)(PROMPT, **ASKED, steps=1, decoder="tiny").pixels
    assert np.array_equal(ours, pipe(PROMPT, **ASKED, steps=1, decoder=tiny).pixels)


def test_a_decoder_of_other_latents_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    source = tiny_checkpoint(load_recipe("AutoencoderTiny"), None, tmp_path / "taesd")
    convert(source, tmp_path / "bundle", "fp32")
    with pytest.raises(MlxconvError, match="latents of 4 channels, the pipeline's VAE 16"):
        pipe(PROMPT, **ASKED, steps=1, decoder=tmp_path / "bundle")


@pytest.mark.parametrize("by", ["vae", "tiny"])
def test_previews_show_what_the_step_predicts(pipe: Pipeline, tiny: Path, by: str) -> None:
    """The last step of a flow predicts the end: a preview by the decoder is then the picture."""
    seen: list[tuple[Image.Image, int]] = []
    asked = {**ASKED, "steps": 1, "decoder": tiny if by == "tiny" else None}
    made = pipe(PROMPT, **asked, preview=lambda image, p: seen.append((image, p.step)))
    assert [step for _, step in seen] == [0]
    assert seen[0][0].size == (SIZE["width"], SIZE["height"])
    assert made.seconds["preview"] > 0
    assert np.array_equal(made.pixels, pipe(PROMPT, **asked).pixels)
    shown = np.asarray(seen[0][0]) / 255
    assert shown.std() > 0.01
    if by == "tiny":
        assert np.abs(shown - made.pixels[0]).max() <= 1 / 255


def test_a_linear_map_is_found_where_there_is_one() -> None:
    """Of latents larger than what it is fitted to, from a decoder that is linear."""
    rng = np.random.default_rng(0)
    weights, bias = rng.normal(size=(3, 4)) / 4, rng.normal(size=(3, 1, 1)) / 4

    def colours(z: Any) -> Any:
        return np.einsum("oc,chw->ohw", weights, np.array(z)) + bias

    def decode(z: mx.array) -> mx.array:
        return mx.array(colours(z[0]).repeat(8, 1).repeat(8, 2)[None].astype(np.float32))

    entry = SimpleNamespace(inputs=[SimpleNamespace(path="z")])
    vae: Any = SimpleNamespace(
        decode=decode,
        config={},
        executor=None,
        program=SimpleNamespace(entry=lambda name: entry),
    )
    z = mx.array(rng.normal(size=(1, 4, 40, 27)).astype(np.float32))
    found = np.array(LinearDecoder(vae).decode(z))[0]
    expected = colours(z[0])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


def test_the_command_writes_previews_whole(pipeline_bundle: Bundles, tmp_path: Path) -> None:
    command = ["generate", str(pipeline_bundle("4bit")), PROMPT, "-o", str(tmp_path / "cat.png")]
    options = ["--size", "48x32", "--steps", "2", "--tokens", "16"]
    seen = ["--preview", str(tmp_path / "now.png"), "--warmup", "--json"]
    done = CliRunner().invoke(cli, [*command, *options, *seen])
    assert done.exit_code == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cat.png", "now.png"]
    assert Image.open(tmp_path / "now.png").size == (48, 32)
    done = CliRunner().invoke(cli, [*command, "--preview", str(tmp_path / "none" / "now.png")])
    assert done.exit_code == 2 and "no folder" in done.stderr
