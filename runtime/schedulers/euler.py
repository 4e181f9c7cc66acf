"""Euler, Euler ancestral and Heun in the variance-exploding form of k-diffusion.

EDM, arXiv 2206.00364; diffusers 0.42.1 EulerDiscreteScheduler, EulerAncestralDiscreteScheduler and
HeunDiscreteScheduler. Latents are `clean + sigma * noise`; the model sees them scaled down.
"""

from __future__ import annotations

import numpy as np

from .betas import alphas_cumprod, noise_levels, spaced
from .flow_match import check_even, heun_updates, twice
from .limits import limit_of
from .predictions import exploding_clean_of
from .request import Options, Request, custom_timesteps
from .schedule import Array, Path, Schedule, assemble, basis
from .sigmas import respaced, timestep_of


def euler(options: Options, request: Request) -> Schedule:
    table = noise_levels(alphas_cumprod(options, floor=True))
    levels, timesteps = _euler_levels(options, request, table)
    if options["timestep_type"] == "continuous" and options["prediction_type"] == "v_prediction":
        timesteps = np.float32(0.25) * np.log(levels[: len(timesteps)].astype(np.float32))
    path = _path(options, levels, timesteps, request.begin)
    x, _, _, clean, _ = basis(0)
    pairs = zip(path.sigmas, path.sigmas[1 : len(path.timesteps) + 1])
    return assemble(path, [[x + (after - s) / s * (x - clean)] for s, after in pairs])


def euler_ancestral(options: Options, request: Request) -> Schedule:
    """Euler to a lower level, then noise up to the next: k-diffusion's `get_ancestral_step`."""
    table = noise_levels(alphas_cumprod(options, floor=True))
    levels, timesteps = _interpolated(options, request, table)
    path = _path(options, np.append(levels, 0.0), timesteps, request.begin)
    x, _, _, clean, noise = basis(0)
    updates = []
    for before, after in zip(path.sigmas, path.sigmas[1:]):
        up = np.sqrt(after**2 * (before**2 - after**2) / before**2)
        down = np.sqrt(max(after**2 - up**2, 0.0))
        updates.append([x + (down - before) / before * (x - clean) + up * noise])
    return assemble(path, updates, draws=True)


def heun(options: Options, request: Request) -> Schedule:
    """Each step but the last calls the model at both ends."""
    table = noise_levels(alphas_cumprod(options))
    levels, timesteps = _respaced(options, request, table, *_interpolated(options, request, table))
    check_even(request.begin)
    levels = np.append(levels, 0.0).astype(np.float32).astype(np.float64)
    each_call = np.append(twice(levels[:-1]), 0.0)
    path = _path(options, each_call, twice(timesteps), request.begin)
    updates = heun_updates(levels[request.begin // 2 :], path, slope_is_output=False)
    return assemble(path, updates, limit=limit_of(options))


def _interpolated(options: Options, request: Request, table: Array) -> tuple[Array, Array]:
    """Levels at the timesteps, which may lie between the training's; and the timesteps."""
    timesteps = custom_timesteps(options, request)
    if timesteps is None:
        timesteps = spaced(options, request.steps, rounded=False)
    return np.interp(timesteps, np.arange(len(table)), table), timesteps


def _respaced(
    options: Options, request: Request, table: Array, levels: Array, timesteps: Array
) -> tuple[Array, Array]:
    spaced_levels = respaced(options, levels, request.steps)
    if spaced_levels is None:
        return levels, timesteps
    return spaced_levels, timestep_of(spaced_levels, table)


def _euler_levels(options: Options, request: Request, table: Array) -> tuple[Array, Array]:
    """Levels (at least steps + 1) and timesteps (steps,)."""
    if request.sigmas is not None:
        given = np.array(request.sigmas, dtype=np.float32)
        return given, timestep_of(given[:-1], table)
    levels, timesteps = _interpolated(options, request, table)
    if options["interpolation_type"] == "log_linear":
        ends = np.log(table[-1]), np.log(table[0])
        levels = np.exp(np.linspace(*ends, request.steps + 1, dtype=np.float32))
    levels, timesteps = _respaced(options, request, table, levels, timesteps)
    last = table[0] if options["final_sigmas_type"] == "sigma_min" else 0.0
    return np.append(levels, last), timesteps


def _path(options: Options, levels: Array, timesteps: Array, begin: int) -> Path:
    """levels (calls + 1, or more): rounded to float32, as diffusers keeps them."""
    sigmas = levels.astype(np.float32).astype(np.float64)
    largest = sigmas.max()
    if options["timestep_spacing"] == "leading":
        largest = np.sqrt(largest**2 + 1)
    sigmas, timesteps = sigmas[begin:], timesteps[begin:]
    at = sigmas[: len(timesteps)]
    return Path(
        timesteps,
        sigmas,
        (1.0, sigmas[0]),
        exploding_clean_of(options["prediction_type"], at),
        initial_noise=largest,
        input_scale=1 / np.sqrt(at**2 + 1),
    )
