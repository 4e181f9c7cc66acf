"""The parity measured on a bundle, kept in it and bound to its very files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxconv.runtime.bundle import Bundle, fingerprint, read_json
from mlxconv.runtime.files import whole
from mlxconv.runtime.machine import described

from .metrics import Row
from .parity_report import ParityReport

PARITY_FILE = "parity.json"
_FORMAT, _VERSION = "mlxconv-parity", 1


@dataclass(frozen=True)
class Measured:
    """What `verify` found: its rows (as in `verify --json`), on what, when, and whether all passed.

    `rows` is None where nothing was measured on these files; `why` then says so.
    """

    rows: list[dict[str, Any]] | None
    passed: bool = False
    machine: str = ""
    date: str = ""
    seed: int = 0
    why: str = ""


def save_parity(bundle: Bundle, report: ParityReport, source: str) -> Path:
    """Write the report into the bundle. `source` names what it was compared with, for people."""
    machine = described()
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": fingerprint(bundle, bundle.manifest["components"]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine,
        **report.as_json(),
        "bundle": bundle.path.name,
        "source": source,
    }
    file = bundle.path / PARITY_FILE
    write_whole(file, json.dumps(data, indent=1) + "\n")
    return file


def read_parity(bundle: Bundle) -> Measured:
    """What was measured on this bundle; figures of other files are not figures of these."""
    file = bundle.path / PARITY_FILE
    if not file.is_file():
        return Measured(None, why="no parity was measured on these files")
    data = read_json(file)
    if data.get("format") != _FORMAT or data.get("fingerprint") != fingerprint(
        bundle, bundle.manifest["components"]
    ):
        return Measured(None, why=f"the figures of {PARITY_FILE} are of other files than these")
    machine = data["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    where = f"{machine['chip']}, {machine['system']}, MLX on the {machine['device']}; {versions}"
    return Measured(data["tiers"], bool(data["passed"]), where, data["date"], data["seed"])


def saved_report(bundle: Bundle) -> ParityReport | None:
    """The report that is kept in the bundle, if it is of these files and all passed."""
    measured = read_parity(bundle)
    if not measured.passed or measured.rows is None:
        return None
    rows = [Row(**row) for row in measured.rows]
    return ParityReport(str(bundle.path), str(bundle.manifest["source"]), measured.seed, rows)


def covered(measured: Measured, components: Iterable[str]) -> bool:
    """Whether every one of these components has a figure."""
    return measured.rows is not None and {r["component"] for r in measured.rows} >= {*components}


def write_whole(file: Path, text: str) -> None:
    """The file appears whole or not at all."""
    with whole(file) as partial:
        partial.write_text(text, encoding="utf-8")
