"""What a caller asks of a schedule, beside the scheduler's own options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import MlxconvError
from .schedule import Array


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

    def needed_mu(self, use_dynamic_shifting: bool) -> float | None:
        """mu under dynamic shifting, else None."""
        if use_dynamic_shifting and self.mu is None:
            raise MlxconvError(
                "use_dynamic_shifting needs mu: pass calculate_shift(image tokens), or mu itself"
            )
        return self.mu if use_dynamic_shifting else None

    def custom_timesteps(self, train: int, respacing: str | None = None) -> Array | None:
        """The caller's timesteps (steps,), checked: falling, and within the `train` of training.

        respacing: the option that asks for levels of its own, with which there can be none.
        """
        if self.timesteps is None:
            return None
        given = np.array(self.timesteps, dtype=np.float64)
        if (np.diff(given) >= 0).any() or given[0] >= train or given[-1] < 0:
            raise MlxconvError(
                f"timesteps must fall from below num_train_timesteps {train} to no less than 0; "
                f"found {given.tolist()}"
            )
        if respacing:
            raise MlxconvError(f"timesteps and {respacing} exclude each other")
        return given
