"""`mlxconv.load(bundle)`: prompts to pictures, without PyTorch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from .bundle import open_bundle, read_json
from .decoders import LinearDecoder, TinyDecoder, find_decoder, standing_in
from .denoise import Callback, Noise, Progress, denoise
from .errors import MlxconvError
from .families import family_of
from .families.embeddings import embedded
from .families.family import Defaults, Family, Inputs, Parts, Request
from .guidance import Guided
from .noise import Generator
from .phases import Listener, Phases
from .schedulers import Schedule, Scheduler, with_class
from .staging import Staged
from .tiling import in_strips, work_of

Preview = Callable[[Image.Image, Progress], None]
_CFG = 4.0  # with a negative prompt, where none is asked for


@dataclass
class Pictures:
    """What a generation made, and how long its phases took, in seconds.

    seconds: `encode`, `prepare`, `first_step`, `steps` (all others), `step_median`, `preview` where
    there was one, `decode` and `total`.
    """

    images: list[Image.Image]
    pixels: np.ndarray[Any, Any]  # (count, height, width, 3) float32 in 0 to 1
    request: Request
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)  # of MLX's memory, a phase


class Pipeline:
    """A bundle of a whole pipeline. Text encoders are let go after a prompt unless `keep`."""

    def __init__(
        self, bundle: str | Path, *, dtype: str | None = None, vae_dtype: str | None = None,
        keep: bool = False,
    ) -> None:  # fmt: skip
        opened = open_bundle(bundle)
        index = opened.path / "model_index.json"
        name = str(read_json(index).get("_class_name", "")) if index.is_file() else ""
        self.family = family_of(name, str(opened.path))
        opened.need([*self.family.encoders, self.family.denoiser, "vae"])
        self.parts, self.keep = Parts(opened, dtype, vae_dtype), keep
        self._staged: Staged | None = None

    @property
    def defaults(self) -> Defaults:
        """What a request is without being asked."""
        return self.family.defaults(self.parts)

    def __call__(
        self,
        prompt: str | None = None,
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
        sigmas: Sequence[float] | None = None,
        timesteps: Sequence[float] | None = None,
        decoder: str | Path | None = None,
        tile: str | int = "auto",
        preview: Preview | None = None,
        callback: Callback | None = None,
        listener: Listener | None = None,
        embeddings: Inputs | None = None,
        negative_embeddings: Inputs | None = None,
        conditioning: Mapping[str, Sequence[int]] | None = None,
    ) -> Pictures:
        """Pictures of a prompt: the noise of `seed` is torch's own, so they can be compared.

        guidance: the pipeline's `guidance_scale`. cfg: scale of true classifier-free guidance, of
        FLUX.1 and Qwen-Image with a negative prompt. cfg_end: the part of the schedule after which
        no negative prompt is read. tokens: of the longest text encoder. scheduler: another class
        than the checkpoint's, or a name as `DPM++ 2M Karras`, see `with_class`. sigmas, timesteps:
        noise levels of a schedule of one's own. decoder: `tiny`, or the path of a converted
        autoencoder, instead of the VAE. tile: large pictures are decoded in strips of rows: `auto`,
        `off`, or how many MiB each may need. preview: shown the pictures that steps predict, by
        `decoder` or a linear map, in at most a fifth of the time. embeddings, negative_embeddings:
        instead of prompts, arrays by the names of `pipeline.family.embeddings`. conditioning:
        SDXL's `original_size`, `target_size` and `crops_coords_top_left`, as in diffusers.
        callback: after each step. listener: told of each phase and how far it is. MlxconvError for
        what cannot be done, saying what can.
        """
        own = self.defaults
        pull = own.guidance if guidance is None else guidance
        _check_prompts(prompt, embeddings, negative, negative_embeddings)
        against = negative is not None or negative_embeddings is not None
        scale, guided = self._scale(against, pull, cfg)
        levels = timesteps if sigmas is None else sigmas
        if levels is not None:
            if steps is not None:
                raise MlxconvError("give steps, or sigmas or timesteps of your own: one of the two")
            steps = len(levels)
        request = Request(
            prompt or "", width or own.width, height or own.height,
            own.steps if steps is None else steps, pull, negative, scale, seed, count, tokens,
            guided, conditioning or {}, sigmas, timesteps,
        )  # fmt: skip
        _check(request, own, self.family)
        made = Pictures([], np.zeros(0), request)
        if against and not guided:
            made.notes.append(f"the negative prompt is not read: guidance is {scale:g}")
        other = None if decoder is None else find_decoder(self.parts, decoder)
        chosen, work = self.parts.scheduler, work_of(tile)
        if scheduler is not None:
            chosen = with_class(chosen, scheduler)
        clock = Phases(listener)
        with clock.phase("encode", 1 + guided) as ended:
            self.parts.notes, prompts = made.notes, []
            for inputs in embedded(self.family, self.parts, request, embeddings,
                                   negative_embeddings):  # fmt: skip
                mx.eval(list(inputs.values()))
                prompts.append(inputs)
                ended()
        generator = Generator(request.seed)
        latents, schedule = self._start(request, prompts[0], chosen, generator)
        with clock.phase("prepare"):
            models = self._prepare(request, prompts, latents, schedule, cfg_end, made)
        noise = partial(_again, generator, (1, *latents.shape[1:]))
        told = self._previewing(preview, other, request, clock, callback)
        ends = self._denoise(models, latents, schedule, noise, told, clock)
        with clock.phase("decode", request.count) as ended:
            made.pixels = self._decode(ends, made, other, work, ended)
        made.images = [_image(pixels) for pixels in made.pixels]
        made.seconds = {**clock.seconds, "total": clock.wall}
        made.peak_bytes = clock.peak_bytes
        return made

    # ---- the phases ----

    def _scale(self, against: bool, guidance: float, cfg: float | None) -> tuple[float, bool]:
        """The scale away from the negative prompt, and whether that is read."""
        waits = self.family.embedded(self.parts)
        if waits:
            scale = (_CFG if against else 1.0) if cfg is None else cfg
        elif cfg is not None:
            raise MlxconvError(f"cfg={cfg:g}: this pipeline takes classifier-free guidance's scale "
                               "as guidance; pass that")  # fmt: skip
        else:
            scale = guidance
        return scale, scale > self.family.guidance.off and (against or not waits)

    def _start(
        self, request: Request, prompt: Inputs, scheduler: Scheduler, generator: Generator
    ) -> tuple[mx.array, Schedule]:
        noise = self.family.start(self.parts, request, generator, prompt)
        schedule = self.family.schedule(scheduler, request, noise)
        if not self.keep:
            for name in self.family.encoders:
                self.parts.release(name)
        return noise * schedule.initial_noise, schedule

    def _prepare(
        self, request: Request, prompts: list[Inputs], latents: mx.array,
        schedule: Schedule, cfg_end: float, made: Pictures,
    ) -> Guided:  # fmt: skip
        if self._staged is None:
            self._staged = Staged(self.parts.component(self.family.denoiser))
        staged, family = self._staged, self.family
        given = [
            {**family.latents(latents[:1]), **family.inputs(self.parts, request, prompt)}
            for prompt in prompts
        ]
        guidance = replace(family.guidance, scale=request.cfg, end=cfg_end)
        negative = given[1] if len(given) > 1 else None
        times, sizes = family.times(self.parts, schedule), staged.weight_bytes()
        made.weight_bytes = {"prepare": sizes["all"], "loop": sizes["step"]}
        return Guided(staged, given[0], times, negative, guidance, latents=family.latents)

    def _denoise(
        self, model: Guided, starts: mx.array, schedule: Schedule, noise: Noise,
        callback: Callback | None, clock: Phases,
    ) -> list[mx.array]:  # fmt: skip
        """The latents (1, ...) at the end, one image after the other."""
        later: list[float] = []
        last = time.perf_counter()

        def predicted(step: int, x: mx.array) -> mx.array:
            return self.family.prediction(model(step, x), x)

        with clock.phase("steps", schedule.calls * len(starts)) as ended:

            def told(progress: Progress) -> bool | None:
                nonlocal last
                now = time.perf_counter()
                if "first_step" in clock.seconds:
                    later.append(now - last)
                    clock.book("steps", 0.0)  # its memory, before a preview's
                else:
                    clock.book("first_step", now - last)
                ended()
                go_on = None if callback is None else callback(progress)
                last = time.perf_counter()
                return go_on

            ends = [denoise(predicted, x[None], schedule, noise=noise, callback=told)
                    for x in starts]  # fmt: skip
        first = clock.seconds["first_step"]
        clock.seconds["steps"] -= first + clock.seconds.get("preview", 0.0)
        clock.seconds["step_median"] = median(later or [first])
        return ends

    def _previewing(
        self, preview: Preview | None, decoder: TinyDecoder | None, request: Request,
        clock: Phases, callback: Callback | None,
    ) -> Callback | None:  # fmt: skip
        """The callback, and before it a preview, as often as takes a fifth of the time."""
        if preview is None:
            return callback
        shown = decoder or LinearDecoder(self.parts.component("vae"))
        size, due = (request.width, request.height), 0.0

        def told(progress: Progress) -> bool | None:
            nonlocal due
            began = time.perf_counter()
            if began >= due:
                with standing_in(self.parts, shown):
                    values = np.array(self.family.decode(self.parts, progress.clean, request))
                preview(_image(values[0]).resize(size), progress)
                ended = time.perf_counter()
                due = ended + 4 * (ended - began)
                clock.book("preview", ended - began)
            return None if callback is None else callback(progress)

        return told

    def _decode(
        self, latents: list[mx.array], made: Pictures, decoder: TinyDecoder | None,
        work: int, ended: Callable[[], None],
    ) -> np.ndarray[Any, Any]:  # fmt: skip
        decoded, request = [], made.request
        component = decoder.component if decoder else self.parts.component("vae")
        with standing_in(self.parts, decoder), in_strips(component, work) as strips:
            for each in latents:
                decoded.append(np.array(self.family.decode(self.parts, each, request)))
                ended()
        found = decoded[0].shape[1:3]
        if found != (request.height, request.width):
            raise MlxconvError(f"{component.path}: decodes to {found[1]}x{found[0]} where "
                               f"{request.width}x{request.height} was asked for; give a decoder "
                               "of the same scale as the VAE")  # fmt: skip
        if strips is not None and strips.most > 1:
            made.notes.append(f"decoded in up to {strips.most} strips of rows, without seams, to "
                              "save memory (--tile)")  # fmt: skip
        return np.concatenate(decoded)


def load(
    bundle: str | Path, *, dtype: str | None = None, vae_dtype: str | None = None,
    keep: bool = False,
) -> Pipeline:  # fmt: skip
    """The pipeline of a bundle: `load("flux-4bit")("a cat").images[0]`.

    dtype: precision of the activations, see `load_component`. vae_dtype: of the VAE's; by default
    float32 where the others are bfloat16, see `Parts.precise_enough`. keep: hold text encoders in
    memory between prompts. MlxconvError when the bundle's pipeline has no native family.
    """
    return Pipeline(bundle, dtype=dtype, vae_dtype=vae_dtype, keep=keep)


def _image(pixels: np.ndarray[Any, Any]) -> Image.Image:
    """Pixels (height, width, 3) in 0 to 1."""
    return Image.fromarray(np.round(pixels * 255).astype(np.uint8))


def _again(generator: Generator, shape: tuple[int, ...], call: int) -> mx.array:
    """Noise for a stochastic scheduler: the draws that follow those of the latents."""
    return generator.normal(shape)


def _check_prompts(
    prompt: str | None, embeddings: Inputs | None, negative: str | None, others: Inputs | None
) -> None:
    if (prompt is None) == (embeddings is None):
        raise MlxconvError("pass a prompt, or embeddings instead of it: one of the two")
    if negative is not None and others is not None:
        raise MlxconvError("pass negative, or negative_embeddings instead of it, not both")


def _check(request: Request, own: Defaults, family: Family) -> None:
    for name in ("steps", "count", "width", "height"):
        if getattr(request, name) < 1:
            raise MlxconvError(f"{name} is {getattr(request, name)}: at least 1")
    if request.seed < 0:
        raise MlxconvError(f"seed is {request.seed}: 0 or more")
    unknown = [name for name in request.conditioning if name not in family.conditioning]
    if unknown:
        raise MlxconvError(f"conditioning {', '.join(unknown)}: this pipeline takes "
                           f"{', '.join(family.conditioning) or 'none'}")  # fmt: skip
    for name, numbers in request.conditioning.items():
        if len(numbers) != 2:
            raise MlxconvError(f"{name} is {tuple(numbers)}: two numbers, as in diffusers")
    near = replace(request, width=_near(request.width, own), height=_near(request.height, own))
    if near != request:
        raise MlxconvError(
            f"size {request.width}x{request.height}: width and height have to be divisible by "
            f"{own.multiple}; {near.width}x{near.height} is the nearest"
        )


def _near(size: int, own: Defaults) -> int:
    return max(1, round(size / own.multiple)) * own.multiple
