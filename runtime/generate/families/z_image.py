"""Z-Image (also Turbo, with guidance 0): diffusers 0.42.1, ZImagePipeline.

cfg_normalization and cfg_truncation are at their defaults, off. The template is Qwen3's chat
template for one message of a user, with thinking allowed.
"""

from typing import ClassVar

import mlx.core as mx

from ...schedulers import Schedule, Scheduler, shift_for
from ..guidance import Guidance
from ..noise import Generator
from .family import Family
from .images import plain_shape, shifted_flow, trained_size, vae_scale
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_TOKENS = 512


class ZImage(Family):
    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {"cap_feats": ("tokens", "cap_feat_dim")}
    guidance = Guidance(origin="positive")

    def defaults(self, parts: Parts) -> Defaults:
        scale = vae_scale(parts.config("vae"))
        size = trained_size(parts, 2 * scale, 1024)
        return Defaults(size, size, 50, 5.0, 2 * scale)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        """What goes into the last layer, of the tokens there are: (tokens, width)."""
        text, length = _TEMPLATE.replace("{}", prompt), request.tokens or _TOKENS
        tokens = parts.tokens("tokenizer", text, length, pad=False)
        found = parts.component("text_encoder")(input_ids=tokens.ids, attention_mask=tokens.mask)
        return {"cap_feats": found[-2][0]}

    def start(
        self, parts: Parts, request: Request, generator: Generator, prompt: Inputs
    ) -> mx.array:
        return generator.normal(plain_shape(parts, request))

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        return {"cap_feats": [prompt["cap_feats"]]}

    def latents(self, x: mx.array) -> Inputs:
        return {"x": list(x[:, :, None])}

    def prediction(self, output: mx.array, latents: mx.array) -> mx.array:
        return -output.reshape(latents.shape)

    def schedule(self, scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
        tokens = (latents.shape[2] // 2) * (latents.shape[3] // 2)
        return shifted_flow(scheduler, request, shift_for(scheduler, tokens))

    def times(self, parts: Parts, schedule: Schedule) -> Inputs:
        return {"t": (1000 - mx.array(schedule.timesteps)[:, None]) / 1000}
