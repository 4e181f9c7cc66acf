"""NaN and infinity end a generation, and the error names where they begin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from mlxconv.cli import cli
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.finite import NotFinite
from mlxconv.runtime.generate.denoise import LoopSettings, denoise
from mlxconv.runtime.generate.families.images import pixels
from mlxconv.runtime.generate.options import Options
from mlxconv.runtime.generate.pipeline import load
from mlxconv.runtime.schedulers import make_schedule, scheduler_of

from ...conftest import Bundles
from ..generate.test_generate import PROMPT

Damaged = Callable[[str, str, float], Path]
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
SMALL = ("--size", "48x32", "--steps", "2", "--tokens", "16", "--compile", "off")


@pytest.fixture
def damaged(pipeline_bundle: Bundles, tmp_path: Path) -> Damaged:
    """`damaged(component, tensor, factor)`: the fp32 bundle with one tensor multiplied."""

    def bundle(component: str, tensor: str, factor: float) -> Path:
        out = tmp_path / "bundle"
        shutil.copytree(pipeline_bundle("fp32"), out)
        (file,) = (f for f in (out / component).glob("*.safetensors") if tensor in load_file(f))
        tensors = load_file(file)
        tensors[tensor] = (tensors[tensor] * np.float32(factor)).astype(tensors[tensor].dtype)
        save_file(tensors, file, metadata={"format": "mlx"})
        return out

    return bundle


def generate(bundle: Path, *options: str) -> Result:
    out = str(bundle.parent / "cat.png")
    return CliRunner().invoke(cli, ["generate", str(bundle), PROMPT, "-o", out, *SMALL, *options])


# ---- the loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_step_that_is_not_finite_is_named(every: int, value: float) -> None:
    schedule = make_schedule(scheduler_of(FLOW), 5)

    def model(step: int, latents: mx.array) -> mx.array:
        return latents * (value if step == 2 else 0.5)

    with pytest.raises(NotFinite, match=r"step 3 of 5 \(timestep 500\.5\): NaN or infinity"):
        denoise(model, mx.ones((1, 4)), schedule, settings=LoopSettings(evaluate_every=every))
    unchecked = LoopSettings(evaluate_every=every, check=False)
    found = denoise(model, mx.ones((1, 4)), schedule, settings=unchecked)
    assert not np.isfinite(np.array(found)).any()


def test_clipping_does_not_hide_an_infinite_output() -> None:
    config = {"_class_name": "DDIMScheduler", "clip_sample": True}
    schedule = make_schedule(scheduler_of(config), 3)
    with pytest.raises(NotFinite, match="step 1 of 3"):
        denoise(lambda _, x: x * float("inf"), mx.ones((1, 4)), schedule)


def test_an_infinite_pixel_is_not_white() -> None:
    found = np.array(pixels(mx.array([[[[float("inf"), 2.0]]] * 3]).reshape(1, 3, 1, 2)))
    assert np.isnan(found[..., 0, :]).all()
    assert (found[..., 1, :] == 1).all()


# ---- pictures ------------------------------------------------------------------------------------

OVERFLOWS = ("transformer", "single_transformer_blocks.1.proj_mlp.weight", 1e5)


def test_float16_that_overflows_is_told_from_what_helps(damaged: Damaged) -> None:
    """And what the message advises works: another precision, or no check."""
    bundle = damaged(*OVERFLOWS)
    picture = bundle.parent / "cat.png"
    result = generate(bundle, "--dtype", "float16")
    assert not picture.exists()
    text = str(result.exception)
    assert result.exit_code == 1
    assert "step 1 of 2 (timestep 1000): NaN or infinity in the latents, which begins at" in text
    assert "single_transformer_blocks.1" in text
    assert "float16 ends at 65,504" in text
    for advised in (["--dtype", "bfloat16"], ["--dtype", "float16", "--no-check"]):
        assert advised[-1] in text
        result = generate(bundle, *advised)
        assert result.exit_code == 0, result.stderr
        assert picture.is_file()
        picture.unlink()


def test_a_damaged_weight_is_named(damaged: Damaged) -> None:
    bundle = damaged("transformer", "transformer_blocks.1.ff.net.2.weight", float("nan"))
    said = r"transformer_blocks\.1\.ff\.net\.2 \(linear\): its weights are not finite " \
           r"\(transformer_blocks\.1\.ff\.net\.2\.weight\)"  # fmt: skip
    with pytest.raises(NotFinite, match=said):
        load(bundle)(PROMPT, width=48, height=32, steps=1, tokens=16)


@pytest.mark.parametrize(
    ("component", "tensor", "says"),
    [
        ("text_encoder_2", "encoder.final_layer_norm.weight",
         "the prompt's embeddings, encoder_hidden_states: NaN .* encoder.final_layer_norm"),
        ("vae", "decoder.conv_out.weight", "the decoded picture: NaN .* decoder.conv_out"),
    ],
)  # fmt: skip
def test_embeddings_and_pictures_are_checked_too(
    damaged: Damaged, component: str, tensor: str, says: str
) -> None:
    with pytest.raises(NotFinite, match=says):
        load(damaged(component, tensor, float("inf")))(
            PROMPT, width=48, height=32, steps=1, tokens=16
        )


def test_embeddings_of_the_caller_s_own_are_checked(pipeline_bundle: Bundles) -> None:
    pipe = load(pipeline_bundle("fp32"))
    config = pipe.parts.config("transformer")
    own = {"encoder_hidden_states": mx.full((1, 4, config["joint_attention_dim"]), float("nan")),
           "pooled_projections": mx.zeros((1, config["pooled_projection_dim"]))}  # fmt: skip
    with pytest.raises(MlxconvError, match=r"embeddings\['encoder_hidden_states'\] has NaN or inf"):
        pipe(embeddings=own, width=48, height=32, steps=1)


# ---- profile -------------------------------------------------------------------------------------


def test_profile_tells_the_largest_values_and_whether_float16_holds_them(damaged: Damaged) -> None:
    bundle = damaged(*OVERFLOWS)
    command = ["profile", str(bundle), "--size", "64x64", "--dim", "text_tokens=8", "--steps", "1"]
    rows = {}
    for dtype in ("float32", "float16"):
        result = CliRunner().invoke(cli, [*command, "--dtype", dtype, "--json"])
        assert result.exit_code == 0, result.stderr
        rows[dtype] = {row["name"]: row for row in json.loads(result.stdout)["inside"]["maxima"]}
    block = rows["float32"]["single_transformer_blocks.1"]
    assert block["max_abs"] > 65504
    assert block["at"] == "single_transformer_blocks.1.proj_mlp.linear"
    assert rows["float32"]["transformer_blocks.0"]["max_abs"] < 65504
    assert rows["float16"]["single_transformer_blocks.1"]["max_abs"] is None


def test_profile_s_table_warns_of_float16() -> None:
    from mlxconv.runtime.bench.profiling import _maxima_lines

    row = {"name": "blocks.0", "max_abs": 7e4, "at": "blocks.0.ff.linear"}
    lines = _maxima_lines([row, {**row, "max_abs": None}, {**row, "max_abs": 1.0}])
    assert lines[-1] == "float16 ends at 65,504: 2 blocks exceed it; use bfloat16 or float32"
    assert "float16" not in "".join(_maxima_lines([{**row, "max_abs": 1.0}]))


# ---- options of the loop -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"compile": "off"}, {"compile": "block"}, {"compile": "all"},
    {"loop": LoopSettings(evaluate_every=0)}, {"loop": LoopSettings(clear_cache_every=1)},
], ids=str)  # fmt: skip
def test_how_the_loop_is_run_does_not_change_the_picture(
    pipeline_bundle: Bundles, options: dict[str, Any]
) -> None:
    own = {key: value for key, value in options.items() if key == "compile"}
    pipe = load(pipeline_bundle("fp32"), keep=True, **own)
    asked = {"width": 48, "height": 32, "steps": 2, "tokens": 16, "seed": 4}
    pipe.warmup(PROMPT, **asked)
    traces = pipe._staged.traces if pipe._staged else 0
    found = pipe(PROMPT, **asked, **{k: v for k, v in options.items() if k == "loop"})
    assert np.abs(found.pixels - load(pipeline_bundle("fp32"))(PROMPT, **asked).pixels).max() < 1e-5
    assert pipe._staged is not None
    assert pipe._staged.traces == traces  # all was compiled before
    encoder = pipe.parts.component("text_encoder").executor
    assert encoder.traces == (options.get("compile") == "all")


def test_a_compiled_decoder_takes_no_strips(pipeline_bundle: Bundles) -> None:
    pipe = load(pipeline_bundle("fp32"), compile="all")
    with pytest.raises(MlxconvError, match="leave --tile out"):
        pipe(PROMPT, tile=8)
    with pytest.raises(MlxconvError, match="compile='both': choose one of off"):
        load(pipeline_bundle("fp32"), compile="both")


@pytest.mark.parametrize(
    "options", [{}, {"negative": "dog"}, {"scheduler": "Euler a"}], ids=["plain", "guided", "noisy"]
)
def test_pictures_of_one_batch_are_those_made_alone(
    pipeline_bundle: Bundles, options: dict[str, Any]
) -> None:
    """Three pictures, two at once and one; each is the one of its seed."""
    pipe = load(pipeline_bundle("fp32"), keep=True, compile="off")
    asked = {"width": 48, "height": 32, "steps": 2, "tokens": 16, "seed": 5, "count": 3, **options}
    alone, together = pipe(PROMPT, **asked), pipe(PROMPT, batch=2, **asked)
    assert np.abs(together.pixels - alone.pixels).max() < 2e-5
    assert np.abs(together.pixels[0] - together.pixels[1]).max() > 1e-2
    assert together.notes == alone.notes


def test_a_batch_needs_pictures_to_fill_it(pipeline_bundle: Bundles) -> None:
    pipe = load(pipeline_bundle("fp32"))
    (note,) = pipe.plan(Options("a cat", width=48, height=32, batch=2)).notes
    assert note.startswith("batch 2: a prompt has fewer pictures")
    with pytest.raises(MlxconvError, match="batch is 0: at least 1"):
        pipe.plan(Options("a cat", batch=0))


def test_a_fault_in_a_batch_is_found(damaged: Damaged) -> None:
    bundle = damaged("transformer", "transformer_blocks.1.ff.net.2.weight", float("nan"))
    with pytest.raises(NotFinite, match=r"transformer_blocks\.1\.ff\.net\.2 \(linear\): its weig"):
        load(bundle, compile="off")(
            PROMPT, width=48, height=32, steps=1, tokens=16, count=2, batch=2, negative="dog"
        )
