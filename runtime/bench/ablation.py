"""`bench --ablate`: one change per row, measured side by side.

A round runs every row once, each in a process of its own, and the defaults before, after, and every
few rows between. A row's ratio is to the defaults' runs on both sides of it, so that a machine that
is busy for a while slows both.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..files import counted
from ..program.program import Program
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
from .unfusing import table_inputs, uses
from .worker import Repetition

Say = Callable[[str], None]
Run = dict[str, Any]
_BETWEEN = 4  # rows from one run of the defaults to the next


@dataclass(frozen=True)
class Change:
    """A question, the way it is answered by default, and another; `change` is to the job."""

    question: str
    default: str
    variant: str
    change: Mapping[str, Any]


ROWS = (
    Change("evaluate", "each step", "every 5 steps", {"evaluate_every": 5}),
    Change("evaluate", "each step", "at the end", {"evaluate_every": 0}),
    Change("clear cache", "never", "each step", {"clear_cache_every": 1}),
    Change("clear cache", "never", "every 10 steps", {"clear_cache_every": 10}),
    Change("scalars", "rows of one table, compiled", "Python numbers", {"scalars": "numbers"}),
    Change("scalars", "rows of one table, compiled", "arrays made inside", {"scalars": "inside"}),
    Change("scalars", "rows of one table, compiled", "arrays made outside", {"scalars": "outside"}),
    Change("compile", "whole step", "blocks", {"compile": "block"}),
    Change("compile", "whole step", "elementwise", {"compile": "off", "change": "elementwise"}),
    Change("compile", "whole step", "off", {"compile": "off"}),
    Change("attention", "mx.fast", "manual", {"change": "attention"}),
    Change("RMSNorm", "mx.fast", "manual", {"change": "rms_norm"}),
    Change("modulated norm", "mx.fast.layer_norm", "manual", {"change": "modulated_norm"}),
    Change("rotary", "in pairs", "as diffusers writes it", {"change": "rotary"}),
    Change("q, k, v", "one product", "separate", {"change": "linears"}),
    Change("rotary tables", "before the loop", "at each step", {"fold": False}),
    Change("stages", "staged", "whole entry each step", {"staged": False}),
    Change("guidance", "none", "both in one batch", {"guidance": "batched"}),
    Change("guidance", "none", "one after the other", {"guidance": "sequential"}),
)


@dataclass(frozen=True)
class MeasuredChange:
    """A row's figures; `ratio` of its step to that of the defaults.

    `rel_l2`: of the latents after the last step; None where they are not of one shape.
    """

    row: Change
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
    """The table, in Markdown; `left_out` says which rows this program has nothing for, and why."""

    settings: Settings
    about: dict[str, Any]
    base: Figures
    rows: list[MeasuredChange]
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
            f"{about['class']}, {about['dtype']}, {dims}; {counted(chosen.steps, 'step')}, "
            f"{counted(chosen.repeat, 'repetition')}; {machine_line(about['machine'])}",
            "s a step: the median of all steps. ratio: of a whole loop to the mean of the default "
            "loops run before and after it, the median of all repetitions, not the quotient of the "
            "medians.",
            "",
            "| question | by default | here | s a step | min to max | ratio | CPU ratio | peak GB "
            "| first step s | rel_l2 |",
            "|---|---|---|---|---|---|---|---|---|---|",
            _line("(all by default)", "", "", self.base, "1", "1", ""),
        ]
        lines += [_measured_line(row) for row in self.rows]
        lines += [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)


def _measured_line(m: MeasuredChange) -> str:
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
        raise ArgumentError("--ablate compares mlxconv with itself, so it needs --against none")
    about = describe(settings)
    program, _ = component_facts(settings.bundle, settings.component)
    rows, left_out = _applicable(program, settings)
    job = settings.job()
    with tempfile.TemporaryDirectory() as folder:
        runner = _Runner(settings, job, about["dims"], rows, Path(folder), say)
        rounds = [runner.round(i) for i in range(settings.repeat)]
        differences = [_difference(Path(folder), i, row) for i, row in enumerate(rows)]
    base = figures([run for one in rounds for run in one.defaults])
    measured = [
        MeasuredChange(
            row,
            figures([one.rows[i] for one in rounds]),
            _ratio(rounds, i, "loop"),
            _ratio(rounds, i, "cpu"),
            differences[i],
        )
        for i, row in enumerate(rows)
    ]
    return AblationReport(settings, about, base, measured, left_out)


def _applicable(program: Program, settings: Settings) -> tuple[list[Change], dict[str, str]]:
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


def _unfit(program: Program, row: Change, settings: Settings) -> str | None:
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


@dataclass
class _Round:
    """Each row's run, and those of the defaults: before row 0, before row `_BETWEEN`, ..., last."""

    defaults: list[Run]
    rows: list[Run]

    def ratio(self, row: int, key: str) -> float:
        """A row's figure over the mean of the defaults' on both sides of it."""
        before = row // _BETWEEN
        around = [run[key] for run in self.defaults[before : before + 2]]
        return float(self.rows[row][key] / statistics.mean(around))


@dataclass(frozen=True)
class _Runner:
    settings: Settings
    job: Repetition
    dims: Mapping[str, int]
    rows: list[Change]
    folder: Path
    say: Say

    def round(self, number: int) -> _Round:
        """The defaults and every row, once each."""
        self.say(f"round {number + 1} of {self.settings.repeat}")
        made = _Round([], [])
        for i, row in enumerate(self.rows):
            if i % _BETWEEN == 0:
                made.defaults.append(self._run("defaults", {}, "defaults"))
            made.rows.append(self._run(f"{row.question}: {row.variant}", row.change, str(i)))
        made.defaults.append(self._run("defaults", {}, "defaults"))
        return made

    def _run(self, what: str, change: Mapping[str, Any], name: str) -> Run:
        final = f"{self.folder}/{name}.npy"
        run = repetition({**asdict(self.job), **change, "gemm": False, "final": final}, self.dims)
        self.say(f"{what}: {run['loop'] / run['count']:.4f} s a step")
        return run


def _ratio(rounds: list[_Round], row: int, key: str) -> float:
    return statistics.median(one.ratio(row, key) for one in rounds)


def _difference(folder: Path, number: int, row: Change) -> float | None:
    """Relative L2 distance of a row's last latents to those of the defaults, of as many samples."""
    base, mine = (
        np.load(folder / f"{name}.npy").astype(np.float64) for name in ("defaults", number)
    )
    if base.shape != mine.shape or row.change.get("guidance") == "batched":
        return None
    return float(np.linalg.norm(mine - base) / np.linalg.norm(base))
