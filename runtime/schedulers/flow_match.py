"""Flow matching: latents are `sigma * noise + (1 - sigma) * clean`, outputs `noise - clean`.

Rectified flow, arXiv 2209.03003; diffusers 0.42.1 FlowMatchEulerDiscreteScheduler,
FlowMatchHeunDiscreteScheduler and FlowMatchLCMScheduler.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..errors import MlxconvError
from .predictions import clean_of
from .request import Options, Request, needed_mu
from .schedule import Array, Path, Schedule, assemble, basis
from .sigmas import respaced, shifted, stretched, time_shifted


def flow_match_euler(options: Options, request: Request) -> Schedule:
    levels = _euler_levels(options, request)
    sigmas, timesteps = _ends(levels, options, request)
    sigmas, timesteps = sigmas[request.begin :], timesteps[request.begin :]
    x, output, _, clean, noise = basis(0)
    if options["stochastic_sampling"]:
        updates = [[(1 - after) * clean + after * noise] for after in sigmas[1:]]
    else:
        updates = [[x + (after - before) * output] for before, after in pairwise(sigmas)]
    return assemble(_path(timesteps, sigmas), updates, draws=bool(options["stochastic_sampling"]))


def flow_match_lcm(options: Options, request: Request) -> Schedule:
    """Each step goes to clean latents, and back to the next level with new noise."""
    return flow_match_euler({**options, "stochastic_sampling": True}, request)


def flow_match_ancestral(options: Options, request: Request) -> Schedule:
    """Euler's step to a lower level, then noise up to the next (LTXEulerAncestralRFScheduler)."""
    sigmas, timesteps = _ends(_euler_levels(options, request), options, request)
    sigmas, timesteps = sigmas[request.begin :], timesteps[request.begin :]
    x, _, _, clean, noise = basis(0)
    updates = []
    for before, after in pairwise(sigmas):
        down = after * (1 + (after / before - 1) * options["eta"])
        kept = (1 - after) / (1 - down)
        renewed = np.sqrt(max(after**2 - (down * kept) ** 2, 0.0)) * options["s_noise"]
        updates.append([kept * (clean + down / before * (x - clean)) + renewed * noise])
    draws = (sigmas[1:] > 0) & (options["eta"] > 0)
    return assemble(_path(timesteps, sigmas), updates, draws=draws)


def flow_match_heun(options: Options, request: Request) -> Schedule:
    """Heun's method: each step but the last calls the model at both ends."""
    sigmas = _euler_levels(options, request).astype(np.float32)
    timesteps = twice(sigmas * np.float32(options["num_train_timesteps"]))
    sigmas = np.append(sigmas, np.float32(0)).astype(np.float64)
    check_even(request.begin)
    path = _path(timesteps[request.begin :], _each_call(sigmas)[request.begin :])
    return assemble(path, heun_updates(sigmas[request.begin // 2 :], path, slope_is_output=True))


def _euler_levels(options: Options, request: Request) -> Array:
    """Shifted and respaced levels, in the precisions that diffusers computes them in."""
    mu = needed_mu(options, request)
    levels = _given_levels(options, request)
    if levels is None:
        shift = options["shift"] if mu is None else None
        levels = _default_levels(options, request.steps, shift)
    if mu is not None:
        levels = time_shifted(levels, mu, options["time_shift_type"])
    else:
        levels = shifted(levels, options["shift"])
    if options["shift_terminal"]:
        levels = stretched(levels, options["shift_terminal"])
    spaced = respaced(options, levels, request.steps)
    return levels if spaced is None else spaced


def _given_levels(options: Options, request: Request) -> Array | None:
    if request.sigmas is not None:
        return np.array(request.sigmas, dtype=np.float32)
    if request.timesteps is not None:
        given = np.array(request.timesteps, dtype=np.float32)
        return np.asarray(given / options["num_train_timesteps"])
    return None


def _default_levels(options: Options, steps: int, shift: float | None) -> Array:
    """Equal steps between the ends of the training's levels, which are shifted once already."""
    train = options["num_train_timesteps"]
    ends = np.array([train, 1], dtype=np.float32) / train
    if shift is not None:
        ends = shifted(ends, shift)
    timesteps = np.linspace(float(ends[0]) * train, float(ends[1]) * train, steps)
    return np.asarray(timesteps / train)


def _ends(levels: Array, options: Options, request: Request) -> tuple[Array, Array]:
    """Levels (steps + 1,) and timesteps (steps,); inverted, they rise to one (Mochi)."""
    sigmas, train = levels.astype(np.float32), np.float32(options["num_train_timesteps"])
    timesteps = sigmas * train
    if request.timesteps is not None:
        timesteps = np.array(request.timesteps, dtype=np.float32)
    inverted = options.get("invert_sigmas", False)
    if inverted:
        sigmas = np.float32(1) - sigmas
        timesteps = sigmas * train
    last = 1.0 if inverted else 0.0
    return np.append(sigmas, np.float32(last)).astype(np.float64), timesteps


def _path(timesteps: Array, sigmas: Array) -> Path:
    at = sigmas[: len(timesteps)]
    start = (1 - sigmas[0], sigmas[0])
    return Path(timesteps, sigmas, start, clean_of("flow_prediction", 1 - at, at))


def twice(values: Array) -> Array:
    """All but the first, repeated: what the calls of a second order method see."""
    return np.concatenate([values[:1], values[1:].repeat(2)])


def _each_call(sigmas: Array) -> Array:
    """Levels before each call, and after the last, of levels (steps + 1,)."""
    return np.append(twice(sigmas[:-1]), sigmas[-1])


def check_even(begin: int) -> None:
    if begin % 2:
        raise MlxconvError(f"this scheduler calls the model twice a step: begin {begin} is odd")


def heun_updates(sigmas: Array, path: Path, *, slope_is_output: bool) -> list[list[Array]]:
    """Algorithm 1 of EDM (arXiv 2206.00364) as two calls a step; the state is (slope, origin).

    sigmas (steps + 1,). slope_is_output: a flow's output is the slope; else it is read off clean.
    """
    x, output, (slope, origin), clean, _ = basis(2)
    updates = []
    for before, after in pairwise(sigmas):
        here = output if slope_is_output else (x - clean) / before
        updates.append([x + (after - before) * here, here, x])
        if after > 0:
            there = output if slope_is_output else (x - clean) / after
            mean = (slope + there) / 2
            updates.append([origin + (after - before) * mean, 0 * x, 0 * x])
    return updates[: len(path.timesteps)]
