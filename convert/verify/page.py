"""One HTML page of a `verify`: verdict, pictures, error per block, tables, sizes, versions.

The page is a single file: pictures are data URIs, plots inline SVG, and its own policy forbids any
request. Without JavaScript only the slider over two pictures is missing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mlxconv.runtime.bundle import Bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import format_bytes, whole
from mlxconv.runtime.machine import described

from ..inspection import inspect
from ..lower.program_cache import versions
from ..report import human_count
from ..source.checkpoint import Checkpoint
from .metrics import Array, Row, decibels
from .parity_report import ParityReport
from .plots import Point, Series, log_plot

if TYPE_CHECKING:
    from .pictures import Compared

# The colours of matplotlib's "inferno", from no difference to the largest.
_HEAT = ((0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))
_SMALL = 256  # pictures narrower than this are enlarged without smoothing
_LONG = 24  # rows; longer tables are folded
_PLOT_WIDTHS = {"narrow": 358, "wide": 500}
_RUNTIME = " (runtime)"

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
        raise MlxconvError(f"{path}: no folder {path.absolute().parent}; make it first")


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
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    heat = ", ".join(f"rgb{colour}" for colour in _HEAT)
    style = _resource("page.css").replace("HEAT", heat)
    name = Path(report.bundle).absolute().name
    sections = (
        _pictures(report),
        _trajectories(report),
        _blocks(report),
        _tables(report),
        _sizes(components),
        _conditions(report, command),
        _MEANINGS,
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<title>Parity of {escape(name)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="kind">mlxconv parity report</p>
<h1>{escape(name)}</h1>
{_verdict(report)}
{_key(report, components)}
</header>
<main>
{"".join(sections)}</main>
<footer></footer>
<script>{script}</script>
</body>
</html>
"""


def _resource(name: str) -> str:
    return (files("mlxconv") / "convert" / "verify" / name).read_text(encoding="utf-8")


# ---- numbers -------------------------------------------------------------------------------------


def _number(value: float | None, form: str = ".1e") -> str:
    """A figure, with all its digits for machines."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    shown = decibels(value) if form == "dB" else f"{value:{form}}"
    return f'<data value="{value!r}">{shown}</data>'


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


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


# ---- verdict -------------------------------------------------------------------------------------


def _verdict(report: ParityReport) -> str:
    judged = [row for row in report.tiers if row.judged]
    wrong = [row for row in judged if not row.passed]
    if report.passed:
        told = f"All {len(judged)} judged comparisons are within their limits."
    else:
        told = f"{len(wrong)} of {len(judged)} judged comparisons are not within their limits."
    begins = [
        f"<p>{escape(name)}: the error begins at <code>{escape(at)}</code></p>"
        for name, at in report.begins_at.items()
    ]
    notes = [f'<p class="note">{escape(note)}</p>' for note in report.notes]
    state, word = ("passed", "PASSED") if report.passed else ("failed", "FAILED")
    return (
        f'<div class="verdict {state}"><strong>{word}</strong>\n<p>{told}</p>\n'
        f"{''.join(begins)}{''.join(notes)}</div>"
    )


def _key(report: ParityReport, components: Sequence[dict[str, Any]]) -> str:
    """The figures that most readers look for: name, value, what it belongs to."""
    facts: list[tuple[str, str, str]] = []
    for name, judged in (("Picture", True), ("Picture, quantization", False)):
        pictures = [row for row in report.tiers if row.psnr_db is not None]
        found = [row for row in pictures if row.judged is judged]
        if found:
            least = min(found, key=lambda row: row.psnr_db or 0.0)
            facts.append((name, f"{decibels(least.psnr_db or 0.0, ' dB')} PSNR", least.name))
    nearest = max((r for r in report.tiers if r.threshold), key=_use, default=None)
    if nearest is not None:
        use = 100 * _use(nearest)
        shown = f"{use:.0f} %" if use >= 10 else f"{use:.1g} %"
        facts.append(("Nearest to its limit", shown, f"{nearest.component}, {nearest.name}"))
    source, bundle = (sum(c[side] for c in components) for side in ("source", "bundle"))
    told = f"{format_bytes(source)} → {format_bytes(bundle)}"
    facts.append(("Weights", _share(bundle, source) + " of their size", told))
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(of)}</small></dd></div>"
        for name, value, of in facts
    )
    return f'<dl class="key">{rows}</dl>'


def _use(row: Row) -> float:
    """Error as a share of the limit."""
    return row.rel_l2 / row.threshold if row.threshold else 0.0


# ---- pictures ------------------------------------------------------------------------------------


def _pictures(report: ParityReport) -> str:
    shown = [c for c in report.compared if c.ours.pixels is not None and c.exact.pixels is not None]
    if not shown or report.generated is None:
        return ""
    given = report.generated
    how = (
        f"{given['pipeline']}, {given['steps']} steps, seed {given['seed']}, guidance "
        f"{_or_default(given['guidance'])}; the bundle by "
        f"{'its native pipeline' if given['runtime'] == 'native' else 'into_diffusers'}, "
        f"{given['precision']} ({', '.join(given['components'])})."
    )
    body = "".join(_one(compared, i) for i, compared in enumerate(shown))
    return f"<section>\n<h2>Pictures</h2>\n<p>{escape(how)}</p>\n{body}</section>\n"


def _or_default(value: Any) -> str:
    return "the pipeline’s default" if value is None else f"{value:g}"


def _one(compared: Compared, number: int) -> str:
    """A prompt: reference, bundle, differences, and a slider between the first two."""
    ours, exact = compared.ours.pixels, compared.exact.pixels
    first = compared.original.pixels if compared.original is not None else exact
    assert ours is not None and exact is not None and first is not None
    at = 0
    if len(ours) > 1 and ours.shape == first.shape:
        from .pictures import worst_frame

        at = worst_frame(ours, first)
    frame = f", picture {at + 1} of {len(ours)}, where they differ most" if len(ours) > 1 else ""
    sides = _figure(first[at], f"Reference: {compared.reference}{frame}", "side") + _figure(
        ours[at], f"Bundle: MLX{frame}", "side"
    )
    pairs = [("Difference", ours[at], first[at])]
    if compared.original is not None:
        pairs = [
            ("Quantization: bundle and reference", ours[at], first[at]),
            ("Runtime: bundle and its weights, dequantized, in PyTorch", ours[at], exact[at]),
        ]
    if compared.half is not None and compared.half.pixels is not None:
        own = compared.half.pixels[at]
        pairs.append(("For comparison: PyTorch in that precision and reference", own, exact[at]))
    maps = "".join(_heat_map(*pair) for pair in pairs)
    height, width = ours.shape[1:3]
    return (
        f"<h3>“{escape(compared.prompt)}”</h3>\n"
        f'<div class="pair"><div class="pictures">{sides}{maps}</div>\n'
        f'<div class="compare" hidden><div class="stage" style="--at:50%"></div>'
        f'<label class="note" for="slide-{number}">Slide: reference left of the line, bundle right '
        f"of it ({width} × {height})</label>"
        f'<input type="range" id="slide-{number}" min="0" max="100" value="50" step="1" '
        'data-left="reference"></div></div>\n'
    )


def _figure(pixels: Array, caption: str, kind: str) -> str:
    return (
        f'<figure><img class="{kind}{_small(pixels)}" src="{_data_uri(_levels(pixels))}" '
        f'alt="{escape(caption)}"><figcaption>{_bold(caption)}</figcaption></figure>'
    )


def _bold(caption: str) -> str:
    head, colon, rest = caption.partition(":")
    return f"<b>{escape(head)}</b>{escape(colon + rest)}"


def _heat_map(caption: str, a: Array, b: Array) -> str:
    """The largest difference of a pixel's channels, coloured from none to the picture's largest."""
    gaps = np.abs(np.nan_to_num(a.astype(np.float64) - b, nan=np.inf)).max(axis=-1)
    most = float(gaps.max())
    if not most:
        image, scale, levels = np.zeros_like(gaps), "0", "identical"
    else:
        finite = gaps[np.isfinite(gaps)]
        top = float(finite.max()) if finite.size and finite.max() else 1.0
        image, scale = np.minimum(gaps / top, 1), f"{top:.2g}"
        levels = f"{255 * top:{'.0f' if top > 0.1 else '.2g'}} of 255 levels"
    picture, alt = _data_uri(_coloured(image)), f"{caption}, heat map; largest {scale}, {levels}"
    return (
        f'<figure><img class="map{_small(a)}" src="{picture}" alt="{escape(alt)}">'
        f"<figcaption>{_bold(caption)}"
        f'<span class="scale"><span>0</span><span>{scale}</span></span>{levels}'
        "</figcaption></figure>"
    )


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


def _small(pixels: Array) -> str:
    return " small" if pixels.shape[1] < _SMALL else ""


def _data_uri(levels: Array) -> str:
    file = io.BytesIO()
    Image.fromarray(levels).save(file, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# ---- plots ---------------------------------------------------------------------------------------


def _trajectories(report: ParityReport) -> str:
    rows = [row for row in report.tiers if row.tier == "trajectory"]
    plots = []
    for prompt, found in groupby(rows, lambda row: row.name.rpartition("step ")[0]):
        steps = list(found)
        judged = [_step(row) for row in steps if row.judged]
        cost = [_step(row) for row in steps if not row.judged]
        series = [Series("runtime, against its own weights" if cost else "bundle", "first", judged)]
        if cost:
            series.append(Series("quantization, against the original", "second", cost))
        plots.append(_plot(series, prompt.rstrip(", ") or "latents"))
    told = "rel_l2 of the latents after each call of the scheduler."
    return _plots("Error along the trajectory", told, plots)


def _step(row: Row) -> Point:
    number = row.name.rpartition("step ")[2].split()[0]
    return Point(row.name, "step", number, row.rel_l2, row.threshold, row.passed)


def _blocks(report: ParityReport) -> str:
    """A plot an entry of a component: its blocks in order, and its output."""
    plots = []
    judged = [r for r in report.tiers if r.tier in ("forward", "block") and r.judged]
    for k, forward in enumerate(judged):
        following = takewhile(lambda row: row.tier == "block", judged[k + 1 :])
        if forward.tier == "forward" and (blocks := [_block(row) for row in following]):
            name = forward.name.removesuffix(_RUNTIME)
            title = f"{forward.component}, {name}" if name != "forward" else forward.component
            plots.append(_plot([Series("bundle", "first", [*blocks, _block(forward)])], title))
    told = "rel_l2 of what each block returns, in order of computation; last, the output."
    return _plots("Error per block", told, plots)


def _block(row: Row) -> Point:
    name = row.name.removesuffix(_RUNTIME)
    group, _, index = name.rpartition(".")
    if row.tier == "forward":
        group, index = "output", ""
    elif not index.isdigit():
        group, index = name, ""
    return Point(name, group, index, row.rel_l2, row.threshold, row.passed)


def _plots(head: str, told: str, plots: Sequence[str]) -> str:
    if not plots:
        return ""
    body = "".join(plots)
    return f'<section>\n<h2>{head}</h2>\n<p>{told}</p>\n<div class="plots">{body}</div></section>\n'


def _plot(series: Sequence[Series], title: str) -> str:
    label = f"rel_l2, {title}"
    drawn = "".join(
        f'<div class="{name}">{log_plot(series, label, width)}</div>'
        for name, width in _PLOT_WIDTHS.items()
    )
    limits = any(point.limit for one in series for point in one.points)
    keys = [(one.label, f"line {one.style}") for one in series]
    keys += [("limit", "limit")] if limits else []
    legend = "".join(
        '<li><svg viewBox="0 0 32 12" aria-hidden="true">'
        f'<path class="{style}" d="M0 6H32"/></svg>{escape(name)}</li>'
        for name, style in keys
    )
    return (
        f'<div><h3>{escape(title)}</h3>\n<div class="plot">{drawn}</div>\n'
        f'<ul class="legend">{legend}</ul></div>\n'
    )


# ---- tables --------------------------------------------------------------------------------------


def _table(label: str, head: Sequence[str], rows: Iterable[str], foot: str = "") -> str:
    names = [f'<th scope="col"{_numeric(name)}>{escape(name)}</th>' for name in head]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{''.join(names)}</tr></thead>\n"
        f"<tbody>{''.join(rows)}</tbody>{foot}</table></div>\n"
    )


_TEXT = ("component", "name", "result", "reference", "note", "class", "quantized")


def _numeric(name: str) -> str:
    return "" if name in _TEXT else ' class="n"'


def _tables(report: ParityReport) -> str:
    parts = []
    for tier, title in _TIERS.items():
        rows = [row for row in report.tiers if row.tier == tier]
        if not rows:
            continue
        noted = any(row.note for row in rows)
        table = _table(title, _columns(tier, noted), (_row(row, noted) for row in rows))
        if len(rows) > _LONG:
            table = f"<details><summary>{len(rows)} rows</summary>\n{table}</details>\n"
        parts.append(f'<h3>{escape(title)}</h3>\n<div id="tier-{tier}">{table}</div>\n')
    return f"<section>\n<h2>All figures</h2>\n{''.join(parts)}</section>\n"


def _columns(tier: str, noted: bool) -> list[str]:
    psnr = ["PSNR, dB"] if tier == "image" else []
    return [
        "component",
        "name",
        "result",
        *psnr,
        "rel_l2",
        "limit",
        "max_rel",
        "max_abs",
        "cosine",
        "dB",
        "reference",
        *(["note"] if noted else []),
    ]


def _row(row: Row, noted: bool) -> str:
    result = ("passed" if row.passed else "failed") if row.judged else "reported"
    colour = f' class="{result}-cell"' if result != "reported" else ""
    psnr = [_number(row.psnr_db, "dB")] if row.tier == "image" else []
    figures = [
        *psnr,
        _number(row.rel_l2),
        _number(row.threshold),
        _number(row.max_rel),
        _number(row.max_abs),
        _number(row.cosine, ".6f"),
        _number(row.sqnr_db, "dB"),
    ]
    cells = "".join(f'<td class="n">{figure}</td>' for figure in figures)
    note = f"<td>{escape(row.note)}</td>" if noted else ""
    return (
        f'<tr><th scope="row">{escape(row.component)}</th><td>{escape(row.name)}</td>'
        f"<td{colour}>{result}</td>{cells}<td>{escape(row.reference)}</td>{note}</tr>\n"
    )


def _sizes(components: Sequence[dict[str, Any]]) -> str:
    head = [
        "component",
        "class",
        "parameters",
        "source",
        "bundle",
        "of source",
        "bits a weight",
        "quantized",
    ]
    rows = []
    for part in components:
        quantized = f"{part['quantized']} matrices" if part["quantized"] else "–"
        source = format_bytes(part["source"]) if part["source"] else "–"
        figures = [
            human_count(part["parameters"]),
            source,
            format_bytes(part["bundle"]),
            _share(part["bundle"], part["source"]),
            f"{part['bits']:.2f}",
        ]
        cells = "".join(f'<td class="n">{figure}</td>' for figure in figures)
        copied = ", copied" if part["status"] == "copied" else ""
        rows.append(
            f'<tr><th scope="row">{escape(part["name"])}</th>'
            f"<td>{escape(part['class'] + copied)}</td>{cells}<td>{quantized}</td></tr>\n"
        )
    source, bundle = (sum(part[side] for part in components) for side in ("source", "bundle"))
    parameters = sum(part["parameters"] for part in components)
    totals = [
        human_count(parameters),
        format_bytes(source),
        format_bytes(bundle),
        _share(bundle, source),
        f"{8 * bundle / max(1, parameters):.2f}",
    ]
    cells = "".join(f'<td class="n">{figure}</td>' for figure in totals)
    foot = f'<tfoot><tr><th scope="row">all</th><td></td>{cells}<td></td></tr></tfoot>'
    table = _table("Sizes", head, rows, foot)
    told = "<p>Weights as stored, with the scales of what is quantized.</p>"
    return f"<section>\n<h2>Sizes</h2>\n{told}\n{table}</section>\n"


# ---- how -----------------------------------------------------------------------------------------


def _conditions(report: ParityReport, command: str) -> str:
    machine = described()
    facts = {
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
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()
    )
    return (
        "<section>\n<h2>How to get it again</h2>\n"
        f'<code class="command">{escape(command)}</code>\n<dl class="rows">{rows}</dl></section>\n'
    )


_MEANINGS = """<section>
<h2>What the figures mean</h2>
<p>For a result a and its reference b: rel_l2 is ‖a−b‖ / ‖b‖, max_rel max|a−b| / max|b|, dB
−20 log₁₀ rel_l2. PSNR is −10 log₁₀ of the mean squared difference of pictures in 0 to 1. A limit is
on rel_l2.</p>
<p>Forward and block pass at 1e-4 in fp32; trajectory and image at 50 dB, of latents to themselves,
of pictures as PSNR: steps and guidance add errors up. In bf16 and fp16 the error may be 1.5 times
that of PyTorch in the same precision, both against PyTorch in fp32. A quantized bundle passes when
the runtime equals its own dequantized weights run in PyTorch; what quantization costs is reported,
not judged. Dense weights have to be equal to the checkpoint’s, and no group of a quantized one
further off than rounding.</p>
</section>
"""
