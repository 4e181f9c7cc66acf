"""DDIM and DDPM over the training's own timesteps, and CogVideoX's DDIM and DPM.

DDIM, arXiv 2010.02502, equation 12; DDPM, arXiv 2006.11239, equations 6 and 7; CogVideoX, whose
signal-to-noise ratio is shifted, arXiv 2408.06072; diffusers 0.42.1 DDIMScheduler, DDPMScheduler,
CogVideoXDDIMScheduler and CogVideoXDPMScheduler, of which the last two read no `clip_sample`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .betas import AnyBetas, Betas, Picked, Rescaled, Timesteps, alphas_cumprod, snr_shifted, spaced
from .predictions import CLIPPED, Limits, Prediction, clean_of, noise_of
from .schedule import Array, Path, Request, Schedule, assemble, basis


@dataclass(frozen=True)
class _DdpmBetas(AnyBetas, Rescaled, Timesteps):
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "laplace", "sigmoid"] = (
        "linear"
    )


def ddim(
    request: Request,
    *,
    betas: Picked,
    limits: Limits = CLIPPED,
    prediction_type: Prediction = "epsilon",
    set_alpha_to_one: bool = True,
) -> Schedule:
    """eta (of the request): 0 is DDIM, 1 has DDPM's variance."""
    table, train = alphas_cumprod(betas), betas.num_train_timesteps
    timesteps = spaced(betas, request.steps)[request.begin :].astype(int)
    bars = table[timesteps].astype(np.float64)
    after_bars = bars_after(table, timesteps, train // request.steps, set_alpha_to_one)
    after_bars = after_bars.astype(np.float64)
    eta = request.eta or 0.0
    deviations = eta * np.sqrt((1 - after_bars) / (1 - bars) * (1 - bars / after_bars))
    a, b = noise_of(prediction_type, np.sqrt(bars), np.sqrt(1 - bars))
    x, output, _, clean, noise = basis(0)
    updates = []
    for n, (after, deviation) in enumerate(zip(after_bars, deviations)):
        direction = np.sqrt(1 - after - deviation**2) * (a[n] * x + b[n] * output)
        updates.append([np.sqrt(after) * clean + direction + deviation * noise])
    path = beta_path(prediction_type, table, timesteps)
    return assemble(path, updates, draws=eta > 0, limit=limits.limit())


def ddpm(
    request: Request,
    *,
    betas: _DdpmBetas,
    limits: Limits = CLIPPED,
    prediction_type: Prediction = "epsilon",
    variance_type: Literal["fixed_small", "fixed_small_log", "fixed_large"] = "fixed_small",
) -> Schedule:
    """variance_type fixed_small: the posterior's variance; fixed_large: beta."""
    table, train = alphas_cumprod(betas), betas.num_train_timesteps
    given = request.custom_timesteps(train)
    timesteps = (spaced(betas, request.steps) if given is None else given).astype(int)
    after_bars = np.append(table[timesteps[1:]].astype(np.float64), 1.0)[request.begin :]
    timesteps = timesteps[request.begin :]
    bars = table[timesteps].astype(np.float64)
    noisier = 1 - bars / after_bars
    draws = timesteps > 0
    small = np.maximum((1 - after_bars) / (1 - bars) * noisier, 1e-20)
    deviations = np.sqrt(noisier if variance_type == "fixed_large" else small) * draws
    of_clean = np.sqrt(after_bars) * noisier / (1 - bars)
    of_latents = np.sqrt(1 - noisier) * (1 - after_bars) / (1 - bars)
    x, _, _, clean, noise = basis(0)
    updates = [
        [of_clean[n] * clean + of_latents[n] * x + deviations[n] * noise]
        for n in range(len(timesteps))
    ]
    path = beta_path(prediction_type, table, timesteps)
    return assemble(path, updates, draws=draws, limit=limits.limit())


def bars_after(table: Array, timesteps: Array, stride: int, set_alpha_to_one: bool) -> Array:
    """The cumulative alphas after a step of `stride` timesteps from each."""
    after = timesteps - stride
    return np.where(after >= 0, table[after], final_bar(table, set_alpha_to_one))


def final_bar(table: Array, set_alpha_to_one: bool) -> float:
    """The cumulative alpha after the last step."""
    return 1.0 if set_alpha_to_one else float(table[0])


def beta_path(prediction_type: str, table: Array, timesteps: Array) -> Path:
    """timesteps (calls,) int; latents are `sqrt(bar) * clean + sqrt(1 - bar) * noise`."""
    bars = table[timesteps].astype(np.float64)
    alpha, sigma = np.sqrt(bars), np.sqrt(1 - bars)
    levels = np.append(sigma / alpha, 0.0)
    return Path(timesteps, levels, (alpha[0], sigma[0]), clean_of(prediction_type, alpha, sigma))


@dataclass(frozen=True)
class CogVideoX(Betas, Timesteps):
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "scaled_linear"
    prediction_type: Prediction = "epsilon"
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
    table = snr_shifted(options, options.snr_shift_scale)
    train = options.num_train_timesteps
    timesteps = spaced(options, request.steps)[request.begin :].astype(int)
    after_bars = bars_after(table, timesteps, train // request.steps, options.set_alpha_to_one)
    return beta_path(options.prediction_type, table, timesteps), table[timesteps], after_bars


def _lambda(bars: Array) -> Array:
    return np.asarray(np.log(bars / (1 - bars)) / 2)
