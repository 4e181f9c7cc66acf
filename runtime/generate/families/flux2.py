"""FLUX.2 and FLUX.2-klein: diffusers 0.42.1, Flux2Pipeline and Flux2KleinPipeline, without images.

The templates are the chat templates of Mistral and Qwen3 for one message of a user; Qwen3's with
thinking off. Klein's guidance is classifier-free, and off where a checkpoint is distilled.
"""

from functools import partial

import mlx.core as mx

from ...errors import MlxconvError
from ...exec.weights import arrays_of
from ...schedulers import Schedule, Scheduler
from ..noise import Generator
from .family import Defaults, Family, Inputs, Parts, Request
from .flux import grid
from .images import flow_times, image_ids, noise_as, pixels, shifted_flow, trained_size, vae_scale

_TOKENS = 512
_MISTRAL = (
    "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured "
    "responses focusing on object relationships, object\nattribution and actions without "
    "speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
_QWEN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _distilled(parts: Parts) -> bool:
    return bool(parts.index.get("is_distilled", False))


def _defaults(parts: Parts) -> Defaults:
    scale = vae_scale(parts.config("vae"))
    size = trained_size(parts, 2 * scale)
    return Defaults(size, size, 4 if _distilled(parts) else 50, 4.0, 2 * scale)


def _encode(
    template: str, layers: tuple[int, ...], parts: Parts, prompt: str, request: Request
) -> Inputs:
    """The hidden states after these layers, side by side; padding is read."""
    text = template.replace("{}", prompt.replace("[IMG]", ""))
    tokens = parts.tokens("tokenizer", text, request.tokens or _TOKENS, special=False)
    _, *states = parts.component("text_encoder")(input_ids=tokens.ids, attention_mask=tokens.mask)
    if len(states) <= max(layers):
        raise MlxconvError(
            f"{parts.bundle.path / 'text_encoder'}: has {len(states) - 1} layers; this pipeline "
            f"reads what comes after {', '.join(map(str, layers))}"
        )
    return {"encoder_hidden_states": mx.concatenate([states[k] for k in layers], axis=-1)}


def _start(parts: Parts, request: Request, generator: Generator, prompt: Inputs) -> mx.array:
    channels = parts.config("transformer")["in_channels"]
    shape = (1, channels, *grid(parts, request))
    noise = noise_as(prompt["encoder_hidden_states"].dtype, generator, shape)
    return noise.reshape(1, channels, -1).transpose(0, 2, 1)


def _inputs(parts: Parts, request: Request, prompt: Inputs) -> Inputs:
    """Positions are (time, row, column, number in the text)."""
    numbers = mx.arange(prompt["encoder_hidden_states"].shape[1])[:, None]
    ids = {
        "txt_ids": mx.pad(numbers, [(0, 0), (3, 0)])[None],
        "img_ids": mx.pad(image_ids(*grid(parts, request)), [(0, 0), (0, 1)])[None],
    }
    embedded = parts.config("transformer")["guidance_embeds"]
    return {**prompt, **ids, **({"guidance": mx.array([request.guidance])} if embedded else {})}


def _schedule(scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
    dynamic = scheduler.options.get("use_dynamic_shifting")
    mu = _empirical_mu(latents.shape[1], request.steps) if dynamic else None
    return shifted_flow(scheduler, request, mu)


def _empirical_mu(tokens: int, steps: int) -> float:
    """`compute_empirical_mu`: between lines measured at 10 and at 200 steps."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190
    return slope * steps + at_200 - 200 * slope


def _decode(parts: Parts, latents: mx.array, request: Request) -> mx.array:
    """Packed latents (1, tokens, channels), normalized -> pixels (1, height, width, 3)."""
    vae, (rows, columns) = parts.component("vae"), grid(parts, request)
    held = (vae.executor.weights.get(f"bn.running_{name}") for name in ("mean", "var"))
    mean, variance = (arrays_of(each)[0] for each in held)
    z = latents * mx.sqrt(variance + parts.config("vae")["batch_norm_eps"]) + mean
    z = z.reshape(rows, columns, -1, 2, 2).transpose(2, 0, 3, 1, 4)
    return pixels(vae.decode(z=z.reshape(1, -1, 2 * rows, 2 * columns)))


def _family(template: str, layers: tuple[int, ...], embedded: bool) -> Family:
    return Family(
        "transformer",
        ("text_encoder",),
        {"encoder_hidden_states": (1, "tokens", "joint_attention_dim")},
        _defaults,
        partial(_encode, template, layers),
        _start,
        _inputs,
        _schedule,
        flow_times,
        _decode,
        embedded=lambda parts: embedded or _distilled(parts),
    )


FLUX2 = _family(_MISTRAL, (10, 20, 30), embedded=True)
FLUX2_KLEIN = _family(_QWEN, (9, 18, 27), embedded=False)
