"""Chroma: diffusers 0.42.1, ChromaPipeline."""

from typing import ClassVar

import mlx.core as mx

from .family import t5_states
from .flux import Packed, text_ids
from .images import image_ids, trained_size
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TOKENS = 512


class Chroma(Packed):
    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {
        "encoder_hidden_states": (1, "tokens", "joint_attention_dim"),
        "attention_mask": (1, "tokens"),
    }

    def defaults(self, parts: Parts) -> Defaults:
        multiple = 2 * self.scale(parts)
        size = trained_size(parts, multiple)
        return Defaults(size, size, 35, 5.0, multiple)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        """T5 does not read the padding; the denoiser reads the first token of it."""
        tokens = request.tokens or _TOKENS
        hidden, mask = t5_states(parts, "", prompt, tokens, masked=True)
        read = (mx.arange(tokens)[None] <= mx.sum(mask, axis=1, keepdims=True)).astype(mx.float32)
        return {"encoder_hidden_states": hidden, "attention_mask": read}

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        """The mask is of the text and the image, which is read as a whole."""
        ids = image_ids(*self.grid(parts, request))
        mask = mx.concatenate([prompt["attention_mask"], mx.ones((1, len(ids)))], axis=1)
        return {**prompt, "attention_mask": mask, "txt_ids": text_ids(prompt), "img_ids": ids}
