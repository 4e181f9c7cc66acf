"""What every family reads: a request, and an opened bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from ...bundle import Bundle, LoadedComponent, load_component, read_json
from ...schedulers import Scheduler, read_scheduler
from ..tokens import TextTokenizer, Tokens

Inputs = Mapping[str, Any]
Shapes = Mapping[str, tuple[str | int, ...]]


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
        longest = tokenizer.longest
        if pad and length is not None and longest is not None and length > longest:
            note = (
                f"{name}: the prompt was padded to {length} tokens; the tokenizer's longest prompt "
                f"is {longest} tokens; --tokens {longest} keeps to that"
            )
            self.notes += [] if note in self.notes else [note]
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
