"""`profile`: where a generation's time goes, and inside a step to which blocks and ops.

The phases are timed as they come in a generation: weights are read when they are reached, and the
first step compiles. Inside a step, every node is computed for itself, uncompiled; the shares are
those of that run, the seconds are scaled to an uncompiled step that computes its output at once.
"""

import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..bundle import LoadedComponent, is_bundle, load_component, open_bundle
from ..errors import MlxconvError
from ..exec.finite import HALF_MAX, floats, largest_of
from ..exec.steps import observed
from ..files import counted, format_bytes
from ..generate.denoise import LoopSettings, denoise
from ..generate.phases import Phases, phase_table
from ..generate.staging import Staged
from ..generate.tiling import DEFAULT_WORK, in_strips
from ..machine import peak_rss_bytes
from ..program.program import Node
from ..schedulers import make_schedule, scheduler_of
from .bench import Settings, describe, machine_line, run_apart, with_component
from .examples import Example, Sizes, make_example, text_sizes
from .flops import flops_of, gemms_of

PHASES = ("load", "encode", "prepare", "first_step", "step", "decode")
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
OUTSIDE = "(outside of blocks)"
_TIMES = 3  # uncompiled steps, and steps node by node, that are measured


# ---- the phases ---------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """All figures, in this process: phases first, then inside the step."""
    left_out: dict[str, str] = {}
    clock = Phases()
    _encode(settings, clock, left_out)
    steps, held = _steps(settings, clock)
    _decode(settings, clock, left_out)
    wall = clock.wall
    phases = {name: clock.seconds.get(name, 0.0) for name in PHASES}
    return {
        "seconds": {**phases, "total": wall},
        "accounted": sum(phases.values()) / wall,
        "step_median": statistics.median(steps),
        "peak_bytes": {name: clock.peak_bytes.get(name, 0) for name in PHASES},
        "resident_weight_bytes": held,
        "left_out": left_out,
        "inside": inside_step(settings),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _encode(settings: Settings, clock: Phases, left_out: dict[str, str]) -> None:
    names = _components(settings, lambda name: name.startswith("text_encoder"))
    if not names:
        left_out["encode"] = "no text encoder in the bundle"
    with clock.phase("load"):
        tokens = _text_tokens(settings)
    for name in names:
        try:
            with clock.phase("load"):
                component = _load(settings, name)
                sizes = text_sizes(component.config, tokens, settings.batch)
                example = _example(component, component.entries[0], sizes)
        except MlxconvError as error:
            left_out[f"encode {name}"] = str(error)
            continue
        with clock.phase("encode"):
            _compute(component.executor(example.entry.name, **example.at_step(0)))
            component.executor.weights.release()


def _steps(settings: Settings, clock: Phases) -> tuple[list[float], dict[str, int]]:
    """The loop, as a generation runs it: seconds of each step but the first, and the bytes of the
    denoiser's weights that are read before it and held in it."""
    with clock.phase("load"):
        component = _load(settings, settings.component)
        example = denoiser_example(settings, component)
        latents = example.latents()
    with clock.phase("prepare"):
        staged = _staged(component, example, settings.compile)
        prepared = staged.prepare(example.inputs, example.schedule)
    with clock.phase("first_step"):
        _compute(prepared(0, **example.moved(latents)))
    ends: list[float] = []

    def model(step: int, x: mx.array) -> mx.array:
        output = prepared(step, **example.moved(x))
        found: mx.array = output[0] if isinstance(output, tuple) else output
        return found.reshape(-1)[: x.size].reshape(x.shape) if found.size >= x.size else 0 * x

    with clock.phase("step"):
        schedule = make_schedule(scheduler_of(EULER), settings.steps)
        denoise(
            model,
            latents,
            schedule,
            callback=lambda p: ends.append(p.seconds),
            settings=LoopSettings(check=False),
        )
    sizes = staged.weight_bytes()
    held = {"prepare": sizes["all"], "loop": sizes["step"]}
    return [b - a for a, b in zip([0.0, *ends], ends)], held


def _decode(settings: Settings, clock: Phases, left_out: dict[str, str]) -> None:
    names = _components(settings, lambda name: name.startswith(("vae", "vqvae", "movq")))
    if not names:
        left_out["decode"] = "no VAE in the bundle"
        return
    try:
        with clock.phase("load"):
            component = _load(settings, names[0])
            example = _example(component, "decode", _sizes(settings, component))
    except MlxconvError as error:
        left_out["decode"] = str(error)
        return
    with clock.phase("decode"), in_strips(component, DEFAULT_WORK):
        _compute(component.executor("decode", **example.at_step(0)))


def denoiser_example(settings: Settings, component: LoadedComponent) -> Example:
    """The denoiser's inputs at the sizes asked for."""
    sizes = Sizes(settings.pixels, settings.dims, settings.batch)
    name = "forward" if "forward" in component.entries else component.entries[0]
    return _example(component, name, sizes, settings.steps)


def _staged(component: LoadedComponent, example: Example, compile: str) -> Staged:
    return Staged(component, example.entry.name, compile=compile)


def _load(settings: Settings, name: str | None) -> LoadedComponent:
    return load_component(settings.bundle, name, dtype=settings.dtype)


def _example(component: LoadedComponent, entry: str, sizes: Sizes, steps: int = 1) -> Example:
    compute = str(component.dtype).removeprefix("mlx.core.")
    return make_example(
        component.program, component.config, entry, sizes, steps=steps, compute=compute
    )


def _components(settings: Settings, wanted: Callable[[str], bool]) -> list[str]:
    if not is_bundle(settings.bundle):
        return []
    return [n for n in open_bundle(settings.bundle).manifest["components"] if wanted(n)]


def _text_tokens(settings: Settings) -> int | None:
    dims: dict[str, int] = describe(settings)["dims"]
    return dims.get("text_tokens")


def _sizes(settings: Settings, component: LoadedComponent) -> Sizes:
    """The pixels asked for; the dims by name are the denoiser's."""
    table = component.config.get("mlxconv", {}).get("sizes") or {}
    pixels = settings.pixels if table.get("pixels") else None
    return Sizes(pixels, None, settings.batch)


def _compute(output: Any) -> None:
    """Evaluate the outputs of a program."""
    outputs = output if isinstance(output, (tuple, list)) else [output]
    mx.eval([value for value in outputs if isinstance(value, mx.array)])


# ---- inside a step ------------------------------------------------------------------------------


@dataclass
class Spent:
    """What one op, or one block, took: seconds in one step, how often, and its arithmetic."""

    seconds: float = 0.0
    count: int = 0
    flops: int = 0


@dataclass
class Maxima:
    """The largest magnitude of each block's values (None: not finite), and the node it is of."""

    blocks: list[str]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def see(self, node: Node, path: str, args: Mapping[str, Any], result: Any) -> None:
        """Values in the compute precision alone: others do not change with `--dtype`."""
        if node.types and node.types[0].dtype != "compute":
            return
        name, largest = block_of(self.blocks, path), largest_of(*floats([result]))
        row = self.found.setdefault(name, {"name": name, "max_abs": 0.0, "at": ""})
        if row["max_abs"] is not None and not largest <= row["max_abs"]:
            at = ".".join(filter(None, (path, node.module, node.op)))
            row |= {"max_abs": largest if math.isfinite(largest) else None, "at": at}


def block_of(blocks: list[str], path: str) -> str:
    """The block of the loop that a module is in."""
    inside = (b for b in blocks if path == b or path.startswith(f"{b}."))
    return next(inside, path or OUTSIDE)


@dataclass
class Ledger:
    """Computes each node as it is applied, and books the time to its op and to its block."""

    blocks: list[str]
    by_op: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    by_block: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    last: float = field(default_factory=time.perf_counter)

    def see(self, node: Node, path: str, args: Mapping[str, Any], result: Any) -> None:
        """Time since the node before it: building this one, and computing it."""
        _compute(result)
        flops = sum(flops_of(gemm) for gemm in gemms_of(node.op, args, result))
        now = time.perf_counter()
        for book, key in ((self.by_op, node.op), (self.by_block, block_of(self.blocks, path))):
            spent = book[key]
            spent.seconds, spent.count = spent.seconds + now - self.last, spent.count + 1
            spent.flops += flops
        self.last = time.perf_counter()


def inside_step(settings: Settings) -> dict[str, Any]:
    """Seconds of an uncompiled step by block and by op, whose sum is that step's."""
    component = _load(settings, settings.component)
    example = denoiser_example(replace(settings, steps=1), component)
    staged = _staged(component, example, "off")
    prepared = staged.prepare(example.inputs, example.schedule)
    given = example.moved(example.latents())

    def step() -> float:
        began = time.perf_counter()
        _compute(prepared(0, **given))
        return time.perf_counter() - began

    step()
    ledgers, apart, whole = [], [], []
    for _ in range(_TIMES):
        whole.append(step())
        ledgers.append(Ledger(prepared.block_paths()))
        with observed(ledgers[-1].see):
            apart.append(step())
    measured, maxima = statistics.median(whole), Maxima(prepared.block_paths())
    with observed(maxima.see):
        step()
    return {
        "step": measured,
        "node_by_node": statistics.median(apart),
        "blocks": _scaled([ledger.by_block for ledger in ledgers], measured),
        "ops": _scaled([ledger.by_op for ledger in ledgers], measured),
        "maxima": list(maxima.found.values()),
    }


def _scaled(books: list[dict[str, Spent]], seconds: float) -> list[dict[str, Any]]:
    """The entries of a step, the largest first; together they take `seconds`."""
    total = sum(spent.seconds for book in books for spent in book.values())
    rows = []
    for name, first in books[0].items():
        share = sum(book[name].seconds for book in books) / total
        rows.append(
            {
                "name": name,
                "seconds": share * seconds,
                "share": share,
                "count": first.count,
                "gflops": first.flops / (share * seconds) / 1e9 if share else 0.0,
            }
        )
    return sorted(rows, key=lambda row: -float(row["seconds"]))


# ---- the report ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfileReport:
    """The figures of `measure`, and what they were measured on and with."""

    settings: Settings
    about: dict[str, Any]
    figures: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Seconds and bytes."""
        asked = {"bundle": str(self.settings.bundle), "steps": self.settings.steps}
        return {**asked, "compile_mode": self.settings.compile, **self.about, **self.figures}

    def as_text(self) -> str:
        """Tables: the phases, the blocks, the ops."""
        about, found = self.about, self.figures
        dims = " ".join(f"{k}={v}" for k, v in about["dims"].items())
        lines = [
            f"{about['class']}, {about['dtype']}: {dims}; {counted(self.settings.steps, 'step')}, "
            f"compile {self.settings.compile}",
            machine_line(about["machine"]),
            "",
            *_phase_lines(found),
            *(f"left out: {name}: {why}" for name, why in found["left_out"].items()),
            "",
        ]
        inside = found["inside"]
        lines.append(
            f"inside a step, uncompiled: {inside['step']:.4f} s (node by node "
            f"{inside['node_by_node']:.4f} s); compiled as asked {found['step_median']:.4f} s"
        )
        lines += _spent_lines("block", _shortened(inside["blocks"]))
        lines += ["", *_spent_lines("op", _shortened(inside["ops"]))]
        return "\n".join([*lines, "", *_maxima_lines(inside["maxima"])])


def _phase_lines(found: dict[str, Any]) -> list[str]:
    seconds, held = found["seconds"], found["resident_weight_bytes"]
    return [
        *phase_table(PHASES, seconds, found["peak_bytes"], seconds["total"]),
        f"weights of the denoiser: {format_bytes(held['loop'])} of "
        f"{format_bytes(held['prepare'])} in the loop",
    ]


def _spent_lines(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    width = max([len(kind), *(len(row["name"]) for row in rows)]) + 2
    head = f"{kind:{width}}{'seconds':>10}{'share':>8}{'nodes':>8}{'GFLOP/s':>10}"
    return [
        head,
        *(
            f"{row['name']:{width}}{row['seconds']:10.4f}{row['share']:8.1%}{row['count']:8}"
            f"{row['gflops']:10.1f}"
            for row in rows
        ),
    ]


def _maxima_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The largest values, and whether float16 can hold them."""
    width = max([len("block"), *(len(row["name"]) for row in rows)]) + 2
    beyond = [row for row in rows if row["max_abs"] is None or row["max_abs"] > HALF_MAX]
    told = ["not finite" if (m := row["max_abs"]) is None else f"{m:10.3g}" for row in rows]
    return [
        "largest absolute value in each block, and the node that it comes from:",
        f"{'block':{width}}{'max abs':>10}  at",
        *(f"{row['name']:{width}}{value}  {row['at']}" for row, value in zip(rows, told)),
        *(
            [
                f"float16 ends at {HALF_MAX:,.0f}: {len(beyond)} blocks exceed it; use bfloat16 or "
                "float32"
            ]
            if beyond
            else []
        ),
    ]


def _shortened(rows: list[dict[str, Any]], most: int = 20) -> list[dict[str, Any]]:
    """The largest rows, and the rest as one."""
    if len(rows) <= most:
        return rows
    rest = rows[most - 1 :]
    seconds = sum(row["seconds"] for row in rest)
    work = sum(row["gflops"] * row["seconds"] for row in rest)
    other = {
        "name": f"({len(rest)} others)",
        "seconds": seconds,
        "share": sum(row["share"] for row in rest),
        "count": sum(row["count"] for row in rest),
        "gflops": work / seconds if seconds else 0.0,
    }
    return [*rows[: most - 1], other]


def profile(settings: Settings) -> ProfileReport:
    """Profile a bundle in a process of its own (`environment`)."""
    settings = with_component(settings)
    about = describe(settings)
    data = {**asdict(settings), "bundle": str(settings.bundle)}
    command = [sys.executable, "-m", "mlxconv.runtime.bench.profiling", json.dumps(data)]
    return ProfileReport(settings, about, run_apart(command))


def main() -> None:
    """Measure as the JSON on the command line says; the last line on stdout is the figures."""
    data = json.loads(sys.argv[1])
    pixels = data["pixels"] and tuple(data["pixels"])
    try:
        found = measure(Settings(**{**data, "bundle": Path(data["bundle"]), "pixels": pixels}))
    except MlxconvError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
