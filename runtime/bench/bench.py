"""`bench`: a denoising step, measured: one process a repetition, warm-up apart, medians.

Against a peer, both run the same weights, sizes and precision, alternating.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle import default_dtype, denoiser_of, is_bundle, open_bundle, program_of, read_json
from ..errors import ArgumentError, MlxconvError
from ..exec.executor import COMPILE_MODES
from ..files import counted
from ..machine import described, environment
from .examples import Sizes, entry_at
from .worker import GUIDANCE, Repetition

AGAINST = ("none", "diffusers", "diffusers-compiled", "mflux")
Say = Callable[[str], None]
PeerCommand = Callable[["Settings", dict[str, Any], Path], list[str]]
_WORKER = "mlxconv.runtime.bench.worker"


@dataclass(frozen=True)
class Settings:
    """What `bench` is asked: sizes as in `Sizes`, and how often. See the command's options."""

    bundle: Path
    component: str | None = None
    steps: int = 4
    repeat: int = 3
    pixels: tuple[int, int] | None = None
    dims: dict[str, int] = field(default_factory=dict)
    batch: int = 1
    dtype: str | None = None
    compile: str = "program"
    guidance: str = "none"
    against: str = "none"
    source: Path | None = None
    mflux_python: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "repeat", "batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}: at least 1")
        for name, known in (
            ("compile", COMPILE_MODES),
            ("guidance", GUIDANCE),
            ("against", AGAINST),
        ):
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ArgumentError(f"{name}={given!r}: choose one of {', '.join(known)}")
        if self.source is not None and self.against == "none":
            raise ArgumentError("--source has no effect without --against")
        if self.mflux_python is not None and self.against != "mflux":
            raise ArgumentError("--mflux-python has no effect without --against mflux")

    def job(self) -> Repetition:
        """One repetition of it."""
        return Repetition(
            str(self.bundle),
            self.component,
            self.steps,
            self.pixels,
            self.dims,
            self.batch,
            self.dtype,
            self.compile,
            self.guidance,
        )


@dataclass(frozen=True)
class Figures:
    """Of one side, over all repetitions. Seconds are medians; `spread` is the least and the most.

    `cpu` is of all threads, a step. A first step also reads the loop's weights (`read`) and
    compiles (`compile`: what it takes more). Peaks are the most of any repetition:
    of the loop, of what comes before it, and of the process. `gemm_share`: time of the same
    products as plain GEMMs, in the same process, over that of the step; None where the machine was
    so busy that these took longer.
    """

    step: float
    spread: tuple[float, float]
    cpu: float
    first_step: float
    read: float | None
    compile: float
    prepare: float | None
    load: float
    peak_bytes: int | None
    prepare_peak_bytes: int | None
    peak_rss_bytes: int
    gflops: float | None = None
    gemm_gflops: float | None = None
    gemm_share: float | None = None


@dataclass(frozen=True)
class BenchReport:
    """The figures, and what they were measured on and with."""

    settings: Settings
    about: dict[str, Any]
    ours: Figures
    peer: Figures | None = None
    ratio: float | None = None
    cpu_ratio: float | None = None
    rel_l2: float | None = None
    peer_version: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Seconds, bytes, GFLOP/s."""
        about = {**self.about, "steps": self.settings.steps, "repeat": self.settings.repeat}
        about |= {"compile_mode": self.settings.compile, "guidance": self.settings.guidance}
        data = {"bundle": str(self.settings.bundle), **about, **named(self.ours)}
        peer = None if self.peer is None else {**named(self.peer), "version": self.peer_version}
        against = {"against": self.settings.against, "peer": peer}
        return {
            **data,
            **against,
            "ratio": self.ratio,
            "cpu_ratio": self.cpu_ratio,
            "rel_l2": self.rel_l2,
        }

    @property
    def _unquantized(self) -> str:
        """That a peer runs the source's weights, where these are quantized."""
        quantized = self.about["quantization"] is not None
        return ", to the source's unquantized weights" if quantized else ""

    def as_text(self) -> str:
        """A table."""
        about, chosen = self.about, self.settings
        dims = " ".join(f"{k}={v}" for k, v in about["dims"].items())
        lines = [
            f"{about['class']}, {about['dtype']}: {dims}",
            f"{counted(chosen.steps, 'step')}, {counted(chosen.repeat, 'repetition')}, "
            f"compile {chosen.compile}, "
            f"guidance {chosen.guidance}",
            machine_line(about["machine"]),
            "",
            f"{'':12}{'step s':>9}{'min to max':>17}{'CPU s':>8}{'first':>8}{'read':>7}"
            f"{'compile':>9}{'prepare':>9}{'load':>7}{'peak GB':>9}{'RSS GB':>8}{'GFLOP/s':>9}"
            f"{'of GEMM':>9}",
            _line("mlxconv", self.ours),
        ]
        if self.peer is not None:
            lines.append(_line(chosen.against, self.peer))
            lines.append(
                f"a step takes {self.ratio:.2f} times as long as by {chosen.against} "
                f"{self.peer_version}, {self.cpu_ratio:.2f} times its CPU seconds; "
                + (
                    "outputs not compared"
                    if self.rel_l2 is None
                    else f"outputs differ by {self.rel_l2:.1e} (rel_l2{self._unquantized})"
                )
            )
            lines += _products_lines(chosen.against, about["machine"])
        return "\n".join(lines)


def _products_lines(against: str, machine: dict[str, Any]) -> list[str]:
    """What multiplies on either side, where that is not the same library: most of a ratio."""
    x86 = machine["system"].endswith(("x86_64", "AMD64"))
    if not (against.startswith("diffusers") and machine["device"] == "cpu" and x86):
        return []
    ours = "MLX's own code" if machine["blas"] == "mlx" else f"{machine['blas']} in fp32"
    return [f"on x86 PyTorch multiplies with MKL and oneDNN, MLX with {ours}"]


def machine_line(machine: dict[str, Any]) -> str:
    """Chip, device, versions and date, in one line."""
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return (
        f"{machine['chip']}; {machine['system']}; device {machine['device']}, "
        f"blas {machine['blas']}; {versions}; {machine['date']}"
    )


_NAMES = {
    "step": "step_median",
    "spread": "step_spread",
    "cpu": "step_cpu_seconds",
    "compile": "compile_seconds",
    "first_step": "first_step_seconds",
    "read": "read_seconds",
    "prepare": "prepare_seconds",
    "load": "load_seconds",
}


def named(figures: Figures) -> dict[str, Any]:
    """The figures under the names that they have in JSON."""
    return {_NAMES.get(k, k): v for k, v in asdict(figures).items()}


def _line(name: str, f: Figures) -> str:
    def number(value: float | None, width: int, digits: int, scale: float = 1) -> str:
        return "-".rjust(width) if value is None else f"{value * scale:{width}.{digits}f}"

    share = "-".rjust(9) if f.gemm_share is None else f"{f.gemm_share:9.0%}"
    return (
        f"{name:12}{f.step:9.4f}{f'{f.spread[0]:.4f} to {f.spread[1]:.4f}':>17}"
        f"{f.cpu:8.3f}{f.first_step:8.3f}{number(f.read, 7, 3)}{f.compile:9.3f}"
        f"{number(f.prepare, 9, 3)}{f.load:7.3f}"
        f"{number(f.peak_bytes, 9, 3, 1e-9)}{f.peak_rss_bytes / 1e9:8.3f}"
        f"{number(f.gflops, 9, 1)}{share}"
    )


# ---- running ------------------------------------------------------------------------------------


def bench(
    settings: Settings, say: Say = lambda text: None, peer: PeerCommand | None = None
) -> BenchReport:
    """Measure a bundle's denoiser; wrong sizes raise MlxconvError before anything runs.

    `peer` makes the command of a repetition by what `settings.against` names.
    """
    settings = with_component(settings)
    about = describe(settings)
    with tempfile.TemporaryDirectory() as folder:
        command = None
        if settings.against != "none":
            if peer is None:
                raise ArgumentError(f"against={settings.against!r} needs `peer`, its command")
            command = peer(settings, about, Path(folder))
        runs, peers = _alternate(settings, about, command, Path(folder), say)
        about |= {key: runs[0][key] for key in ("dims", "dtype", "class")}
        report = BenchReport(settings, about, figures(runs))
        return report if not peers else _beside(report, runs, peers, Path(folder))


def _alternate(
    settings: Settings, about: dict[str, Any], peer: list[str] | None, folder: Path, say: Say
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Our repetitions and the peer's, alternating."""
    files = {"output": f"{folder}/ours.npy", "inputs": f"{folder}/inputs.npz"}
    runs: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    for i in range(settings.repeat):
        runs.append(repetition({**asdict(settings.job()), **files}, about["dims"]))
        say(f"repetition {i + 1}: mlxconv {_median(runs[-1]):.4f} s")
        if peer is not None:
            peers.append(run_apart(peer, f"{settings.against} cannot run it: "))
            say(f"repetition {i + 1}: {settings.against} {_median(peers[-1]):.4f} s")
    return runs, peers


def _beside(
    report: BenchReport, runs: list[dict[str, Any]], peers: list[dict[str, Any]], folder: Path
) -> BenchReport:
    """The report with the peer's figures; ratios are medians over pairs of repetitions."""
    pairs = list(zip(runs, peers, strict=True))
    return replace(
        report,
        peer=figures(peers),
        ratio=statistics.median(_median(a) / _median(b) for a, b in pairs),
        cpu_ratio=statistics.median(a["cpu"] / b["cpu"] for a, b in pairs),
        rel_l2=_difference(folder),
        peer_version=peers[0]["version"],
    )


def with_component(settings: Settings) -> Settings:
    """The settings with the bundle's denoiser named, where no component was."""
    if settings.component is not None or not is_bundle(settings.bundle):
        if not is_bundle(settings.bundle) and not (settings.bundle / "config.json").is_file():
            open_bundle(settings.bundle)
        return settings
    return replace(settings, component=denoiser_of(open_bundle(settings.bundle)))


def describe(settings: Settings) -> dict[str, Any]:
    """Class, sizes and precision of a run, and the machine. MlxconvError for wrong sizes."""
    program, config = component_facts(settings.bundle, settings.component)
    names = [e.name for e in program.entries]
    entry = "forward" if "forward" in names else names[0]
    sizes = Sizes(settings.pixels, settings.dims, settings.batch)
    _, dims = entry_at(program, config, entry, sizes)
    date = datetime.now(UTC).isoformat(timespec="minutes")
    return {
        "component": settings.component,
        "class": program.class_name,
        "dims": dims,
        "dtype": settings.dtype or default_dtype(config),
        "quantization": config.get("quantization", {}).get("bits"),
        "machine": {**described(), "date": date},
    }


def component_facts(bundle: Path, component: str | None) -> tuple[Any, dict[str, Any]]:
    """A component's program and its config.json."""
    folder = open_bundle(bundle).component(component) if component and is_bundle(bundle) else bundle
    if component and not is_bundle(bundle) and (bundle / component).is_dir():
        folder = bundle / component
    return program_of(bundle, component), read_json(folder / "config.json")


def repetition(job: dict[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """One job in a process of its own; `dims` are named where it fails."""
    try:
        return run_apart([sys.executable, "-m", _WORKER, json.dumps(job)])
    except MlxconvError as error:
        at = ", ".join(f"{name}={size}" for name, size in dims.items())
        raise MlxconvError(f"{error}; run at {at}. Try another --size or --dim") from None


def run_apart(command: Sequence[str], what: str = "") -> dict[str, Any]:
    """The JSON object on the last line of what a process prints; `what` begins a complaint."""
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, encoding="utf-8"
    )
    if done.returncode != 0:
        raise MlxconvError(what + _reason(done.stderr, done.returncode))
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _reason(stderr: str, code: int) -> str:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    last = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    where = (
        ""
        if code == 1 and lines and lines[-1].startswith("error: ")
        else (f"its process ended with {code}: ")
    )
    return f"{where}{last}"


def figures(runs: Sequence[dict[str, Any]]) -> Figures:
    """Medians and extremes over repetitions."""
    steps = [s for run in runs for s in step_seconds(run)]
    step = statistics.median(steps)
    first = statistics.median(run["first_step"] for run in runs)
    read = _middle(runs, "read")
    flops, gemm = runs[0].get("flops"), _middle(runs, "gemm")
    return Figures(
        step=step,
        spread=(min(steps), max(steps)),
        cpu=statistics.median(run["cpu"] / run["count"] for run in runs),
        first_step=first,
        read=read,
        compile=max(0.0, first - step - (read or 0)),
        prepare=_middle(runs, "prepare"),
        load=statistics.median(run["load"] for run in runs),
        peak_bytes=_most(runs, "peak_bytes"),
        prepare_peak_bytes=_most(runs, "prepare_peak_bytes"),
        peak_rss_bytes=_most(runs, "peak_rss_bytes") or 0,
        gflops=None if not flops else flops / step / 1e9,
        gemm_gflops=None if not flops or not gemm else flops / gemm / 1e9,
        gemm_share=None if not gemm or gemm > step else gemm / step,
    )


def step_seconds(run: dict[str, Any]) -> list[float]:
    """Of each step; their mean where they were not evaluated one by one."""
    return run["steps"] or [run["loop"] / run["count"]]


def _median(run: dict[str, Any]) -> float:
    return statistics.median(step_seconds(run))


def _middle(runs: Sequence[dict[str, Any]], key: str) -> float | None:
    found = [run[key] for run in runs if run.get(key) is not None]
    return statistics.median(found) if found else None


def _most(runs: Sequence[dict[str, Any]], key: str) -> int | None:
    found = [int(run[key]) for run in runs if run.get(key) is not None]
    return max(found) if found else None


def _difference(folder: Path) -> float | None:
    """Relative L2 distance of the two sides' first outputs, as far as the loop uses them.

    None where a model gives less than its latents, which the loop only fills up.
    """
    ours, theirs = (np.load(folder / f"{side}.npy").astype(np.float64) for side in ("ours", "peer"))
    if theirs.size < ours.size:
        return None
    used = theirs.ravel()[: ours.size]
    return float(np.linalg.norm(ours.ravel() - used) / np.linalg.norm(used))
