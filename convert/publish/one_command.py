"""`mlxconv convert --upload-repo`: check, convert, verify, publish; go on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxconv.runtime.bundle import MANIFEST, open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.hub.names import hub_name

from ..inspection import inspect
from ..report import ComponentReport, ConvertReport
from ..source.source_card import Origin, origin_of, published_root, read_source_card
from ..store.bundle_folder import check_target
from ..verify.verify import measure
from .licence import licence_of
from .preflight import Destination, prepare
from .publish import PublishOptions, Say, facts_of, looked_at, publish, remote_facts


def convert_and_publish(
    source: str,
    out: Path,
    q: str,
    publishing: PublishOptions,
    *,
    command: str,
    say: Say,
    show: Say,
    **options: Any,
) -> tuple[dict[str, Any], bool]:
    """What `convert --json` prints, with `verify` and `upload` in it, and whether all passed.

    All that can refuse the upload is asked first. A bundle that this very `command` wrote is not
    converted again, and figures of its files are not measured again. `show` gets each report as it
    is made. `options` are those of `convert`.
    """
    dry_run = options["dry_run"]
    finished = not dry_run and written_by(out, command)
    if not (dry_run or finished):
        check_target(out, options["force"])
    destination, not_checked = check_before_converting(
        source, options["revision"], publishing, dry_run=dry_run
    )
    if not_checked:
        say(f"not checked: {not_checked}")
    if finished:
        say(f"{out}: was converted by this same command; going on from there")
        report = finished_report(out)
    else:
        from ..conversion import convert

        report = convert(source, out, q, command=command, **options)
    if report.warnings:
        say(report.notes())
    show(report.as_text())
    data = report.as_json()
    if dry_run:
        return data, True
    if not options["low_disk"]:  # that keeps nothing to compare with
        chosen = {name: options[name] for name in ("recipe", "model_class")}
        parity = measure(out, source, known=True, **chosen)
        show(parity.as_text())
        data["verify"] = parity.as_json()
        if not parity.passed:
            return data, False
    sent = publish(out, publishing, destination, say=say)
    show(sent.as_text())
    return {**data, "upload": sent.as_json()}, True


def check_before_converting(
    source: str, revision: str | None, publishing: PublishOptions, *, dry_run: bool = False
) -> tuple[Destination | None, str]:
    """Ask for the licence and prepare the repository: nothing that costs more than seconds.

    With `dry_run` the repository is only looked at: `looked_at`.
    """
    name = hub_name(source)
    texts: Path | None = None
    if name is not None:
        facts = remote_facts(name.repo, name.at(revision).revision)
        origin = Origin(name.repo, name.repo)
    else:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise MlxconvError(f"{source}: no such folder; check the path, or give ORG/NAME")
        texts = published_root(folder)
        origin = origin_of(str(folder.absolute()), revision, publishing.base_model)
        facts = facts_of(read_source_card(folder), origin)
    licence = licence_of(facts, origin, publishing.given, texts)
    if dry_run:
        return looked_at(publishing)
    ready = prepare(
        publishing.repo, private=publishing.private, revision=publishing.revision, licence=licence
    )
    return ready, ""


def written_by(out: Path, command: str) -> bool:
    """Whether a whole bundle at `out` came from this very command: then it need not run again."""
    if not (out.expanduser() / MANIFEST).is_file():
        return False
    return bool(open_bundle(out).manifest.get("command") == command)


def finished_report(path: Path) -> ConvertReport:
    """What `convert` says of a bundle that it wrote earlier, from its manifest and headers."""
    manifest, seen = open_bundle(path).manifest, inspect(path)
    parts = {}
    for name, held in seen.components.items():
        part = manifest["components"].get(name, {})
        parts[name] = ComponentReport(
            held.class_name,
            held.status,
            held.parameters,
            part.get("source_bytes", held.bytes),
            held.bytes,
            held.bits_per_weight,
            held.quantized,
            unused=part.get("unused", []),
            program=held.program,
            note="written before",
        )
    main = max(parts, key=lambda name: parts[name].parameters)
    q = str(manifest["components"].get(main, {}).get("q", ""))
    source, revision = str(manifest["source"]), manifest.get("revision")
    return ConvertReport(str(path), source, revision, q, 0.0, 0, parts)
