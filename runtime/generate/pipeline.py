"""`mlxconv.load(bundle)`: prompts to pictures, without PyTorch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from ..bundle import open_bundle, read_json
from ..errors import ArgumentError, MlxconvError
from ..exec.executor import COMPILE_MODES
from ..exec.finite import check_finite
from ..schedulers import Schedule, Scheduler, with_class
from .decode import LinearDecoder, find_decoder, standing_in
from .denoise import Callback, LoopSettings, Noise, Progress, denoise
from .families import family_of
from .families.embeddings import embedded
from .families.family import Defaults, Family, Inputs, Parts, Request
from .guidance import Guided
from .noise import Generator
from .options import DIFFUSERS_NAMES, Options, takes
from .phases import Phases
from .picture_files import Pictures, records_of
from .plan import Plan
from .staging import Staged
from .tiling import in_strips, work_of

COMPILE = (*COMPILE_MODES, "all")
_CFG = 4.0  # with a negative prompt, where none is asked for


class Pipeline:
    """A bundle of a whole pipeline. Text encoders are freed after a prompt unless `keep`."""

    def __init__(
        self,
        bundle: str | Path,
        *,
        dtype: str | None = None,
        vae_dtype: str | None = None,
        keep: bool = False,
        compile: str = "program",
    ) -> None:
        if compile not in COMPILE:
            raise ArgumentError(f"compile={compile!r}: choose one of {', '.join(COMPILE)}")
        opened = open_bundle(bundle)
        index = opened.path / "model_index.json"
        name = str(read_json(index).get("_class_name", "")) if index.is_file() else ""
        self.family = family_of(name, str(opened.path))
        opened.need([*self.family.encoders, self.family.denoiser, "vae"])
        whole = "program" if compile == "all" else "off"
        self.parts, self.keep = Parts(opened, dtype, vae_dtype, whole), keep
        self.compile = "program" if compile == "all" else compile
        self._staged: Staged | None = None

    def __repr__(self) -> str:
        bundle = self.parts.bundle
        q = bundle.manifest["components"][self.family.denoiser].get("q")
        return f"<Pipeline {bundle.path}: {bundle.manifest.get('pipeline')}, {q}>"

    @property
    def defaults(self) -> Defaults:
        """What a request is without being asked."""
        return self.family.defaults(self.parts)

    def warmup(self, prompt: str = "", **options: Any) -> None:
        """Compile and read what pictures with these options need, by the first step of one.

        Text encoders are read again for the next prompt unless the pipeline keeps them.
        """
        self(prompt, **{**options, "count": 1, "seed": 0, "callback": lambda progress: False})

    @takes(Options, DIFFUSERS_NAMES)
    def __call__(self, options: Options) -> Pictures:
        """Pictures of a prompt, or of each of several.

        The noise of a seed is torch's own, so pictures can be compared with those of diffusers.
        `num_inference_steps`, `guidance_scale`, `negative_prompt`, `num_images_per_prompt`,
        `generator`, `true_cfg_scale` and `max_sequence_length` are taken for steps, guidance,
        negative, count, seed, cfg and tokens. MlxconvError for what cannot be made.

        guidance: the pipeline's `guidance_scale`. cfg: scale of true classifier-free guidance, of
        FLUX.1 and Qwen-Image with a negative prompt. cfg_end: the part of the schedule after which
        no negative prompt is read. width, height: in pixels. seed: of the first picture, the next
        has the next; or one a picture; None: a random one, which the result names. count: pictures
        a prompt. batch: pictures of a prompt in one call of the denoiser. tokens: of the longest
        text encoder. scheduler: another class than the checkpoint's, or a name as `DPM++ 2M
        Karras`, see `with_class`. sigmas, timesteps: noise levels of a schedule of one's own.
        decoder: `tiny`, or the path of a converted autoencoder, instead of the VAE. tile: large
        pictures are decoded in strips of rows: `auto`, `off`, or how many MB each may need.
        preview: shown the pictures that steps predict, by `decoder` or a linear map, in at most a
        fifth of the time. embeddings, negative_embeddings: instead of prompts, arrays by the names
        of `pipeline.family.embeddings`. conditioning: SDXL's `original_size`, `target_size` and
        `crops_coords_top_left`, as in diffusers. callback: after each step. listener: called with
        each phase and how far it is. loop: when steps are evaluated, and whether embeddings,
        latents and pixels are checked for NaN and infinity.
        """
        return self.run(self.plan(options))

    def plan(self, options: Options) -> Plan:
        """What will be made; MlxconvError for what cannot be."""
        own, steps = self.defaults, options.steps
        _check_prompts(options)
        pull = own.guidance if options.guidance is None else options.guidance
        against = options.negative is not None or options.negative_embeddings is not None
        scale, guided = self._scale(against, pull, options.cfg)
        levels = options.timesteps if options.sigmas is None else options.sigmas
        if levels is not None:
            if steps is not None:
                raise ArgumentError("give steps, or sigmas or timesteps: one of the two")
            steps = len(levels)
        request = Request(
            options.prompts[0],
            options.width or own.width,
            options.height or own.height,
            own.steps if steps is None else steps,
            pull,
            options.negative,
            scale,
            0,
            options.tokens,
            guided,
            options.conditioning or {},
            options.sigmas,
            options.timesteps,
        )
        _check(request, own, self.family)
        if options.batch < 1:
            raise ArgumentError(f"batch is {options.batch}: at least 1")
        notes = self._without_effect(options, request, against)
        requests = [
            replace(request, prompt=prompt, seed=seed)
            for prompt, seeds in zip(options.prompts, options.seeds(), strict=True)
            for seed in seeds
        ]
        decoder = None if options.decoder is None else find_decoder(self.parts, options.decoder)
        scheduler = self.parts.scheduler
        if options.scheduler is not None:
            scheduler = with_class(scheduler, options.scheduler)
        return Plan(requests, scheduler, decoder, self._work(options.tile), options, notes)

    def run(self, plan: Plan) -> Pictures:
        """Make what was planned: encode all prompts, then denoise and decode picture by picture."""
        records, notes = records_of(self.parts, self.family, plan), list(plan.notes)
        made = Pictures([], np.zeros(0), plan.requests, records, notes=notes)
        self.parts.notes = made.notes
        clock = Phases(plan.options.listener)
        encoded = self._encode(plan, clock)
        later: list[float] = []
        ends = []
        for requests, prompts in zip(plan.by_prompt, encoded, strict=True):
            generators = [Generator(request.seed) for request in requests]
            starts, schedule = self._start(requests, prompts[0], plan.scheduler, generators)
            batches = [
                slice(at, at + plan.options.batch)
                for at in range(0, len(starts), plan.options.batch)
            ]
            groups = [mx.concatenate(starts[batch]) for batch in batches]
            with clock.phase("prepare"):
                models = {
                    count: self._prepare(prompts, starts[0], schedule, plan, made, count)
                    for count in {len(group) for group in groups}
                }
            told = self._previewing(plan, requests[0], clock)
            noises: list[Noise] = [
                partial(_again, generators[batch], starts[0].shape) for batch in batches
            ]
            loop = plan.options.loop
            ends += self._denoise(models, groups, schedule, noises, told, clock, later, loop)
        first = clock.seconds["first_step"]
        clock.seconds["steps"] -= first + clock.seconds.get("preview", 0.0)
        clock.seconds["step_median"] = median(later or [first])
        with clock.phase("decode", len(ends)) as ended:
            mx.clear_cache()  # of the steps' buffers, which a decoder cannot use
            made.pixels = self._decode(ends, made, plan, ended)
        made.images = [_image(pixels) for pixels in made.pixels]
        made.seconds = {**clock.seconds, "total": clock.wall}
        made.peak_bytes = clock.peak_bytes
        made.notes[:] = dict.fromkeys(made.notes)
        return made

    def _without_effect(self, options: Options, request: Request, against: bool) -> list[str]:
        """What was asked for and changes nothing, each with the reason. A value that means "off"
        is none."""
        family, parts, loop = self.family, self.parts, options.loop
        waits, steps = family.embedded(parts), request.steps
        return [
            note
            for note, without in (
                (
                    f"the negative prompt is not read: guidance is {request.cfg:g}",
                    against and not request.guided,
                ),
                (
                    f"guidance {options.guidance} has no effect: this checkpoint takes none; with "
                    "a negative prompt (--negative) cfg (--cfg) guides it",
                    options.guidance not in (None, 0, 1) and not family.reads_guidance(parts),
                ),
                (
                    f"cfg {options.cfg} has no effect without a negative prompt (--negative)",
                    waits and options.cfg not in (None, 1) and not against,
                ),
                (
                    f"cfg_end {options.cfg_end} has no effect: no negative prompt is read",
                    options.cfg_end != 1 and not request.guided,
                ),
                (
                    f"tokens {options.tokens} has no effect: embeddings were given",
                    options.tokens is not None and options.embeddings is not None,
                ),
                (
                    f"tokens {options.tokens} has no effect: the text encoders of this pipeline "
                    "read a fixed number",
                    options.tokens is not None and not family.takes_tokens,
                ),
                (
                    f"batch {options.batch}: a prompt has fewer pictures (--count), "
                    "made in one batch",
                    options.batch > max(map(len, options.seeds())),
                ),
                (
                    f"evaluate_every {loop.evaluate_every} of {steps} steps: evaluated at the end",
                    loop.evaluate_every > steps,
                ),
                (
                    f"clear_cache_every {loop.clear_cache_every} has no effect in {steps} steps",
                    loop.clear_cache_every > steps,
                ),
            )
            if without
        ]

    # ---- the phases ----

    def _work(self, tile: str | int) -> int:
        """Bytes that a strip may need. What is compiled is decoded whole: strips are not."""
        if self.parts.compile == "off":
            return work_of(tile)
        if tile not in ("auto", "off"):
            raise MlxconvError(
                f"tile={tile}: a compiled VAE decodes whole pictures; leave --tile out, or compile "
                "the denoiser alone (--compile program)"
            )
        return 0

    def _scale(self, against: bool, guidance: float, cfg: float | None) -> tuple[float, bool]:
        """The scale away from the negative prompt, and whether that is read."""
        waits = self.family.embedded(self.parts)
        if waits:
            scale = (_CFG if against else 1.0) if cfg is None else cfg
        elif cfg is not None:
            raise MlxconvError(
                f"cfg={cfg:g}: the scale of this pipeline's classifier-free guidance is called "
                f"guidance: pass --guidance {cfg:g} (guidance={cfg:g} in Python)"
            )
        else:
            scale = guidance
        return scale, scale > self.family.guidance.off and (against or not waits)

    def _encode(self, plan: Plan, clock: Phases) -> list[list[Inputs]]:
        """Each prompt's embeddings, and the negative prompt's; the encoders are released."""
        found, options = [], plan.options
        parts = len(plan.by_prompt) * (1 + plan.requests[0].guided)
        with clock.phase("encode", parts) as ended:
            for requests in plan.by_prompt:
                found.append(list[Inputs]())
                for inputs in embedded(
                    self.family,
                    self.parts,
                    requests[0],
                    options.embeddings,
                    options.negative_embeddings,
                ):
                    mx.eval(list(inputs.values()))
                    if options.loop.check:
                        self._check_embeddings(inputs, requests[0])
                    found[-1].append(inputs)
                    ended()
        if not self.keep:
            for name in self.family.encoders:
                self.parts.release(name)
        return found

    def _check_embeddings(self, made: Inputs, request: Request) -> None:
        names = {f"the prompt's embeddings, {name}": value for name, value in made.items()}
        check_finite(names, partial(self.family.encode, self.parts, request.prompt, request))

    def _start(
        self,
        requests: list[Request],
        prompt: Inputs,
        scheduler: Scheduler,
        generators: list[Generator],
    ) -> tuple[list[mx.array], Schedule]:
        """The latents (1, ...) that each picture begins with."""
        noise = [
            self.family.start(self.parts, request, generator, prompt)
            for request, generator in zip(requests, generators, strict=True)
        ]
        schedule = self.family.schedule(scheduler, requests[0], noise[0])
        return [each * schedule.initial_noise for each in noise], schedule

    def _prepare(
        self,
        prompts: list[Inputs],
        latents: mx.array,
        schedule: Schedule,
        plan: Plan,
        made: Pictures,
        count: int,
    ) -> Guided:
        """The loop's model, for so many pictures at once; latents (1, ...)."""
        if self._staged is None:
            component = self.parts.component(self.family.denoiser)
            self._staged = Staged(component, compile=self.compile)
        staged, family, request = self._staged, self.family, plan.requests[0]
        given = [
            {**family.latents(latents), **family.inputs(self.parts, request, prompt)}
            for prompt in prompts
        ]
        guidance = replace(family.guidance, scale=request.cfg, end=plan.options.cfg_end)
        negative = given[1] if len(given) > 1 else None
        times, sizes = family.times(self.parts, schedule), staged.weight_bytes()
        made.weight_bytes = {"prepare": sizes["all"], "loop": sizes["step"]}
        return Guided(
            staged,
            given[0],
            times,
            negative,
            guidance,
            latents=family.latents,
            prediction=family.prediction,
            batch=count,
        )

    def _denoise(
        self,
        models: Mapping[int, Guided],
        starts: list[mx.array],
        schedule: Schedule,
        noises: list[Noise],
        callback: Callback | None,
        clock: Phases,
        later: list[float],
        loop: LoopSettings,
    ) -> list[mx.array]:
        """The latents (1, ...) at the end of each picture; starts: a batch each, whose size says
        which model is for it; `later`: seconds of each step but the first."""
        last = time.perf_counter()

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

            ends = (
                denoise(models[len(x)], x, schedule, noise=noise, callback=told, settings=loop)
                for x, noise in zip(starts, noises, strict=True)
            )
            return [each for end in ends for each in mx.split(end, len(end))]

    def _previewing(self, plan: Plan, request: Request, clock: Phases) -> Callback | None:
        """The callback, and before it a preview, as often as takes a fifth of the time."""
        preview, callback = plan.options.preview, plan.options.callback
        if preview is None:
            return callback
        shown = plan.decoder or LinearDecoder(self.parts.component("vae"))
        size, due = (request.width, request.height), 0.0

        def told(progress: Progress) -> bool | None:
            nonlocal due
            began = time.perf_counter()
            if began >= due:
                with standing_in(self.parts, shown):
                    values = np.array(self.family.decode(self.parts, progress.clean[:1], request))
                preview(_image(values[0]).resize(size), progress)
                ended = time.perf_counter()
                due = ended + 4 * (ended - began)
                clock.book("preview", ended - began)
            return None if callback is None else callback(progress)

        return told

    def _decode(
        self, latents: list[mx.array], made: Pictures, plan: Plan, ended: Callable[[], None]
    ) -> np.ndarray[Any, Any]:
        decoded, request, decoder = [], made.request, plan.decoder
        component = decoder.component if decoder else self.parts.component("vae")
        with standing_in(self.parts, decoder), in_strips(component, plan.work) as strips:
            for each in latents:
                found = partial(self.family.decode, self.parts, each, request)
                pixels = found()
                if plan.options.loop.check:
                    mx.eval(pixels)
                    check_finite({"the decoded picture": pixels}, found, component.dtype)
                decoded.append(np.array(pixels))
                ended()
        size = decoded[0].shape[1:3]
        if size != (request.height, request.width):
            raise MlxconvError(
                f"{component.path}: decodes to {size[1]}x{size[0]} where "
                f"{request.width}x{request.height} was asked for; give a decoder "
                "of the same scale as the VAE"
            )
        if strips is not None and strips.most > 1:
            made.notes.append(
                f"decoded in up to {strips.most} strips of rows, without seams, to "
                "save memory (--tile)"
            )
        elif plan.options.tile not in ("auto", "off"):
            made.notes.append(
                f"tile {plan.options.tile} has no effect: no part of the decoder "
                "needs more memory than that"
            )
        return np.concatenate(decoded)


def load(
    bundle: str | Path,
    *,
    dtype: str | None = None,
    vae_dtype: str | None = None,
    keep: bool = False,
    compile: str = "program",
) -> Pipeline:
    """The pipeline of a bundle: `load("flux-4bit")("a cat").images[0]`.

    dtype: precision of the activations, see `load_component`. vae_dtype: of the VAE's; by default
    float32 where the others are bfloat16, see `Parts.precise_enough`. keep: hold text encoders in
    memory between prompts. compile: the denoiser's step as a whole (`program`), by blocks (`block`)
    or not at all (`off`); `all` compiles text encoders and the VAE too, which then decodes whole
    pictures. MlxconvError when the bundle's pipeline has no native family.
    """
    return Pipeline(bundle, dtype=dtype, vae_dtype=vae_dtype, keep=keep, compile=compile)


def _image(pixels: np.ndarray[Any, Any]) -> Image.Image:
    """Pixels (height, width, 3) in 0 to 1."""
    return Image.fromarray(np.round(np.nan_to_num(pixels) * 255).astype(np.uint8))


def _again(generators: list[Generator], shape: tuple[int, ...], call: int) -> mx.array:
    """Noise for a stochastic scheduler: the draws that follow those of the latents."""
    return mx.concatenate([generator.normal(shape) for generator in generators])


def _check_prompts(options: Options) -> None:
    if (options.prompt is None) == (options.embeddings is None):
        raise ArgumentError("pass a prompt, or embeddings instead of it: one of the two")
    if options.negative is not None and options.negative_embeddings is not None:
        raise ArgumentError("pass negative, or negative_embeddings instead of it, not both")
    if not isinstance(options.negative, str | None):
        raise ArgumentError(f"negative is {options.negative!r:.80}: one string, for all prompts")


def _check(request: Request, own: Defaults, family: Family) -> None:
    for name in ("steps", "width", "height"):
        if getattr(request, name) < 1:
            raise ArgumentError(f"{name} is {getattr(request, name)}: at least 1")
    unknown = [name for name in request.conditioning if name not in family.conditioning]
    if unknown:
        raise MlxconvError(
            f"conditioning {', '.join(unknown)}: this pipeline takes "
            f"{', '.join(family.conditioning) or 'none'}"
        )
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
