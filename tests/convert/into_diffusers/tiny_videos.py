"""Tiny random video pipelines with text encoders, called with the frame counts that people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

from ...conftest import _clip_tokenizer, _t5_tokenizer
from .tiny_pipelines import Pipeline, tiny, two_levels

PROMPTS = {"prompt": "a photo of a cat", "negative_prompt": "a dog"}


def _t5(cls: str = "T5") -> dict[str, Any]:
    """A text encoder of 64 channels and its tokenizer."""
    tokenizer = _t5_tokenizer()
    torch.manual_seed(3)
    config = getattr(transformers, f"{cls}Config")(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    encoder = getattr(transformers, f"{cls}EncoderModel")(config).eval()
    return {"text_encoder": encoder, "tokenizer": tokenizer}


def _flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def _pipe(name: str, **parts: Any) -> Any:
    pipe = getattr(diffusers, f"{name}Pipeline")(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cogvideox(frames: int = 49) -> Pipeline:
    vae = tiny("AutoencoderKLCogVideoX", 1)
    transformer = tiny(
        "CogVideoXTransformer3DModel", variant="rotary", sample_frames=frames, sample_width=4,
        sample_height=4,
    )  # fmt: skip
    solver = diffusers.CogVideoXDPMScheduler(
        snr_shift_scale=1.0, timestep_spacing="trailing", rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
    )  # fmt: skip
    pipe = _pipe("CogVideoX", vae=vae, transformer=transformer, scheduler=solver, **_t5())
    size = {"height": 32, "width": 32, "num_frames": frames, "max_sequence_length": 11}
    return pipe, {**PROMPTS, **size}


def wan(frames: int = 81) -> Pipeline:
    vae = tiny(
        "AutoencoderKLWan", 1, dim_mult=[1, 1, 1], temperal_downsample=[True, True],
        scale_factor_spatial=4,
    )  # fmt: skip
    channels = vae.config.z_dim
    transformer = tiny("WanTransformer3DModel", in_channels=channels, out_channels=channels)
    solver = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = _pipe("Wan", vae=vae, transformer=transformer, scheduler=solver, **_t5("UMT5"))
    size = {"height": 16, "width": 16, "num_frames": frames, "max_sequence_length": 16}
    return pipe, {**PROMPTS, **size}


def ltx(frames: int = 97) -> Pipeline:
    vae = tiny("AutoencoderKLLTXVideo", 1)
    channels = vae.config.latent_channels
    transformer = tiny("LTXVideoTransformer3DModel", in_channels=channels, out_channels=channels)
    pipe = _pipe("LTX", vae=vae, transformer=transformer, scheduler=_flow(), **_t5())
    size = {"height": 64, "width": 64, "num_frames": frames, "max_sequence_length": 16}
    return pipe, {**PROMPTS, **size}


def mochi(frames: int = 25) -> Pipeline:
    vae = tiny(
        "AutoencoderKLMochi", 1, latent_channels=12, latents_mean=[0.0] * 12, latents_std=[1.0] * 12
    )
    transformer = tiny("MochiTransformer3DModel", in_channels=12)
    pipe = _pipe("Mochi", vae=vae, transformer=transformer, scheduler=_flow(), **_t5())
    size = {"height": 32, "width": 32, "num_frames": frames, "max_sequence_length": 16}
    return pipe, {**PROMPTS, **size}


def hunyuan_video(frames: int = 61) -> Pipeline:
    tokenizer, clip = _t5_tokenizer(), _clip_tokenizer()
    torch.manual_seed(3)
    llama = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    pooled = transformers.CLIPTextConfig(
        vocab_size=len(clip), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=1, max_position_embeddings=77,
    )  # fmt: skip
    pipe = _pipe(
        "HunyuanVideo", vae=tiny("AutoencoderKLHunyuanVideo", 1), scheduler=_flow(),
        transformer=tiny("HunyuanVideoTransformer3DModel", patch_size=1, patch_size_t=1),
        text_encoder=transformers.LlamaModel(llama).eval(), tokenizer=tokenizer,
        text_encoder_2=transformers.CLIPTextModel(pooled).eval(), tokenizer_2=clip,
    )  # fmt: skip
    template = {"template": "about {}", "crop_start": 1}
    size = {"height": 32, "width": 32, "num_frames": frames, "max_sequence_length": 16}
    return pipe, {"prompt": PROMPTS["prompt"], "prompt_template": template, **size}


def allegro(frames: int = 88) -> Pipeline:
    """Its decoder works on tiles of one size alone, 320 pixels wide in the published one."""
    vae = tiny("AutoencoderKLAllegro", 1)
    vae.kernel, vae.stride = (24, 32, 32), (16, 16, 16)
    vae.enable_tiling()
    transformer = tiny("AllegroTransformer3DModel", sample_frames=frames // 4)
    solver = diffusers.EulerAncestralDiscreteScheduler()
    pipe = _pipe("Allegro", vae=vae, transformer=transformer, scheduler=solver, **_t5())
    size = {"height": 64, "width": 64, "num_frames": frames, "max_sequence_length": 16}
    return pipe, {**PROMPTS, **size}


def latte(frames: int = 16) -> Pipeline:
    transformer = tiny("LatteTransformer3DModel", video_length=frames)
    solver = diffusers.DDIMScheduler()
    pipe = _pipe("Latte", vae=two_levels(), transformer=transformer, scheduler=solver, **_t5())
    size = {"height": 32, "width": 32, "video_length": frames}
    return pipe, {**PROMPTS, **size, "mask_feature": False}


VIDEOS: dict[str, Callable[[], Pipeline]] = {
    f.__name__: f for f in (cogvideox, wan, ltx, mochi, hunyuan_video, allegro, latte)
}
