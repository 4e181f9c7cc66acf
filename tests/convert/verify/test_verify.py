"""Verifying: the metrics, bundles that are right, and bundles that are wrong in one place."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from mlxconv.cli import cli
from mlxconv.convert.conversion import convert
from mlxconv.convert.verify import coverage
from mlxconv.convert.verify.metrics import Sums, compare, make_row
from mlxconv.convert.verify.verify import ParityReport, verify
from mlxconv.runtime.bundle import open_bundle
from mlxconv.runtime.errors import MlxconvError

from ...bundles import Arrays, change_nodes, change_tensors, copy

Bundles = Callable[[str], Path]


# ---- metrics ------------------------------------------------------------------------------------


def test_the_metrics_are_what_their_definitions_say() -> None:
    sums = compare(
        [mx.array([3.0, 4.0]), mx.array([[0.0]])], [np.array([3.0, 0.0]), np.ones((1, 1))]
    )
    row = make_row("forward", "transformer", "forward", sums, 2.0, "torch")
    assert row.max_abs == 4.0
    assert row.max_rel == pytest.approx(4 / 3)
    assert row.rel_l2 == pytest.approx(math.sqrt(17 / 10))
    assert row.cosine == pytest.approx(9 / (5 * math.sqrt(10)))
    assert row.sqnr_db == pytest.approx(-20 * math.log10(row.rel_l2))
    assert row.passed


def test_equal_values_have_no_error_and_a_finite_number_of_decibels() -> None:
    row = make_row("forward", "t", "f", compare([np.ones(3)], [np.ones(3)]), 0.0, "torch")
    assert (row.rel_l2, row.max_abs, row.cosine, row.sqnr_db) == (0.0, 0.0, pytest.approx(1), 400.0)
    assert row.passed


def test_a_reference_of_zeros_does_not_divide() -> None:
    sums = compare([np.array([0.0, 0.5])], [np.zeros(2)])
    assert (sums.rel_l2, sums.max_rel) == (0.5, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_never_pass(bad: float) -> None:
    sums = compare([np.array([bad, 1.0])], [np.array([1.0, 1.0])])
    row = make_row("forward", "t", "f", sums, 1e9, "torch", passed=True)
    assert not row.passed
    assert row.rel_l2 == math.inf
    report = ParityReport("b", "s", 0, [row]).as_json()
    assert json.loads(json.dumps(report, allow_nan=False))["tiers"][0]["rel_l2"] is None


def test_outputs_of_other_shapes_are_an_error() -> None:
    with pytest.raises(MlxconvError, match=r"shapes \[\(2,\)\], diffusers gives \[\(3,\)\]"):
        compare([np.zeros(2)], [np.zeros(3)])


def test_sums_over_pieces_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 10))
    whole, pieces = Sums(), Sums()
    whole.add(a, b)
    pieces.add(a[:3], b[:3])
    pieces.add(a[3:], b[3:])
    assert pieces.rel_l2 == pytest.approx(whole.rel_l2)
    assert pieces.max_abs == whole.max_abs


def test_a_report_without_rows_did_not_pass() -> None:
    assert not ParityReport("bundle", "source", 0).passed


# ---- bundles that are right ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("q", ["fp32", "bf16", "8bit", "4bit"])
def test_an_untouched_bundle_passes_at_every_block(
    flux_bundle: Bundles, flux_checkpoint: Path, q: str
) -> None:
    report = verify(flux_bundle(q), flux_checkpoint, tier="block")
    assert report.passed, report.as_text()
    blocks = [row.name.split()[0] for row in report.tiers if row.tier == "block"]
    assert blocks == [
        "transformer_blocks.0", "transformer_blocks.1",
        "single_transformer_blocks.0", "single_transformer_blocks.1",
    ]  # fmt: skip
    assert report.begins_at == {}


@pytest.mark.parametrize("q", ["fp32", "bf16", "4bit"])
def test_streaming_gives_the_same_verdict_and_figures(
    flux_bundle: Bundles, flux_checkpoint: Path, q: str
) -> None:
    whole = verify(flux_bundle(q), flux_checkpoint)
    streamed = verify(flux_bundle(q), flux_checkpoint, stream=True)
    assert streamed.passed
    for one, other in zip(whole.tiers, streamed.tiers, strict=True):
        assert one.name == other.name
        assert other.rel_l2 == pytest.approx(one.rel_l2, rel=1e-2, abs=1e-6)


def test_a_block_that_torch_computes_in_float32_may_be_rounded_once(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    """T5's `wo` stays float32, so that its blocks are nearer to float32 than bf16 can hold."""
    parts = {"components": ["text_encoder_2"], "tier": "block"}
    report = verify(pipeline_bundle("bf16"), pipeline_checkpoint, **parts)
    blocks = [row for row in report.tiers if row.tier == "block"]
    assert report.passed, report.as_text()
    assert min(row.threshold or 0.0 for row in blocks) == 2**-8


def test_streaming_several_entries_of_a_pipeline(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    report = verify(pipeline_bundle("4bit"), pipeline_checkpoint, stream=True)
    assert report.passed, report.as_text()
    assert {row.component for row in report.tiers if row.tier != "tokens"} == {
        "text_encoder", "text_encoder_2", "transformer", "vae",
    }  # fmt: skip


def test_the_seed_changes_the_inputs_and_is_reported(
    flux_bundle: Bundles, flux_checkpoint: Path
) -> None:
    first, again, other = (
        verify(flux_bundle("fp32"), flux_checkpoint, seed=seed).tiers[-1] for seed in (0, 0, 1)
    )
    assert first == again
    assert first.max_abs != other.max_abs
    assert verify(flux_bundle("fp32"), flux_checkpoint, seed=7).seed == 7


def test_the_threshold_decides(flux_bundle: Bundles, flux_checkpoint: Path) -> None:
    report = verify(flux_bundle("bf16"), flux_checkpoint, threshold=1e-9)
    assert not report.passed
    assert report.tiers[-1].threshold == 1e-9
    assert verify(flux_bundle("bf16"), flux_checkpoint, threshold=0.5).passed


def test_a_bundle_can_be_run_in_another_precision(
    flux_bundle: Bundles, flux_checkpoint: Path
) -> None:
    in_half = verify(flux_bundle("fp32"), flux_checkpoint, dtype="bfloat16").tiers[-1]
    assert in_half.passed
    assert 1e-3 < in_half.rel_l2 < 5e-2


def test_sizes_can_be_asked_for_by_name(flux_bundle: Bundles, flux_checkpoint: Path) -> None:
    assert verify(flux_bundle("fp32"), flux_checkpoint, dims={"image_tokens": 9}).passed
    with pytest.raises(MlxconvError, match="no dim height, only batch, image_tokens"):
        verify(flux_bundle("fp32"), flux_checkpoint, dims={"height": 9})


# ---- bundles that are wrong ---------------------------------------------------------------------


def one_element(name: str) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        value = np.array(arrays[name])
        value.flat[5] += 0.5
        arrays[name] = mx.array(value)

    return change


def one_nan(arrays: Arrays) -> None:
    name = "transformer_blocks.1.ff.net.2.weight"
    value = np.array(arrays[name])
    value[0, 0] = math.nan
    arrays[name] = mx.array(value)


def swapped_pair(arrays: Arrays) -> None:
    k, v = (f"single_transformer_blocks.0.attn.{n}.weight" for n in ("to_k", "to_v"))
    arrays[k], arrays[v] = arrays[v], arrays[k]


def dropped_bias(arrays: Arrays) -> None:
    del arrays["transformer_blocks.0.attn.to_q.bias"]


def zeroed_bias(arrays: Arrays) -> None:
    name = "transformer_blocks.1.attn.to_q.bias"
    arrays[name] = mx.zeros_like(arrays[name])


def one_scale(arrays: Arrays) -> None:
    name = "single_transformer_blocks.0.proj_mlp.scales"
    value = np.array(arrays[name].astype(mx.float32))
    value[3, 0] *= 1.05
    arrays[name] = mx.array(value).astype(arrays[name].dtype)


WEIGHTS: dict[str, tuple[str, Callable[[Arrays], None], str]] = {
    "one element of a weight":
        ("fp32", one_element("transformer_blocks.1.ff.net.2.weight"), "transformer_blocks.1"),
    "one element of a norm":
        ("fp32", one_element("transformer_blocks.0.attn.norm_q.weight"), "transformer_blocks.0"),
    "one element outside of blocks": ("fp32", one_element("proj_out.weight"), "proj_out"),
    "a NaN": ("fp32", one_nan, "transformer_blocks.1"),
    "two weights swapped": ("fp32", swapped_pair, "single_transformer_blocks.0"),
    "a bias dropped": ("fp32", dropped_bias, "transformer_blocks.0"),
    "a bias set to zero": ("fp32", zeroed_bias, "transformer_blocks.1"),
    "one quantization scale, by a twentieth": ("4bit", one_scale, "single_transformer_blocks.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_wrong_weight_fails_and_its_block_is_named(
    case: str, flux_bundle: Bundles, flux_checkpoint: Path, tmp_path: Path
) -> None:
    q, change, block = WEIGHTS[case]
    bundle = copy(flux_bundle(q), tmp_path)
    change_tensors(bundle / "transformer", change)
    check_failed(bundle, flux_checkpoint, block)


def add_to_sub(node: list[Any]) -> None:
    node[0] = "sub"


def gelu_to_silu(node: list[Any]) -> None:
    node[0], node[2] = "silu", {"x": node[2]["x"]}


def larger_epsilon(node: list[Any]) -> None:
    node[2]["eps"] = 1e-2


NODES: dict[str, tuple[str, str, Callable[[list[Any]], None], str]] = {
    "a residual subtracted": ("transformer_blocks", "add", add_to_sub, "transformer_blocks.0"),
    "another activation":
        ("single_transformer_blocks", "gelu", gelu_to_silu, "single_transformer_blocks.0"),
    "another epsilon": ("transformer_blocks", "rms_norm", larger_epsilon, "transformer_blocks.0"),
    "another epsilon in the last block":
        ("single_transformer_blocks_1", "rms_norm", larger_epsilon, "single_transformer_blocks.1"),
    "a sum before the first block": ("forward", "add", add_to_sub, "time_text_embed"),
}  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_a_wrong_node_fails_and_the_first_block_that_runs_it_is_named(
    case: str, flux_bundle: Bundles, flux_checkpoint: Path, tmp_path: Path
) -> None:
    body, op, change, block = NODES[case]
    bundle = copy(flux_bundle("fp32"), tmp_path)
    change_nodes(bundle / "transformer", body, op, change)
    report = verify(bundle, flux_checkpoint)
    assert not report.passed
    assert report.begins_at["transformer"].split()[0] == block
    assert [row.tier for row in report.tiers if not row.passed] == ["forward"]


def test_a_wrong_node_is_named_inside_its_block(
    flux_bundle: Bundles, flux_checkpoint: Path, tmp_path: Path
) -> None:
    bundle = copy(flux_bundle("4bit"), tmp_path)
    change_nodes(bundle / "transformer", "single_transformer_blocks", "gelu", gelu_to_silu)
    begins = verify(bundle, flux_checkpoint).begins_at["transformer"]
    assert begins == "single_transformer_blocks.0 (single_transformer_blocks.0.act_mlp)"


def test_a_wrong_node_fails_in_bf16_too(
    flux_bundle: Bundles, flux_checkpoint: Path, tmp_path: Path
) -> None:
    bundle = copy(flux_bundle("bf16"), tmp_path)
    change_nodes(bundle / "transformer", "transformer_blocks", "add", add_to_sub)
    check_failed(bundle, flux_checkpoint, "transformer_blocks.0")


def save_zeroed(source: Path, target: Path, change: Callable[[Arrays], None]) -> Path:
    """A checkpoint like `source` with other weights."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    arrays: Any = {name: np.array(value) for name, value in load_file(file).items()}
    change(arrays)
    save_file(arrays, file, {"format": "pt"})
    return target


def no_output(arrays: Any) -> None:
    for name in ("proj_out.weight", "proj_out.bias"):
        arrays[name] = np.zeros_like(arrays[name])


def no_gelu(arrays: Any) -> None:
    for number in (0, 1):
        name = f"single_transformer_blocks.{number}.proj_out.weight"
        arrays[name][:, -128:] = 0 * arrays[name][:, -128:]  # what the GELU gives is dropped
        arrays[name] = 0 * arrays[name]


@pytest.mark.parametrize(("change", "q"), [(no_output, "fp32"), (no_output, "bf16"),
                                           (no_gelu, "4bit")])  # fmt: skip
def test_weights_of_zero_hide_no_error(
    change: Callable[[Arrays], None], q: str, flux_checkpoint: Path, tmp_path: Path
) -> None:
    source = save_zeroed(flux_checkpoint, tmp_path / "source", change)
    convert(source, tmp_path / "out", q)
    right = verify(tmp_path / "out", source)
    assert right.passed, right.as_text()
    assert right.tiers[-1].name == "forward (noise for zero weights)"
    assert 0 < right.tiers[-1].rel_l2 < 1e-4
    change_nodes(
        tmp_path / "out" / "transformer", "single_transformer_blocks", "gelu", gelu_to_silu
    )
    wrong = verify(tmp_path / "out", source)
    assert [row.name for row in wrong.tiers if not row.passed] == [right.tiers[-1].name]
    assert wrong.begins_at["transformer"].startswith("single_transformer_blocks.0")


def test_an_output_of_one_number_proves_nothing(flux_checkpoint: Path, tmp_path: Path) -> None:
    def faint(arrays: Any) -> None:
        arrays["proj_out.weight"] *= np.float32(1e-30)
        arrays["proj_out.bias"][:] = 0.5

    source = save_zeroed(flux_checkpoint, tmp_path / "source", faint)
    convert(source, tmp_path / "out", "fp32")
    report = verify(tmp_path / "out", source)
    assert not report.passed
    assert "proves nothing" in report.tiers[-1].note
    assert "exact" in report.as_text() and "400.0" not in report.as_text()


@pytest.mark.parametrize("side", ["result", "reference"])
def test_not_finite_on_either_side_fails_and_the_place_is_named(side: str) -> None:
    right = np.ones((2, 3, 40_000), np.float32)
    wrong = right.copy()
    wrong[1, 2, 5] = math.nan
    pair = (wrong, right) if side == "result" else (right, wrong)
    sums = compare(pair[:1], pair[1:])
    for passed in (None, True):
        row = make_row("forward", "t", "f", sums, 1.0, "torch", passed=passed)
        assert not row.passed
        assert row.note == f"NaN or infinity in the {side} at [1, 2, 5]"


def test_a_checkpoint_with_nan_fails_at_the_tensor(flux_checkpoint: Path, tmp_path: Path) -> None:
    def broken(arrays: Any) -> None:
        arrays["transformer_blocks.1.ff.net.2.bias"][3] = math.nan

    source = save_zeroed(flux_checkpoint, tmp_path / "source", broken)
    convert(source, tmp_path / "out", "4bit")
    report = verify(tmp_path / "out", source)
    assert not any(row.passed for row in report.tiers)
    assert "transformer_blocks.1.ff.net.2.bias: NaN" in report.begins_at["transformer"]


# ---- sizes --------------------------------------------------------------------------------------


def test_what_was_not_compared_is_said_and_the_command_compares_it(
    flux_bundle: Bundles, flux_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "WORKING_SIZE", (128, 96))
    report = verify(flux_bundle("fp32"), flux_checkpoint)
    (note,) = report.notes
    hint = re.fullmatch(r"transformer: compared at .*; add (.*) to compare at 128x96 pixels", note)
    assert hint is not None
    assert report.as_json()["sizes"]["transformer"]["forward"]["image_tokens"] < 48
    command = ["verify", str(flux_bundle("fp32")), "--against", str(flux_checkpoint), "--json"]
    result = CliRunner().invoke(cli, [*command, *hint[1].split()])
    data = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert data["notes"] == []
    assert data["sizes"]["transformer"]["forward"]["image_tokens"] == 48
    assert verify(flux_bundle("fp32"), flux_checkpoint, size=(64, 64)).notes == []  # chosen
    with pytest.raises(MlxconvError, match=r"100x100: .* divisible by 16; (96x96) is the nearest"):
        verify(flux_bundle("fp32"), flux_checkpoint, size=(100, 100))
    verify(flux_bundle("fp32"), flux_checkpoint, size=(96, 96))


def test_a_size_without_effect_is_refused(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path
) -> None:
    options: Any = {"components": ["text_encoder"], "size": (64, 64)}
    with pytest.raises(MlxconvError, match="has no effect on the sizes of text_encoder"):
        verify(pipeline_bundle("fp32"), pipeline_checkpoint, **options)
    with pytest.raises(MlxconvError, match="too few pixels for FluxTransformer2DModel"):
        verify(pipeline_bundle("fp32"), pipeline_checkpoint, size=(8, 8))


def check_failed(bundle: Path, source: Path, block: str) -> None:
    """The report fails and names the block; the command exits 1 with one JSON object."""
    command = ["verify", str(bundle), "--against", str(source), "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1, result.exception
    data = json.loads(result.stdout)
    assert not data["passed"]
    begins = data["begins_at"]["transformer"]
    assert begins == block or begins.startswith(f"{block} (")


def test_a_recipe_of_ones_own_goes_into_the_bundle(flux_checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    shutil.copyfile(files("mlxconv") / "recipes/FluxTransformer2DModel.toml", recipe)
    convert(flux_checkpoint, tmp_path / "out", "bf16", recipe=recipe)
    (component,) = open_bundle(tmp_path / "out").manifest["components"]
    written = tmp_path / "out" / component / "recipe.toml"
    assert written.read_bytes() == recipe.read_bytes()
    written.write_text("class = 1")
    with pytest.raises(MlxconvError, match=r"recipe\.toml"):
        verify(tmp_path / "out", flux_checkpoint)


def test_the_variant_converted_is_the_one_compared_with(
    flux_checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(flux_checkpoint, source)
    plain = next(source.glob("*.safetensors"))
    half = {k: v.astype(np.float16) for k, v in load_file(plain).items()}
    save_file(half, source / f"{plain.stem}.fp16.safetensors", {"format": "pt"})
    convert(source, tmp_path / "out", "fp32", variant="fp16")
    assert verify(tmp_path / "out", source).passed


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e25])
def test_sums_in_float32_are_those_in_float64(scale: float) -> None:
    rng = np.random.default_rng(0)
    exact = (scale * rng.standard_normal(200_000)).astype(np.float32)
    near = (exact * (1 + 1e-6 * rng.standard_normal(200_000))).astype(np.float32)
    quick, slow = Sums(), Sums()
    quick.add(near, exact)
    slow.add(near.astype(np.float64), exact.astype(np.float64))
    for name in ("rel_l2", "cosine", "max_rel", "sqnr_db"):
        assert getattr(quick, name) == pytest.approx(getattr(slow, name), rel=1e-5)


@pytest.mark.parametrize("special", [None, np.nan, np.inf, 3e38])
def test_equal_values_sum_as_if_compared(special: float | None) -> None:
    values = np.random.default_rng(0).standard_normal(3_000_000, dtype=np.float32)
    if special is not None:
        values[2_000_000] = special
    quick, slow = Sums(), Sums()
    quick.add_equal(values)
    with np.errstate(all="ignore"):
        slow.add(values, values)
    for name in ("rel_l2", "reference", "cosine", "max_rel", "max_reference"):
        assert getattr(quick, name) == pytest.approx(getattr(slow, name), rel=1e-6, nan_ok=True)
    assert quick.finite == slow.finite


def test_a_bundle_without_programs_is_verified_by_its_weights(
    pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    """Convolutions are stored channels-last, whether there is a program or not."""
    convert(pipeline_checkpoint, tmp_path / "out", components=("vae",), weights_only=True)
    report = verify(tmp_path / "out", pipeline_checkpoint, components=("vae",))
    assert report.passed
    assert [row.tier for row in report.tiers] == ["weights"]


def test_a_long_name_does_not_shift_the_columns() -> None:
    rows = [make_row("forward", "transformer", name, Sums(), 1.0, "x", passed=True)
            for name in ("a", "b" * 60)]  # fmt: skip
    head, *lines = ParityReport("bundle", "source", 0, rows).as_text().splitlines()[:3]
    assert {line.index("ok") for line in lines} == {head.index("result")}
