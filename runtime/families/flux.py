"""FLUX.1 (schnell, dev; true guidance with a negative prompt): diffusers 0.42.1, FluxPipeline."""

import mlx.core as mx
import numpy as np

from ..noise import Generator
from ..schedulers import Schedule, Scheduler, make_schedule, shift_for
from .family import Defaults, Family, Inputs, Parts, Request
from .images import pixels, vae_scale

_TOKENS = 512


def _defaults(parts: Parts) -> Defaults:
    scale = vae_scale(parts.config("vae"))
    dev = bool(parts.config("transformer")["guidance_embeds"])
    return Defaults(128 * scale, 128 * scale, 28 if dev else 4, 3.5, 2 * scale)


def _encode(parts: Parts, prompt: str, request: Request) -> Inputs:
    tokens = request.tokens or _TOKENS
    clip = parts.tokens("tokenizer", prompt)
    t5 = parts.tokens("tokenizer_2", prompt, tokens)
    pooled = parts.component("text_encoder")(input_ids=clip.ids)[1]
    every = mx.ones_like(t5.mask)  # the pipeline passes no mask: padding is read
    hidden = parts.component("text_encoder_2")(input_ids=t5.ids, attention_mask=every)
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    ids = mx.zeros((tokens, 3))
    return {"encoder_hidden_states": hidden, "pooled_projections": pooled, "txt_ids": ids}


def _grid(parts: Parts, request: Request) -> tuple[int, int]:
    """Rows and columns of tokens, each of 2 x 2 latents."""
    size = 2 * vae_scale(parts.config("vae"))
    return request.height // size, request.width // size


def _start(parts: Parts, request: Request, generator: Generator) -> mx.array:
    rows, columns = _grid(parts, request)
    channels = parts.config("transformer")["in_channels"] // 4
    dtype = str(parts.component("text_encoder_2").dtype).removeprefix("mlx.core.")
    noise = generator.normal((request.count, channels, 2 * rows, 2 * columns), dtype)
    packed = noise.reshape(request.count, channels, rows, 2, columns, 2)
    return packed.transpose(0, 2, 4, 1, 3, 5).reshape(request.count, rows * columns, 4 * channels)


def _inputs(parts: Parts, request: Request) -> Inputs:
    rows, columns = _grid(parts, request)
    ids = np.zeros((rows, columns, 3), np.float32)
    ids[..., 1] = np.arange(rows)[:, None]
    ids[..., 2] = np.arange(columns)
    given: dict[str, mx.array] = {"img_ids": mx.array(ids.reshape(-1, 3))}
    if parts.config("transformer")["guidance_embeds"]:
        given["guidance"] = mx.array([request.guidance])
    return given


def _schedule(scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
    if "use_flow_sigmas" in scheduler.options:  # another solver: it has sigmas of its own
        return make_schedule(scheduler, request.steps)
    sigmas = np.linspace(1.0, 1 / request.steps, request.steps)
    shift = shift_for(scheduler, latents.shape[1])
    return make_schedule(scheduler, mu=shift, sigmas=sigmas.tolist())


def _times(schedule: Schedule) -> Inputs:
    return {"timestep": mx.array(schedule.timesteps)[:, None] / 1000}


def _decode(parts: Parts, latents: mx.array, request: Request) -> mx.array:
    (rows, columns), config = _grid(parts, request), parts.config("vae")
    channels = latents.shape[-1] // 4
    unpacked = latents.reshape(1, rows, columns, channels, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    z = unpacked.reshape(1, channels, 2 * rows, 2 * columns)
    z = z / config["scaling_factor"] + (config.get("shift_factor") or 0)
    return pixels(parts.component("vae").decode(z=z))


FLUX = Family(
    "transformer", ("text_encoder", "text_encoder_2"), _defaults, _encode, _start, _inputs,
    _schedule, _times, _decode,
)  # fmt: skip
