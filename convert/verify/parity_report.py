"""What `verify` found: its rows, their verdict, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..report import describe_unread
from .metrics import Row, decibels

if TYPE_CHECKING:
    from .pictures import Compared


@dataclass
class ParityReport:
    """All rows, for each component that failed where its error begins, and pipelines' results."""

    bundle: str
    source: str
    seed: int
    tiers: list[Row] = field(default_factory=list)
    begins_at: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sizes: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # of each entry
    unused: dict[str, list[str]] = field(default_factory=dict)  # read by nothing, by component
    generated: dict[str, Any] | None = None  # how pictures were asked for
    compared: list[Compared] = field(default_factory=list, repr=False)
    judged: bool = True  # two bundles without a threshold are not

    def __repr__(self) -> str:
        verdict = "PASSED" if self.passed else "FAILED"
        return f"<ParityReport {self.bundle}: {verdict}, {len(self.tiers)} rows>"

    @property
    def passed(self) -> bool:
        """Whether every row passed; a report without rows did not."""
        return bool(self.tiers) and all(row.passed for row in self.tiers)

    def as_json(self) -> dict[str, Any]:
        """What `verify --json` prints; numbers that are not finite become null."""
        rows = [{k: _json_number(v) for k, v in asdict(row).items()} for row in self.tiers]
        return {
            "passed": self.passed,
            "bundle": self.bundle,
            "source": self.source,
            "seed": self.seed,
            "tiers": rows,
            "begins_at": self.begins_at,
            "notes": self.notes,
            "sizes": self.sizes,
            "unused": self.unused,
            "generated": self.generated,
        }

    def as_text(self) -> str:
        """A table for people; the verdict is its last line."""
        part = max([16, *(len(row.component) + 1 for row in self.tiers)])
        wide = max([34, *(len(row.name) + 1 for row in self.tiers)])
        head = f"{'component':<{part}}{'tier':<11}{'name':<{wide}}"
        head += f"{'rel_l2':>10}{'max_rel':>10}{'dB':>7}"
        lines = [f"{head}{'limit':>10}  result"]
        for row in self.tiers:
            limit = "" if row.threshold is None else f"{row.threshold:.1e}"
            psnr = "" if row.psnr_db is None else f"PSNR {decibels(row.psnr_db, ' dB')}"
            verdict = "FAILED" if not row.passed else "ok" if row.judged and self.judged else ""
            result = "  ".join(filter(None, (verdict, psnr, row.note)))
            lines.append(
                f"{row.component:<{part}}{row.tier:<11}{row.name:<{wide}}{row.rel_l2:>10.2e}"
                f"{row.max_rel:>10.2e}{decibels(row.sqnr_db):>7}{limit:>10}  {result}"
            )
        lines += self.notes
        lines += [describe_unread(unread, f"{name}: ") for name, unread in self.unused.items()]
        lines += [f"{name}: the error begins at {at}" for name, at in self.begins_at.items()]
        verdict = "PASSED" if self.passed else "FAILED"
        lines.append(verdict if self.judged else "compared; --threshold REL_L2 judges")
        return "\n".join(lines)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
