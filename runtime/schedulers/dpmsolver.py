"""DPM-Solver, DPM-Solver++ and their stochastic forms, of order one to three.

arXiv 2206.00927 (DPM-Solver, appendix B) and arXiv 2211.01095 (DPM-Solver++, algorithms 1 and 2);
diffusers 0.42.1 DPMSolverMultistepScheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import MlxconvError
from .betas import alphas_cumprod, noise_levels, spaced_open
from .limits import limit_of
from .multistep import Levels, kept, levels_of, path_of
from .request import Options, Request, custom_timesteps, needed_mu
from .schedule import Array, Path, Schedule, assemble, basis
from .sigmas import exponential, respaced, shifted, timestep_of


@dataclass(frozen=True)
class _Weights:
    """Of latents, the newest kept quantity, its first and second difference, and noise."""

    latents: float
    newest: float
    midpoint: float
    heun: float
    second: float
    noise: float


def dpmsolver(options: Options, request: Request) -> Schedule:
    kind: str = options["algorithm_type"]
    kind = "dpmsolver++" if kind == "deis" else kind  # as diffusers reads DEIS's own configs
    _check(kind, options)
    sigmas, timesteps = _levels(options, request)
    levels = levels_of(sigmas, flow=options["use_flow_sigmas"])
    path = path_of(options, levels, timesteps, request.begin)
    return solved(kind, options, levels, path, request.begin)


def solved(kind: str, options: Options, levels: Levels, path: Path, begin: int) -> Schedule:
    """The schedule along levels (calls + 1,), of which `path` holds those from `begin` on.

    The state is the kept quantities before this one's, the newest first.
    """
    clean, order, calls = kind.endswith("++"), options["solver_order"], len(levels.sigmas) - 1
    at = basis(order - 1)
    quantities = kept(options, levels, at, clean=clean)
    updates = []
    for call in range(begin, calls):
        now = _order(options, call, begin, calls)
        history = (quantities[call], *at.state)
        moved = _update(kind, options, levels, call, now, at.latents, history)
        weights = _weigh(kind, levels, call)
        updates.append([moved + weights.noise * at.noise, *history[: order - 1]])
    limit = limit_of(options)
    return assemble(path, updates, draws=kind.startswith("sde"), limit=limit)


def _check(kind: str, options: Options) -> None:
    if not kind.endswith("++") and options["final_sigmas_type"] == "zero":
        raise MlxconvError(f"algorithm_type {kind} needs final_sigmas_type sigma_min; found zero")
    if kind == "sde-dpmsolver" and options["solver_order"] == 3:
        raise MlxconvError("sde-dpmsolver has solver_order 1 or 2; found 3")
    if not kind.endswith("++") and options["prediction_type"] == "flow_prediction":
        raise MlxconvError(f"algorithm_type {kind} takes no flow_prediction; use dpmsolver++")


def _levels(options: Options, request: Request) -> tuple[Array, Array]:
    """Levels (steps + 1,) and timesteps (steps,)."""
    bars = alphas_cumprod(options, floor=True)
    table, mu = noise_levels(bars), needed_mu(options, request)
    sigmas, timesteps = _inner_levels(options, request, bars, table, mu)
    last = table[0] if options["final_sigmas_type"] == "sigma_min" else 0.0
    return np.append(sigmas, last), timesteps


def _inner_levels(
    options: Options, request: Request, bars: Array, table: Array, mu: float | None
) -> tuple[Array, Array]:
    """Karras before Lu before exponential and beta: diffusers' order. A flow's levels are spaced
    between their own ends, as FlowMatchEuler does it; diffusers takes those of the betas, which
    are none of a flow's."""
    if options["use_flow_sigmas"] and not options["use_lu_lambdas"]:
        train, shift = options["num_train_timesteps"], options["flow_shift"]
        rising = 1 - np.linspace(1, 1 / train, request.steps + 1)
        sigmas = shifted(rising, shift if mu is None else math.exp(mu))[::-1][:-1]
        again = respaced(options, sigmas, request.steps)
        sigmas = sigmas if again is None else again
        return sigmas, sigmas * train
    spaced = respaced(options, table[::-1], request.steps)
    if options["use_lu_lambdas"] and not options["use_karras_sigmas"]:
        spaced = exponential(float(table[-1]), float(table[0]), request.steps)
    if spaced is not None:
        return spaced, _timesteps_of(options, spaced, table)
    timesteps = custom_timesteps(options, request)
    if timesteps is None:
        timesteps = spaced_open(options, request.steps, _last_timestep(options, bars))
    return np.interp(timesteps, np.arange(len(table)), table), timesteps


def _timesteps_of(options: Options, sigmas: Array, table: Array) -> Array:
    timesteps = timestep_of(sigmas, table)
    rounds = options["use_karras_sigmas"] or options["use_lu_lambdas"]
    if rounds and options["beta_schedule"] != "squaredcos_cap_v2":
        return timesteps.round()
    return timesteps


def _last_timestep(options: Options, bars: Array) -> int:
    """One more than the last whose lambda is not clipped."""
    lambdas = np.log(np.sqrt(bars)) - np.log(np.sqrt(np.float32(1) - bars))
    clipped = np.searchsorted(lambdas[::-1], np.float32(options["lambda_min_clipped"]))
    return int(options["num_train_timesteps"] - clipped)


def _order(options: Options, call: int, begin: int, calls: int) -> int:
    """Lower at the start, where little is known, and at the end, for stability."""
    few = options["lower_order_final"] and calls < 15
    to_zero = options["final_sigmas_type"] == "zero"
    order: int = options["solver_order"]
    allowed = 3
    if call == calls - 1 and (options["euler_at_final"] or few or to_zero):
        allowed = 1
    elif call == calls - 2 and few:
        allowed = 2
    return min(order, call - begin + 1, allowed)


def _update(
    kind: str,
    options: Options,
    levels: Levels,
    call: int,
    order: int,
    latents: Array,
    history: tuple[Array, ...],
) -> Array:
    """The deterministic part. history: the kept quantities, the newest first."""
    weights, lambdas = _weigh(kind, levels, call), levels.lambdas
    moved = weights.latents * latents + weights.newest * history[0]
    if order == 1:
        return np.asarray(moved)
    step = lambdas[call + 1] - lambdas[call]
    near = (lambdas[call] - lambdas[call - 1]) / step
    slope = (history[0] - history[1]) / near
    if order == 2:
        heun = options["solver_type"] == "heun"
        return np.asarray(moved + (weights.heun if heun else weights.midpoint) * slope)
    far = (lambdas[call - 1] - lambdas[call - 2]) / step
    bend = (slope - (history[1] - history[2]) / far) / (near + far)
    return np.asarray(moved + weights.heun * (slope + near * bend) + weights.second * bend)


def _weigh(kind: str, levels: Levels, call: int) -> _Weights:
    h = levels.lambdas[call + 1] - levels.lambdas[call]
    alpha, before = levels.alpha[call + 1], levels.alpha[call]
    sigma, from_sigma = levels.sigma[call + 1], levels.sigma[call]
    return _WEIGHTS[kind](h, alpha, alpha / before, sigma, sigma / from_sigma)


def _plus(h: float, alpha: float, _: float, sigma: float, decay: float) -> _Weights:
    e = np.expm1(-h)
    second = -alpha * ((e + h) / h**2 - 0.5) if np.isfinite(h) else 0.0
    return _Weights(decay, -alpha * e, -alpha * e / 2, alpha * (e / h + 1), second, 0.0)


def _noise_form(h: float, _: float, growth: float, sigma: float, __: float) -> _Weights:
    e = np.expm1(h)
    heun, second = -sigma * (e / h - 1), -sigma * ((e - h) / h**2 - 0.5)
    return _Weights(growth, -sigma * e, -sigma * e / 2, heun, second, 0.0)


def _sde_plus(h: float, alpha: float, _: float, sigma: float, decay: float) -> _Weights:
    e = np.expm1(-2 * h)
    second = -alpha * ((e + 2 * h) / (2 * h) ** 2 + 0.5) if np.isfinite(h) else 0.0
    heun, noise = alpha * (e / (2 * h) + 1), sigma * np.sqrt(-e)
    return _Weights(decay * np.exp(-h), -alpha * e, -alpha * e / 2, heun, second, noise)


def _sde_noise_form(h: float, _: float, growth: float, sigma: float, __: float) -> _Weights:
    e, noise = np.expm1(h), sigma * np.sqrt(np.expm1(2 * h))
    return _Weights(growth, -2 * sigma * e, -sigma * e, -2 * sigma * (e / h - 1), 0.0, noise)


_WEIGHTS: dict[str, Callable[[float, float, float, float, float], _Weights]] = {
    "dpmsolver++": _plus,
    "dpmsolver": _noise_form,
    "sde-dpmsolver++": _sde_plus,
    "sde-dpmsolver": _sde_noise_form,
}
