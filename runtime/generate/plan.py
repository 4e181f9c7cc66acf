"""What is decided of a generation before anything is computed."""

from dataclasses import dataclass, replace

from ..errors import ArgumentError, MlxconvError
from ..schedulers import Scheduler, with_class
from .decode import TinyDecoder, find_decoder
from .families.family import Family
from .families.parts import Defaults, Parts, Request
from .options import Options
from .tiling import work_of

_CFG = 4.0  # with a negative prompt, where none is asked for


@dataclass(frozen=True)
class Plan:
    """requests: one per image, those of a prompt together."""

    requests: list[Request]
    scheduler: Scheduler
    decoder: TinyDecoder | None
    work: int
    options: Options
    notes: list[str]

    @property
    def by_prompt(self) -> list[list[Request]]:
        """The requests of each prompt."""
        step = len(self.requests) // len(self.options.prompts)
        return [self.requests[i : i + step] for i in range(0, len(self.requests), step)]


def plan_pictures(parts: Parts, family: Family, options: Options) -> Plan:
    """Check the options and decide everything; raises MlxconvError for what cannot be made."""
    own, steps = family.defaults(parts), options.steps
    _check_prompts(options)
    pull = own.guidance if options.guidance is None else options.guidance
    against = options.negative is not None or options.negative_embeddings is not None
    scale, guided = _scale(parts, family, against, pull, options.cfg)
    levels = options.timesteps if options.sigmas is None else options.sigmas
    if levels is not None:
        if steps is not None:
            raise ArgumentError("give either steps, or sigmas or timesteps")
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
    _check(request, own, family)
    if options.batch < 1:
        raise ArgumentError(f"batch is {options.batch}: at least 1")
    notes = _without_effect(parts, family, options, request, against)
    requests = [
        replace(request, prompt=prompt, seed=seed)
        for prompt, seeds in zip(options.prompts, options.seeds(), strict=True)
        for seed in seeds
    ]
    decoder = None if options.decoder is None else find_decoder(parts, options.decoder)
    scheduler = parts.scheduler
    if options.scheduler is not None:
        scheduler = with_class(scheduler, options.scheduler)
    return Plan(requests, scheduler, decoder, _work(parts, options.tile), options, notes)


def _without_effect(
    parts: Parts, family: Family, options: Options, request: Request, against: bool
) -> list[str]:
    """What was asked for and changes nothing, each with the reason. A value that means "off"
    is none."""
    waits, loop, steps = family.embedded(parts), options.loop, request.steps
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
                options.tokens is not None and not family.default_tokens,
            ),
            (
                f"batch {options.batch}: a prompt has fewer pictures (--count), made in one batch",
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


def _work(parts: Parts, tile: str | int) -> int:
    """Bytes that a strip may need. What is compiled is decoded whole: strips are not."""
    if parts.compile == "off":
        return work_of(tile)
    if tile not in ("auto", "off"):
        raise MlxconvError(
            f"tile={tile}: a compiled VAE decodes whole images; leave --tile out, or compile "
            "the denoiser alone (--compile program)"
        )
    return 0


def _scale(
    parts: Parts, family: Family, against: bool, guidance: float, cfg: float | None
) -> tuple[float, bool]:
    """The scale away from the negative prompt, and whether that is read."""
    waits = family.embedded(parts)
    if waits:
        scale = (_CFG if against else 1.0) if cfg is None else cfg
    elif cfg is not None:
        raise MlxconvError(
            f"cfg={cfg:g}: the scale of this pipeline's classifier-free guidance is called "
            f"guidance: pass --guidance {cfg:g} (guidance={cfg:g} in Python)"
        )
    else:
        scale = guidance
    return scale, scale > family.guidance.off and (against or not waits)


def _check_prompts(options: Options) -> None:
    if (options.prompt is None) == (options.embeddings is None):
        raise ArgumentError("pass either a prompt or embeddings")
    if options.negative is not None and options.negative_embeddings is not None:
        raise ArgumentError("pass either negative or negative_embeddings")
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
