"""What DPM-Solver and UniPC share: levels as (alpha, sigma, lambda), and the quantity they keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .predictions import clean_of, noise_of
from .schedule import Array, Basis, Path


@dataclass(frozen=True)
class Orders:
    solver_order: Literal[1, 2, 3] = 2
    lower_order_final: bool = True


@dataclass(frozen=True)
class FlowSigmas:
    """DPM-Solver's and UniPC's names for a flow's levels."""

    use_flow_sigmas: bool = False
    flow_shift: float = 1.0
    use_dynamic_shifting: bool = False


@dataclass(frozen=True)
class Levels:
    """Noise levels (calls + 1,): latents are `alpha * clean + sigma * noise`.

    lambdas: log(alpha / sigma), infinite where sigma is zero.
    """

    sigmas: Array
    alpha: Array
    sigma: Array
    lambdas: Array


def levels_of(sigmas: Array, *, flow: bool) -> Levels:
    """sigmas (calls + 1,), rounded to float32 as diffusers keeps them; a flow's, or sigma/alpha."""
    given = sigmas.astype(np.float32).astype(np.float64)
    alpha = 1 - given if flow else 1 / np.sqrt(given**2 + 1)
    sigma = given if flow else given * alpha
    return Levels(given, alpha, sigma, np.log(alpha) - np.log(sigma))


def path_of(prediction_type: str, levels: Levels, timesteps: Array, begin: int) -> Path:
    """timesteps (calls,): truncated to integers, as diffusers does."""
    alpha, sigma = levels.alpha[:-1], levels.sigma[:-1]
    a, b = clean_of(prediction_type, alpha, sigma)
    return Path(
        np.trunc(timesteps)[begin:],
        levels.sigmas[begin:],
        (alpha[begin], sigma[begin]),
        (a[begin:], b[begin:]),
    )


def kept_noise(prediction_type: str, levels: Levels, at: Basis, *, limited: bool) -> list[Array]:
    """The noise in the latents, a vector a call. limited: that of a limited prediction."""
    alpha, sigma = levels.alpha[:-1], levels.sigma[:-1]
    if limited:
        pairs = zip(alpha, sigma)
        return [(at.latents - of_clean * at.denoised) / of_noise for of_clean, of_noise in pairs]
    a, b = noise_of(prediction_type, alpha, sigma)
    return [of_x * at.latents + of_output * at.output for of_x, of_output in zip(a, b)]
