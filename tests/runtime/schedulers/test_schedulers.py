"""Every scheduler against diffusers' class of the same name, step by step."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mpmath
import numpy as np
import pytest
import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.schedulers import (
    Schedule,
    begin_of,
    initial_state,
    make_schedule,
    model_input,
    scheduler_of,
    step,
)
from mlxconv.runtime.schedulers.betas import Betas, alphas_cumprod
from mlxconv.runtime.schedulers.sigmas import beta_quantiles

from .scheduler_cases import CASES, Case

SHAPE = (2, 4, 6, 5)
TOLERANCE = 1e-5
ROUNDING = 3e-7  # a few units of float32's last place
MODULES = {
    "FlowMatchEulerDiscreteScheduler": "flow_match_euler_discrete",
    "FlowMatchHeunDiscreteScheduler": "flow_match_heun_discrete",
    "LTXEulerAncestralRFScheduler": "ltx_euler_ancestral_rf",
    "EulerDiscreteScheduler": "euler_discrete",
    "EulerAncestralDiscreteScheduler": "euler_ancestral_discrete",
    "HeunDiscreteScheduler": "heun_discrete",
    "DDIMScheduler": "ddim",
    "DDPMScheduler": "ddpm",
    "PNDMScheduler": "pndm",
    "DPMSolverMultistepScheduler": "dpmsolver_multistep",
    "UniPCMultistepScheduler": "unipc_multistep",
    "LCMScheduler": "lcm",
    "TCDScheduler": "tcd",
    "SCMScheduler": "scm",
    "FlowMatchLCMScheduler": "flow_match_lcm",
    "CogVideoXDDIMScheduler": "ddim_cogvideox",
    "CogVideoXDPMScheduler": "dpm_cogvideox",
    "EDMEulerScheduler": "edm_euler",
    "EDMDPMSolverMultistepScheduler": "edm_dpmsolver_multistep",
}


def _module(name: str) -> Any:
    return importlib.import_module(f"diffusers.schedulers.scheduling_{MODULES[name]}")


def _theirs(case: Case, steps: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Heun's constructor spaces a thousand sigmas, which takes mpmath seconds.
        later = {key: v for key, v in case.options.items() if key == "use_beta_sigmas"}
        now = {key: v for key, v in case.options.items() if key not in later}
        scheduler = getattr(_module(case.name), case.name)(**now)
        scheduler.register_to_config(**later)
    asks = {k: v for k, v in case.asks(steps).items() if k != "eta"}
    if case.name == "SCMScheduler":
        extra = {} if steps == 2 else {"intermediate_timesteps": None}
        if "timesteps" in asks:
            extra = {"max_timesteps": None, "intermediate_timesteps": None}
        scheduler.set_timesteps(steps, **asks, **extra)
    elif {"timesteps", "sigmas"} & set(asks):
        scheduler.set_timesteps(**asks)
    else:
        scheduler.set_timesteps(steps, **asks)
    if case.exact:
        scheduler.sigmas = scheduler.sigmas.double()
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(case.begin)
    return CogVideoX(scheduler) if case.name == "CogVideoXDPMScheduler" else scheduler


def _ours(case: Case, steps: int) -> Schedule:
    scheduler = scheduler_of({"_class_name": case.name, **case.options})
    asks = case.asks(steps)
    count = None if {"timesteps", "sigmas"} & set(asks) else steps
    return make_schedule(scheduler, count, begin=case.begin, **asks)


def _model(latents: np.ndarray, timestep: float) -> np.ndarray:
    """A model that depends on all it is given, in float32."""
    mixed = latents + 0.5 * np.roll(latents, 1, axis=-1) + np.float32(np.sin(timestep))
    return np.tanh(mixed).astype(np.float32)


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    norm = float(np.linalg.norm(theirs.astype(np.float64)))
    return float(np.linalg.norm(ours.astype(np.float64) - theirs.astype(np.float64))) / norm


@dataclass
class Run:
    """A generation through both: the worst errors over its calls."""

    latents: float = 0.0
    inputs: float = 0.0
    timesteps: float = 0.0
    noise_scale: float = 0.0
    draws: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


class Draws:
    """In place of `randn_tensor`: seeded noise, counted; the latest is kept."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.forget()

    def forget(self) -> None:
        self.count, self.latest = 0, np.zeros(SHAPE, np.float32)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.count, self.latest = self.count + 1, self._random.standard_normal(SHAPE, np.float32)
        return torch.from_numpy(self.latest)


class CogVideoX:
    """The steps of CogVideoXDPMScheduler as its pipeline takes them, with what each needs."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._clean, self._before = scheduler, None, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, output: Any, timestep: Any, latents: Any, **kwargs: Any) -> Any:
        moved, self._clean = self._scheduler.step(
            output, self._clean, timestep, self._before, latents, **kwargs
        )
        self._before = timestep
        return (moved,)


def _compare(case: Case, steps: int, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Both step from the same latents with the same outputs and noise, each on its own latents."""
    theirs, ours, draws = _theirs(case, steps), _ours(case, steps), Draws(steps)
    monkeypatch.setattr(_module(case.name), "randn_tensor", draws, raising=False)
    eta = {key: value for key, value in case.asks(steps).items() if key == "eta"}
    timesteps = theirs.timesteps[case.begin :][: ours.calls]
    scale = float(getattr(theirs, "init_noise_sigma", 1.0))
    latents = draws() * scale
    run = Run(
        timesteps=_error(ours.timesteps, timesteps.numpy()),
        noise_scale=abs(ours.initial_noise / scale - 1),
        draws=ours.draws.tolist(),
    )
    mine, rows = mx.array(latents.numpy()), mx.array(ours.rows)
    state, dtype = initial_state(ours, mine), torch.float64 if case.exact else torch.float32
    latents = latents.to(dtype)
    for row, timestep in zip(rows, timesteps):
        seen = latents
        if hasattr(theirs, "scale_model_input"):
            seen = theirs.scale_model_input(latents, timestep)
        run.inputs = max(run.inputs, _error(np.array(model_input(row, mine)), seen.numpy()))
        draws.forget()
        output = _model(seen.float().numpy(), float(timestep))
        given = torch.from_numpy(output).to(dtype)
        latents = theirs.step(given, timestep, latents, return_dict=False, **eta)[0]
        run.drawn.append(draws.count)
        noise = mx.array(draws.latest) if ours.stochastic else None
        mine, state = step(row, mine, mx.array(output), state, noise, form=ours.form)
        run.latents = max(run.latents, _error(np.array(mine), latents.numpy()))
    return run


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """scipy is no dependency: diffusers' beta sigmas take their quantiles from mpmath instead."""
    beta = SimpleNamespace(ppf=lambda share, a, b: _quantile(float(share), a))
    scipy = SimpleNamespace(stats=SimpleNamespace(beta=beta))
    for name in MODULES:
        monkeypatch.setattr(_module(name), "scipy", scipy, raising=False)
        monkeypatch.setattr(_module(name), "is_scipy_available", lambda: True, raising=False)


@cache
def _quantile(share: float, shape: float) -> float:
    """I^-1(share; shape, shape) by bisection of mpmath's regularised incomplete beta."""
    low, high = 0.0, 1.0
    if share in (low, high):
        return share
    for _ in range(44):
        middle = (low + high) / 2
        below = mpmath.betainc(shape, shape, 0, middle, regularized=True) < share
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_diffusers_at_every_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in case.steps:
        run = _compare(case, steps, monkeypatch)
        assert run.draws == run.drawn
        assert run.timesteps <= ROUNDING
        assert run.noise_scale <= ROUNDING
        assert run.inputs <= TOLERANCE, f"{steps} steps"
        assert run.latents <= TOLERANCE, f"{steps} steps"


@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_tables_round_as_diffusers(betas: str) -> None:
    theirs = _module("DDIMScheduler").DDIMScheduler(beta_schedule=betas).alphas_cumprod.numpy()
    ours = alphas_cumprod(Betas(beta_schedule=betas))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=6e-8)  # the last bit is the CPU's


def test_beta_quantiles_are_exact() -> None:
    shares = np.array([0.0, 1e-9, 0.01, 0.1, 0.3, 0.5, 0.77, 0.95, 0.9999, 1.0])
    exact = [_quantile(float(share), 0.6) for share in shares]
    np.testing.assert_allclose(beta_quantiles(shares, 0.6), exact, rtol=0, atol=2e-13)


def test_arcsine_quantiles_have_a_closed_form() -> None:
    shares = np.linspace(0, 1, 101)
    exact = np.sin(np.pi * shares / 2) ** 2
    np.testing.assert_allclose(beta_quantiles(shares, 0.5), exact, rtol=0, atol=1e-15)


def test_all_steps_are_one_trace() -> None:
    options = {"_class_name": "UniPCMultistepScheduler", "solver_order": 3}
    schedule, traces = make_schedule(scheduler_of(options), 8), 0

    def counted(row: mx.array, latents: mx.array, output: mx.array, state: Any) -> Any:
        nonlocal traces
        traces += 1
        return step(row, latents, output, state, form=schedule.form)

    compiled, output = mx.compile(counted), mx.full(SHAPE, 0.25)
    eager = fast = mx.ones(SHAPE)
    eager_state = fast_state = initial_state(schedule, eager)
    for row in mx.array(schedule.rows):
        fast, fast_state = compiled(row, fast, output, fast_state)
        eager, eager_state = step(row, eager, output, eager_state, form=schedule.form)
    assert _error(np.array(fast), np.array(eager)) < 1e-6
    assert traces == 1


def test_a_step_has_only_the_terms_it_needs() -> None:
    euler = make_schedule(scheduler_of({"_class_name": "FlowMatchEulerDiscreteScheduler"}), 4)
    assert euler.form.terms == ((0, 1),)  # latents and output


def test_latents_keep_their_dtype() -> None:
    schedule = make_schedule(scheduler_of({"_class_name": "DDIMScheduler"}), 4)
    latents = mx.ones(SHAPE, dtype=mx.bfloat16)
    moved, _ = step(mx.array(schedule.rows)[0], latents, latents, (), form=schedule.form)
    assert moved.dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("FlowMatchEulerDiscreteScheduler", "scale_noise"),
        ("EulerDiscreteScheduler", "add_noise"),
        ("DDIMScheduler", "add_noise"),
        ("DPMSolverMultistepScheduler", "add_noise"),
    ],
)
def test_image_to_image_starts_as_in_diffusers(name: str, method: str) -> None:
    begin = begin_of(scheduler_of({"_class_name": name}), 20, 0.6)
    case = Case(name, begin=begin)
    theirs, (signal, noise) = _theirs(case, 20), _ours(case, 20).start
    clean, random = torch.randn(SHAPE), torch.randn(SHAPE)
    at = theirs.timesteps[begin : begin + 1]
    pair = (clean, at, random) if method == "scale_noise" else (clean, random, at)
    noisy = getattr(theirs, method)(*pair).numpy()
    assert begin == 8
    assert _error((signal * clean + noise * random).numpy(), noisy) < 1e-6


def test_a_stochastic_step_without_noise_is_an_error() -> None:
    schedule = make_schedule(scheduler_of({"_class_name": "LCMScheduler"}), 4)
    ones = mx.ones(SHAPE)
    with pytest.raises(MlxconvError, match="pass noise"):
        step(mx.array(schedule.rows)[0], ones, ones, (), form=schedule.form)
