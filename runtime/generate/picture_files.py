"""Pictures as files that say how they were made, so that they can be made again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..bundle import default_dtype, fingerprint
from ..errors import ArgumentError, MlxconvError
from ..files import whole
from ..machine import described
from .families.family import Family
from .families.parts import Parts, Request
from .plan import Plan

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_KEY, _TEXT = "mlxconv", "parameters"  # PNG's text chunks: JSON, and the text that others write
_EXIF, _COMMENT, _OURS = 0x8769, 0x9286, 0x927C  # the Exif directory; UserComment; MakerNote
_MOST_EXIF = 65000  # bytes: of a JPEG's one segment
_SPACINGS = {"steps", "sigmas", "timesteps"}  # one of them spaces the steps
# What a record may ask for: it may come from anywhere.
_CALL: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("prompt", "negative", "scheduler", "decoder", "dtype", "vae_dtype"), str),
    **dict.fromkeys(("seed", "width", "height", "steps", "tokens"), int),
    **dict.fromkeys(("guidance", "cfg", "cfg_end"), (int, float)),
    **dict.fromkeys(("sigmas", "timesteps"), list),
    "conditioning": dict,
}

Record = dict[str, Any]


def records_of(parts: Parts, family: Family, plan: Plan) -> list[Record]:
    """How each picture is made: `call` holds the keywords that make it again with the bundle."""
    options, bundle, machine = plan.options, parts.bundle, described()
    activations = parts.dtype or default_dtype(parts.config(family.denoiser))
    weights = str(bundle.manifest["components"][family.denoiser].get("q")).split()[0]
    names = [*family.encoders, family.denoiser, "vae", "scheduler"]
    same: Record = {
        "scheduler": plan.scheduler.name,
        "precision": {"weights": weights, "activations": activations},
        "pipeline": bundle.manifest.get("pipeline"),
        "bundle": bundle.name,
        "bundle_hash": fingerprint(bundle, names),
        "source": _public(str(bundle.manifest.get("source"))),
        "versions": machine["versions"],
        "device": f"{machine['device']}: {machine['chip']}",
    }
    given = {**options.recorded(), "dtype": parts.dtype, "vae_dtype": parts.vae_dtype}
    if not family.reads_guidance(parts):
        same["guidance"] = None
    if options.embeddings is not None or options.negative_embeddings is not None:
        return [{**_facts(request), **same} for request in plan.requests]  # no words make it again
    return [{**_facts(request), **same, "call": _call(given, request)} for request in plan.requests]


def _public(source: str) -> str:
    """A repository as it is; of a folder its name, since pictures are passed on."""
    return Path(source).name if Path(source).is_absolute() else source


def _facts(request: Request) -> Record:
    return {
        "prompt": request.prompt,
        "negative": request.negative,
        "seed": request.seed,
        "steps": request.steps,
        "size": [request.width, request.height],
        "guidance": request.guidance,
        "cfg": request.cfg,
    }


def _call(given: Record, request: Request) -> Record:
    own: Record = {
        "prompt": request.prompt,
        "negative": request.negative,
        "seed": request.seed,
        "width": request.width,
        "height": request.height,
    }
    if request.sigmas is None and request.timesteps is None:
        own["steps"] = request.steps
    return {name: value for name, value in {**own, **given}.items() if value is not None}


def summary(records: Sequence[Record]) -> str:
    """What runs, in a line."""
    one, seeds = records[0], list(dict.fromkeys(record["seed"] for record in records))
    weights, activations = one["precision"].values()
    precision = weights if weights == activations else f"{weights} weights in {activations}"
    shown = ", ".join(map(str, seeds[:4])) + (f" to {seeds[-1]}" if len(seeds) > 4 else "")
    (width, height), device = one["size"], one["device"].partition(":")[0]
    many = f"{len(records)} pictures of " if records[1:] else ""
    steps = f"{one['steps']} step{'s' * (one['steps'] > 1)}"
    return (
        f"{one['bundle']}: {one['pipeline']}, {precision}, {many}{width}x{height}, {steps}, "
        f"seed {shown}, {one['scheduler']}, {device}"
    )


def as_text(record: Record) -> str:
    """The text that AUTOMATIC1111's interface writes and most others read."""
    negative, (width, height) = record["negative"], record["size"]
    lines = [record["prompt"], *([f"Negative prompt: {negative}"] if negative is not None else [])]
    facts = {
        "Steps": record["steps"],
        "Sampler": record["scheduler"],
        "CFG scale": record["cfg"],
        "Distilled CFG Scale": record["guidance"],
        "Seed": record["seed"],
        "Size": f"{width}x{height}",
        "Model hash": record["bundle_hash"][:10],
        "Model": record["bundle"],
        "Version": f"mlxconv {record['versions'].get('mlxconv', '')}",
    }
    if record["guidance"] in (None, record["cfg"]):
        del facts["Distilled CFG Scale"]
    return "\n".join([*lines, ", ".join(f"{name}: {value}" for name, value in facts.items())])


# ---- files ---------------------------------------------------------------------------------------


def _names_folder(out: str | Path) -> bool:
    return Path(out).is_dir() or str(out).endswith("/")


def check_target(out: str | Path) -> None:
    """ArgumentError where no picture can be written there: a folder is missing, or a format."""
    if _names_folder(out):
        _check_parent(Path(out))
    else:
        check_file(out, ", or a folder that exists or ends in /")


def check_file(out: str | Path, hint: str = "") -> None:
    """As `check_target`, of a single file."""
    file = Path(out)
    if file.is_dir() or file.suffix.lower() not in FORMATS:
        raise ArgumentError(f"{file}: give a name that ends in {', '.join(FORMATS)}{hint}")
    _check_parent(file)


def _check_parent(file: Path) -> None:
    if not file.parent.is_dir():
        raise ArgumentError(f"{file}: no folder {file.parent}; create it first")


def target_names(out: str | Path, records: Sequence[Record]) -> list[Path]:
    """A file for each picture. `out` itself is a single one's; several are named by their seeds,
    with several prompts by the prompt's number, from 1, and the seed: `NAME-SEED`, `NAME-2-SEED`.
    In a folder (one that exists or a name with / at its end) there is no NAME, and a name that is
    taken is not written over: `SEED-1`."""
    target, into = Path(out), _names_folder(out)
    if len(records) == 1 and not into:
        return [target]
    prompts = list(dict.fromkeys(record["prompt"] for record in records))
    taken: list[Path] = []
    for record in records:
        number = f"{prompts.index(record['prompt']) + 1:0{len(str(len(prompts)))}d}-"
        stem = f"{number if prompts[1:] else ''}{record['seed']}"
        first = target / f"{stem}.png" if into else target.with_stem(f"{target.stem}-{stem}")
        again = (first.with_stem(f"{first.stem}-{i}") for i in count(1))
        files = chain([first], again)
        taken.append(next(f for f in files if f not in taken and not (into and f.exists())))
    return taken


def save(file: Path, image: Image.Image, record: Record | None) -> None:
    """A picture in the format of its name, with its record; it appears whole or not at all."""
    kind = FORMATS[file.suffix.lower()]
    options: Record = {} if kind == "PNG" else {"quality": 95, "subsampling": 0}
    if record is not None:
        options |= {"pnginfo": _png(record)} if kind == "PNG" else {"exif": _exif(record)}
    if kind == "JPEG" and len(options.get("exif", b"")) > _MOST_EXIF:
        raise MlxconvError(f"{file}: the prompt is too long for a JPEG's metadata; give .png")
    with whole(file) as part:
        file.parent.mkdir(exist_ok=True)
        image.save(part, format=kind, **options)


def _png(record: Record) -> PngInfo:
    info = PngInfo()
    info.add_text(_TEXT, as_text(record))
    info.add_text(_KEY, _json(record))
    return info


def _exif(record: Record) -> bytes:
    exif = Image.Exif()
    inner = exif.get_ifd(_EXIF)
    inner[_COMMENT] = b"UNICODE\0" + as_text(record).encode("utf-16-be")
    inner[_OURS] = _json(record).encode()
    return exif.tobytes()


def _json(record: Record) -> str:
    """NumPy's numbers and arrays as lists, paths as text."""
    return json.dumps(record, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))


def read_record(file: Path) -> Record:
    """What `save` wrote; MlxconvError where there is nothing."""
    try:
        with Image.open(file) as image:
            found = image.info.get(_KEY) or image.getexif().get_ifd(_EXIF).get(_OURS)
        record = json.loads(found) if found else None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MlxconvError(
            f"{file}: not an image that can be read; give one that mlxconv wrote"
        ) from error
    if not isinstance(record, dict):
        raise MlxconvError(f"{file}: stores no settings; give an image as mlxconv wrote it")
    return record


def again(record: Record | None, given: Record) -> Record:
    """The keywords that make a picture again, but for those given in their place."""
    if record is None:
        return {}
    call = record.get("call")
    if not isinstance(call, dict):
        raise MlxconvError(
            "the picture's record does not hold all that made it (an older mlxconv, "
            "or embeddings); pass prompt, seed, steps and size"
        )
    wrong = [name for name, value in call.items() if not isinstance(value, _CALL.get(name, ()))]
    if wrong:
        raise MlxconvError(
            f"the picture's record has an unusable {wrong[0]!r:.80}; pass prompt, "
            "seed, steps and size instead"
        )
    changed = {name for name, value in given.items() if value is not None}
    if changed & _SPACINGS:
        changed |= _SPACINGS
    return {name: value for name, value in call.items() if name not in changed}


@dataclass
class Pictures:
    """What a generation made, and how long its phases took, in seconds.

    requests: one per image, which alone gives the same image; records: the requests with all other
    settings, as `save` writes them into the files. seconds: `encode`, `prepare`,
    `first_step`, `steps` (all others), `step_median`, `preview` where there was one, `decode` and
    `total`.
    """

    images: list[Image.Image]
    pixels: np.ndarray[Any, Any]  # (count, height, width, 3) float32 in 0 to 1
    requests: list[Request]
    records: list[Record]
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)  # of MLX's memory, a phase

    @property
    def request(self) -> Request:
        """That of the first picture."""
        return self.requests[0]

    @property
    def seeds(self) -> list[int]:
        """One a picture."""
        return [request.seed for request in self.requests]

    def save(self, out: str | Path) -> list[Path]:
        """Write them as `out` (.png, .jpg or .webp; several with their seeds in the name, see
        `target_names`), or into a folder; each file says how its picture was made."""
        check_target(out)
        files = target_names(out, self.records)
        for file, image, record in zip(files, self.images, self.records, strict=True):
            save(file, image, record)
        return files

    def __repr__(self) -> str:
        one = self.request
        return (
            f"<Pictures: {len(self.requests)} of {one.width}x{one.height}, {one.steps} steps, "
            f"seed {', '.join(map(str, self.seeds))}, "
            f"{self.seconds.get('total', 0.0):.1f} s>"
        )
