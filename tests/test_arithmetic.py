"""Which arithmetic a command computes fp32 products in: what is compared with PyTorch in full
precision, whatever the environment says; everything else as MLX is set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxconv.cli import cli
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.machine import described

SETTING = "MLX_ENABLE_TF32"
EXACT = {
    "convert": ["missing", "-o", "out"],
    "verify": ["missing", "--against", "missing"],
    "upload": ["missing", "me/repo"],
    "demo": [],
}
SHARED = {
    "generate": ["missing", "a cat", "-o", "cat.png"],
    "bench": ["missing"],
    "profile": ["missing"],
    "inspect": ["missing"],
}


@pytest.mark.parametrize("given", [None, "0", "1"])
@pytest.mark.parametrize("command", [*EXACT, *SHARED])
def test_which_arithmetic_a_command_uses(
    command: str, given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise MlxconvError("not now")

    monkeypatch.setattr("mlxconv.convert.demo.demo.demo", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SETTING, given or "")
    if given is None:
        monkeypatch.delenv(SETTING)
    result = CliRunner().invoke(cli, [command, *{**EXACT, **SHARED}[command]])
    assert isinstance(result.exception, MlxconvError)
    assert os.environ.get(SETTING) == ("0" if command in EXACT else given)
    assert described()["tf32"] is (os.environ.get(SETTING) != "0")


def test_verify_from_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxconv.convert.verify.verify import verify

    monkeypatch.setenv(SETTING, "1")
    with pytest.raises(MlxconvError):
        verify("missing", "missing")
    assert os.environ[SETTING] == "0"
