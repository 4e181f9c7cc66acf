"""How many steps a sampler needs, where the model is exact: a mixture of Gaussians has its noise
in closed form, so what is left is the sampler's own error."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.schedulers import (
    initial_state,
    make_schedule,
    model_input,
    scheduler_of,
    step,
    with_class,
)
from mlxconv.runtime.schedulers.betas import LATENT, alphas_cumprod

SD15 = {
    "_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012,
    "beta_schedule": "scaled_linear", "steps_offset": 1, "skip_prk_steps": True,
    "clip_sample": False,
}  # fmt: skip
CENTRES, WIDTH = np.random.default_rng(0).normal(size=(6, 8)), 0.15
START = mx.array(np.random.default_rng(1).normal(size=(128, 8)).astype(np.float32))
LOGS = np.log(alphas_cumprod(LATENT))


def noise_in(latents: np.ndarray, timestep: float) -> np.ndarray:
    """E[noise | latents] of `signal * data + sigma * noise`, data from the mixture."""
    kept = np.exp(np.interp(timestep, np.arange(1000), LOGS))
    signal, sigma = np.sqrt(kept), np.sqrt(1 - kept)
    variance = kept * WIDTH**2 + sigma**2
    apart = latents[:, None] - signal * CENTRES
    logits = -(apart**2).sum(-1) / (2 * variance)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    clean = CENTRES + signal * WIDTH**2 / variance * apart
    return (latents - signal * (weights[..., None] * clean).sum(1)) / sigma


def made(sampler: str, steps: int) -> np.ndarray:
    schedule = make_schedule(with_class(scheduler_of(SD15), sampler), steps)
    latents = START * schedule.initial_noise
    state = initial_state(schedule, latents)
    for row, timestep in zip(mx.array(schedule.rows), schedule.timesteps):
        seen = np.array(model_input(row, latents)).astype(np.float64)
        output = mx.array(noise_in(seen, float(timestep)).astype(np.float32))
        latents, state = step(row, latents, output, state, form=schedule.form)
    return np.array(latents)


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    return made("DPM++ 2M", 400)


def decibels(found: np.ndarray, exact: np.ndarray) -> float:
    return float(10 * np.log10(np.ptp(exact) ** 2 / np.mean((found - exact) ** 2)))


def test_ways_that_converge_agree(exact: np.ndarray) -> None:
    assert decibels(made("heun karras", 50), exact) > 55


def test_second_order_halves_the_steps_and_karras_levels_again(exact: np.ndarray) -> None:
    samplers = ["ddim trailing", "euler", "euler karras", "DPM++ 2M", "DPM++ 2M Karras", "unipc"]
    counts = [5, 8, 10, 20, 50]
    table = {s: {n: decibels(made(s, n), exact) for n in counts} for s in samplers}
    for sampler, row in table.items():
        print(f"{sampler:16}", *(f"{row[n]:6.1f}" for n in counts))
    for steps, twice in ((5, 10), (10, 20)):
        for quick in ("DPM++ 2M", "unipc"):
            assert table[quick][steps] > table["euler"][twice]
    assert table["DPM++ 2M Karras"][10] > table["euler"][50]
