"""Published models at their real size: traced without weights, each in a process of its own.

`recipes/published.json` has the constructor's arguments of published models, by class and name.
`python tests/tools/real_size.py` runs them (those of the classes named; with `--new` those that
were not run yet), and writes `recipes/real.json`, which `mlxconv models` and docs/MODELS.md
show.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxconv.convert.catalog.supported import REAL_SIZES, real_sizes
from mlxconv.convert.lower.compile import compile_program
from mlxconv.convert.quantize.policy import matches
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.convert.source.model_class import find_class
from mlxconv.runtime.program.stages import shares
from mlxconv.runtime.program.stored import to_json

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def published() -> dict[str, dict[str, dict[str, Any]]]:
    """Constructor arguments of published models, by class and by the model's name."""
    text = (RECIPES / "published.json").read_text(encoding="utf-8")
    models: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return models


def real_size(class_name: str, name: str) -> dict[str, Any]:
    """Trace, lower, rewrite, outline one published configuration; time, memory, sizes, shares."""
    recipe = load_recipe(class_name)
    cls = find_class(recipe.library, class_name, Path(class_name))
    wall, cpu = time.perf_counter(), time.process_time()
    made = compile_program(cls, published()[class_name][name], recipe)
    seconds, spent = time.perf_counter() - wall, time.process_time() - cpu
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = {n: math.prod(p.shape) for n, p in made.parameters.items()}
    kept = sum(
        size
        for n, size in sizes.items()
        if any(matches(p, n.removesuffix(".weight")) for p in recipe.precision.keep)
    )
    total = sum(sizes.values())
    return {
        "class_name": class_name,
        "name": name,
        "parameters": total,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(spent, 1),
        "peak_gib": round((usage if sys.platform == "darwin" else usage * 1024) / 2**30, 2),
        "json_kb": round(len(to_json(made.program)) / 1000),
        "nodes": made.program.count_nodes(),
        "entries": len(made.program.entries),
        "stages": {k: round(v, 3) for k, v in shares(made.program).items()},
        "kept": round(kept / max(1, total), 3),
    }


def measure(names: Sequence[str], new: bool = False) -> Iterator[dict[str, Any]]:
    """Every published configuration of the classes named (all without names), as it is done."""
    known = {_key(row) for row in real_sizes()} if new else set()
    for class_name, models in published().items():
        for name in models:
            if (names and class_name not in names) or (class_name, name) in known:
                continue
            command = [sys.executable, "-W", "ignore", __file__, class_name, name]
            done = subprocess.run([*command, "--one"], capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no reason given"]
                print(f"{class_name} {name}: failed: {lines[-1]}", flush=True)
                continue
            yield json.loads(done.stdout)


def main(arguments: Sequence[str]) -> None:
    """Measure, and replace the rows of what was measured in the file of figures."""
    if arguments[-1:] == ["--one"]:
        print(json.dumps(real_size(*arguments[:2])))
        return
    for row in measure([a for a in arguments if a != "--new"], "--new" in arguments):
        print(json.dumps(row), flush=True)
        known = [r for r in real_sizes() if (r["class_name"], r["name"]) != _key(row)]
        rows = sorted([*known, row], key=_key)
        (RECIPES / REAL_SIZES).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["class_name"], row["name"]


if __name__ == "__main__":
    main(sys.argv[1:])
