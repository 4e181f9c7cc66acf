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
from ..schedulers import Schedule, Scheduler
from .decode import LinearDecoder, standing_in
from .denoise import Callback, LoopSettings, Noise, Progress, denoise
from .families import family_of
from .families.embeddings import embedded
from .families.parts import Defaults, Inputs, Parts, Request
from .guidance import Guided
from .noise import Generator
from .options import DIFFUSERS_NAMES, Options, takes
from .phases import Phases
from .picture_files import Pictures, records_of
from .plan import Plan, plan_pictures
from .staging import Staged
from .tiling import in_strips

COMPILE = (*COMPILE_MODES, "all")


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
        """Generate images for one prompt, or for each of several.

        A seed gives the same noise as in torch, so images can be compared with those of diffusers.
        `num_inference_steps`, `guidance_scale`, `negative_prompt`, `num_images_per_prompt`,
        `generator`, `true_cfg_scale` and `max_sequence_length` are taken for steps, guidance,
        negative, count, seed, cfg and tokens. Raises MlxconvError for what cannot be generated.

        guidance: the pipeline's `guidance_scale`. cfg: scale of true classifier-free guidance, of
        FLUX.1 and Qwen-Image with a negative prompt. cfg_end: the part of the schedule after which
        the negative prompt is ignored. width, height: in pixels. seed: of the first image, counting
        up for the next ones, or one per image; None: a random one, which the result names. count:
        images per prompt. batch: images of a prompt in one call of the denoiser. tokens: of the
        longest text encoder. scheduler: another class than the checkpoint's, or a name as `DPM++ 2M
        Karras`, see `with_class`. sigmas, timesteps: a custom schedule. decoder: `tiny`, or the
        path of a converted autoencoder, instead of the VAE. tile: large pictures are decoded in
        strips of rows: `auto`, `off`, or how many MB each may need. preview: called with the image
        that each step predicts, by `decoder` or a linear map, using at most a fifth of the time.
        embeddings, negative_embeddings: instead of prompts, arrays by the names of
        `pipeline.family.embeddings`. conditioning: SDXL's `original_size`, `target_size` and
        `crops_coords_top_left`, as in diffusers. callback: after each step. listener: called with
        each phase and how far it is. loop: when steps are evaluated, and whether embeddings,
        latents and pixels are checked for NaN and infinity.
        """
        return self.run(self.plan(options))

    def plan(self, options: Options) -> Plan:
        """Check the options and decide everything; raises MlxconvError for what cannot be made."""
        return plan_pictures(self.parts, self.family, options)

    def run(self, plan: Plan) -> Pictures:
        """Make what was planned: encode all prompts, then denoise and decode picture by picture."""
        records, notes = records_of(self.parts, self.family, plan), list(plan.notes)
        made = Pictures([], np.zeros(0), plan.requests, records, notes=notes)
        self.parts.notes = made.notes
        clock = Phases(plan.options.listener)
        encoded = self._encode(plan, clock)
        ends = []
        for requests, prompts in zip(plan.by_prompt, encoded, strict=True):
            ends += self._denoised(requests, prompts, plan, made, clock)
        with clock.phase("decode", len(ends)) as ended:
            mx.clear_cache()  # of the steps' buffers, which a decoder cannot use
            made.pixels = self._decode(ends, made, plan, ended)
        made.images = [_image(pixels) for pixels in made.pixels]
        made.seconds, made.peak_bytes = _seconds(clock), clock.peak_bytes
        made.notes[:] = dict.fromkeys(made.notes)
        return made

    # ---- the phases ----

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

    def _denoised(
        self,
        requests: list[Request],
        prompts: list[Inputs],
        plan: Plan,
        made: Pictures,
        clock: Phases,
    ) -> list[mx.array]:
        """The latents (1, ...) at the end of each picture of a prompt, `plan.options.batch` at a
        time."""
        generators = [Generator(request.seed) for request in requests]
        starts, schedule = self._start(requests, prompts[0], plan.scheduler, generators)
        size = plan.options.batch
        batches = [slice(at, at + size) for at in range(0, len(starts), size)]
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
        return self._denoise(models, groups, schedule, noises, told, clock, plan.options.loop)

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
        loop: LoopSettings,
    ) -> list[mx.array]:
        """The latents (1, ...) at the end of each picture; starts: a batch each, whose size says
        which model is for it."""
        last = time.perf_counter()

        with clock.phase("steps", schedule.calls * len(starts)) as ended:

            def told(progress: Progress) -> bool | None:
                nonlocal last
                now = time.perf_counter()
                if "first_step" in clock.seconds:
                    clock.later.append(now - last)
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
    pictures. Raises MlxconvError if `generate` does not support the pipeline.
    """
    return Pipeline(bundle, dtype=dtype, vae_dtype=vae_dtype, keep=keep, compile=compile)


def _image(pixels: np.ndarray[Any, Any]) -> Image.Image:
    """Pixels (height, width, 3) in 0 to 1."""
    return Image.fromarray(np.round(np.nan_to_num(pixels) * 255).astype(np.uint8))


def _seconds(clock: Phases) -> dict[str, float]:
    """Seconds by phase: the first step and previews apart from the other steps."""
    spent = dict(clock.seconds)
    spent["steps"] -= spent["first_step"] + spent.get("preview", 0.0)
    spent["step_median"] = median(clock.later or [spent["first_step"]])
    return {**spent, "total": clock.wall}


def _again(generators: list[Generator], shape: tuple[int, ...], call: int) -> mx.array:
    """Noise for a stochastic scheduler: the draws that follow those of the latents."""
    return mx.concatenate([generator.normal(shape) for generator in generators])
