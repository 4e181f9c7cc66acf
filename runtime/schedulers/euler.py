"""Euler, Euler ancestral and Heun in the variance-exploding form of k-diffusion.

EDM, arXiv 2206.00364; diffusers 0.42.1 EulerDiscreteScheduler, EulerAncestralDiscreteScheduler and
HeunDiscreteScheduler. Latents are `clean + sigma * noise`; the model sees them scaled down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .betas import LINSPACE, AnyBetas, Picked, Timesteps, alphas_cumprod, noise_levels, spaced
from .flow_match import check_even, heun_updates, twice
from .predictions import Clip, NoiseOrV, Prediction, exploding_clean_of
from .schedule import Array, Path, Request, Schedule, assemble, basis
from .sigmas import FinalSigma, Respacing, timestep_of


@dataclass(frozen=True)
class _HeunBetas(AnyBetas, Timesteps):
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "exp"] = "linear"
    timestep_spacing: Literal["linspace", "leading", "trailing"] = "linspace"


def euler(
    request: Request,
    *,
    betas: Picked = LINSPACE,
    spacing: Respacing,
    prediction_type: Literal["epsilon", "sample", "original_sample", "v_prediction"] = "epsilon",
    interpolation_type: Literal["linear", "log_linear"] = "linear",
    timestep_type: Literal["discrete", "continuous"] = "discrete",
    final_sigmas_type: FinalSigma = "zero",
) -> Schedule:
    table = noise_levels(alphas_cumprod(betas, floor=True))
    if request.sigmas is not None:
        levels = np.array(request.sigmas, dtype=np.float32)
        timesteps = timestep_of(levels[:-1], table)
    else:
        levels, timesteps = _interpolated(request, table, betas, spacing.chosen)
        if interpolation_type == "log_linear":
            ends = np.log(table[-1]), np.log(table[0])
            levels = np.exp(np.linspace(*ends, request.steps + 1, dtype=np.float32))
        levels, timesteps = _respaced(spacing, request.steps, table, levels, timesteps)
        levels = np.append(levels, table[0] if final_sigmas_type == "sigma_min" else 0.0)
    if timestep_type == "continuous" and prediction_type == "v_prediction":
        timesteps = np.float32(0.25) * np.log(levels[: len(timesteps)].astype(np.float32))
    path = _path(betas, prediction_type, levels, timesteps, request.begin)
    x, _, _, clean, _ = basis(0)
    pairs = zip(path.sigmas, path.sigmas[1 : len(path.timesteps) + 1])
    return assemble(path, [[x + (after - s) / s * (x - clean)] for s, after in pairs])


def euler_ancestral(
    request: Request,
    *,
    betas: Picked = LINSPACE,
    prediction_type: NoiseOrV = "epsilon",
) -> Schedule:
    """Euler to a lower level, then noise up to the next: k-diffusion's `get_ancestral_step`."""
    table = noise_levels(alphas_cumprod(betas, floor=True))
    levels, timesteps = _interpolated(request, table, betas)
    path = _path(betas, prediction_type, np.append(levels, 0.0), timesteps, request.begin)
    x, _, _, clean, noise = basis(0)
    updates = []
    for before, after in zip(path.sigmas, path.sigmas[1:]):
        up = np.sqrt(after**2 * (before**2 - after**2) / before**2)
        down = np.sqrt(max(after**2 - up**2, 0.0))
        updates.append([x + (down - before) / before * (x - clean) + up * noise])
    return assemble(path, updates, draws=True)


def heun(
    request: Request,
    *,
    betas: _HeunBetas,
    spacing: Respacing,
    limits: Clip,
    prediction_type: Prediction = "epsilon",
) -> Schedule:
    """Each step but the last calls the model at both ends."""
    table, begin = noise_levels(alphas_cumprod(betas)), request.begin
    levels, timesteps = _interpolated(request, table, betas, spacing.chosen)
    levels, timesteps = _respaced(spacing, request.steps, table, levels, timesteps)
    check_even(begin)
    levels = np.append(levels, 0.0).astype(np.float32).astype(np.float64)
    each_call = np.append(twice(levels[:-1]), 0.0)
    path = _path(betas, prediction_type, each_call, twice(timesteps), begin)
    updates = heun_updates(levels[begin // 2 :], path, slope_is_output=False)
    return assemble(path, updates, limit=limits.limit())


def _interpolated(
    request: Request, table: Array, picked: Timesteps, respacing: str | None = None
) -> tuple[Array, Array]:
    """Levels at the timesteps, which may lie between the training's; and the timesteps."""
    timesteps = request.custom_timesteps(picked.num_train_timesteps, respacing)
    if timesteps is None:
        timesteps = spaced(picked, request.steps, rounded=False)
    return np.interp(timesteps, np.arange(len(table)), table), timesteps


def _respaced(
    spacing: Respacing, steps: int, table: Array, levels: Array, timesteps: Array
) -> tuple[Array, Array]:
    if spacing.chosen is None:
        return levels, timesteps
    levels = spacing.respaced(levels, steps)
    return levels, timestep_of(levels, table)


def _path(
    picked: Timesteps, prediction_type: str, levels: Array, timesteps: Array, begin: int
) -> Path:
    """levels (calls + 1, or more): rounded to float32, as diffusers keeps them."""
    sigmas = levels.astype(np.float32).astype(np.float64)
    largest = sigmas.max()
    if picked.timestep_spacing == "leading":
        largest = np.sqrt(largest**2 + 1)
    sigmas, timesteps = sigmas[begin:], timesteps[begin:]
    at = sigmas[: len(timesteps)]
    return Path(
        timesteps,
        sigmas,
        (1.0, sigmas[0]),
        exploding_clean_of(prediction_type, at),
        initial_noise=largest,
        input_scale=1 / np.sqrt(at**2 + 1),
    )
