"""Symbolic links in a checkpoint: what lies outside of it does not get into a bundle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlxconv.convert.conversion import convert
from mlxconv.runtime.errors import MlxconvError

_PLANTED = ("LICENSE-planted", "notes.txt", "scheduler/id_rsa.txt", "vae/notes.json")


@pytest.fixture
def source(pipeline_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline_checkpoint, tmp_path / "source"))


def _refused(source: Path, link: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(MlxconvError, match=f"{link.name}: is a symbolic link to"):
        convert(source, out, components=("text_encoder",), weights_only=True)
    assert not out.exists()


@pytest.mark.parametrize("place", _PLANTED)
def test_a_link_to_a_file_outside_is_refused(place: str, source: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"key": "of the user"}', encoding="utf-8")
    (source / place).symlink_to(secret)
    _refused(source, source / place, tmp_path)


def test_a_link_to_itself_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "vae" / "notes.json").symlink_to("notes.json")
    _refused(source, source / "vae" / "notes.json", tmp_path)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_to_a_folder_outside_is_refused(
    absolute: bool, source: Path, tmp_path: Path
) -> None:
    (source / "scheduler").rename(tmp_path / "scheduler")
    there = tmp_path / "scheduler" if absolute else Path("../scheduler")
    (source / "scheduler").symlink_to(there)
    _refused(source, source / "scheduler", tmp_path)


def test_a_components_licence_may_not_be_a_link_out_of_its_pipeline(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("key", encoding="utf-8")
    (source / "LICENSE-planted").symlink_to(tmp_path / "secret")
    with pytest.raises(MlxconvError, match="LICENSE-planted: is a symbolic link"):
        convert(source / "text_encoder", tmp_path / "out", weights_only=True)


def test_links_inside_and_those_of_the_hubs_cache_are_followed(
    source: Path, tmp_path: Path
) -> None:
    """The cache has `snapshots/COMMIT/file -> ../../blobs/HASH`."""
    blobs = tmp_path / "models--acme--art" / "blobs"
    blobs.mkdir(parents=True)
    snapshot = blobs.parent / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir()
    shutil.copytree(source, snapshot)
    for number, file in enumerate([p for p in snapshot.rglob("*") if p.is_file()]):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    (snapshot / "NOTICE").symlink_to(snapshot / "LICENSE.md")
    out = tmp_path / "out"
    convert(snapshot, out, components=("text_encoder",), weights_only=True)
    assert (out / "NOTICE").read_bytes() == (source / "LICENSE.md").read_bytes()
    assert not any(path.is_symlink() for path in out.rglob("*"))
