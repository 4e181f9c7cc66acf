"""Nothing that a user can get wrong is called unexpected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxconv.cli import _reason, cli


def reason(*arguments: str | Path) -> str:
    error = CliRunner().invoke(cli, [*map(str, arguments)]).exception
    assert isinstance(error, Exception)
    return _reason(error)


@pytest.mark.parametrize("command", [("convert", "-o", "out"), ("inspect",)])
def test_a_name_that_is_too_long(command: tuple[str, ...]) -> None:
    found = reason(*command, "x" * 5000)
    assert "File name too long; check the path" in found
    assert len(found) < 300


def test_a_working_folder_that_is_gone(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.rmtree(folder)
    found = reason("convert", flux_checkpoint, "-o", "out")
    assert "the current folder no longer exists" in found


@pytest.mark.parametrize("option", ["--recipe", "--q"])
@pytest.mark.parametrize("text", [b"\xff\xfe", b"a = " + b"[" * 100_000])
def test_toml_that_is_none(
    option: str, text: bytes, flux_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text)
    found = reason("convert", flux_checkpoint, "-o", tmp_path / "out", option, file)
    assert "bad.toml" in found
    assert "unexpected" not in found


def test_a_class_of_no_module() -> None:
    assert "cannot import" in reason("recipe", "new", "..:X")
