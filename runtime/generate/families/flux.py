"""FLUX.1 (schnell, dev; true guidance with a negative prompt): diffusers 0.42.1, FluxPipeline."""

from typing import ClassVar

import mlx.core as mx

from ...schedulers import Schedule, Scheduler, shift_for
from ..noise import Generator
from .family import Family, t5_states
from .images import (
    image_ids,
    packed_noise,
    pixels,
    scaled,
    shifted_flow,
    trained_size,
    unpacked,
    vae_scale,
)
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TOKENS = 512


class Packed(Family):
    """Flows over tokens of 2 x 2 latents: latents are (n, tokens, channels)."""

    def scale(self, parts: Parts) -> int:
        """Pixels a latent, along each side."""
        return vae_scale(parts.config("vae"))

    def grid(self, parts: Parts, request: Request) -> tuple[int, int]:
        """Rows and columns of tokens."""
        size = 2 * self.scale(parts)
        return request.height // size, request.width // size

    def start(
        self, parts: Parts, request: Request, generator: Generator, prompt: Inputs
    ) -> mx.array:
        dtype = prompt["encoder_hidden_states"].dtype
        return packed_noise(parts, dtype, generator, self.grid(parts, request))

    def schedule(self, scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
        """From 1 to 1 / steps, shifted by the number of tokens."""
        return shifted_flow(scheduler, request, shift_for(scheduler, latents.shape[1]))

    def times(self, parts: Parts, schedule: Schedule) -> Inputs:
        """Timesteps (calls, 1) in 0 to 1; in half precision rounded first, as the pipelines do."""
        dtype = parts.component("transformer").dtype
        return {"timestep": mx.array(schedule.timesteps)[:, None].astype(dtype) / 1000}

    def decode(self, parts: Parts, latents: mx.array, request: Request) -> mx.array:
        z = unpacked(latents, *self.grid(parts, request))
        return pixels(parts.component("vae").decode(z=scaled(z, parts.config("vae"))))


class Flux(Packed):
    encoders = ("text_encoder", "text_encoder_2")
    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {
        "encoder_hidden_states": (1, "tokens", "joint_attention_dim"),
        "pooled_projections": (1, "pooled_projection_dim"),
    }

    def defaults(self, parts: Parts) -> Defaults:
        multiple = 2 * self.scale(parts)
        size = trained_size(parts, multiple)
        dev = bool(parts.config("transformer")["guidance_embeds"])
        return Defaults(size, size, 28 if dev else 4, 3.5, multiple)

    def embedded(self, parts: Parts) -> bool:
        return True

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        tokens = request.tokens or _TOKENS
        clip = parts.tokens("tokenizer", prompt)
        pooled = parts.component("text_encoder")(input_ids=clip.ids)[1]
        hidden, _ = t5_states(parts, "_2", prompt, tokens, masked=False)
        return {"encoder_hidden_states": hidden, "pooled_projections": pooled}

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        ids = {"txt_ids": text_ids(prompt), "img_ids": image_ids(*self.grid(parts, request))}
        given: dict[str, mx.array] = {**prompt, **ids}
        if parts.config("transformer")["guidance_embeds"]:
            given["guidance"] = mx.array([request.guidance])
        return given


def text_ids(prompt: Inputs) -> mx.array:
    """(tokens, 3): zeros."""
    return mx.zeros((prompt["encoder_hidden_states"].shape[1], 3))
