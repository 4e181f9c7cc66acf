"""The denoising loop: a model's prediction, a scheduler's step, until the schedule ends.

Nothing here knows a model, a scheduler or a prompt: `model` is called with a step's number and the
latents (see `Guided`), and the schedule is a table of coefficients.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ..errors import MlxconvError
from ..exec.finite import NotFinite, is_finite
from ..schedulers import Schedule, denoised, initial_state, model_input
from ..schedulers import step as scheduler_step
from ..schedulers.schedule import Form, State

Model = Callable[[int, mx.array], mx.array]
Noise = Callable[[int], mx.array]


@dataclass(frozen=True)
class LoopSettings:
    """When results are computed. Defaults: what docs/PERFORMANCE.md measured to be no slower.

    evaluate_every: steps between evaluations; 0 builds the whole loop first. clear_cache_every:
    steps between returns of MLX's cached buffers to the system; 0 never returns them. check: raise
    NotFinite at the first step whose prediction or latents are not finite.
    """

    evaluate_every: int = 1
    clear_cache_every: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        if self.evaluate_every < 0 or self.clear_cache_every < 0:
            raise MlxconvError(f"{self}: numbers of steps, 0 or more")


@dataclass(frozen=True)
class Progress:
    """What a callback learns after a step: `seconds` since the loop began, latents maybe lazy.

    clean: the latents at the schedule's end that this step predicts, lazily: for previews.
    """

    step: int
    steps: int
    timestep: float
    latents: mx.array
    seconds: float
    clean: mx.array


Callback = Callable[[Progress], bool | None]


def denoise(
    model: Model,
    latents: mx.array,
    schedule: Schedule,
    *,
    noise: Noise | None = None,
    settings: LoopSettings | None = None,
    callback: Callback | None = None,
) -> mx.array:
    """Latents (batch, ...) at the end of the schedule, evaluated.

    latents: at its beginning, noise already scaled. noise: standard normal of the latents' shape
    for a call's number, asked for where `schedule.draws` says so. callback: after each step; the
    loop ends early, with the latents so far, where it returns False. Raises NotFinite, see
    `LoopSettings`; a model that has a method `fault_at(step, latents)` is asked where it began.
    """
    if schedule.stochastic and noise is None:
        raise MlxconvError("this scheduler is stochastic: pass noise, a function of the step")
    settings = settings or LoopSettings()
    advance = mx.compile(partial(_advance, form=schedule.form, check=settings.check))
    scaled = mx.compile(model_input)
    rows, state = mx.array(schedule.rows), initial_state(schedule, latents)
    began, unchecked = time.perf_counter(), list[_Checked]()
    for i in range(schedule.calls):
        row = rows[i]
        seen, before = scaled(row, latents), latents
        output, drawn = model(i, seen), _drawn(noise, i, schedule, latents)
        latents, state, finite = advance(row, latents, output, state, *drawn)
        unchecked += [(i, seen, each) for each in finite]
        if settings.evaluate_every and (i + 1) % settings.evaluate_every == 0:
            mx.eval(latents, state, finite)
            _check(unchecked, model, schedule)
        if settings.clear_cache_every and (i + 1) % settings.clear_cache_every == 0:
            mx.clear_cache()
        if callback is not None:
            seconds, clean = time.perf_counter() - began, denoised(row, before, output)
            timestep = float(schedule.timesteps[i])
            if callback(Progress(i, schedule.calls, timestep, latents, seconds, clean)) is False:
                break
    mx.eval(latents, [each for *_, each in unchecked])
    _check(unchecked, model, schedule)
    return latents


_Checked = tuple[int, mx.array, mx.array]  # a step, what the model was given, whether all is finite


def _advance(
    row: mx.array,
    latents: mx.array,
    output: mx.array,
    state: State,
    noise: mx.array | None = None,
    *,
    form: Form,
    check: bool,
) -> tuple[mx.array, State, list[mx.array]]:
    """The scheduler's step, and in the same compiled function whether its values are finite."""
    after, state = scheduler_step(row, latents, output, state, noise, form=form)
    return after, state, [is_finite(output, after)] if check else []


def _check(unchecked: list[_Checked], model: Model, schedule: Schedule) -> None:
    """Raise NotFinite for the first of these steps that is not finite; forget the others."""
    for step, seen, finite in unchecked:
        if not finite.item():
            fault_at = getattr(model, "fault_at", None)
            raise NotFinite(
                f"step {step + 1} of {schedule.calls} (timestep {schedule.timesteps[step]:g}): "
                "NaN or infinity in the latents" + (fault_at(step, seen) if fault_at else "")
            )
    unchecked.clear()


def _drawn(noise: Noise | None, i: int, schedule: Schedule, latents: mx.array) -> list[mx.array]:
    """Noise where this call draws some; a stochastic schedule takes zeros at its other calls."""
    if noise is None or not schedule.stochastic:
        return []
    return [noise(i) if schedule.draws[i] else mx.zeros(latents.shape)]
