"""`bench --ablate`: what the field argues about, one change a row, measured side by side.

A round runs every row once, each in a process of its own; ratios are to the same round's first row,
so that a machine that slows down slows both.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bench import (
    Figures,
    Settings,
    component_facts,
    describe,
    figures,
    machine_line,
    named,
    repetition,
    with_component,
)
from .bench_worker import Job
from .errors import MlxconvError
from .program import Program
from .unfusing import table_inputs, uses

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """A question, the way it is answered by default, and another; `change` is to the job."""

    question: str
    default: str
    variant: str
    change: Mapping[str, Any]


ROWS = (
    Row("evaluate", "each step", "every 5 steps", {"evaluate_every": 5}),
    Row("evaluate", "each step", "at the end", {"evaluate_every": 0}),
    Row("clear cache", "never", "each step", {"clear_cache_every": 1}),
    Row("clear cache", "never", "every 10 steps", {"clear_cache_every": 10}),
    Row("scalars", "rows of one table, compiled", "Python numbers", {"scalars": "numbers"}),
    Row("scalars", "rows of one table, compiled", "arrays made inside", {"scalars": "inside"}),
    Row("scalars", "rows of one table, compiled", "arrays made outside", {"scalars": "outside"}),
    Row("compile", "whole step", "blocks", {"compile": "block"}),
    Row("compile", "whole step", "elementwise", {"compile": "off", "change": "elementwise"}),
    Row("compile", "whole step", "off", {"compile": "off"}),
    Row("attention", "mx.fast", "manual", {"change": "attention"}),
    Row("RMSNorm", "mx.fast", "manual", {"change": "rms_norm"}),
    Row("modulated norm", "mx.fast.layer_norm", "manual", {"change": "modulated_norm"}),
    Row("rotary", "in pairs", "as diffusers writes it", {"change": "rotary"}),
    Row("q, k, v", "one product", "separate", {"change": "linears"}),
    Row("rotary tables", "before the loop", "at each step", {"fold": False}),
    Row("stages", "staged", "whole entry each step", {"staged": False}),
    Row("guidance", "none", "both in one batch", {"guidance": "batched"}),
    Row("guidance", "none", "one after the other", {"guidance": "sequential"}),
)


@dataclass(frozen=True)
class Measured:
    """A row's figures; `ratio` of its step to that of the defaults.

    `rel_l2`: of the latents after the last step; None where they are not of one shape.
    """

    row: Row
    figures: Figures
    ratio: float
    cpu_ratio: float
    rel_l2: float | None

    def as_json(self) -> dict[str, Any]:
        facts = {k: v for k, v in asdict(self.row).items() if k != "change"}
        ratios = {"ratio": self.ratio, "cpu_ratio": self.cpu_ratio, "rel_l2": self.rel_l2}
        return {**facts, "change": dict(self.row.change), **named(self.figures), **ratios}


@dataclass(frozen=True)
class AblationReport:
    """The table; `left_out` says which rows this program has nothing for, and why."""

    settings: Settings
    about: dict[str, Any]
    base: Figures
    rows: list[Measured]
    left_out: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Seconds and bytes; ratios to the defaults."""
        asked = {"steps": self.settings.steps, "repeat": self.settings.repeat}
        rows = [row.as_json() for row in self.rows]
        data = {"bundle": str(self.settings.bundle), **self.about, **asked}
        return {**data, "defaults": named(self.base), "rows": rows, "left_out": self.left_out}

    def as_text(self) -> str:
        """A Markdown table."""
        about, chosen = self.about, self.settings
        dims = ", ".join(f"{k}={v}" for k, v in about["dims"].items())
        lines = [
            f"{about['class']}, {about['dtype']}, {dims}; {chosen.steps} steps, "
            f"{chosen.repeat} repetitions; {machine_line(about['machine'])}",
            "",
            "| question | by default | here | s a step | min to max | ratio | CPU ratio | peak GB "
            "| first step s | rel_l2 |",
            "|---|---|---|---|---|---|---|---|---|---|",
            _line("(all by default)", "", "", self.base, "1", "1", ""),
        ]
        lines += [_measured_line(row) for row in self.rows]
        lines += [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)


def _measured_line(m: Measured) -> str:
    difference = "-" if m.rel_l2 is None else f"{m.rel_l2:.0e}" if m.rel_l2 else "0"
    ratios = f"{m.ratio:.2f}", f"{m.cpu_ratio:.2f}"
    return _line(m.row.question, m.row.default, m.row.variant, m.figures, *ratios, difference)


def _line(
    question: str, default: str, variant: str, f: Figures, ratio: str, cpu: str, differs: str
) -> str:
    spread = f"{f.spread[0]:.3f} to {f.spread[1]:.3f}"
    return (
        f"| {question} | {default} | {variant} | {f.step:.3f} | {spread} | {ratio} | {cpu} "
        f"| {(f.peak_bytes or 0) / 1e9:.3f} | {f.first_step:.2f} | {differs} |"
    )


def ablate(settings: Settings, say: Say = lambda text: None) -> AblationReport:
    """Measure every row that means something for this program."""
    settings = with_component(settings)
    if settings.against != "none":
        raise MlxconvError("--ablate compares mlxconv with itself: leave --against none")
    about = describe(settings)
    program, _ = component_facts(settings.bundle, settings.component)
    rows, left_out = _applicable(program, settings)
    job = settings.job()
    with tempfile.TemporaryDirectory() as folder:
        runner = _Runner(settings, job, about["dims"], rows, Path(folder), say)
        rounds = [runner.round(i) for i in range(settings.repeat)]
        differences = [_difference(Path(folder), i) for i in range(len(rows))]
    base = [one[0] for one in rounds]
    measured = []
    for i, row in enumerate(rows):
        mine = [one[i + 1] for one in rounds]
        measured.append(
            Measured(row, figures(mine), _ratio(mine, base, "loop"), _ratio(mine, base, "cpu"),
                     differences[i])
        )  # fmt: skip
    return AblationReport(settings, about, figures(base), measured, left_out)


def _applicable(program: Program, settings: Settings) -> tuple[list[Row], dict[str, str]]:
    """The rows to measure, and why others are not."""
    left_out: dict[str, str] = {}
    rows = []
    for row in ROWS:
        why = _unfit(program, row, settings)
        if why:
            left_out[f"{row.question}: {row.variant}"] = why
        else:
            rows.append(row)
    return rows, left_out


def _unfit(program: Program, row: Row, settings: Settings) -> str | None:
    change = row.change.get("change")
    if change is not None and not uses(program, change):
        return f"no {change} in this program"
    entry = next((e for e in program.entries if e.name == "forward"), program.entries[0])
    if row.change.get("fold") is False and not table_inputs(program, entry):
        return "no input decides its rotary tables"
    if row.change.get("guidance") == "batched" and any(
        "batch" in e.sizes and 2 * settings.batch not in {o.sizes["batch"] for o in program.entries}
        for e in program.entries
    ):
        return f"no entry for a batch of {2 * settings.batch}"
    for key in ("evaluate_every", "clear_cache_every"):
        if row.change.get(key, 0) > settings.steps:
            return f"needs --steps {row.change[key]} or more"
    return None


@dataclass(frozen=True)
class _Runner:
    settings: Settings
    job: Job
    dims: Mapping[str, int]
    rows: list[Row]
    folder: Path
    say: Say

    def round(self, number: int) -> list[dict[str, Any]]:
        """The defaults and every row, once each."""
        changes: list[Mapping[str, Any]] = [{}, *(row.change for row in self.rows)]
        runs = []
        for i, change in enumerate(changes):
            given = {**asdict(self.job), **change, "gemm": False, "final": f"{self.folder}/{i}.npy"}
            runs.append(repetition(given, self.dims))
            what = f"{self.rows[i - 1].question}: {self.rows[i - 1].variant}" if i else "defaults"
            seconds = runs[-1]["loop"] / runs[-1]["count"]
            of = self.settings.repeat
            self.say(f"round {number + 1} of {of}: {what}: {seconds:.4f} s a step")
        return runs


def _ratio(mine: list[dict[str, Any]], base: list[dict[str, Any]], key: str) -> float:
    ratios: list[float] = [a[key] / b[key] for a, b in zip(mine, base, strict=True)]
    return statistics.median(ratios)


def _difference(folder: Path, row: int) -> float | None:
    """Relative L2 distance of a row's last latents to those of the defaults."""
    base, mine = (np.load(folder / f"{i}.npy").astype(np.float64) for i in (0, row + 1))
    if base.shape != mine.shape:
        return None
    return float(np.linalg.norm(mine - base) / np.linalg.norm(base))
