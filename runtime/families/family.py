"""What every family is made of: a request, an opened bundle, and the functions between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..bundle import Bundle, LoadedComponent, load_component, read_json
from ..guidance import Guidance
from ..noise import Generator
from ..schedulers import Schedule, Scheduler, read_scheduler
from ..text import TextTokenizer, Tokens

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """One generation: pixels, and how far the prompt pulls. `cfg`: true classifier-free guidance,
    where the model has one of its own in `guidance`."""

    prompt: str
    width: int
    height: int
    steps: int
    guidance: float
    negative: str | None = None
    cfg: float = 1.0
    seed: int = 0
    count: int = 1
    tokens: int | None = None


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

    def __init__(self, bundle: Bundle, dtype: str | None = None) -> None:
        self.bundle, self.dtype = bundle, dtype
        self.notes: list[str] = []  # what a user should know of the last prompt
        self._loaded: dict[str, LoadedComponent] = {}

    def has(self, name: str) -> bool:
        """Whether the bundle has this component: some pipelines go without one."""
        return name in self.bundle.manifest["components"]

    def component(self, name: str) -> LoadedComponent:
        """A component, kept until it is released."""
        if name not in self._loaded:
            self.bundle.component(name)
            self._loaded[name] = load_component(self.bundle.path, name, dtype=self.dtype)
        return self._loaded[name]

    def release(self, name: str) -> None:
        """Let a component's weights go."""
        if name in self._loaded:
            self._loaded.pop(name).executor.weights.release()
            mx.clear_cache()

    def config(self, name: str) -> dict[str, Any]:
        """A component's configuration, without loading it."""
        return read_json(self.bundle.component(name) / "config.json")

    def tokens(
        self, name: str, text: str, length: int | None = None, *, pad: bool = True
    ) -> Tokens:
        """A prompt by a tokenizer, at most or padded to `length`; what did not fit is noted."""
        tokenizer = TextTokenizer(self.bundle.path / name)
        found = tokenizer.padded(text, length) if pad else tokenizer.unpadded(text, length)
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


@dataclass(frozen=True)
class Family:
    """A pipeline's own steps. `schedule` takes the scheduler, which a caller may have changed.

    encode: prompt -> the denoiser's prompt inputs. start: noise for `count` images, packed.
    inputs: what else the denoiser takes, for one image. times: its schedule inputs (calls, 1).
    decode: latents (1, ...) -> pixels (1, height, width, 3) in 0 to 1.
    embedded: guidance is an input of the denoiser (or there is none), and classifier-free guidance
    waits for a negative prompt; otherwise guidance is its scale, and the negative prompt is "".
    guidance: its form. negative: encode, where a negative prompt is encoded in another way.
    latents: the step's keywords of the latents. prediction: (output, latents) -> what the scheduler
    takes, of the latents' shape.
    """

    denoiser: str
    encoders: tuple[str, ...]
    defaults: Callable[[Parts], Defaults]
    encode: Callable[[Parts, str, Request], Inputs]
    start: Callable[[Parts, Request, Generator], mx.array]
    inputs: Callable[[Parts, Request], Inputs]
    schedule: Callable[[Scheduler, Request, mx.array], Schedule]
    times: Callable[[Parts, Schedule], Inputs]
    decode: Callable[[Parts, mx.array, Request], mx.array]
    embedded: bool = False
    guidance: Guidance = field(default_factory=Guidance)
    negative: Callable[[Parts, str, Request], Inputs] | None = None
    latents: Callable[[mx.array], Inputs] = lambda x: {"hidden_states": x}
    prediction: Callable[[mx.array, mx.array], mx.array] = lambda output, _: output


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
