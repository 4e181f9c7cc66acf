"""Bundles on the Hub: the manifest first, then only the components that are used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import MlxconvError
from .download import Remote, open_remote
from .names import HubName

_MANIFEST = "mlxconv.json"
# What is fetched with the manifest: configurations, tokenizers, schedulers, programs, licences.
_SMALL = (".json", ".txt", ".model", ".toml", ".jinja", ".md", "LICENSE", "NOTICE")


def is_hub_bundle(remote: Remote) -> bool:
    """Whether a repository, or the folder of it that is meant, is a bundle."""
    folder = remote.name.folder
    return (f"{folder}/{_MANIFEST}" if folder else _MANIFEST) in remote.files


def open_hub_bundle(name: HubName) -> HubBundle:
    """MlxconvError when there is no such repository, or it is no bundle."""
    return HubBundle(open_remote(name, progress=True))


class HubBundle:
    """A bundle's small files in the cache, and its components when they are asked for."""

    def __init__(self, remote: Remote) -> None:
        name = remote.name
        self.remote = remote
        self._base = f"{name.folder}/" if name.folder else ""
        if not is_hub_bundle(remote):
            raise MlxconvError(
                f"{name}: is not a bundle (no {_MANIFEST} in it); give what `mlxconv convert` "
                "wrote, or convert it first"
            )
        self.path: Path = self.remote.fetch(self.small()) / self._base
        self._there: set[str] = set()

    def small(self) -> list[str]:
        """Paths of all files that are no weights."""
        inside = self.remote.within(self.remote.name.folder)
        return [path for path in inside if path.endswith(_SMALL)]

    def fetch(self, components: Iterable[str]) -> None:
        """Have all files of these components in the cache."""
        missing = [name for name in components if name not in self._there]
        files = [path for name in missing for path in self.remote.within(self._base + name)]
        if files:
            self.remote.fetch(files)
        self._there.update(missing)
