"""A pipeline's own steps: the base class, and what text encoders make of a prompt."""

from typing import ClassVar

import mlx.core as mx

from ...schedulers import Schedule, Scheduler, make_schedule
from ..guidance import Guidance
from ..noise import Generator
from .images import noise_as, pixels, plain_shape, scaled
from .parts import Defaults, Inputs, Parts, Request, Shapes


class Family:
    """A pipeline's own steps, here of latents (n, channels, height, width) and an AutoencoderKL.

    encoders: components that read the prompt, freed afterwards; optional: those that a checkpoint
    may lack. embeddings: what they make of it, by name, and its shape: sizes are expressions of the
    denoiser's configuration, other words are free. guidance: its form. conditioning: names of other
    numbers that `inputs` reads of the request. default_tokens: to which diffusers pads a prompt; 0
    where the caller cannot choose their number.
    """

    denoiser = "transformer"
    encoders: tuple[str, ...] = ("text_encoder",)
    optional: tuple[str, ...] = ()
    embeddings: ClassVar[Shapes]
    guidance = Guidance()
    conditioning: tuple[str, ...] = ()
    default_tokens = 0

    def defaults(self, parts: Parts) -> Defaults:
        """Of a request for this checkpoint."""
        raise NotImplementedError

    def encode(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        """The prompt's embeddings."""
        raise NotImplementedError

    def negative(self, parts: Parts, prompt: str, request: Request) -> Inputs:
        """The negative prompt's embeddings."""
        return self.encode(parts, prompt, request)

    def unasked(self, parts: Parts, positive: Inputs) -> Inputs | None:
        """The embeddings that stand for no negative prompt; None: those of an empty one."""
        return None

    def start(
        self, parts: Parts, request: Request, generator: Generator, prompt: Inputs
    ) -> mx.array:
        """Noise of one picture (1, ...), in the precision of the embeddings."""
        dtype = prompt["encoder_hidden_states"].dtype
        return noise_as(dtype, generator, plain_shape(parts, request, self.denoiser))

    def inputs(self, parts: Parts, request: Request, prompt: Inputs) -> Inputs:
        """The denoiser's, for one image, but latents and schedule."""
        return prompt

    def latents(self, x: mx.array) -> Inputs:
        """The step's keywords of the latents."""
        return {"hidden_states": x}

    def prediction(self, output: mx.array, latents: mx.array) -> mx.array:
        """What the scheduler takes, of the latents' shape."""
        return output

    def schedule(self, scheduler: Scheduler, request: Request, latents: mx.array) -> Schedule:
        """Of the scheduler, which a caller may have changed: by default spaced as it does."""
        return make_schedule(scheduler, **request.spacing)

    def times(self, parts: Parts, schedule: Schedule) -> Inputs:
        """The denoiser's schedule inputs (calls, ...): by default the scheduler's timesteps."""
        return {"timestep": mx.array(schedule.timesteps)[:, None]}

    def decode(self, parts: Parts, latents: mx.array, request: Request) -> mx.array:
        """Latents (1, ...) -> pixels (1, height, width, 3) in 0 to 1."""
        return pixels(parts.component("vae").decode(z=scaled(latents, parts.config("vae"))))

    def embedded(self, parts: Parts) -> bool:
        """Whether guidance is an input of the denoiser (or there is none), and classifier-free
        guidance waits for a negative prompt; otherwise guidance is its scale."""
        return False

    def reads_guidance(self, parts: Parts) -> bool:
        """Whether `guidance` decides anything: as classifier-free guidance's scale, or an input."""
        config = parts.config(self.denoiser)
        inputs = ("guidance_embeds", "time_cond_proj_dim")
        return not self.embedded(parts) or any(config.get(name) for name in inputs)


class MeanOf(Family):
    """A denoiser with the channels (axis 1) of a learned variance behind those of its output."""

    def prediction(self, output: mx.array, latents: mx.array) -> mx.array:
        return output[:, : latents.shape[1]]


def clip_states(parts: Parts, suffix: str, prompt: str) -> tuple[mx.array, mx.array]:
    """CLIP's hidden states (1, 77, width) before the last layer, and its first result: the
    projection (1, width), or the last hidden states of an encoder that has none."""
    tokens = parts.tokens(f"tokenizer{suffix}", prompt)
    found = parts.component(f"text_encoder{suffix}")(input_ids=tokens.ids)
    return found[-2], found[0]


def t5_states(
    parts: Parts, suffix: str, prompt: str, length: int, *, masked: bool
) -> tuple[mx.array, mx.array]:
    """T5's hidden states (1, length, width) and the tokens' mask (1, length).

    suffix: of the encoder and its tokenizer, "" or "_2". masked: padding is not read.
    """
    tokens = parts.tokens(f"tokenizer{suffix}", prompt, length)
    mask = tokens.mask if masked else mx.ones_like(tokens.mask)
    found = parts.component(f"text_encoder{suffix}")(input_ids=tokens.ids, attention_mask=mask)
    return (found[0] if isinstance(found, tuple) else found), tokens.mask
