"""`mlxconv upload`, and the end of `mlxconv convert --upload-repo`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxconv.runtime.bundle import MANIFEST, Bundle, open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import format_bytes, whole, write_json
from mlxconv.runtime.hub.download import open_remote
from mlxconv.runtime.hub.errors import Unreachable
from mlxconv.runtime.hub.names import HubName

from ..source.source_card import (
    CARD_FILE,
    LICENCE_FILE,
    Origin,
    copied_facts,
    front_matter,
    origin_of,
)
from ..verify.record import PARITY_FILE, Measured, covered, read_parity, write_whole
from ..verify.verify import measure
from .card import MARK, make_card
from .card_facts import card_facts, read_sample
from .licence import NOTICE_FILE, Given, Licence, licence_of, notice_text
from .listing import PICTURE_FILE, Listing, left_out_reason, list_bundle
from .preflight import Destination, look, prepare
from .redaction import current_token, without_home, without_token
from .upload import Sent, send, state_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class PublishOptions:
    """How to publish.

    base_model: the source's repository, where the bundle does not name it. against: the source to
    verify against first, for the card.
    """

    repo: str
    private: bool = False
    revision: str | None = None
    given: Given = field(default_factory=Given)
    base_model: str | None = None
    picture: Path | None = None
    against: str | None = None


@dataclass(frozen=True)
class UploadReport:
    """What was published, or with `dry_run` what would be."""

    options: PublishOptions
    destination: Destination | None
    card: Path
    licence: Licence
    measured: Measured
    listing: Listing
    sent: Sent | None
    deleted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    not_checked: str = ""

    def as_json(self) -> dict[str, Any]:
        """What `upload --json` prints; sizes in bytes."""
        files = [{"path": f.path, "bytes": f.size} for f in self.listing.files.values()]
        sent = self.sent.files if self.sent else ()
        return {
            "repo": self.options.repo,
            "revision": self.options.revision or "main",
            "published": self.sent is not None,
            "dry_run": self.sent is None,
            "commit": self.sent.state.commit if self.sent else None,
            "url": self.destination.url if self.destination else None,
            "private": self.destination.private if self.destination else self.options.private,
            "license": self.licence.metadata(),
            "parity": None if self.measured.rows is None else self.measured.passed,
            "card": str(self.card),
            "bytes": self.listing.nbytes,
            "files": files,
            "changed": list(sent),
            "changed_bytes": sum(self.listing.files[path].size for path in sent),
            "deleted": list(self.deleted),
            "left_out": self.listing.left_out,
            "notes": list(self.notes),
            "not_checked": self.not_checked or None,
        }

    def as_text(self) -> str:
        """For people; the last line is the verdict."""
        data = self.as_json()
        lines = []
        if self.sent is None:
            lines += [f"{format_bytes(f['bytes']):>10}  {f['path']}" for f in data["files"]]
        lines += [f"    delete  {path}" for path in self.deleted]
        lines += [f"  left out  {path}: {left_out_reason(path)}" for path in self.listing.left_out]
        lines.append(f"card: {self.card}")
        total = f"{len(self.listing.files)} files, {format_bytes(self.listing.nbytes)}"
        if self.sent is None:
            there = "" if self.destination or self.not_checked else ", which would be created"
            lines.append(f"dry run, nothing was sent: {total} to {self.options.repo}{there}")
            if self.not_checked:
                lines.append(f"not checked: {self.not_checked}")
        else:
            changed = f"{len(data['changed'])} sent, {format_bytes(data['changed_bytes'])}"
            lines.append(f"{total}: every checksum on the Hub is that of the file sent; {changed}")
            lines.append(f"published: {data['url']} at commit {data['commit'][:12]}")
        return "\n".join(lines)


# ---- publishing ----------------------------------------------------------------------------------


def publish(
    path: Path,
    options: PublishOptions,
    destination: Destination | None = None,
    *,
    dry_run: bool = False,
    say: Say = lambda text: None,
) -> UploadReport:
    """Write the card, check the bundle's files, upload them and prove that they arrived.

    `destination` comes from `check_before_converting`, where that was called. MlxconvError says
    what is committed when it fails. A dry run without network checks what is on this disk, and
    reports what it could not.
    """
    bundle = open_bundle(path.expanduser().resolve())
    manifest = bundle.manifest
    base_model = options.base_model or manifest.get("base_model")
    origin = origin_of(str(manifest["source"]), manifest.get("revision"), base_model)
    facts: dict[str, Any] = manifest.get("source_card") or {}
    not_checked = ""
    try:
        facts = facts_of(facts, origin, bundle.path)
    except Unreachable:
        if not (dry_run and options.given.id):
            raise
    licence = licence_of(facts, origin, options.given, bundle.path)
    if destination is None and dry_run:
        destination, not_checked = looked_at(options)
    elif destination is None:
        destination = prepare(
            options.repo, private=options.private, revision=options.revision, licence=licence
        )
    if options.against is not None:
        say(measure(bundle.path, options.against).as_text())
    measured = _measured(bundle)
    origin = _ask_gated(origin, destination)
    notes = _notes(origin, licence, measured)
    for note in notes:
        say(note)
    keep = not (dry_run and options.base_model)
    with _publishable_manifest(bundle, origin, facts, keep=keep):
        card = _describe(bundle, options, origin, licence, measured)
        listing = list_bundle(bundle, current_token())
        if dry_run:
            sent, deleted = None, state_of(destination, listing).stale if destination else ()
        else:
            assert destination is not None
            sent = send(destination, listing, f"Upload {bundle.path.name} by mlxconv", say)
            deleted = sent.deleted
    return UploadReport(
        options, destination, card, licence, measured, listing, sent, deleted, notes, not_checked
    )


def looked_at(options: PublishOptions) -> tuple[Destination | None, str]:
    """The repository, for a dry run, and what cannot be known of it without network."""
    try:
        return look(options.repo, options.revision), ""
    except Unreachable as error:
        return None, (
            f"whether {options.repo} exists and may be written to, which of these files "
            f"it has, the token, the source's card and terms ({error})"
        )


def facts_of(facts: dict[str, Any], origin: Origin, bundle: Path | None = None) -> dict[str, Any]:
    """What the source's own folder states, or else its repository's card."""
    if facts or origin.repo is None:
        return facts
    return remote_facts(origin.repo, origin.commit, bundle)


def remote_facts(repo: str, revision: str | None, bundle: Path | None = None) -> dict[str, Any]:
    """`copied_facts` of a repository's card, {} where it has none; its licences into `bundle`."""
    remote = open_remote(HubName(repo, revision))
    texts = [path for path in remote.files if bundle and LICENCE_FILE.fullmatch(path)]
    wanted = [*texts, *([CARD_FILE] if CARD_FILE in remote.files else [])]
    if not wanted:
        return {}
    folder = remote.fetch(wanted)
    for name in texts:
        shutil.copyfile(folder / name, (bundle or folder) / name)
    if CARD_FILE not in wanted:
        return {}
    text = (folder / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    return copied_facts(front_matter(text, f"{repo}/{CARD_FILE}"))


def _measured(bundle: Bundle) -> Measured:
    measured = read_parity(bundle)
    if measured.rows is not None and not measured.passed:
        raise MlxconvError(
            f"{bundle.path}: did not pass `mlxconv verify`, as its {PARITY_FILE} says; it is not "
            "published"
        )
    if measured.rows is not None and not covered(measured, bundle.manifest["components"]):
        return Measured(None, why="not all of its components were measured")
    return measured


def _ask_gated(origin: Origin, destination: Destination | None) -> Origin:
    """Whether the source's repository is gated; unknown where the Hub does not say."""
    if origin.repo is None or destination is None:
        return origin
    try:
        gated = bool(destination.api.model_info(origin.repo).gated)
    except Exception:
        return origin
    return Origin(origin.label, origin.repo, origin.commit, gated)


def _notes(origin: Origin, licence: Licence, measured: Measured) -> tuple[str, ...]:
    """What to know before it is public."""
    notes = []
    if origin.gated:
        notes.append(
            f"note: {origin.label} is gated, this repository will not be; its terms hold here too"
        )
    notes += [f"note: {text.replace('**', '')}" for text in licence.obligations]
    if measured.rows is None:
        notes.append(
            f"note: the card says that parity was not measured: {measured.why}; "
            "`--against SOURCE` measures it"
        )
    if origin.repo is None:
        notes.append(
            f"note: the card names no base model because {origin.label} is a local folder; "
            "`--base-model NAMESPACE/NAME` names it"
        )
    return tuple(notes)


def _describe(
    bundle: Bundle, options: PublishOptions, origin: Origin, licence: Licence, measured: Measured
) -> Path:
    """Write what describes the bundle: picture, notice, card; returns the card's path.

    A card without our mark is the user's own and stays.
    """
    if options.picture is not None:
        read_sample(options.picture)
        shutil.copyfile(options.picture, bundle.path / PICTURE_FILE)
    facts = card_facts(options.repo, bundle, origin, licence, measured)
    quantized = sorted(n for n, held in facts.held.items() if held.quantized)
    how = "weights converted to the layout and precisions of MLX"
    how += f", {', '.join(quantized)} quantized" if quantized else ""
    write_whole(bundle.path / NOTICE_FILE, notice_text(options.repo, origin, licence, how))
    card = bundle.path / CARD_FILE
    if not card.is_file() or MARK in card.read_text(encoding="utf-8", errors="replace"):
        write_whole(card, make_card(facts))
    return card


@contextmanager
def _publishable_manifest(
    bundle: Bundle, origin: Origin, facts: dict[str, Any], *, keep: bool
) -> Iterator[None]:
    """Meanwhile the manifest is the one to publish, without local paths.

    Afterwards it names its own source again, which `verify` uses; with `keep` it has learned the
    base model and what the source's card states.
    """
    manifest = bundle.manifest
    before = dict(manifest)
    learned: dict[str, Any] = {"source_card": facts}
    if origin.repo is not None:
        learned["base_model"] = origin.repo
    source = origin_of(str(before["source"]), before.get("revision")).label
    manifest |= {**learned, "source": source}
    if before.get("command"):
        manifest["command"] = without_home(without_token(before["command"], current_token()))
    _write_manifest(bundle.path, manifest, before)
    try:
        yield
    finally:
        _write_manifest(bundle.path, {**before, **(learned if keep else {})}, manifest)


def _write_manifest(folder: Path, manifest: dict[str, Any], before: dict[str, Any]) -> None:
    if manifest != before:
        with whole(folder / MANIFEST) as partial:
            write_json(partial, manifest)
