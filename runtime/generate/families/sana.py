"""Sana: diffusers 0.42.1, SanaPipeline with use_resolution_binning=False, clean_caption=False.

A size is made as it is asked for. The prompt follows an instruction to Gemma; the negative prompt
does not.
"""

from typing import ClassVar

import mlx.core as mx

from ...schedulers import Schedule
from ..noise import Generator
from .family import MeanOf
from .images import vae_scale
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TOKENS = 300
_SCALE = 32
_INSTRUCTION = "\n".join(
    (
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual "
        "descriptions suitable for image generation. Evaluate the level of detail in "
        "the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, "
        "textures, and spatial relationships to create vivid and concrete scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly "
        "without overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a "
        "round shape, sleeping peacefully on a warm sunny windowsill, surrounded by pots of "
        "blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, "
        "featuring glowing street lamps, a diverse crowd of people in colorful clothing, and a "
        "double-decker bus passing by towering glass skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including "
        "any additional commentary or evaluations:",
        "User Prompt: ",
    )
)


class Sana(MeanOf):
    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {
        "encoder_hidden_states": (1, "tokens", "caption_channels"),
        "encoder_attention_mask": (1, "tokens"),
    }

    def defaults(self, parts: Parts) -> Defaults:
        size = parts.config("transformer")["sample_size"] * _SCALE
        return Defaults(size, size, 20, 4.5, _SCALE)

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        """The first token and the last ones, behind the instruction."""
        length = request.tokens or _TOKENS
        before = parts.tokens("tokenizer", _INSTRUCTION, pad=False).ids.shape[1]
        text = _INSTRUCTION + prompt.lower().strip()
        hidden, mask = _gemma(parts, text, before + length - 2)
        kept = mx.array([0, *range(before - 1, before + length - 2)])
        return {"encoder_hidden_states": hidden[:, kept], "encoder_attention_mask": mask[:, kept]}

    def negative(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        hidden, mask = _gemma(parts, prompt.lower().strip(), request.tokens or _TOKENS)
        return {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}

    def start(
        self, parts: Parts, request: Request, generator: Generator, prompt: Inputs
    ) -> mx.array:
        scale = vae_scale(parts.config("vae"))
        channels = parts.config("transformer")["in_channels"]
        return generator.normal((1, channels, request.height // scale, request.width // scale))

    def times(self, parts: Parts, schedule: Schedule) -> Inputs:
        scale = parts.config("transformer").get("timestep_scale", 1.0)
        return {"timestep": mx.array(schedule.timesteps)[:, None] * scale}


def _gemma(parts: Parts, text: str, length: int) -> tuple[mx.array, mx.array]:
    """Hidden states (1, length, width) and the tokens' mask (1, length)."""
    tokens = parts.tokens("tokenizer", text, length, side="right")  # whatever its own is
    encoder = parts.component("text_encoder")
    return encoder(input_ids=tokens.ids, attention_mask=tokens.mask)[0], tokens.mask
