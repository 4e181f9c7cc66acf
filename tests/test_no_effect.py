"""An option that would change nothing is refused, or said to have no effect."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlxconv.cli import cli
from mlxconv.runtime.errors import ArgumentError
from mlxconv.runtime.generate.denoise import LoopSettings
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.generate.options import Options
from mlxconv.runtime.generate.pipeline import Pipeline, load

from .conftest import Bundles

# ---- convert -------------------------------------------------------------------------------------

NONE_QUANTIZED = "nothing is quantized in an affine precision"
WIDE = "transformer_blocks.0.ff.net.2"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "x_embedder.bias=4", "--q", "4bit"],
         "--set x_embedder.bias=4 has no effect on any of the 1 weights .* not a linear weight"),
        (["--set", f"{WIDE}=4", "--set", f"{WIDE}=8"],
         f"--set {WIDE}=8 has no effect .* an earlier --set decides"),
        (["--keep", "x_embedder", "--q", "bf16"], "--keep has no effect: --q bf16 quantizes no"),
        (["--method", "rtn", "--q", "fp16"], f"--method rtn has no effect: {NONE_QUANTIZED}"),
        (["--method", "search", "--q", "fp32"], f"--method search has .*: {NONE_QUANTIZED}"),
        (["--group-size", "32", "--q", "bf16"], "bf16 has no groups: drop --group-size 32"),
        (["--group-size", "32", "--q", "{policy}"], "--group-size has no effect: the groups are"),
        (["--vae-q", "8bit"], "--vae-q has no effect: no VAE is converted"),
        (["--text-encoder-q", "8bit"], "--text-encoder-q has no effect: no text encoder"),
        (["--size", "64x64"], "--size has no effect: no class here builds its image size in"),
        (["--size", "64x64", "--weights-only"], "--size has no effect: nothing is traced"),
    ],
)  # fmt: skip
def test_convert_refuses_what_decides_nothing(
    options: list[str], says: str, flux_checkpoint: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('default = "4bit"\n')
    given = [option.format(policy=policy) for option in options]
    command = ["convert", str(flux_checkpoint), "-o", str(tmp_path / "out"), "--dry-run", *given]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    result_says(result, says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--q", "fp32", "--keep", "x_embedder"], "--keep has no effect"),
        (["--revision", "main"], "--revision applies only to Hub repositories"),
        (["--class", "mypackage.model:Own"], "is a pipeline, and --class"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(
    options: list[str], says: str, pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    command = ["convert", str(pipeline_checkpoint), "-o", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(cli, command)
    assert isinstance(result.exception, ArgumentError) and says in str(result.exception)
    assert result.output == ""  # no progress before


def test_what_is_only_said_twice_is_taken(flux_checkpoint: Path, tmp_path: Path) -> None:
    """An option that asks for what holds anyway is heeded, not without effect."""
    command = ["convert", str(flux_checkpoint), "-o", str(tmp_path / "out"), "--dry-run"]
    options = ["--q", "4bit", "--keep", "x_embedder", "--set", f"{WIDE}=4", "--group-size", "32"]
    for each in (options, ["--set", f"{WIDE}=8", "--method", "rtn"]):
        result = CliRunner().invoke(cli, [*command, *each])
        assert result.exit_code == 0, result.exception


def result_says(result: Result, says: str) -> None:
    assert re.search(says, str(result.exception)), result.exception


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["convert", "x", "-o", "y", "--dry-run", "--verify"], "--dry-run writes no bundle"),
        (["inspect", "x", "--program", "unet", "--tensors"], "cannot be combined with --tensors"),
        (["recipe", "new", "BertModel", "--force"], "--force needs -o FILE"),
        (["models", "--markdown", "--json"], "takes neither NAME nor --json"),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(command: list[str], says: str) -> None:
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split()).replace("│ ", "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--source", "."], "--source has no effect without --against"),
        (["--mflux-python", "x"], "--mflux-python has no effect without --against mflux"),
    ],
)
def test_bench_refuses_what_is_for_a_peer(options: list[str], says: str) -> None:
    options = [sys.executable if option == "x" else option for option in options]
    result = CliRunner().invoke(cli, ["bench", "bundle", *options])
    assert isinstance(result.exception, ArgumentError)  # exit 2
    result_says(result, says)


# ---- generate ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe(pipeline_bundle: Bundles) -> Pipeline:
    return load(pipeline_bundle("fp32"))


def notes(pipe: Pipeline, **options: Any) -> list[str]:
    return pipe.plan(Options("a cat", width=48, height=32, steps=4, **options)).notes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cfg": 4.0}, "cfg 4.0 has no effect without a negative prompt (--negative)"),
        ({"cfg_end": 0.5}, "cfg_end 0.5 has no effect: no negative prompt is read"),
        ({"negative": "dog", "cfg": 1.0}, "the negative prompt is not read: guidance is 1"),
        ({"loop": LoopSettings(evaluate_every=9)}, "evaluate_every 9 of 4 steps"),
        ({"loop": LoopSettings(clear_cache_every=9)}, "clear_cache_every 9 has no effect in 4"),
    ],
)
def test_generate_notes_what_has_no_effect(
    pipe: Pipeline, options: dict[str, Any], says: str
) -> None:
    (note,) = notes(pipe, **options)
    assert note.startswith(says)


def test_what_has_an_effect_or_means_off_is_not_noted(pipe: Pipeline) -> None:
    both = {"negative": "dog", "cfg": 3.0, "cfg_end": 0.5, "guidance": 2.0, "tokens": 16}
    for options in ({}, both, {"cfg": 1.0}, {"loop": LoopSettings(evaluate_every=2)}):
        assert notes(pipe, **options) == []


def test_guidance_of_a_checkpoint_that_takes_none_is_noted(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.1-schnell; diffusers takes the keyword and drops it."""
    own = pipe.parts.config("transformer")
    distilled = {**own, "guidance_embeds": False}
    config = pipe.parts.config
    monkeypatch.setattr(
        pipe.parts, "config", lambda name: distilled if name == "transformer" else config(name)
    )
    assert notes(pipe, guidance=0.0) == notes(pipe) == []
    (note,) = notes(pipe, guidance=7.0)
    assert note.startswith("guidance 7.0 has no effect: this checkpoint takes none")


def test_families_whose_prompts_have_a_fixed_length_say_so(pipe: Pipeline) -> None:
    fixed = {name for name, family in FAMILIES.items() if not family.default_tokens}
    assert fixed == {"StableDiffusionPipeline", "StableDiffusionXLPipeline", "DiTPipeline"}


def test_strips_that_are_not_needed_are_noted(pipe: Pipeline) -> None:
    made = pipe("a cat", width=48, height=32, steps=1, tokens=16, tile=64)
    assert made.notes == [
        "tile 64 has no effect: no part of the decoder needs more memory than that"
    ]
