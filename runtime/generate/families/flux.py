"""FLUX.1 (schnell, dev; true guidance with a negative prompt): diffusers 0.42.1, FluxPipeline."""

import mlx.core as mx

from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request, always, t5_states
from .images import (
    flow_schedule,
    flow_times,
    image_ids,
    packed_noise,
    pixels,
    scaled,
    trained_size,
    unpacked,
    vae_scale,
)

_TOKENS = 512


def _defaults(parts: Parts) -> Defaults:
    scale = vae_scale(parts.config("vae"))
    size = trained_size(parts, 2 * scale)
    dev = bool(parts.config("transformer")["guidance_embeds"])
    return Defaults(size, size, 28 if dev else 4, 3.5, 2 * scale)


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    tokens = request.tokens or _TOKENS
    clip = parts.tokens("tokenizer", prompt)
    pooled = parts.component("text_encoder")(input_ids=clip.ids)[1]
    hidden, _ = t5_states(parts, "_2", prompt, tokens, masked=False)
    return {"encoder_hidden_states": hidden, "pooled_projections": pooled}


def grid(parts: Parts, request: Request) -> tuple[int, int]:
    """Rows and columns of tokens, each of 2 x 2 latents."""
    size = 2 * vae_scale(parts.config("vae"))
    return request.height // size, request.width // size


def start(parts: Parts, request: Request, generator: Generator, prompt: Inputs) -> mx.array:
    """Packed noise (1, tokens, channels)."""
    dtype = prompt["encoder_hidden_states"].dtype
    return packed_noise(parts, dtype, generator, grid(parts, request))


def text_ids(prompt: Inputs) -> mx.array:
    """(tokens, 3): zeros."""
    return mx.zeros((prompt["encoder_hidden_states"].shape[1], 3))


def _inputs(parts: Parts, request: Request, prompt: Inputs) -> Inputs:
    ids = {"txt_ids": text_ids(prompt), "img_ids": image_ids(*grid(parts, request))}
    given: dict[str, mx.array] = {**prompt, **ids}
    if parts.config("transformer")["guidance_embeds"]:
        given["guidance"] = mx.array([request.guidance])
    return given


def decode(parts: Parts, latents: mx.array, request: Request) -> mx.array:
    """Packed latents (1, tokens, channels) -> pixels (1, height, width, 3)."""
    z = unpacked(latents, *grid(parts, request))
    return pixels(parts.component("vae").decode(z=scaled(z, parts.config("vae"))))


FLUX = Family(
    "transformer",
    ("text_encoder", "text_encoder_2"),
    {
        "encoder_hidden_states": (1, "tokens", "joint_attention_dim"),
        "pooled_projections": (1, "pooled_projection_dim"),
    },
    _defaults,
    _encode,
    start,
    _inputs,
    flow_schedule,
    flow_times,
    decode,
    embedded=always,
)
