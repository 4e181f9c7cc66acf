"""A bundle that is written in more than one run: what is finished stays, and is gone on from.

Beside the bundle-to-be lies `.NAME.unfinished/`: `bundle/`, what is written of it so far; `shelf/`,
the source file being read; and `journal.jsonl`, a line for each lot of tensors that is on the disk
for good, under a first line that says what the bundle is made of and how.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mlxconv.runtime.errors import MlxconvError

from .bundle_folder import check_space, check_target, full_disk_named, put_in_place
from .writer import Saved


def unfinished_path(out: Path) -> Path:
    """Where the unfinished form of a bundle is kept."""
    out = out.expanduser().resolve()
    return out.parent / f".{out.name}.unfinished"


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A hash of all that decides a bundle's bytes: another one begins anew."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class Unfinished:
    """The folder that is being filled, and the journal of what is finished in it."""

    def __init__(self, folder: Path, key: str, journal: IO[str]) -> None:
        self.folder, self._journal = folder / "bundle", journal
        self._checks: dict[str, dict[str, str]] = {}
        lines = _lines(journal)
        if lines[:1] != [{"key": key}]:
            lines = []
            for old in (self.folder, folder / "shelf"):
                shutil.rmtree(old, ignore_errors=True)
            journal.seek(0)
            journal.truncate()
            self._write({"key": key})
        self.folder.mkdir(exist_ok=True)
        for partial in folder.glob("shelf/**/*.incomplete"):
            partial.unlink()
        for line in lines[1:]:
            self._checks.setdefault(line["component"], {}).update(line["crc32"])

    @property
    def begun(self) -> bool:
        """Whether any tensor is finished."""
        return any(self._checks.values())

    def saved(self, component: str) -> Saved:
        """What is finished of a component, and where to note more."""

        def add(checks: dict[str, str]) -> None:
            self._write({"component": component, "crc32": checks})
            self._checks.setdefault(component, {}).update(checks)

        return Saved(dict(self._checks.get(component, {})), add)

    def keep_only(self, components: Collection[str]) -> None:
        """Delete what is copied into a bundle after the weights: it is copied again."""
        for path in self.folder.iterdir():
            if path.name not in components:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())


def _lines(journal: IO[str]) -> list[dict[str, Any]]:
    """The journal's lines. The last may have been cut short by a crash: it is cut off."""
    journal.seek(0)
    found, whole = [], 0
    for line in journal:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
        if not line.endswith("\n"):
            found.pop()
            break
        whole += len(line)  # the text is ASCII
    journal.truncate(whole)
    return found


@contextmanager
def unfinished_folder(
    out: Path, key: str, *, force: bool, needed_bytes: int
) -> Iterator[Unfinished]:
    """A folder to fill that becomes `out` when the block ends without an exception.

    On an exception, Ctrl-C included, what is finished stays, and stderr says where; where nothing
    is, nothing stays. Raises MlxconvError for a target that must not be written (`check_target`), a
    disk without room for the rest, or another process that is at it.
    """
    out = out.expanduser().resolve()
    check_target(out, force)
    folder = unfinished_path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        journal = (folder / "journal.jsonl").open("a+", encoding="utf-8")
    except OSError as error:
        raise MlxconvError(f"{folder}: cannot be created: {error}") from error
    with journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MlxconvError(f"{folder}: another process is writing there") from error
        work = Unfinished(folder, key, journal)
        try:
            check_space(out, needed_bytes - _allocated(work.folder))
            with full_disk_named(out, needed_bytes):
                yield work
            put_in_place(work.folder, out, force)
        except BaseException:
            if work.begun:
                kept = f"{folder}: what is finished is kept here"
                print(f"{kept}; the same command goes on, deleting it begins anew", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _allocated(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk; holes take none."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
