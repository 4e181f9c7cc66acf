"""PNDM: Runge-Kutta warm-up (or none), then a linear multistep of four outputs.

arXiv 2202.09778, equations 11 to 13; diffusers 0.42.1 PNDMScheduler. Stable Diffusion 1's default,
without the warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import MlxconvError
from .betas import PlainBetas, Timesteps, alphas_cumprod, spaced
from .ddim import beta_path, final_bar
from .predictions import NoiseOrV
from .schedule import Array, Request, Schedule, assemble, basis

# Adams-Bashforth: the weights of the outputs, the newest first.
_WEIGHTS = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)
_RUNGE_KUTTA = (1 / 6, 1 / 3, 1 / 3, 1 / 6)


@dataclass(frozen=True)
class _Betas(PlainBetas, Timesteps): ...


def pndm(
    request: Request,
    *,
    betas: _Betas,
    prediction_type: NoiseOrV = "epsilon",
    skip_prk_steps: bool = False,
    set_alpha_to_one: bool = False,
) -> Schedule:
    """The state is (three earlier outputs, the newest first; the step's origin; a running sum)."""
    table, stride = alphas_cumprod(betas), betas.num_train_timesteps // request.steps
    rising = spaced(betas, request.steps)[::-1].astype(int)
    if skip_prk_steps:
        warm = np.array([], dtype=int)
        falling = np.concatenate([rising[:-1], rising[-2:-1], rising[-1:]])[::-1]
    else:
        warm = _warm_up_timesteps(rising, stride, request)
        falling = rising[:-3][::-1]
    timesteps = np.concatenate([warm, falling])[request.begin :]
    move = _Move(
        table.astype(np.float64),
        final_bar(table, set_alpha_to_one),
        is_v=prediction_type == "v_prediction",
    )
    updates = _warm_up(move, warm, stride) + _multistep(
        move, timesteps[len(warm) :], stride, warm=bool(len(warm))
    )
    return assemble(beta_path(prediction_type, table, timesteps), updates)


def _warm_up_timesteps(rising: Array, stride: int, request: Request) -> Array:
    if request.steps < 4 or request.begin:
        raise MlxconvError(
            f"skip_prk_steps false takes four steps or more, from the first; found "
            f"{request.steps} steps from {request.begin}: set skip_prk_steps, or take another class"
        )
    pairs = rising[-4:].repeat(2) + np.tile([0, stride // 2], 4)
    return np.asarray(pairs[:-1].repeat(2)[1:-1][::-1])


@dataclass(frozen=True)
class _Move:
    """`_get_prev_sample`: from one timestep to another along an output, linear in both."""

    bars: Array
    final: float
    is_v: bool

    def __call__(self, origin: Array, output: Array, start: int, end: int) -> Array:
        if not 0 <= start < len(self.bars):
            raise MlxconvError(f"timestep {start} is beyond num_train_timesteps {len(self.bars)}")
        bar, after = self.bars[start], self.bars[end] if end >= 0 else self.final
        if self.is_v:
            output = np.sqrt(bar) * output + np.sqrt(1 - bar) * origin
        divisor = bar * np.sqrt(1 - after) + np.sqrt(bar * (1 - bar) * after)
        return np.asarray(np.sqrt(after / bar) * origin - (after - bar) / divisor * output)


def _warm_up(move: _Move, timesteps: Array, stride: int) -> list[list[Array]]:
    """Four calls a step, each from the step's origin; outputs of the first are kept."""
    x, output, (first, second, third, origin, total), *_ = basis(5)
    updates = []
    for call, timestep in enumerate(timesteps):
        stage, start = call % 4, timesteps[call // 4 * 4]
        end = timestep - (0 if call % 2 else stride // 2)
        begun = x if stage == 0 else origin
        summed = _RUNGE_KUTTA[stage] * output + (0 if stage == 0 else 1) * total
        moved = move(begun, summed if stage == 3 else output, start, end)
        kept = [output, first, second] if stage == 0 else [first, second, third]
        updates.append([moved, *kept, begun, summed])
    return updates


def _multistep(move: _Move, timesteps: Array, stride: int, *, warm: bool) -> list[list[Array]]:
    """Without a warm-up the first step is made twice, the second time with the mean output."""
    x, output, (first, second, third, origin, total), *_ = basis(5)
    updates = []
    for call, timestep in enumerate(timesteps):
        if call == 1 and not warm:
            moved = move(origin, (output + first) / 2, timestep + stride, timestep)
            updates.append([moved, first, second, third, origin, total])
            continue
        known = 4 if warm else min(4, call + (call == 0))
        weights = _WEIGHTS[known - 1]
        mean = sum(w * o for w, o in zip(weights, (output, first, second, third)))
        moved = move(x, np.asarray(mean), timestep, timestep - stride)
        updates.append([moved, output, first, second, x if call == 0 else origin, total])
    return updates
