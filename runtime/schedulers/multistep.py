"""What DPM-Solver and UniPC share: levels as (alpha, sigma, lambda), and the quantity they keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .predictions import clean_of, noise_of
from .request import Options
from .schedule import Array, Basis, Path


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


def path_of(options: Options, levels: Levels, timesteps: Array, begin: int) -> Path:
    """timesteps (calls,): truncated to integers, as diffusers does."""
    alpha, sigma = levels.alpha[:-1], levels.sigma[:-1]
    a, b = clean_of(options["prediction_type"], alpha, sigma)
    return Path(
        np.trunc(timesteps)[begin:],
        levels.sigmas[begin:],
        (alpha[begin], sigma[begin]),
        (a[begin:], b[begin:]),
    )


def kept(options: Options, levels: Levels, at: Basis, *, clean: bool) -> list[Array]:
    """The quantity that the solver extrapolates, a vector a call: clean latents, or the noise."""
    calls = len(levels.sigmas) - 1
    if clean:
        return [at.denoised] * calls
    alpha, sigma = levels.alpha[:-1], levels.sigma[:-1]
    if options["thresholding"]:
        pairs = zip(alpha, sigma)
        return [(at.latents - of_clean * at.denoised) / of_noise for of_clean, of_noise in pairs]
    a, b = noise_of(options["prediction_type"], alpha, sigma)
    return [of_x * at.latents + of_output * at.output for of_x, of_output in zip(a, b)]
