"""Pictures from a bundle, without PyTorch; `test_families` compares them with diffusers'."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mlxconv.cli import cli
from mlxconv.runtime import cache_folders as machine
from mlxconv.runtime.cache_folders import keep_kernels_private
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate import command as generation
from mlxconv.runtime.generate.command import COMPILING, PHASES
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.generate.pipeline import Pipeline, load
from mlxconv.runtime.ops.registry import on_cpu

from ...conftest import Bundles
from ..test_runtime_alone import WITHOUT_TORCH

PROMPT, NEGATIVE = "a photo of a cat on a red sofa", "an oil painting in a storm"
SIZE = {"width": 48, "height": 32}
TOKENS = 16


@pytest.fixture(scope="module")
def pipe(pipeline_bundle: Bundles) -> Pipeline:
    return load(pipeline_bundle("fp32"), keep=True)


def psnr(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Decibels, of values in 0 to 1."""
    return float(-10 * np.log10(np.mean((a.astype(np.float64) - b) ** 2)))


@pytest.mark.slow
def test_in_bf16_a_picture_loses_what_it_loses_in_torch(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    """Both against torch in fp32, from the same bf16 noise."""
    import torch
    from diffusers import FluxPipeline

    def in_torch(dtype: torch.dtype) -> np.ndarray[Any, Any]:
        pipe = FluxPipeline.from_pretrained(pipeline_checkpoint, torch_dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn((1, 16, 4, 6), generator=generator, dtype=torch.bfloat16)
        latents = pipe._pack_latents(noise, 1, 16, 4, 6).to(dtype)
        options = {"num_inference_steps": 4, "guidance_scale": 4.0, "output_type": "np"}
        found = pipe(PROMPT, **SIZE, latents=latents, max_sequence_length=TOKENS, **options)
        return np.asarray(found.images)

    pipe = load(pipeline_bundle("bf16"))
    ours = pipe(PROMPT, **SIZE, steps=4, seed=1, tokens=TOKENS, guidance=4.0).pixels
    exact = in_torch(torch.float32)
    assert psnr(ours, exact) >= psnr(in_torch(torch.bfloat16), exact) - 1


def test_several_pictures_need_the_memory_of_one(pipe: Pipeline) -> None:
    asked: dict[str, Any] = {**SIZE, "steps": 2, "tokens": TOKENS}
    # The first call reads the weights that the others hold.
    _, one, eight = (pipe(PROMPT, **asked, count=n).peak_bytes for n in (1, 1, 8))
    for phase in ("steps", "decode"):
        assert 0 < eight[phase] < 1.1 * one[phase]  # the latents of seven more


@pytest.mark.parametrize("q", ["bf16", "4bit"])
def test_other_precisions_make_pictures(pipeline_bundle: Bundles, q: str) -> None:
    made = load(pipeline_bundle(q))(PROMPT, **SIZE, steps=2, tokens=TOKENS)
    assert np.isfinite(made.pixels).all()
    assert made.pixels.std() > 0.01
    assert set(made.seconds) == {
        "encode", "prepare", "first_step", "steps", "step_median", "decode", "total"
    }  # fmt: skip
    parts = ("encode", "prepare", "first_step", "steps", "decode")
    assert sum(made.seconds[part] for part in parts) <= made.seconds["total"]
    assert set(made.peak_bytes) == set(parts)
    assert made.weight_bytes["loop"] < 0.73 * made.weight_bytes["prepare"]


def test_another_scheduler_is_taken_by_name(pipe: Pipeline) -> None:
    one = pipe(PROMPT, **SIZE, steps=4, tokens=TOKENS, seed=1)
    other = pipe(PROMPT, **SIZE, steps=4, tokens=TOKENS, seed=1, scheduler="unipc")
    assert not np.array_equal(one.pixels, other.pixels)
    with pytest.raises(MlxconvError, match="does not fit a flow model; those that fit: Euler"):
        pipe(PROMPT, **SIZE, steps=4, tokens=TOKENS, scheduler="ddim")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps is 0: at least 1"),
        ({"count": 0}, "count is 0: at least 1"),
        ({"seed": -1}, "seed is -1: 0 or more"),
        ({"width": 50}, r"divisible by 16; 48x32 is the nearest"),
    ],
)
def test_what_cannot_be_made_is_refused(pipe: Pipeline, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(MlxconvError, match=says):
        pipe(PROMPT, **{**SIZE, "tokens": TOKENS, **wrong})


@pytest.mark.parametrize(
    ("pipeline", "vae", "transformer", "size"),
    [
        ("FluxPipeline", {"sample_size": 64}, {"guidance_embeds": False}, 64),  # the demo's
        ("FluxPipeline", {"sample_size": 1024}, {"guidance_embeds": True}, 1024),
        ("FluxPipeline", {"sample_size": 32}, {"guidance_embeds": True}, 1024),  # the class's
        ("ChromaPipeline", {"sample_size": 500}, {}, 496),
        ("Flux2Pipeline", {"sample_size": 4096}, {}, 1024),
        ("ZImagePipeline", {}, {}, 1024),
        ("SanaPipeline", {}, {"sample_size": 16}, 512),
    ],
)
def test_the_default_size_is_the_checkpoint_s_own(
    pipeline: str, vae: dict[str, int], transformer: dict[str, Any], size: int
) -> None:
    configs = {"vae": {"block_out_channels": [8] * 4, **vae}, "transformer": transformer}
    parts: Any = SimpleNamespace(config=configs.get, index={})
    own = FAMILIES[pipeline].defaults(parts)
    assert (own.width, own.height) == (size, size)


def test_a_single_component_has_no_family(flux_bundle: Bundles) -> None:
    with pytest.raises(MlxconvError, match="a single component yet, only for FluxPipeline"):
        load(flux_bundle("fp32"))


ALONE = f"""{WITHOUT_TORCH}
import mlxconv
made = mlxconv.load(sys.argv[1])({PROMPT!r}, width=48, height=32, steps=2, tokens={TOKENS}, seed=2)
made.images[0].save(sys.argv[2])
"""


def test_pictures_need_no_torch(pipeline_bundle: Bundles, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    command = [sys.executable, "-c", ALONE, str(pipeline_bundle("4bit")), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = load(pipeline_bundle("4bit"))(PROMPT, **SIZE, steps=2, tokens=TOKENS, seed=2)
    assert np.array_equal(np.asarray(Image.open(out)), np.asarray(here.images[0]))


def test_the_command_writes_pictures_and_says_what_it_took(
    pipeline_bundle: Bundles, tmp_path: Path
) -> None:
    out = tmp_path / "cat.png"
    command = ["generate", str(pipeline_bundle("4bit")), PROMPT, "-o", str(out), "--json"]
    options = ["--size", "48x32", "--steps", "2", "--count", "2", "--tokens", "16"]
    done = CliRunner().invoke(cli, [*command, *options])
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["tf32"] is False  # as conftest sets it
    assert data["images"] == [str(tmp_path / f"cat-{seed}.png") for seed in data["seeds"]]
    assert [Image.open(file).size for file in data["images"]] == [(48, 32)] * 2
    assert set(data["seconds"]) == {
        "load", "encode", "prepare", "first_step", "steps", "step_median", "decode", "total",
    }  # fmt: skip
    assert data["peak_bytes"]["mlx"] == max(
        data["peak_bytes"][phase] for phase in PHASES if phase in data["peak_bytes"]
    )
    assert json.loads(Image.open(data["images"][0]).text["mlxconv"])["prompt"] == PROMPT
    assert len(list(tmp_path.iterdir())) == 2


def test_a_table_tells_each_phase(pipeline_bundle: Bundles, tmp_path: Path) -> None:
    out = tmp_path / "cat.png"
    command = ["generate", str(pipeline_bundle("4bit")), PROMPT, "-o", str(out), "-v"]
    done = CliRunner().invoke(cli, [*command, "--size", "48x32", "--steps", "3", "--tokens", "16"])
    assert done.stdout == f"{out}\n"
    lines = [line for line in done.stderr.splitlines() if line != COMPILING]
    assert "FluxPipeline, 4bit weights in float32, 48x32, 3 steps, seed " in lines[0]
    progress = [line.split(",")[0] for line in lines[1:5]]
    assert progress[::2] == ["encode: 1/1", "steps: 3/3"]
    head = next(number for number, line in enumerate(lines) if line.startswith("phase"))
    table = {line[:12].strip(): line[12:].split() for line in lines[head + 1 : -2]}
    names = [phase.replace("_", " ") for phase in PHASES if phase not in ("warmup", "preview")]
    assert [name for name in table if name in names] == names
    shares = [float(row[1].rstrip("%")) for name, row in table.items() if name != "total"]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_compiling_is_said_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that is written and not compiled, twice in a row, but not one that was there."""
    for seen, said in (
        (["", "", "k", "k"], True),
        (["", "k", "", "k", ""], False),
        (["k", "k", "k", "k"], False),
    ):
        ended, answers = threading.Event(), list(seen)

        def unfinished(ended: threading.Event = ended, answers: list[str] = answers) -> set[str]:
            if not answers[1:]:
                ended.set()
            return set(answers.pop(0))

        monkeypatch.setattr(generation, "unfinished_kernels", unfinished)
        generation._watch_kernels(ended, 0.001)
        assert (COMPILING in capsys.readouterr().err) == said


@pytest.mark.skipif(not on_cpu(), reason="kernels of the CPU")
def test_kernels_that_are_not_compiled_yet_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mlx" / "1.0" / "cpu"
    folder.mkdir(parents=True)
    for name in ("A.cpp", "B.cpp", "libA.so"):
        (folder / name).touch()
    monkeypatch.setattr(machine, "keep_kernels_private", lambda: tmp_path)
    assert machine.unfinished_kernels() == {"B"}
    real = keep_kernels_private() or machine._temporary_folder()
    mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + 1)(mx.ones(8)))
    names = {file.name for file in real.glob("mlx/*/cpu/*")}
    assert any(f"lib{name.removesuffix('.cpp')}.so" in names for name in names)  # MLX's own names


def test_a_prompt_that_is_cut_is_told(pipe: Pipeline) -> None:
    made = pipe("a cat on a sofa " * 40, **SIZE, steps=1, tokens=TOKENS)
    assert [note.partition(":")[0] for note in made.notes] == ["tokenizer", "tokenizer_2"]
    assert pipe("", **SIZE, steps=1, tokens=TOKENS).notes == []
    assert pipe("猫 на диване", **SIZE, steps=1, tokens=TOKENS).pixels.std() > 0


def test_latents_are_torch_s_own(pipe: Pipeline) -> None:
    import torch

    from mlxconv.runtime.generate.noise import Generator

    ours = Generator(3).normal((1, 16, 4, 6))
    theirs = torch.randn((1, 16, 4, 6), generator=torch.Generator().manual_seed(3))
    assert mx.array_equal(ours, mx.array(theirs.numpy()))
