"""The one step: next latents are a linear combination of what is known, with coefficients a step.

Every supported sampler, of first or higher order, deterministic or not, is

    (latents', *state') = C_i @ (latents, output, *state, denoised, noise)

with a matrix C_i that depends on the schedule alone. It is worked out beforehand in float64, so a
whole generation is one compiled function; that the first step of a multistep method is of first
order is a matter of zeros in C_0. `denoised` is a column only where it is clipped, since otherwise
it is itself a linear combination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import MlxconvError

Array: TypeAlias = NDArray[Any]
Limit: TypeAlias = Callable[[mx.array], mx.array]
State: TypeAlias = tuple[mx.array, ...]

HEAD = 3  # a row begins with: input scale, and denoised = row[1] * latents + row[2] * output


@dataclass(frozen=True)
class Form:
    """What is the same at every step: which terms there are, and how `denoised` is limited.

    terms: for each of (latents, *state), the columns of (latents, output, *state, denoised, noise)
    that are not zero throughout.
    """

    terms: tuple[tuple[int, ...], ...]
    limit: Limit | None = None

    @property
    def state_size(self) -> int:
        return len(self.terms) - 1


@dataclass(frozen=True)
class Schedule:
    """All that is known before the first latents.

    timesteps (calls,) float32: what the model is called with. sigmas (calls + 1,): the noise level
    before each call and after the last. initial_noise: what text-to-image noise is multiplied by.
    start: (signal, noise) such that `signal * clean + noise * randn` is where this schedule begins.
    draws (calls,): how often diffusers draws noise at this call, of which it uses the last; where
    it draws none, noise has no effect.
    rows (calls, n) float32: the coefficients, one row a call, for `step` with `form`.
    """

    timesteps: Array
    sigmas: Array
    initial_noise: float
    start: tuple[float, float]
    draws: Array
    rows: Array
    form: Form

    @property
    def stochastic(self) -> bool:
        return bool(self.draws.any())

    @property
    def calls(self) -> int:
        """How often the model is called: second order methods call it twice a step."""
        return len(self.timesteps)


@dataclass(frozen=True)
class Request:
    """What a caller asks of a schedule: see `make_schedule`. None: not asked for."""

    steps: int
    mu: float | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    begin: int = 0
    strength: float | None = None
    eta: float | None = None

    def custom_timesteps(self, train: int, respacing: str | None = None) -> Array | None:
        """The caller's timesteps (steps,), checked: falling, and within the `train` of training.

        respacing: the option that asks for levels of its own, with which there can be none.
        """
        if self.timesteps is None:
            return None
        given = np.array(self.timesteps, dtype=np.float64)
        if (np.diff(given) >= 0).any() or given[0] >= train or given[-1] < 0:
            raise MlxconvError(
                f"timesteps must fall from below num_train_timesteps {train} to no less than 0; "
                f"found {given.tolist()}"
            )
        if respacing:
            raise MlxconvError(f"timesteps and {respacing} exclude each other")
        return given


def initial_state(schedule: Schedule, latents: mx.array) -> State:
    """The state before the first call: zeros, in float32."""
    return tuple(mx.zeros(latents.shape, dtype=mx.float32) for _ in range(schedule.form.state_size))


def model_input(row: mx.array, latents: mx.array) -> mx.array:
    """What the model is called with at this step: `scale_model_input` of diffusers."""
    return (row[0] * latents).astype(latents.dtype)


def denoised(row: mx.array, latents: mx.array, output: mx.array) -> mx.array:
    """The clean latents that this output predicts, unclipped: for previews."""
    return row[1] * latents + row[2] * output


def step(
    row: mx.array,
    latents: mx.array,
    output: mx.array,
    state: State,
    noise: mx.array | None = None,
    *,
    form: Form,
) -> tuple[mx.array, State]:
    """One call's update: (latents (batch, ...), state) after it. Computed in float32.

    row (n,): this call's row of `Schedule.rows`. noise: standard normal, shaped as the latents;
    needed where `Schedule.draws` says so at any call, and then passed at every call.
    """
    if noise is None and any(form.state_size + 3 in terms for terms in form.terms):
        raise MlxconvError("this scheduler is stochastic: pass noise at every call")
    x, out = latents.astype(mx.float32), output.astype(mx.float32)
    clean = None if form.limit is None else form.limit(denoised(row, x, out))
    known: list[Any] = [x, out, *state, clean, noise]  # no term reads a None
    results, at = [], HEAD
    for terms in form.terms:
        parts = [row[at + n] * known[column] for n, column in enumerate(terms)]
        results.append(sum(parts[1:], parts[0]) if parts else mx.zeros_like(x))
        at += len(terms)
    return results[0].astype(latents.dtype), tuple(results[1:])


class Basis(NamedTuple):
    """Unit vectors: samplers are written with these as their papers write them with latents."""

    latents: Array
    output: Array
    state: tuple[Array, ...]
    denoised: Array
    noise: Array


def basis(state_size: int) -> Basis:
    latents, output, *state, clean, noise = np.eye(state_size + 4)
    return Basis(latents, output, tuple(state), clean, noise)


@dataclass(frozen=True)
class Path:
    """Where a schedule goes, before how it steps: see `Schedule`. predict (2, calls)."""

    timesteps: Array
    sigmas: Array
    start: tuple[float, float]
    predict: tuple[Array, Array]
    initial_noise: float = 1.0
    input_scale: Array | None = None


def assemble(
    path: Path,
    updates: Sequence[Sequence[Array]],
    *,
    draws: Array | bool = False,
    limit: Limit | None = None,
) -> Schedule:
    """A schedule of each call's new (latents, *state), as vectors over `basis`."""
    matrices = np.array(updates, dtype=np.float64)  # (calls, 1 + state, 4 + state)
    calls = len(matrices)
    predict = np.stack([np.broadcast_to(p, calls) for p in path.predict], axis=1)
    if limit is None:
        matrices[:, :, :2] += matrices[:, :, -2:-1] * predict[:, None, :]
        matrices[:, :, -2] = 0
    used = (matrices != 0).any(axis=0)
    scale = np.ones(calls) if path.input_scale is None else path.input_scale
    rows = np.concatenate([scale[:, None], predict, matrices[:, used]], axis=1)
    _check_finite(rows, path.timesteps)
    terms = tuple(tuple(int(c) for c in np.flatnonzero(line)) for line in used)
    return Schedule(
        timesteps=path.timesteps.astype(np.float32),
        sigmas=np.asarray(path.sigmas, dtype=np.float64)[: calls + 1],
        initial_noise=float(path.initial_noise),
        start=(float(path.start[0]), float(path.start[1])),
        draws=np.broadcast_to(np.asarray(draws, dtype=int), calls),
        rows=rows.astype(np.float32),
        form=Form(terms, limit),
    )


def _check_finite(rows: Array, timesteps: Array) -> None:
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise MlxconvError(
            f"these scheduler options have no finite step {bad[0] + 1} of {len(rows)}, at timestep "
            f"{timesteps[bad[0]]:g}: with rescale_betas_zero_snr use prediction_type v_prediction; "
            "keep lower_order_final where the last sigma is zero; combine use_flow_sigmas with no "
            "other sigmas"
        )
