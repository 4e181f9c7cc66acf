"""`mlxconv generate`: prompts to picture files, with progress and a table of times."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from ..cache_folders import unfinished_kernels
from ..files import format_bytes
from ..machine import described, peak_rss_bytes
from .denoise import Progress
from .options import Options
from .phases import Listener, phase_table
from .picture_files import Pictures, again, check_target, read_record, records_of, save, summary
from .pipeline import load

PHASES = ("load", "warmup", "encode", "prepare", "first_step", "steps", "preview", "decode")
_UNITS = {"encode": "prompt", "steps": "step", "decode": "picture"}
COMPILING = (
    "MLX is compiling kernels for the CPU, which can take a minute; later runs of this "
    "program load them"
)
_PAUSE = 10.0  # seconds between lines of a phase


@dataclass(frozen=True)
class GenerateReport:
    """The files written, and what making them took; `total` is from loading to the last file."""

    files: list[Path]
    made: Pictures
    seconds: dict[str, float]
    total: float

    def as_json(self) -> dict[str, Any]:
        """Seconds, bytes."""
        machine = described()
        seconds = {**self.seconds, "total": self.total}
        peaks = self.made.peak_bytes
        request = self.made.request
        return {
            "images": [str(file) for file in self.files],
            "prompts": [record["prompt"] for record in self.made.records],
            "seed": request.seed,
            "seeds": self.made.seeds,
            "steps": request.steps,
            "size": [request.width, request.height],
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "peak_bytes": {**peaks, "mlx": max(peaks.values()), "rss": peak_rss_bytes()},
            "resident_weight_bytes": self.made.weight_bytes,
            "notes": self.made.notes,
            "versions": machine["versions"],
            "device": machine["device"],
            "tf32": machine["tf32"],
        }

    def as_text(self) -> str:
        """The files, one a line."""
        return "\n".join(map(str, self.files))

    def notes(self, verbose: bool = False) -> str:
        """What to know of the pictures, time and memory; verbose: of each phase."""
        data = self.as_json()
        seconds, held = data["seconds"], data["resident_weight_bytes"]
        process, step = format_bytes(data["peak_bytes"]["rss"]), seconds["step_median"]
        lines = list(self.made.notes)
        if verbose:
            lines += phase_table(PHASES, seconds, self.made.peak_bytes, seconds["total"])
            lines.append(
                f"weights of the denoiser: {format_bytes(held['loop'])} of "
                f"{format_bytes(held['prepare'])} in the loop"
            )
        figures = f"{seconds['total']:.1f} s, a step {step:.2f} s; peak memory {process}"
        return "\n".join([*lines, figures])


class _Bars:
    """A bar on stderr for the phase that is running."""

    def __init__(self) -> None:
        self._phase, self._bar = "", tqdm(disable=True)

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            unit = _UNITS.get(phase, "part")
            # A delay: it draws nothing before `close` knows of it.
            self._bar = tqdm(
                desc=phase,
                total=total,
                unit=unit,
                file=sys.stderr,
                leave=False,
                dynamic_ncols=True,
                delay=1e-9,
            )
            self._bar.refresh()
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Clear the line, which tqdm itself does not where Ctrl-C came while it drew."""
        if not self._bar.disable:
            self._bar.close()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Lines:
    """A line on stderr for each phase that has ended, and now and then for one that is running."""

    def __init__(self) -> None:
        self._phase, self._done, self._total = "", 0, 1
        self._began = self._shown = time.perf_counter()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if phase != self._phase:
            self.close()
            self._phase, self._began, self._shown = phase, now, now
        self._done, self._total = done, total
        if 0 < done < total and now - self._shown >= _PAUSE:
            self._shown = now
            self._say()

    def _say(self) -> None:
        parts = f" {self._done}/{self._total}," if self._phase in _UNITS else ""
        seconds = time.perf_counter() - self._began
        print(f"{self._phase}:{parts} {seconds:.1f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """The last line of the phase."""
        if self._phase:
            self._say()
        self._phase = ""


@contextmanager
def _shown(progress: bool) -> Iterator[Listener | None]:
    """Progress on stderr: bars in a terminal, lines elsewhere."""
    if not progress:
        yield None
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_watch_kernels, args=(ended,), daemon=True)
    with closing(_Bars() if sys.stderr.isatty() else _Lines()) as listener:
        watcher.start()
        try:
            yield listener
        finally:
            ended.set()
            watcher.join()


def _watch_kernels(ended: threading.Event, pause: float = 1.0) -> None:
    """Say that MLX compiles kernels, once it does so for longer than `pause` seconds."""
    stale = unfinished_kernels()  # of a process that was killed
    times = 0
    while times < 2 and not ended.wait(pause):
        times = times + 1 if unfinished_kernels() - stale else 0
    if times == 2:
        tqdm.write(COMPILING, file=sys.stderr)


def generate(
    bundle: str,
    out: str,
    *,
    like: Path | None = None,
    preview: Path | None = None,
    warmup: bool = False,
    compile: str = "program",
    progress: bool = True,
    **given: Any,
) -> GenerateReport:
    """Make pictures and write them; `given` are keywords of `load` and of a pipeline call.

    out: a file or a folder, see `Pictures.save`. like: a picture whose record gives what `given`
    does not. preview: a file for the picture that the last step predicts. warmup: make a picture of
    one step before, so that all that is compiled or read once is not in the times; text encoders
    are kept. progress: say on stderr what runs, and how far it is.
    """
    for target in (out, preview or out):
        check_target(target)
    record = None if like is None else read_record(like)
    asked = {**again(record, given), **{k: v for k, v in given.items() if v is not None}}
    dtypes = {name: asked.pop(name, None) for name in ("dtype", "vae_dtype")}
    began = time.perf_counter()
    pipeline = load(bundle, **dtypes, keep=warmup, compile=compile)
    seconds = {"load": time.perf_counter() - began}
    with _shown(progress) as listener:
        image = None if preview is None else partial(_preview, preview)
        plan = pipeline.plan(Options(**asked, listener=listener, preview=image))
        records = records_of(pipeline.parts, pipeline.family, plan)
        if progress:
            print(summary(records), file=sys.stderr, flush=True)
        if warmup:
            once = {k: v for k, v in asked.items() if k != "prompt"}
            pipeline.warmup(plan.options.prompts[0], listener=listener, **once)
            seconds["warmup"] = time.perf_counter() - began - seconds["load"]
        made = pipeline.run(plan)
    if record is not None and record.get("bundle_hash") != records[0]["bundle_hash"]:
        made.notes.append(
            f"{like}: was made with another bundle, {record.get('bundle')!r:.80}; "
            "this picture may differ from it"
        )
    files = made.save(out)
    return GenerateReport(files, made, {**seconds, **made.seconds}, time.perf_counter() - began)


def _preview(file: Path, image: Image.Image, progress: Progress) -> None:
    save(file, image, None)
