"""Sizes added to a bundle afterwards: run and verified, its weights untouched."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxconv.cli import cli
from mlxconv.convert.conversion import convert
from mlxconv.convert.measure import tiny_checkpoint
from mlxconv.convert.parity import verify
from mlxconv.convert.recipe import load_recipe
from mlxconv.convert.resize import add_sizes
from mlxconv.runtime.errors import MlxconvError


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


def test_a_batch_is_added_without_the_weights(bundle: Path, checkpoint: Path) -> None:
    files = {f: f.stat().st_mtime_ns for f in bundle.rglob("model*")}
    done = CliRunner().invoke(cli, ["add-size", str(bundle), "--dim", "batch=4", "--json"])
    assert done.exit_code == 0, done.output
    assert {f: f.stat().st_mtime_ns for f in bundle.rglob("model*")} == files
    report = verify(bundle, checkpoint)
    assert report.passed
    assert len([row for row in report.tiers if row.tier == "forward"]) == 3


def test_a_class_that_takes_every_size_says_so(flux_bundle, tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match="takes every size already"):
        add_sizes(flux_bundle("fp32"), "transformer", [(64, 64)])


def test_what_is_not_fixed_is_named(bundle: Path) -> None:
    with pytest.raises(MlxconvError, match=r"height is not fixed, only batch"):
        add_sizes(bundle, "transformer", dims={"height": 8})
    with pytest.raises(MlxconvError, match=r"derives no dim from pixels: give --dim, of batch"):
        add_sizes(bundle, "transformer", [(64, 64)])
