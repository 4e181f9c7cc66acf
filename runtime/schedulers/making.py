"""make_schedule: a scheduler and what the caller asks, to a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import MlxconvError
from .config import Scheduler
from .flow_match import Flow
from .options import built
from .schedule import Request, Schedule
from .sigmas import calculate_shift


def make_schedule(
    scheduler: Scheduler,
    steps: int | None = None,
    *,
    mu: float | None = None,
    timesteps: Sequence[float] | None = None,
    sigmas: Sequence[float] | None = None,
    begin: int = 0,
    strength: float | None = None,
    eta: float | None = None,
) -> Schedule:
    """All coefficients of a generation, from its call `begin` on.

    mu: the shift under `use_dynamic_shifting` (`shift_for`). timesteps, sigmas: the caller's own
    instead of `steps`; what they hold is as in the class's `set_timesteps` (Euler's sigmas end
    with the last level, SCM's timesteps with the last angle). begin: a model call to start at, for
    image-to-image (`begin_of`). strength: of LCM and TCD, which respace with it. eta: of DDIM and
    TCD. Raises MlxconvError for what the class does not take.
    """
    own_levels = timesteps is not None or sigmas is not None
    if scheduler.even and steps and "sigmas" in scheduler.row.accepts and not own_levels:
        sigmas = np.linspace(1, 1 / steps, steps).tolist()
    own = {"mu": mu, "timesteps": timesteps, "sigmas": sigmas, "strength": strength, "eta": eta}
    _check_taken(scheduler, {key: value for key, value in own.items() if value is not None})
    request = Request(
        _steps(scheduler, steps, timesteps, sigmas),
        mu if scheduler.options.get("use_dynamic_shifting") else None,
        None if timesteps is None else tuple(timesteps),
        None if sigmas is None else tuple(sigmas),
        begin,
        strength,
        eta,
    )
    _check_begin(scheduler, request)
    if scheduler.options.get("use_dynamic_shifting") and mu is None:
        raise MlxconvError(
            "use_dynamic_shifting needs mu: pass calculate_shift(image tokens), or mu itself"
        )
    # A last level of zero has an infinite lambda; `assemble` checks.
    with np.errstate(all="ignore"):
        return built(scheduler.row.build, request, scheduler.options)


def begin_of(scheduler: Scheduler, steps: int, strength: float) -> int:
    """The first model call of image-to-image at a strength in (0, 1]: as `get_timesteps` there."""
    kept = min(int(steps * strength), steps)
    return (steps - kept) * scheduler.row.order


def shift_for(scheduler: Scheduler, tokens: int) -> float | None:
    """mu for so many image tokens, by the scheduler's own options; None where it takes none."""
    if not scheduler.options.get("use_dynamic_shifting"):
        return None
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return calculate_shift(tokens, *(scheduler.config.get(n, getattr(Flow, n)) for n in names))


def _check_taken(scheduler: Scheduler, given: Mapping[str, Any]) -> None:
    extra = sorted(given.keys() - {*scheduler.row.accepts})
    if extra:
        takes = ", ".join(sorted(scheduler.row.accepts)) or "only steps"
        raise MlxconvError(f"{scheduler.name} takes no {', '.join(extra)}; it takes {takes}")
    if "sigmas" in given and scheduler.options.get("use_flow_sigmas") is False:
        raise MlxconvError(f"{scheduler.name} takes sigmas with use_flow_sigmas only")
    for name in ("strength", "eta"):
        if not 0 <= given.get(name, 0) <= 1:
            raise MlxconvError(
                f"{name} of {scheduler.name} must lie in [0, 1], found {given[name]:g}"
            )
    if "strength" in given and "timesteps" in given:
        raise MlxconvError("strength respaces timesteps: pass begin beside timesteps of your own")


def _steps(
    scheduler: Scheduler,
    steps: int | None,
    timesteps: Sequence[float] | None,
    sigmas: Sequence[float] | None,
) -> int:
    """The number of steps, which the caller's own levels must agree with."""
    counts = {} if steps is None else {"steps": steps}
    if timesteps is not None:
        counts["timesteps"] = len(timesteps) - (scheduler.name == "SCMScheduler")
    if sigmas is not None:
        counts["sigmas"] = len(sigmas) - (scheduler.name == "EulerDiscreteScheduler")
    if len(set(counts.values())) != 1:
        raise MlxconvError(f"steps, or timesteps or sigmas that agree, are needed; found {counts}")
    (count,) = set(counts.values())
    train = scheduler.options["num_train_timesteps"]
    flows = scheduler.name.startswith("FlowMatch")
    if count < 1 or (count > train and not flows):
        raise MlxconvError(f"steps must be 1 to {train} (num_train_timesteps), found {count}")
    return count


def _check_begin(scheduler: Scheduler, request: Request) -> None:
    calls = (request.steps - 1) * scheduler.row.order + 1
    if not 0 <= request.begin < calls:
        raise MlxconvError(
            f"begin must be one of the {calls} model calls of {request.steps} steps, counted from "
            f"0; found {request.begin}: a larger strength begins earlier"
        )
