"""Flow matching: latents are `sigma * noise + (1 - sigma) * clean`, outputs `noise - clean`.

Rectified flow, arXiv 2209.03003; diffusers 0.42.1 FlowMatchEulerDiscreteScheduler,
FlowMatchHeunDiscreteScheduler and FlowMatchLCMScheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from ..errors import MlxconvError
from .predictions import clean_of
from .schedule import Array, Path, Request, Schedule, assemble, basis
from .sigmas import Respacing, TimeShift, flow_levels, shifted


@dataclass(frozen=True)
class Flow(Respacing):
    """A flow's levels. The lengths and shifts at their ends are for `shift_for`."""

    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None
    time_shift_type: TimeShift = "exponential"

    def levels(self, request: Request) -> Array:
        """Shifted and respaced levels, in the precisions that diffusers computes them in."""
        mu, train = request.mu, self.num_train_timesteps
        levels: Array
        if request.sigmas is not None:
            levels = np.array(request.sigmas, dtype=np.float32)
        elif request.timesteps is not None:
            levels = np.array(request.timesteps, dtype=np.float32) / train
        else:  # equal steps between the ends of the training's levels, which are shifted once
            ends: Array = np.array([train, 1], dtype=np.float32) / train
            ends = shifted(ends, self.shift) if mu is None else ends
            first, last = float(ends[0]) * train, float(ends[1]) * train
            levels = np.linspace(first, last, request.steps) / train
        levels = flow_levels(levels, self.shift, mu, self.time_shift_type, self.shift_terminal)
        return self.respaced(levels, request.steps)


def flow_match_euler(
    request: Request,
    *,
    flow: Flow,
    invert_sigmas: bool = False,
    stochastic_sampling: bool = False,
) -> Schedule:
    sigmas, timesteps = _ends(flow, request, inverted=invert_sigmas)
    x, output, _, clean, noise = basis(0)
    if stochastic_sampling:
        updates = [[(1 - after) * clean + after * noise] for after in sigmas[1:]]
    else:
        updates = [[x + (after - before) * output] for before, after in pairwise(sigmas)]
    return assemble(_path(timesteps, sigmas), updates, draws=stochastic_sampling)


def flow_match_lcm(
    request: Request,
    *,
    flow: Flow,
    invert_sigmas: bool = False,
    scale_factors: Literal[None] = None,
) -> Schedule:
    """Each step goes to clean latents, and back to the next level with new noise."""
    return flow_match_euler(
        request, flow=flow, invert_sigmas=invert_sigmas, stochastic_sampling=True
    )


def flow_match_ancestral(
    request: Request, *, flow: Flow, eta: float = 1.0, s_noise: float = 1.0
) -> Schedule:
    """Euler's step to a lower level, then noise up to the next (LTXEulerAncestralRFScheduler)."""
    sigmas, timesteps = _ends(flow, request)
    x, _, _, clean, noise = basis(0)
    updates = []
    for before, after in pairwise(sigmas):
        down = after * (1 + (after / before - 1) * eta)
        kept = (1 - after) / (1 - down)
        renewed = np.sqrt(max(after**2 - (down * kept) ** 2, 0.0)) * s_noise
        updates.append([kept * (clean + down / before * (x - clean)) + renewed * noise])
    return assemble(_path(timesteps, sigmas), updates, draws=(sigmas[1:] > 0) & (eta > 0))


def flow_match_heun(request: Request, *, flow: Flow) -> Schedule:
    """Heun's method: each step but the last calls the model at both ends."""
    sigmas, begin = flow.levels(request).astype(np.float32), request.begin
    timesteps = twice(sigmas * np.float32(flow.num_train_timesteps))
    sigmas = np.append(sigmas, np.float32(0)).astype(np.float64)
    check_even(begin)
    each_call = np.append(twice(sigmas[:-1]), sigmas[-1])
    path = _path(timesteps[begin:], each_call[begin:])
    return assemble(path, heun_updates(sigmas[begin // 2 :], path, slope_is_output=True))


def _ends(flow: Flow, request: Request, *, inverted: bool = False) -> tuple[Array, Array]:
    """Levels (calls + 1,) and timesteps (calls,); inverted, they rise to one (Mochi)."""
    sigmas, train = flow.levels(request).astype(np.float32), np.float32(flow.num_train_timesteps)
    timesteps = sigmas * train
    if request.timesteps is not None:
        timesteps = np.array(request.timesteps, dtype=np.float32)
    if inverted:
        sigmas = np.float32(1) - sigmas
        timesteps = sigmas * train
    sigmas = np.append(sigmas, np.float32(inverted)).astype(np.float64)
    return sigmas[request.begin :], timesteps[request.begin :]


def _path(timesteps: Array, sigmas: Array) -> Path:
    at = sigmas[: len(timesteps)]
    start = (1 - sigmas[0], sigmas[0])
    return Path(timesteps, sigmas, start, clean_of("flow_prediction", 1 - at, at))


def twice(values: Array) -> Array:
    """All but the first, repeated: what the calls of a second order method see."""
    return np.concatenate([values[:1], values[1:].repeat(2)])


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
