"""Every scheduler against diffusers' class of the same name, step by step."""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
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
    calculate_shift,
    fitting,
    initial_state,
    make_schedule,
    model_input,
    read_scheduler,
    scheduler_of,
    shift_for,
    step,
    with_class,
)
from mlxconv.runtime.schedulers.betas import alphas_cumprod
from mlxconv.runtime.schedulers.sigmas import beta_quantiles
from mlxconv.runtime.schedulers.table import SCHEDULERS

SHAPE = (2, 4, 6, 5)
STEPS = (4, 8, 20, 50)
TOLERANCE = 1e-5
ROUNDING = 3e-7  # a few units of float32's last place
MODULES = {
    "FlowMatchEulerDiscreteScheduler": "flow_match_euler_discrete",
    "FlowMatchHeunDiscreteScheduler": "flow_match_heun_discrete",
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


@dataclass(frozen=True)
class Case:
    """options: of the config. asks: of `make_schedule`, and under the same names of
    `set_timesteps`; a function of the number of steps where it depends on it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    asks: Callable[[int], dict[str, Any]] = lambda steps: {}
    steps: tuple[int, ...] = STEPS
    begin: int = 0
    exact: bool = False  # float32 costs diffusers itself its digits: run it in float64

    def __str__(self) -> str:
        known = _sd() if self.options.get("beta_start") == _sd()["beta_start"] else {}
        shown = [f"{k}={str(v)[:20]}" for k, v in self.options.items() if k not in known]
        begun = [f"begin={self.begin}"] if self.begin else []
        return "-".join([self.name.removesuffix("Scheduler"), *shown, *self.asks(4), *begun])


def _sd(**options: Any) -> dict[str, Any]:
    return {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", **options}


def _cases() -> Iterator[Case]:
    yield from _flow()
    yield from _euler()
    yield from _ancestors()
    yield from _dpm()
    yield from _unipc()
    yield from _few_steps()
    yield from _video()
    yield from _edm()


def _flow() -> Iterator[Case]:
    euler, mu = "FlowMatchEulerDiscreteScheduler", lambda steps: {"mu": 0.8}
    own = lambda steps: {"mu": 1.1, "sigmas": np.linspace(1, 1 / steps, steps).tolist()}  # noqa: E731
    yield Case(euler)
    yield Case(euler, {"shift": 3.0})
    yield Case(euler, {"shift": 3.0, "use_dynamic_shifting": True}, mu)
    yield Case(euler, {"shift": 3.0, "use_dynamic_shifting": True}, own)
    yield Case(euler, {"use_dynamic_shifting": True, "time_shift_type": "linear"}, own)
    yield Case(euler, {"use_dynamic_shifting": True, "shift_terminal": 0.1}, own)
    yield Case(euler, {"invert_sigmas": True})
    yield Case(euler, {"shift": 2.0, "stochastic_sampling": True})
    for spacing in ("karras", "exponential", "beta"):
        yield Case(euler, {"shift": 3.0, f"use_{spacing}_sigmas": True})
    yield Case(
        euler,
        {"shift": 1.5},
        lambda steps: {
            "timesteps": np.linspace(1000, 20, steps).tolist(),
            "sigmas": np.linspace(1, 0.02, steps).tolist(),
        },
    )
    yield Case(euler, {"shift": 3.0}, begin=2)
    yield Case("FlowMatchLCMScheduler", {"shift": 3.0})
    heun = "FlowMatchHeunDiscreteScheduler"
    yield Case(heun)
    yield Case(heun, {"shift": 3.0})
    yield Case(heun, {"shift": 3.0}, begin=4)


def _euler() -> Iterator[Case]:
    euler, ancestral, heun = (
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "HeunDiscreteScheduler",
    )
    for name in (euler, ancestral, heun):
        yield Case(name)
        yield Case(name, _sd(timestep_spacing="leading", steps_offset=1))
        yield Case(name, _sd(timestep_spacing="trailing", prediction_type="v_prediction"))
        # Levels of up to 2e4, of which clean latents of order one are the difference.
        yield Case(name, {"beta_schedule": "squaredcos_cap_v2"}, exact=name == heun)
        yield Case(name, _sd(), begin=2)
    for name in (euler, ancestral):
        zero = _sd(rescale_betas_zero_snr=True, timestep_spacing="trailing")
        yield Case(name, {**zero, "prediction_type": "v_prediction"}, exact=True)
    for name in (euler, heun):
        yield Case(name, _sd(prediction_type="sample"))
        for spacing in ("karras", "exponential", "beta"):
            yield Case(name, _sd(**{f"use_{spacing}_sigmas": True}))
        yield Case(name, _sd(), lambda steps: {"timesteps": np.linspace(990, 10, steps).tolist()})
    yield Case(heun, _sd(clip_sample=True, clip_sample_range=0.5))
    yield Case(heun, {"beta_schedule": "exp"})
    yield Case(euler, _sd(final_sigmas_type="sigma_min"))
    yield Case(euler, _sd(interpolation_type="log_linear"))
    yield Case(euler, _sd(), lambda steps: {"sigmas": [*np.geomspace(14, 0.05, steps), 0.0]})
    video = {"sigma_min": 0.002, "sigma_max": 700.0, "timestep_type": "continuous"}
    yield Case(euler, _sd(use_karras_sigmas=True, prediction_type="v_prediction", **video))


def _ancestors() -> Iterator[Case]:
    ddim, ddpm, pndm = "DDIMScheduler", "DDPMScheduler", "PNDMScheduler"
    for name in (ddim, ddpm):
        yield Case(name)
        yield Case(name, _sd(clip_sample=False, steps_offset=1))
        yield Case(name, _sd(prediction_type="v_prediction", timestep_spacing="trailing"))
        yield Case(name, _sd(prediction_type="sample", timestep_spacing="linspace"))
        yield Case(name, {"thresholding": True, "sample_max_value": 1.5})
        yield Case(name, _sd(clip_sample_range=2.0), begin=1)
        zero = _sd(rescale_betas_zero_snr=True, timestep_spacing="trailing")
        yield Case(name, {**zero, "prediction_type": "v_prediction", "clip_sample": False})
    yield Case(ddim, _sd(set_alpha_to_one=False, clip_sample=False))
    yield Case(ddim, _sd(clip_sample=False), lambda steps: {"eta": 0.7})
    yield Case(ddim, {"trained_betas": np.linspace(0.001, 0.03, 1000).tolist()})
    for kind in ("fixed_small_log", "fixed_large"):
        yield Case(ddpm, {"variance_type": kind})
    for betas in ("laplace", "sigmoid"):
        yield Case(ddpm, {"beta_schedule": betas})
    yield Case(
        ddpm, {}, lambda steps: {"timesteps": np.linspace(999, 3, steps).astype(int).tolist()}
    )
    yield Case(pndm, _sd(skip_prk_steps=True, steps_offset=1))
    yield Case(pndm, _sd(skip_prk_steps=True, prediction_type="v_prediction"))
    yield Case(pndm, _sd(skip_prk_steps=True, timestep_spacing="trailing", set_alpha_to_one=True))
    yield Case(pndm, _sd(skip_prk_steps=True), begin=2)
    yield Case(pndm)
    yield Case(pndm, _sd(timestep_spacing="linspace", prediction_type="v_prediction"))


def _dpm() -> Iterator[Case]:
    name = "DPMSolverMultistepScheduler"
    for order in (1, 2, 3):
        for kind in ("dpmsolver++", "sde-dpmsolver++"):
            yield Case(name, _sd(algorithm_type=kind, solver_order=order))
    for kind, order in (("dpmsolver", 3), ("dpmsolver", 2), ("sde-dpmsolver", 2)):
        for solver in ("midpoint", "heun"):
            options = {"final_sigmas_type": "sigma_min", "solver_type": solver}
            yield Case(name, _sd(algorithm_type=kind, solver_order=order, **options))
    for kind in ("dpmsolver++", "sde-dpmsolver++"):
        yield Case(name, _sd(algorithm_type=kind, solver_type="heun"))
        yield Case(name, _sd(algorithm_type=kind, use_karras_sigmas=True))
    for spacing in ("exponential_sigmas", "beta_sigmas", "lu_lambdas"):
        yield Case(name, _sd(**{f"use_{spacing}": True}))
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    for order in (1, 2, 3):
        yield Case(name, {**flow, "flow_shift": 3.0, "solver_order": order})
    yield Case(name, {**flow, "flow_shift": 5.0, "algorithm_type": "sde-dpmsolver++"})
    yield Case(name, {**flow, "use_dynamic_shifting": True}, lambda steps: {"mu": 0.9})
    for spacing in ("leading", "trailing"):
        yield Case(name, _sd(timestep_spacing=spacing, steps_offset=1))
    yield Case(name, _sd(euler_at_final=True, lower_order_final=False))
    yield Case(name, _sd(lower_order_final=False, solver_order=3, final_sigmas_type="sigma_min"))
    yield Case(name, _sd(prediction_type="v_prediction", use_karras_sigmas=True))
    yield Case(name, _sd(prediction_type="sample"))
    noise = {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}
    yield Case(name, _sd(prediction_type="v_prediction", **noise))
    yield Case(name, _sd(prediction_type="sample", **noise))
    yield Case(name, _sd(thresholding=True, **noise))
    yield Case(name, _sd(thresholding=True, sample_max_value=1.2))
    yield Case(name, {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1})
    yield Case(
        name,
        {
            "beta_schedule": "squaredcos_cap_v2",
            "use_karras_sigmas": True,
            "lambda_min_clipped": -5.1,
        },
    )
    zero = _sd(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    yield Case(name, {**zero, "prediction_type": "v_prediction"})
    yield Case(name, _sd(solver_order=3), begin=1)
    yield Case(
        name, _sd(), lambda steps: {"timesteps": np.linspace(999, 9, steps).astype(int).tolist()}
    )


def _unipc() -> Iterator[Case]:
    name = "UniPCMultistepScheduler"
    for order in (1, 2, 3):
        yield Case(name, _sd(solver_order=order))
        yield Case(name, _sd(solver_order=order, solver_type="bh1", final_sigmas_type="sigma_min"))
    yield Case(name, _sd(predict_x0=False, solver_order=3, final_sigmas_type="sigma_min"))
    for kind in ("v_prediction", "sample"):
        yield Case(name, _sd(prediction_type=kind))
        noise = {"predict_x0": False, "final_sigmas_type": "sigma_min"}
        yield Case(name, _sd(prediction_type=kind, **noise))
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    yield Case(name, {**flow, "flow_shift": 3.0})
    yield Case(name, {**flow, "flow_shift": 5.0, "solver_order": 3})
    yield Case(name, {**flow, "final_sigmas_type": "sigma_min"})
    yield Case(name, {**flow, "use_karras_sigmas": True})
    for kind in ("exponential", "linear"):
        shift = {"use_dynamic_shifting": True, "time_shift_type": kind, "shift_terminal": 0.02}
        yield Case(name, {**flow, **shift}, lambda steps: {"mu": 0.9})
    own = lambda steps: {"sigmas": np.linspace(1, 1 / steps, steps)}  # noqa: E731
    yield Case(name, {**flow, "flow_shift": 2.0}, own)
    for spacing in ("karras", "exponential", "beta"):
        # Beta sigmas lie close at their ends, where differences of float32 logarithms keep little.
        options = _sd(**{f"use_{spacing}_sigmas": True})
        yield Case(name, options, exact=spacing == "beta")
    for spacing in ("leading", "trailing"):
        yield Case(name, _sd(timestep_spacing=spacing, steps_offset=1))
    yield Case(name, _sd(disable_corrector=[0, 2]))
    yield Case(name, _sd(lower_order_final=False, final_sigmas_type="sigma_min", solver_order=3))
    yield Case(name, _sd(thresholding=True, sample_max_value=1.2))
    yield Case(name, _sd(solver_order=3), begin=1)


def _few_steps() -> Iterator[Case]:
    for name in ("LCMScheduler", "TCDScheduler"):
        yield Case(name)
        yield Case(name, {"prediction_type": "v_prediction"})
        yield Case(name, {"prediction_type": "sample"})
        yield Case(
            name, {}, lambda steps: {"timesteps": np.linspace(999, 19, steps).astype(int).tolist()}
        )
        yield Case(name, {"original_inference_steps": 100}, lambda steps: {"strength": 0.6})
        yield Case(name, {"original_inference_steps": 100}, begin=1)
    yield Case("LCMScheduler", {"clip_sample": True, "timestep_scaling": 0.01})
    yield Case("LCMScheduler", {"thresholding": True, "sample_max_value": 1.5})
    for eta in (0.0, 1.0):
        yield Case("TCDScheduler", {}, lambda steps, eta=eta: {"eta": eta})
    yield Case("SCMScheduler", steps=(1, 2, *STEPS))
    yield Case(
        "SCMScheduler",
        {"sigma_data": 1.0},
        lambda steps: {"timesteps": np.linspace(1.57, 0, steps + 1).tolist()},
    )


def _video() -> Iterator[Case]:
    for name in ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"):
        yield Case(name)
        zero = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        yield Case(name, {**zero, "prediction_type": "v_prediction", "snr_shift_scale": 1.0})
        yield Case(name, {"prediction_type": "sample", "timestep_spacing": "linspace"})
        yield Case(name, {"beta_schedule": "linear", "set_alpha_to_one": False}, begin=1)


def _edm() -> Iterator[Case]:
    euler, solver = "EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"
    for name in (euler, solver):
        yield Case(name)
        yield Case(name, {"prediction_type": "v_prediction", "sigma_data": 1.0}, begin=1)
        yield Case(name, {"sigma_schedule": "exponential", "final_sigmas_type": "sigma_min"})
    for order in (1, 3):
        yield Case(solver, {"solver_order": order})
    yield Case(solver, {"solver_type": "heun", "thresholding": True, "sample_max_value": 1.5})
    yield Case(solver, {"algorithm_type": "sde-dpmsolver++"})


CASES = list(_cases())


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


@pytest.mark.parametrize("name", SCHEDULERS)
def test_knows_the_options_and_defaults_of_diffusers(name: str) -> None:
    signature = inspect.signature(getattr(_module(name), name).__init__)
    theirs = {key: p.default for key, p in signature.parameters.items() if key != "self"}
    ours = dict(SCHEDULERS[name].options)
    hidden = {"sigma_min", "sigma_max"} - set(theirs)  # read where a config holds them
    assert {key: ours[key] for key in ours if key not in hidden} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in theirs.items()
    }


@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_tables_round_as_diffusers(betas: str) -> None:
    theirs = _module("DDIMScheduler").DDIMScheduler(beta_schedule=betas).alphas_cumprod.numpy()
    ours = alphas_cumprod({**SCHEDULERS["DDIMScheduler"].options, "beta_schedule": betas})
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.4e-7)  # betas depend on torch's SIMD


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


@pytest.mark.parametrize(("tokens", "mu"), [(256, 0.5), (2176, 0.825), (4096, 1.15)])
def test_shift_is_linear_in_the_tokens(tokens: int, mu: float) -> None:
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
    assert calculate_shift(tokens) == pytest.approx(mu, rel=1e-12)
    assert shift_for(scheduler_of(config), tokens) == pytest.approx(mu, rel=1e-12)
    assert shift_for(scheduler_of({**config, "max_shift": 2.0}), 4096) == pytest.approx(2.0)
    assert shift_for(scheduler_of({**config, "use_dynamic_shifting": False}), tokens) is None


# SD 1.5's own file, with options of other classes that diffusers drops.
SD15 = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
    "clip_sample": False,
}


@pytest.mark.parametrize("name", fitting("beta"))
def test_another_class_takes_the_options_that_from_config_gives_it(name: str) -> None:
    ours = with_class(scheduler_of(SD15), name)
    theirs = getattr(_module(name), name).from_config(SD15).config
    assert {key: theirs[key] for key in ours.options if key not in ours.row.options} == {}
    differing = {k for k, v in ours.options.items() if k in theirs and theirs[k] != v}
    assert differing <= {"disable_corrector"}  # a list there, a tuple here: both empty


def test_options_of_other_classes_are_listed_as_unused() -> None:
    assert scheduler_of(SD15).unused == {"clip_sample": False}


def test_a_flow_stays_a_flow_under_another_class() -> None:
    flux = scheduler_of({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    unipc = with_class(flux, "unipc")
    assert unipc.name == "UniPCMultistepScheduler"
    assert (unipc.options["use_flow_sigmas"], unipc.options["flow_shift"]) == (True, 3.0)
    assert with_class(unipc, "FlowMatchEuler").options["shift"] == 3.0
    assert unipc.unused == {}


def test_reads_a_bundles_scheduler_folder(tmp_path: Path) -> None:
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(SD15))
    assert read_scheduler(tmp_path) == read_scheduler(file.parent) == read_scheduler(file)
    assert read_scheduler(tmp_path).name == "PNDMScheduler"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "DPMSolverSDEScheduler"}, "DPMSolverSDEScheduler is not supp.*DDIMSch"),
        (
            {"_class_name": "LTXEulerAncestralRFScheduler"},
            "not supported; those that fit: FlowMatchEul",
        ),
        ({"shift": 1.0}, "expected a class under _class_name, found None"),
        ({**SD15, "skip_prk": True}, "has no option skip_prk; it has: .*skip_prk_steps"),
        ({**SD15, "beta_schedule": "sigmoid"}, "beta_schedule 'sigmoid' .*supported: linear, sc"),
        ({**SD15, "prediction_type": "sample"}, "'sample' is not supported; .*epsilon, v_pred"),
        ({**SD15, "num_train_timesteps": "many"}, "num_train_timesteps must be a int, found 'm"),
        ({**SD15, "_class_name": "DDPMScheduler", "variance_type": "learned"}, "'learned' is not"),
        (
            {**SD15, "_class_name": "HeunDiscreteScheduler"}
            | {"use_karras_sigmas": True, "use_beta_sigmas": True},
            "use_karras_sigmas and use_beta_sigmas exclude",
        ),
    ],
)
def test_an_unsupported_file_is_an_error_that_names_what_fits(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(MlxconvError, match=message) as error:
        read_scheduler(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_class_of_another_family_is_refused() -> None:
    with pytest.raises(MlxconvError, match="does not fit a beta model; those that fit: Euler"):
        with_class(scheduler_of(SD15), "FlowMatchEulerDiscreteScheduler")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match="here, nor under scheduler/"):
        read_scheduler(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "scheduler_config.json").write_text("{")
    with pytest.raises(MlxconvError, match=r"scheduler_config\.json: cannot be read as JSON"):
        read_scheduler(tmp_path)


FLUX = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}


@pytest.mark.parametrize(
    ("config", "asks", "message"),
    [
        (SD15, {"steps": 0}, "steps must be 1 to 1000"),
        (SD15, {"steps": 1001}, "steps must be 1 to 1000"),
        (SD15, {}, "steps, or timesteps or sigmas"),
        (SD15, {"steps": 1000}, "beyond num_train_timesteps"),
        (SD15, {"steps": 4, "begin": 4}, "begin must be one of the 4 model calls"),
        (SD15, {"steps": 4, "sigmas": [1, 0]}, "takes no sigmas; it takes only steps"),
        (FLUX, {"steps": 4}, "needs mu"),
        (FLUX, {"steps": 4, "mu": 1.0, "sigmas": [1.0]}, "that agree"),
        (FLUX, {"steps": 4, "eta": 1.0}, "takes no eta; it takes mu, sigmas, timesteps"),
        ({"_class_name": "DDIMScheduler"}, {"steps": 4, "eta": 2.0}, r"lie in \[0, 1\]"),
        ({"_class_name": "LCMScheduler"}, {"steps": 51}, "more than the 50 timesteps distilled"),
        ({"_class_name": "LCMScheduler"}, {"timesteps": [9, 99]}, "timesteps must fall"),
        ({"_class_name": "HeunDiscreteScheduler"}, {"steps": 4, "begin": 1}, "1 is odd"),
        ({"_class_name": "PNDMScheduler"}, {"steps": 3}, "takes four steps or more"),
        ({"_class_name": "UniPCMultistepScheduler"}, {"sigmas": [1.0]}, "with use_flow_sigmas"),
        (
            {"_class_name": "EulerDiscreteScheduler", "use_karras_sigmas": True},
            {"timesteps": [9, 8]},
            "exclude each other",
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver"},
            {"steps": 4},
            "needs final_sigmas_type sigma_min",
        ),
        (
            {"_class_name": "UniPCMultistepScheduler", "lower_order_final": False},
            {"steps": 4},
            "no finite step 4 of 4",
        ),
        (
            {"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}
            | {"timestep_spacing": "trailing"},
            {"steps": 4},
            "use prediction_type v_prediction",
        ),
    ],
)
def test_a_schedule_that_cannot_be_made_says_why(
    config: dict[str, Any], asks: dict[str, Any], message: str
) -> None:
    with pytest.raises(MlxconvError, match=message):
        make_schedule(scheduler_of(config), **asks)


def test_a_stochastic_step_without_noise_is_an_error() -> None:
    schedule = make_schedule(scheduler_of({"_class_name": "LCMScheduler"}), 4)
    ones = mx.ones(SHAPE)
    with pytest.raises(MlxconvError, match="pass noise"):
        step(mx.array(schedule.rows)[0], ones, ones, (), form=schedule.form)
