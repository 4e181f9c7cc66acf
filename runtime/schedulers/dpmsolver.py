"""DPM-Solver, DPM-Solver++ and their stochastic forms, of order one to three.

arXiv 2206.00927 (DPM-Solver, appendix B) and arXiv 2211.01095 (DPM-Solver++, algorithms 1 and 2);
diffusers 0.42.1 DPMSolverMultistepScheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import MlxconvError
from .betas import LINSPACE, Picked, alphas_cumprod, noise_levels, spaced_open
from .predictions import Threshold, WithFlow, clean_of, noise_of
from .schedule import Array, Basis, Path, Request, Schedule, assemble, basis
from .sigmas import FinalSigma, Respacing, shifted, timestep_of


@dataclass(frozen=True)
class Orders:
    solver_order: Literal[1, 2, 3] = 2
    lower_order_final: bool = True


@dataclass(frozen=True)
class FlowSigmas:
    """DPM-Solver's and UniPC's names for a flow's levels."""

    use_flow_sigmas: bool = False
    flow_shift: float = 1.0
    use_dynamic_shifting: bool = False


@dataclass(frozen=True)
class Levels:
    """Noise levels (calls + 1,): latents are `alpha * clean + sigma * noise`.

    lambdas: log(alpha / sigma), infinite where sigma is zero.
    """

    sigmas: Array
    alpha: Array
    sigma: Array
    lambdas: Array


def levels_of(sigmas: Array, *, flow: bool) -> Levels:
    """sigmas (calls + 1,), rounded to float32 as diffusers keeps them; a flow's, or sigma/alpha."""
    given = sigmas.astype(np.float32).astype(np.float64)
    alpha = 1 - given if flow else 1 / np.sqrt(given**2 + 1)
    sigma = given if flow else given * alpha
    return Levels(given, alpha, sigma, np.log(alpha) - np.log(sigma))


def path_of(prediction_type: str, levels: Levels, timesteps: Array, begin: int) -> Path:
    """timesteps (calls,): truncated to integers, as diffusers does."""
    alpha, sigma = levels.alpha[:-1], levels.sigma[:-1]
    a, b = clean_of(prediction_type, alpha, sigma)
    return Path(
        np.trunc(timesteps)[begin:],
        levels.sigmas[begin:],
        (alpha[begin], sigma[begin]),
        (a[begin:], b[begin:]),
    )


def kept_noise(prediction_type: str, levels: Levels, at: Basis, *, limited: bool) -> list[Array]:
    """The noise in the latents, a vector a call. limited: that of a limited prediction."""
    alpha, sigma = levels.alpha[:-1], levels.sigma[:-1]
    if limited:
        pairs = zip(alpha, sigma)
        return [(at.latents - of_clean * at.denoised) / of_noise for of_clean, of_noise in pairs]
    a, b = noise_of(prediction_type, alpha, sigma)
    return [of_x * at.latents + of_output * at.output for of_x, of_output in zip(a, b)]


@dataclass(frozen=True)
class _Weights:
    """Of latents, the newest kept quantity, its first and second difference, and noise."""

    latents: float
    newest: float
    midpoint: float
    heun: float
    second: float
    noise: float


@dataclass(frozen=True)
class Solver(Orders):
    solver_type: Literal["midpoint", "heun", "logrho", "bh1", "bh2"] = "midpoint"
    euler_at_final: bool = False


@dataclass(frozen=True)
class _Solver(Solver):
    """variance_type: that of a model which learned one is not supported."""

    algorithm_type: Literal[
        "dpmsolver++", "sde-dpmsolver++", "dpmsolver", "sde-dpmsolver", "deis"
    ] = "dpmsolver++"
    final_sigmas_type: FinalSigma = "zero"
    variance_type: Literal[
        None, "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"
    ] = None


@dataclass(frozen=True)
class _Spacing(Respacing):
    use_lu_lambdas: bool = False
    lambda_min_clipped: float = -math.inf

    @property
    def chosen(self) -> str | None:
        """Karras before Lu before exponential and beta: diffusers' order."""
        lu = self.use_lu_lambdas and not self.use_karras_sigmas
        return "use_lu_lambdas" if lu else super().chosen


@dataclass(frozen=True)
class _FlowSigmas(FlowSigmas):
    time_shift_type: Literal["exponential"] = "exponential"


def dpmsolver(
    request: Request,
    *,
    betas: Picked = LINSPACE,
    spacing: _Spacing,
    flow: _FlowSigmas,
    solver: _Solver,
    limits: Threshold,
    prediction_type: WithFlow = "epsilon",
) -> Schedule:
    """A flow's levels are spaced between their own ends, as FlowMatchEuler does it; diffusers
    takes those of the betas, which are none of a flow's."""
    kind = solver.algorithm_type
    kind = "dpmsolver++" if kind == "deis" else kind  # as diffusers reads DEIS's own configs
    if not kind.endswith("++") and solver.final_sigmas_type == "zero":
        raise MlxconvError(f"algorithm_type {kind} needs final_sigmas_type sigma_min; found zero")
    if kind == "sde-dpmsolver" and solver.solver_order == 3:
        raise MlxconvError("sde-dpmsolver has solver_order 1 or 2; found 3")
    if not kind.endswith("++") and prediction_type == "flow_prediction":
        raise MlxconvError(f"algorithm_type {kind} takes no flow_prediction; use dpmsolver++")
    bars = alphas_cumprod(betas, floor=True)
    table, train = noise_levels(bars), betas.num_train_timesteps
    if flow.use_flow_sigmas and not spacing.use_lu_lambdas:
        request.custom_timesteps(train, "use_flow_sigmas")
        shift = flow.flow_shift if request.mu is None else math.exp(request.mu)
        sigmas = shifted(1 - np.linspace(1, 1 / train, request.steps + 1), shift)[::-1][:-1]
        sigmas = spacing.respaced(sigmas, request.steps)
        timesteps = sigmas * train
    else:
        rounds = spacing.chosen in ("use_karras_sigmas", "use_lu_lambdas")
        rounds = rounds and betas.beta_schedule != "squaredcos_cap_v2"
        last = train - _clipped(bars, spacing.lambda_min_clipped)
        sigmas, timesteps = levels_over(request, betas, table, spacing, rounds=rounds, last=last)
    end = table[0] if solver.final_sigmas_type == "sigma_min" else 0.0
    levels = levels_of(np.append(sigmas, end), flow=flow.use_flow_sigmas)
    at = basis(solver.solver_order - 1)
    quantities = [at.denoised] * len(sigmas)
    if not kind.endswith("++"):
        quantities = kept_noise(prediction_type, levels, at, limited=limits.thresholding)
    updates = solved(kind, solver, levels, quantities, request.begin)
    path = path_of(prediction_type, levels, timesteps, request.begin)
    return assemble(path, updates, draws=kind.startswith("sde"), limit=limits.limit())


def solved(
    kind: str, solver: Solver, levels: Levels, quantities: Sequence[Array], begin: int
) -> list[list[Array]]:
    """Each call's new (latents, *state) along levels (calls + 1,), from `begin` on.

    quantities (calls,): what the solver extrapolates. The state is those before this one's, the
    newest first.
    """
    at, updates = basis(solver.solver_order - 1), []
    for call in range(begin, len(quantities)):
        order = _order(solver, call, begin, levels)
        history = (quantities[call], *at.state)
        weights = _weigh(kind, levels, call)
        heun = solver.solver_type == "heun"
        moved = _update(weights, levels.lambdas, call, order, at.latents, history, heun=heun)
        updates.append([moved + weights.noise * at.noise, *history[:-1]])
    return updates


def _clipped(bars: Array, least: float) -> int:
    """How many timesteps have a lambda below `least`: the last ones."""
    lambdas = np.log(np.sqrt(bars)) - np.log(np.sqrt(np.float32(1) - bars))
    return int(np.searchsorted(lambdas[::-1], np.float32(least)))


def levels_over(
    request: Request,
    betas: Picked,
    table: Array,
    spacing: Respacing,
    *,
    rounds: bool,
    last: int | None = None,
) -> tuple[Array, Array]:
    """Levels and timesteps (steps,) over the training's levels. rounds: timesteps of respaced
    levels. last: see `spaced_open`."""
    timesteps = request.custom_timesteps(betas.num_train_timesteps, spacing.chosen)
    if spacing.chosen:
        sigmas = spacing.respaced(table[::-1], request.steps)
        timesteps = timestep_of(sigmas, table)
        return sigmas, timesteps.round() if rounds else timesteps
    if timesteps is None:
        timesteps = spaced_open(betas, request.steps, last)
    return np.interp(timesteps, np.arange(len(table)), table), timesteps


def _order(solver: Solver, call: int, begin: int, levels: Levels) -> int:
    """Lower at the start, where little is known, and at the end, for stability."""
    left = len(levels.sigmas) - 1 - call
    few = solver.lower_order_final and call + left < 15
    allowed = 3
    if left == 1 and (solver.euler_at_final or few or levels.sigmas[-1] == 0):
        allowed = 1
    elif left == 2 and few:
        allowed = 2
    return min(solver.solver_order, call - begin + 1, allowed)


def _update(
    weights: _Weights,
    lambdas: Array,
    call: int,
    order: int,
    latents: Array,
    history: tuple[Array, ...],
    *,
    heun: bool,
) -> Array:
    """The deterministic part. history: the kept quantities, the newest first."""
    moved = weights.latents * latents + weights.newest * history[0]
    if order == 1:
        return np.asarray(moved)
    step = lambdas[call + 1] - lambdas[call]
    near = (lambdas[call] - lambdas[call - 1]) / step
    slope = (history[0] - history[1]) / near
    if order == 2:
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
