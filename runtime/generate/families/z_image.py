"""Z-Image (also Turbo, with guidance 0): diffusers 0.42.1, ZImagePipeline.

cfg_normalization and cfg_truncation are at their defaults, off. The template is Qwen3's chat
template for one message of a user, with thinking allowed.
"""

import mlx.core as mx

from ...schedulers import Schedule, Scheduler, shift_for
from ..guidance import Guidance
from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request
from .images import plain_decode, plain_shape, shifted_flow, trained_size, vae_scale

_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_TOKENS = 512


def _defaults(parts: Parts) -> Defaults:
    scale = vae_scale(parts.config("vae"))
    size = trained_size(parts, 2 * scale, 1024)
    return Defaults(size, size, 50, 5.0, 2 * scale)


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    """What goes into the last layer, of the tokens there are: (tokens, width)."""
    text, length = _TEMPLATE.replace("{}", prompt), request.tokens or _TOKENS
    tokens = parts.tokens("tokenizer", text, length, pad=False)
    found = parts.component("text_encoder")(input_ids=tokens.ids, attention_mask=tokens.mask)
    return {"cap_feats": found[-2][0]}


def _start(parts: Parts, request: Request, generator: Generator, prompt: Inputs) -> mx.array:
    return generator.normal(plain_shape(parts, request))


def _inputs(parts: Parts, request: Request, prompt: Inputs) -> Inputs:
    return {"cap_feats": [prompt["cap_feats"]]}


def _schedule(scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
    tokens = (latents.shape[2] // 2) * (latents.shape[3] // 2)
    return shifted_flow(scheduler, request, shift_for(scheduler, tokens))


def _times(parts: Parts, schedule: Schedule) -> Inputs:
    return {"t": (1000 - mx.array(schedule.timesteps)[:, None]) / 1000}


Z_IMAGE = Family(
    "transformer",
    ("text_encoder",),
    {"cap_feats": ("tokens", "cap_feat_dim")},
    _defaults,
    _encode,
    _start,
    _inputs,
    _schedule,
    _times,
    plain_decode,
    guidance=Guidance(origin="positive"),
    latents=lambda x: {"x": list(x[:, :, None])},
    prediction=lambda output, latents: -output.reshape(latents.shape),
)
