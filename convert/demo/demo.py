"""The main job on the tiny trained pipeline that comes with mlxconv: convert, verify, generate."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import format_bytes
from mlxconv.runtime.generate.pipeline import load

from ..conversion import convert
from ..verify.metrics import compare, psnr_db
from ..verify.verify import verify
from . import CHECKPOINT, TOKENS
from .accuracy import STEPS, by_diffusers, by_mlx, is_right
from .scenes import Scene, held_out_scenes
from .sheet import Column, draw_sheet

PRECISIONS = ("fp32", "bf16", "8bit", "4bit")
PROMPTS = 24  # of the held-out ones, unless asked otherwise
_SHOWN = 6
_LABELS = ("size", "PSNR against diffusers", "drawn as prompted")
_DENOISER = "transformer"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DemoRow:
    """One precision: sizes in bytes, times in seconds, and what was measured."""

    q: str
    bytes: int  # of all components
    parameters: int  # of all components
    bits_per_weight: float  # of the transformer
    rel_l2: float  # of one forward of the transformer
    runtime_rel_l2: float | None
    psnr_db: float  # of all pictures against those of diffusers in fp32
    convert_seconds: float
    step_seconds: float
    passed: bool
    prompts: int
    right: int  # pictures that show what their prompt says

    @property
    def accuracy(self) -> float:
        """The share of pictures that are right."""
        return self.right / self.prompts


@dataclass
class DemoReport:
    """All rows, where the bundles and the picture are, and whether every verdict was good."""

    folder: str
    picture: str
    source: str
    source_bytes: int  # of the checkpoint's weights at fp32
    prompts: int
    reference_right: int  # of the pictures by diffusers in fp32
    rows: list[DemoRow] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every bundle verified."""
        return all(row.passed for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """What `demo --json` prints."""
        rows = [{**asdict(row), "accuracy": row.accuracy} for row in self.rows]
        return {
            "passed": self.passed,
            "folder": self.folder,
            "picture": self.picture,
            "source": self.source,
            "source_bytes": self.source_bytes,
            "prompts": self.prompts,
            "steps": STEPS,
            "next_steps": [self.next_step],
            "reference_accuracy": self.reference_right / self.prompts,
            "rows": rows,
        }

    @property
    def next_step(self) -> str:
        """A command that draws a picture; the text encoders were trained on so many tokens."""
        bundle = str(Path(self.folder) / self.rows[0].q)
        drawn = ["--tokens", str(TOKENS), "--steps", str(STEPS), "-o", "picture.png"]
        return shlex.join(["mlxconv", "generate", bundle, held_out_scenes(1)[0].caption, *drawn])

    def as_text(self) -> str:
        """The table."""
        lines = [
            f"tiny FLUX.1, trained: {self.source}",
            f"{self.prompts} prompts that it was not trained on, {STEPS} steps each",
            f"{'':<16}{'size':>9}{'bits':>7}{'rel_l2':>9}{'run':>9}{'PSNR':>10}{'right':>9}"
            f"{'convert':>9}{'step':>9}",
            f"{'diffusers fp32':<16}{format_bytes(self.source_bytes):>9}{'':>35}"
            f"{f'{self.reference_right}/{self.prompts}':>9}",
            *(self._line(row) for row in self.rows),
            "size: of all components. bits: a weight of the transformer. rel_l2: its forward",
            "against diffusers in fp32. run: its own error against its weights, dequantized, run",
            "by diffusers. PSNR: pictures against those of diffusers in fp32, from the same noise.",
            "right: pictures with the colours, shapes, sizes and places of their prompt.",
            f"picture: {self.picture}",
            f"bundles: {self.folder}",
            "next:",
            f"  {self.next_step}",
        ]
        return "\n".join(lines)

    def _line(self, row: DemoRow) -> str:
        run = "-" if row.runtime_rel_l2 is None else f"{row.runtime_rel_l2:.1e}"
        return (
            f"{f'mlx {row.q}':<16}{format_bytes(row.bytes):>9}{row.bits_per_weight:>7.2f}"
            f"{row.rel_l2:>9.1e}{run:>9}{f'{row.psnr_db:.1f} dB':>10}"
            f"{f'{row.right}/{row.prompts}':>9}"
            f"{row.convert_seconds:>8.1f}s{row.step_seconds * 1000:>7.1f}ms"
            f"  {'verified' if row.passed else 'FAILED'}"
        )


def demo(
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    prompts: int = PROMPTS,
    precisions: tuple[str, ...] = PRECISIONS,
) -> DemoReport:
    """Convert the embedded checkpoint to each precision, verify, and generate the same pictures.

    `prompts`: how many held-out prompts the accuracy is measured on. Bundles and `demo.png` are
    kept in `out` (by default a temporary folder).
    """
    if prompts < 1:
        raise MlxconvError(f"--prompts {prompts}: at least 1")
    folder = out or Path(tempfile.mkdtemp(prefix="mlxconv-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    scenes = held_out_scenes(prompts)
    say(f"diffusers fp32: {prompts} pictures of {STEPS} steps")
    exact = by_diffusers(CHECKPOINT, [scene.caption for scene in scenes])
    right = _right(exact, scenes)
    rows, columns = list[DemoRow](), [Column("diffusers fp32", [], exact, right)]
    for q in precisions:
        say(f"mlx {q}: converting, verifying, {prompts} pictures of {STEPS} steps")
        row, made, right_now = _one(folder / q, q, scenes, exact)
        rows.append(row)
        columns.append(Column(f"mlx {q}", _figures(row), made, right_now))
    picture = folder / "demo.png"
    size = 4 * rows[0].parameters
    columns[0].figures[:] = [format_bytes(size), "reference", f"{sum(right)}/{prompts} right"]
    draw_sheet([scene.caption for scene in scenes[:_SHOWN]], columns, _LABELS, picture)
    return DemoReport(str(folder), str(picture), str(CHECKPOINT), size, prompts, sum(right), rows)


def _one(
    bundle: Path, q: str, scenes: list[Scene], exact: Array
) -> tuple[DemoRow, Array, list[bool]]:
    """The row of a precision, its pictures, and which of them are right."""
    report = convert(CHECKPOINT, bundle, q, force=True, command="mlxconv demo")
    parts, parity = report.components.values(), verify(bundle, CHECKPOINT)
    forward = [r for r in parity.tiers if (r.tier, r.component) == ("forward", _DENOISER)]
    runtime = next((r.rel_l2 for r in forward if "runtime" in r.name), None)
    made, step = by_mlx(load(bundle, keep=True), [scene.caption for scene in scenes])
    right = _right(made, scenes)
    row = DemoRow(
        q,
        sum(part.bytes_out for part in parts),
        sum(part.parameters for part in parts),
        report.components[_DENOISER].bits_per_weight,
        forward[0].rel_l2,
        runtime,
        psnr_db(compare([made], [exact]), exact.size),
        report.seconds,
        step,
        parity.passed,
        len(scenes),
        sum(right),
    )
    return row, made, right


def _right(pictures: Array, scenes: list[Scene]) -> list[bool]:
    return [is_right(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]


def _figures(row: DemoRow) -> list[str]:
    return [format_bytes(row.bytes), f"{row.psnr_db:.1f} dB", f"{row.right}/{row.prompts} right"]
