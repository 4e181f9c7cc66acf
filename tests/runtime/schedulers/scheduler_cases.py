"""What each scheduler is compared on: its options, and what callers ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STEPS = (4, 8, 20, 50)


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
    yield Case(
        euler, {"shift": 2.0}, lambda steps: {"timesteps": list(range(900, 900 - steps, -1))}
    )
    cogview = {"use_dynamic_shifting": True, "time_shift_type": "linear", "shift": 1.0}
    yield Case(
        euler,
        cogview,
        lambda steps: {
            "mu": 2.2,
            "timesteps": np.linspace(1000, 1, steps).astype(int).tolist(),
            "sigmas": (np.linspace(1000, 1, steps) / 1000).tolist(),
        },
    )
    yield Case(euler, {"shift": 3.0}, begin=2)
    yield Case("FlowMatchLCMScheduler", {"shift": 3.0})
    heun = "FlowMatchHeunDiscreteScheduler"
    yield Case(heun)
    yield Case(heun, {"shift": 3.0})
    yield Case(heun, {"shift": 3.0}, begin=4)
    ancestral = "LTXEulerAncestralRFScheduler"
    yield Case(ancestral)
    yield Case(ancestral, {"eta": 0.5, "s_noise": 0.9})
    yield Case(ancestral, {"eta": 0.0})
    yield Case(ancestral, begin=1)


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
    # In float32 diffusers itself is 1.4e-5 off on an AMD EPYC, 8e-6 on an Intel Xeon.
    third = _sd(predict_x0=False, solver_order=3, final_sigmas_type="sigma_min")
    yield Case(name, third, exact=True)
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
    yield Case(name, {**flow, "use_karras_sigmas": True})
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
