"""`mlxconv convert --upload-repo`: what can refuse it does so first; a failure is gone on from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from .conftest import Env
from .server import READ_TOKEN, Hub
from .uploading import run

REPO = "tester/tiny-flux-8bit"


@pytest.fixture
def source(flux_checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny transformer with a card, as a folder that was downloaded."""
    folder = Path(shutil.copytree(flux_checkpoint, tmp_path / "source" / "transformer"))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    (folder / "LICENSE.txt").write_text("A licence.\n")
    return folder


@pytest.mark.slow
def test_one_command_converts_verifies_and_publishes_and_goes_on_after_a_failure(
    hub: Hub, source: Path, tmp_path: Path, env: Env
) -> None:
    command = ("convert", source, "--q", "8bit", "--upload-repo", REPO,
               "--base-model", "acme/tiny-flux")  # fmt: skip
    env = {**env, "HOME": str(tmp_path)}
    hub.fail("POST", "/commit/", status=500)
    failed = run(*command, env=env, cwd=tmp_path)
    assert failed.code == 1 and "not published: 0 of" in failed.error
    bundle = tmp_path / "tiny-flux-8bit"
    written = (bundle / "transformer" / "model.safetensors").stat().st_mtime_ns
    hub.reset()
    done = run(*command, env=env, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "converted by this same command" in done.err
    assert (bundle / "transformer" / "model.safetensors").stat().st_mtime_ns == written
    repo = hub.repos[REPO]
    files = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()}
    assert repo.head.files.keys() - {".gitattributes"} == files
    card = hub.repos.contents(repo, "README.md").decode()
    data = yaml.safe_load(card.split("---")[1])
    assert (data["license"], data["base_model"]) == ("apache-2.0", "acme/tiny-flux")
    parity = json.loads(hub.repos.contents(repo, "parity.json"))
    row = next(r for r in parity["tiers"] if r["tier"] == "forward")
    assert f"{row['rel_l2']:.1e}" in card
    assert "LICENSE.txt" in files and str(tmp_path) not in card


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ("licence", (), "its card states no licence"),
        ("token", (), "only reads"),
        ("repo", (), "cannot be a repository's name"),
        (None, ("--license", "mit"), "says apache-2.0"),
    ],
)
def test_what_can_be_refused_is_refused_before_the_conversion(
    change: str | None, options: tuple[str, ...], told: str,
    hub: Hub, source: Path, tmp_path: Path, env: Env,
) -> None:  # fmt: skip
    if change == "licence":
        (source / "README.md").write_text("# No front matter\n")
    if change == "token":
        env = {**env, "HF_TOKEN": READ_TOKEN}
    repo = "tester/a--b" if change == "repo" else REPO
    out = tmp_path / "out"
    done = run("convert", source, "-o", out, "--upload-repo", repo, *options, env=env)
    assert done.code == (2 if change == "repo" else 1) and told in done.err
    assert not out.exists() and repo not in hub.repos


def test_options_of_publishing_need_a_repository(source: Path, tmp_path: Path, env: Env) -> None:
    done = run("convert", source, "-o", tmp_path / "out", "--license", "mit", env=env)
    assert done.code == 2 and "--license is for publishing" in done.err


def test_a_hub_source_without_a_licence_is_refused_before_its_download(
    hub: Hub, source: Path, tmp_path: Path, env: Env
) -> None:
    (source / "README.md").unlink()
    hub.repos.seed("acme/tiny", source)
    done = run("convert", "acme/tiny", "--upload-repo", REPO, env=env, cwd=tmp_path)
    assert done.code == 1 and "acme/tiny: its card states no licence" in done.error
    assert not hub.requests("", r"\.safetensors")
