"""Whole pipelines through both sides: latents after each step, and pictures."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mlxconv.cli import cli
from mlxconv.convert.conversion import convert
from mlxconv.convert.source.checkpoint import open_checkpoint
from mlxconv.convert.verify.metrics import Row
from mlxconv.convert.verify.pictures import Compared, PipelineCase, image_rows, trajectory_rows
from mlxconv.convert.verify.pipelines import Noise, Request, Run, call_arguments, run_pipeline
from mlxconv.convert.verify.verify import ParityReport, verify
from mlxconv.runtime.bundle import open_bundle
from mlxconv.runtime.errors import MlxconvError

from ...bundles import change_nodes, copy
from ...conftest import Bundles
from ..into_diffusers.tiny_pipelines import tiny

SMALL: dict[str, Any] = {"size": (48, 32), "steps": 2}


def rows_of(report: ParityReport, tier: str) -> list[Row]:
    return [row for row in report.tiers if row.tier == tier]


# ---- bundles that are right ---------------------------------------------------------------------


def test_the_same_prompt_gives_the_same_picture(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    report = verify(pipeline_bundle("fp32"), pipeline_checkpoint, tier="image", **SMALL)
    (row,) = rows_of(report, "image")
    assert report.passed
    assert (row.component, row.name) == ("pipeline", "48x32")
    assert row.reference == f"diffusers {diffusers.__version__} fp32 cpu"
    assert row.psnr_db is not None and 80 < row.psnr_db < 400
    (compared,) = report.compared
    assert compared.ours.pixels is not None and compared.exact.pixels is not None
    gap = np.mean((compared.ours.pixels.astype(np.float64) - compared.exact.pixels) ** 2)
    assert row.psnr_db == pytest.approx(-10 * math.log10(gap), abs=1e-6)
    assert compared.exact.pixels.std() > 0.05


def test_the_latents_are_compared_after_each_step(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    report = verify(pipeline_bundle("fp32"), pipeline_checkpoint, tier="trajectory", **SMALL)
    rows = rows_of(report, "trajectory")
    assert [row.name for row in rows] == ["step 1 of 2", "step 2 of 2"]
    assert 0 < rows[0].rel_l2 < rows[1].rel_l2 < 1e-4
    assert {row.threshold for row in rows} == {10**-2.5}
    assert report.generated is not None and report.generated["runtime"] == "native"


def test_single_components_are_run_inside_diffusers_pipeline(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    report = verify(
        pipeline_bundle("fp32"), pipeline_checkpoint, tier="image", components=["vae"],
        prompts=["two dogs", "a cat"], **SMALL,
    )  # fmt: skip
    assert report.passed and report.generated is not None
    assert report.generated["runtime"] == "into_diffusers"
    assert [row.name for row in report.tiers] == [
        "176 tensors", "prompt 1, 48x32", "prompt 2, 48x32"
    ]  # fmt: skip
    one, other = report.compared
    assert np.array_equal(one.ours.latents[-1], one.exact.latents[-1])  # the VAE is after them
    assert not np.array_equal(one.exact.latents[-1], other.exact.latents[-1])


def test_bf16_is_held_to_what_torch_loses_in_bf16(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    report = verify(pipeline_bundle("bf16"), pipeline_checkpoint, tier="trajectory", **SMALL)
    (compared,) = report.compared
    assert report.passed and compared.half is not None
    for i, row in enumerate(rows_of(report, "trajectory")):
        half, exact = (run.latents[i].astype(np.float64) for run in (compared.half, compared.exact))
        own = np.linalg.norm(half - exact) / np.linalg.norm(exact)
        assert own > 1e-2  # of bf16, and not of other noise
        assert row.threshold == pytest.approx(1.5 * own, rel=1e-3)
        assert own / 3 < row.rel_l2 < 1.5 * own


def test_a_quantized_bundle_is_judged_by_its_own_weights(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    report = verify(pipeline_bundle("4bit"), pipeline_checkpoint, tier="image", **SMALL)
    cost, runtime = rows_of(report, "image")
    assert report.passed
    assert (cost.threshold, cost.note, cost.name) == (
        None, "quantization error, reported only", "48x32",
    )
    assert (runtime.note, runtime.name) == ("", "48x32 (runtime)")
    assert runtime.reference.endswith("fp32 cpu, dequantized weights")
    assert cost.psnr_db is not None and runtime.psnr_db is not None
    assert cost.psnr_db < 50 < 80 < runtime.psnr_db


# ---- bundles that are wrong ---------------------------------------------------------------------


def add_to_sub(node: list[Any]) -> None:
    node[0] = "sub"


def test_a_wrong_node_is_found_in_its_block(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    bundle = copy(pipeline_bundle("fp32"), tmp_path)
    change_nodes(bundle / "transformer", "transformer_blocks", "add", add_to_sub)
    report = verify(bundle, pipeline_checkpoint, tier="image", **SMALL)
    assert not report.passed
    assert not rows_of(report, "image")[0].passed
    assert report.begins_at["transformer"].startswith("transformer_blocks.0")


def test_an_error_outside_of_the_components_is_found_at_its_step(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    """Another schedule, which no single forward could tell."""
    bundle = copy(pipeline_bundle("fp32"), tmp_path)
    settings = bundle / "scheduler" / "scheduler_config.json"
    changed = {**json.loads(settings.read_text()), "shift": 2.0}
    settings.write_text(json.dumps(changed))
    command = ["verify", str(bundle), "--against", str(pipeline_checkpoint), "--tier", "image"]
    found = CliRunner().invoke(cli, [*command, "--size", "48x32", "--steps", "2", "--json"])
    assert found.exit_code == 1, found.exception
    data = json.loads(found.stdout)
    assert data["begins_at"] == {"pipeline": "step 1 of 2; each component's own forward passes"}
    assert data["tiers"][-1]["psnr_db"] < 50
    assert data["generated"]["steps"] == 2


# ---- judging ------------------------------------------------------------------------------------


def compared(ours: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> Compared:
    return Compared("a cat", "", "torch", Run(ours, [ours]), Run(exact, [exact]))


@pytest.mark.parametrize(("decibels", "passes"), [(49.9, False), (50.1, True)])
def test_pictures_pass_at_50_decibels(decibels: float, passes: bool) -> None:
    exact = np.random.default_rng(0).uniform(0.2, 0.8, (1, 8, 8, 3))
    gap = 10 ** (-decibels / 20) * np.where(np.arange(3) == 1, -1, 1)
    (row,) = image_rows(compared(exact + gap, exact), None)
    assert row.psnr_db == pytest.approx(decibels)
    assert row.passed is passes


def test_black_pictures_are_judged_and_noted() -> None:
    black = np.zeros((1, 4, 4, 3))
    (row,) = image_rows(compared(black + 1e-4, black), None)
    assert row.passed and row.psnr_db == pytest.approx(80)
    assert "one colour" in row.note
    assert not image_rows(compared(black + 0.01, black), None)[0].passed


def test_a_picture_that_is_not_finite_fails() -> None:
    exact = np.random.default_rng(0).uniform(0, 1, (1, 4, 4, 3))
    (row,) = image_rows(compared(exact * np.nan, exact), None)
    assert not row.passed and row.psnr_db == -math.inf


def test_trajectories_of_other_lengths_are_an_error() -> None:
    both = compared(np.ones((1, 2, 2, 3)), np.ones((1, 2, 2, 3)))
    both.ours.latents.append(np.ones(3))
    with pytest.raises(MlxconvError, match="schedule has 2 steps, that of diffusers 1"):
        trajectory_rows(both, None)


# ---- other pipelines ----------------------------------------------------------------------------


def test_noise_is_drawn_once_and_given_again_in_another_precision() -> None:
    noise, seed = Noise(), torch.Generator().manual_seed(0)
    with noise.drawn():
        first = torch.randn((2, 32), generator=seed, dtype=torch.bfloat16)
    with noise.drawn():
        again = torch.randn((2, 32), generator=seed)
        with pytest.raises(MlxconvError, match="different noise"):
            torch.randn((2, 32), generator=seed)
    assert again.dtype == torch.float32
    assert torch.equal(again, first.float())
    assert torch.randn(1).shape == (1,)  # torch's own again


@pytest.mark.slow
def test_a_pipeline_without_prompts_and_with_noise_at_each_step(tmp_path: Path) -> None:
    unet, scheduler = tiny("UNet2DModel", sample_size=16), diffusers.DDPMScheduler()
    diffusers.DDPMPipeline(unet, scheduler).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "fp32", "fp32")
    sides = tmp_path / "fp32", tmp_path / "source"
    report = verify(*sides, tier="trajectory", steps=3)
    assert report.passed, report.as_text()
    assert [row.name for row in rows_of(report, "trajectory")] == [
        "step 1 of 3", "step 2 of 3", "step 3 of 3"
    ]  # fmt: skip
    with pytest.raises(MlxconvError, match="DDPMPipeline: takes no guidance_scale, which --guid"):
        verify(*sides, tier="image", guidance=3.0)
    with pytest.raises(MlxconvError, match="DDPMPipeline: diffusers cannot run it in bfloat16"):
        verify(*sides, tier="image", dtype="bfloat16")


def test_videos_are_pictures_and_sounds_are_not() -> None:
    class Anything:
        def __init__(self, **result: Any) -> None:
            self.components: dict[str, Any] = {}
            self.result = type("Output", (), result)()

        def __call__(self, generator: Any, output_type: str) -> Any:
            return self.result

    frames = np.random.default_rng(0).uniform(0, 1, (1, 5, 4, 6, 3))
    video = run_pipeline(Anything(frames=frames), {}, 0)
    assert video.pixels is not None and video.pixels.shape == (5, 4, 6, 3)
    sound = run_pipeline(Anything(audios=frames), {}, 0)
    with pytest.raises(MlxconvError, match=r"makes no images; use --tier trajectory"):
        image_rows(Compared("", "", "torch", sound, sound), None)


# ---- what cannot be done ------------------------------------------------------------------------


def test_one_component_makes_no_pictures(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    alone = pipeline_checkpoint / "transformer"
    with pytest.raises(MlxconvError, match=r"transformer: has no pipeline .*--tier forward"):
        verify(pipeline_bundle("fp32"), alone, components=["transformer"], tier="image")


def test_a_picture_that_a_pipeline_needs_is_named(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(pipeline_checkpoint, source)
    index = source / "model_index.json"
    index.write_text(index.read_text().replace("FluxPipeline", "FluxImg2ImgPipeline"))
    with pytest.raises(MlxconvError, match=r"FluxImg2ImgPipeline: .* it takes image, which"):
        verify(pipeline_bundle("fp32"), source, tier="image", **SMALL)
    index.write_text(index.read_text().replace("FluxImg2ImgPipeline", "MyPipeline"))
    with pytest.raises(MlxconvError, match=r"class is MyPipeline, which diffusers .* has no"):
        verify(pipeline_bundle("fp32"), source, tier="image", **SMALL)


@pytest.mark.parametrize(
    ("name", "lacks"), [("DiTPipeline", "class_labels"), ("WanImageToVideoPipeline", "image")]
)
def test_arguments_that_a_class_cannot_go_without_are_named(name: str, lacks: str) -> None:
    (prompt,) = Request().prompts
    with pytest.raises(MlxconvError, match=f"{name}: cannot be called without {lacks}, which"):
        call_arguments(getattr(diffusers, name), Request(), prompt)


def test_a_prompt_that_a_class_does_not_take_is_refused() -> None:
    with pytest.raises(MlxconvError, match="DiTPipeline: takes no prompt, which --prompt would"):
        call_arguments(diffusers.DiTPipeline, Request(), "a cat")


def test_the_tokens_asked_for_are_those_of_the_pipeline() -> None:
    asked = Request(tokens=16)
    assert call_arguments(diffusers.FluxPipeline, asked, "a cat")["max_sequence_length"] == 16
    with pytest.raises(MlxconvError, match="takes no max_sequence_length, which --tokens would"):
        call_arguments(diffusers.StableDiffusionPipeline, asked, "a cat")


def test_a_bundle_without_programs_has_nothing_to_run(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    bundle = copy(pipeline_bundle("fp32"), tmp_path)
    for program in bundle.glob("*/program.json"):
        program.unlink()
    case = PipelineCase(
        open_bundle(bundle), open_checkpoint(pipeline_checkpoint), (), Request(), None, None
    )
    with pytest.raises(MlxconvError, match="nothing to run in MLX; convert without --weights-only"):
        case.check()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tier": "picture"}, "expected one of forward, block, trajectory, image"),
        ({"prompts": ["a cat"], "steps": 3}, "--steps: applies to whole pipelines, which"),
        ({"tier": "image", "steps": 0}, "--steps 0: at least 1"),
        ({"tier": "image", "stream": True}, "--stream holds one block at a time"),
        ({"tier": "trajectory", "dims": {"batch": 2}}, "with --tier trajectory use --size WxH"),
        ({"page": "no/such/report.html"}, "no folder .*; create it first"),
    ],
)
def test_options_that_do_not_go_together(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(MlxconvError, match=says):
        verify("nowhere", "nowhere", **asked)
