"""What the source's own card says in its front matter, and where the source came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlxconv.runtime.errors import MlxconvError

HUB = "https://huggingface.co"
CARD_FILE = "README.md"
LICENCE_FILE = re.compile(r"(licen[sc]e|notice|copying).*", re.IGNORECASE)
# What is copied from the source's card; everything else there is about the source itself.
COPIED_KEYS = ("license", "license_name", "license_link", "pipeline_tag", "language")

_FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_HUB_NAME = re.compile(r"(?:hf://)?(\w[\w.-]*/\w[\w.-]*)(?:@[^/]+)?(?:/.*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CACHED = re.compile(r"(?:^|/)models--([\w.-]+--[\w.-]+)/snapshots/([0-9a-f]{40})(?=/|$)")


def front_matter(text: str, where: str) -> dict[str, Any]:
    """The YAML between the two `---` lines at a card's beginning; {} where there is none.

    MlxconvError when it is not YAML of keys and values.
    """
    found = _FRONT_MATTER.match(text)
    if found is None:
        return {}
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise MlxconvError(
            f"{where}: its front matter is not YAML ({first}); fix it, or remove the card and "
            "pass --license"
        ) from error
    if data is not None and not isinstance(data, dict):
        raise MlxconvError(f"{where}: its front matter is not a list of keys and values")
    return data or {}


def copied_facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a card's front matter that a conversion's card repeats, as text."""
    facts: dict[str, Any] = {}
    for key in COPIED_KEYS:
        value = metadata.get(key)
        if isinstance(value, list) and value:
            facts[key] = [str(item) for item in value]
        elif isinstance(value, str) and value.strip():
            facts[key] = value.strip()
    return facts


def read_source_card(folder: Path) -> dict[str, Any]:
    """`copied_facts` of a checkpoint's card; {} where it has none.

    A component's folder has no card of its own: then its pipeline's, one folder up, counts.
    """
    place = published_root(folder)
    if not (place / CARD_FILE).is_file():
        return {}
    text = (place / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    return copied_facts(front_matter(text, str(place / CARD_FILE)))


def published_root(folder: Path) -> Path:
    """The folder that a checkpoint was published as: itself, or the one of its pipeline."""
    above = folder.absolute().parent
    whole = any((above / n).is_file() for n in ("model_index.json", "modular_model_index.json"))
    in_cache = above.parent.name == "snapshots"
    return above if (whole or in_cache) and not (folder / CARD_FILE).is_file() else folder


@dataclass(frozen=True)
class Origin:
    """Where a bundle came from. `label` is for people: the repository, or the folder's name.

    `gated`: whether its repository asks for an agreement first; None where that is not known.
    """

    label: str
    repo: str | None = None
    commit: str | None = None
    gated: bool | None = None

    @property
    def url(self) -> str | None:
        """The source's page at the commit, or its page."""
        if self.repo is None:
            return None
        return f"{HUB}/{self.repo}" + (f"/tree/{self.commit}" if self.commit else "")

    def file_url(self, path: str) -> str | None:
        """The page of one of its files."""
        if self.repo is None:
            return None
        return f"{HUB}/{self.repo}/blob/{self.commit or 'main'}/{path}"


def origin_of(source: str, revision: str | None = None, base_model: str | None = None) -> Origin:
    """The origin for a manifest's `source` and `revision`.

    A Hub id beside the commit that was converted, or a folder of the Hub's cache
    (`models--NAMESPACE--NAME/snapshots/COMMIT`), tells the repository; for any other folder
    `base_model` does, if it is given.
    """
    commit = revision if revision and _COMMIT.fullmatch(revision) else None
    cached = _CACHED.search(source)
    if cached is not None:
        repo = cached[1].replace("--", "/")
        return Origin(repo, repo, commit or cached[2])
    named = _HUB_NAME.fullmatch(source)
    if commit and named is not None:
        return Origin(named[1], named[1], commit)
    if base_model is not None:
        if not _REPO.fullmatch(base_model):
            raise MlxconvError(f"--base-model {base_model}: expected NAMESPACE/NAME")
        return Origin(base_model, base_model, commit)
    return Origin(Path(source).name or source)
