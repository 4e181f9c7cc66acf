"""What every family is made of: a request, an opened bundle, and the functions between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from ...bundle import Bundle, LoadedComponent, load_component, read_json
from ...schedulers import Schedule, Scheduler, read_scheduler
from ..guidance import Guidance
from ..noise import Generator
from ..tokens import TextTokenizer, Tokens

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """One generation: pixels, and how far the prompt pulls. `cfg`: true classifier-free guidance,
    where the model has one of its own in `guidance`. guided: whether a negative prompt is read.
    conditioning: see `Family`. sigmas, timesteps: noise levels of the caller's own, for so many
    steps."""

    prompt: str
    width: int
    height: int
    steps: int
    guidance: float
    negative: str | None = None
    cfg: float = 1.0
    seed: int = 0
    tokens: int | None = None
    guided: bool = False
    conditioning: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sigmas: Sequence[float] | None = None
    timesteps: Sequence[float] | None = None

    @property
    def spacing(self) -> dict[str, Any]:
        """What `make_schedule` is asked for: so many steps, or the caller's own levels."""
        own = {"sigmas": self.sigmas, "timesteps": self.timesteps}
        return {k: v for k, v in own.items() if v is not None} or {"steps": self.steps}


@dataclass(frozen=True)
class Defaults:
    """Of a request. multiple: what width and height have to be divisible by."""

    width: int
    height: int
    steps: int
    guidance: float
    multiple: int


class Parts:
    """A bundle's components, tokenizers and scheduler, each opened when it is asked for."""

    def __init__(
        self,
        bundle: Bundle,
        dtype: str | None = None,
        vae_dtype: str | None = None,
        compile: str = "off",
    ) -> None:
        self.bundle, self.dtype, self.vae_dtype = bundle, dtype, vae_dtype
        self.compile = compile  # of whatever is called through here: text encoders and the VAE
        self.notes: list[str] = []  # what a user should know of the last prompt
        self.instead: dict[str, Any] = {}  # what stands in for a component: see `decoders`
        self._loaded: dict[str, LoadedComponent] = {}

    def has(self, name: str) -> bool:
        """Whether the bundle has this component: some pipelines go without one."""
        return name in self.bundle.manifest["components"]

    def component(self, name: str) -> LoadedComponent:
        """A component, kept until it is released."""
        if name in self.instead:
            return self.instead[name]  # type: ignore[no-any-return]
        if name not in self._loaded:
            dtype = self._dtype(name)
            self._loaded[name] = load_component(
                self.bundle.path, name, dtype=dtype, compile=self.compile
            )
        return self._loaded[name]

    def _dtype(self, name: str) -> str | None:
        return self.precise_enough(self.config(name)) if name == "vae" else self.dtype

    def precise_enough(self, config: Mapping[str, Any]) -> str | None:
        """The precision of a VAE's activations: `vae_dtype`, else float32 instead of bfloat16, in
        which pictures lose several levels of 255, and instead of float16 where its configuration
        says that it overflows (`force_upcast`: SDXL)."""
        if self.vae_dtype is not None:
            return self.vae_dtype
        asked = self.dtype or config.get("mlxconv", {}).get("dtype")
        upcast = asked == "bfloat16" or (asked == "float16" and config.get("force_upcast"))
        return "float32" if upcast else self.dtype

    def release(self, name: str) -> None:
        """Free a component's weights."""
        if name in self._loaded:
            self._loaded.pop(name).executor.weights.release()
            mx.clear_cache()

    def config(self, name: str) -> dict[str, Any]:
        """A component's configuration, without loading it."""
        if name in self.instead:
            return dict(self.instead[name].config)
        return read_json(self.bundle.component(name) / "config.json")

    @cached_property
    def index(self) -> dict[str, Any]:
        """model_index.json: the pipeline's class, its parts, and options of its own."""
        return read_json(self.bundle.path / "model_index.json")

    def tokens(
        self,
        name: str,
        text: str,
        length: int | None = None,
        *,
        pad: bool = True,
        special: bool = True,
        side: str | None = None,
    ) -> Tokens:
        """A prompt by a tokenizer, at most or padded to `length`; what did not fit is noted.

        side: to pad on, by default the tokenizer's own.
        """
        tokenizer = TextTokenizer(self.bundle.path / name, special=special)
        found = tokenizer.padded(text, length, side) if pad else tokenizer.unpadded(text, length)
        if found.cut:
            self.notes.append(
                f"{name}: the prompt has {found.cut} tokens more than the {found.ids.shape[1]} "
                "that its encoder reads; its end was cut"
            )
        return found

    @cached_property
    def scheduler(self) -> Scheduler:
        """The checkpoint's own."""
        return read_scheduler(self.bundle.path)


def _never(parts: Parts) -> bool:
    return False


@dataclass(frozen=True)
class Family:
    """A pipeline's own steps. `schedule` takes the scheduler, which a caller may have changed.

    encoders: components that read the prompt, freed afterwards; optional: those that a checkpoint
    may lack. embeddings: what they make of it, by name, and its shape: sizes are expressions of the
    denoiser's configuration, other words are free.
    encode: prompt -> embeddings. negative: the same, where a negative prompt is encoded in another
    way. unasked: the embeddings that stand for no negative prompt, of the prompt's; None: those of
    an empty one.
    start: noise of one picture (1, ...), packed, in the precision of the embeddings. inputs: the
    denoiser's, for one image, of the embeddings; without latents and schedule. times: its schedule
    inputs (calls, ...). decode: latents (1, ...) -> pixels (1, height, width, 3) in 0 to 1.
    embedded: whether guidance is an input of the denoiser (or there is none), and classifier-free
    guidance waits for a negative prompt; otherwise guidance is its scale. guidance: its form.
    latents: the step's keywords of the latents. prediction: (output, latents) -> what the scheduler
    takes, of the latents' shape. conditioning: names of other numbers that `inputs` reads of the
    request. takes_tokens: whether the number of tokens is the caller's to choose.
    """

    denoiser: str
    encoders: tuple[str, ...]
    embeddings: Mapping[str, tuple[str | int, ...]]
    defaults: Callable[[Parts], Defaults]
    encode: Callable[[Parts, str, Request], Inputs]
    start: Callable[[Parts, Request, Generator, Inputs], mx.array]
    inputs: Callable[[Parts, Request, Inputs], Inputs]
    schedule: Callable[[Scheduler, Request, mx.array], Schedule]
    times: Callable[[Parts, Schedule], Inputs]
    decode: Callable[[Parts, mx.array, Request], mx.array]
    embedded: Callable[[Parts], bool] = _never
    guidance: Guidance = field(default_factory=Guidance)
    negative: Callable[[Parts, str, Request], Inputs] | None = None
    unasked: Callable[[Parts, Inputs], Inputs | None] = lambda parts, positive: None
    optional: tuple[str, ...] = ()
    latents: Callable[[mx.array], Inputs] = lambda x: {"hidden_states": x}
    prediction: Callable[[mx.array, mx.array], mx.array] = lambda output, _: output
    conditioning: tuple[str, ...] = ()
    takes_tokens: bool = True

    def reads_guidance(self, parts: Parts) -> bool:
        """Whether `guidance` decides anything: as classifier-free guidance's scale, or an input."""
        config = parts.config(self.denoiser)
        inputs = ("guidance_embeds", "time_cond_proj_dim")
        return not self.embedded(parts) or any(config.get(name) for name in inputs)


def always(parts: Parts) -> bool:
    """For `Family.embedded`."""
    return True


def as_encoded(parts: Parts, request: Request, prompt: Inputs) -> Inputs:
    """For `Family.inputs`: the denoiser takes the embeddings, and nothing else."""
    return prompt


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
