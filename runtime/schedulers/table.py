"""The schedulers: diffusers' class name -> its options, their values, and what makes its schedule.

Defaults are those of the constructors of diffusers 0.42.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .cogvideox import cogvideox_ddim, cogvideox_dpm
from .consistency import lcm, scm, tcd
from .ddim import ddim, ddpm
from .dpmsolver import dpmsolver
from .edm import edm_dpmsolver, edm_euler
from .euler import euler, euler_ancestral, heun
from .flow_match import flow_match_euler, flow_match_heun, flow_match_lcm
from .pndm import pndm
from .request import Options, Request
from .schedule import Schedule
from .unipc import unipc


@dataclass(frozen=True)
class Row:
    """families: the checkpoints it fits, of `beta`, `flow`, `trig`,
    `cogvideox`, `edm`. accepts: parts of a `Request`
    beside steps and begin. choices: an option's supported values. unread: options that diffusers'
    class has and does not read. order: model calls a step."""

    build: Callable[[Options, Request], Schedule]
    families: tuple[str, ...]
    options: Mapping[str, Any]
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    accepts: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    order: int = 1


_BETA = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "prediction_type": "epsilon",
    "steps_offset": 0,
}
_ZERO_SNR = {"rescale_betas_zero_snr": False}
_THRESHOLD = {
    "thresholding": False,
    "dynamic_thresholding_ratio": 0.995,
    "sample_max_value": 1.0,
}
_CLIP = {"clip_sample": False, "clip_sample_range": 1.0}
_SIGMAS = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "sigma_min": None,
    "sigma_max": None,
}
_FLOW = {
    **_SIGMAS,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "invert_sigmas": False,
    "shift_terminal": None,
    "time_shift_type": "exponential",
}
_COGVIDEOX = {
    **_BETA,
    **_ZERO_SNR,
    **_CLIP,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": True,
    "sample_max_value": 1.0,
    "set_alpha_to_one": True,
    "timestep_spacing": "leading",
    "snr_shift_scale": 3.0,
}
_EDM = {
    "num_train_timesteps": 1000,
    "sigma_min": 0.002,
    "sigma_max": 80.0,
    "sigma_data": 0.5,
    "sigma_schedule": "karras",
    "rho": 7.0,
    "prediction_type": "epsilon",
    "final_sigmas_type": "zero",
}
_EDM_CHOICES = {
    "sigma_schedule": ("karras", "exponential"),
    "prediction_type": ("epsilon", "v_prediction"),
    "final_sigmas_type": ("zero", "sigma_min"),
}
_FLOW_SIGMAS = {
    "use_flow_sigmas": False,
    "flow_shift": 1.0,
    "use_dynamic_shifting": False,
    "time_shift_type": "exponential",
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "solver_order": 2,
}
_DISTILLED = {
    **_BETA,
    **_ZERO_SNR,
    **_THRESHOLD,
    **_CLIP,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "original_inference_steps": 50,
    "set_alpha_to_one": True,
    "timestep_spacing": "leading",
    "timestep_scaling": 10.0,
}
_BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")
_FIXED = ("fixed_small", "fixed_small_log", "fixed_large")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "beta_schedule": _BETAS,
    "prediction_type": ("epsilon", "sample", "v_prediction"),
    "timestep_spacing": ("linspace", "leading", "trailing"),
    "final_sigmas_type": ("zero", "sigma_min"),
    "time_shift_type": ("exponential", "linear"),
    "solver_order": (1, 2, 3),
}
_WITH_FLOW = {
    **_CHOICES,
    "prediction_type": ("epsilon", "sample", "v_prediction", "flow_prediction"),
}

SCHEDULERS: dict[str, Row] = {
    "FlowMatchEulerDiscreteScheduler": Row(
        flow_match_euler,
        ("flow",),
        {**_FLOW, "stochastic_sampling": False},
        _CHOICES,
        frozenset({"mu", "sigmas", "timesteps"}),
    ),
    "FlowMatchLCMScheduler": Row(
        flow_match_lcm,
        ("flow",),
        {**_FLOW, "scale_factors": None, "upscale_mode": "bicubic"},
        {**_CHOICES, "scale_factors": (None,)},
        frozenset({"mu", "sigmas", "timesteps"}),
        frozenset({"upscale_mode"}),
    ),
    "FlowMatchHeunDiscreteScheduler": Row(
        flow_match_heun, ("flow",), {"num_train_timesteps": 1000, "shift": 1.0}, order=2
    ),
    "EulerDiscreteScheduler": Row(
        euler,
        ("beta",),
        {
            **_BETA,
            **_ZERO_SNR,
            **_SIGMAS,
            "interpolation_type": "linear",
            "timestep_spacing": "linspace",
            "timestep_type": "discrete",
            "final_sigmas_type": "zero",
        },
        {
            **_CHOICES,
            "prediction_type": ("epsilon", "sample", "original_sample", "v_prediction"),
            "interpolation_type": ("linear", "log_linear"),
            "timestep_type": ("discrete", "continuous"),
        },
        frozenset({"sigmas", "timesteps"}),
    ),
    "EulerAncestralDiscreteScheduler": Row(
        euler_ancestral,
        ("beta",),
        {**_BETA, **_ZERO_SNR, "timestep_spacing": "linspace"},
        {**_CHOICES, "prediction_type": ("epsilon", "v_prediction")},
    ),
    "HeunDiscreteScheduler": Row(
        heun,
        ("beta",),
        {
            **_BETA,
            **_SIGMAS,
            **_CLIP,
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "timestep_spacing": "linspace",
        },
        {**_CHOICES, "beta_schedule": (*_BETAS, "exp")},
        frozenset({"timesteps"}),
        order=2,
    ),
    "DDIMScheduler": Row(
        ddim,
        ("beta",),
        {
            **_BETA,
            **_ZERO_SNR,
            **_THRESHOLD,
            **_CLIP,
            "clip_sample": True,
            "set_alpha_to_one": True,
            "timestep_spacing": "leading",
        },
        _CHOICES,
        frozenset({"eta"}),
    ),
    "DDPMScheduler": Row(
        ddpm,
        ("beta",),
        {
            **_BETA,
            **_ZERO_SNR,
            **_THRESHOLD,
            **_CLIP,
            "clip_sample": True,
            "variance_type": "fixed_small",
            "timestep_spacing": "leading",
        },
        {
            **_CHOICES,
            "beta_schedule": (*_BETAS, "laplace", "sigmoid"),
            "variance_type": _FIXED,
        },
        frozenset({"timesteps"}),
    ),
    "PNDMScheduler": Row(
        pndm,
        ("beta",),
        {
            **_BETA,
            "skip_prk_steps": False,
            "set_alpha_to_one": False,
            "timestep_spacing": "leading",
        },
        {**_CHOICES, "prediction_type": ("epsilon", "v_prediction")},
    ),
    "DPMSolverMultistepScheduler": Row(
        dpmsolver,
        ("beta", "flow"),
        {
            **_BETA,
            **_ZERO_SNR,
            **_THRESHOLD,
            **_SIGMAS,
            **_FLOW_SIGMAS,
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "euler_at_final": False,
            "use_lu_lambdas": False,
            "lambda_min_clipped": -float("inf"),
            "variance_type": None,
            "timestep_spacing": "linspace",
        },
        {
            **_WITH_FLOW,
            "algorithm_type": (
                "dpmsolver++",
                "sde-dpmsolver++",
                "dpmsolver",
                "sde-dpmsolver",
                "deis",
            ),
            "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),
            "variance_type": (None, *_FIXED, "fixed_large_log"),
            "time_shift_type": ("exponential",),
        },
        frozenset({"mu", "timesteps"}),
    ),
    "UniPCMultistepScheduler": Row(
        unipc,
        ("beta", "flow"),
        {
            **_BETA,
            **_ZERO_SNR,
            **_THRESHOLD,
            **_SIGMAS,
            **_FLOW_SIGMAS,
            "predict_x0": True,
            "solver_type": "bh2",
            "disable_corrector": (),
            "solver_p": None,
            "timestep_spacing": "linspace",
            "shift_terminal": None,
        },
        {
            **_WITH_FLOW,
            "solver_type": ("bh1", "bh2", "midpoint", "heun", "logrho"),
            "solver_p": (None,),
        },
        frozenset({"mu", "sigmas"}),
    ),
    "LCMScheduler": Row(
        lcm,
        ("beta",),
        _DISTILLED,
        _CHOICES,
        frozenset({"timesteps", "strength"}),
        frozenset({"timestep_spacing", "steps_offset", "set_alpha_to_one"}),
    ),
    "TCDScheduler": Row(
        tcd,
        ("beta",),
        _DISTILLED,
        _CHOICES,
        frozenset({"timesteps", "strength", "eta"}),
        frozenset({"timestep_spacing", "steps_offset", "set_alpha_to_one", "timestep_scaling"})
        | frozenset({*_THRESHOLD, *_CLIP}),
    ),
    "CogVideoXDDIMScheduler": Row(
        cogvideox_ddim,
        ("cogvideox",),
        _COGVIDEOX,
        _CHOICES,
        unread=frozenset({*_CLIP, "sample_max_value"}),
    ),
    "CogVideoXDPMScheduler": Row(
        cogvideox_dpm,
        ("cogvideox",),
        _COGVIDEOX,
        _CHOICES,
        unread=frozenset({*_CLIP, "sample_max_value"}),
    ),
    "EDMEulerScheduler": Row(edm_euler, ("edm",), _EDM, _EDM_CHOICES),
    "EDMDPMSolverMultistepScheduler": Row(
        edm_dpmsolver,
        ("edm",),
        {
            **_EDM,
            **_THRESHOLD,
            "solver_order": 2,
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "lower_order_final": True,
            "euler_at_final": False,
        },
        {
            **_EDM_CHOICES,
            "solver_order": (1, 2, 3),
            "algorithm_type": ("dpmsolver++", "sde-dpmsolver++"),
            "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),
        },
    ),
    "SCMScheduler": Row(
        scm,
        ("trig",),
        {"num_train_timesteps": 1000, "prediction_type": "trigflow", "sigma_data": 0.5},
        {"prediction_type": ("trigflow",)},
        frozenset({"timesteps"}),
    ),
}

# Options of classes that are not supported, which diffusers drops when one of these is put in
# their place.
FOREIGN = frozenset({"noise_sampler_seed", "corrector_order"} | {"predictor_order", "tau_func"})
