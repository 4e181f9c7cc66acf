"""Names of Hub repositories: `org/name[@revision]`, `hf://...`, or the address of a page."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import MlxconvError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ID_AT = re.compile(_ID.pattern + "@")
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_KINDS = ("datasets", "spaces", "buckets", "collections", "papers")
_EXPECTED = "expected ORG/NAME[@REVISION], hf://ORG/NAME[@REVISION][/FOLDER] or the URL of its page"


@dataclass(frozen=True)
class HubName:
    """A model repository, at a revision (None: its main branch), and a folder in it ("": all)."""

    repo: str
    revision: str | None = None
    folder: str = ""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{at}" + (f"/{self.folder}" if self.folder else "")

    def at(self, revision: str | None) -> HubName:
        """The same at `--revision`; MlxconvError when the name says another."""
        if revision is None or revision == self.revision:
            return self
        if self.revision is not None:
            raise MlxconvError(
                f"{self}: has revision {self.revision!r}, but --revision is {revision!r}; give "
                "only one"
            )
        return replace(self, revision=revision)


def hub_name(source: str | Path) -> HubName | None:
    """The repository that is meant, or None where `source` is a path.

    A path that exists always wins; `Path` objects and strings that begin with `.`, `/` or `~`, or
    have more than one slash and no revision, are never repositories. MlxconvError for addresses of
    other things.
    """
    if isinstance(source, Path):
        return None
    if source.startswith("hf://"):
        return _from_uri(source)
    if re.match(r"https?://", source):
        return _from_address(source)
    at = _ID_AT.match(source)
    if not (at or _ID.fullmatch(source)) or Path(source).exists():
        return None
    if Path(source).parent.is_dir():
        raise MlxconvError(
            f"{source}: no such folder in {Path(source).parent}; for the Hub repository of that "
            f"name use hf://{source}"
        )
    return _from_uri(f"hf://{source}") if at else _checked(source, HubName(source))


def _from_uri(source: str) -> HubName:
    rest = source.removeprefix("hf://").strip("/").removeprefix("models/")
    parts = rest.split("/")
    if parts[0] in _OTHER_KINDS:
        raise MlxconvError(f"{source}: is not a model repository; {_EXPECTED}")
    if len(parts) < 2:
        raise MlxconvError(f"{source}: {_EXPECTED}")
    name, _, revision = parts[1].partition("@")
    found = HubName(f"{parts[0]}/{name}", unquote(revision) or None, "/".join(parts[2:]))
    return _checked(source, found)


def _from_address(source: str) -> HubName:
    address = urlsplit(source)
    own = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    if address.netloc not in (*_HOSTS, own):
        raise MlxconvError(f"{source}: {address.netloc} is not the Hub; {_EXPECTED}")
    parts = [unquote(part) for part in address.path.strip("/").split("/")]
    if len(parts) < 2 or parts[0] in _OTHER_KINDS:
        raise MlxconvError(f"{source}: is not a model's page; {_EXPECTED}")
    repo, page, rest = "/".join(parts[:2]), parts[2:3], parts[3:]
    if page and (page[0] not in ("tree", "commit") or not rest):
        raise MlxconvError(
            f"{source}: is a page about {repo}; give https://{address.netloc}/{repo}"
        )
    folder = "/".join(rest[1:]) if page == ["tree"] else ""
    return _checked(source, HubName(repo, rest[0] if rest else None, folder))


def _checked(source: str, name: HubName) -> HubName:
    """The Hub's own rules for ids, and no way out of the folder."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name.repo)
    except HFValidationError as error:
        raise MlxconvError(f"{source}: {error}; {_EXPECTED}") from error
    outside = name.folder and any(part in ("", ".", "..") for part in name.folder.split("/"))
    if outside or not _ID.fullmatch(name.repo):
        raise MlxconvError(f"{source}: {_EXPECTED}")
    return name
