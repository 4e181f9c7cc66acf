"""Tables over the training timesteps: betas, cumulative alphas, and the timesteps picked of them.

Tables are rounded to float32 where diffusers rounds them: one minus a cumulative alpha near one
keeps few digits, and they are to be the same few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from ..errors import MlxconvError
from .schedule import Array


@dataclass(frozen=True)
class AnyBetas:
    """The training's noise levels; which of the schedules a scheduler knows, its subclasses say."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: Literal[
        "linear", "scaled_linear", "squaredcos_cap_v2", "exp", "laplace", "sigmoid"
    ] = "linear"
    trained_betas: Sequence[float] | None = None


@dataclass(frozen=True)
class PlainBetas(AnyBetas):
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"


@dataclass(frozen=True)
class Rescaled:
    rescale_betas_zero_snr: bool = False


@dataclass(frozen=True)
class Betas(PlainBetas, Rescaled): ...


LATENT = Betas(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


@dataclass(frozen=True)
class Timesteps:
    """Which of the training's timesteps are picked."""

    num_train_timesteps: int = 1000
    timestep_spacing: Literal["linspace", "leading", "trailing"] = "leading"
    steps_offset: int = 0


@dataclass(frozen=True)
class Picked(Betas, Timesteps): ...


LINSPACE = Picked(timestep_spacing="linspace")


def alphas_cumprod(betas: AnyBetas, *, floor: bool = False) -> Array:
    """Cumulative alphas (num_train_timesteps,) float32.

    floor: with `rescale_betas_zero_snr` the last is 2^-24, so that its sigma is finite.
    """
    values = _betas(betas)
    rescaled = isinstance(betas, Rescaled) and betas.rescale_betas_zero_snr
    if rescaled:
        values = _zero_terminal_snr(values)
    table = _cumprod(np.float32(1) - values)
    if rescaled and floor:
        table[-1] = 2.0**-24
    return table


def snr_shifted(betas: Betas, scale: float) -> Array:
    """CogVideoX's cumulative alphas (num_train_timesteps,), in float64 where its betas are.

    The signal-to-noise ratio is divided by `scale` (arXiv 2408.06072, section 3.2).
    """
    if betas.beta_schedule == "scaled_linear" and betas.trained_betas is None:
        ends = betas.beta_start**0.5, betas.beta_end**0.5
        table = np.cumprod(1 - np.linspace(*ends, betas.num_train_timesteps) ** 2)
    else:
        table = _cumprod(np.float32(1) - _betas(betas)).astype(np.float64)
    table = table / (scale + (1 - scale) * table)
    return _zero_terminal(table) if betas.rescale_betas_zero_snr else table


def noise_levels(table: Array) -> Array:
    """sigma = sqrt((1 - a) / a) of cumulative alphas, in float32."""
    levels: Array = np.sqrt((np.float32(1) - table) / table)
    return levels


def _betas(betas: AnyBetas) -> Array:
    if betas.trained_betas is not None:
        found, train = len(betas.trained_betas), betas.num_train_timesteps
        if found < train:
            raise MlxconvError(
                f"trained_betas has {found} values, fewer than num_train_timesteps {train}: set "
                f"num_train_timesteps to {found}"
            )
        return np.asarray(betas.trained_betas, dtype=np.float32)
    schedule = _BETAS[betas.beta_schedule]
    return schedule(betas.beta_start, betas.beta_end, betas.num_train_timesteps)


def _linear(start: float, end: float, count: int) -> Array:
    """`torch.linspace` in float32, to the bit: from both ends, by fused multiply-adds."""
    first, last = np.float32(start), np.float32(end)
    stride, at = float((last - first) / np.float32(max(count - 1, 1))), np.arange(count)
    rising, falling = float(first) + stride * at, float(last) - stride * (count - 1 - at)
    return np.where(at < count // 2, rising, falling).astype(np.float32)


def _scaled_linear(start: float, end: float, count: int) -> Array:
    """Latent Diffusion's: linear in the root of beta (arXiv 2112.10752)."""
    roots = _linear(start**0.5, end**0.5, count)
    return roots * roots


def _sigmoid(start: float, end: float, count: int) -> Array:
    rise = np.float32(1) / (np.float32(1) + np.exp(-_linear(-6, 6, count)))
    return rise * np.float32(end - start) + np.float32(start)


def _cosine_bar(t: float) -> float:
    """Improved DDPM, arXiv 2102.09672, equation 17."""
    return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2


def _laplace_bar(t: float) -> float:
    rest = 0.5 - t
    snr = math.exp(-0.5 * math.copysign(1, rest) * math.log(1 - 2 * abs(rest) + 1e-6))
    return math.sqrt(snr / (1 + snr))


def _exp_bar(t: float) -> float:
    return math.exp(t * -12.0)


def _from_bar(bar: Callable[[float], float]) -> Callable[[float, float, int], Array]:
    def betas(start: float, end: float, count: int) -> Array:
        at = [bar(i / count) for i in range(count + 1)]
        ratios = [min(1 - after / before, 0.999) for before, after in pairwise(at)]
        return np.array(ratios, dtype=np.float32)

    return betas


_BETAS: dict[str, Callable[[float, float, int], Array]] = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _from_bar(_cosine_bar),
    "laplace": _from_bar(_laplace_bar),
    "exp": _from_bar(_exp_bar),
    "sigmoid": _sigmoid,
}


def _cumprod(alphas: Array) -> Array:
    """As torch on a CPU: accumulated in float64, each rounded to float32."""
    return np.cumprod(alphas.astype(np.float64)).astype(np.float32)


def _zero_terminal_snr(betas: Array) -> Array:
    """arXiv 2305.08891, algorithm 1."""
    bars = _zero_terminal(_cumprod(np.float32(1) - betas))
    return np.float32(1) - np.concatenate([bars[:1], bars[1:] / bars[:-1]])


def _zero_terminal(bars: Array) -> Array:
    """Cumulative alphas moved so that the last is zero and the first stays."""
    roots = np.sqrt(bars)
    first, last = roots[0], roots[-1]
    moved: Array = ((roots - last) * (first / (first - last))) ** 2
    return moved


def spaced(picked: Timesteps, steps: int, *, rounded: bool = True) -> Array:
    """Timesteps (steps,), falling: arXiv 2305.08891, table 2."""
    found: Array
    train = picked.num_train_timesteps
    if picked.timestep_spacing == "linspace":
        found = np.linspace(0, train - 1, steps)[::-1]
        found = found.round() if rounded else found.astype(np.float32).astype(np.float64)
    elif picked.timestep_spacing == "leading":
        found = (np.arange(steps) * (train // steps))[::-1] + float(picked.steps_offset)
    else:
        found = np.arange(train, 0, -train / steps)[:steps].round() - 1
    return _within(found, train, steps)


def spaced_open(picked: Timesteps, steps: int, last: int | None = None) -> Array:
    """Timesteps (steps,), falling, of a spacing of `steps + 1` without its end: the multistep way.

    last: one more than the largest (`lambda_min_clipped` lowers it), for each spacing.
    """
    train = picked.num_train_timesteps
    last = train if last is None else last
    found: Array
    if picked.timestep_spacing == "linspace":
        found = np.linspace(0, last - 1, steps + 1).round()[::-1][:-1]
    elif picked.timestep_spacing == "leading":
        found = (np.arange(steps + 1) * (last // (steps + 1)))[::-1][:-1]
        found = found + float(picked.steps_offset)
    else:
        found = np.arange(last, 0, -train / steps)[:steps].round() - 1
    return _within(found, train, steps)


def _within(picked: Array, train: int, steps: int) -> Array:
    if picked.max() > train - 1 or picked.min() < 0:
        raise MlxconvError(
            f"{steps} steps reach timestep {picked.max():g}, beyond num_train_timesteps {train}: "
            "ask for fewer steps, or lower steps_offset"
        )
    return np.asarray(picked, dtype=np.float64)
