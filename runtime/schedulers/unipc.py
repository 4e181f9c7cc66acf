"""UniPC: a predictor and a corrector of order one to three that share each model call.

arXiv 2302.04867, algorithms 5 to 8; diffusers 0.42.1 UniPCMultistepScheduler.
"""

from __future__ import annotations

from math import factorial

import numpy as np

from .betas import alphas_cumprod, noise_levels, spaced_open
from .limits import limit_of
from .multistep import Levels, kept, levels_of, path_of
from .request import Options, Request, needed_mu
from .schedule import Array, Schedule, assemble, basis
from .sigmas import respaced, shifted, stretched, time_shifted, timestep_of


def unipc(options: Options, request: Request) -> Schedule:
    """The state is (corrected latents of the last call, kept quantities, the newest first)."""
    sigmas, timesteps = _levels(options, request)
    levels = levels_of(sigmas, flow=options["use_flow_sigmas"])
    clean, calls = options["predict_x0"], len(timesteps)
    at = basis(1 + options["solver_order"])
    last, *history = at.state
    quantities = kept({**options, "thresholding": False}, levels, at, clean=clean)
    updates, order = [], 0
    for call in range(request.begin, calls):
        newest, latents = quantities[call], at.latents
        if call > request.begin and call - 1 not in options["disable_corrector"]:
            corrected = (newest, *history)
            latents = _move(options, levels, call - 1, order, last, corrected, corrects=True)
        order = _order(options, call, request.begin, calls)
        known = (newest, *history[:-1])
        moved = _move(options, levels, call, order, latents, known, corrects=False)
        updates.append([moved, latents, *known])
    path = path_of(options, levels, timesteps, request.begin)
    return assemble(path, updates, limit=limit_of(options) if clean else None)


def _levels(options: Options, request: Request) -> tuple[Array, Array]:
    """Levels (steps + 1,) and timesteps (steps,)."""
    mu, zero = needed_mu(options, request), options["final_sigmas_type"] == "zero"
    given = None if request.sigmas is None else np.array(request.sigmas, dtype=np.float64)
    table = noise_levels(alphas_cumprod(options, floor=True)) if given is None else given
    train, flow = options["num_train_timesteps"], options["use_flow_sigmas"]
    sigmas, last = respaced(options, table[::-1], request.steps), float(table[0])
    if flow:
        if sigmas is not None and options["use_karras_sigmas"]:
            sigmas = sigmas / (sigmas + 1)
        else:  # diffusers takes exponential and beta levels of the betas, which are none of a flow
            own = _flow_levels(options, request, given, mu)
            again = respaced(options, own, request.steps)
            sigmas = own if again is None else again
        timesteps, last = sigmas * train, sigmas[-1]
    elif sigmas is not None:
        timesteps, last = timestep_of(sigmas, table), sigmas[-1]
        timesteps = timesteps.round() if options["use_karras_sigmas"] else timesteps
    else:
        timesteps = spaced_open(options, request.steps)
        sigmas = np.interp(timesteps, np.arange(len(table)), table)
    return np.append(sigmas, 0.0 if zero else last), timesteps


def _flow_levels(
    options: Options, request: Request, given: Array | None, mu: float | None
) -> Array:
    train = options["num_train_timesteps"]
    sigmas = np.linspace(1, 1 / train, request.steps + 1)[:-1] if given is None else given
    if mu is None:
        sigmas = shifted(sigmas, options["flow_shift"])
    else:
        sigmas = time_shifted(sigmas, mu, options["time_shift_type"])
    if options["shift_terminal"]:
        sigmas = stretched(sigmas, options["shift_terminal"])
    if abs(sigmas[0] - 1) < 1e-6:  # alpha is not to be zero
        sigmas = np.append(sigmas[0] - 1e-6, sigmas[1:])
    return sigmas


def _order(options: Options, call: int, begin: int, calls: int) -> int:
    order: int = options["solver_order"]
    left = calls - call if options["lower_order_final"] else order
    return min(order, left, call - begin + 1)


def _move(
    options: Options,
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
    clean, ahead, anchor = options["predict_x0"], known[:1], known[0]
    if corrects:
        anchor, known = known[1], known[1:]
    h = levels.lambdas[call + 1] - levels.lambdas[call]
    hh = -h if clean else h
    alpha, sigma = levels.alpha[call : call + 2], levels.sigma[call : call + 2]
    decay, size = (sigma[1] / sigma[0], alpha[1]) if clean else (alpha[1] / alpha[0], sigma[1])
    moved = decay * latents - size * np.expm1(hh) * anchor
    ratios = [(levels.lambdas[call - k] - levels.lambdas[call]) / h for k in range(1, order)]
    weights = _weights(options, hh, ratios, corrects=corrects)
    points = zip(ratios, known[1:])
    differences = [(quantity - anchor) / ratio for ratio, quantity in points]
    if corrects:
        differences.append(ahead[0] - anchor)
    for weight, difference in zip(weights, differences):
        moved = moved - size * weight * difference
    return np.asarray(moved)


def _weights(options: Options, hh: float, ratios: list[float], *, corrects: bool) -> Array:
    """Of each difference: B(h) times the solution of the order conditions (theorem 3.1)."""
    order = len(ratios) + 1
    count = order if corrects else order - 1
    if count == 0:
        return np.array([])
    scale = np.expm1(hh) if _is_bh2(options) else hh
    if count == 1:
        return np.array([scale / 2])
    points = np.array([*ratios, 1.0])
    phis = _phis(hh, order)
    matrix = np.stack([points**k for k in range(order)])[:count, :count]
    right = np.array([phi * factorial(k + 1) for k, phi in enumerate(phis)])[:count]
    return np.linalg.solve(matrix, right)


def _is_bh2(options: Options) -> bool:
    return bool(options["solver_type"] != "bh1")


def _phis(hh: float, count: int) -> list[float]:
    """hh * phi_{k+2}(hh): each is (the one before) / hh - 1 / (k + 1)!."""
    phi, found = np.expm1(hh) / hh - 1, []
    for k in range(count):
        found.append(phi)
        phi = phi / hh - 1 / factorial(k + 2)
    return found
