"""FLUX.2 and FLUX.2-klein: diffusers 0.42.1, Flux2Pipeline and Flux2KleinPipeline, without images.

The templates are the chat templates of Mistral and Qwen3 for one message of a user; Qwen3's with
thinking off. Klein's guidance is classifier-free, and off where a checkpoint is distilled.
"""

from typing import ClassVar

import mlx.core as mx

from ...errors import MlxconvError
from ...exec.weights import arrays_of
from ...schedulers import Schedule, Scheduler
from ..noise import Generator
from .flux import Packed
from .images import image_ids, noise_as, pixels, shifted_flow, trained_size
from .parts import Defaults, Inputs, Parts, Request, Shapes

_TOKENS = 512
_MISTRAL = (
    "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured "
    "responses focusing on object relationships, object\nattribution and actions without "
    "speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
_QWEN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _distilled(parts: Parts) -> bool:
    return bool(parts.index.get("is_distilled", False))


class Flux2(Packed):
    """layers: of the text encoder, whose hidden states are read side by side."""

    default_tokens = _TOKENS
    embeddings: ClassVar[Shapes] = {"encoder_hidden_states": (1, "tokens", "joint_attention_dim")}
    template = _MISTRAL
    layers = (10, 20, 30)

    def defaults(self, parts: Parts) -> Defaults:
        multiple = 2 * self.scale(parts)
        size = trained_size(parts, multiple)
        return Defaults(size, size, 4 if _distilled(parts) else 50, 4.0, multiple)

    def embedded(self, parts: Parts) -> bool:
        return True

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        """The hidden states after `layers`; padding is read."""
        text = self.template.replace("{}", prompt.replace("[IMG]", ""))
        tokens = parts.tokens("tokenizer", text, request.tokens or _TOKENS, special=False)
        encoder = parts.component("text_encoder")
        _, *states = encoder(input_ids=tokens.ids, attention_mask=tokens.mask)
        if len(states) <= max(self.layers):
            raise MlxconvError(
                f"{parts.bundle.path / 'text_encoder'}: has {len(states) - 1} layers; this "
                f"pipeline reads what comes after {', '.join(map(str, self.layers))}"
            )
        return {"encoder_hidden_states": mx.concatenate([states[k] for k in self.layers], axis=-1)}

    def start(
        self, parts: Parts, request: Request, generator: Generator, prompt: Inputs
    ) -> mx.array:
        channels = parts.config("transformer")["in_channels"]
        shape = (1, channels, *self.grid(parts, request))
        noise = noise_as(prompt["encoder_hidden_states"].dtype, generator, shape)
        return noise.reshape(1, channels, -1).transpose(0, 2, 1)

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        """Positions are (time, row, column, number in the text)."""
        numbers = mx.arange(prompt["encoder_hidden_states"].shape[1])[:, None]
        ids = {
            "txt_ids": mx.pad(numbers, [(0, 0), (3, 0)])[None],
            "img_ids": mx.pad(image_ids(*self.grid(parts, request)), [(0, 0), (0, 1)])[None],
        }
        embedded = parts.config("transformer")["guidance_embeds"]
        return {**prompt, **ids, **({"guidance": mx.array([request.guidance])} if embedded else {})}

    def schedule(self, scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
        dynamic = scheduler.options.get("use_dynamic_shifting")
        mu = _empirical_mu(latents.shape[1], request.steps) if dynamic else None
        return shifted_flow(scheduler, request, mu)

    def decode(self, parts: Parts, latents: mx.array, request: Request) -> mx.array:
        """The latents are normalized."""
        vae, (rows, columns) = parts.component("vae"), self.grid(parts, request)
        held = (vae.executor.weights.get(f"bn.running_{name}") for name in ("mean", "var"))
        mean, variance = (arrays_of(each)[0] for each in held)
        z = latents * mx.sqrt(variance + parts.config("vae")["batch_norm_eps"]) + mean
        z = z.reshape(rows, columns, -1, 2, 2).transpose(2, 0, 3, 1, 4)
        return pixels(vae.decode(z=z.reshape(1, -1, 2 * rows, 2 * columns)))


class Flux2Klein(Flux2):
    template = _QWEN
    layers = (9, 18, 27)

    def embedded(self, parts: Parts) -> bool:
        return _distilled(parts)


def _empirical_mu(tokens: int, steps: int) -> float:
    """`compute_empirical_mu`: between lines measured at 10 and at 200 steps."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190
    return slope * steps + at_200 - 200 * slope
