"""`profile`: its parts add up to the clock, and what a bundle lacks is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxconv.cli import cli
from mlxconv.runtime.bench.bench import Settings
from mlxconv.runtime.bench.profiling import PHASES, ProfileReport, measure
from mlxconv.runtime.bundle import load_component

from ...conftest import Bundles


def invoke(bundle: Path, *options: str) -> dict[str, Any]:
    command = ["profile", str(bundle), "--size", "64x64", "--dim", "text_tokens=8", *options]
    result = CliRunner().invoke(cli, [*command, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    return data


@pytest.fixture(scope="module")
def found(pipeline_bundle: Bundles) -> dict[str, Any]:
    return invoke(pipeline_bundle("fp32"), "--steps", "3")


def test_the_phases_add_up_to_the_wall_clock(found: dict[str, Any]) -> None:
    seconds = found["seconds"]
    assert all(seconds[phase] > 0 for phase in PHASES)
    assert sum(seconds[phase] for phase in PHASES) == pytest.approx(seconds["total"], rel=0.05)
    assert found["left_out"] == {}


@pytest.mark.parametrize("kind", ["blocks", "ops"])
def test_the_parts_of_a_step_add_up_to_it(found: dict[str, Any], kind: str) -> None:
    inside = found["inside"]
    assert sum(row["seconds"] for row in inside[kind]) == pytest.approx(inside["step"], rel=0.05)
    assert sum(row["share"] for row in inside[kind]) == pytest.approx(1)


def test_blocks_and_ops_have_the_same_nodes(found: dict[str, Any]) -> None:
    inside = found["inside"]
    counts = [sum(row["count"] for row in inside[kind]) for kind in ("blocks", "ops")]
    assert counts[0] == counts[1] > 0


def test_blocks_are_named_by_their_path(found: dict[str, Any]) -> None:
    names = {row["name"] for row in found["inside"]["blocks"]}
    assert {"transformer_blocks.0", "single_transformer_blocks.1"} <= names


def test_what_is_computed_before_the_loop_is_not_in_the_step(
    found: dict[str, Any], flux_bundle: Bundles
) -> None:
    """FLUX's modulation is decided by the schedule, so its silu is in no step."""
    program = load_component(flux_bundle("fp32"), "transformer").program
    ops = {node.op for body in program.bodies() for node in body.nodes}
    assert "silu" in ops
    assert "silu" not in {row["name"] for row in found["inside"]["ops"]}


def test_components_that_are_missing_are_said(flux_bundle: Bundles) -> None:
    settings = Settings(
        flux_bundle("fp32"), "transformer", steps=2, pixels=(64, 64), dims={"text_tokens": 8}
    )
    figures = measure(settings)
    assert figures["left_out"] == {
        "encode": "no text encoder in the bundle", "decode": "no VAE in the bundle",
    }  # fmt: skip
    about = {"class": "Flux", "dtype": "float32", "dims": {}, "machine": MACHINE}
    text = ProfileReport(settings, about, figures).as_text()
    assert "left out: decode: no VAE in the bundle" in text
    assert "largest absolute value in each block, and the node that it comes from:\nblock" in text


MACHINE = {
    "chip": "one", "system": "two", "device": "cpu", "blas": "mlx", "versions": {}, "date": "now",
}  # fmt: skip


def test_a_size_that_does_not_exist_exits_1(flux_bundle: Bundles) -> None:
    result = CliRunner().invoke(cli, ["profile", str(flux_bundle("fp32")), "--dim", "depth=2"])
    assert result.exit_code == 1
    assert "no dim depth" in str(result.exception)
