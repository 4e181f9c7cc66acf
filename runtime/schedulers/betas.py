"""Tables over the training timesteps: betas, cumulative alphas, and the timesteps picked of them.

Tables are rounded to float32 where diffusers rounds them: one minus a cumulative alpha near one
keeps few digits, and they are to be the same few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import MlxconvError
from .schedule import Array


def alphas_cumprod(options: Mapping[str, Any], *, floor: bool = False) -> Array:
    """Cumulative alphas (num_train_timesteps,) float32.

    floor: with `rescale_betas_zero_snr` the last is 2^-24, so that its sigma is finite.
    """
    betas = _betas(options)
    rescaled = options.get("rescale_betas_zero_snr", False)
    if rescaled:
        betas = _zero_terminal_snr(betas)
    table = _cumprod(np.float32(1) - betas)
    if rescaled and floor:
        table[-1] = 2.0**-24
    return table


def snr_shifted(options: Mapping[str, Any]) -> Array:
    """CogVideoX's cumulative alphas (num_train_timesteps,), in float64 where its betas are.

    The signal-to-noise ratio is divided by `snr_shift_scale` (arXiv 2408.06072, section 3.2).
    """
    start, end = options["beta_start"] ** 0.5, options["beta_end"] ** 0.5
    if options["beta_schedule"] == "scaled_linear" and options["trained_betas"] is None:
        betas = np.linspace(start, end, options["num_train_timesteps"]) ** 2
        table = np.cumprod(1 - betas)
    else:
        table = _cumprod(np.float32(1) - _betas(options)).astype(np.float64)
    scale = options["snr_shift_scale"]
    table = table / (scale + (1 - scale) * table)
    return _zero_terminal(table) if options["rescale_betas_zero_snr"] else table


def noise_levels(table: Array) -> Array:
    """sigma = sqrt((1 - a) / a) of cumulative alphas, in float32."""
    levels: Array = np.sqrt((np.float32(1) - table) / table)
    return levels


def _betas(options: Mapping[str, Any]) -> Array:
    if options["trained_betas"] is not None:
        return np.asarray(options["trained_betas"], dtype=np.float32)
    start, end = options["beta_start"], options["beta_end"]
    return _BETAS[options["beta_schedule"]](start, end, options["num_train_timesteps"])


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


def spaced(options: Mapping[str, Any], steps: int, *, rounded: bool = True) -> Array:
    """Timesteps (steps,), falling: arXiv 2305.08891, table 2."""
    train, spacing = options["num_train_timesteps"], options["timestep_spacing"]
    if spacing == "linspace":
        picked = np.linspace(0, train - 1, steps)[::-1]
        picked = picked.round() if rounded else picked.astype(np.float32).astype(np.float64)
    elif spacing == "leading":
        picked = (np.arange(steps) * (train // steps))[::-1] + float(options["steps_offset"])
    else:
        picked = np.arange(train, 0, -train / steps)[:steps].round() - 1
    return _within(picked, train, steps)


def spaced_open(options: Mapping[str, Any], steps: int, last: int | None = None) -> Array:
    """Timesteps (steps,), falling, of a spacing of `steps + 1` without its end: the multistep way.

    last: one more than the largest (`lambda_min_clipped` lowers it), for each spacing.
    """
    train, spacing = options["num_train_timesteps"], options["timestep_spacing"]
    last = train if last is None else last
    if spacing == "linspace":
        picked = np.linspace(0, last - 1, steps + 1).round()[::-1][:-1]
    elif spacing == "leading":
        picked = (np.arange(steps + 1) * (last // (steps + 1)))[::-1][:-1]
        picked = picked + float(options["steps_offset"])
    else:
        picked = np.arange(last, 0, -train / steps)[:steps].round() - 1
    return _within(picked, train, steps)


def _within(picked: Array, train: int, steps: int) -> Array:
    if picked.max() > train - 1 or picked.min() < 0:
        raise MlxconvError(
            f"{steps} steps reach timestep {picked.max():g}, beyond num_train_timesteps {train}: "
            "ask for fewer steps, or lower steps_offset"
        )
    return np.asarray(picked, dtype=np.float64)
