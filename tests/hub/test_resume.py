"""Bundles that are written in more than one run: the journal, and files that are gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxconv.convert.store.resume import Unfinished, unfinished_folder, unfinished_path
from mlxconv.convert.store.writer import Group, output_of, read_back, write_weights
from mlxconv.runtime.errors import MlxconvError


class Stopped(Exception):
    """A crash."""


def groups(made: list[str], stop_at: str | None = None) -> list[Group]:
    """Six tensors from three source files; `made` learns which were asked for."""

    def group(name: str, source: str, number: int) -> Group:
        value = mx.arange(1000 + number, dtype=mx.float32) * number

        def produce() -> Iterator[mx.array]:
            if name == stop_at:
                raise Stopped
            made.append(name)
            yield value

        return Group((output_of(name, value),), produce, value.size, Path(source))

    return [group(f"{source}{n}", source, n) for source in "xyz" for n in (1, 2)]


def written(out: Path, key: str, made: list[str], stop_at: str | None = None) -> None:
    with unfinished_folder(out, key, force=False, needed_bytes=30_000) as work:
        (work.folder / "part").mkdir(exist_ok=True)
        saved = work.saved("part")
        plan = groups(made, stop_at)
        write_weights(work.folder / "part", "model", plan, max_shard_bytes=13_000, saved=saved)


def test_what_is_finished_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, made = tmp_path / "out", list[str]()
    with pytest.raises(Stopped):
        written(out, "k", made, "z1")
    assert made == ["x1", "x2", "y1", "y2"] and not out.exists()
    kept = unfinished_path(out)
    assert kept.is_dir() and f"{kept}: what is finished is kept here" in capsys.readouterr().err

    made.clear()
    written(out, "k", made)
    assert made == ["z1", "z2"] and not kept.exists()
    read_back(out / "part", "model")
    once = tmp_path / "once"
    once.mkdir()
    write_weights(once, "model", groups([]), max_shard_bytes=13_000)
    for file in once.iterdir():
        assert (out / "part" / file.name).read_bytes() == file.read_bytes()


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    out, made = tmp_path / "out", list[str]()
    with pytest.raises(Stopped):
        written(out, "k", made, "y2")
    made.clear()
    written(out, "other", made)
    assert len(made) == 6
    read_back(out / "part", "model")


def test_a_torn_journal_and_a_missing_file_cost_only_work(tmp_path: Path) -> None:
    out, made = tmp_path / "out", list[str]()
    with pytest.raises(Stopped):
        written(out, "k", made, "z1")
    journal = unfinished_path(out) / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4  # the key, x, and y in two files
    journal.write_text("\n".join([*lines[:3], lines[3][:20]]), encoding="utf-8")
    made.clear()
    with pytest.raises(Stopped):
        written(out, "k", made, "z2")
    assert made[0] == "y2"  # the torn line's tensors are made again
    for file in (unfinished_path(out) / "bundle/part").glob("*.safetensors"):
        file.unlink()
    made.clear()
    written(out, "k", made)
    assert len(made) == 6
    read_back(out / "part", "model")


def test_nothing_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        written(tmp_path / "out", "k", [], "x1")
    assert not list(tmp_path.iterdir())


def test_two_processes_are_kept_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        unfinished_folder(out, "k", force=False, needed_bytes=0) as work,
        pytest.raises(MlxconvError, match="another process is writing there"),
        unfinished_folder(out, "k", force=False, needed_bytes=0),
    ):
        pass
    assert isinstance(work, Unfinished) and out.is_dir()
