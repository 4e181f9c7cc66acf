"""UniPC: a predictor and a corrector of order one to three that share each model call.

arXiv 2302.04867, algorithms 5 to 8; diffusers 0.42.1 UniPCMultistepScheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from typing import Literal

import numpy as np

from .betas import LINSPACE, Picked, alphas_cumprod, noise_levels
from .dpmsolver import FlowSigmas, Levels, Orders, kept_noise, levels_of, levels_over, path_of
from .predictions import Threshold, WithFlow
from .schedule import Array, Request, Schedule, assemble, basis
from .sigmas import (
    FinalSigma,
    Respacing,
    TimeShift,
    flow_levels,
)


@dataclass(frozen=True)
class _Solver(Orders):
    predict_x0: bool = True
    solver_type: Literal["bh1", "bh2", "midpoint", "heun", "logrho"] = "bh2"
    disable_corrector: Sequence[float] = ()
    solver_p: Literal[None] = None


@dataclass(frozen=True)
class _FlowSigmas(FlowSigmas):
    time_shift_type: TimeShift = "exponential"
    shift_terminal: float | None = None


def unipc(
    request: Request,
    *,
    betas: Picked = LINSPACE,
    spacing: Respacing,
    flow: _FlowSigmas,
    solver: _Solver,
    limits: Threshold,
    prediction_type: WithFlow = "epsilon",
    final_sigmas_type: FinalSigma = "zero",
) -> Schedule:
    """The state is (corrected latents of the last call, kept quantities, the newest first)."""
    table = noise_levels(alphas_cumprod(betas, floor=True))
    train, final = betas.num_train_timesteps, float(table[0])
    if flow.use_flow_sigmas:
        sigmas, timesteps = _flow_levels(request, train, table, spacing, flow)
    else:
        rounds = spacing.use_karras_sigmas
        sigmas, timesteps = levels_over(request, betas, table, spacing, rounds=rounds)
    if flow.use_flow_sigmas or spacing.chosen:
        final = sigmas[-1]
    sigmas = np.append(sigmas, 0.0 if final_sigmas_type == "zero" else final)
    levels, clean = levels_of(sigmas, flow=flow.use_flow_sigmas), solver.predict_x0
    at, calls = basis(1 + solver.solver_order), len(timesteps)
    last, *history = at.state
    quantities = [at.denoised] * calls
    if not clean:
        quantities = kept_noise(prediction_type, levels, at, limited=False)
    updates, order = [], 0
    for call in range(request.begin, calls):
        newest, latents = quantities[call], at.latents
        if call > request.begin and call - 1 not in solver.disable_corrector:
            corrected = (newest, *history)
            latents = _move(solver, levels, call - 1, order, last, corrected, corrects=True)
        left = calls - call if solver.lower_order_final else solver.solver_order
        order = min(solver.solver_order, left, call - request.begin + 1)
        known = (newest, *history[:-1])
        moved = _move(solver, levels, call, order, latents, known, corrects=False)
        updates.append([moved, latents, *known])
    path = path_of(prediction_type, levels, timesteps, request.begin)
    return assemble(path, updates, limit=limits.limit() if clean else None)


def _flow_levels(
    request: Request, train: int, table: Array, spacing: Respacing, flow: _FlowSigmas
) -> tuple[Array, Array]:
    """Levels and timesteps (steps,). Exponential and beta levels lie between a flow's own ends;
    diffusers takes those of the betas, which are none of a flow."""
    given = None if request.sigmas is None else np.array(request.sigmas, dtype=np.float64)
    if spacing.use_karras_sigmas:
        of_betas = spacing.respaced((table if given is None else given)[::-1], request.steps)
        sigmas = of_betas / (of_betas + 1)
        return sigmas, sigmas * train
    sigmas = np.linspace(1, 1 / train, request.steps + 1)[:-1] if given is None else given
    shifts = flow.flow_shift, request.mu, flow.time_shift_type, flow.shift_terminal
    sigmas = flow_levels(sigmas, *shifts)
    if abs(sigmas[0] - 1) < 1e-6:  # alpha is not to be zero
        sigmas = np.append(sigmas[0] - 1e-6, sigmas[1:])
    sigmas = spacing.respaced(sigmas, request.steps)
    return sigmas, sigmas * train


def _move(
    solver: _Solver,
    levels: Levels,
    call: int,
    order: int,
    latents: Array,
    known: tuple[Array, ...],
    *,
    corrects: bool,
) -> Array:
    """From one level to the next. known: kept quantities, the newest first.

    The corrector's newest is of the level moved to, so its anchor is the second.
    """
    clean, ahead, anchor = solver.predict_x0, known[:1], known[0]
    if corrects:
        anchor, known = known[1], known[1:]
    h = levels.lambdas[call + 1] - levels.lambdas[call]
    hh = -h if clean else h
    alpha, sigma = levels.alpha[call : call + 2], levels.sigma[call : call + 2]
    decay, size = (sigma[1] / sigma[0], alpha[1]) if clean else (alpha[1] / alpha[0], sigma[1])
    moved = decay * latents - size * np.expm1(hh) * anchor
    ratios = [(levels.lambdas[call - k] - levels.lambdas[call]) / h for k in range(1, order)]
    weights = _weights(solver, hh, ratios, corrects=corrects)
    points = zip(ratios, known[1:])
    differences = [(quantity - anchor) / ratio for ratio, quantity in points]
    if corrects:
        differences.append(ahead[0] - anchor)
    for weight, difference in zip(weights, differences):
        moved = moved - size * weight * difference
    return np.asarray(moved)


def _weights(solver: _Solver, hh: float, ratios: list[float], *, corrects: bool) -> Array:
    """Of each difference: B(h) times the solution of the order conditions (theorem 3.1)."""
    order = len(ratios) + 1
    count = order if corrects else order - 1
    if count == 0:
        return np.array([])
    scale = hh if solver.solver_type == "bh1" else np.expm1(hh)
    if count == 1:
        return np.array([scale / 2])
    points = np.array([*ratios, 1.0])
    phis = _phis(hh, order)
    matrix = np.stack([points**k for k in range(order)])[:count, :count]
    right = np.array([phi * factorial(k + 1) for k, phi in enumerate(phis)])[:count]
    return np.linalg.solve(matrix, right)


def _phis(hh: float, count: int) -> list[float]:
    """hh * phi_{k+2}(hh): each is (the one before) / hh - 1 / (k + 1)!."""
    phi, found = np.expm1(hh) / hh - 1, []
    for k in range(count):
        found.append(phi)
        phi = phi / hh - 1 / factorial(k + 2)
    return found
