"""One HTML page of a `verify`: verdict, pictures, error per block, tables, sizes, versions.

The page is a single file: pictures are data URIs, plots inline SVG, and its own policy forbids any
request. Without JavaScript only the slider over two pictures is missing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from mlxconv.runtime.bundle import Bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import format_bytes, whole
from mlxconv.runtime.machine import described

from ..inspection import inspect
from ..lower.program_cache import versions
from ..report import human_count
from ..source.checkpoint import Checkpoint
from ..templates import render
from .metrics import Array, Row, decibels
from .parity_report import ParityReport
from .plots import Point, Series, log_plot

if TYPE_CHECKING:
    from .pictures import Compared

# The colours of matplotlib's "inferno", from no difference to the largest.
_HEAT = ((0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))
_SMALL = 256  # pictures narrower than this are enlarged without smoothing
_RUNTIME = " (runtime)"
# Columns of words; the others are numbers.
_WORDS = ("component", "name", "result", "reference", "note", "class", "quantized")

_TIERS = {
    "weights": "Weights: every tensor of the bundle beside the checkpoint's",
    "forward": "Forward: one pass of a component",
    "block": "Block: what each repeated module returns in that pass",
    "trajectory": "Trajectory: latents after each step of the scheduler",
    "image": "Image: the pictures",
}


def check_place(path: Path) -> None:
    """MlxconvError where a page cannot be written, before the work that it would show."""
    if path.is_dir():
        raise MlxconvError(f"{path}: is a folder; --report takes the file to write")
    if not path.absolute().parent.is_dir():
        raise MlxconvError(f"{path}: no folder {path.absolute().parent}; create it first")


def write_page(
    path: Path, report: ParityReport, bundle: Bundle, checkpoint: Checkpoint, command: str
) -> None:
    """Write the page of a report; it appears whole or not at all."""
    text = page(report, sizes(bundle, checkpoint), command)
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def page(report: ParityReport, components: Sequence[dict[str, Any]], command: str) -> str:
    """The whole document. components: rows of `sizes`."""
    script = _resource("page.js")
    heat = ", ".join(f"rgb{colour}" for colour in _HEAT)
    shown = [c for c in report.compared if c.ours.pixels is not None and c.exact.pixels is not None]
    return render(
        "verify/page.html.jinja",
        _FILTERS,
        name=Path(report.bundle).absolute().name,
        report=report,
        judged=[row for row in report.tiers if row.judged],
        key=_key(report, components),
        generated=_how_generated(report.generated or {}),
        pictures=[_one(compared) for compared in shown] if report.generated is not None else [],
        trajectories=list(_trajectories(report)),
        blocks=list(_blocks(report)),
        tiers=_TIERS,
        components=components,
        conditions=_conditions(report),
        command=command,
        words=_WORDS,
        plot=log_plot,
        style=Markup(_resource("page.css").replace("HEAT", heat)),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _resource(name: str) -> str:
    return (files("mlxconv") / "convert" / "verify" / name).read_text(encoding="utf-8")


def sizes(bundle: Bundle, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Bytes of each component in the checkpoint and in the bundle, and its bits per weight."""
    rows = []
    for name, held in inspect(bundle.path).components.items():
        source = checkpoint.components.get(name)
        tensors = source.tensors.values() if source else ()
        rows.append(
            {
                "name": name,
                "class": held.class_name,
                "parameters": held.parameters,
                "source": sum(t.nbytes for t in tensors),
                "bundle": held.bytes,
                "bits": held.bits_per_weight,
                "quantized": held.quantized,
                "status": held.status,
            }
        )
    return rows


def _conditions(report: ParityReport) -> dict[str, Any]:
    """What is needed to get the same figures again."""
    machine = described()
    return {
        "bundle": report.bundle,
        "source": report.source,
        "seed": report.seed,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **versions(),
        "system": machine["system"],
        "chip": machine["chip"],
        "MLX device": machine["device"],
        "matrix library": machine["blas"],
    }


# ---- numbers -------------------------------------------------------------------------------------


def _key(
    report: ParityReport, components: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, str, str]]:
    """The figures that most readers look for: name, value, what it belongs to."""
    for name, judged in (("Picture", True), ("Picture, quantization", False)):
        found = [r for r in report.tiers if r.psnr_db is not None and r.judged is judged]
        if found:
            least = min(found, key=lambda row: row.psnr_db or 0.0)
            yield name, f"{decibels(least.psnr_db or 0.0, ' dB')} PSNR", least.name
    nearest = max((r for r in report.tiers if r.threshold), key=_use, default=None)
    if nearest is not None:
        use = 100 * _use(nearest)
        shown = f"{use:.0f} %" if use >= 10 else f"{use:.1g} %"
        yield "Nearest to its limit", shown, f"{nearest.component}, {nearest.name}"
    source, bundle = (sum(c[side] for c in components) for side in ("source", "bundle"))
    both = f"{format_bytes(source)} → {format_bytes(bundle)}"
    yield "Weights", _share(bundle, source) + " of their size", both


def _use(row: Row) -> float:
    """Error as a share of the limit."""
    return row.rel_l2 / row.threshold if row.threshold else 0.0


def _figure(value: float | None, form: str = ".1e") -> str:
    """A figure, with all its digits for machines."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    shown = decibels(value) if form == "dB" else f"{value:{form}}"
    return Markup('<data value="{}">{}</data>').format(repr(value), shown)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


_FILTERS: dict[str, Callable[..., str]] = {
    "figure": _figure,
    "share": _share,
    "bytes": format_bytes,
    "human": human_count,
}


# ---- pictures ------------------------------------------------------------------------------------


def _how_generated(given: dict[str, Any]) -> str:
    if not given:
        return ""
    guidance = "the pipeline’s default" if given["guidance"] is None else f"{given['guidance']:g}"
    native = given["runtime"] == "native"
    return (
        f"{given['pipeline']}, {given['steps']} steps, seed {given['seed']}, guidance {guidance}; "
        f"the bundle by {'its native pipeline' if native else 'into_diffusers'}, "
        f"{given['precision']} ({', '.join(given['components'])})."
    )


def _one(compared: Compared) -> dict[str, Any]:
    """A prompt: reference, bundle, differences."""
    ours, exact = compared.ours.pixels, compared.exact.pixels
    first = compared.original.pixels if compared.original is not None else exact
    assert ours is not None and exact is not None and first is not None
    at = 0
    if len(ours) > 1 and ours.shape == first.shape:
        from .pictures import worst_frame

        at = worst_frame(ours, first)
    frame = f", picture {at + 1} of {len(ours)}, where they differ most" if len(ours) > 1 else ""
    pairs = [("Difference", ours[at], first[at])]
    if compared.original is not None:
        pairs = [
            ("Quantization: bundle and reference", ours[at], first[at]),
            ("Runtime: bundle and its weights, dequantized, in PyTorch", ours[at], exact[at]),
        ]
    if compared.half is not None and compared.half.pixels is not None:
        own = compared.half.pixels[at]
        pairs.append(("For comparison: PyTorch in that precision and reference", own, exact[at]))
    height, width = ours.shape[1:3]
    return {
        "prompt": compared.prompt,
        "sides": [
            _image(f"Reference: {compared.reference}{frame}", _levels(first[at])),
            _image(f"Bundle: MLX{frame}", _levels(ours[at])),
        ],
        "maps": [_heat_map(*pair) for pair in pairs],
        "width": width,
        "height": height,
    }


def _heat_map(caption: str, a: Array, b: Array) -> dict[str, Any]:
    """The largest difference of a pixel's channels, coloured from none to the picture's largest."""
    gaps = np.abs(np.nan_to_num(a.astype(np.float64) - b, nan=np.inf)).max(axis=-1)
    if not gaps.max():
        image = _image(caption, _coloured(np.zeros_like(gaps)))
        return {**image, "scale": "0", "levels": "identical"}
    finite = gaps[np.isfinite(gaps)]
    top = float(finite.max()) if finite.size and finite.max() else 1.0
    image = _image(caption, _coloured(np.minimum(gaps / top, 1)))
    levels = f"{255 * top:{'.0f' if top > 0.1 else '.2g'}} of 255 levels"
    return {**image, "scale": f"{top:.2g}", "levels": levels}


def _image(caption: str, levels: Array) -> dict[str, Any]:
    """(height, width, 3), 8 bits -> a data URI and what is said of it."""
    file = io.BytesIO()
    Image.fromarray(levels).save(file, format="PNG", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    small = levels.shape[1] < _SMALL
    return {"caption": caption, "small": small, "uri": f"data:image/png;base64,{data}"}


def _coloured(values: Array) -> Array:
    """(height, width) in 0 to 1 -> colours."""
    stops = np.linspace(0, 1, len(_HEAT))
    channels = [np.interp(values, stops, [c[i] for c in _HEAT]) for i in range(3)]
    return np.round(np.stack(channels, axis=-1)).astype(np.uint8)


def _levels(pixels: Array) -> Array:
    """(height, width, channels) in 0 to 1 -> 8 bits of red, green and blue."""
    values = np.nan_to_num(np.clip(pixels, 0, 1))
    values = values[..., :3] if values.shape[-1] >= 3 else values[..., :1].repeat(3, axis=-1)
    levels: Array = np.round(255 * values).astype(np.uint8)
    return levels


# ---- plots ---------------------------------------------------------------------------------------


def _trajectories(report: ParityReport) -> Iterator[tuple[str, list[Series]]]:
    """A plot for each prompt: its title, and the errors after each step."""
    rows = [row for row in report.tiers if row.tier == "trajectory"]
    for prompt, found in groupby(rows, lambda row: row.name.rpartition("step ")[0]):
        steps = list(found)
        judged = [_step(row) for row in steps if row.judged]
        cost = [_step(row) for row in steps if not row.judged]
        series = [Series("runtime, against its own weights" if cost else "bundle", "first", judged)]
        if cost:
            series.append(Series("quantization, against the original", "second", cost))
        yield prompt.rstrip(", ") or "latents", series


def _step(row: Row) -> Point:
    number = row.name.rpartition("step ")[2].split()[0]
    return Point(row.name, "step", number, row.rel_l2, row.threshold, row.passed)


def _blocks(report: ParityReport) -> Iterator[tuple[str, list[Series]]]:
    """A plot for each entry of a component: its blocks in order, and its output."""
    judged = [r for r in report.tiers if r.tier in ("forward", "block") and r.judged]
    for k, forward in enumerate(judged):
        following = takewhile(lambda row: row.tier == "block", judged[k + 1 :])
        if forward.tier == "forward" and (blocks := [_block(row) for row in following]):
            name = forward.name.removesuffix(_RUNTIME)
            title = f"{forward.component}, {name}" if name != "forward" else forward.component
            yield title, [Series("bundle", "first", [*blocks, _block(forward)])]


def _block(row: Row) -> Point:
    name = row.name.removesuffix(_RUNTIME)
    group, _, index = name.rpartition(".")
    if row.tier == "forward":
        group, index = "output", ""
    elif not index.isdigit():
        group, index = name, ""
    return Point(name, group, index, row.rel_l2, row.threshold, row.passed)
