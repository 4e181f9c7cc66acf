"""docs/MODELS.md: every supported class with its figures, made by `mlxconv models --markdown`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from statistics import median
from typing import Any

from .supported import Supported

KINDS = ("denoiser", "autoencoder", "text encoder", "adapter")
UNSUPPORTED = "unsupported.json"  # beside the recipes: class -> reason

_HEAD = """# Models

Made by `mlxconv models --markdown` from what `make figures` measured; a test
keeps it current.

Figures are the worst over the tiny configurations of each class, on sizes other than those traced,
against diffusers or transformers in fp32 on the CPU. `fp32` and `bf16` are `rel_l2`; of `8bit` and
`4bit` the first is what quantization costs, the second how far the runtime is from the same
quantized weights run in PyTorch; `-` was not measured with this version. Measured with {versions}.

Other classes: `mlxconv recipe new CLASS` derives a recipe; see `docs/ADDING_A_MODEL.md`.
"""


def page(models: Sequence[Supported], versions: Mapping[str, str]) -> str:
    """The whole page."""
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [_HEAD.format(versions=shown), *_summary(models)]
    for kind in KINDS:
        chosen = [m for m in models if m.kind == kind]
        if chosen:
            lines += [f"## {kind.capitalize()}s", "", *_table(chosen), ""]
    lines += ["## Real sizes, traced without weights", "", *_real(models), ""]
    lines += ["## What stays precise", "", *_precise(models), ""]
    lines += ["## Not supported", "", *_unsupported(models)]
    return "\n".join(lines).rstrip() + "\n"


def _summary(models: Sequence[Supported]) -> list[str]:
    rows = [
        "| kind | classes | measured | configurations | fp32: median | worst | passed |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        found = [m for m in models if m.kind == kind]
        exact = [row["rel_l2"] for m in found for row in m.parity if row["q"] == "fp32"]
        if exact:
            passed = all(row["passed"] for m in found for row in m.parity)
            rows.append(
                f"| {kind} | {len(found)} | {sum(bool(m.parity) for m in found)} | {len(exact)} "
                f"| {median(exact):.1e} | {max(exact):.1e} | {'all' if passed else 'not all'} |"
            )
    return [*rows, ""]


def _table(models: Iterable[Supported]) -> list[str]:
    rows = [
        "| class | pipelines | fp32 | bf16 | 8bit | 4bit | programs |",
        "|---|---|---|---|---|---|---|",
    ]
    for m in models:
        cells = [_number(m.parity, q, "rel_l2") for q in ("fp32", "bf16")]
        for q in ("8bit", "4bit"):
            run = _number(m.parity, q, "runtime")
            cells.append(
                f"{_number(m.parity, q, 'rel_l2')}, {run}" if run != "-" else "not quantized"
            )
        entries = dict.fromkeys(e.split(" ")[0] for row in m.parity for e in row["entries"])
        pipelines = ", ".join(m.pipelines[:3]) + (" ..." if len(m.pipelines) > 3 else "")
        rows.append(
            f"| {m.class_name} | {pipelines} | {' | '.join(cells)} | {', '.join(entries)} |"
        )
    return rows


def _number(rows: Iterable[Mapping[str, Any]], q: str, key: str) -> str:
    values = [row[key] for row in rows if row["q"] == q and row[key] is not None]
    return f"{max(values):.1e}" if values else "-"


def _real(models: Iterable[Supported]) -> list[str]:
    rows = [
        "| model | class | parameters | wall s | CPU s | peak GB | program KB | read by: prompt | "
        "schedule | step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for m in models for row in m.real):
        stages = row["stages"]
        shares = " | ".join(f"{stages[s]:.1%}" for s in ("prompt", "schedule", "step"))
        peak = f"{row['peak_gib'] * 2**30 / 1e9:.2f}"
        figures = [row["seconds"], row["cpu_seconds"], peak, row["json_kb"]]
        size = f"{row['parameters'] / 1e9:.2f} B"
        cells = [row["name"], row["class_name"], size, *map(str, figures), shares]
        rows.append(f"| {' | '.join(cells)} |")
    note = "The last columns: the share of the parameters that each stage is the last to read."
    return [*rows, "", note]


def _precise(models: Iterable[Supported]) -> list[str]:
    return [f"- {m.class_name}: {', '.join(f'`{p}`' for p in m.keep)}" for m in models if m.keep]


def _unsupported(models: Iterable[Supported]) -> list[str]:
    file = files("mlxconv").joinpath("recipes", UNSUPPORTED)
    reasons = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    done = {m.class_name for m in models}
    listed = [f"- {name}: {why}" for name, why in sorted(reasons.items()) if name not in done]
    return listed or ["Nothing is known that was tried and failed."]
