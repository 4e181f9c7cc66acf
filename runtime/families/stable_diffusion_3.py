"""Stable Diffusion 3 and 3.5: diffusers 0.42.1, StableDiffusion3Pipeline.

Skip-layer guidance and IP-Adapters are not taken over.
"""

import mlx.core as mx

from ..noise import Generator
from ..schedulers import Schedule, Scheduler, make_schedule, shift_for
from .family import Defaults, Family, Inputs, Parts, Request, t5_states
from .images import noise_as, own_times, plain_decode, plain_shape, vae_scale

_TOKENS = 256
_PATCH = 2


def _defaults(parts: Parts) -> Defaults:
    scale, config = vae_scale(parts.config("vae")), parts.config("transformer")
    size = config["sample_size"] * scale
    return Defaults(size, size, 28, 7.0, scale * config["patch_size"])


def _clip(parts: Parts, suffix: str, prompt: str) -> tuple[mx.array, mx.array]:
    """Hidden states (1, 77, width) before the last layer, and the projection (1, width)."""
    tokens = parts.tokens(f"tokenizer{suffix}", prompt)
    found = parts.component(f"text_encoder{suffix}")(input_ids=tokens.ids)
    return found[-2], found[0]


def _t5(parts: Parts, prompt: str, length: int) -> mx.array:
    """Hidden states (1, length, width); zeros for a checkpoint without T5. Padding is read."""
    if not parts.has("text_encoder_3"):
        return mx.zeros((1, length, parts.config("transformer")["joint_attention_dim"]))
    return t5_states(parts, "_3", prompt, length, masked=False)[0]


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    (one, pooled), (two, more) = (_clip(parts, suffix, prompt) for suffix in ("", "_2"))
    t5 = _t5(parts, prompt, request.tokens or _TOKENS)
    clip = mx.concatenate([one, two], axis=-1)
    clip = mx.pad(clip, [(0, 0), (0, 0), (0, t5.shape[-1] - clip.shape[-1])])
    return {
        "encoder_hidden_states": mx.concatenate([clip, t5], axis=1),
        "pooled_projections": mx.concatenate([pooled, more], axis=-1),
    }


def _start(parts: Parts, request: Request, generator: Generator) -> mx.array:
    return noise_as(parts, "text_encoder", generator, plain_shape(parts, request))


def _schedule(scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
    tokens = (latents.shape[2] // _PATCH) * (latents.shape[3] // _PATCH)
    return make_schedule(scheduler, request.steps, mu=shift_for(scheduler, tokens))


STABLE_DIFFUSION_3 = Family(
    "transformer", ("text_encoder", "text_encoder_2", "text_encoder_3"), _defaults, _encode,
    _start, lambda parts, request: {}, _schedule, own_times, plain_decode,
)  # fmt: skip
