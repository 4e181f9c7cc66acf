"""DiT, pictures of classes: diffusers 0.42.1, DiTPipeline. The prompt is a label or a number.

Guidance is away from the null class, which is also the empty prompt, or from another class.
"""

import difflib

import mlx.core as mx

from ...errors import MlxconvError
from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request, as_encoded
from .images import mean_of, noise_as, own_schedule, own_times, plain_decode, plain_shape, vae_scale


def _defaults(parts: Parts) -> Defaults:
    scale, config = vae_scale(parts.config("vae")), parts.config("transformer")
    size = config["sample_size"] * scale
    return Defaults(size, size, 50, 4.0, scale * config["patch_size"])


def _labels(parts: Parts) -> dict[str, int]:
    """Classes by label: model_index.json has several labels a class, between commas."""
    named = parts.index.get("id2label") or {}
    return {label.strip(): int(n) for n, labels in named.items() for label in labels.split(",")}


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    return {"class_labels": mx.array([_class(parts, prompt.strip())])}


def _class(parts: Parts, prompt: str) -> int:
    count, labels = parts.config("transformer")["num_embeds_ada_norm"], _labels(parts)
    if not prompt:
        return int(count)
    if prompt in labels:
        return labels[prompt]
    if prompt.isdecimal() and int(prompt) < count:
        return int(prompt)
    near = difflib.get_close_matches(prompt, labels, n=5)
    raise MlxconvError(
        f"{prompt!r} is not a class of {parts.bundle.path}: give a number from 0 to {count - 1}"
        + (
            f", or a label of its model_index.json: {', '.join(near or list(labels)[:5])}, ..."
            if labels
            else "; its model_index.json has no labels (id2label)"
        )
    )


def _start(parts: Parts, request: Request, generator: Generator, prompt: Inputs) -> mx.array:
    dtype = parts.component("transformer").dtype
    return noise_as(dtype, generator, plain_shape(parts, request))


DIT = Family(
    "transformer",
    (),
    {"class_labels": (1,)},
    _defaults,
    _encode,
    _start,
    as_encoded,
    own_schedule,
    own_times,
    plain_decode,
    prediction=mean_of,
    takes_tokens=False,
)
