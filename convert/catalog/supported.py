"""The classes that have a recipe, and the parity measured for each in this version."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Any

from mlxconv.runtime.errors import MlxconvError

from ..recipe.reading import all_recipes
from ..recipe.recipe import Recipe
from ..report import human_count
from ..templates import render

KINDS = ("denoiser", "autoencoder", "text encoder", "adapter")
# Beside the recipes.
FIGURES = "parity.json"  # written by `make figures`
REAL_SIZES = "real.json"  # written by tests/tools/real_size.py
UNSUPPORTED = "unsupported.json"  # class -> reason


@dataclass(frozen=True)
class Supported:
    """One class: its recipe's file, the pipelines that use it, and its measured rows."""

    class_name: str
    recipe: str
    pipelines: tuple[str, ...]
    parity: list[dict[str, Any]]
    kind: str = "denoiser"
    keep: tuple[str, ...] = ()
    real: tuple[dict[str, Any], ...] = ()

    @property
    def programs(self) -> list[str]:
        """Names of its programs."""
        return [*dict.fromkeys(e.split(" ")[0] for row in self.parity for e in row["entries"])]


@dataclass(frozen=True)
class SupportedModels:
    """All supported classes."""

    models: list[Supported]
    measured_with: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """What `models --json` prints."""
        return {
            "measured_with": self.measured_with,
            "models": [
                {
                    "class": m.class_name,
                    "recipe": m.recipe,
                    "pipelines": list(m.pipelines),
                    "parity": m.parity,
                    "kind": m.kind,
                    "keep": list(m.keep),
                    "real": list(m.real),
                }
                for m in self.models
            ],
        }

    def as_markdown(self) -> str:
        """The page docs/MODELS.md."""
        done = {m.class_name for m in self.models}
        reasons = _beside_recipes(UNSUPPORTED, {})
        return render(
            "catalog/models.md.jinja",
            {"worst": _worst, "median": median},
            models=self.models,
            kinds={kind: [m for m in self.models if m.kind == kind] for kind in KINDS},
            unsupported=[item for item in sorted(reasons.items()) if item[0] not in done],
            versions=", ".join(f"{name} {v}" for name, v in self.measured_with.items()),
        )

    def as_text(self) -> str:
        """A table for people: worst figure over the configurations of each class."""
        with_ = " ".join(f"{k} {v}" for k, v in self.measured_with.items())
        lines = [f"parity of tiny configurations against diffusers, measured with {with_ or '-'}"]
        lines.append(
            f"{'class':<32}{'fp32':>10}{'bf16':>10}{'4bit':>10}{'4bit run':>10}  pipelines"
        )
        for m in self.models:
            cells = [_worst(m.parity, q, "rel_l2") for q in ("fp32", "bf16", "4bit")]
            cells.append(_worst(m.parity, "4bit", "runtime"))
            shown = "".join(f"{c:>10.1e}" if c is not None else f"{'-':>10}" for c in cells)
            lines.append(f"{m.class_name:<32}{shown}  {', '.join(m.pipelines[:3])}")
        lines.append("'4bit' is the quantization error; '4bit run' the runtime's own error.")
        if len(self.models) == 1:
            lines += ["", *_details(self.models[0])]
        return "\n".join(lines)


def kind_of(recipe: Recipe) -> str:
    """denoiser, autoencoder, text encoder or adapter, by library, programs and name."""
    if recipe.library == "transformers":
        return "text encoder"
    if {"encode", "decode"} & set(recipe.programs):
        return "autoencoder"
    named = recipe.class_name
    return "adapter" if "ControlNet" in named or "Adapter" in named else "denoiser"


def _details(model: Supported) -> list[str]:
    """All that is known about one class."""
    lines = [f"kind: {model.kind}", f"recipe: {model.recipe}"]
    lines += [f"pipelines: {', '.join(model.pipelines)}"] if model.pipelines else []
    lines += [f"stays precise: {', '.join(model.keep)}"] if model.keep else []
    for row in model.parity:
        figures = [f"rel_l2 {row['rel_l2']:.1e}"] if row["rel_l2"] is not None else []
        figures += [f"run {row['runtime']:.1e}"] if row["runtime"] is not None else []
        verdict = "passed" if row["passed"] else f"FAILED {row['problem']}".strip()
        label = f"{row['q']} {row['variant']}".strip()
        lines.append(f"{label}: {', '.join([*figures, verdict])}")
    lines += [f"{row['name']}: {human_count(row['parameters'])} parameters" for row in model.real]
    return lines


def _worst(rows: Sequence[dict[str, Any]], q: str, key: str) -> float | None:
    values = [row[key] for row in rows if row["q"] == q and row[key] is not None]
    return max(values) if values else None


def real_sizes() -> list[dict[str, Any]]:
    """Published models, traced at their real size: the figures that come with this installation."""
    rows: list[dict[str, Any]] = _beside_recipes(REAL_SIZES, [])
    return rows


def _beside_recipes(name: str, default: Any) -> Any:
    file = files("mlxconv").joinpath("recipes", name)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else default


def supported_models(name: str | None = None) -> SupportedModels:
    """Recipes of this installation with the figures that were measured for them.

    name: only classes that have this in their name or a pipeline's; MlxconvError if none has.
    """
    data = _beside_recipes(FIGURES, {})
    rows: list[dict[str, Any]] = data.get("rows", [])
    real = real_sizes()
    models = [
        Supported(
            class_name,
            f"recipes/{class_name}.toml",
            tuple(recipe.pipelines),
            [row for row in rows if row["class_name"] == class_name],
            kind_of(recipe),
            recipe.precision.keep,
            tuple(row for row in real if row["class_name"] == class_name),
        )
        for class_name, recipe in sorted(all_recipes().items())
    ]
    return SupportedModels(_named(models, name) if name else models, data.get("versions", {}))


def _named(models: Sequence[Supported], name: str) -> list[Supported]:
    """The class of that name alone, else those that have it as a part."""
    exact = [m for m in models if m.class_name.lower() == name.lower()]
    found = exact or [
        m for m in models if any(name.lower() in n.lower() for n in (m.class_name, *m.pipelines))
    ]
    if not found:
        known = {m.class_name.lower(): m.class_name for m in models}
        near = difflib.get_close_matches(name.lower(), known, 3)
        hint = f" (close: {', '.join(known[each] for each in near)})" if near else ""
        raise MlxconvError(
            f"no supported class or pipeline has {name!r} in its name{hint}; derive a recipe with "
            "`mlxconv recipe new CLASS`"
        )
    return found
