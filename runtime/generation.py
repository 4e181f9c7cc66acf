"""`mlxconv generate`: a prompt to PNG files, with a progress bar and a table of times."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from .denoise import Progress
from .errors import MlxconvError
from .measuring.machine import described, peak_rss_bytes
from .pipeline import Pictures, load


@dataclass(frozen=True)
class GenerateReport:
    """The files written, and what making them took."""

    files: list[Path]
    made: Pictures
    load_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Seconds, bytes."""
        machine = described()
        seconds = {"load": self.load_seconds, **self.made.seconds}
        peaks = {"mlx": mx.get_peak_memory(), "rss": peak_rss_bytes()}
        request = self.made.request
        return {
            "images": [str(file) for file in self.files],
            "seed": request.seed,
            "steps": request.steps,
            "size": [request.width, request.height],
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "peak_bytes": peaks,
            "resident_weight_bytes": self.made.weight_bytes,
            "notes": self.made.notes,
            "versions": machine["versions"],
            "device": machine["device"],
        }

    def as_text(self) -> str:
        """Files, times, memory."""
        data = self.as_json()
        times = "  ".join(f"{name} {value:.2f}" for name, value in data["seconds"].items())
        held = data["resident_weight_bytes"]
        return "\n".join(
            [
                *(str(file) for file in self.files),
                f"seconds: {times}",
                f"weights of the denoiser: {_bytes(held['loop'])} of {_bytes(held['prepare'])} in "
                f"the loop; peak memory {_bytes(data['peak_bytes']['rss'])}",
                *self.made.notes,
            ]
        )


def generate(
    bundle: str, prompt: str, out: Path, *, dtype: str | None = None, **options: Any
) -> GenerateReport:
    """Make pictures and write them; `options` are those of `Pipeline.__call__`."""
    if not out.parent.is_dir():
        raise MlxconvError(f"{out}: no folder {out.parent}; make it first")
    began = time.perf_counter()
    pipeline = load(bundle, dtype=dtype)
    took = time.perf_counter() - began
    with tqdm(desc="denoise", unit="step", disable=None, file=sys.stderr, leave=False) as bar:

        def told(progress: Progress) -> None:
            bar.total = progress.steps * options.get("count", 1)
            bar.update()

        made = pipeline(prompt, callback=told, **options)
    files = [_numbered(out, i, len(made.images)) for i in range(len(made.images))]
    for file, image in zip(files, made.images, strict=True):
        _save(file, image, prompt, made)
    return GenerateReport(files, made, took)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _numbered(out: Path, index: int, count: int) -> Path:
    return out if count == 1 else out.with_stem(f"{out.stem}-{index}")


def _save(file: Path, image: Any, prompt: str, made: Pictures) -> None:
    """A PNG that says how it was made; it appears whole or not at all."""
    request = made.request
    told = {"prompt": prompt, "seed": request.seed, "steps": request.steps}
    info = PngInfo()
    info.add_text("mlxconv", json.dumps(told))
    partial = file.with_name(f".{file.name}.part")
    try:
        image.save(partial, format="PNG", pnginfo=info)
        partial.replace(file)
    except OSError as error:
        raise MlxconvError(f"{file}: cannot be written ({error.strerror or error})") from error
    finally:
        partial.unlink(missing_ok=True)
