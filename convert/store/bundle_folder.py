"""A bundle's folder: written beside its place and renamed to it, and changed under a lock."""

import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxconv.runtime.bundle import MANIFEST
from mlxconv.runtime.errors import MlxconvError


@contextmanager
def atomic_folder(
    out: Path, *, force: bool, needed_bytes: int, source: Path | None = None
) -> Iterator[Path]:
    """A temporary sibling of `out`, renamed to it when the block ends without an exception.

    On any exception, Ctrl-C and a full disk included, it is removed and an `out` that was there
    before is untouched. `force` replaces an existing bundle or empty folder, never another one; the
    old one is deleted after the new one took its place, so both need room.

    Raises MlxconvError when `out` cannot or must not be written, or the disk has less than
    `needed_bytes` free.
    """
    out = out.expanduser().resolve()
    check_target(out, force, source)
    created = _make_parents(out.parent)
    with full_disk_named(out, needed_bytes):
        try:
            check_space(out, needed_bytes)
            with _partial_folder(out) as partial:
                yield partial
                put_in_place(partial, out, force)
        except BaseException:
            for folder in created:
                with suppress(OSError):
                    folder.rmdir()
            raise


@contextmanager
def full_disk_named(out: Path, needed_bytes: int) -> Iterator[None]:
    """MlxconvError with the figures for the OSError of a disk that is full, or over its quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        there = next(path for path in out.parents if path.exists())
        free = shutil.disk_usage(there).free
        raise MlxconvError(
            f"{out}: the disk is full: {needed_bytes:,} bytes needed, {free:,} free; "
            "make room or choose another folder"
        ) from error


def check_target(out: Path, force: bool, source: Path | None = None) -> None:
    """MlxconvError when a bundle must not be written at `out`: see `atomic_folder`."""
    out = out.expanduser().resolve()
    if source is not None:
        origin = source.expanduser().resolve()
        if out == origin or origin in out.parents:
            raise MlxconvError(f"{out}: is the source {origin} or inside it: choose another folder")
        if out in origin.parents:
            raise MlxconvError(f"{out}: contains the source {origin}: choose another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise MlxconvError(f"{out}: is a file: choose another folder")
    if any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise MlxconvError(
            f"{out}: exists and is not a bundle (no {MANIFEST} in it), so it is never replaced: "
            "choose another folder"
        )
    if not force:
        raise MlxconvError(
            f"{out}: exists: choose another folder, or replace it with --force (force=True)"
        )


def check_space(out: Path, needed: int) -> None:
    """MlxconvError when the disk of `out` has less than `needed` bytes free."""
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise MlxconvError(
            f"{out}: the bundle needs {needed:,} bytes, {free:,} are free on that disk"
        )


def put_in_place(partial: Path, out: Path, force: bool) -> None:
    """Rename `partial` to `out`, which must not exist unless `force` replaces it.

    An old `out` is put back when that fails, and by `settle` when the process dies in between.
    """
    old = out.parent / f".{out.name}.replaced-{partial.name.rpartition('.partial-')[2]}"
    made = False
    try:
        _even_modes(partial)
        if force and out.exists():
            check_target(out, force)  # it may have become another folder since
            out.rename(old)
        # Fails where anything appeared meanwhile; a rename alone replaces an empty folder.
        out.mkdir()
        made = True
        partial.rename(out)
    except BaseException as error:
        if made:
            with suppress(OSError):
                out.rmdir()
        if old.exists() and not out.exists():
            old.rename(out)
        if isinstance(error, FileExistsError):
            raise MlxconvError(
                f"{out}: appeared during the conversion and was left as it is: choose another "
                "folder, or replace it with --force"
            ) from error
        if isinstance(error, OSError):
            raise MlxconvError(f"{out}: cannot be put in place: {error}") from error
        raise
    shutil.rmtree(old, ignore_errors=True)


def _even_modes(folder: Path) -> None:
    """Give all files the permissions of new ones: copies have those of the source."""
    wanted = folder.stat().st_mode & 0o777
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        new = (mode & ~0o777) | (wanted if stat.S_ISDIR(mode) else wanted & 0o666)
        if new != mode and not stat.S_ISLNK(mode):
            with suppress(PermissionError):  # a file system without them
                path.chmod(stat.S_IMODE(new))


def _make_parents(folder: Path) -> list[Path]:
    """Create the missing folders; returns them, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MlxconvError(f"{folder}: cannot be created: {error}") from error
    return missing


# ---- what dead processes leave ------------------------------------------------------------------


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """A new sibling of `out`, locked while this process lives; removed unless it was renamed.

    Its name ends in this machine's tag and a random number: see `_abandoned`.
    """
    partial = out.parent / f".{out.name}.partial-{_machine()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise MlxconvError(f"{partial.parent}: cannot be written to: {error}") from error
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield partial
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def settle(out: Path) -> None:
    """Clear up after processes that died while they wrote `out`; stderr says what was done.

    A bundle that was about to be replaced is put back, and unfinished ones are removed.
    """
    out = out.expanduser().resolve()
    for old in _siblings(out, "replaced"):
        partial = out.parent / old.name.replace(".replaced-", ".partial-")
        if partial.exists() and not _abandoned(partial):
            continue
        with suppress(OSError):
            out.rmdir()  # the empty folder of `put_in_place`
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)
            _note(f"{out}: put back; a conversion died while it replaced this bundle")
    for partial in _siblings(out, "partial"):
        if _abandoned(partial):
            shutil.rmtree(partial, ignore_errors=True)
            _note(f"{partial}: removed; the conversion that wrote it died")


def _siblings(out: Path, kind: str) -> list[Path]:
    start = f".{out.name}.{kind}-"
    if not out.parent.is_dir():
        return []
    return sorted(path for path in out.parent.iterdir() if path.name.startswith(start))


def _abandoned(partial: Path) -> bool:
    """Whether the process that filled a partial folder is known to be dead.

    The kernel drops a lock with its process, but only this machine's kernel knows of it.
    """
    tag = partial.name.rpartition(".partial-")[2].partition("-")
    if tag[1] and tag[0] != _machine():
        _note(f"{partial}: left by a conversion on another machine; remove it if none runs there")
        return False
    try:
        lock = os.open(partial, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    finally:
        os.close(lock)
    return True


def _machine() -> str:
    """A short tag of this machine's name."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _note(text: str) -> None:
    print(text, file=sys.stderr)


# ---- changing a bundle --------------------------------------------------------------------------


@contextmanager
def changing(bundle: Path) -> Iterator[None]:
    """Hold the lock of a bundle that is changed in place; waits for other processes and threads.

    Read what is to be changed inside the block. The manifest is the file that is locked.
    """
    manifest = bundle / MANIFEST
    try:
        lock = os.open(manifest, os.O_RDWR)
    except OSError as error:
        raise MlxconvError(f"{bundle}: cannot be changed ({error.strerror})") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _note(f"{bundle}: waiting for another process that is changing it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
