"""Qwen-Image: diffusers 0.42.1, QwenImagePipeline. Guidance waits for a negative prompt."""

from typing import ClassVar

import mlx.core as mx

from ..guidance import Guidance
from .flux import Packed
from .images import pixels, unpacked
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_BEFORE = 34  # tokens of the template in front of the prompt, which are left out
_TOKENS = 512


class QwenImage(Packed):
    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {"encoder_hidden_states": (1, "tokens", "joint_attention_dim")}
    guidance = Guidance(rescale="norm")

    def defaults(self, parts: Parts) -> Defaults:
        scale = self.scale(parts)
        return Defaults(128 * scale, 128 * scale, 50, 1.0, 2 * scale)

    def embedded(self, parts: Parts) -> bool:
        return True

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        length = _BEFORE + (request.tokens or _TOKENS)
        text = _TEMPLATE.replace("{}", prompt)
        tokens = parts.tokens("tokenizer", text, length, pad=False)
        found = parts.component("text_encoder")(input_ids=tokens.ids, attention_mask=tokens.mask)
        return {"encoder_hidden_states": found[0][:, _BEFORE:]}

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        return {**prompt, "img_shapes": [[[1, *self.grid(parts, request)]]]}

    def decode(self, parts: Parts, latents: mx.array, request: Request) -> mx.array:
        config, z = parts.config("vae"), unpacked(latents, *self.grid(parts, request))[:, :, None]
        held = (config[f"latents_{name}"] for name in ("mean", "std"))
        mean, std = (mx.array(each).reshape(1, -1, 1, 1, 1) for each in held)
        return pixels(parts.component("vae").decode(z=z * std + mean)[:, :, 0])
