"""MLX's compiled kernels are loaded from a folder that only the user can write to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxconv.runtime import cache_folders
from mlxconv.runtime.bundle import load_component

from ..conftest import Bundles

_RUN = """
import os, tempfile, warnings
from mlxconv.runtime.cache_folders import keep_kernels_private
print(keep_kernels_private())
import mlx.core as mx
mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + 1)(mx.ones(8)))
print(tempfile.gettempdir(), os.environ["TMPDIR"])
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A temporary folder to which anybody can write, as /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def run(shared: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(shared), "MLXCONV_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", _RUN], capture_output=True, text=True, env=environment, check=True
    )


def test_kernels_are_kept_in_the_users_cache(shared: Path, tmp_path: Path) -> None:
    done = run(shared, tmp_path / "cache")
    folder, python = done.stdout.splitlines()
    assert Path(folder).is_relative_to(tmp_path / "cache" / "kernels")
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert list(Path(folder).glob("mlx/*/cpu/*.so"))  # the next process loads it
    assert list(shared.iterdir()) == []
    assert python == f"{shared} {shared}"  # Python's own temporary files stay where they were


@pytest.mark.parametrize("how", ["a link", "open to all", "a file", "below an open folder"])
def test_a_folder_that_others_can_write_to_is_not_used(
    how: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("MLXCONV_CACHE", str(tmp_path / "cache"))
    folder = cache_folders._kernel_folder()
    if how == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "a file":
        folder.rmdir()
        folder.touch()
    else:
        (folder if how == "open to all" else folder.parent).chmod(0o777)
    with pytest.warns(UserWarning, match="compiles its kernels anew.*MLXCONV_CACHE"):
        used = cache_folders._kernel_folder()
    assert used != folder
    assert used.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("MLXCONV_CACHE", str(tmp_path / "mine"))  # what the warning says
    assert cache_folders._kernel_folder().is_relative_to(tmp_path / "mine")


def test_a_private_temporary_folder_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cache_folders.keep_kernels_private() is None


def test_it_is_done_before_a_component_can_compile(
    flux_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(
        "mlxconv.runtime.exec.executor.keep_kernels_private", lambda: called.append(True)
    )
    load_component(flux_bundle("fp32"))
    assert called
