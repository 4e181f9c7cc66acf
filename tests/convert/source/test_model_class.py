"""Classes named by their module, and configurations that a class does not know."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from mlxconv.cli import cli
from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.reading import all_recipes, load_recipe
from mlxconv.convert.recipe.recipe import Recipe
from mlxconv.convert.source.model_class import find_class
from mlxconv.convert.trace.class_config import constructor_config, unknown_keys
from mlxconv.runtime.errors import MlxconvError

from ...bundles import change_json

OWN = """
import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, dim=64, channels=12):
        super().__init__()
        self.proj_in = nn.Linear(channels, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.proj_out = nn.Linear(dim, channels)

    def forward(self, hidden_states, timestep):
        x = self.proj_in(hidden_states) + timestep[:, None, None].to(hidden_states.dtype)
        for layer in self.layers:
            x = x + layer(x)
        return self.proj_out(x)
"""


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: a package with a class, importable from here alone, and its weights."""
    package, weights = tmp_path / "t1package", tmp_path / "weights"
    package.mkdir()
    weights.mkdir()
    (package / "model.py").write_text(OWN, encoding="utf-8")
    space: dict[str, Any] = {}
    exec(compile(OWN, "model.py", "exec"), space)
    state = {k: torch.randn_like(v) / 8 for k, v in space["Denoiser"]().state_dict().items()}
    save_file(state, str(weights / "model.safetensors"), {"format": "pt"})
    (weights / "config.json").write_text(json.dumps({"dim": 64, "channels": 12}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "t1package"]:
        del sys.modules[name]


def test_the_hint_of_recipe_new_works_as_printed(here: Path) -> None:
    """The class comes from the recipe, and `verify` knows it from the bundle."""
    made = run("recipe", "new", "t1package.model:Denoiser", "-o", "my recipe.toml")
    hint = re.search(r"try it with: mlxconv (.*)", made.stderr)
    assert hint is not None
    replaced = {"SOURCE": "weights", "OUT": "out"}
    words = [replaced.get(word, word) for word in shlex.split(hint[1])]
    assert "PASSED" in run(*words).stdout
    again = run("verify", "out", "--against", "weights", "--json")
    assert {row["tier"] for row in json.loads(again.stdout)["tiers"]} == {"weights", "forward"}


def test_code_beside_the_weights_runs_only_when_it_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ["--class", "t1package.model:Denoiser"]
    run("convert", "weights", "-o", "out", "--q", "fp32", *named)
    (here / "t1package").rename(here / "out" / "t1package")
    monkeypatch.chdir(here / "out")
    for name in [n for n in sys.modules if n.partition(".")[0] == "t1package"]:
        del sys.modules[name]
    refused = CliRunner().invoke(cli, ["verify", ".", "--against", "../weights"])
    assert isinstance(refused.exception, MlxconvError)
    assert "t1package.model" not in sys.modules
    (hint,) = re.findall(r"--class \S+", str(refused.exception))
    run("verify", ".", "--against", "../weights", *hint.split())


def test_a_recipe_of_another_class_is_refused(here: Path) -> None:
    made = Path("mine.toml")
    run("recipe", "new", "FluxTransformer2DModel", "-o", str(made))
    with pytest.raises(MlxconvError, match="is for FluxTransformer2DModel, weights has Denoiser"):
        convert("weights", "out", recipe=made, model_class="t1package.model:Denoiser")


# ---- configurations -----------------------------------------------------------------------------


def test_a_key_of_a_newer_diffusers_is_refused() -> None:
    config = {"rope_scale": 2.0, "in_channels": 16, "_diffusers_version": "99.1.0"}
    said = r"diffusers 99\.1\.0, .* does not know rope_scale = 2\.0; upgrade"
    with pytest.raises(MlxconvError, match=said):
        constructor_config(diffusers.FluxTransformer2DModel, config, Path("here"))
    kept = constructor_config(
        diffusers.FluxTransformer2DModel, {**config, "rope_scale": None}, Path("here")
    )
    assert kept["in_channels"] == 16


CLIP = {"hidden_size": 64, "rope_scale": 2.0, "dropout": 0.1, "output_past": True, "top_k": 50}


def test_a_key_that_a_transformers_class_does_not_have_is_named() -> None:
    """Not what its source reads beside its fields (dropout), nor settings of generation (top_k)."""
    found = unknown_keys(transformers.CLIPTextModel, CLIP)
    assert found == {"rope_scale": 2.0, "output_past": True}
    parts = {"text_config": {"rope_scale": 2.0}, "vision_config": {"in_chans": 3}, "rope_theta": 1}
    assert unknown_keys(transformers.Qwen2_5_VLForConditionalGeneration, parts) == {
        "text_config.rope_scale": 2.0, "vision_config.in_chans": 3,
    }  # fmt: skip


@pytest.mark.parametrize("recipe", [r for r in all_recipes().values() if r.library != "diffusers"],
                         ids=lambda recipe: recipe.class_name)  # fmt: skip
def test_what_a_transformers_class_reads_is_known(recipe: Recipe) -> None:
    cls = find_class(recipe.library, recipe.class_name, Path("here"))
    for variant in (None, *recipe.tiny_variants):
        assert unknown_keys(cls, recipe.tiny_config(variant)) == {}


@pytest.mark.parametrize("version", ["99.1.0", "4.0.0"])
def test_a_key_of_a_newer_transformers_is_refused_and_of_an_older_named(
    version: str, tmp_path: Path
) -> None:
    source = tiny_checkpoint(load_recipe("CLIPTextModel"), None, tmp_path / "clip")
    added = {"rope_scale": 2.0, "transformers_version": version}
    change_json(source / "config.json", lambda data: {**data, **added})
    if version == "4.0.0":
        report = convert(source, tmp_path / "out", dry_run=True)
        assert [text.split(";")[0] for text in report.warnings] == [
            "clip: CLIPTextModel does not take rope_scale of its config.json"
        ]
        return
    with pytest.raises(MlxconvError, match=r"transformers 99.1.0, .* know rope_scale = 2.0; upgr"):
        convert(source, tmp_path / "out", dry_run=True)


@pytest.mark.parametrize("version", ["0.1.0", None, "no version"])
def test_a_key_that_nobody_knows_is_named(version: str | None, tmp_path: Path) -> None:
    source = tiny_checkpoint(load_recipe("AutoencoderTiny"), None, tmp_path / "source")
    added = {"rope_scale": 2.0} | ({} if version is None else {"_diffusers_version": version})
    change_json(source / "config.json", lambda data: {**data, **added})
    report = convert(source, tmp_path / "out", weights_only=True, dry_run=True)
    said = "vae: AutoencoderTiny does not take rope_scale of its config.json"  # and no other key
    assert [text.startswith(said) for text in report.warnings] == [True]
    assert report.notes().startswith(f"warning: {said}")
