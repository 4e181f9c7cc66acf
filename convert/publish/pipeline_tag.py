"""The Hub's `pipeline_tag` of a pipeline: what goes in, what comes out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# The medium by words of a class name; the first that matches counts.
_MEDIUM_WORDS = (
    ("video", re.compile(r"Video|Vid(?=[A-Z]|$)|(?<=2)V(?=[A-Z]|$)")),
    ("audio", re.compile(r"Audio|Music|Speech")),
    ("image", re.compile(r"Image|Img|Pix|Picture")),
)
# The medium by the rank of the weights of an autoencoder's convolutions.
_MEDIUM_RANKS = {3: "audio", 4: "image", 5: "video"}
_OUT_OF = re.compile(r"(?:To|2)(Image|Img|Video|Vid)")
_PICTURE_IN = re.compile(
    r"(?:Image|Img|I)(?:To|2)|2Img|Pix2Pix|Inpaint|Upscale|Edit|Variation|Fill"
)
_VIDEO_IN = re.compile(r"(?:Video|Vid)(?:To|2)(?:Video|Vid)")
_TEXT_IN = re.compile(r"text_encoder|tokenizer|prompt")


def pipeline_tag(
    class_name: str | None, components: Iterable[str], ranks: Mapping[int, int]
) -> str | None:
    """The tag of a pipeline class, or None where no rule applies.

    `components` are the names that the pipeline's index has a class for, `ranks` counts the
    weights of its autoencoder by rank (of its denoiser, where it has none). Words of the class
    name go before facts of the weights: image pipelines may have an autoencoder made for video.
    """
    if not class_name:
        return None
    names = list(components)
    if _VIDEO_IN.search(class_name):
        return "video-to-video"
    moving = any("motion" in name for name in names)  # a part that adds time to image models
    medium = "video" if moving else _medium(class_name, ranks)
    reads_text = any(_TEXT_IN.search(name) for name in names)
    reads_picture = bool(_PICTURE_IN.search(class_name)) or (
        medium == "video" and "image_encoder" in names
    )
    if medium in ("image", "video") and reads_picture:
        return f"image-to-{medium}"
    if medium is not None and reads_text:
        return f"text-to-{medium}"
    return "unconditional-image-generation" if medium == "image" else None


def _medium(class_name: str, ranks: Mapping[int, int]) -> str | None:
    out = _OUT_OF.search(class_name)
    words = out[1] if out else class_name
    for medium, pattern in _MEDIUM_WORDS:
        if pattern.search(words):
            return medium
    convolutions = {rank: count for rank, count in ranks.items() if rank in _MEDIUM_RANKS}
    if not convolutions:
        return None
    return _MEDIUM_RANKS[max(convolutions, key=lambda rank: convolutions[rank])]
