"""PixArt-Sigma: diffusers 0.42.1, PixArtSigmaPipeline with use_resolution_binning=False.

The prompt is lowered and stripped, as where `ftfy` and `bs4` are not installed or
clean_caption=False; a size is made as it is asked for.
"""

from .family import Defaults, Family, Inputs, Parts, Request, as_encoded, t5_states
from .images import mean_of, own_schedule, own_times, plain_decode, plain_start, vae_scale

_TOKENS = 300


def _defaults(parts: Parts) -> Defaults:
    scale, config = vae_scale(parts.config("vae")), parts.config("transformer")
    size = config["sample_size"] * scale
    return Defaults(size, size, 20, 4.5, scale * config["patch_size"])


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    text, length = prompt.lower().strip(), request.tokens or _TOKENS
    hidden, mask = t5_states(parts, "", text, length, masked=True)
    return {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}


PIXART_SIGMA = Family(
    "transformer",
    ("text_encoder",),
    {
        "encoder_hidden_states": (1, "tokens", "caption_channels"),
        "encoder_attention_mask": (1, "tokens"),
    },
    _defaults,
    _encode,
    plain_start,
    as_encoded,
    own_schedule,
    own_times,
    plain_decode,
    prediction=mean_of,
)
