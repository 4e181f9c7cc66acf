"""Chroma: diffusers 0.42.1, ChromaPipeline."""

import mlx.core as mx

from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request, t5_states
from .flux import decode, grid
from .images import flow_schedule, flow_times, image_ids, packed_noise, vae_scale

_TOKENS = 512


def _defaults(parts: Parts) -> Defaults:
    scale = vae_scale(parts.config("vae"))
    return Defaults(128 * scale, 128 * scale, 35, 5.0, 2 * scale)


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    """T5 does not read the padding; the denoiser reads the first token of it, and the image."""
    tokens, (rows, columns) = request.tokens or _TOKENS, grid(parts, request)
    hidden, mask = t5_states(parts, "", prompt, tokens, masked=True)
    read = (mx.arange(tokens)[None] <= mx.sum(mask, axis=1, keepdims=True)).astype(mx.float32)
    return {
        "encoder_hidden_states": hidden,
        "attention_mask": mx.concatenate([read, mx.ones((1, rows * columns))], axis=1),
        "txt_ids": mx.zeros((tokens, 3)),
    }


def _start(parts: Parts, request: Request, generator: Generator) -> mx.array:
    return packed_noise(parts, "text_encoder", generator, request.count, grid(parts, request))


def _inputs(parts: Parts, request: Request) -> Inputs:
    return {"img_ids": image_ids(*grid(parts, request))}


CHROMA = Family(
    "transformer", ("text_encoder",), _defaults, _encode, _start, _inputs, flow_schedule,
    flow_times, decode,
)  # fmt: skip
