"""Chroma: diffusers 0.42.1, ChromaPipeline."""

import mlx.core as mx

from .family import Defaults, Family, Inputs, Parts, Request, t5_states
from .flux import decode, grid, start, text_ids
from .images import flow_schedule, flow_times, image_ids, trained_size, vae_scale

_TOKENS = 512


def _defaults(parts: Parts) -> Defaults:
    scale = vae_scale(parts.config("vae"))
    size = trained_size(parts, 2 * scale)
    return Defaults(size, size, 35, 5.0, 2 * scale)


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    """T5 does not read the padding; the denoiser reads the first token of it."""
    tokens = request.tokens or _TOKENS
    hidden, mask = t5_states(parts, "", prompt, tokens, masked=True)
    read = (mx.arange(tokens)[None] <= mx.sum(mask, axis=1, keepdims=True)).astype(mx.float32)
    return {"encoder_hidden_states": hidden, "attention_mask": read}


def _inputs(parts: Parts, request: Request, prompt: Inputs) -> Inputs:
    """The mask is of the text and the image, which is read as a whole."""
    ids = image_ids(*grid(parts, request))
    mask = mx.concatenate([prompt["attention_mask"], mx.ones((1, len(ids)))], axis=1)
    return {**prompt, "attention_mask": mask, "txt_ids": text_ids(prompt), "img_ids": ids}


CHROMA = Family(
    "transformer",
    ("text_encoder",),
    {
        "encoder_hidden_states": (1, "tokens", "joint_attention_dim"),
        "attention_mask": (1, "tokens"),
    },
    _defaults,
    _encode,
    start,
    _inputs,
    flow_schedule,
    flow_times,
    decode,
)
