"""`mlxconv generate`: a prompt to PNG files, with a progress bar and a table of times."""

import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from .denoise import Progress
from .errors import MlxconvError
from .files import whole
from .measuring.machine import described, peak_rss_bytes
from .phases import phase_table, told_bytes
from .pipeline import Pictures, load

PHASES = ("load", "warmup", "encode", "prepare", "first_step", "steps", "preview", "decode")
_UNITS = {"encode": "prompt", "steps": "step", "decode": "picture"}


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
            "seed": request.seed,
            "steps": request.steps,
            "size": [request.width, request.height],
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "peak_bytes": {**peaks, "mlx": max(peaks.values()), "rss": peak_rss_bytes()},
            "resident_weight_bytes": self.made.weight_bytes,
            "notes": self.made.notes,
            "versions": machine["versions"],
            "device": machine["device"],
        }

    def as_text(self) -> str:
        """The files, one a line."""
        return "\n".join(map(str, self.files))

    def notes(self, verbose: bool = False) -> str:
        """What to know of the pictures, time and memory; verbose: of each phase."""
        data = self.as_json()
        seconds, held = data["seconds"], data["resident_weight_bytes"]
        process, step = told_bytes(data["peak_bytes"]["rss"]), seconds["step_median"]
        lines = list(self.made.notes)
        if verbose:
            lines += phase_table(PHASES, seconds, self.made.peak_bytes, seconds["total"])
            lines.append(
                f"weights of the denoiser: {told_bytes(held['loop'])} of "
                f"{told_bytes(held['prepare'])} in the loop"
            )
        figures = f"{seconds['total']:.1f} s, a step {step:.2f} s; peak memory {process}"
        return "\n".join([*lines, figures])


class _Bars:
    """A bar on stderr for the phase that is running; none where stderr is no terminal."""

    def __init__(self) -> None:
        self._phase, self._bar = "", tqdm(disable=True)

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            unit = _UNITS.get(phase, "part")
            # A delay: it draws nothing before `close` knows of it.
            self._bar = tqdm(desc=phase, total=total, unit=unit, disable=None, file=sys.stderr,
                             leave=False, dynamic_ncols=True, delay=1e-9)  # fmt: skip
            self._bar.refresh()
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Clear the line, which tqdm itself does not where Ctrl-C came while it drew."""
        if not self._bar.disable:
            self._bar.close()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def generate(
    bundle: str, prompt: str, out: Path, *, dtype: str | None = None, vae_dtype: str | None = None,
    preview: Path | None = None, warmup: bool = False, compile: str = "program", **options: Any,
) -> GenerateReport:  # fmt: skip
    """Make pictures and write them; `options` are those of `Pipeline.__call__`.

    preview: a file for the picture that the last step predicts. warmup: make a picture of one step
    before, so that all that is compiled or read once is not in the times; text encoders are kept.
    """
    for file in filter(None, (out, preview)):
        if not file.parent.is_dir():
            raise MlxconvError(f"{file}: no folder {file.parent}; make it first")
    began = time.perf_counter()
    pipeline = load(bundle, dtype=dtype, vae_dtype=vae_dtype, keep=warmup, compile=compile)
    seconds = {"load": time.perf_counter() - began}
    with closing(_Bars()) as bars:
        if warmup:
            pipeline.warmup(prompt, listener=bars, **options)
            seconds["warmup"] = time.perf_counter() - began - seconds["load"]
        shown = None if preview is None else partial(_preview, preview, prompt)
        made = pipeline(prompt, listener=bars, preview=shown, **options)
    files = [_numbered(out, i, len(made.images)) for i in range(len(made.images))]
    request = made.request
    for file, image in zip(files, made.images, strict=True):
        _save(file, image, {"prompt": prompt, "seed": request.seed, "steps": request.steps})
    return GenerateReport(files, made, {**seconds, **made.seconds}, time.perf_counter() - began)


def _preview(file: Path, prompt: str, image: Any, progress: Progress) -> None:
    _save(file, image, {"prompt": prompt, "step": progress.step + 1, "steps": progress.steps})


def _numbered(out: Path, index: int, count: int) -> Path:
    return out if count == 1 else out.with_stem(f"{out.stem}-{index}")


def _save(file: Path, image: Any, told: dict[str, Any]) -> None:
    """A PNG that says how it was made; it appears whole or not at all."""
    info = PngInfo()
    info.add_text("mlxconv", json.dumps(told))
    with whole(file) as part:
        image.save(part, format="PNG", pnginfo=info)
