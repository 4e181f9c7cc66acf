"""Tiny random diffusers pipelines that can run: each made of the recipes' tiny models.

Text encoders are left out; the prompts' embeddings are part of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from mlxconv.convert.recipe.reading import load_recipe

from ...runtime.generate.tiny_families import QWEN_VAE, TWO_LEVELS

Pipeline = tuple[Any, dict[str, Any]]  # and what to call it with


def tiny(class_name: str, seed: int = 0, variant: str | None = None, **changed: Any) -> Any:
    """The recipe's tiny model with random weights, and some of its configuration changed."""
    torch.manual_seed(seed)
    config = {**load_recipe(class_name).tiny_config(variant), **changed}
    return getattr(diffusers, class_name)(**config).eval()


def image_vae(variant: str | None = None, **changed: Any) -> Any:
    """An AutoencoderKL with 4 channels, or 16 ("flux"), and eight pixels a latent."""
    return tiny("AutoencoderKL", 1, variant, scaling_factor=0.5, shift_factor=0.1, **changed)


def two_levels(variant: str | None = None) -> Any:
    """The same with two pixels a latent."""
    return image_vae(variant, **TWO_LEVELS)


def _pipeline(name: str, without: str = "text_encoder tokenizer", **parts: Any) -> Any:
    cls = getattr(diffusers, f"{name}Pipeline")
    pipe = cls(**dict.fromkeys(without.split()), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def _prompts(width: int, tokens: int = 6, mask: bool = False) -> dict[str, Any]:
    """Embeddings of a prompt and of a negative one."""
    embeds = _random(2, tokens, width)
    found: dict[str, Any] = {"prompt_embeds": embeds[:1], "negative_prompt_embeds": embeds[1:]}
    if mask:
        ones = torch.ones(1, tokens, dtype=torch.long)
        found |= {"prompt_attention_mask": ones, "negative_prompt_attention_mask": ones}
    return found


def _flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


_TWO = "text_encoder tokenizer text_encoder_2 tokenizer_2"
_THREE = f"{_TWO} text_encoder_3 tokenizer_3"


def flux(name: str = "Flux", **more: Any) -> Pipeline:
    transformer = tiny("FluxTransformer2DModel")
    pipe = _pipeline(name, _TWO, scheduler=_flow(), vae=two_levels(), transformer=transformer)
    prompts = {"prompt_embeds": _random(1, 6, 64), "pooled_prompt_embeds": _random(1, 32)}
    return pipe, {**prompts, "height": 32, "width": 32, **more}


def flux_img2img() -> Pipeline:
    return flux("FluxImg2Img", image=torch.rand(1, 3, 32, 32), strength=0.8)


def flux_inpaint() -> Pipeline:
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., 8:24, 8:24] = 1
    return flux("FluxInpaint", image=torch.rand(1, 3, 32, 32), mask_image=mask, strength=0.8)


def aura_flow() -> Pipeline:
    transformer = tiny("AuraFlowTransformer2DModel")
    prompts = _prompts(transformer.config.joint_attention_dim, mask=True)
    pipe = _pipeline("AuraFlow", scheduler=_flow(), vae=two_levels(), transformer=transformer)
    return pipe, {**prompts, "height": 32, "width": 32}


def lumina2() -> Pipeline:
    transformer = tiny("Lumina2Transformer2DModel")
    prompts = _prompts(transformer.config.cap_feat_dim, mask=True)
    vae = two_levels("flux")
    pipe = _pipeline("Lumina2", scheduler=_flow(), vae=vae, transformer=transformer)
    return pipe, {**prompts, "height": 32, "width": 32}


def cog_view4() -> Pipeline:
    transformer = tiny("CogView4Transformer2DModel")
    prompts = _prompts(transformer.config.text_embed_dim, 16)
    shifted = _flow(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, base_image_seq_len=256,
        time_shift_type="linear",
    )  # fmt: skip
    vae = two_levels("flux")
    pipe = _pipeline("CogView4", scheduler=shifted, vae=vae, transformer=transformer)
    return pipe, {**prompts, "height": 32, "width": 32}


def pixart_sigma() -> Pipeline:
    transformer = tiny("PixArtTransformer2DModel")
    prompts = _prompts(transformer.config.caption_channels, mask=True)
    solver = diffusers.DPMSolverMultistepScheduler()
    pipe = _pipeline("PixArtSigma", scheduler=solver, vae=two_levels(), transformer=transformer)
    size = {"height": 32, "width": 32, "use_resolution_binning": False}
    return pipe, {**prompts, "negative_prompt": None, **size}


def hunyuan_dit() -> Pipeline:
    transformer = tiny("HunyuanDiT2DModel")
    config = transformer.config
    prompts = _prompts(config.cross_attention_dim, config.text_len, mask=True)
    second = _prompts(config.cross_attention_dim_t5, config.text_len_t5, mask=True)
    pipe = _pipeline(
        "HunyuanDiT", f"{_TWO} safety_checker feature_extractor", transformer=transformer,
        scheduler=diffusers.DDPMScheduler(prediction_type="v_prediction"),
        vae=image_vae(), requires_safety_checker=False,
    )  # fmt: skip
    size = {"height": 64, "width": 64, "use_resolution_binning": False}
    return pipe, {**prompts, **{f"{k}_2": v for k, v in second.items()}, **size}


def bria() -> Pipeline:
    transformer = tiny("BriaTransformer2DModel")
    prompts = _prompts(transformer.config.joint_attention_dim)
    pipe = _pipeline("Bria", scheduler=_flow(), vae=two_levels(), transformer=transformer)
    return pipe, {**prompts, "height": 32, "width": 32}


def ovis() -> Pipeline:
    transformer = tiny("OvisImageTransformer2DModel")
    prompts = _prompts(transformer.config.joint_attention_dim)
    pipe = _pipeline("OvisImage", scheduler=_flow(), vae=two_levels(), transformer=transformer)
    return pipe, {**prompts, "negative_prompt": None, "height": 32, "width": 32}


def stable_diffusion3() -> Pipeline:
    transformer = tiny("SD3Transformer2DModel")
    config = transformer.config
    pooled = _random(2, config.pooled_projection_dim)
    prompts = _prompts(config.joint_attention_dim) | {
        "pooled_prompt_embeds": pooled[:1], "negative_pooled_prompt_embeds": pooled[1:]
    }  # fmt: skip
    parts = {"scheduler": _flow(shift=3.0), "vae": two_levels("flux"), "transformer": transformer}
    return _pipeline("StableDiffusion3", _THREE, **parts), {**prompts, "height": 32, "width": 32}


def qwen_image() -> Pipeline:
    """Prompts of different lengths, which guidance takes one after the other."""
    vae = tiny("AutoencoderKLQwenImage", 1, **QWEN_VAE)
    channels = vae.config.z_dim
    transformer = tiny(
        "QwenImageTransformer2DModel", in_channels=4 * channels, out_channels=channels
    )
    width = transformer.config.joint_attention_dim
    prompts = {
        "prompt_embeds": _random(1, 6, width),
        "negative_prompt_embeds": _random(1, 5, width),
    }
    shifted = _flow(use_dynamic_shifting=True)
    pipe = _pipeline("QwenImage", scheduler=shifted, vae=vae, transformer=transformer)
    return pipe, {**prompts, "true_cfg_scale": 4.0, "height": 32, "width": 32}


def z_image() -> Pipeline:
    transformer = tiny("ZImageTransformer2DModel")
    config = transformer.config
    vae = image_vae("flux")
    pipe = _pipeline("ZImage", scheduler=_flow(shift=3.0), vae=vae, transformer=transformer)
    prompts = {
        "prompt_embeds": [_random(6, config.cap_feat_dim)],
        "negative_prompt_embeds": [_random(7, config.cap_feat_dim)[:6]],
    }
    return pipe, {**prompts, "height": 64, "width": 64}


def ltx() -> Pipeline:
    vae = tiny("AutoencoderKLLTXVideo", 1)
    channels = vae.config.latent_channels
    transformer = tiny("LTXVideoTransformer3DModel", in_channels=channels, out_channels=channels)
    pipe = _pipeline("LTX", scheduler=_flow(), vae=vae, transformer=transformer)
    prompts = _prompts(transformer.config.caption_channels, mask=True)
    return pipe, {**prompts, "height": 64, "width": 64, "num_frames": 9}


PIPELINES: dict[str, Callable[[], Pipeline]] = {
    f.__name__: f
    for f in (
        flux, flux_img2img, flux_inpaint, aura_flow, lumina2, cog_view4, pixart_sigma, hunyuan_dit,
        bria, ovis, stable_diffusion3, qwen_image, z_image, ltx,
    )
}  # fmt: skip
