"""DDIM and DDPM over the training's own timesteps.

DDIM, arXiv 2010.02502, equation 12; DDPM, arXiv 2006.11239, equations 6 and 7; diffusers 0.42.1
DDIMScheduler and DDPMScheduler.
"""

from __future__ import annotations

import numpy as np

from .betas import alphas_cumprod, spaced
from .limits import limit_of
from .predictions import clean_of, noise_of
from .request import Options, Request, custom_timesteps
from .schedule import Array, Path, Schedule, assemble, basis


def ddim(options: Options, request: Request) -> Schedule:
    """eta (of the request): 0 is DDIM, 1 has DDPM's variance."""
    table = alphas_cumprod(options)
    timesteps = spaced(options, request.steps)[request.begin :].astype(int)
    before = timesteps - options["num_train_timesteps"] // request.steps
    path, bars = beta_path(options, table, timesteps), table[timesteps].astype(np.float64)
    after_bars = np.where(before >= 0, table[before], final_bar(options, table)).astype(np.float64)
    eta = request.eta or 0.0
    deviations = eta * np.sqrt((1 - after_bars) / (1 - bars) * (1 - bars / after_bars))
    a, b = noise_of(options["prediction_type"], np.sqrt(bars), np.sqrt(1 - bars))
    x, output, _, clean, noise = basis(0)
    updates = []
    for n, (after, deviation) in enumerate(zip(after_bars, deviations)):
        direction = np.sqrt(1 - after - deviation**2) * (a[n] * x + b[n] * output)
        updates.append([np.sqrt(after) * clean + direction + deviation * noise])
    return assemble(path, updates, draws=eta > 0, limit=limit_of(options))


def ddpm(options: Options, request: Request) -> Schedule:
    table = alphas_cumprod(options)
    given = custom_timesteps(options, request)
    timesteps = (spaced(options, request.steps) if given is None else given).astype(int)
    bars = table[timesteps].astype(np.float64)
    after_bars = np.append(bars[1:], 1.0)
    timesteps, bars = timesteps[request.begin :], bars[request.begin :]
    after_bars = after_bars[request.begin :]
    betas = 1 - bars / after_bars
    draws = timesteps > 0
    deviations = _deviations(options["variance_type"], bars, after_bars, betas) * draws
    of_clean = np.sqrt(after_bars) * betas / (1 - bars)
    of_latents = np.sqrt(1 - betas) * (1 - after_bars) / (1 - bars)
    x, _, _, clean, noise = basis(0)
    updates = [
        [of_clean[n] * clean + of_latents[n] * x + deviations[n] * noise]
        for n in range(len(timesteps))
    ]
    path = beta_path(options, table, timesteps)
    return assemble(path, updates, draws=draws, limit=limit_of(options))


def _deviations(kind: str, bars: Array, after_bars: Array, betas: Array) -> Array:
    """fixed_small: the posterior's variance; fixed_large: beta."""
    small = np.maximum((1 - after_bars) / (1 - bars) * betas, 1e-20)
    return np.sqrt(betas if kind == "fixed_large" else small)


def final_bar(options: Options, table: Array) -> float:
    """The cumulative alpha after the last step."""
    return 1.0 if options["set_alpha_to_one"] else float(table[0])


def beta_path(options: Options, table: Array, timesteps: Array) -> Path:
    """timesteps (calls,) int; latents are `sqrt(bar) * clean + sqrt(1 - bar) * noise`."""
    bars = table[timesteps].astype(np.float64)
    alpha, sigma = np.sqrt(bars), np.sqrt(1 - bars)
    levels = np.append(sigma / alpha, 0.0)
    predict = clean_of(options["prediction_type"], alpha, sigma)
    return Path(timesteps, levels, (alpha[0], sigma[0]), predict)
