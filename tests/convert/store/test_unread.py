"""Tensors of a checkpoint that nothing reads: refused, unless there is a reason for them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mlxconv.cli import cli
from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.inspection import inspect
from mlxconv.convert.recipe.reading import load_recipe, parse_recipe
from mlxconv.convert.store.unread import with_unused
from mlxconv.convert.verify.verify import verify
from mlxconv.runtime.errors import MlxconvError

DEEPER = {f"decoder.layers.{n}.conv.0.weight": (16, 16, 3, 3) for n in range(60, 84)}


def add(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    (file,) = folder.glob("*.safetensors")
    more = {name: torch.ones(shape) for name, shape in shapes.items()}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    """A tiny autoencoder's configuration, and the weights of a deeper one."""
    return add(tiny_checkpoint(load_recipe("AutoencoderTiny"), None, tmp_path / "source"), DEEPER)


@pytest.fixture
def text_encoder(tmp_path: Path) -> Path:
    return tiny_checkpoint(load_recipe("BertModel"), None, tmp_path / "source")


def test_the_weights_of_another_model_are_refused(other_weights: Path, tmp_path: Path) -> None:
    said = r"24 tensors .* read by nothing: decoder\.layers\.60\.conv.* and 21 more.*another model"
    with pytest.raises(MlxconvError, match=said):
        convert(other_weights, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_allowed_is_listed_by_every_command(other_weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        cli, ["convert", str(other_weights), "-o", str(out), "--allow-unused", "--json"]
    )
    assert done.exit_code == 0, done.output
    (name,) = json.loads(done.stdout)["components"]
    reported = verify(out, other_weights)
    assert reported.passed
    for data in (reported.as_json(), inspect(out).as_json()["components"][name]):
        unused: Any = data["unused"]
        assert sorted(unused[name] if isinstance(unused, dict) else unused) == sorted(DEEPER)
    for text in (reported.as_text(), inspect(out).as_text()):
        assert "24 tensors of the checkpoint are read by nothing: decoder.layers.60" in text


def test_a_recipe_may_expect_them(other_weights: Path, tmp_path: Path) -> None:
    shipped = files("mlxconv").joinpath("recipes", "AutoencoderTiny.toml")
    own = tmp_path / "own.toml"
    text = shipped.read_text(encoding="utf-8")
    own.write_text(text.replace("\n[dims]", 'unused = ["decoder.layers.*.conv.0.*"]\n\n[dims]', 1))
    report = convert(other_weights, tmp_path / "out", recipe=own)
    assert sorted(report.components["vae"].unused) == sorted(DEEPER)


def test_parts_of_a_larger_model_and_computed_buffers_are_expected(
    text_encoder: Path, tmp_path: Path
) -> None:
    """As `bert-base-uncased` has them: the heads, and positions that the class makes itself."""
    expected = {
        "cls.predictions.bias": (64,),
        "cls.seq_relationship.weight": (2, 64),
        "embeddings.position_ids": (1, 24),
    }
    report = convert(add(text_encoder, expected), tmp_path / "out", "fp32", dry_run=True)
    (part,) = report.components.values()
    assert sorted(part.unused) == sorted(expected)


def test_deeper_weights_of_a_text_encoder_are_refused(text_encoder: Path, tmp_path: Path) -> None:
    add(text_encoder, {"encoder.layer.7.output.dense.weight": (64, 128)})
    with pytest.raises(MlxconvError, match=r"1 tensor .* nothing: encoder\.layer\.7\.output"):
        convert(text_encoder, tmp_path / "out", "fp32", dry_run=True)


def test_a_derived_recipe_lists_what_its_trace_drops() -> None:
    text = 'class = "M"\n\n[dims]\n\n[programs.forward.inputs]\n'
    names = ["blocks.1.out.weight", "blocks.0.out.weight", "head.weight"]
    assert parse_recipe(with_unused(text, names), "t").unused == (
        "blocks.*.out.weight",
        "head.weight",
    )
    assert with_unused(text, []) == text
