"""PixArt-Sigma: diffusers 0.42.1, PixArtSigmaPipeline with use_resolution_binning=False.

The prompt is lowered and stripped, as where `ftfy` and `bs4` are not installed or
clean_caption=False; a size is made as it is asked for.
"""

import mlx.core as mx

from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request, t5_states
from .images import (
    mean_of,
    noise_as,
    own_schedule,
    own_times,
    plain_decode,
    plain_shape,
    vae_scale,
)

_TOKENS = 300


def _defaults(parts: Parts) -> Defaults:
    scale, config = vae_scale(parts.config("vae")), parts.config("transformer")
    size = config["sample_size"] * scale
    return Defaults(size, size, 20, 4.5, scale * config["patch_size"])


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    text, length = prompt.lower().strip(), request.tokens or _TOKENS
    hidden, mask = t5_states(parts, "", text, length, masked=True)
    return {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}


def _start(parts: Parts, request: Request, generator: Generator) -> mx.array:
    return noise_as(parts, "text_encoder", generator, plain_shape(parts, request))


PIXART_SIGMA = Family(
    "transformer", ("text_encoder",), _defaults, _encode, _start, lambda parts, request: {},
    own_schedule, own_times, plain_decode, prediction=mean_of,
)  # fmt: skip
