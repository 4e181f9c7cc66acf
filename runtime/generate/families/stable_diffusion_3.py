"""Stable Diffusion 3 and 3.5: diffusers 0.42.1, StableDiffusion3Pipeline.

Skip-layer guidance and IP-Adapters are not taken over.
"""

from typing import ClassVar

import mlx.core as mx

from ...schedulers import Schedule, Scheduler, make_schedule, shift_for
from .family import Family, clip_states, t5_states
from .images import patched_defaults
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TOKENS = 256
_PATCH = 2


class StableDiffusion3(Family):
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    optional = ("text_encoder_3",)
    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {
        "encoder_hidden_states": (1, "tokens", "joint_attention_dim"),
        "pooled_projections": (1, "pooled_projection_dim"),
    }

    def defaults(self, parts: Parts) -> Defaults:
        return patched_defaults(parts, 28, 7.0)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        (one, pooled), (two, more) = (clip_states(parts, suffix, prompt) for suffix in ("", "_2"))
        t5 = _t5(parts, prompt, request.tokens or _TOKENS)
        clip = mx.concatenate([one, two], axis=-1)
        clip = mx.pad(clip, [(0, 0), (0, 0), (0, t5.shape[-1] - clip.shape[-1])])
        return {
            "encoder_hidden_states": mx.concatenate([clip, t5], axis=1),
            "pooled_projections": mx.concatenate([pooled, more], axis=-1),
        }

    def schedule(self, scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
        tokens = (latents.shape[2] // _PATCH) * (latents.shape[3] // _PATCH)
        return make_schedule(scheduler, **request.spacing, mu=shift_for(scheduler, tokens))


def _t5(parts: Parts, prompt: str, length: int) -> mx.array:
    """Hidden states (1, length, width); zeros for a checkpoint without T5. Padding is read."""
    if not parts.has("text_encoder_3"):
        return mx.zeros((1, length, parts.config("transformer")["joint_attention_dim"]))
    return t5_states(parts, "_3", prompt, length, masked=False)[0]
