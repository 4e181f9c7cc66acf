"""Stable Diffusion XL: diffusers 0.42.1, StableDiffusionXLPipeline.

Also without the first text encoder, and with a VAE that has means and deviations of its own. The
watermark, IP-Adapters, denoising_end, guidance_rescale and other sizes for the negative prompt are
not taken over.
"""

from typing import ClassVar

import mlx.core as mx

from .family import clip_states
from .images import pixels, scaled
from .parts import Defaults, Inputs, Parts, Request, Shapes
from .stable_diffusion import Unet, unet_defaults


class StableDiffusionXL(Unet):
    encoders = ("text_encoder", "text_encoder_2")
    optional = ("text_encoder",)
    embeddings: ClassVar[Shapes] = {
        "encoder_hidden_states": (1, "tokens", "cross_attention_dim"),
        "text_embeds": (1, "projection_class_embeddings_input_dim - 6 * addition_time_embed_dim"),
    }
    conditioning = ("original_size", "crops_coords_top_left", "target_size")

    def defaults(self, parts: Parts) -> Defaults:
        return unet_defaults(parts, 128, 5.0)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        """What goes into the last layer of both CLIPs, and the projection of the one that has
        one."""
        suffixes = [s for s in ("", "_2") if parts.has(f"text_encoder{s}")]
        found = [clip_states(parts, suffix, prompt) for suffix in suffixes]
        return {
            "encoder_hidden_states": mx.concatenate([hidden for hidden, _ in found], axis=-1),
            "text_embeds": next(pooled for _, pooled in found if pooled.ndim == 2),
        }

    def unasked(self, parts: Parts, positive: Inputs) -> Inputs | None:
        """Zeros, where the checkpoint asks for them."""
        if not parts.index.get("force_zeros_for_empty_prompt", True):
            return None
        return {name: mx.zeros_like(value) for name, value in positive.items()}

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        """Sizes are conditions too: original (height, width), crop (top, left), target."""
        own = {"original_size": (request.height, request.width), "crops_coords_top_left": (0, 0)}
        asked = {**own, "target_size": own["original_size"], **request.conditioning}
        sizes = [n for name in self.conditioning for n in asked[name]]
        added = {"text_embeds": prompt["text_embeds"], "time_ids": mx.array([sizes], mx.float32)}
        hidden = {"encoder_hidden_states": prompt["encoder_hidden_states"]}
        return {**super().inputs(parts, request, hidden), "added_cond_kwargs": added}

    def decode(self, parts: Parts, latents: mx.array, request: Request) -> mx.array:
        config = parts.config("vae")
        mean, std = config.get("latents_mean"), config.get("latents_std")
        z = scaled(latents, {"scaling_factor": config["scaling_factor"]})
        if mean is not None and std is not None:
            z = z * mx.array(std).reshape(1, -1, 1, 1) + mx.array(mean).reshape(1, -1, 1, 1)
        return pixels(parts.component("vae").decode(z=z))
