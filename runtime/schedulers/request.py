"""What a caller asks of a schedule, beside the scheduler's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..errors import MlxconvError
from .schedule import Array

Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """See `make_schedule`. None: not asked for."""

    steps: int
    mu: float | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    begin: int = 0
    strength: float | None = None
    eta: float | None = None


_RESPACING = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")


def needed_mu(options: Options, request: Request) -> float | None:
    """mu under dynamic shifting, else None."""
    if not options["use_dynamic_shifting"]:
        return None
    if request.mu is None:
        raise MlxconvError(
            "use_dynamic_shifting needs mu: pass calculate_shift(image tokens), or mu itself"
        )
    return request.mu


def custom_timesteps(options: Options, request: Request) -> Array | None:
    """The caller's timesteps (steps,), checked: falling, and within the training's."""
    if request.timesteps is None:
        return None
    given = np.array(request.timesteps, dtype=np.float64)
    if (np.diff(given) >= 0).any() or given[0] >= options["num_train_timesteps"] or given[-1] < 0:
        raise MlxconvError(
            f"timesteps must fall from below num_train_timesteps {options['num_train_timesteps']} "
            f"to no less than 0; found {given.tolist()}"
        )
    for option in _RESPACING:
        if options.get(option):
            raise MlxconvError(f"timesteps and {option} exclude each other")
    return given
