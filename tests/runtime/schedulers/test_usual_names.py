"""Every usual name with every family's own scheduler file: it converges, or a sentence says what
fits. The model is exact, a mixture of Gaussians, so that what is left is the sampler's error."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.generate.families.parts import Request
from mlxconv.runtime.generate.pipeline import load
from mlxconv.runtime.schedulers import (
    Schedule,
    initial_state,
    model_input,
    scheduler_of,
    step,
    with_class,
)
from mlxconv.runtime.schedulers.names import _SOLVERS, _SPACINGS

from ...conftest import Bundles
from ..generate.test_convergence import CENTRES, WIDTH, decibels, noise_in
from ..generate.test_generate import PROMPT, SIZE, TOKENS, psnr

pytestmark = pytest.mark.xdist_group("usual_names")

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
DYNAMIC = {**FLOW, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15,
           "base_image_seq_len": 256, "max_image_seq_len": 4096}  # fmt: skip
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
DPM = "DPMSolverMultistepScheduler"
FILES: dict[str, dict[str, Any]] = {  # of published checkpoints
    "FluxPipeline": {**DYNAMIC, "shift": 3.0},
    "Flux2Pipeline": {**DYNAMIC, "shift": 3.0, "time_shift_type": "exponential"},
    "Flux2KleinPipeline": {**DYNAMIC, "shift": 3.0},
    "ChromaPipeline": {**DYNAMIC, "shift": 3.0, "use_beta_sigmas": True},
    "QwenImagePipeline": {**DYNAMIC, "max_shift": 0.9, "max_image_seq_len": 8192, "shift": 1.0,
                          "shift_terminal": 0.02, "invert_sigmas": False,
                          "stochastic_sampling": False},
    "StableDiffusion3Pipeline": {**FLOW, "shift": 3.0},
    "ZImagePipeline": {**FLOW, "shift": 3.0},
    "SanaPipeline": {"_class_name": DPM, "prediction_type": "flow_prediction", "flow_shift": 3.0,
                     "use_flow_sigmas": True, "algorithm_type": "dpmsolver++"},
    "StableDiffusionPipeline": {"_class_name": "PNDMScheduler", **BETAS, "steps_offset": 1,
                                "skip_prk_steps": True, "clip_sample": False,
                                "set_alpha_to_one": False},
    "StableDiffusionXLPipeline": {"_class_name": "EulerDiscreteScheduler", **BETAS,
                                  "timestep_spacing": "leading", "steps_offset": 1,
                                  "interpolation_type": "linear", "use_karras_sigmas": False},
    "PixArtSigmaPipeline": {"_class_name": DPM, "algorithm_type": "dpmsolver++", **BETAS,
                            "lambda_min_clipped": -float("inf"), "variance_type": None},
    "DiTPipeline": {"_class_name": "DDIMScheduler", **BETAS, "clip_sample": False},
}  # fmt: skip
PACKED = ("Flux", "Chroma", "Qwen")  # their latents are (batch, tokens, channels)
SPACED = ["", *(f" {spacing}" for spacing in _SPACINGS)]
NAMES = [solver + spacing for solver in _SOLVERS for spacing in SPACED]
STEPS = 30
START = mx.array(np.random.default_rng(1).normal(size=(128, 8)).astype(np.float32))


def slope_in(latents: np.ndarray, sigma: float) -> np.ndarray:
    """E[noise - data | latents] of `(1 - sigma) * data + sigma * noise`."""
    signal = 1 - sigma
    variance = signal**2 * WIDTH**2 + sigma**2
    apart = latents[:, None] - signal * CENTRES
    logits = -(apart**2).sum(-1) / (2 * variance)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    clean = CENTRES + signal * WIDTH**2 / variance * apart
    data = (weights[..., None] * clean).sum(1)
    return (latents - signal * data) / sigma - data


def schedule_of(pipeline: str, name: str, steps: int = STEPS) -> Schedule:
    """The family's own, for 1024 tokens."""
    request = Request("", 512, 512, steps, 1.0)
    shape = (1, 1024, 64) if pipeline.startswith(PACKED) else (1, 16, 64, 64)
    chosen = with_class(scheduler_of(FILES[pipeline]), name)
    return FAMILIES[pipeline].schedule(chosen, request, mx.zeros(shape))


def sampled(pipeline: str, schedule: Schedule) -> np.ndarray:
    latents, random = START * schedule.initial_noise, np.random.default_rng(5)
    state, flow = initial_state(schedule, latents), is_flow(pipeline)
    for row, timestep in zip(mx.array(schedule.rows), schedule.timesteps):
        seen = np.array(model_input(row, latents)).astype(np.float64)
        found = slope_in(seen, timestep / 1000) if flow else noise_in(seen, float(timestep))
        noise = mx.array(random.standard_normal(START.shape).astype(np.float32))
        latents, state = step(
            row, latents, mx.array(found.astype(np.float32)), state,
            noise if schedule.stochastic else None, form=schedule.form,
        )  # fmt: skip
    return np.array(latents)


def is_flow(pipeline: str) -> bool:
    file = FILES[pipeline]
    return file["_class_name"].startswith("FlowMatch") or "use_flow_sigmas" in file


@cache
def exact(flow: bool) -> np.ndarray:
    """Where each latent ends, by very many steps."""
    pipeline, name = ("ZImagePipeline", "heun") if flow else ("DiTPipeline", "DPM++ 2M")
    return sampled(pipeline, schedule_of(pipeline, name, 400))


def distance(found: np.ndarray) -> float:
    """Root mean square from the nearest centre, in widths of the data."""
    apart = np.linalg.norm(found[:, None] - CENTRES, axis=-1).min(1)
    return float(np.sqrt((apart**2).mean() / CENTRES.shape[1]) / WIDTH)


@pytest.mark.parametrize("pipeline", FILES)
def test_every_usual_name_converges_or_says_what_fits(pipeline: str) -> None:
    """Deterministic samplers end where many steps do, stochastic ones among the data."""
    refused, worst = {}, {}
    for name in NAMES:
        try:
            schedule = schedule_of(pipeline, name)
        except MlxconvError as error:
            refused[name] = str(error)
            continue
        found = sampled(pipeline, schedule)
        if schedule.stochastic:
            assert 0.3 < distance(found) < 1.4, f"{name}: {distance(found):.2f} widths"
        else:
            worst[name] = decibels(found, exact(is_flow(pipeline)))
    print(f"\n{pipeline}", {name: round(value, 1) for name, value in worst.items()})
    assert min(worst.values()) > 22, worst
    fit = {name for name in _SOLVERS if name not in refused}
    for name, message in refused.items():
        _, fits, offered = message.partition("those that fit: ")
        offered = offered if fits else re.findall("model (.*) has$", message)[0]
        listed = [each for each in offered.split(", ") if each != "no other"]
        if fits:
            assert set(listed) == fit, message
        else:  # each with the spacing that the refused one lacks
            spacing = name.rpartition(" ")[2]
            assert listed
            assert all(f"{each} {spacing}" not in refused for each in listed), message


def test_a_flow_s_names_are_many_and_a_flow_s_own() -> None:
    for name in ("DPM++ 2M Karras", "Heun", "Euler a", "UniPC exponential", "LCM"):
        schedule_of("FluxPipeline", name)
    flux = scheduler_of(FILES["FluxPipeline"])
    assert with_class(flux, "Heun").options["use_dynamic_shifting"]
    with pytest.raises(MlxconvError, match="DDIM does not fit a flow model; those that fit: Euler"):
        with_class(flux, "DDIM")
    with pytest.raises(MlxconvError, match="'LCM simple': LCM has no simple levels; of this kind"):
        with_class(scheduler_of(FILES["DiTPipeline"]), "LCM simple")


def test_simple_levels_of_a_flow_are_even_before_the_shift() -> None:
    """Stable Diffusion 3's own end near zero; a diffusers pipeline is given sigmas for these."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / 5, 5).tolist())
    ours = schedule_of("StableDiffusion3Pipeline", "Euler simple", 5)
    assert ours.sigmas.tolist() == pytest.approx(theirs.sigmas.tolist(), rel=1e-6)
    own = schedule_of("StableDiffusion3Pipeline", "Euler", 5)
    assert own.sigmas[-2] < 0.01 < 0.4 < ours.sigmas[-2]


def test_a_picture_approaches_that_of_many_steps(pipeline_bundle: Bundles) -> None:
    pipe = load(pipeline_bundle("fp32"), keep=True, compile="off")
    asked: dict[str, Any] = {**SIZE, "tokens": TOKENS, "seed": 3}
    many = pipe(PROMPT, steps=60, **asked).pixels
    for name in ("DPM++ 2M Karras", "Heun", "UniPC"):
        made = [pipe(PROMPT, steps=steps, scheduler=name, **asked).pixels for steps in (3, 16)]
        few, more = (psnr(pixels, many) for pixels in made)
        print(f"\n{name}: {few:.1f} dB in 3 steps, {more:.1f} dB in 16")
        assert more > max(30, few + 4)
