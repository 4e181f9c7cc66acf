"""The main job on a tiny FLUX.1-shaped checkpoint made on the spot: convert, verify, run."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image, ImageDraw

from mlxconv.runtime.bundle import load_component

from .conversion import convert
from .measure import tiny_checkpoint
from .parity import verify
from .recipe import load_recipe
from .report import human_bytes

PRECISIONS = ("bf16", "8bit", "4bit")
_LATENT = (8, 12)  # rows and columns of 2x2 latent patches
_STEPS = 4


@dataclass(frozen=True)
class DemoRow:
    """One precision: sizes in bytes, times in seconds, and what was measured."""

    q: str
    bytes: int
    bits_per_weight: float
    rel_l2: float
    runtime_rel_l2: float | None
    psnr_db: float | None  # None: the reference itself
    convert_seconds: float
    step_seconds: float
    passed: bool


@dataclass
class DemoReport:
    """All rows, where the bundles and the picture are, and whether every verdict was good."""

    folder: str
    picture: str
    source_bytes: int
    rows: list[DemoRow]

    @property
    def passed(self) -> bool:
        """Whether every bundle verified."""
        return all(row.passed for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """What `demo --json` prints."""
        rows = [asdict(row) for row in self.rows]
        return {
            "passed": self.passed,
            "folder": self.folder,
            "picture": self.picture,
            "source_bytes": self.source_bytes,
            "rows": rows,
        }

    def as_text(self) -> str:
        """The table."""
        lines = [
            f"tiny FLUX.1 transformer, {human_bytes(self.source_bytes)} in fp32, random weights",
            f"{'':<6}{'size':>10}{'bits':>7}{'rel_l2':>10}{'run':>10}{'PSNR':>9}"
            f"{'convert':>9}{'step':>9}",
        ]
        for row in self.rows:
            run = "-" if row.runtime_rel_l2 is None else f"{row.runtime_rel_l2:.1e}"
            psnr = "-" if row.psnr_db is None else f"{row.psnr_db:.1f} dB"
            lines.append(
                f"{row.q:<6}{human_bytes(row.bytes):>10}{row.bits_per_weight:>7.2f}"
                f"{row.rel_l2:>10.1e}{run:>10}{psnr:>9}"
                f"{row.convert_seconds:>8.1f}s{row.step_seconds * 1000:>7.1f}ms"
                f"  {'verified' if row.passed else 'FAILED'}"
            )
        lines += [
            "rel_l2: a forward against diffusers in fp32. run: its own error against its weights,",
            f"dequantized, run by diffusers. PSNR: latents of {_STEPS} steps against fp32.",
            f"picture: {self.picture}",
            f"bundles: {self.folder}",
        ]
        return "\n".join(lines)


def demo(out: Path | None = None, say: Callable[[str], None] = lambda text: None) -> DemoReport:
    """Make the tiny checkpoint, convert it to each precision, verify, run, and draw the results.

    Bundles and `demo.png` are kept in `out` (by default a temporary folder).
    """
    folder = out or Path(tempfile.mkdtemp(prefix="mlxconv-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "tiny-flux" / "transformer"
    recipe = load_recipe("FluxTransformer2DModel")
    tiny_checkpoint(recipe, None, source)
    _make_pipeline(source.parent)
    rows: list[DemoRow] = []
    latents: dict[str, np.ndarray[Any, Any]] = {}
    for q in ("fp32", *PRECISIONS):
        say(f"{q}: converting, verifying, running {_STEPS} steps")
        row, latents[q] = _one(source.parent, folder / q, q, latents.get("fp32"))
        rows.append(row)
    picture = folder / "demo.png"
    _draw({q: latents[q] for q in latents}, rows, picture)
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    return DemoReport(str(folder), str(picture), size, rows)


def _make_pipeline(folder: Path) -> None:
    """A pipeline folder around the transformer, as diffusers lays it out."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(str(folder / "scheduler"))
    index = {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _one(
    source: Path, out: Path, q: str, exact: np.ndarray[Any, Any] | None
) -> tuple[DemoRow, np.ndarray[Any, Any]]:
    report = convert(source, out, q, force=True, command="mlxconv demo")
    part = report.components["transformer"]
    parity = verify(out, source)
    forward = [r for r in parity.tiers if r.tier == "forward"]
    runtime = next((r.rel_l2 for r in forward if "runtime" in r.name), None)
    latents, step = _denoise(out)
    psnr = None if exact is None else _psnr(latents, exact)
    row = DemoRow(
        q,
        part.bytes_out,
        part.bits_per_weight,
        forward[0].rel_l2,
        runtime,
        psnr,
        report.seconds,
        step,
        parity.passed,
    )
    return row, latents


def _denoise(bundle: Path) -> tuple[np.ndarray[Any, Any], float]:
    """A few Euler steps of the flow from seeded noise, on random embeddings; median step time."""
    model = load_component(bundle, "transformer", compile="block")
    rng = np.random.default_rng(0)
    config, tokens = model.config, _LATENT[0] * _LATENT[1]
    rows, columns = np.divmod(np.arange(tokens), _LATENT[1])
    fixed = {
        "encoder_hidden_states": rng.standard_normal((1, 16, config["joint_attention_dim"])),
        "pooled_projections": rng.standard_normal((1, config["pooled_projection_dim"])),
        "img_ids": np.stack([np.zeros(tokens), rows, columns], axis=1),
        "txt_ids": np.zeros((16, 3)),
        "guidance": np.array([4.0]),
    }
    inputs = {k: mx.array(v.astype(np.float32)) for k, v in fixed.items()}
    x = mx.array(rng.standard_normal((1, tokens, config["in_channels"])).astype(np.float32))
    seconds, sigmas = [], np.linspace(1, 0, _STEPS + 1)
    for now, after in pairwise(sigmas):
        started = time.perf_counter()
        velocity = model(hidden_states=x, timestep=mx.array([float(now)]), **inputs)
        x = x + float(after - now) * velocity.astype(mx.float32)
        mx.eval(x)
        seconds.append(time.perf_counter() - started)
    return np.array(x[0]), float(np.median(seconds))


def _psnr(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Peak signal-to-noise ratio of `a` against `b` in dB, the peak being b's range."""
    error = max(float(np.mean((a - b) ** 2)), 1e-30)
    return float(10 * np.log10(float(b.max() - b.min()) ** 2 / error))


def _draw(latents: dict[str, np.ndarray[Any, Any]], rows: list[DemoRow], path: Path) -> None:
    """Three latent channels of each result as colours, side by side on one scale."""
    exact = next(iter(latents.values()))
    low, high = np.percentile(exact[:, :3], [1, 99])
    scale, gap = 16, 12
    height, width = _LATENT[0] * scale, _LATENT[1] * scale
    sheet = Image.new("RGB", ((width + gap) * len(latents) + gap, height + 3 * gap + 8), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (row, (q, values)) in enumerate(zip(rows, latents.items(), strict=True)):
        tile = np.clip((values[:, :3] - low) / (high - low), 0, 1).reshape(*_LATENT, 3)
        image = Image.fromarray((tile * 255).astype(np.uint8))
        left = gap + i * (width + gap)
        sheet.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, gap))
        psnr = "reference" if row.psnr_db is None else f"{row.psnr_db:.1f} dB"
        pen.text((left, height + gap + 4), f"{q}  {human_bytes(row.bytes)}  {psnr}", fill="black")
    sheet.save(path)
