"""`mlxconv.load(bundle)`: prompts to pictures, without PyTorch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from PIL import Image

from .bundle import open_bundle, read_json
from .denoise import Callback, Noise, Progress, denoise
from .errors import MlxconvError
from .families import family_of
from .families.family import Defaults, Parts, Request
from .guidance import Guided
from .noise import Generator
from .schedulers import Schedule, with_class
from .staging import Staged

_CFG = 4.0  # with a negative prompt, where none is asked for
T = TypeVar("T")


@dataclass
class Pictures:
    """What a generation made, and how long its parts took, in seconds."""

    images: list[Image.Image]
    pixels: np.ndarray[Any, Any]  # (count, height, width, 3) float32 in 0 to 1
    request: Request
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    weight_bytes: dict[str, int] = field(default_factory=dict)


class Pipeline:
    """A bundle of a whole pipeline. Text encoders are let go after a prompt unless `keep`."""

    def __init__(self, bundle: str | Path, *, dtype: str | None = None, keep: bool = False) -> None:
        opened = open_bundle(bundle)
        index = opened.path / "model_index.json"
        name = str(read_json(index).get("_class_name", "")) if index.is_file() else ""
        self.family = family_of(name, str(opened.path))
        opened.need([*self.family.encoders, self.family.denoiser, "vae"])
        self.parts, self.keep = Parts(opened, dtype), keep
        self._staged: Staged | None = None

    @property
    def defaults(self) -> Defaults:
        """What a request is without being asked."""
        return self.family.defaults(self.parts)

    def __call__(
        self,
        prompt: str,
        *,
        negative: str | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        cfg: float | None = None,
        cfg_end: float = 1.0,
        width: int | None = None,
        height: int | None = None,
        seed: int = 0,
        count: int = 1,
        tokens: int | None = None,
        scheduler: str | None = None,
        callback: Callback | None = None,
    ) -> Pictures:
        """Pictures of a prompt: the noise of `seed` is torch's own, so they can be compared.

        guidance: the pipeline's `guidance_scale`. cfg: scale of true classifier-free guidance, of
        FLUX.1 and Qwen-Image with a negative prompt. cfg_end: the part of the schedule after which
        no negative prompt is read. tokens: of the longest text encoder. scheduler: another class
        than the checkpoint's. MlxconvError for what cannot be done, saying what can.
        """
        own = self.defaults
        pull = own.guidance if guidance is None else guidance
        against, scale = self._against(negative, pull, cfg)
        request = Request(
            prompt, width or own.width, height or own.height, own.steps if steps is None else steps,
            pull, against, scale, seed, count, tokens,
        )  # fmt: skip
        _check(request, own)
        made = Pictures([], np.zeros(0), request)
        if negative is not None and against is None:
            made.notes.append(f"the negative prompt is not read: guidance is {scale:g}")
        started = time.perf_counter()
        prompts = self._encode(request, made)
        generator = Generator(request.seed)
        latents, schedule = self._start(request, scheduler, generator)
        models = self._prepare(request, prompts, latents, schedule, cfg_end, made)
        shape = (1, *latents.shape[1:])
        noise = partial(_again, generator, shape)
        ends = [self._loop(models, x[None], schedule, noise, callback, made) for x in latents]
        made.pixels = self._timed(made, "decode", lambda: self._decode(ends, request))
        made.images = [Image.fromarray(np.round(p * 255).astype(np.uint8)) for p in made.pixels]
        made.seconds["total"] = time.perf_counter() - started
        return made

    # ---- the phases ----

    def _against(
        self, negative: str | None, guidance: float, cfg: float | None
    ) -> tuple[str | None, float]:
        """The negative prompt that is read, None where none is, and the scale away from it."""
        if self.family.embedded:
            scale = (1.0 if negative is None else _CFG) if cfg is None else cfg
        elif cfg is not None:
            raise MlxconvError(f"cfg={cfg:g}: this pipeline takes classifier-free guidance's scale "
                               "as guidance; pass that")  # fmt: skip
        else:
            negative, scale = negative or "", guidance
        return (negative if scale > self.family.guidance.off else None), scale

    def _encode(self, request: Request, made: Pictures) -> list[Mapping[str, Any]]:
        family = self.family

        def encode() -> list[Mapping[str, Any]]:
            self.parts.notes = made.notes
            found = [family.encode(self.parts, request.prompt, request)]
            if request.negative is not None:
                other = family.negative or family.encode
                found.append(other(self.parts, request.negative, request))
            mx.eval([list(inputs.values()) for inputs in found])
            return found

        return self._timed(made, "encode", encode)

    def _start(
        self, request: Request, scheduler: str | None, generator: Generator
    ) -> tuple[mx.array, Schedule]:
        noise = self.family.start(self.parts, request, generator)
        chosen = self.parts.scheduler
        if scheduler is not None:
            chosen = with_class(chosen, scheduler)
        schedule = self.family.schedule(chosen, request, noise)
        if not self.keep:
            for name in self.family.encoders:
                self.parts.release(name)
        return noise * schedule.initial_noise, schedule

    def _prepare(
        self, request: Request, prompts: list[Mapping[str, Any]], latents: mx.array,
        schedule: Schedule, cfg_end: float, made: Pictures,
    ) -> Guided:  # fmt: skip
        if self._staged is None:
            self._staged = Staged(self.parts.component(self.family.denoiser))
        staged, family = self._staged, self.family
        shared = {**family.latents(latents[:1]), **family.inputs(self.parts, request)}
        given = [{**shared, **prompt} for prompt in prompts]
        guidance = replace(family.guidance, scale=request.cfg, end=cfg_end)
        negative = given[1] if len(given) > 1 else None
        times, sizes = family.times(self.parts, schedule), staged.weight_bytes()
        made.weight_bytes = {"prepare": sizes["all"], "loop": sizes["step"]}
        return self._timed(
            made,
            "prepare",
            lambda: Guided(staged, given[0], times, negative, guidance, latents=family.latents),
        )

    def _loop(
        self, model: Guided, latents: mx.array, schedule: Schedule, noise: Noise,
        callback: Callback | None, made: Pictures,
    ) -> mx.array:  # fmt: skip
        ends: list[float] = [0.0]

        def told(progress: Progress) -> bool | None:
            ends.append(progress.seconds)
            return None if callback is None else callback(progress)

        def predicted(step: int, x: mx.array) -> mx.array:
            return self.family.prediction(model(step, x), x)

        found = denoise(predicted, latents, schedule, noise=noise, callback=told)
        steps = [b - a for a, b in pairwise(ends)]
        made.seconds.setdefault("first_step", steps[0])
        made.seconds["step_median"] = median(steps[1:] or steps)
        return found

    def _decode(self, latents: list[mx.array], request: Request) -> np.ndarray[Any, Any]:
        decoded = []
        for each in latents:
            values = self.family.decode(self.parts, each, request)
            mx.eval(values)
            decoded.append(np.array(values))
        return np.concatenate(decoded)

    def _timed(self, made: Pictures, name: str, run: Callable[[], T]) -> T:
        began = time.perf_counter()
        found = run()
        made.seconds[name] = time.perf_counter() - began
        return found


def load(bundle: str | Path, *, dtype: str | None = None, keep: bool = False) -> Pipeline:
    """The pipeline of a bundle: `load("flux-4bit")("a cat").images[0]`.

    dtype: precision of the activations, see `load_component`. keep: hold text encoders in memory
    between prompts. MlxconvError when the bundle's pipeline has no native family.
    """
    return Pipeline(bundle, dtype=dtype, keep=keep)


def _again(generator: Generator, shape: tuple[int, ...], call: int) -> mx.array:
    """Noise for a stochastic scheduler: the draws that follow those of the latents."""
    return generator.normal(shape)


def _check(request: Request, own: Defaults) -> None:
    for name in ("steps", "count", "width", "height"):
        if getattr(request, name) < 1:
            raise MlxconvError(f"{name} is {getattr(request, name)}: at least 1")
    if request.seed < 0:
        raise MlxconvError(f"seed is {request.seed}: 0 or more")
    near = replace(request, width=_near(request.width, own), height=_near(request.height, own))
    if near != request:
        raise MlxconvError(
            f"size {request.width}x{request.height}: width and height have to be divisible by "
            f"{own.multiple}; {near.width}x{near.height} is the nearest"
        )


def _near(size: int, own: Defaults) -> int:
    return max(1, round(size / own.multiple)) * own.multiple
