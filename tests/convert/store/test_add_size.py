"""Sizes added to a bundle afterwards: run and verified, its weights untouched."""

from __future__ import annotations

import re
import shlex
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import AutoencoderKLHunyuanVideo

from mlxconv.cli import cli
from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.lower.compile import Compiled
from mlxconv.convert.recipe.examples import example_inputs
from mlxconv.convert.recipe.reading import load_recipe, load_recipe_file
from mlxconv.convert.source.arrays import torch_to_mlx
from mlxconv.convert.store import on_demand
from mlxconv.convert.store.add_size import add_sizes, replace_program
from mlxconv.convert.store.on_demand import trace_when_called
from mlxconv.convert.verify.verify import verify
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import write_json
from mlxconv.runtime.program.program import PROGRAM_FILE, Program
from mlxconv.runtime.program.stored import load_program

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        load_recipe("ZImageTransformer2DModel"), None, tmp_path_factory.mktemp("z") / "source"
    )


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "out"
    convert(checkpoint, out, "fp32")
    return out


def test_a_batch_is_added_without_the_weights(
    bundle: Path, checkpoint: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    files = {f: f.stat().st_mtime_ns for f in copy.rglob("model*")}
    done = CliRunner().invoke(cli, ["add-size", str(copy), "--dim", "batch=5", "--json"])
    assert done.exit_code == 0, done.output
    assert {f: f.stat().st_mtime_ns for f in copy.rglob("model*")} == files
    report = verify(copy, checkpoint)
    assert report.passed
    assert len([row for row in report.tiers if row.tier == "forward"]) == 3


def inputs(batch: int) -> dict[str, Any]:
    recipe = load_recipe("ZImageTransformer2DModel")
    return torch_to_mlx(example_inputs(recipe, "forward", recipe.tiny_config(), {"batch": batch}))


def refusal(bundle: Path, batch: int) -> str:
    with pytest.raises(MlxconvError, match="Sizes in this bundle") as refused:
        load_component(bundle, "transformer")(**inputs(batch))
    return str(refused.value)


def test_the_command_that_a_refusal_names_works(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "a copy"))
    command = refusal(copy, 5).split("`")[1]
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert len(load_component(copy, "transformer")(**inputs(5))) == 5


def test_a_size_is_traced_when_it_is_called(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    said: list[str] = []
    running = load_component(copy, "transformer")
    before = running(**inputs(2))
    trace_when_called(running, keep=True, say=said.append)
    assert len(running(**inputs(5))) == 5
    assert "ZImageTransformer2DModel.forward for batch=5" in said[0]
    assert "added to the bundle" in said[1]
    assert all(mx.array_equal(a, b) for a, b in zip(before, running(**inputs(2)), strict=True))
    again = load_component(copy, "transformer")(**inputs(5))
    assert all(mx.array_equal(a, b) for a, b in zip(running(**inputs(5)), again, strict=True))


def test_a_bundle_that_cannot_be_changed_says_so_and_runs(bundle: Path, monkeypatch: Any) -> None:
    def refused(*_: Any) -> None:
        raise MlxconvError("the bundle cannot be changed (Read-only file system)")

    monkeypatch.setattr(on_demand, "add_programs", refused)
    said: list[str] = []
    running = load_component(bundle, "transformer")
    trace_when_called(running, keep=True, say=said.append)
    assert len(running(**inputs(5))) == 5
    assert "Read-only file system" in said[1]
    assert "batch=5" in refusal(bundle, 5)


def test_verify_traces_the_size_asked_for_and_leaves_the_bundle(
    bundle: Path, checkpoint: Path
) -> None:
    report = verify(bundle, checkpoint, dims={"batch": 5})
    assert [r.name for r in report.tiers if r.tier == "forward"] == ["forward[batch=5]"]
    assert report.passed
    assert "batch=5" in refusal(bundle, 5)


def test_two_additions_at_once_lose_nothing(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "copy")) / "transformer"
    second_read = threading.Event()

    def add(number: int, before: Callable[[], object]) -> None:
        def make(old: Program) -> Compiled:
            before()
            entry = replace(old.entries[0], sizes={"batch": number})
            return Compiled(replace(old, entries=[*old.entries, entry]), {}, {})

        replace_program(folder, make)

    threads = [
        threading.Thread(target=add, args=(7, lambda: second_read.wait(timeout=0.2))),
        threading.Thread(target=add, args=(8, second_read.set)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batches = [entry.sizes["batch"] for entry in load_program(folder / PROGRAM_FILE).entries]
    assert {7, 8} <= set(batches)


def test_a_class_that_takes_every_size_says_so(flux_bundle, tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match="takes every size already"):
        add_sizes(flux_bundle("fp32"), "transformer", [(64, 64)])


def test_what_is_not_fixed_is_named(bundle: Path) -> None:
    with pytest.raises(MlxconvError, match=r"height is not fixed; the fixed dims are batch"):
        add_sizes(bundle, "transformer", dims={"height": 8})
    with pytest.raises(MlxconvError, match=r"height and width are already free.*a size of batch$"):
        add_sizes(bundle, "transformer", [(64, 64)])


def test_pixels_are_those_of_the_bundles_own_vae(tmp_path: Path) -> None:
    """DiT fixes its size; a VAE of two levels makes a latent of 2 pixels, a patch is 2 latents."""
    out = tmp_path / "out"
    convert(
        tiny_checkpoint(load_recipe("DiTTransformer2DModel"), None, tmp_path / "source"),
        out / "made",
        "fp32",
    )
    bundle = out / "made"
    (bundle / "vae").mkdir()
    write_json(bundle / "vae" / "config.json", {"block_out_channels": [8, 8]})
    for size, said in (("63x63", "divisible by 2; 64x64 is the nearest"), ("64x32", "square")):
        refused = CliRunner().invoke(cli, ["add-size", str(bundle), "--size", size])
        assert refused.exit_code == 1 and said in str(refused.exception)
    done = CliRunner().invoke(cli, ["add-size", str(bundle), "--size", "64x64"])
    assert done.exit_code == 0 and done.stdout.endswith("size=32\n")
    assert done.stdout.startswith("transformer has the sizes: size=")


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """HunyuanVideo's VAE, traced as if it took any number of frames, and its bundle."""
    folder = tmp_path_factory.mktemp("video")
    text = files("mlxconv").joinpath("recipes", "AutoencoderKLHunyuanVideo.toml").read_text()
    free = re.sub("latent_frames = .*", "latent_frames = { trace = 3, check = [2] }", text)
    (folder / "free.toml").write_text(free)
    recipe = load_recipe_file(folder / "free.toml")
    assert not any(dim.fixed for dim in recipe.dims.values())
    source = tiny_checkpoint(recipe, None, folder / "source")
    convert(source, folder / "bundle", "fp32", recipe=folder / "free.toml")
    return source, folder / "bundle"


def latents(frames: int) -> torch.Tensor:
    return torch.randn(1, 4, frames, 4, 4, generator=torch.Generator().manual_seed(frames))


def decoded(source: Path, frames: int) -> Any:
    with torch.no_grad():
        vae = AutoencoderKLHunyuanVideo.from_pretrained(source)
        return vae.decode(latents(frames), return_dict=False)[0].numpy()


def test_another_way_of_the_class_is_traced_when_it_is_called(
    video: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(video[1], tmp_path / "copy"))
    running = load_component(copy)
    trace_when_called(running, keep=True, say=lambda text: None)
    for frames in (3, 5):  # above 4, in overlapping pieces
        found = running.executor("decode", z=mx.array(latents(frames).numpy()))
        np.testing.assert_allclose(np.array(found), decoded(video[0], frames), atol=1e-4)
    assert verify(copy, video[0]).passed


def test_the_command_that_adds_another_way_works(video: tuple[Path, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(video[1], tmp_path / "a copy"))
    with pytest.raises(
        MlxconvError, match=r"traced for z\.shape\[2\] <= 4; given .* = 5"
    ) as refused:
        load_component(copy).executor("decode", z=mx.array(latents(5).numpy()))
    command = str(refused.value).split("`")[1]
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    found = load_component(copy).executor("decode", z=mx.array(latents(5).numpy()))
    np.testing.assert_allclose(np.array(found), decoded(video[0], 5), atol=1e-4)
    with pytest.raises(MlxconvError, match="not fixed; the fixed dims are latent_frames"):
        add_sizes(copy, "vae", dims={"latent_height": 4})
