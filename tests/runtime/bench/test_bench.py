"""`bench`: its figures, what it refuses, and a table of changes; sizes are tiny."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from mlxconv.cli import cli
from mlxconv.convert.peers.command import MFLUX, peer_command
from mlxconv.runtime.bench import ablation
from mlxconv.runtime.bench.ablation import ROWS, ablate
from mlxconv.runtime.bench.bench import Settings, bench, describe, figures
from mlxconv.runtime.bench.worker import Repetition, run
from mlxconv.runtime.errors import ArgumentError, MlxconvError

from ...bundles import change_json
from ...conftest import Bundles

TINY = {"pixels": (64, 64), "dims": {"text_tokens": 8}}


def job(bundle: Path, **changes: Any) -> Repetition:
    return Repetition(str(bundle), "transformer", 2, (64, 64), {"text_tokens": 8}, **changes)


def latents_after(bundle: Path, folder: Path, **changes: Any) -> np.ndarray[Any, Any]:
    """Those after the last step of a repetition, in this process."""
    file = folder / "final.npy"
    run(job(bundle, final=str(file), gemm=False, compile="off", **changes))
    return np.asarray(np.load(file))


@pytest.fixture(scope="module")
def report(flux_bundle: Bundles) -> dict[str, Any]:
    command = ["bench", str(flux_bundle("fp32")), "--size", "64x64", "--dim", "text_tokens=8"]
    result = CliRunner().invoke(
        cli, [*command, "--steps", "3", "--repeat", "2", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    return data


def test_the_step_lies_in_its_spread(report: dict[str, Any]) -> None:
    least, most = report["step_spread"]
    assert 0 < least <= report["step_median"] <= most
    assert report["first_step_seconds"] >= report["compile_seconds"] >= 0


def test_memory_stands_beside_time(report: dict[str, Any]) -> None:
    assert report["peak_rss_bytes"] > report["peak_bytes"] > 0


def test_the_share_of_a_gemm_is_that_of_the_speeds(report: dict[str, Any]) -> None:
    assert report["gflops"] > 0
    share = report["gflops"] / report["gemm_gflops"]
    assert report["gemm_share"] == (pytest.approx(share, rel=1e-6) if share <= 1 else None)


def test_no_step_is_faster_than_its_products() -> None:
    """A share above 100 % means that the machine was busy with something else: none is given."""
    run = {"steps": [0.1, 0.1], "first_step": 0.2, "cpu": 0.2, "count": 2, "load": 0.0, "flops": 10}
    assert figures([{**run, "gemm": 0.05}]).gemm_share == pytest.approx(0.5)
    assert figures([{**run, "gemm": 0.15}]).gemm_share is None


def test_what_it_was_measured_on_is_named(report: dict[str, Any]) -> None:
    assert report["machine"].keys() >= {"chip", "device", "blas", "versions", "date"}
    assert report["machine"]["tf32"] is False  # as conftest sets it
    assert report["dims"] == {"batch": 1, "image_tokens": 16, "text_tokens": 8}
    assert report["dtype"] == "float32"


def test_diffusers_gives_the_same_on_the_same_inputs(
    flux_bundle: Bundles, flux_checkpoint: Path
) -> None:
    settings = Settings(flux_bundle("fp32"), steps=1, repeat=1, against="diffusers", **TINY)
    found = bench(settings, peer=peer_command)  # of the source that the bundle records
    assert "1 step, 1 repetition, " in found.as_text() and "unquantized" not in found.as_text()
    quantized = replace(found, about={**found.about, "quantization": 4})
    assert "(rel_l2, to the source's unquantized weights)" in quantized.as_text()
    assert found.rel_l2 is not None
    assert found.rel_l2 < 1e-4
    assert found.peer is not None
    assert found.peer.step > 0
    about = {**found.about, "machine": {**found.about["machine"], "system": "Linux 6 x86_64"}}
    said = "on x86 PyTorch multiplies with MKL and oneDNN, MLX with "
    assert said in replace(found, about=about).as_text()
    about["machine"]["system"] = "Darwin 25 arm64"
    assert said not in replace(found, about=about).as_text()


def test_compiled_diffusers_is_a_baseline_too(
    flux_bundle: Bundles, flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with a compiler that does nothing; without one, a sentence says so."""
    from mlxconv.convert.peers import diffusers_peer

    settings = Settings(
        flux_bundle("fp32"), "transformer", steps=1, against="diffusers-compiled",
        source=flux_checkpoint, **TINY,
    )  # fmt: skip
    command = peer_command(settings, describe(settings), tmp_path)
    job, compiled = json.loads(command[-1]), []

    def compile(function: Any) -> Any:
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr("torch.compile", compile)
    assert diffusers_peer.run(job)["version"].endswith("torch.compile")
    assert compiled == ["forward"]

    def broken(function: Any) -> Any:
        def call(*args: Any, **inputs: Any) -> Any:
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found in 'nothing'")

        return call

    monkeypatch.setattr("torch.compile", broken)
    with pytest.raises(MlxconvError, match=r"failed \(InvalidCxx.*the environment variable CXX"):
        diffusers_peer.run(job)


@pytest.mark.parametrize(
    "changes",
    [
        {"staged": False}, {"fold": False}, {"evaluate_every": 0}, {"clear_cache_every": 1},
        {"scalars": "numbers"}, {"scalars": "inside"}, {"scalars": "outside"},
        {"change": "linears"}, {"guidance": "sequential"},
    ],
    ids=str,
)  # fmt: skip
def test_no_change_changes_the_latents(
    changes: dict[str, Any], flux_bundle: Bundles, tmp_path: Path
) -> None:
    bundle = flux_bundle("fp32")
    expected = latents_after(bundle, tmp_path)
    found = latents_after(bundle, tmp_path, **changes)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_guidance_in_one_batch_runs_twice_the_batch(flux_bundle: Bundles, tmp_path: Path) -> None:
    assert len(latents_after(flux_bundle("fp32"), tmp_path, guidance="batched")) == 2


def test_a_row_of_the_table_is_one_change(
    flux_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [r for r in ROWS if r.variant in ("manual", "every 5 steps") and r.question != "RMSNorm"]
    monkeypatch.setattr(ablation, "ROWS", tuple(r for r in rows if r.question != "modulated norm"))
    report = ablate(Settings(flux_bundle("fp32"), steps=2, repeat=1, **TINY))
    (row,) = report.rows
    assert (row.row.question, row.row.variant) == ("attention", "manual")
    assert row.rel_l2 is not None
    assert row.rel_l2 < 1e-4
    assert report.left_out == {"evaluate: every 5 steps": "needs --steps 5 or more"}
    assert "| attention | mx.fast | manual |" in report.as_text()
    assert "not the quotient of the medians" in report.as_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0: at least 1"),
        ({"repeat": 0}, "repeat is 0: at least 1"),
        ({"batch": 0}, "batch is 0: at least 1"),
        ({"compile": "fast"}, "compile='fast': choose one of off, block, program"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MlxconvError, match=message):
        Settings(Path("bundle"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"component": "vae"}, "no component 'vae'"),
        ({"dims": {"depth": 2}}, "no dim depth"),
        ({"pixels": (8, 8)}, "too few"),
        ({"against": "mflux", "source": Path("/")}, "no config.json; --source is the checkpoint"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(
    changes: dict[str, Any], message: str, flux_bundle: Bundles
) -> None:
    with pytest.raises(MlxconvError, match=message):
        bench(Settings(flux_bundle("fp32"), **changes), peer=peer_command)


def test_a_source_that_is_gone_has_to_be_given(flux_bundle: Bundles, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(flux_bundle("fp32"), tmp_path / "copy"))
    change_json(copy / "mlxconv.json", lambda data: data.update(source="acme/art"))
    with pytest.raises(MlxconvError, match=r"needs --source, .* was made from acme/art"):
        bench(Settings(copy, against="diffusers"), peer=peer_command)


@pytest.mark.parametrize(
    "options",
    [
        ["--against", "diffusers", "--guidance", "batched"],
        ["--against", "mflux"],
        ["--against", "diffusers", "--ablate"],
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(
    options: list[str], flux_bundle: Bundles
) -> None:
    refused = CliRunner().invoke(cli, ["bench", str(flux_bundle("fp32")), *options])
    assert isinstance(refused.exception, ArgumentError)


def test_the_script_that_mflux_runs_is_part_of_the_package() -> None:
    assert MFLUX.is_file()


def test_mflux_has_to_be_installed(flux_bundle: Bundles, flux_checkpoint: Path) -> None:
    settings = Settings(
        flux_bundle("fp32"), against="mflux", source=flux_checkpoint, mflux_python=sys.executable
    )
    with pytest.raises(MlxconvError, match="mflux is not installed there"):
        bench(settings, peer=peer_command)
    with pytest.raises(MlxconvError, match="against='mflux' needs `peer`"):
        bench(settings)


def test_a_bundle_without_a_denoiser_is_refused(flux_bundle: Bundles, tmp_path: Path) -> None:
    manifest = json.loads((flux_bundle("fp32") / "mlxconv.json").read_text(encoding="utf-8"))
    listed = {"text_encoder": manifest["components"]["transformer"]}
    (tmp_path / "mlxconv.json").write_text(json.dumps({**manifest, "components": listed}))
    with pytest.raises(MlxconvError, match=r"no denoiser .* only text_encoder; give --component"):
        bench(Settings(tmp_path))


def test_a_size_that_the_model_does_not_take_is_told(flux_bundle: Bundles) -> None:
    settings = Settings(flux_bundle("fp32"), repeat=1, steps=1, dtype="float8", **TINY)
    with pytest.raises(MlxconvError, match=r"unknown dtype 'float8'.*run at batch=1, image_tokens"):
        bench(settings)


def test_memory_counts_from_the_loop(flux_bundle: Bundles) -> None:
    found = run(job(flux_bundle("fp32"), gemm=False))
    assert 0 < found["peak_bytes"] <= mx.get_peak_memory()


def test_a_row_is_held_against_the_defaults_on_both_sides() -> None:
    defaults = [{"loop": seconds} for seconds in (1.0, 3.0, 9.0)]
    rows = [{"loop": 4.0}] * 5
    made = ablation._Round(defaults, rows)
    assert made.ratio(0, "loop") == made.ratio(3, "loop") == 2
    assert made.ratio(4, "loop") == pytest.approx(4 / 6)
