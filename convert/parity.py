"""Parity: a bundle against diffusers, at the weights, at each block, and over a whole forward.

Metrics, for a result a and its reference b over all outputs together: `max_abs` max|a-b|,
`max_rel` max|a-b| / max|b|, `rel_l2` ||a-b|| / ||b||, `cosine`, `sqnr_db` -20 log10(rel_l2).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxconv.runtime.bundle import Bundle, LoadedComponent, load_component, open_bundle, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import PROGRAM_FILE, Entry, load_program

from .audit import Audit, Sums, audit
from .checkpoint import Checkpoint, Component, merged_config, open_checkpoint
from .recipe import Recipe, example_inputs, load_recipe, load_recipe_file

if TYPE_CHECKING:
    from .reference import Reference

FP32_THRESHOLD = 1e-4
HALF_FACTOR = 1.5  # a half-precision run may be this much worse than PyTorch's own
TIERS = ("forward", "block")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """One measured comparison. `threshold` is on `rel_l2`; None: judged otherwise (see `note`)."""

    tier: str
    component: str
    name: str
    max_abs: float
    max_rel: float
    rel_l2: float
    cosine: float
    sqnr_db: float
    threshold: float | None
    reference: str
    passed: bool
    note: str = ""


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
        head = f"{'component':<14}{'tier':<9}{'name':<34}{'rel_l2':>10}{'max_rel':>10}{'dB':>7}"
        lines = [f"{head}{'limit':>10}  result"]
        for row in self.tiers:
            limit = "" if row.threshold is None else f"{row.threshold:.1e}"
            result = ("ok" if row.passed else "FAILED") + (f"  {row.note}" if row.note else "")
            lines.append(
                f"{row.component:<14}{row.tier:<9}{row.name:<34}{row.rel_l2:>10.2e}"
                f"{row.max_rel:>10.2e}{row.sqnr_db:>7.1f}{limit:>10}  {result}"
            )
        lines += [f"{name}: the error begins at {at}" for name, at in self.begins_at.items()]
        lines.append("PASSED" if self.passed else "FAILED")
        return "\n".join(lines)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class _Case:
    """One component to verify, and everything its rows share."""

    name: str
    folder: Path
    component: Component
    config: dict[str, Any]
    recipe: Recipe | None
    seed: int
    dtype: str | None
    threshold: float | None
    stream: bool
    say: Callable[[str], None]

    @property
    def quantized(self) -> bool:
        return bool(self.config.get("quantization"))

    @property
    def precision(self) -> str:
        """dtype of the run: asked, or the bundle's; quantized weights are compared in float32."""
        if self.dtype:
            return self.dtype
        return "float32" if self.quantized else str(self.config["mlxconv"]["dtype"])


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
    stream: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> ParityReport:
    """Compare a bundle with the checkpoint it was made from, run by diffusers in PyTorch.

    First every weight is compared with the checkpoint's; then `tier` "forward" compares one
    forward pass of every entry, "block" each block's outputs too. fp32 passes at rel_l2 <= 1e-4;
    bf16 and fp16 when the error is at most 1.5x that of PyTorch in that dtype against PyTorch in
    fp32; a quantized bundle when the runtime equals its dequantized weights run in PyTorch (1e-4),
    the error against the fp32 original being reported beside. `stream` holds one block at a time.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    if tier not in TIERS:
        raise MlxconvError(f"--tier {tier}: this version measures {', '.join(TIERS)}")
    opened, checkpoint = open_bundle(bundle), open_checkpoint(against)
    given = load_recipe_file(recipe) if recipe else None
    report = ParityReport(str(bundle), str(against), seed)
    for name in _names(opened, checkpoint, components):
        folder = opened.component(name)
        component = checkpoint.components[name]
        config = read_json(folder / "config.json")
        if "mlxconv" not in config:
            raise MlxconvError(f"{folder}/config.json: not written by mlxconv; convert again")
        own = _recipe(folder, component, given)
        case = _Case(name, folder, component, config, own, seed, dtype, threshold, stream, say)
        _verify_component(case, tier, report)
    return report


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
    own = folder / "recipe.toml"
    return load_recipe_file(own) if own.is_file() else load_recipe(component.class_name)


def _verify_component(case: _Case, tier: str, report: ParityReport) -> None:
    case.say(f"{case.name}: comparing weights")
    program = load_program(case.folder / PROGRAM_FILE) if case.recipe else None
    parameters = program.parameters if program else {}
    audited = audit(case.folder, case.component, parameters, case.config)
    report.tiers.append(_weights_row(case, audited))
    if audited.bad:
        first = min(audited.bad, key=_natural)
        report.begins_at[case.name] = f"{_module(first)} (weight {first}: {audited.bad[first]})"
    if program is None or case.recipe is None:
        return
    runs = [_EntryRun(case, entry) for entry in program.entries]
    for run in runs:
        case.say(f"{case.name}: {run.label}")
    for row, begins in _compare_entries(case, runs, tier):
        report.tiers.extend(row)
        if begins and case.name not in report.begins_at:
            report.begins_at[case.name] = begins


def _natural(name: str) -> list[Any]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")]


def _module(tensor: str) -> str:
    """The block that a tensor belongs to: up to its last number, else its module."""
    parts = tensor.split(".")
    last = next((i for i, p in enumerate(parts) if p.isdigit()), None)
    return ".".join(parts[: last + 1]) if last is not None else ".".join(parts[:-1])


def _weights_row(case: _Case, audited: Audit) -> Row:
    shown = [f"{name} ({why})" for name, why in list(audited.bad.items())[:3]]
    note = f"{len(audited.bad)} wrong: {', '.join(shown)}" if shown else ""
    label = f"{audited.tensors} tensors"
    source = f"checkpoint {case.component.path.name}"
    return _row(case, "weights", label, audited.sums, None, source, not audited.bad, note)


def _row(
    case: _Case,
    tier: str,
    name: str,
    sums: Sums,
    threshold: float | None,
    reference: str,
    passed: bool | None = None,
    note: str = "",
) -> Row:
    error = rel_l2(sums)
    if not sums.finite:
        error, note = math.inf, note or "NaN or infinite values in the result"
    judged = passed if passed is not None else error <= (threshold or 0.0)
    lengths = math.sqrt(sums.reference * sums.other)
    return Row(
        tier,
        case.name,
        name,
        sums.max_abs,
        sums.max_abs / sums.max_reference if sums.max_reference else sums.max_abs,
        error,
        sums.product / lengths if lengths else float(sums.difference == 0),
        -20 * math.log10(error) if 0 < error < math.inf else (400.0 if error == 0 else -math.inf),
        threshold,
        reference,
        bool(judged) and sums.finite,
        note,
    )


def rel_l2(sums: Sums) -> float:
    """||a-b|| / ||b||; ||a|| where the reference is zero."""
    return math.sqrt(sums.difference / sums.reference) if sums.reference else math.sqrt(sums.other)


def compare(results: Iterable[Any], references: Iterable[Any]) -> Sums:
    """Sums over all outputs. MlxconvError when their number or shapes differ."""
    results, references = list(results), list(references)
    shapes = [tuple(np.shape(a)) for a in results], [tuple(np.shape(b)) for b in references]
    if shapes[0] != shapes[1]:
        raise MlxconvError(f"outputs have shapes {shapes[0]}, diffusers gives {shapes[1]}")
    sums = Sums()
    for a, b in zip(results, references):
        sums.add(to_numpy(a), b)
    return sums


def to_numpy(value: Any) -> Array:
    """An MLX array as NumPy; bfloat16 as float32."""
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        value = value.astype(mx.float32)
    return np.asarray(value)


# ---- entries ------------------------------------------------------------------------------------


class _EntryRun:
    """One entry of a component's program, its inputs, and its runs on either side."""

    def __init__(self, case: _Case, entry: Entry) -> None:
        assert case.recipe is not None
        self.case, self.entry = case, entry
        self.recipe = case.recipe.program(entry.name)
        self.config = merged_config(case.component)
        self.dims = self._dims(case.recipe)

    @property
    def label(self) -> str:
        """The entry's name, with the sizes it is fixed to."""
        sizes = ",".join(f"{k}={v}" for k, v in self.entry.sizes.items())
        return f"{self.entry.name}[{sizes}]" if sizes else self.entry.name

    def _dims(self, recipe: Recipe) -> dict[str, int]:
        """Sizes other than those traced with, wherever a size is free."""
        free = {
            name: dim.check[0]
            for name, dim in recipe.dims.items()
            if dim.check and not dim.fixed and name not in self.entry.sizes
        }
        return {**recipe.trace_dims(self.config), **free, **self.entry.sizes}

    def inputs(self, dtype: str) -> dict[str, Any]:
        """The torch keyword inputs, seeded: the same values in every dtype."""
        import torch

        assert self.case.recipe is not None
        return example_inputs(
            self.case.recipe,
            self.entry.name,
            self.config,
            self.dims,
            seed=self.case.seed,
            dtype=getattr(torch, dtype),
        )

    def in_torch(
        self, reference: Reference, dtype: str, taps: Sequence[str] = ()
    ) -> tuple[list[Array], dict[str, list[Array]]]:
        """What diffusers gives."""
        return reference.run(self.recipe.method, self.inputs(dtype), taps)

    def in_mlx(
        self, loaded: LoadedComponent, dtype: str, taps: Sequence[str] = ()
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """What the runtime gives."""
        outputs, found = loaded.executor.run(self.entry.name, mlx_inputs(self.inputs(dtype)), taps)
        mx.eval([a for a in outputs if isinstance(a, mx.array)], list(found.values()))
        return list(outputs), found


def mlx_inputs(value: Any) -> Any:
    """Torch tensors in nested containers as MLX arrays."""
    import torch

    from .reference import torch_to_numpy

    if isinstance(value, torch.Tensor):
        array = mx.array(torch_to_numpy(value))
        return array.astype(mx.bfloat16) if value.dtype == torch.bfloat16 else array
    if isinstance(value, Mapping):
        return {k: mlx_inputs(v) for k, v in value.items()}
    return [mlx_inputs(v) for v in value] if isinstance(value, (list, tuple)) else value


_Found = tuple[list[Row], str]


def _compare_entries(case: _Case, runs: list[_EntryRun], tier: str) -> list[_Found]:
    """Rows for all entries, loading each PyTorch module once."""
    import torch

    from .reference import load_reference

    dtype = case.precision
    loaded = load_component(case.folder, dtype=dtype, stream=case.stream)
    paths = {id(run): loaded.executor.block_paths(run.entry.name) for run in runs}
    exact = load_reference(case.component, torch.float32, stream=case.stream)
    wanted = [run.in_torch(exact, "float32", paths[id(run)]) for run in runs]
    if case.quantized:
        return _compare_quantized(case, runs, loaded, exact, wanted, paths, tier)
    found: list[_Found] = []
    if dtype == "float32":
        limit = case.threshold or FP32_THRESHOLD
        return [
            _judge(case, run, loaded, want, exact.label, tier, lambda _: limit)
            for run, want in zip(runs, wanted)
        ]
    label = exact.label
    del exact
    half = load_reference(case.component, getattr(torch, dtype), stream=case.stream)
    for run, want in zip(runs, wanted):
        own = run.in_torch(half, dtype, paths[id(run)])
        found.append(_judge(case, run, loaded, want, label, tier, _half_limit(case, own, want)))
    return found


def _half_limit(
    case: _Case,
    own: tuple[list[Array], dict[str, list[Array]]],
    want: tuple[list[Array], dict[str, list[Array]]],
) -> Callable[[str], float]:
    """1.5x PyTorch's own error in that precision, at the output or at a block."""

    def limit(path: str) -> float:
        if case.threshold is not None:
            return case.threshold
        pair = (own[1][path], want[1][path]) if path else (own[0], want[0])
        return HALF_FACTOR * rel_l2(compare(*pair))

    return limit


def _compare_quantized(
    case: _Case,
    runs: list[_EntryRun],
    loaded: LoadedComponent,
    exact: Reference,
    wanted: list[tuple[list[Array], dict[str, list[Array]]]],
    paths: Mapping[int, Sequence[str]],
    tier: str,
) -> list[_Found]:
    """The runtime against its own weights dequantized in PyTorch; and against the original."""
    from .dequantized import dequantized_tensors
    from .reference import replaced_weights

    found: list[_Found] = []
    limit = case.threshold or FP32_THRESHOLD
    label = f"{exact.label}, dequantized weights"
    with replaced_weights(exact, dequantized_tensors(case.folder, loaded.program, case.config)):
        for run, want in zip(runs, wanted):
            same = run.in_torch(exact, "float32", paths[id(run)])
            rows, begins = _judge(
                case, run, loaded, same, label, tier, lambda _: limit, " (runtime)"
            )
            outputs, _ = run.in_mlx(loaded, "float32")
            sums = compare(outputs, want[0])
            passed = all(row.passed for row in rows)
            first = _row(
                case, "forward", run.label, sums, None, exact.label, passed, "quantization error"
            )
            found.append(([first, *rows], begins))
    return found


def _judge(
    case: _Case,
    run: _EntryRun,
    loaded: LoadedComponent,
    want: tuple[list[Array], dict[str, list[Array]]],
    label: str,
    tier: str,
    limit: Callable[[str], float],
    suffix: str = "",
) -> _Found:
    """The forward row; block rows when asked, or to find out where a failure begins."""
    blocks = [p for p in loaded.executor.block_paths(run.entry.name) if p in want[1]]
    outputs, values = run.in_mlx(loaded, case.precision, blocks if tier == "block" else ())
    sums = compare(outputs, want[0])
    row = _row(case, "forward", run.label + suffix, sums, limit(""), label)
    if tier != "block" and row.passed:
        return [row], ""
    if tier != "block":
        _, values = run.in_mlx(loaded, case.precision, blocks)
    rows = [
        _row(case, "block", f"{p}{suffix}", _block_sums(values[p], want[1][p]), limit(p), label)
        for p in blocks
        if p in values
    ]
    begins = next((r.name.removesuffix(suffix) for r in rows if not r.passed), "")
    if not row.passed and not begins:
        begins = "the nodes after the last block" if rows else "(no block is known)"
    return ([row, *rows] if tier == "block" else [row]), begins


def _block_sums(values: Sequence[Any], wanted: Sequence[Array]) -> Sums:
    """A block's outputs; those that it passes through unchanged are not values of the program."""
    if len(values) == len(wanted):
        return compare(values, wanted)
    shapes = [tuple(np.shape(v)) for v in values]
    picked = [w for w in wanted if tuple(w.shape) in shapes][: len(values)]
    return compare(values[: len(picked)], picked)
