"""Sana: diffusers 0.42.1, SanaPipeline with use_resolution_binning=False, clean_caption=False.

A size is made as it is asked for. The prompt follows an instruction to Gemma; the negative prompt
does not.
"""

import mlx.core as mx

from ...schedulers import Schedule
from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request, as_encoded
from .images import mean_of, own_schedule, pixels, scaled

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


def _defaults(parts: Parts) -> Defaults:
    size = parts.config("transformer")["sample_size"] * _SCALE
    return Defaults(size, size, 20, 4.5, _SCALE)


def _gemma(parts: Parts, text: str, length: int) -> tuple[mx.array, mx.array]:
    """Hidden states (1, length, width) and the tokens' mask (1, length)."""
    tokens = parts.tokens("tokenizer", text, length, side="right")  # whatever its own is
    encoder = parts.component("text_encoder")
    return encoder(input_ids=tokens.ids, attention_mask=tokens.mask)[0], tokens.mask


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    """The first token and the last ones, behind the instruction."""
    length = request.tokens or _TOKENS
    before = parts.tokens("tokenizer", _INSTRUCTION, pad=False).ids.shape[1]
    text = _INSTRUCTION + prompt.lower().strip()
    hidden, mask = _gemma(parts, text, before + length - 2)
    kept = mx.array([0, *range(before - 1, before + length - 2)])
    return {"encoder_hidden_states": hidden[:, kept], "encoder_attention_mask": mask[:, kept]}


def _negative(parts: Parts, prompt: str, request: Request) -> Inputs:
    hidden, mask = _gemma(parts, prompt.lower().strip(), request.tokens or _TOKENS)
    return {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}


def _start(parts: Parts, request: Request, generator: Generator, prompt: Inputs) -> mx.array:
    scale = 2 ** (len(parts.config("vae")["encoder_block_out_channels"]) - 1)
    channels = parts.config("transformer")["in_channels"]
    shape = (1, channels, request.height // scale, request.width // scale)
    return generator.normal(shape)


def _times(parts: Parts, schedule: Schedule) -> Inputs:
    scale = parts.config("transformer").get("timestep_scale", 1.0)
    return {"timestep": mx.array(schedule.timesteps)[:, None] * scale}


def _decode(parts: Parts, latents: mx.array, request: Request) -> mx.array:
    return pixels(parts.component("vae").decode(z=scaled(latents, parts.config("vae"))))


SANA = Family(
    "transformer",
    ("text_encoder",),
    {
        "encoder_hidden_states": (1, "tokens", "caption_channels"),
        "encoder_attention_mask": (1, "tokens"),
    },
    _defaults,
    _encode,
    _start,
    as_encoded,
    own_schedule,
    _times,
    _decode,
    negative=_negative,
    prediction=mean_of,
)
