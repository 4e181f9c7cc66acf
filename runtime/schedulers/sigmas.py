"""Spacings of noise levels between a largest and a smallest, and shifts of a flow's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .schedule import Array

FinalSigma = Literal["zero", "sigma_min"]
TimeShift = Literal["exponential", "linear"]


def karras(largest: float, smallest: float, count: int, rho: float = 7.0) -> Array:
    """EDM, arXiv 2206.00364, equation 5."""
    ends = largest ** (1 / rho), smallest ** (1 / rho)
    spaced: Array = (ends[0] + np.linspace(0, 1, count) * (ends[1] - ends[0])) ** rho
    return spaced


def exponential(largest: float, smallest: float, count: int) -> Array:
    """Equal steps of log sigma."""
    return np.exp(np.linspace(math.log(largest), math.log(smallest), count))


def beta(largest: float, smallest: float, count: int) -> Array:
    """Quantiles of Beta(0.6, 0.6): Beta Sampling, arXiv 2407.12173, section 4."""
    return smallest + beta_quantiles(1 - np.linspace(0, 1, count), 0.6) * (largest - smallest)


RESPACINGS: dict[str, Callable[[float, float, int], Array]] = {
    "use_karras_sigmas": karras,
    "use_exponential_sigmas": exponential,
    "use_beta_sigmas": beta,
}


@dataclass(frozen=True)
class Respacing:
    """Levels of another spacing, between two of one's own or the ends of the levels replaced."""

    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    sigma_min: float | None = None
    sigma_max: float | None = None

    @property
    def chosen(self) -> str | None:
        """The option that asks for it."""
        return next((option for option in RESPACINGS if getattr(self, option)), None)

    def respaced(self, sigmas: Array, steps: int) -> Array:
        """`steps` levels between the first and the last of falling `sigmas`; these, if none are
        asked for."""
        if self.chosen is None:
            return sigmas
        ends = float(sigmas[0]), float(sigmas[-1])
        if self.chosen == "use_lu_lambdas":
            return exponential(*ends, steps)
        largest = ends[0] if self.sigma_max is None else self.sigma_max
        smallest = ends[1] if self.sigma_min is None else self.sigma_min
        return RESPACINGS[self.chosen](largest, smallest, steps)


def beta_quantiles(shares: Array, shape: float) -> Array:
    """Inverse of the regularised incomplete beta function I(x; shape, shape), in float64."""
    lower = np.minimum(shares, 1 - shares)
    quantile = _lower_beta_quantiles(lower, shape)
    return np.where(shares > 0.5, 1 - quantile, quantile)


def _lower_beta_quantiles(shares: Array, shape: float) -> Array:
    """As `beta_quantiles`, for shares up to a half.

    With y = x^shape the function is convex and almost a line, so Newton's steps from above never
    overshoot: six reach float64's last digits.
    """
    whole = math.gamma(shape) ** 2 / math.gamma(2 * shape)
    y = shares * shape * whole
    for _ in range(8):
        x = np.minimum(y ** (1 / shape), 0.5)
        slope = (1 - x) ** (shape - 1) / shape
        y = x**shape - (_incomplete_beta(x, shape) - shares * whole) / slope
    return np.asarray(np.maximum(y, 0) ** (1 / shape))


def _incomplete_beta(x: Array, shape: float) -> Array:
    """B(x; shape, shape) by its power series (DLMF 8.17.7), for x up to a half: 60 terms."""
    total, factor = np.zeros_like(x), 1.0
    for n in range(60):
        total = total + factor * x**n / (shape + n)
        factor *= (n + 1 - shape) / (n + 1)
    return np.asarray(total * x**shape)


def timestep_of(sigmas: Array, table: Array) -> Array:
    """Where levels lie in a rising table of levels, interpolated in their logarithms."""
    logs, at = np.log(table), np.log(np.maximum(sigmas, 1e-10))
    low = np.cumsum(at - logs[:, None] >= 0, axis=0).argmax(axis=0).clip(max=len(table) - 2)
    weight = np.clip((logs[low] - at) / (logs[low] - logs[low + 1]), 0, 1)
    return np.asarray((1 - weight) * low + weight * (low + 1))


def shifted(sigmas: Array, shift: float) -> Array:
    """A flow's levels for a larger image: SD3, arXiv 2403.03206, equation 23."""
    return np.asarray(shift * sigmas / (1 + (shift - 1) * sigmas))


def flow_levels(
    sigmas: Array, shift: float, mu: float | None, kind: TimeShift, terminal: float | None
) -> Array:
    """Levels `shifted`, or by `mu`: its exponential (FLUX) or itself (CogView4) is the shift.

    terminal: the last of them (LTX-Video).
    """
    if mu is None:
        sigmas = shifted(sigmas, shift)
    else:
        factor = math.exp(mu) if kind == "exponential" else mu
        sigmas = factor / (factor + (1 / sigmas - 1))
    if terminal:
        rest = 1 - sigmas
        sigmas = 1 - rest / (rest[-1] / (1 - terminal))
    return np.asarray(sigmas)


def calculate_shift(
    tokens: int,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """mu, linear in the number of image tokens: `calculate_shift` of diffusers' FluxPipeline."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return tokens * slope + base_shift - slope * base_tokens
