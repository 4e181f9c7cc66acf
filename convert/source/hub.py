"""A checkpoint on the Hub as a folder of this disk, whose weights come when they are read.

The folder is private and holds links: the small files first; weights are chosen from the
repository's listing by the rule that holds for folders (`weight_files`) and known by their headers,
which are read alone. So all that can be refused is refused before the weights are downloaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxconv.runtime.bundle import Bundle
from mlxconv.runtime.errors import ArgumentError, MlxconvError
from mlxconv.runtime.files import read_json
from mlxconv.runtime.headers import MAX_HEADER_BYTES
from mlxconv.runtime.hub.bundles import HubBundle, is_hub_bundle
from mlxconv.runtime.hub.download import (
    Remote,
    cache_folder,
    check_room,
    existing,
    free_bytes,
    open_remote,
)
from mlxconv.runtime.hub.names import HubName, hub_name

from .checkpoint import INDEX_NAMES, LOOSE, Checkpoint, listed_components, open_checkpoint
from .weight_files import choose_files, has_weights

# What is fetched beside weights: configurations, tokenizers' vocabularies, chat templates.
_SMALL = (".json", ".txt", ".model", ".spm", ".tiktoken", ".vocab", ".merges", ".jinja")
_LOOSE_BYTES = 1_000_000  # a larger file at the root is no licence
_HEADER_GUESS = 100_000  # bytes; most headers are smaller


@dataclass(frozen=True)
class Asked:
    """What a command asks of a checkpoint; all but the first three are about the Hub alone.

    components: only these, () for all. low_disk: hold one weight file at a time, beside the cache.
    """

    variant: str | None = None
    model_class: str | None = None
    components: tuple[str, ...] = ()
    revision: str | None = None
    low_disk: bool = False
    checksums: bool = False
    progress: bool = False


@dataclass
class Download:
    """The weights of a checkpoint of the Hub: where each lies in it, and how they get here.

    `weights`: path in the private folder -> path in the repository. `shelf`: folder for the files
    of a low-disk run, one at a time. `sealed`: the reason why downloads are disabled, "" if they
    are not.
    """

    remote: Remote
    asked: Asked
    weights: dict[Path, str] = field(default_factory=dict)
    shelf: Path | None = None
    sealed: str = ""
    _held: Path | None = None

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return self.remote.size(self.weights.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest weight file."""
        return max((self.remote.size([path]) for path in self.weights.values()), default=0)

    def as_json(self) -> dict[str, Any]:
        """What a dry run says about it; bytes."""
        return {
            "files": len(self.weights),
            "bytes": self.size,
            "to_fetch": self.remote.to_fetch(self.weights.values()),
            "free": free_bytes(cache_folder()),
            "cache": str(cache_folder()),
        }

    def check_room(self, out: Path, bundle_bytes: int) -> None:
        """MlxconvError unless what is still to come and the bundle fit on their disks.

        A low-disk run weighs what it has finished too: see `unfinished_folder`.
        """
        if self.asked.low_disk:
            return
        what, out = str(self.remote.name), out.expanduser()
        coming = self.remote.to_fetch(self.weights.values())
        disks = [existing(folder).stat().st_dev for folder in (cache_folder(), out.parent)]
        check_room(what, cache_folder(), coming + (bundle_bytes if disks[0] == disks[1] else 0))
        check_room(what, out.parent, bundle_bytes)

    def fetch_all(self) -> None:
        """Everything into the cache; nothing in a low-disk run, where files come one by one."""
        if self.asked.low_disk or not self.weights:
            return
        folder = self.remote.fetch(self.weights.values())
        for here, path in self.weights.items():
            _link(here, folder / path)

    def bring(self, here: Path) -> None:
        """Make a weight file readable at its place in the private folder."""
        if here.exists():
            return
        path = self.weights[here]
        if self.sealed:
            raise MlxconvError(f"{here}: {self.sealed}")
        if not self.asked.low_disk:
            _link(here, self.remote.fetch([path]) / path)
            return
        self.drop()
        assert self.shelf is not None
        _link(here, self.remote.fetch_into(path, self.shelf))
        self._held = here

    def drop(self) -> None:
        """Let the one file of a low-disk run go; the cache's own stay."""
        if self._held is not None:
            there = self._held.resolve()
            self._held.unlink()
            if self.shelf is not None and there.is_relative_to(self.shelf.resolve()):
                there.unlink()
            self._held = None


@dataclass
class Source:
    """An opened checkpoint; `download` is None for a folder of this disk."""

    checkpoint: Checkpoint
    download: Download | None = None


@contextmanager
def opened(source: str | Path, asked: Asked) -> Iterator[Source]:
    """Open a folder, or a repository of the Hub by its id or address, without its weights.

    Errors inside the block that name the private folder name the repository instead.
    """
    name = hub_name(source)
    if name is None:
        _refuse_hub_options(source, asked)
        yield Source(open_checkpoint(source, asked.variant, asked.model_class))
        return
    name = name.at(asked.revision)
    remote = open_remote(name, checksums=asked.checksums, progress=asked.progress)
    with opened_remote(remote, asked) as found:
        yield found


@contextmanager
def opened_remote(remote: Remote, asked: Asked) -> Iterator[Source]:
    """The same for a repository that was looked up already."""
    with _private_folder(remote.name) as folder:
        yield _open(remote, folder, asked)


@contextmanager
def bundle_outline(remote: Remote) -> Iterator[Path]:
    """A bundle of the Hub as a folder whose weight files have a header and no data."""
    bundle = HubBundle(remote)
    small = set(bundle.small())
    base = f"{remote.name.folder}/" if remote.name.folder else ""
    with _private_folder(remote.name) as folder:
        for path in remote.within(remote.name.folder):
            here = folder / path.removeprefix(base)
            if path.endswith(".safetensors"):
                _outline(here, remote, path)
            elif path in small:
                _link(here, bundle.path / path.removeprefix(base))
        yield folder


def shown_name(name: HubName) -> str:
    """How errors, manifests and reports call a repository, or a folder in it."""
    return f"{name.repo}/{name.folder}" if name.folder else name.repo


def recorded_source(bundle: Bundle) -> str:
    """Where a bundle's checkpoint is; MlxconvError where it is not there any more."""
    source = str(bundle.manifest.get("source"))
    if not Path(source).is_absolute() and "/" in source:
        return f"hf://{source}"
    if not Path(source).is_dir():
        raise MlxconvError(
            f"{bundle.path}: was made from {source}, which was not found; pass the checkpoint "
            "with --against SOURCE"
        )
    return source


def is_recorded_source(bundle: Bundle, source: str | Path) -> bool:
    """Whether a source is the one that a bundle was made from."""
    recorded, name = str(bundle.manifest.get("source")), hub_name(source)
    if name is not None:
        same = name.revision in (None, bundle.manifest.get("revision"))
        return same and shown_name(name) == recorded
    return Path(source).expanduser().resolve() == Path(recorded).resolve()


@contextmanager
def _private_folder(name: HubName) -> Iterator[Path]:
    """A folder for the block; errors that name it name the repository instead."""
    with tempfile.TemporaryDirectory(prefix="mlxconv-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch).resolve() / shown_name(name).rpartition("/")[2]
        folder.mkdir()
        try:
            yield folder
        except MlxconvError as error:
            text = str(error)
            if str(folder) not in text:
                raise
            raise MlxconvError(text.replace(str(folder), shown_name(name))) from error


def _refuse_hub_options(source: str | Path, asked: Asked) -> None:
    given = {
        "--revision": asked.revision,
        "--low-disk": asked.low_disk,
        "--verify-checksums": asked.checksums,
    }
    for option, value in given.items():
        if value:
            raise ArgumentError(
                f"{source}: {option} applies only to Hub repositories, and this is a local path"
            )


def _open(remote: Remote, folder: Path, asked: Asked) -> Source:
    chooser = _Chooser(remote, folder, asked)
    chooser.choose()
    download = Download(remote, asked, chooser.weights)
    with _headers(download):
        checkpoint = open_checkpoint(folder, asked.variant, asked.model_class)
    checkpoint.source, checkpoint.revision = shown_name(remote.name), remote.commit
    checkpoint.skipped |= chooser.skipped
    for component in checkpoint.components.values():
        component.stamps = {}
        component.tensors = {
            name: replace(tensor, ready=partial(download.bring, tensor.file))
            for name, tensor in component.tensors.items()
        }
    return Source(checkpoint, download)


@contextmanager
def _headers(download: Download) -> Iterator[None]:
    """For the block weight files are there: whole, or with a header and no data.

    Pickles have no header to be read alone: they are fetched.
    """
    hollow = []
    for here, path in download.weights.items():
        if here.suffix == ".safetensors":
            hollow += [here] * _outline(here, download.remote, path)
        elif download.asked.low_disk and download.remote.cached(path) is None:
            raise MlxconvError(
                f"{here}: is not a safetensors file, so it has to be downloaded whole; leave "
                "--low-disk out"
            )
        else:
            _link(here, download.remote.fetch([path]) / path)
    try:
        yield
    finally:
        for here in hollow:
            here.unlink()


def _outline(here: Path, remote: Remote, path: str) -> bool:
    """A link to a file of the cache, or (True) a file of its size with its header and no data."""
    there = remote.cached(path)
    if there is not None:
        _link(here, there)
        return False
    here.parent.mkdir(parents=True, exist_ok=True)
    _write_hollow(here, remote, path)
    return True


def _write_hollow(here: Path, remote: Remote, path: str) -> None:
    """A file of the right size with the header of a safetensors file, the rest holes."""
    size = remote.files[path].size
    data = remote.read(path, 0, min(size, _HEADER_GUESS))
    needed = min(size, 8 + int.from_bytes(data[:8], "little"))
    if needed > len(data) and needed <= 8 + MAX_HEADER_BYTES:
        data += remote.read(path, len(data), needed)
    with here.open("wb") as file:
        file.write(data)
        file.truncate(size)


def _link(here: Path, there: Path) -> None:
    here.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        here.unlink()
    here.symlink_to(there.absolute())


class _Chooser:
    """Which files of a repository a conversion reads; links the small ones into the folder."""

    def __init__(self, remote: Remote, folder: Path, asked: Asked) -> None:
        self.remote, self.folder, self.asked = remote, folder, asked
        self.base = f"{remote.name.folder}/" if remote.name.folder else ""
        # Paths below the folder that was asked for.
        self.names = [path.removeprefix(self.base) for path in remote.within(remote.name.folder)]
        self.weights: dict[Path, str] = {}
        self.skipped: dict[str, str] = {}

    def choose(self) -> None:
        """Fetch and link the small files, then choose the weights."""
        if is_hub_bundle(self.remote):
            raise MlxconvError(
                f"{self.folder}: is an mlxconv bundle, already converted; give the original "
                "diffusers checkpoint"
            )
        index = next((name for name in INDEX_NAMES if name in self.names), None)
        if index is None:
            self._one_component()
        else:
            self._pipeline(index)

    def _one_component(self) -> None:
        if "config.json" not in self.names:
            found = ", ".join(sorted(self.names)[:8]) or "nothing"
            raise MlxconvError(
                f"{self.folder}: holds {found}; expected model_index.json (a pipeline) or "
                "config.json with weights (one component)"
            )
        here = [name for name in self.names if "/" not in name]
        self._link_small([n for n in here if n.endswith(_SMALL) or self._is_loose(n)])
        config = read_json(self.folder / "config.json")
        library = "diffusers" if "_class_name" in config else "transformers"
        self._choose_weights("", here, library, fallback=False)

    def _pipeline(self, index: str) -> None:
        self._link_small([index, *(n for n in self.names if self._is_loose(n))])
        listed = listed_components(read_json(self.folder / index), self.folder / index)
        if unknown := [name for name in self.asked.components if name not in listed]:
            raise MlxconvError(
                f"{self.folder}: no component {', '.join(unknown)}; it has {', '.join(listed)}"
            )
        inside = {name: self._inside(name) for name in listed}
        heavy = {name for name, files in inside.items() if has_weights(files)}
        left = {n for n in heavy if self.asked.components and n not in self.asked.components}
        self.skipped = dict.fromkeys(sorted(left), "not asked for, so it was not downloaded")
        wanted = {name: files for name, files in inside.items() if name not in left}
        self._link_small(
            f"{name}/{file}"
            for name, files in wanted.items()
            for file in files
            if file.endswith(_SMALL)
        )
        for name in wanted.keys() & heavy:
            files = [file for file in inside[name] if "/" not in file]
            self._choose_weights(name, files, listed[name][0], fallback=True)

    def _inside(self, name: str) -> list[str]:
        prefix = f"{name}/"
        return [path.removeprefix(prefix) for path in self.names if path.startswith(prefix)]

    def _choose_weights(self, name: str, files: list[str], library: str, fallback: bool) -> None:
        folder = self.folder / name if name else self.folder
        chosen = choose_files(folder, files, library, self.asked.variant, fallback)
        prefix = f"{self.base}{name}/" if name else self.base
        self.weights |= {folder / file: prefix + file for file in chosen.files}

    def _is_loose(self, name: str) -> bool:
        size = self.remote.files[self.base + name].size
        return "/" not in name and bool(LOOSE.fullmatch(name)) and size <= _LOOSE_BYTES

    def _link_small(self, names: Iterable[str]) -> None:
        wanted = list(names)
        if not wanted:
            return
        there = self.remote.fetch(self.base + name for name in wanted)
        for name in wanted:
            _link(self.folder / name, there / (self.base + name))
