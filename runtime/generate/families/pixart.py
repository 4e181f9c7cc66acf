"""PixArt-Sigma: diffusers 0.42.1, PixArtSigmaPipeline with use_resolution_binning=False.

The prompt is lowered and stripped, as where `ftfy` and `bs4` are not installed or
clean_caption=False; a size is made as it is asked for.
"""

from typing import ClassVar

from .family import MeanOf, t5_states
from .images import patched_defaults
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TOKENS = 300


class PixArtSigma(MeanOf):
    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {
        "encoder_hidden_states": (1, "tokens", "caption_channels"),
        "encoder_attention_mask": (1, "tokens"),
    }

    def defaults(self, parts: Parts) -> Defaults:
        return patched_defaults(parts, 20, 4.5)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        text, length = prompt.lower().strip(), request.tokens or _TOKENS
        hidden, mask = t5_states(parts, "", text, length, masked=True)
        return {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
