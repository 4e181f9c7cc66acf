"""The licence of a conversion: copied from its source, never guessed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlxconv.runtime.errors import MlxconvError

from ..source.source_card import LICENCE_FILE, Origin

NOTICE_FILE = "NOTICE-conversion.txt"

_OTHER = "other"
_NON_COMMERCIAL = re.compile(r"(^|[-_ ])nc([-_ ]|$)|non-?commercial|research-only", re.IGNORECASE)
_LIMITS_COMMERCE = re.compile(r"non-?commercial", re.IGNORECASE)
# Licences, by words of their ids and names, whose terms bind whoever passes a conversion on.
_OBLIGATIONS = (
    (
        _NON_COMMERCIAL,
        "This licence is **non-commercial**. The conversion is a derivative of the source and "
        "stays under that licence: use it, and pass it on, only as the licence allows, with the "
        "licence text and the notices in this repository.",
    ),
    (
        re.compile(r"rail", re.IGNORECASE),
        "The licence's **use restrictions** go with every copy: they hold for this conversion, and "
        "whoever passes it on has to pass them on.",
    ),
    (
        re.compile(r"gpl|(^|-)sa([-_ ]|$)", re.IGNORECASE),
        "The licence is **share-alike**: what is made from this conversion has to be under the "
        "same licence.",
    ),
)
_COMMERCE_NOTE = (
    "The licence text sets **conditions on commercial use**: read it before using this conversion "
    "commercially. They hold for the conversion as for the source."
)
# A notice that a licence demands is quoted in it: “X is licensed under …, Copyright © …”.
_QUOTED = re.compile(r"“([^“”]{30,900})”|\"([^\"]{30,900})\"")
_ATTRIBUTION = re.compile(r"licensed (by|under)", re.IGNORECASE)


@dataclass(frozen=True)
class Given:
    """What the user says about the licence, for a source that does not say it."""

    id: str | None = None
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Licence:
    """A licence as the Hub's metadata has it; `files` are the texts that go along, by name."""

    id: str | list[str]
    name: str | None
    link: str | None
    copied: bool
    files: tuple[str, ...] = ()
    obligations: tuple[str, ...] = ()
    attributions: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name for people."""
        ids = ", ".join(self.id) if isinstance(self.id, list) else self.id
        return (self.name or ids) if ids == _OTHER else ids

    def metadata(self) -> dict[str, Any]:
        """Its entries of a card's front matter."""
        entries = {"license": self.id, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in entries.items() if value}


def licence_files(folder: Path) -> list[str]:
    """Names of the licence and notice files at a folder's root, without our own notice."""
    return sorted(
        p.name
        for p in folder.iterdir()
        if p.is_file() and LICENCE_FILE.fullmatch(p.name) and p.name != NOTICE_FILE
    )


def licence_of(
    facts: Mapping[str, Any], origin: Origin, given: Given, folder: Path | None
) -> Licence:
    """The licence to publish under.

    `facts` are the source card's (`copied_facts`), `folder` holds the licence texts that go along
    (None before they are downloaded). MlxconvError when the source states no licence and none is
    given, when what is given contradicts it, or when a licence without an id has no name or text.
    """
    files = licence_files(folder) if folder else []
    chosen = facts.get("license") or given.id
    if not chosen:
        raise MlxconvError(
            f"{origin.label}: its card states no licence, so its conversion cannot be published; "
            "ask its author, or give the licence it is under by --license ID (such as apache-2.0)"
        )
    for option, ours, theirs in (
        ("--license", given.id, facts.get("license")),
        ("--license-name", given.name, facts.get("license_name")),
        ("--license-link", given.link, facts.get("license_link")),
    ):
        if ours and theirs and ours != theirs:
            raise MlxconvError(
                f"{option} {ours}: the card of {origin.label} says {theirs}; a conversion is under "
                "its source's licence: leave the option out"
            )
    name = facts.get("license_name") or given.name
    link = _absolute(facts.get("license_link") or given.link, origin, files)
    if chosen == _OTHER:
        _check_other(origin, name, link, files, known=folder is not None)
    texts = _texts(folder, files)
    words = [*(chosen if isinstance(chosen, list) else [chosen]), name or ""]
    return Licence(
        chosen,
        name,
        link,
        bool(facts.get("license")),
        tuple(files),
        _obligations(words, texts if chosen == _OTHER else []),
        _attributions(texts),
    )


def _absolute(link: str | None, origin: Origin, files: Sequence[str]) -> str | None:
    """A link that holds in another repository; a file that goes along keeps its name.

    Characters that would end a link in Markdown or HTML are percent-encoded.
    """
    if link is None:
        return None
    if re.match(r"https?://", link, re.IGNORECASE):
        return _quoted(link)
    if re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.IGNORECASE):
        raise MlxconvError(
            f"license_link {link}: is neither an http(s) address nor a file's name; correct it in "
            f"the card of {origin.label}, or in the card of a copy on this disk, and convert that"
        )
    path = link.removeprefix("./").lstrip("/")
    return origin.file_url(_quoted(path)) or (_quoted(path) if path in files else None)


def _quoted(link: str) -> str:
    """Percent-encode what would end a link in Markdown or HTML."""
    return quote(link, safe="%/:?#@!$&*+,;=~")


def _check_other(
    origin: Origin, name: str | None, link: str | None, files: Sequence[str], known: bool
) -> None:
    if not name:
        raise MlxconvError(
            f"{origin.label}: its card says `license: other` without a license_name; give "
            "--license-name NAME"
        )
    if known and not link and not files:
        raise MlxconvError(
            f"{origin.label}: is under {name}, but neither its text (a LICENSE file) nor a link to "
            "it came along; put the text beside the weights, or give --license-link URL"
        )


def _texts(folder: Path | None, files: Sequence[str]) -> list[str]:
    return (
        [(folder / n).read_text(encoding="utf-8", errors="replace") for n in files]
        if folder
        else []
    )


def _obligations(words: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
    """Sentences for people; the text is asked only where the licence has no id of its own."""
    sentences = [text for pattern, text in _OBLIGATIONS if any(pattern.search(w) for w in words)]
    if not sentences and any(_LIMITS_COMMERCE.search(text) for text in texts):
        sentences = [_COMMERCE_NOTE]
    return tuple(sentences)


def _attributions(texts: Sequence[str]) -> tuple[str, ...]:
    """Notices that the licence texts quote, for copies to carry."""
    quoted = [" ".join((a or b).split()) for text in texts for a, b in _QUOTED.findall(text)]
    return tuple(dict.fromkeys(q for q in quoted if _ATTRIBUTION.search(q)))


def notice_text(repo: str, origin: Origin, licence: Licence, how: str) -> str:
    """The statement that the files were changed, by whom and how, and the notices to carry."""
    at = f" at commit {origin.commit}" if origin.commit else ""
    where = f"\n{origin.url}" if origin.url else ""
    lines = [
        f"{repo}",
        "",
        f"This repository holds a modified version of {origin.label}{at}.{where}",
        f"Changes: {how}. The model itself was not trained further.",
        f"It was made and published by {repo.partition('/')[0]}, not by the authors of "
        f"{origin.label}, who have not",
        "endorsed it. It is under the licence of the original: "
        f"{licence.label}{f' ({licence.link})' if licence.link else ''}.",
    ]
    if licence.files:
        lines += ["", f"Licence and notices of the original: {', '.join(licence.files)}."]
    for quoted in licence.attributions:
        lines += ["", quoted]
    return "\n".join(lines) + "\n"
