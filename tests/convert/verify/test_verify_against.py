"""What a bundle is verified against: its own source, found and remembered; another bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxconv.cli import cli
from mlxconv.convert.conversion import convert
from mlxconv.convert.source.hub import is_recorded_source, recorded_source
from mlxconv.convert.verify.record import PARITY_FILE, read_parity
from mlxconv.runtime.bundle import Bundle, open_bundle
from mlxconv.runtime.errors import MlxconvError

from ...bundles import change_json
from ...conftest import Bundles


def verified(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["verify", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def source(flux_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(flux_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def bundle(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Converted by a relative path, and left in another folder than it was converted in."""
    monkeypatch.chdir(tmp_path)
    convert(source.name, "out", "fp32")
    monkeypatch.chdir("/")
    return tmp_path / "out"


def test_the_recorded_source_is_found_and_its_verdict_kept(bundle: Path, source: Path) -> None:
    code, report = verified(bundle)
    assert code == 0 and report["passed"] and report["source"] == str(source)
    kept = read_parity(open_bundle(bundle))
    assert kept.passed and kept.rows == report["tiers"]

    change_json(bundle / "transformer" / "config.json", lambda data: data.update(guidance=1))
    assert "of other files" in read_parity(open_bundle(bundle)).why


@pytest.mark.parametrize("option", [["--threshold", "1"], ["--component", "transformer"]])
def test_a_verdict_of_less_than_all_is_not_kept(bundle: Path, option: list[str]) -> None:
    assert verified(bundle, *option)[0] == 0
    assert not (bundle / PARITY_FILE).exists()


def test_a_source_that_is_gone_is_named(bundle: Path, source: Path, tmp_path: Path) -> None:
    moved = source.rename(tmp_path / "moved")
    result = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert result.exit_code == 1
    message = str(result.exception)
    assert f"was made from {source}, which was not found; " in message
    assert "--against SOURCE" in message
    assert verified(bundle, "--against", moved)[0] == 0
    assert not (bundle / PARITY_FILE).exists()  # whether it is the source is not known


@pytest.mark.parametrize(
    ("source", "revision", "meant", "same", "other"),
    [
        ("org/name", "abc", "hf://org/name", "org/name", "org/name@def"),
        ("org/name/vae", "abc", "hf://org/name/vae", "hf://org/name@abc/vae", "org/name"),
    ],
)
def test_a_source_on_the_hub_is_found_again(
    source: str, revision: str, meant: str, same: str, other: str
) -> None:
    bundle = Bundle(Path("b"), {"source": source, "revision": revision})
    assert recorded_source(bundle) == meant
    assert is_recorded_source(bundle, meant) and is_recorded_source(bundle, same)
    assert not is_recorded_source(bundle, other)


def test_two_bundles_are_compared_and_judged_only_when_asked(flux_bundle: Bundles) -> None:
    exact, coarse = flux_bundle("fp32"), flux_bundle("4bit")
    code, report = verified(coarse, "--against", exact)
    (row,) = report["tiers"]
    assert code == 0 and 1e-3 < row["rel_l2"] < 0.5 and row["note"] == "not judged"
    assert row["reference"] == "fp32 (float32), float32 MLX"
    assert verified(coarse, "--against", exact, "--threshold", "1e-3")[0] == 1
    (same,) = verified(exact, "--against", exact)[1]["tiers"]
    assert same["rel_l2"] == 0
    text = CliRunner().invoke(cli, ["verify", str(coarse), "--against", str(exact)]).stdout
    assert text.endswith("compared; --threshold REL_L2 judges\n")
    assert "both ran in float32, so that they differ by their weights alone (--dtype)" in text
    _, half = verified(coarse, "--against", exact, "--dtype", "bf16")
    assert half["notes"][0].startswith("both ran in bfloat16")
    assert half["tiers"][0]["reference"] == "fp32 (float32), bfloat16 MLX"


def test_a_bundle_is_no_reference_for_pictures(flux_bundle: Bundles) -> None:
    arguments = ["verify", flux_bundle("fp32"), "--against", flux_bundle("4bit"), "--tier", "image"]
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert isinstance(result.exception, MlxconvError)
    assert "can only be compared with --tier forward" in str(result.exception)
