"""Parity: a bundle against diffusers, at the weights, at each block, and over a whole forward.

Metrics, for a result a and its reference b over all outputs together: `max_abs` max|a-b|,
`max_rel` max|a-b| / max|b|, `rel_l2` ||a-b|| / ||b||, `cosine`, `sqnr_db` -20 log10(rel_l2).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxconv.runtime.bundle import Bundle, open_bundle, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.hub.names import hub_name
from mlxconv.runtime.program import PROGRAM_FILE, load_program

from .audit import Audit, audit
from .checkpoint import Checkpoint, Component
from .comparison import Row, make_row
from .forwards import Case, compare_entries
from .hub_source import Asked, opened, shown_name
from .recipe import Recipe, bundle_recipe, load_recipe_file

TIERS = ("forward", "block")


@dataclass
class ParityReport:
    """All rows, and for each component that failed, where its error begins."""

    bundle: str
    source: str
    seed: int
    tiers: list[Row] = field(default_factory=list)
    begins_at: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every row passed; a report without rows did not."""
        return bool(self.tiers) and all(row.passed for row in self.tiers)

    def as_json(self) -> dict[str, Any]:
        """What `verify --json` prints; numbers that are not finite become null."""
        rows = [
            {k: _json_number(v) for k, v in asdict(row).items()}
            for row in self.tiers
        ]  # fmt: skip
        return {
            "passed": self.passed,
            "bundle": self.bundle,
            "source": self.source,
            "seed": self.seed,
            "tiers": rows,
            "begins_at": self.begins_at,
        }

    def as_text(self) -> str:
        """A table for people; the verdict is its last line."""
        head = f"{'component':<16}{'tier':<9}{'name':<34}{'rel_l2':>10}{'max_rel':>10}{'dB':>7}"
        lines = [f"{head}{'limit':>10}  result"]
        for row in self.tiers:
            limit = "" if row.threshold is None else f"{row.threshold:.1e}"
            result = ("ok" if row.passed else "FAILED") + (f"  {row.note}" if row.note else "")
            lines.append(
                f"{row.component:<16}{row.tier:<9}{row.name:<34}{row.rel_l2:>10.2e}"
                f"{row.max_rel:>10.2e}{row.sqnr_db:>7.1f}{limit:>10}  {result}"
            )
        lines += [f"{name}: the error begins at {at}" for name, at in self.begins_at.items()]
        lines.append("PASSED" if self.passed else "FAILED")
        return "\n".join(lines)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verify(
    bundle: str | Path,
    against: str | Path,
    *,
    components: Sequence[str] = (),
    tier: str = "forward",
    seed: int = 0,
    dtype: str | None = None,
    threshold: float | None = None,
    recipe: str | Path | None = None,
    model_class: str | None = None,
    stream: bool = False,
    dims: Mapping[str, int] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ParityReport:
    """Compare a bundle with the checkpoint it was made from, run by diffusers in PyTorch.

    First every weight is compared with the checkpoint's; then `tier` "forward" compares one
    forward pass of every entry, "block" each block's outputs too. fp32 passes at rel_l2 <= 1e-4;
    bf16 and fp16 when the error is at most 1.5x that of PyTorch in that dtype against PyTorch in
    fp32; a quantized bundle when the runtime equals its dequantized weights run in PyTorch (1e-4),
    the error against the fp32 original being reported beside. `stream` holds one block at a time.
    `model_class` is the "package.module:Class" that the bundle was converted by, if any.
    `dims` are sizes to run at, by the recipe's names (by default others than those traced with).
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    if tier not in TIERS:
        raise MlxconvError(f"--tier {tier}: this version measures {', '.join(TIERS)}")
    made = open_bundle(bundle)
    with opened(against, _asked(made, against, components, model_class)) as source:
        if source.download is not None:
            source.download.fetch_all()
        checkpoint = source.checkpoint
        given = load_recipe_file(recipe) if recipe else None
        report = ParityReport(str(bundle), str(against), seed)
        for name in _names(made, checkpoint, components):
            folder = made.component(name)
            component = checkpoint.components[name]
            config = read_json(folder / "config.json")
            if "mlxconv" not in config:
                raise MlxconvError(f"{folder}/config.json: not written by mlxconv; convert again")
            own = _recipe(folder, component, given)
            case = Case(
                name, folder, component, config, own, seed, dtype, threshold, stream, dims or {}
            )
            _verify_component(case, tier, report, say)
        return report


def _asked(
    bundle: Bundle, against: str | Path, components: Sequence[str], model_class: str | None
) -> Asked:
    """Of the Hub only what is compared, at the commit that the bundle was made of."""
    manifest, name = bundle.manifest, hub_name(against)
    own = name is not None and shown_name(name) == manifest.get("source") and not name.revision
    return Asked(
        manifest.get("variant"),
        model_class,
        tuple(n for n in manifest["components"] if not components or n in components),
        manifest.get("revision") if own else None,
        progress=True,
    )


def _names(bundle: Bundle, checkpoint: Checkpoint, asked: Sequence[str]) -> list[str]:
    converted = list(bundle.manifest["components"])
    for name in asked:
        bundle.component(name)
    names = [n for n in converted if not asked or n in asked]
    absent = [n for n in names if n not in checkpoint.components]
    if absent:
        have = ", ".join(checkpoint.components)
        raise MlxconvError(
            f"{checkpoint.path}: has no component {', '.join(absent)} (it has {have}); "
            "give the checkpoint this bundle was made from"
        )
    return names


def _recipe(folder: Path, component: Component, given: Recipe | None) -> Recipe | None:
    if not (folder / PROGRAM_FILE).is_file():
        return None
    if given is not None and given.class_name == component.class_name:
        return given
    return bundle_recipe(folder, component.class_name)


def _verify_component(
    case: Case, tier: str, report: ParityReport, say: Callable[[str], None]
) -> None:
    say(f"{case.name}: comparing weights")
    program = load_program(case.folder / PROGRAM_FILE) if case.recipe else None
    parameters = program.parameters if program else {}
    audited = audit(case.folder, case.component, parameters, case.config)
    report.tiers.append(_weights_row(case, audited))
    if audited.bad:
        first = min(audited.bad, key=_natural)
        report.begins_at[case.name] = f"{_module(first)} (weight {first}: {audited.bad[first]})"
    if program is None or case.recipe is None or audited.missing:
        return
    for rows, begins in compare_entries(case, case.recipe, program, tier, say):
        report.tiers.extend(rows)
        if begins:
            report.begins_at.setdefault(case.name, begins)


def _natural(name: str) -> list[Any]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")]


def _module(tensor: str) -> str:
    """The block that a tensor belongs to: up to its last number, else its module."""
    parts = tensor.split(".")
    last = next((i for i, p in enumerate(parts) if p.isdigit()), None)
    return ".".join(parts[: last + 1]) if last is not None else ".".join(parts[:-1])


def _weights_row(case: Case, audited: Audit) -> Row:
    shown = [f"{name} ({why})" for name, why in list(audited.bad.items())[:3]]
    note = f"{len(audited.bad)} wrong: {', '.join(shown)}" if shown else ""
    label = f"{audited.tensors} tensors"
    source = f"checkpoint {case.component.path.name}"
    return make_row(
        "weights", case.name, label, audited.sums, None, source, passed=not audited.bad, note=note
    )
