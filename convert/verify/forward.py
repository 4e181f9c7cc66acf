"""Forward passes of a bundle beside diffusers': outputs, blocks, and where an error begins."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxconv.runtime.bundle import LoadedComponent, load_component
from mlxconv.runtime.program.program import Entry, Program

from ..recipe.examples import example_inputs
from ..recipe.recipe import Recipe
from ..source.checkpoint import Component
from ..trace.class_config import full_config
from .metrics import QUANTIZATION_ERROR, Array, Row, Sums, compare, make_row, to_numpy

if TYPE_CHECKING:
    from .reference import Reference

FP32_THRESHOLD = 1e-4
NOISE = " (noise for zero weights)"  # ends the names of rows
HALF_FACTOR = 1.5  # a half-precision run may be this much worse than PyTorch's own
_ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}

Found = tuple[list[Row], str]  # rows, and where the error begins ("" where there is none)
Result = tuple[list[Array], dict[str, list[Array]]]  # outputs, and values by module path


@dataclass(frozen=True)
class Case:
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
    dims: Mapping[str, int] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()  # weights that are zero throughout

    @property
    def quantized(self) -> bool:
        """Whether the bundle has quantized weights."""
        return bool(self.config.get("quantization"))

    @property
    def precision(self) -> str:
        """dtype of the run: asked, or the bundle's; quantized weights are compared in float32."""
        if self.dtype:
            return self.dtype
        return "float32" if self.quantized else str(self.config["mlxconv"]["dtype"])

    @property
    def limit(self) -> float:
        """What `rel_l2` may be where it is compared with the same weights in float32."""
        return FP32_THRESHOLD if self.threshold is None else self.threshold


class EntryRun:
    """One entry of a component's program, its inputs, and its runs on either side."""

    def __init__(self, case: Case, recipe: Recipe, program: Program, entry: Entry) -> None:
        self.case, self.recipe, self.program, self.entry = case, recipe, program, entry
        self.config = full_config(case.component)
        self.dims = self._dims()
        called = (str(n.args["prefix"]) for n in entry.nodes if n.op == "call")
        self.blocks = list(dict.fromkeys(called))  # a decoder is called once per chunk
        self.paths = _top_paths(entry, self.blocks)

    @property
    def label(self) -> str:
        """The entry's name, with the sizes it is fixed to."""
        sizes = ",".join(f"{k}={v}" for k, v in self.entry.sizes.items())
        return f"{self.entry.name}[{sizes}]" if sizes else self.entry.name

    def _dims(self) -> dict[str, int]:
        """Sizes other than those traced with, wherever a size is free and none was asked for."""
        free = {
            name: dim.check[0]
            for name, dim in self.recipe.dims.items()
            if dim.check and not dim.fixed and name not in self.entry.sizes
        }
        asked = {**free, **self.case.dims}
        return {**self.recipe.trace_dims(self.config, asked), **self.entry.sizes}

    def inputs(self, dtype: str) -> dict[str, Any]:
        """The torch keyword inputs, seeded: the same values in every dtype."""
        import torch

        return example_inputs(
            self.recipe,
            self.entry.name,
            self.config,
            self.dims,
            seed=self.case.seed,
            dtype=getattr(torch, dtype),
        )

    def in_torch(
        self, reference: Reference, dtype: str, taps: Sequence[str] | None = None
    ) -> Result:
        """What diffusers gives, and its values at `taps` (by default all paths of the entry)."""
        method = self.recipe.program(self.entry.name).method
        return reference.run(method, self.inputs(dtype), self.paths if taps is None else taps)

    def in_mlx(
        self, loaded: LoadedComponent, dtype: str, taps: Sequence[str] = ()
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """What the runtime gives."""
        from ..source.arrays import torch_to_mlx

        inputs = torch_to_mlx(self.inputs(dtype))
        outputs, found = loaded.executor.run(self.entry.name, inputs, taps)
        mx.eval([a for a in outputs if isinstance(a, mx.array)], list(found.values()))
        return list(outputs), found

    def inner_paths(self, block: str) -> list[str]:
        """Module paths inside a block, in order of computation."""
        call = next(n for n in self.entry.nodes if n.op == "call" and n.args["prefix"] == block)
        body = self.program.blocks[str(call.args["block"])]
        return [f"{block}.{path}" for path in _computed(body.nodes, body.taps)]


def _top_paths(entry: Entry, blocks: Sequence[str]) -> list[str]:
    """Modules whose values the entry itself computes, in order; none inside a block."""
    return [
        path
        for path in _computed(entry.nodes, entry.taps)
        if path in blocks or not any(path.startswith(f"{b}.") for b in blocks)
    ]


def _computed(nodes: Sequence[Any], taps: Mapping[str, Sequence[str]]) -> list[str]:
    """Tapped paths that have a value of their own, by when their last value is known."""
    order = {name: i for i, node in enumerate(nodes) for name in node.out}
    last = {
        p: max((order[n] for n in names if n in order), default=-1) for p, names in taps.items()
    }
    return sorted((p for p, at in last.items() if at >= 0), key=last.__getitem__)


# ---- comparing ----------------------------------------------------------------------------------


def compare_entries(
    case: Case, recipe: Recipe, tier: str, say: Callable[[str], None]
) -> list[Found]:
    """Rows for all entries, or those of the sizes asked for, loading each PyTorch module once."""
    import torch

    from .reference import load_reference

    dtype = case.precision
    loaded = load_component(case.folder, dtype=dtype, stream=case.stream)
    entries = _at_sizes(case, loaded, say)
    runs = [EntryRun(case, recipe, loaded.program, entry) for entry in entries]
    say(f"{case.name}: running diffusers and the program, {', '.join(r.label for r in runs)}")
    exact = load_reference(case.component, torch.float32, stream=case.stream)
    again = _compare_with_noise(case, runs, exact, tier)
    if case.quantized:
        return _compare_quantized(case, runs, loaded, exact, tier) + again
    if dtype == "float32":
        judges = [_same_weights(run, loaded, exact, exact.label, tier) for run in runs]
        return [judge.found() for judge in judges] + again
    wanted = [run.in_torch(exact, "float32") for run in runs]
    label = exact.label
    del exact
    half = load_reference(case.component, getattr(torch, dtype), stream=case.stream)
    found = []
    for run, want in zip(runs, wanted):
        limit = _half_limit(case, run.in_torch(half, dtype), want)
        found.append(_Judge(run, loaded, want, label, tier, limit).found())
    return found + again


def _at_sizes(case: Case, loaded: LoadedComponent, say: Callable[[str], None]) -> list[Entry]:
    """The entries to run: all, or those of the fixed sizes asked for, traced if there are none."""
    from ..store.on_demand import trace_when_called

    found = []
    for name in loaded.entries:
        same = [entry for entry in loaded.program.entries if entry.name == name]
        sizes = {k: case.dims.get(k, n) for k, n in same[0].sizes.items()}
        fitting = [entry for entry in same if fits(entry, case.dims)]
        if not fitting:
            trace_when_called(loaded, keep=False, say=say)
            assert loaded.executor.trace_size is not None
            loaded.executor.trace_size(name, sizes)
            fitting = [loaded.program.entry(name, sizes)]
        found += fitting
    return found


def fits(entry: Entry, dims: Mapping[str, int]) -> bool:
    """Whether an entry is of the fixed sizes that are asked for."""
    return all(dims.get(name, size) == size for name, size in entry.sizes.items())


def _half_limit(case: Case, own: Result, want: Result) -> Callable[[str], float]:
    """1.5x PyTorch's own error in that precision, at the output or at a module.

    A module's may be one rounding, where PyTorch is exact by computing in float32.
    """
    rounding = _ROUNDING.get(case.precision, 0.0)

    def limit(path: str) -> float:
        if case.threshold is not None:
            return case.threshold
        if not path:
            return HALF_FACTOR * compare(own[0], want[0]).rel_l2
        return max(HALF_FACTOR * compare(own[1][path], want[1][path]).rel_l2, rounding)

    return limit


def _same_weights(
    run: EntryRun,
    loaded: LoadedComponent,
    exact: Reference,
    label: str,
    tier: str,
    suffix: str = "",
) -> _Judge:
    """Judges a float32 run against a reference with the same weights; it can look inside blocks."""

    def inside(paths: Sequence[str]) -> dict[str, list[Array]]:
        return run.in_torch(exact, "float32", paths)[1]

    want, limit = run.in_torch(exact, "float32"), run.case.limit
    return _Judge(run, loaded, want, label, tier, lambda _: limit, suffix, inside)


def _compare_quantized(
    case: Case, runs: list[EntryRun], loaded: LoadedComponent, exact: Reference, tier: str
) -> list[Found]:
    """The runtime against its own weights dequantized in PyTorch; and against the original."""
    from .dequantized import dequantized_tensors
    from .reference import replaced_weights

    wanted = [run.in_torch(exact, "float32", ()) for run in runs]
    label = f"{exact.label}, dequantized weights"
    found: list[Found] = []
    with replaced_weights(exact, dequantized_tensors(case.folder, loaded.program, case.config)):
        for run, want in zip(runs, wanted):
            judge = _same_weights(run, loaded, exact, label, tier, " (runtime)")
            rows, begins = judge.found()
            first = make_row(
                "forward",
                case.name,
                run.label,
                compare(judge.outputs, want[0]),
                None,
                exact.label,
                passed=all(row.passed for row in rows),
                note=QUANTIZATION_ERROR,
            )
            found.append(([first, *rows], begins))
    return found


def _compare_with_noise(
    case: Case, runs: Sequence[EntryRun], exact: Reference, tier: str
) -> list[Found]:
    """float32 runs in which weights that are zero are noise on both sides, to the same values.

    Nothing that is multiplied by zero shows in the output: neither does an error before it.
    """
    if all(name.endswith("bias") for name in case.zeros):  # added, they hide nothing
        return []
    from ..source.arrays import mlx_to_torch
    from ..store.plan import to_stored
    from .dequantized import dequantized_tensors
    from .reference import replaced_weights

    program = runs[0].program
    noise = {name: _noise(program.parameters[name].shape, case.seed) for name in case.zeros}
    loaded = load_component(case.folder, dtype="float32", stream=case.stream)
    loaded.executor.weights.replaced = {
        name: to_stored(value, program.parameters[name].kind) for name, value in noise.items()
    }
    tensors = {name: mlx_to_torch(value) for name, value in noise.items()}
    own = dequantized_tensors(case.folder, program, case.config)
    case = replace(case, dtype="float32", zeros=())
    with replaced_weights(exact, ChainMap(tensors, own)):  # type: ignore[arg-type]
        judges = [
            _same_weights(
                EntryRun(case, run.recipe, program, run.entry),
                loaded,
                exact,
                f"{exact.label}, noise for zeros",
                tier,
                NOISE,
            )
            for run in runs
        ]
        return [judge.found() for judge in judges]


def _noise(shape: Sequence[int], seed: int) -> mx.array:
    """Values that keep activations at their size: matrices by their inputs, others small."""
    scale = 1 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.1
    values = np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32)
    return mx.array(scale * values)


@dataclass
class _Judge:
    """One run against its reference. `inside` gives reference values at more module paths."""

    run: EntryRun
    loaded: LoadedComponent
    want: Result
    label: str
    tier: str
    limit: Callable[[str], float]
    suffix: str = ""
    inside: Callable[[Sequence[str]], dict[str, list[Array]]] | None = None
    outputs: list[Any] = field(default_factory=list)

    def found(self) -> Found:
        """The forward row, block rows when asked, and where a failure begins."""
        blocks = [p for p in self.run.blocks if p in self.run.paths and p in self.want[1]]
        asked = blocks if self.tier == "block" else []
        self.outputs, values = self._mlx(asked)
        sums = compare(self.outputs, self.want[0])
        rows = [self._row("forward", self.run.label, sums, self.limit(""))]
        for path in asked:
            gaps = _block_sums(values[path], self.want[1][path])
            rows.append(self._row("block", path, gaps, self.limit(path)))
        return rows, "" if all(row.passed for row in rows) else self._begins()

    def _row(self, tier: str, name: str, sums: Sums, limit: float) -> Row:
        case, passed, note = self.run.case, None, ""
        if sums.constant and tier == "forward":
            note = "the reference is one number throughout, which proves nothing"
            passed = sums.rel_l2 <= limit and bool(case.zeros)
        return make_row(
            tier, case.name, name + self.suffix, sums, limit, self.label, passed=passed, note=note
        )

    def _mlx(self, taps: Sequence[str]) -> tuple[list[Any], dict[str, list[Any]]]:
        return self.run.in_mlx(self.loaded, self.run.case.precision, taps)

    def _begins(self) -> str:
        """The first module whose value is wrong, and inside a block its first wrong module."""
        paths = [p for p in self.run.paths if p in self.want[1]]
        _, values = self._mlx(paths)
        first = self._first_wrong(paths, values, self.want[1])
        if not first:
            return "the nodes after the last module" if paths else "(no module is known)"
        if first not in self.run.blocks or self.inside is None:
            return first
        inner = self.run.inner_paths(first)
        wanted = self.inside(inner)
        known = [p for p in inner if p in wanted]
        within = self._first_wrong(known, self._mlx(known)[1], wanted)
        return f"{first} ({within})" if within else first

    def _first_wrong(
        self,
        paths: Sequence[str],
        values: Mapping[str, Sequence[Any]],
        wanted: Mapping[str, Sequence[Array]],
    ) -> str:
        """The first path whose value is wrong; those of other sizes cannot be compared."""
        for path in paths:
            pairs = _aligned(values[path], wanted[path])
            same = [(to_numpy(v).reshape(w.shape), w) for v, w in pairs if v.size == w.size]
            known = path if path in self.want[1] else ""  # inside blocks the limit is one number
            error = compare([v for v, _ in same], [w for _, w in same]).rel_l2
            if not error <= self.limit(known):
                return path
        return ""


def _block_sums(values: Sequence[Any], wanted: Sequence[Array]) -> Sums:
    pairs = _aligned(values, wanted)
    return compare([v for v, _ in pairs], [w for _, w in pairs])


def _aligned(values: Sequence[Any], wanted: Sequence[Array]) -> list[tuple[Any, Array]]:
    """A module's outputs; those that it passes through unchanged are not values of the program."""
    if len(values) == len(wanted):
        return list(zip(values, wanted))
    shapes = [tuple(np.shape(v)) for v in values]
    return list(zip(values, (w for w in wanted if tuple(w.shape) in shapes)))
