"""Stable Diffusion 1 and 2: diffusers 0.42.1, StableDiffusionPipeline.

Also UNets whose guidance was distilled into an input (LCM). The safety checker is not run, which
a note says.
"""

import math
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from ...schedulers import Schedule, Scheduler, make_schedule
from ..noise import Generator
from .family import Family
from .images import vae_scale
from .parts import Defaults, Inputs, Parts, Request, Shapes


class Unet(Family):
    """A UNet, which may take guidance as an input."""

    denoiser = "unet"

    def embedded(self, parts: Parts) -> bool:
        return parts.config("unet").get("time_cond_proj_dim") is not None

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        """The prompt, and guidance where it is an input: `get_guidance_scale_embedding`."""
        if not self.embedded(parts):
            return prompt
        half = parts.config("unet")["time_cond_proj_dim"] // 2
        rates = mx.exp(mx.arange(half) * (-math.log(10000) / (half - 1)))
        angles = (request.guidance - 1) * 1000 * rates
        embedded = mx.concatenate([mx.sin(angles), mx.cos(angles)])[None]
        return {**prompt, "timestep_cond": embedded}

    def latents(self, x: mx.array) -> Inputs:
        return {"sample": x}

    def times(self, parts: Parts, schedule: Schedule) -> Inputs:
        """Timesteps (calls,): one for the whole batch."""
        return {"timestep": mx.array(schedule.timesteps)}


def unet_defaults(parts: Parts, latents: int, guidance: float) -> Defaults:
    """latents: along a side, where the checkpoint has no `sample_size`. A size is a multiple of
    what the UNet halves its latents to."""
    config, scale = parts.config("unet"), vae_scale(parts.config("vae"))
    size = config.get("sample_size") or latents
    height, width = (size, size) if isinstance(size, int) else size
    multiple = scale * 2 ** (len(config["block_out_channels"]) - 1)
    return Defaults(width * scale, height * scale, 50, guidance, multiple)


class StableDiffusion(Unet):
    embeddings: ClassVar[Shapes] = {"encoder_hidden_states": (1, "tokens", "cross_attention_dim")}

    def defaults(self, parts: Parts) -> Defaults:
        return unet_defaults(parts, 64, 7.5)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        tokens = parts.tokens("tokenizer", prompt)
        return {"encoder_hidden_states": parts.component("text_encoder")(input_ids=tokens.ids)[0]}

    def start(
        self, parts: Parts, request: Request, generator: Generator, prompt: Inputs
    ) -> mx.array:
        if any(parts.index.get("safety_checker") or ()):
            parts.notes.append("the checkpoint's safety_checker is not run")
        return super().start(parts, request, generator, prompt)

    def schedule(self, scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
        """With the options that the pipeline corrects in old checkpoints."""
        corrected = {"steps_offset": 1, "clip_sample": False}
        known = {k: v for k, v in corrected.items() if k in scheduler.options}
        scheduler = replace(scheduler, options={**scheduler.options, **known})
        return make_schedule(scheduler, **request.spacing)
