"""Qwen-Image: diffusers 0.42.1, QwenImagePipeline. Guidance waits for a negative prompt."""

import mlx.core as mx

from ..guidance import Guidance
from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request, always
from .images import flow_schedule, flow_times, packed_noise, pixels, unpacked

_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_BEFORE = 34  # tokens of the template in front of the prompt, which are left out
_TOKENS = 512


def _scale(parts: Parts) -> int:
    return int(2 ** len(parts.config("vae")["temperal_downsample"]))


def _defaults(parts: Parts) -> Defaults:
    scale = _scale(parts)
    return Defaults(128 * scale, 128 * scale, 50, 1.0, 2 * scale)


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    length = _BEFORE + (request.tokens or _TOKENS)
    text = _TEMPLATE.replace("{}", prompt)
    tokens = parts.tokens("tokenizer", text, length, pad=False)
    found = parts.component("text_encoder")(input_ids=tokens.ids, attention_mask=tokens.mask)
    return {"encoder_hidden_states": found[0][:, _BEFORE:]}


def _grid(parts: Parts, request: Request) -> tuple[int, int]:
    """Rows and columns of tokens, each of 2 x 2 latents."""
    size = 2 * _scale(parts)
    return request.height // size, request.width // size


def _start(parts: Parts, request: Request, generator: Generator, prompt: Inputs) -> mx.array:
    dtype = prompt["encoder_hidden_states"].dtype
    return packed_noise(parts, dtype, generator, _grid(parts, request))


def _inputs(parts: Parts, request: Request, prompt: Inputs) -> Inputs:
    return {**prompt, "img_shapes": [[[1, *_grid(parts, request)]]]}


def _decode(parts: Parts, latents: mx.array, request: Request) -> mx.array:
    config, z = parts.config("vae"), unpacked(latents, *_grid(parts, request))[:, :, None]
    mean, std = (mx.array(config[f"latents_{k}"]).reshape(1, -1, 1, 1, 1) for k in ("mean", "std"))
    return pixels(parts.component("vae").decode(z=z * std + mean)[:, :, 0])


QWEN_IMAGE = Family(
    "transformer",
    ("text_encoder",),
    {"encoder_hidden_states": (1, "tokens", "joint_attention_dim")},
    _defaults,
    _encode,
    _start,
    _inputs,
    flow_schedule,
    flow_times,
    _decode,
    embedded=always,
    guidance=Guidance(rescale="norm"),
)
