"""CogVideoX's DDIM and DPM, over betas whose signal-to-noise ratio is shifted.

arXiv 2408.06072; diffusers 0.42.1 CogVideoXDDIMScheduler and CogVideoXDPMScheduler. Neither reads
its `clip_sample`.
"""

from __future__ import annotations

import numpy as np

from .betas import snr_shifted, spaced
from .ddim import beta_path, final_bar
from .request import Options, Request
from .schedule import Array, Path, Schedule, assemble, basis


def cogvideox_ddim(options: Options, request: Request) -> Schedule:
    path, bars, after_bars = _path(options, request)
    keep = np.sqrt((1 - after_bars) / (1 - bars))
    take = np.sqrt(after_bars) - np.sqrt(bars) * keep
    x, _, _, clean, _ = basis(0)
    return assemble(path, [[a * x + b * clean] for a, b in zip(keep, take)])


def cogvideox_dpm(options: Options, request: Request) -> Schedule:
    """DPM-Solver++'s stochastic second order. The state is the clean latents before these.

    But for the first and the last call, diffusers draws noise twice and uses the second.
    """
    path, bars, after_bars = _path(options, request)
    lambdas, after_lambdas = _lambda(bars), _lambda(after_bars)
    h = after_lambdas - lambdas
    keep = np.sqrt((1 - after_bars) / (1 - bars)) * np.exp(-h)
    take = -np.expm1(-2 * h) * np.sqrt(after_bars)
    renew = np.sqrt(1 - after_bars) * np.sqrt(-np.expm1(-2 * h))
    last = path.timesteps < options["num_train_timesteps"] // request.steps
    x, _, (before,), clean, noise = basis(1)
    updates, draws = [], []
    for n in range(len(bars)):
        second_order = n > 0 and not last[n]
        bend = h[n] / (lambdas[n] - lambdas[n - 1]) / 2 if second_order else 0.0
        ahead = clean + bend * (clean - before)
        updates.append([keep[n] * x + take[n] * ahead + renew[n] * noise, clean])
        draws.append(1 + second_order)
    return assemble(path, updates, draws=np.array(draws))


def _path(options: Options, request: Request) -> tuple[Path, Array, Array]:
    """And the cumulative alphas before and after each call."""
    table = snr_shifted(options)
    timesteps = spaced(options, request.steps)[request.begin :].astype(int)
    after = timesteps - options["num_train_timesteps"] // request.steps
    after_bars = np.where(after >= 0, table[after], final_bar(options, table))
    return beta_path(options, table, timesteps), table[timesteps], after_bars


def _lambda(bars: Array) -> Array:
    return np.asarray(np.log(bars / (1 - bars)) / 2)
