"""`mlxconv demo`: the trained pipeline at four precisions beside diffusers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mlxconv.cli import cli
from mlxconv.convert.conversion import convert
from mlxconv.convert.demo import CHECKPOINT
from mlxconv.convert.demo.checker import faults
from mlxconv.convert.demo.scenes import held_out_scenes

ROW = {
    "q", "bytes", "bits_per_weight", "rel_l2", "runtime_rel_l2", "psnr_db", "convert_seconds",
    "step_seconds", "passed", "prompts", "right", "accuracy",
}  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command printed as JSON, of six prompts."""
    out = tmp_path_factory.mktemp("demo")
    arguments = ["demo", "-o", str(out), "--prompts", "6", "--json"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def drawn(command: str, folder: Path) -> list[str]:
    """What is wrong with the picture that a printed command draws of a held-out scene."""
    line = [*shlex.split(command)[1:-1], str(folder / "picture.png"), "--seed", "0"]
    done = CliRunner().invoke(cli, line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with Image.open(folder / "picture.png") as picture:
        return faults(np.asarray(picture.convert("RGB")), held_out_scenes(1)[0])


@pytest.mark.slow
def test_the_next_step_draws_its_prompt(shown: dict[str, Any], tmp_path: Path) -> None:
    (command,) = shown["next_steps"]
    assert drawn(command, tmp_path) == []


def test_a_prompt_is_as_long_as_the_tokenizer_says(tmp_path: Path) -> None:
    """`convert` names the number, and `generate` does where it pads to more."""
    report = convert(CHECKPOINT, tmp_path / "out", "bf16")
    caption = held_out_scenes(1)[0].caption
    command = report.next_steps[-1].replace("a photo of a cat", caption)
    assert " --tokens 16 " in command
    assert drawn(f"{command} --steps 8 -o picture.png", tmp_path) == []
    line = ["generate", str(tmp_path / "out"), caption, "-o", str(tmp_path / "x.png")]
    said = CliRunner().invoke(cli, [*line, "--steps", "1"]).stderr
    (option,) = re.findall(r"longest prompt is 16 tokens; (--tokens \d+)", said)
    said = CliRunner().invoke(cli, [*line, "--steps", "1", *option.split()]).stderr
    assert "longest prompt" not in said


@pytest.mark.slow
def test_every_precision_is_verified(shown: dict[str, Any]) -> None:
    assert shown["passed"]
    assert [row["q"] for row in shown["rows"]] == ["fp32", "bf16", "8bit", "4bit"]
    assert all(row.keys() >= ROW and row["passed"] for row in shown["rows"])


@pytest.mark.slow
def test_fp32_draws_what_diffusers_draws(shown: dict[str, Any]) -> None:
    exact = shown["rows"][0]
    assert exact["psnr_db"] > 80
    assert exact["accuracy"] == shown["reference_accuracy"] >= 0.8


@pytest.mark.slow
def test_fewer_bits_are_smaller_and_farther_off(shown: dict[str, Any]) -> None:
    for name in ("bytes", "bits_per_weight", "psnr_db"):
        values = [row[name] for row in shown["rows"]]
        assert values == sorted(values, reverse=True), name
    assert shown["rows"][0]["bytes"] == pytest.approx(shown["source_bytes"], rel=0.02)


@pytest.mark.slow
def test_the_picture_has_a_column_for_each(shown: dict[str, Any]) -> None:
    with Image.open(shown["picture"]) as sheet:
        assert sheet.format == "PNG"
        wide, high = sheet.size
    assert wide > 5 * 64
    assert high > 6 * 64
    assert Path(shown["folder"], "4bit", "transformer", "config.json").is_file()


def test_no_prompts_is_an_error() -> None:
    result = CliRunner().invoke(cli, ["demo", "--prompts", "0"])
    assert result.exit_code != 0
