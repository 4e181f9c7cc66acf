"""Files of a model repository: listed, weighed against the disk, fetched, checked.

Nothing is downloaded but what is named. A revision is looked up once; from then on its commit
counts. What was fetched lies in huggingface_hub's cache, where offline work finds it again.
"""

from __future__ import annotations

import glob
import hashlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import MlxconvError
from ..interrupts import NOT_WAITED_FOR
from .errors import http_error, hub_errors, is_disk_full, is_transient
from .names import HubName

# Seconds before a failed transfer is tried again; complete files are not sent twice.
_PAUSES = (1.0, 4.0)
_NOBODY_THERE = ("ConnectError", "ProxyError", "UnsupportedProtocol")
_ABANDONED = 3600.0  # seconds without a write to a partial file; a live one has a timeout of 10
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a commit: its size in bytes, and the hash that its bytes must have.

    `sha256` of a file in storage; files in git have git's own SHA-1, `git_oid`.
    """

    path: str
    size: int
    sha256: str | None
    git_oid: str

    def is_intact(self, file: Path) -> bool:
        """Whether a local file has these bytes."""
        with file.open("rb") as stream:
            if self.sha256 is not None:
                return hashlib.file_digest(stream, "sha256").hexdigest() == self.sha256
            return git_blob_id(stream.read()) == self.git_oid


def git_blob_id(data: bytes) -> str:
    """What the Hub lists for files that are not in its large storage."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Remote:
    """A repository at one commit, and its files by path.

    checksums: compare the bytes of every file with the Hub's hash of it after it was fetched;
    transfers themselves are not checked. progress: bars on a terminal.
    """

    name: HubName
    commit: str
    files: dict[str, RemoteFile]
    checksums: bool = False
    progress: bool = False

    @property
    def repo(self) -> str:
        """The repository's id."""
        return self.name.repo

    def within(self, folder: str) -> list[str]:
        """Paths of the files in a folder, below it too."""
        prefix = f"{folder}/" if folder else ""
        return [path for path in self.files if path.startswith(prefix)]

    def size(self, paths: Iterable[str]) -> int:
        """Bytes of these files."""
        return sum(self.files[path].size for path in paths)

    def cached(self, path: str) -> Path | None:
        """Where the cache has a file of this commit, if it has it."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, path, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def to_fetch(self, paths: Iterable[str]) -> int:
        """Bytes that `fetch` would download: those of files that the cache does not have."""
        missing = [path for path in paths if self.cached(path) is None]
        if not missing:
            return 0
        from huggingface_hub import snapshot_download

        def look() -> Any:
            return snapshot_download(
                self.repo, revision=self.commit, allow_patterns=_exactly(missing), dry_run=True
            )

        with self._named(), _bars(False):
            found = _persistent(look)
        return sum(file.file_size for file in found if file.will_download)

    def fetch(self, paths: Iterable[str]) -> Path:
        """The snapshot's folder in the cache, once these files are in it.

        Raises MlxconvError, before the first byte, when they do not fit on the disk.
        """
        from huggingface_hub import snapshot_download

        wanted = self._known(paths)
        missing = [path for path in wanted if self.cached(path) is None]
        if missing and self.size(missing) > free_bytes(cache_folder()):
            check_room(self.repo, cache_folder(), self.to_fetch(missing))

        def download() -> str:
            return snapshot_download(
                self.repo, revision=self.commit, allow_patterns=_exactly(wanted)
            )

        blobs = cache_folder() / f"models--{self.repo.replace('/', '--')}" / "blobs"
        with self._named(cache_folder(), missing), _bars(self.progress), _swept(blobs):
            folder = Path(_persistent(lambda: _interruptible(download)))
        absent = [path for path in wanted if not (folder / path).is_file()]
        if absent:
            raise MlxconvError(f"{self.repo}@{self.commit[:7]}: {absent[0]} was not downloaded")
        for path in wanted:
            self._check(path, folder / path)
        return folder

    def fetch_into(self, path: str, folder: Path) -> Path:
        """One file in a folder of its own instead of the cache (unless the cache has it)."""
        from huggingface_hub import hf_hub_download

        (path,) = self._known([path])
        there = self.cached(path)
        if there is None:
            check_room(self.repo, folder, self.files[path].size)

            def download() -> str:
                return hf_hub_download(self.repo, path, revision=self.commit, local_dir=str(folder))

            parts = folder / ".cache" / "huggingface" / "download"
            with self._named(folder, [path]), _bars(self.progress), _swept(parts):
                there = Path(_persistent(lambda: _interruptible(download)))
        self._check(path, there)
        return there

    def read(self, path: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` of a file, without the rest; from the cache if it is there."""
        (path,) = self._known([path])
        there = self.cached(path)
        if there is not None:
            with there.open("rb") as stream:
                stream.seek(begin)
                return stream.read(end - begin)
        with self._named():
            return _persistent(lambda: self._read_range(path, begin, end))

    def _read_range(self, path: str, begin: int, end: int) -> bytes:
        """A server that does not know ranges sends the file from its beginning."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        address = hf_hub_url(self.repo, path, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
        data = bytearray()
        with get_session().stream("GET", address, headers=headers, timeout=30) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            skipped = 0 if response.status_code == 206 else begin
            for piece in response.iter_bytes():
                data += piece
                if len(data) >= skipped + end - begin:
                    break
        return bytes(data[skipped : skipped + end - begin])

    def _known(self, paths: Iterable[str]) -> list[str]:
        wanted = sorted(set(paths))
        unknown = [path for path in wanted if path not in self.files]
        if unknown:
            raise MlxconvError(
                f"{self.repo}@{self.commit[:7]}: has no file {unknown[0]} ({len(unknown)} of "
                f"{len(wanted)} missing); the repository is incomplete"
            )
        if not wanted:
            raise MlxconvError(f"{self.repo}@{self.commit[:7]}: has no files that mlxconv can use")
        return wanted

    def _check(self, path: str, file: Path) -> None:
        """With `checksums`: a damaged file is taken out of the cache, so that it comes anew."""
        if not self.checksums or self.files[path].is_intact(file):
            return
        for damaged in (file.resolve(), file):
            with suppress(OSError):
                damaged.unlink()
        raise MlxconvError(
            f"{self.repo}@{self.commit[:7]}: {path} arrived damaged: its checksum is not the Hub's;"
            " it was deleted, run the same command again"
        )

    @contextmanager
    def _named(self, folder: Path | None = None, paths: Iterable[str] = ()) -> Iterator[None]:
        """Failures become one line; of a full disk, with the figures."""
        try:
            with hub_errors(self.repo, self.name.revision):
                yield
        except MlxconvError as error:
            if folder is None or error.__cause__ is None or not is_disk_full(error.__cause__):
                raise
            left = sum(self.files[p].size for p in paths if self.cached(p) is None)
            raise MlxconvError(
                f"{self.repo}: the disk of {folder} is full: {left:,} bytes were still to come, "
                f"{free_bytes(folder):,} are free; make room or set HF_HOME to another disk, then "
                "run the same command again"
            ) from error


def open_remote(name: HubName, *, checksums: bool = False, progress: bool = False) -> Remote:
    """Look a repository up: which commit its revision is now, and which files that has.

    Offline, or when the Hub does not answer, what the cache remembers of both is used.
    """
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(library_name="mlxconv")
    with hub_errors(name.repo, name.revision):
        with _quiet():
            resolved = _persistent(lambda: api.resolve_revision(name.repo, revision=name.revision))
        commit = str(resolved.resolved)
        try:
            if checksums:  # which the cached listing lacks
                raise CachedRepoTreeNotFoundError
            listed = list(get_cached_repo_tree(name.repo, revision=commit))
        except CachedRepoTreeNotFoundError:
            tree = _persistent(
                lambda: list(api.list_repo_tree(name.repo, revision=commit, recursive=True))
            )
            listed = [entry for entry in tree if isinstance(entry, RepoFile)]
    files = {
        f.path: RemoteFile(f.path, f.size, f.lfs.sha256 if f.lfs else None, f.blob_id)
        for f in listed
    }
    return Remote(name, commit, files, checksums, progress)


def cache_folder() -> Path:
    """huggingface_hub's cache: HF_HUB_CACHE, or in HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def check_room(what: str, folder: Path, needed: int) -> None:
    """MlxconvError when a folder's disk has less than `needed` bytes free."""
    free = free_bytes(folder)
    if needed > free:
        raise MlxconvError(
            f"{what}: {needed:,} bytes are needed in {folder}, {free:,} are free on that disk; "
            "make room, or choose another disk (HF_HOME for downloads, -o for the bundle)"
        )


def free_bytes(folder: Path) -> int:
    """Free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _exactly(paths: Iterable[str]) -> list[str]:
    """Patterns that match these names and no others."""
    return [glob.escape(path) for path in paths]


def _persistent(call: Callable[[], T]) -> T:
    """The call's result; after failures of servers and connections it is tried again.

    Xet tries again by itself, for minutes: its failures, which are no HTTP errors, are final. So is
    an address where nobody listens.
    """
    for pause in _PAUSES:
        try:
            return call()
        except Exception as error:
            # The client wraps a failure when the cache does not help either.
            why = error if isinstance(error, http_error()) else error.__cause__
            if not isinstance(why, http_error()) or type(why).__name__ in _NOBODY_THERE:
                raise
            if not is_transient(why):
                raise
            time.sleep(pause)
    return call()


def _interruptible(call: Callable[[], T]) -> T:
    """The call's result; Ctrl-C ends the wait for it at once.

    The client would wait for its threads, and they for a server that says nothing. They go on
    until the process ends.
    """
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, name=NOT_WAITED_FOR, daemon=True).start()
    return found.result()


@contextmanager
def _swept(folder: Path) -> Iterator[None]:
    """Without the client's partial files, which no later run goes on from.

    Those of earlier processes go when nothing was written to them for an hour; on an exception,
    Ctrl-C included, those of this block go too.
    """
    before = set(folder.glob("*.incomplete"))
    for old in before:
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _ABANDONED:
                old.unlink()
    try:
        yield
    except BaseException:
        for made in set(folder.glob("*.incomplete")) - before:
            made.unlink(missing_ok=True)
        raise


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """huggingface_hub's progress bars, on a terminal only; a user's own choice stays."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    decided = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    if decided or are_progress_bars_disabled() or (shown and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface_hub's warnings: what matters of them is said here, in one line."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
