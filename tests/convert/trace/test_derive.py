"""Classes without a recipe: one is derived, converted by, verified, and kept in the bundle."""

from __future__ import annotations

import json
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from mlxconv.cli import cli
from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.reading import load_recipe, load_recipe_file
from mlxconv.convert.store import jobs
from mlxconv.convert.trace.derive import derive_recipe, new_recipe
from mlxconv.convert.verify.verify import verify
from mlxconv.runtime.errors import MlxconvError

# Arguments that the shipped recipe has and that a name, a configuration and a run tell.
DERIVED = [
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "SD3Transformer2DModel",
    "SanaTransformer2DModel",
    "AuraFlowTransformer2DModel",
    "ChromaTransformer2DModel",
    "WanTransformer3DModel",
]

OWN = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim, index):
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation = nn.Linear(dim, 2 * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.SiLU(), nn.Linear(3 * dim, dim))

    def forward(self, x, time):
        scale, shift = self.modulation(time).chunk(2, dim=-1)
        return x + self.mlp(self.norm(x) * (1 + scale[:, None]) + shift[:, None])


class Denoiser(nn.Module):
    def __init__(self, dim=64, channels=12, text=96, depth=3):
        super().__init__()
        self.proj_in = nn.Linear(channels, dim)
        self.text_in = nn.Linear(text, dim)
        self.time_in = nn.Linear(1, dim)
        self.layers = nn.ModuleList(Layer(dim, i) for i in range(depth))
        self.proj_out = nn.Linear(dim, channels)

    def forward(self, latents, timestep, prompt_embeds, pooled=None):
        time = self.time_in(timestep[:, None].to(latents.dtype))
        x = torch.cat([self.text_in(prompt_embeds), self.proj_in(latents)], dim=1)
        for layer in self.layers:
            x = layer(x, time)
        return self.proj_out(x[:, prompt_embeds.shape[1]:])
"""


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_recipe_has_inputs_of_the_shipped_one(name: str) -> None:
    shipped = load_recipe(name)
    derived, text = derive_recipe(getattr(diffusers, name), shipped.tiny)
    ours, theirs = derived.programs["forward"].inputs, shipped.programs["forward"].inputs
    assert {"hidden_states", "encoder_hidden_states", "timestep"} <= set(ours) <= set(theirs)
    assert text.startswith("# Derived")


def test_a_class_without_a_recipe_converts_by_a_derived_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(
        load_recipe("SD3Transformer2DModel"), "sd35_medium", tmp_path / "source"
    )
    monkeypatch.setattr(jobs, "recipe_names", tuple)
    report = convert(source, tmp_path / "out", "4bit")
    (name,) = report.components
    assert "derived" in report.components[name].note
    written = tmp_path / "out" / name / "recipe.toml"
    assert "derived" in written.read_text(encoding="utf-8").lower()
    load_recipe_file(written)
    parity = verify(tmp_path / "out", source)
    assert parity.passed
    assert any(row.tier == "forward" for row in parity.tiers)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model that is neither diffusers' nor transformers', its class importable."""
    (tmp_path / "ownmodel.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = __import__("ownmodel")
    torch.manual_seed(0)
    folder = tmp_path / "source"
    folder.mkdir()
    state = module.Denoiser(dim=96, channels=12).state_dict()
    save_file(state, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"dim": 96, "channels": 12}))
    return folder


@pytest.mark.parametrize("q", ["fp32", "4bit"])
def test_a_class_of_ones_own_converts_and_verifies(own: Path, q: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    name = ["--class", "ownmodel:Denoiser"]
    done = CliRunner().invoke(cli, ["convert", str(own), "-o", out, "--q", q, *name, "--json"])
    assert done.exit_code == 0, done.output
    (component,) = json.loads(done.stdout)["components"].values()
    assert component["quantized"] == (0 if q == "fp32" else 9)
    checked = CliRunner().invoke(cli, ["verify", out, "--against", str(own), *name, "--json"])
    assert checked.exit_code == 0, checked.output
    tiers = json.loads(checked.stdout)["tiers"]
    assert {row["tier"] for row in tiers} == {"weights", "forward"}


def test_the_hints_for_a_class_of_ones_own_work_as_printed(own: Path, tmp_path: Path) -> None:
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "_class_name": "Denoiser"}))
    hints = []
    for arguments in (["convert", str(own)], ["recipe", "new", "Denoiser"]):
        refused = CliRunner().invoke(cli, arguments)
        assert refused.exit_code == 1 and "--recipe" not in str(refused.exception)
        hints.append(str(refused.exception).replace("MODULE:", "ownmodel:"))
    command = shlex.split(hints[0].partition("mlxconv ")[2])
    out = ["-o", str(tmp_path / "out")]
    assert CliRunner().invoke(cli, [*command, *out]).exit_code == 0
    named = CliRunner().invoke(cli, ["recipe", "new", hints[1].rpartition(" ")[2]])
    assert named.exit_code == 0 and "Denoiser" in named.stdout


@pytest.mark.parametrize("wrong", ["FluxTransformer2dModel", "AutoencodrKL", "BertModl"])
def test_a_class_that_is_misspelt_is_shown_the_right_one(wrong: str) -> None:
    refused = CliRunner().invoke(cli, ["recipe", "new", wrong])
    (near,) = re.findall(r"did you mean (\w+)", str(refused.exception))
    assert CliRunner().invoke(cli, ["recipe", "new", near]).exit_code == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ownmodel", "expected package.module:Class"),
        ("nowhere.at_all:Model", "cannot import nowhere.at_all"),
        ("json:dumps", "has no such torch module"),
    ],
)
def test_a_class_that_is_not_there_is_named(
    own: Path, given: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(MlxconvError, match=said):
        convert(own, tmp_path / "out", model_class=given)


def test_recipe_new_prints_and_writes(tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["recipe", "new", "BriaTransformer2DModel"])
    assert shown.exit_code == 0
    file = tmp_path / "mine.toml"
    arguments = ["recipe", "new", "BriaTransformer2DModel", "-o", str(file)]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert file.read_text(encoding="utf-8") == shown.stdout
    assert load_recipe_file(file).class_name == "BriaTransformer2DModel"
    with pytest.raises(MlxconvError, match="exists; --force replaces it"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)


@pytest.fixture(scope="module")
def text_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(load_recipe("BertModel"), None, tmp_path_factory.mktemp("text_encoder"))


def test_recipe_new_shows_the_shipped_recipe_first(text_encoder: Path) -> None:
    arguments = ["recipe", "new", "BertModel", "--config", str(text_encoder)]
    shown = CliRunner().invoke(cli, arguments)
    shipped = files("mlxconv").joinpath("recipes", "BertModel.toml").read_text(encoding="utf-8")
    assert shown.stdout == shipped
    (option,) = re.findall(r"--derive\b", shown.stderr)
    derived = CliRunner().invoke(cli, [*arguments, option])
    assert derived.stdout.startswith("# Derived")


def test_a_text_encoder_takes_ids_and_mask_and_its_blocks_are_quantized(
    text_encoder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(new_recipe("BertModel", text_encoder, derive=True), encoding="utf-8")
    inputs = load_recipe_file(own).programs["forward"].inputs
    assert {name: spec.dtype for name, spec in inputs.items()} == {
        "input_ids": "int64", "attention_mask": "int64"
    }  # fmt: skip
    assert inputs["input_ids"].integers == (0, 64)
    report = convert(text_encoder, tmp_path / "out", "4bit", recipe=own)
    (part,) = report.components.values()
    assert part.linear_quantized is not None
    assert part.linear_quantized > 0.9
    assert "linear weights" not in report.as_text()
    assert verify(tmp_path / "out", text_encoder).passed


def test_hardly_quantized_is_said_in_red(text_encoder: Path, tmp_path: Path) -> None:
    keep = ("encoder.layer.0.**", "encoder.layer.1.**")
    report = convert(text_encoder, tmp_path / "out", "4bit", keep=keep, dry_run=True)
    (part,) = report.as_json()["components"].values()
    assert 0.2 < part["linear_quantized"] < 0.5
    said = f"only {100 * part['linear_quantized']:.0f} % of the linear weights are quantized"
    assert f"\x1b[31m{said}" in report.as_text()


def test_what_cannot_be_derived_says_how_far_it_came() -> None:
    shipped = load_recipe("QwenImageTransformer2DModel")
    with pytest.raises(MlxconvError, match=r"as far as line \d+ with .* and without .*img_shapes"):
        derive_recipe(diffusers.QwenImageTransformer2DModel, shipped.tiny)
