"""A bundle's folder is whole or absent, replaces nothing unasked, and survives a killed process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlxconv.convert.store.bundle_folder import atomic_folder, changing, settle
from mlxconv.convert.store.writer import Output, output_of, pass_through, single, write_weights
from mlxconv.runtime.bundle import MANIFEST
from mlxconv.runtime.errors import MlxconvError


def bundle(path: Path, content: str = "old") -> Path:
    path.mkdir(parents=True)
    (path / MANIFEST).write_text(content)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er" / "out"
    with atomic_folder(out, force=False, needed_bytes=10) as partial:
        assert partial.parent == out.parent
        assert not out.exists()
        (partial / "x").write_text("new")
    assert names(out) == ["x"]
    assert names(out.parent) == ["out"]


def test_force_replaces_a_bundle_only_at_the_end(tmp_path: Path) -> None:
    out = bundle(tmp_path / "out")
    with atomic_folder(out, force=True, needed_bytes=0) as partial:
        (partial / MANIFEST).write_text("new")
        assert (out / MANIFEST).read_text() == "old"
    assert (out / MANIFEST).read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_all_files_have_the_permissions_of_new_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with atomic_folder(out, force=False, needed_bytes=0) as partial:
        for number, mode in enumerate((0o600, 0o444, 0o755)):
            folder = partial / f"{number}"
            folder.mkdir(mode=0o700)
            (folder / "x").touch()
            (folder / "x").chmod(mode)
    (tmp_path / "new").touch()
    new = (tmp_path / "new").stat().st_mode
    assert {file.stat().st_mode for file in out.rglob("x")} == {new}
    assert {folder.stat().st_mode for folder in (out, *out.iterdir())} == {out.stat().st_mode}
    assert out.stat().st_mode & 0o666 == new & 0o666


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_what_was_there_stays_when_the_work_fails(
    tmp_path: Path, error: type[BaseException]
) -> None:
    out = bundle(tmp_path / "out")
    with pytest.raises(error), atomic_folder(out, force=True, needed_bytes=0) as partial:
        (partial / "x").write_text("half")
        raise error
    assert (out / MANIFEST).read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_ctrl_c_in_the_middle_of_a_tensor_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[bytes]:
        yield b"1234"
        raise KeyboardInterrupt

    group = pass_through(Output("x", (2,), "F32"), interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        atomic_folder(tmp_path / "new" / "out", force=False, needed_bytes=8) as partial,
    ):
        write_weights(partial, "model", [group])
    assert names(tmp_path) == []


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", full)
    with (
        pytest.raises(MlxconvError, match=r"disk is full: 1,234 bytes needed, [\d,]+ free"),
        atomic_folder(tmp_path / "out", force=False, needed_bytes=1234) as partial,
    ):
        array = mx.zeros((4,))
        write_weights(partial, "model", [single(output_of("x", array), lambda: array)])
    assert names(tmp_path) == []


def test_too_little_space_is_found_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with (
        pytest.raises(MlxconvError, match="needs 1,001 bytes, 1,000 are free"),
        atomic_folder(tmp_path / "a" / "out", force=False, needed_bytes=1001),
    ):
        raise AssertionError("the block must not run")
    assert names(tmp_path) == []


def test_the_old_bundle_comes_back_when_the_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = bundle(tmp_path / "out"), Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise PermissionError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with (
        pytest.raises(MlxconvError, match="cannot be put in place: no"),
        atomic_folder(out, force=True, needed_bytes=0),
    ):
        pass
    assert (out / MANIFEST).read_text() == "old"
    assert names(tmp_path) == ["out"]


def refusal(out: Path, force: bool = True, source: Path | None = None) -> str:
    with (
        pytest.raises(MlxconvError) as caught,
        atomic_folder(out, force=force, needed_bytes=0, source=source),
    ):
        raise AssertionError("the block must not run")
    return str(caught.value)


def test_an_existing_bundle_needs_force(tmp_path: Path) -> None:
    assert "--force" in refusal(bundle(tmp_path / "out"), force=False)


def test_force_takes_an_empty_folder_but_no_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with atomic_folder(out, force=True, needed_bytes=0) as partial:
        (partial / "photos").write_text("")
    assert "is not a bundle" in refusal(out)
    assert names(out) == ["photos"]


def test_a_file_cannot_be_replaced_nor_be_a_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")
    assert "cannot be created" in refusal(tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_parent_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written to" in refusal(tmp_path / "out")


def test_the_source_is_never_written_into_nor_replaced(tmp_path: Path) -> None:
    source = bundle(tmp_path / "a" / "source")
    assert "or inside it: choose another folder" in refusal(source, source=source)
    assert "or inside it: choose another folder" in refusal(source / "out", source=source)
    assert "contains the source" in refusal(tmp_path / "a", source=source)


# ---- what others do meanwhile -------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "precious"])
@pytest.mark.parametrize("there", [False, True], ids=["absent", "replaced by --force"])
def test_a_folder_that_appears_during_the_work_is_left_as_it_is(
    tmp_path: Path, content: str | None, there: bool
) -> None:
    out = bundle(tmp_path / "out") if there else tmp_path / "out"

    def appear() -> None:
        if there:
            out.rename(tmp_path / "elsewhere")
        out.mkdir()
        if content:
            (out / "photo").write_text(content)

    def work() -> None:
        with atomic_folder(out, force=there, needed_bytes=0) as partial:
            (partial / "x").write_text("new")
            other = threading.Thread(target=appear)
            other.start()
            other.join()

    if there and content is None:  # --force takes an empty folder
        work()
        assert names(out) == ["x"]
        return
    with pytest.raises(MlxconvError, match="is not a bundle" if there else "appeared during"):
        work()
    assert names(out) == (["photo"] if content else [])
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def killed(out: Path, where: str) -> None:
    """A process that is killed inside `atomic_folder`: in the block, or at a rename to `out`."""
    code = """
        import os, signal, sys
        from pathlib import Path
        from mlxconv.convert.store.bundle_folder import atomic_folder

        out, where = Path(sys.argv[1]), sys.argv[2]
        die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        with atomic_folder(out, force=True, needed_bytes=0) as partial:
            (partial / "mlxconv.json").write_text("new")
            if where == "block":
                die()
            if where == "made":
                Path.rename = lambda self, to, rename=Path.rename: (
                    die() if ".partial-" in self.name else rename(self, to))
            if where == "moved":
                Path.mkdir = die
            if where == "last":
                import shutil
                shutil.rmtree = die
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(out), where], capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("where", "content"), [("block", "old"), ("moved", "old"), ("made", "old"), ("last", "new")]
)
def test_a_killed_conversion_is_cleared_up_by_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, content: str
) -> None:
    out = bundle(tmp_path / "out")
    killed(out, where)
    assert names(tmp_path) != ["out"]
    settle(out)
    assert names(tmp_path) == ["out"]
    assert (out / MANIFEST).read_text() == content
    told = capsys.readouterr().err
    assert ("put back; a conversion died" in told) == (where in ("moved", "made"))
    assert ("removed; the conversion that wrote it died" in told) == (where != "last")


def test_a_living_conversion_and_one_elsewhere_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / ".out.partial-00000000-1234abcd"
    elsewhere.mkdir()
    with atomic_folder(out, force=False, needed_bytes=0) as partial:
        settle(out)
        assert partial.is_dir()
    assert out.is_dir() and elsewhere.is_dir()
    assert f"{elsewhere}: left by a conversion on another machine" in capsys.readouterr().err


def test_changes_of_one_bundle_wait_for_each_other(tmp_path: Path) -> None:
    folder, order = bundle(tmp_path / "out"), list[str]()
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with changing(folder):
            order.append("second")

    with changing(folder):
        other = threading.Thread(target=second)
        other.start()
        begun.wait()
        other.join(timeout=0.05)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
