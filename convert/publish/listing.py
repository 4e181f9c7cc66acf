"""Which files of a bundle are published, and whether each is what was written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlxconv.runtime.bundle import MANIFEST, Bundle, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.weights import INDEX_FILE, WEIGHTS_STEM, weight_map
from mlxconv.runtime.hub.download import git_blob_id
from mlxconv.runtime.program.program import CONSTANTS_FILE, PROGRAM_FILE
from mlxconv.runtime.program.stored import load_program

from ..recipe.recipe import RECIPE_FILE
from ..source.checkpoint import open_component
from ..source.safetensors_io import read_header
from ..source.source_card import CARD_FILE, LICENCE_FILE
from ..store.writer import read_back
from ..verify.record import PARITY_FILE

PICTURE_FILE = "sample.png"
_ROOT_FILES = {
    MANIFEST,
    CARD_FILE,
    PARITY_FILE,
    PICTURE_FILE,
    "config.json",
    "model_index.json",
    "modular_model_index.json",
}
_TEXT_SUFFIXES = {".json", ".md", ".txt", ".toml", ".jinja", ""}
_PIECE = 4 << 20


@dataclass(frozen=True)
class LocalFile:
    """One file to publish: its path in the repository, bytes, and SHA-256."""

    path: str
    size: int
    sha256: str
    root: Path

    def git_sha1(self) -> str:
        """Its id as a git blob: what the Hub lists for files that are not in its large storage."""
        return git_blob_id((self.root / self.path).read_bytes())


@dataclass
class Listing:
    """The files to publish by path, and those in the folder that are not the bundle's."""

    files: dict[str, LocalFile] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def list_bundle(bundle: Bundle, token: str | None = None) -> Listing:
    """Every file of a bundle, after reading it back: names, headers, sizes, checksums.

    Files that are no part of the bundle are left out and listed. MlxconvError for a part that is
    missing, damaged or a symbolic link, and for a text that holds the `token`.
    """
    wanted = set(_root_files(bundle))
    for name in bundle.manifest["components"]:
        wanted |= _converted(bundle.path / name)
    for name in bundle.manifest.get("copied", []):
        wanted |= _copied(bundle.path / name)
    for name in _other_folders(bundle):
        wanted |= _plain(bundle.path / name)
    names = sorted(path.relative_to(bundle.path).as_posix() for path in wanted)
    there = {path.relative_to(bundle.path).as_posix() for path in _all_files(bundle.path)}
    files = {name: _checked(bundle.path, name, token) for name in names}
    return Listing(files, sorted(there - files.keys()))


def _all_files(folder: Path) -> Iterator[Path]:
    """Files and links below a folder; links to folders are not followed."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in (*files, *links))


def _root_files(bundle: Bundle) -> Iterator[Path]:
    for path in bundle.path.iterdir():
        if path.name in _ROOT_FILES or (LICENCE_FILE.fullmatch(path.name) and not path.is_dir()):
            yield path


def _converted(folder: Path) -> set[Path]:
    """The files of a converted component, its weights compared with the index's checksums."""
    if not folder.is_dir():
        raise MlxconvError(f"{folder}: is listed in {MANIFEST} and not there; convert again")
    read_back(folder, WEIGHTS_STEM)
    read_json(folder / "config.json")
    names = {INDEX_FILE, *weight_map(folder).values()}
    for name in (PROGRAM_FILE, CONSTANTS_FILE, RECIPE_FILE):
        if (folder / name).is_file():
            names.add(name)
    if PROGRAM_FILE in names:
        needs_constants = bool(load_program(folder / PROGRAM_FILE).constants)
        if needs_constants and CONSTANTS_FILE not in names:
            raise MlxconvError(f"{folder / CONSTANTS_FILE}: is missing; convert again")
    if CONSTANTS_FILE in names:
        read_header(folder / CONSTANTS_FILE)
    return {folder / name for name in names} | set(folder.glob("[!.]*.json"))


def _copied(folder: Path) -> set[Path]:
    """The files of a component that was copied: those that its index and configuration name."""
    if not folder.is_dir():
        raise MlxconvError(f"{folder}: is listed in {MANIFEST} and not there; convert again")
    return {*open_component(folder).files, *_plain(folder, suffixes=_TEXT_SUFFIXES)}


def _other_folders(bundle: Bundle) -> list[str]:
    """Folders that the pipeline's index names and that hold no model: tokenizers, scheduler."""
    known = {*bundle.manifest["components"], *bundle.manifest.get("copied", [])}
    named: set[str] = set()
    for index in ("model_index.json", "modular_model_index.json"):
        if (bundle.path / index).is_file():
            entries = read_json(bundle.path / index)
            named |= {k for k, v in entries.items() if isinstance(v, list) and any(v)}
    return sorted(n for n in named - known if "/" not in n and (bundle.path / n).is_dir())


def _is_junk(parts: tuple[str, ...]) -> bool:
    return any(p.startswith((".", "__")) for p in parts) or parts[-1].endswith((".part", ".tmp"))


def left_out_reason(path: str) -> str:
    """Why a file in the folder is not published."""
    if _is_junk(Path(path).parts):
        return "hidden or unfinished"
    return f"no part of the bundle, as {MANIFEST} and model_index.json name none that reads it"


def _plain(folder: Path, suffixes: set[str] | None = None) -> set[Path]:
    """Files below a folder that are neither hidden, nor unfinished, nor Python's own."""
    found = set()
    for path in _all_files(folder):
        parts = path.relative_to(folder).parts
        if not _is_junk(parts) and (suffixes is None or path.suffix in suffixes):
            found.add(path)
    return found


def _checked(root: Path, relative: str, token: str | None) -> LocalFile:
    path = root / relative
    chain = [*reversed(path.parents[: relative.count("/")]), path]
    link = next((place for place in chain if place.is_symlink()), None)
    if link is not None:
        raise MlxconvError(
            f"{link}: is a symbolic link, and what it points to may not be yours to publish; copy "
            "what it points to into the bundle"
        )
    digest, secret, tail = hashlib.sha256(), (token or "").encode(), b""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            if secret and secret in tail + piece:
                raise MlxconvError(f"{path}: holds your Hub token; take it out, and make a new one")
            digest.update(piece)
            tail = piece[-len(secret) :]  # a token may lie across two pieces
    return LocalFile(relative, path.stat().st_size, digest.hexdigest(), root)
