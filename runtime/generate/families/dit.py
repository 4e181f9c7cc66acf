"""DiT, pictures of classes: diffusers 0.42.1, DiTPipeline. The prompt is a label or a number.

Guidance is away from the null class, which is also the empty prompt, or from another class.
"""

import difflib
from typing import ClassVar

import mlx.core as mx

from ...errors import MlxconvError
from ..noise import Generator
from .family import MeanOf
from .images import noise_as, patched_defaults, plain_shape
from .parts import Defaults, Inputs, Parts, Request, Shapes


class Dit(MeanOf):
    encoders = ()
    embeddings: ClassVar[Shapes] = {"class_labels": (1,)}

    def defaults(self, parts: Parts) -> Defaults:
        return patched_defaults(parts, 50, 4.0)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        return {"class_labels": mx.array([_class(parts, prompt.strip())])}

    def start(
        self, parts: Parts, request: Request, generator: Generator, prompt: Inputs
    ) -> mx.array:
        dtype = parts.component("transformer").dtype
        return noise_as(dtype, generator, plain_shape(parts, request))


def _labels(parts: Parts) -> dict[str, int]:
    """Classes by label: model_index.json has several labels a class, between commas."""
    named = parts.index.get("id2label") or {}
    return {label.strip(): int(n) for n, labels in named.items() for label in labels.split(",")}


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
