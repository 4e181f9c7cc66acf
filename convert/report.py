"""What a conversion did, as data (the CLI's JSON) and as text."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from mlxconv.runtime.files import counted, format_bytes


@dataclass
class ComponentReport:
    """One component. `kept` lists what did not get the precision asked, each with the reason.

    `linear_quantized`: share of the weights of linear layers that are quantized; None where no
    quantization was asked for, or there are none.
    """

    class_name: str
    status: str  # "converted" | "copied"
    parameters: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bits_per_weight: float = 0.0
    quantized: int = 0
    linear_quantized: float | None = None
    kept: list[dict[str, str]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    not_finite: dict[str, int] = field(default_factory=dict)
    program: dict[str, Any] | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The component's part of `convert --json`."""
        return {
            "class": self.class_name,
            "status": self.status,
            "parameters": self.parameters,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "quantized": self.quantized,
            "linear_quantized": self.linear_quantized,
            "kept": self.kept,
            "unused": self.unused,
            "not_finite": self.not_finite,
            "program": self.program,
            "note": self.note,
        }


@dataclass
class ConvertReport:
    """A whole conversion. Sizes in bytes, time in seconds of wall clock. `notes`: its warnings,
    which are no result: on stderr.

    `download`: the weights of a repository of the Hub: files, bytes, to_fetch (what the cache did
    not have), free, cache. `next_steps`: commands for the bundle; none after a dry run.
    """

    bundle: str
    source: str
    revision: str | None
    q: str
    seconds: float
    peak_rss_bytes: int
    components: dict[str, ComponentReport]
    warnings: list[str] = field(default_factory=list)
    download: dict[str, Any] | None = None
    dry_run: bool = False
    next_steps: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        parts = self.components.values()
        size = format_bytes(sum(part.bytes_out for part in parts))
        return f"<ConvertReport {self.bundle}: {self.q}, {len(parts)} components, {size}>"

    def as_json(self) -> dict[str, Any]:
        """What `convert --json` prints."""
        return {
            "bundle": self.bundle,
            "source": self.source,
            "revision": self.revision,
            "q": self.q,
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
            "components": {name: c.as_json() for name, c in self.components.items()},
            "warnings": self.warnings,
            "download": self.download,
            "dry_run": self.dry_run,
            "next_steps": self.next_steps,
        }

    def notes(self) -> str:
        """The warnings, one a line."""
        return "\n".join(f"warning: {text}" for text in self.warnings)

    def as_text(self) -> str:
        """A table for people, and what was left as it was, grouped by reason."""
        lines = [
            f"{'component':<18}{'class':<32}{'params':>10}{'in':>10}{'out':>10}{'bits':>7}  program"
        ]
        for name, part in self.components.items():
            lines.append(_row(name, part))
        for name, part in self.components.items():
            lines += [f"{name}: {text}" for text in _notes(part)]
        if self.download is not None:
            lines.append(_download_line(self.source, self.revision, self.download))
        peak = format_bytes(self.peak_rss_bytes)
        lines.append(f"{self.bundle}: {self.seconds:.1f} s, peak memory {peak}")
        if self.dry_run:
            size = format_bytes(sum(part.bytes_out for part in self.components.values()))
            lines.append(f"dry run: nothing was written; {size} of weights would be")
        if self.next_steps:
            lines += ["next:", *(f"  {step}" for step in self.next_steps)]
        return "\n".join(lines)


def grouped_kept(kept: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """`ComponentReport.kept` by reason and dtype, for the manifest: numbers in module names as `*`,
    so that a model's blocks are one entry."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for item in kept:
        why, dtype = item["why"], item["dtype"]
        reason = "recipe keeps" if why.startswith("recipe keeps") else why
        group = groups.setdefault(
            (reason, dtype), {"why": reason, "dtype": dtype, "tensors": 0, "modules": []}
        )
        group["tensors"] += 1
        module = re.sub(r"\d+", "*", item["name"].removesuffix(".weight").removesuffix(".bias"))
        if module not in group["modules"]:
            group["modules"].append(module)
    return list(groups.values())


def _download_line(source: str, revision: str | None, download: dict[str, Any]) -> str:
    fits = "" if download["to_fetch"] <= download["free"] else ", which is NOT enough"
    return (
        f"{source}@{(revision or '')[:7]}: {format_bytes(download['bytes'])} of weights in "
        f"{download['files']} files, {format_bytes(download['to_fetch'])} to download; "
        f"{format_bytes(download['free'])} free in {download['cache']}{fits}"
    )


def human_count(count: float) -> str:
    """1234567 -> 1.2M."""
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.0f}{unit}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.2f}B"


def _row(name: str, part: ComponentReport) -> str:
    program = part.note or part.status
    if part.program is not None:
        program = ", ".join(counted(part.program[f"{what}s"], what) for what in ("node", "block"))
    bits = f"{part.bits_per_weight:.2f}" if part.bits_per_weight else "-"
    return (
        f"{name:<18}{part.class_name:<32}{human_count(part.parameters):>10}"
        f"{format_bytes(part.bytes_in):>10}{format_bytes(part.bytes_out):>10}{bits:>7}  {program}"
    )


def _notes(part: ComponentReport) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for item in part.kept:
        reasons.setdefault(f"{item['dtype']}: {item['why']}", []).append(item["name"])
    notes = [_listing(reason, names) for reason, names in reasons.items()]
    if part.linear_quantized is not None and part.linear_quantized < 0.5:
        share = f"only {100 * part.linear_quantized:.0f} % of the linear weights are quantized"
        notes.insert(0, click.style(f"{share}; the rest is listed below", fg="red"))
    if part.unused:
        notes.append(describe_unread(part.unused))
    if part.not_finite:
        counted = [f"{name} ({count})" for name, count in part.not_finite.items()]
        notes.append(_listing("NaN or infinite values", counted))
    return notes


def describe_unread(names: list[str], where: str = "") -> str:
    """`3 tensors of the checkpoint are read by nothing: a, b, c`."""
    are = "tensor of the checkpoint is" if len(names) == 1 else "tensors of the checkpoint are"
    return _listing(f"{where}{len(names)} {are} read by nothing", names)


def _listing(reason: str, names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{reason}: {', '.join(names[:shown])}{more}"
