"""Few-step samplers: LCM, TCD and Sana-Sprint's SCM.

LCM, arXiv 2310.04378; TCD, arXiv 2402.19159, algorithm 4; sCM, arXiv 2410.11081 (TrigFlow);
diffusers 0.42.1 LCMScheduler, TCDScheduler and SCMScheduler.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..errors import MlxconvError
from .betas import LATENT, Betas, alphas_cumprod
from .ddim import beta_path
from .predictions import Limits, Prediction, noise_of
from .schedule import Array, Path, Request, Schedule, assemble, basis

_SIGMA_DATA = 0.5  # of LCM's boundary condition, whatever the options say


def lcm(
    request: Request,
    *,
    betas: Betas = LATENT,
    limits: Limits,
    prediction_type: Prediction = "epsilon",
    original_inference_steps: int = 50,
    timestep_scaling: float = 10.0,
) -> Schedule:
    table, begin = alphas_cumprod(betas), request.begin
    timesteps = _distilled(request, betas.num_train_timesteps, original_inference_steps)
    bars = table[timesteps].astype(np.float64)
    after = np.append(bars[1:], bars[-1:])
    draws = np.arange(len(timesteps)) < len(timesteps) - 1
    scaled = timesteps * timestep_scaling
    skip = _SIGMA_DATA**2 / (scaled**2 + _SIGMA_DATA**2)
    out = scaled / np.sqrt(scaled**2 + _SIGMA_DATA**2)
    x, _, _, clean, noise = basis(0)
    updates = []
    for n, bar in enumerate(after):
        moved = out[n] * clean + skip[n] * x
        updates.append([np.sqrt(bar) * moved + np.sqrt(1 - bar) * noise if draws[n] else moved])
    path = beta_path(prediction_type, table, timesteps[begin:])
    return assemble(path, updates[begin:], draws=draws[begin:], limit=limits.limit())


def tcd(
    request: Request,
    *,
    betas: Betas = LATENT,
    prediction_type: Prediction = "epsilon",
    original_inference_steps: int = 50,
) -> Schedule:
    """eta (of the request, 0.3 by default) is the paper's gamma: how much noise comes back."""
    table, begin = alphas_cumprod(betas), request.begin
    timesteps = _distilled(request, betas.num_train_timesteps, original_inference_steps)
    eta = 0.3 if request.eta is None else request.eta
    following = np.append(timesteps[1:], 0)
    kept = np.floor(np.float32(1 - eta) * following.astype(np.float32)).astype(int)
    bars = table[[timesteps, following, kept]].astype(np.float64)
    draws = (np.arange(len(timesteps)) < len(timesteps) - 1) & (eta > 0)
    a, b = noise_of(prediction_type, np.sqrt(bars[0]), np.sqrt(1 - bars[0]))
    x, output, _, clean, noise = basis(0)
    updates = []
    for n, (_, after, bar) in enumerate(bars.T):
        moved = np.sqrt(bar) * clean + np.sqrt(1 - bar) * (a[n] * x + b[n] * output)
        if draws[n]:
            moved = np.sqrt(after / bar) * moved + np.sqrt(1 - after / bar) * noise
        updates.append([moved])
    path = beta_path(prediction_type, table, timesteps[begin:])
    return assemble(path, updates[begin:], draws=draws[begin:])


def scm(
    request: Request,
    *,
    num_train_timesteps: int = 1000,
    prediction_type: Literal["trigflow"] = "trigflow",
    sigma_data: float = 0.5,
) -> Schedule:
    """Timesteps are angles: latents are `cos(t) * clean + sin(t) * noise`, both of sigma_data."""
    angles, first = _angles(request).astype(np.float64), request.begin
    sines, cosines = np.sin(angles), np.cos(angles)
    _, _, _, clean, noise = basis(0)
    updates = [
        [cosine * clean + sine * sigma_data * noise] for cosine, sine in zip(cosines[1:], sines[1:])
    ]
    path = Path(
        angles[first:-1],
        np.tan(angles[first:]),
        (cosines[first], sines[first] * sigma_data),
        (cosines[first:-1], -sines[first:-1]),
    )
    return assemble(path, updates[first:], draws=True)


def _angles(request: Request) -> Array:
    """Angles (steps + 1,) float32: pi / 2 to 0, by way of 1.3 in two steps."""
    if request.timesteps is not None:
        return np.array(request.timesteps, dtype=np.float32)
    if request.steps == 2:
        return np.array([1.5708, 1.3, 0.0], dtype=np.float32)
    return np.linspace(1.5708, 0, request.steps + 1).astype(np.float32)


def _distilled(request: Request, train: int, original: int) -> Array:
    """Of the timesteps distilled on, `steps` at equal distances; strength drops the noisiest."""
    given = request.custom_timesteps(train)
    if given is not None:
        return given.astype(int)
    strength = 1.0 if request.strength is None else request.strength
    distilled = np.arange(1, int(original * strength) + 1) * (train // original) - 1
    if request.steps > len(distilled):
        raise MlxconvError(
            f"{request.steps} steps are more than the {len(distilled)} timesteps distilled on "
            f"(original_inference_steps {original}, strength {strength:g}): ask for fewer steps"
        )
    picked = np.floor(np.linspace(0, len(distilled), request.steps, endpoint=False))
    return np.asarray(distilled[::-1][picked.astype(int)])
