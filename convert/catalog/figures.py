"""Measures a recipe by the product's own means: a tiny checkpoint, converted and verified.

`mlxconv models` shows the figures, the test suite holds every recipe to them.
"""

from __future__ import annotations

import fcntl
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..conversion import convert
from ..recipe.recipe import Recipe
from ..source.model_class import find_class
from ..trace.patches.threads import one_thread
from ..verify.forward import NOISE
from ..verify.metrics import Row
from ..verify.verify import verify

PRECISIONS = ("fp32", "bf16", "8bit", "4bit")


@dataclass(frozen=True)
class ClassFigures:
    """One configuration of a class at one precision, on the tiny config of its recipe.

    `rel_l2`: worst forward error over the entries, against diffusers in fp32. `limit`: what the
    verdict was judged by, where it is on that number. `runtime`: for quantized bundles, the error
    of the runtime against its dequantized weights run by diffusers.
    """

    class_name: str
    variant: str
    q: str
    entries: tuple[str, ...]
    rel_l2: float
    limit: float | None
    runtime: float | None
    quantized: int
    passed: bool
    problem: str = ""


def tiny_checkpoint(recipe: Recipe, variant: str | None, folder: Path, seed: int = 0) -> Path:
    """Save the recipe's tiny model with seeded weights that leave no tensor without effect.

    Default initialisation has norms of one, biases of zero, and some outputs of zero: swapped or
    missing tensors would go unnoticed.
    """
    import torch

    module = tiny_module(recipe, variant)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), one_thread():
        for name, parameter in module.named_parameters():
            parameter.copy_(_weights(name, parameter.shape, generator))
    module.save_pretrained(str(folder))
    return folder


def tiny_module(recipe: Recipe, variant: str | None = None) -> Any:
    """The recipe's tiny model as its library initialises it."""
    cls: Any = find_class(recipe.library, recipe.class_name, Path(recipe.class_name))
    config = recipe.tiny_config(variant)
    of_transformers = recipe.library == "transformers"
    return (cls(cls.config_class(**config)) if of_transformers else cls(**config)).eval()


def _weights(name: str, shape: Sequence[int], generator: Any) -> Any:
    import torch

    noise = torch.randn(tuple(shape), generator=generator)
    if len(shape) > 1:
        return noise / math.sqrt(math.prod(shape[1:]))
    return 1 + 0.1 * noise if name.endswith("weight") else 0.1 * noise


def measure(
    recipe: Recipe,
    variant: str | None = None,
    precisions: Sequence[str] = PRECISIONS,
    folder: Path | None = None,
    file: str | None = None,
) -> Iterator[ClassFigures]:
    """Convert the recipe's tiny checkpoint to each precision and verify it; file: the recipe's own,
    where it is not a shipped one.

    No size is that of tracing; fp32 is verified at two of each, so that batches and aspect ratios
    are seen to be free. The bundles are left in `folder`, by precision, when it is given.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="mlxconv-measure-") as name:
            yield from measure(recipe, variant, precisions, Path(name), file)
        return
    source = tiny_checkpoint(recipe, variant, folder / "source")
    for q in precisions:
        report = convert(source, folder / q, q, recipe=file)
        parity = verify(folder / q, source)
        if q == "fp32":
            parity.tiers += verify(folder / q, source, dims=_other_dims(recipe)).tiers
        part = next(iter(report.components.values()))
        rows = [row for row in parity.tiers if row.tier == "forward"]
        problem = "; ".join(_problem(row) for row in parity.tiers if not row.passed)
        yield _measured(recipe, variant, q, rows, part.quantized, parity.passed, problem)


def _other_dims(recipe: Recipe) -> dict[str, int]:
    """The last size of each free dim; `verify` takes the first."""
    dims = recipe.dims.values()
    return {dim.name: dim.check[-1] for dim in dims if dim.check and not dim.fixed}


def _problem(row: Row) -> str:
    return f"{row.tier} {row.name}: rel_l2 {row.rel_l2:.1e} {row.note}".strip()


def _measured(
    recipe: Recipe,
    variant: str | None,
    q: str,
    rows: Sequence[Row],
    quantized: int,
    passed: bool,
    problem: str,
) -> ClassFigures:
    own = [row for row in rows if "runtime" not in row.name and NOISE not in row.name]
    runtime = [row.rel_l2 for row in rows if "runtime" in row.name]
    worst = max(own, key=lambda row: row.rel_l2 / (row.threshold or 1))
    return ClassFigures(
        recipe.class_name,
        variant or "",
        q,
        tuple(dict.fromkeys(row.name for row in own)),
        worst.rel_l2,
        worst.threshold,
        max(runtime, default=None),
        quantized,
        passed,
        problem,
    )


def write_figures(
    path: Path, measured: Sequence[ClassFigures], versions: Mapping[str, str]
) -> None:
    """Figures as JSON, rounded to the digits that mean something, beside those of others."""
    rows = [
        {k: float(f"{v:.2e}") if isinstance(v, float) else v for k, v in asdict(m).items()}
        for m in measured
    ]
    with (Path(tempfile.gettempdir()) / "mlxconv-figures.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may measure at once
        _merge(path, rows, versions)


def _merge(path: Path, rows: list[dict[str, Any]], versions: Mapping[str, str]) -> None:
    new = {(row["class_name"], row["variant"]) for row in rows}
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    kept = [row for row in known if (row["class_name"], row["variant"]) not in new]
    order = {q: i for i, q in enumerate(PRECISIONS)}
    rows = sorted(
        [*kept, *rows], key=lambda row: (row["class_name"], row["variant"], order[str(row["q"])])
    )
    data = {"versions": dict(versions), "rows": rows}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(names: Sequence[str]) -> None:
    """Measure every recipe and every tiny variant; write the figures that `models` shows.

    With classes named, only those; `--new` stands for those that have no figures yet. Recipe files
    that are not among the shipped ones are measured and not written down.
    """
    from tqdm import tqdm

    from ..lower.program_cache import versions
    from ..recipe.reading import all_recipes, load_recipe, load_recipe_file, recipe_names

    target = Path(__file__).resolve().parents[2] / "recipes" / "parity.json"
    if list(names) == ["--new"]:
        known = {row["class_name"] for row in json.loads(target.read_text())["rows"]}
        names = [name for name in recipe_names() if name not in known]
    shipped = [Path(n).stem if Path(n).absolute().parent == target.parent else n for n in names]
    trial = any(name.endswith(".toml") for name in shipped)
    recipes = [load_recipe_file(n) if trial else load_recipe(n) for n in shipped]
    failed, done = [], recipes or list(all_recipes().values())
    for number, recipe in enumerate(tqdm(done, disable=None)):
        file = shipped[number] if trial else None
        variants = (None, *recipe.tiny_variants)
        rows = [row for v in variants for row in measure(recipe, v, file=file)]
        for row in rows:
            runtime = "" if row.runtime is None else f"runtime {row.runtime:.1e} "
            verdict = "passed" if row.passed else f"FAILED {row.problem}"
            print(f"{row.class_name} {row.variant} {row.q} {row.rel_l2:.1e} {runtime}{verdict}")
        failed += [row for row in rows if not row.passed]
        if not trial:
            write_figures(target, rows, versions())
    print(f"{len(done)} classes, {len(failed)} rows failed")


if __name__ == "__main__":
    main(sys.argv[1:])
