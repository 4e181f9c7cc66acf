"""CogVideoX's DDIM and DPM, over betas whose signal-to-noise ratio is shifted.

arXiv 2408.06072; diffusers 0.42.1 CogVideoXDDIMScheduler and CogVideoXDPMScheduler. Neither reads
its `clip_sample`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .betas import Betas, Timesteps, snr_shifted, spaced
from .ddim import bars_after, beta_path
from .predictions import Prediction
from .request import Request
from .schedule import Array, Path, Schedule, assemble, basis


@dataclass(frozen=True)
class CogVideoX(Betas, Timesteps):
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "scaled_linear"
    prediction_type: Prediction = "epsilon"
    rescale_betas_zero_snr: bool = False
    set_alpha_to_one: bool = True
    snr_shift_scale: float = 3.0


def cogvideox_ddim(request: Request, *, options: CogVideoX) -> Schedule:
    path, bars, after_bars = _path(request, options)
    keep = np.sqrt((1 - after_bars) / (1 - bars))
    take = np.sqrt(after_bars) - np.sqrt(bars) * keep
    x, _, _, clean, _ = basis(0)
    return assemble(path, [[a * x + b * clean] for a, b in zip(keep, take)])


def cogvideox_dpm(request: Request, *, options: CogVideoX) -> Schedule:
    """DPM-Solver++'s stochastic second order. The state is the clean latents before these.

    But for the first and the last call, diffusers draws noise twice and uses the second.
    """
    path, bars, after_bars = _path(request, options)
    lambdas, after_lambdas = _lambda(bars), _lambda(after_bars)
    h = after_lambdas - lambdas
    keep = np.sqrt((1 - after_bars) / (1 - bars)) * np.exp(-h)
    take = -np.expm1(-2 * h) * np.sqrt(after_bars)
    renew = np.sqrt(1 - after_bars) * np.sqrt(-np.expm1(-2 * h))
    last = path.timesteps < options.num_train_timesteps // request.steps
    x, _, (before,), clean, noise = basis(1)
    updates, draws = [], []
    for n in range(len(bars)):
        second_order = n > 0 and not last[n]
        bend = h[n] / (lambdas[n] - lambdas[n - 1]) / 2 if second_order else 0.0
        ahead = clean + bend * (clean - before)
        updates.append([keep[n] * x + take[n] * ahead + renew[n] * noise, clean])
        draws.append(1 + second_order)
    return assemble(path, updates, draws=np.array(draws))


def _path(request: Request, options: CogVideoX) -> tuple[Path, Array, Array]:
    """And the cumulative alphas before and after each call."""
    table = snr_shifted(options, options.rescale_betas_zero_snr, options.snr_shift_scale)
    train = options.num_train_timesteps
    timesteps = spaced(options, train, request.steps)[request.begin :].astype(int)
    after_bars = bars_after(table, timesteps, train // request.steps, options.set_alpha_to_one)
    return beta_path(options.prediction_type, table, timesteps), table[timesteps], after_bars


def _lambda(bars: Array) -> Array:
    return np.asarray(np.log(bars / (1 - bars)) / 2)
