"""Everything that a card says about a bundle, gathered from its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mlxconv.runtime.bundle import Bundle
from mlxconv.runtime.dtypes import SHORT_NAMES
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.families import FAMILIES

from ..inspection import Held, inspect
from ..source.source_card import Origin
from ..store.bundle_files import refuse_nested
from ..verify.record import Measured
from .licence import Licence
from .listing import PICTURE_FILE

FLOATS = {name: short for short, name in SHORT_NAMES.items()}


@dataclass(frozen=True)
class Sample:
    """A picture made with the bundle, and how, where its file says so (`mlxconv generate` does)."""

    prompt: str | None = None
    steps: int | None = None
    seed: int | None = None
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class CardFacts:
    """Everything a card says. `held` are the bundle's components as their headers have them."""

    repo: str
    bundle: Bundle
    origin: Origin
    licence: Licence
    measured: Measured
    sample: Sample | None
    held: dict[str, Held]

    @property
    def manifest(self) -> dict[str, Any]:
        """The bundle's mlxconv.json."""
        return self.bundle.manifest

    @property
    def pipeline(self) -> str | None:
        """The pipeline's class; None for a bundle of single components."""
        name = self.manifest.get("pipeline")
        return None if name is None else str(name)

    @property
    def main(self) -> str:
        """The component with most parameters among those quantized, or among all converted."""
        converted: list[str] = list(self.manifest["components"])
        quantized = [name for name in converted if self.held[name].quantized]
        return max(quantized or converted, key=lambda name: self.held[name].parameters)

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return sum(held.bytes for held in self.held.values())

    @property
    def source_bytes(self) -> int | None:
        """Bytes of the source's weights; None where some were copied, or are not known."""
        known = [part.get("source_bytes") for part in self.manifest["components"].values()]
        return None if self.manifest.get("copied") or None in known else sum(known)

    @property
    def parameters(self) -> int:
        """Parameters of all components."""
        return sum(held.parameters for held in self.held.values())

    @property
    def native(self) -> bool:
        """Whether mlxconv runs the whole pipeline by itself."""
        parts = self.manifest["components"].values()
        whole = not self.manifest.get("copied") and all(part["program"] for part in parts)
        return self.pipeline in FAMILIES and whole

    @property
    def precision(self) -> str:
        """The main component's, as people write it: `4-bit`, `bf16`, `mxfp4`."""
        q = str(self.manifest["components"][self.main]["q"]).split()[0]
        return FLOATS.get(q) or (f"{q[:-3]}-bit" if q.endswith("bit") else q)

    @property
    def quantized(self) -> bool:
        """Whether that is not a float precision."""
        return self.precision not in FLOATS.values()


def card_facts(
    repo: str, bundle: Bundle, origin: Origin, licence: Licence, measured: Measured
) -> CardFacts:
    """The facts for the card of a bundle; its sample picture is asked how it was made."""
    picture = bundle.path / PICTURE_FILE
    sample = read_sample(picture) if picture.is_file() else None
    held = inspect(bundle.path, tensors=True).components
    for name in bundle.manifest["components"]:
        refuse_nested(name)
    # What the card's code samples name: a bundle may come from anywhere.
    for name in (bundle.manifest.get("pipeline"), *(each.class_name for each in held.values())):
        if name is not None and not str(name).isidentifier():
            raise MlxconvError(
                f"{bundle.path}: {str(name)[:80]!r} is not the name of a class; convert again"
            )
    return CardFacts(repo, bundle, origin, licence, measured, sample, held)


def read_sample(picture: Path) -> Sample:
    """What a PNG says of how it was made. MlxconvError when it is not a PNG."""
    try:
        with Image.open(picture, formats=["PNG"]) as image:
            size, text = image.size, image.info.get("mlxconv", "{}")
            image.verify()
    except (OSError, SyntaxError, ValueError) as error:
        raise MlxconvError(f"{picture}: not a PNG that can be read ({error})") from error
    try:
        made = dict(json.loads(str(text)))
    except (ValueError, TypeError):
        made = {}
    prompt, steps, seed = (made.get(key) for key in ("prompt", "steps", "seed"))
    return Sample(
        prompt if isinstance(prompt, str) else None,
        steps if type(steps) is int else None,
        seed if type(seed) is int else None,
        size,
    )
