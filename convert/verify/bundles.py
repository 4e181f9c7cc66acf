"""Two bundles side by side: the same inputs through both programs, in MLX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxconv.runtime.bundle import Bundle, load_component, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import PROGRAM_FILE
from mlxconv.runtime.program.stored import load_program

from ..recipe.reading import bundle_recipe
from ..source.checkpoint import Component
from .forward import Case, EntryRun
from .metrics import Row, compare, make_row, to_numpy


def bundle_rows(
    made: Bundle,
    other: Bundle,
    components: Sequence[str],
    *,
    seed: int,
    dtype: str | None,
    threshold: float | None,
    dims: Mapping[str, int],
) -> list[Row]:
    """A forward row for each entry that both bundles have.

    Both run in `dtype`, by default float32, so that they differ by their weights alone. The rows
    are judged by `threshold` where it is given, and pass without.
    """
    names = [n for n in made.manifest["components"] if not components or n in components]
    rows = []
    for name in names:
        if name in other.manifest["components"]:
            cases = [_case(b, name, seed, dtype, threshold, dims) for b in (made, other)]
            rows += list(_entry_rows(cases[0], cases[1], other))
    if not rows:
        raise MlxconvError(
            f"{made.path} and {other.path}: have no component with a program in common among "
            f"{', '.join(names)}"
        )
    return rows


def _case(
    bundle: Bundle,
    name: str,
    seed: int,
    dtype: str | None,
    threshold: float | None,
    dims: Mapping[str, int],
) -> Case:
    folder, listed = bundle.component(name), bundle.manifest["components"][name]
    config = read_json(folder / "config.json")
    recipe = None
    if (folder / PROGRAM_FILE).is_file():
        recipe = bundle_recipe(folder, listed["class"])
    ours = ("mlxconv", "quantization", "quantization_config")
    own: dict[str, Any] = {key: value for key, value in config.items() if key not in ours}
    component = Component(name, folder, listed["library"], listed["class"], own, {}, None, [], {})
    dtype = dtype or "float32"
    return Case(name, folder, component, config, recipe, seed, dtype, threshold, False, dims)


def _entry_rows(ours: Case, theirs: Case, other: Bundle) -> Iterator[Row]:
    if ours.recipe is None or theirs.recipe is None:
        return
    q = other.manifest["components"][theirs.name]["q"]
    label = f"{other.path.name} ({q}), {ours.precision} MLX"
    program = load_program(ours.folder / PROGRAM_FILE)
    theirs_program = load_program(theirs.folder / PROGRAM_FILE)
    known = {(entry.name, str(entry.sizes)) for entry in theirs_program.entries}
    loaded = [load_component(case.folder, dtype=case.precision) for case in (ours, theirs)]
    for entry in program.entries:
        if (entry.name, str(entry.sizes)) not in known:
            continue
        run = EntryRun(ours, ours.recipe, program, entry)
        results, references = (run.in_mlx(side, ours.precision)[0] for side in loaded)
        sums = compare(results, [to_numpy(value) for value in references])
        limit = ours.threshold
        yield make_row(
            "forward",
            ours.name,
            run.label,
            sums,
            limit,
            label,
            passed=True if limit is None else None,
            note="" if limit is not None else "not judged",
        )
