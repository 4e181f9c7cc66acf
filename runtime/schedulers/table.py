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
from .flow_match import flow_match_ancestral, flow_match_euler, flow_match_heun, flow_match_lcm
from .options import (
    BETA,
    BETAS,
    CHOICES,
    CLIP,
    COGVIDEOX,
    DISTILLED,
    EDM,
    EDM_CHOICES,
    FIXED,
    FLOW,
    FLOW_SIGMAS,
    RISING,
    SIGMAS,
    THRESHOLD,
    WITH_FLOW,
    ZERO_SNR,
)
from .pndm import pndm
from .request import Options, Request
from .schedule import Schedule
from .unipc import unipc


@dataclass(frozen=True)
class Row:
    """families: the checkpoints it fits, of `beta`, `flow`, `trig`, `cogvideox` and `edm`.

    choices: an option's supported values. accepts: parts of a `Request` beside steps and begin.
    unread: options that diffusers' class has and does not read. order: model calls a step.
    """

    build: Callable[[Options, Request], Schedule]
    families: tuple[str, ...]
    options: Mapping[str, Any]
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    accepts: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    order: int = 1


SCHEDULERS: dict[str, Row] = {
    "FlowMatchEulerDiscreteScheduler": Row(
        flow_match_euler,
        ("flow",),
        {**FLOW, "stochastic_sampling": False},
        CHOICES,
        frozenset({"mu", "sigmas", "timesteps"}),
    ),
    "FlowMatchLCMScheduler": Row(
        flow_match_lcm,
        ("flow",),
        {**FLOW, "scale_factors": None, "upscale_mode": "bicubic"},
        {**CHOICES, "scale_factors": (None,)},
        frozenset({"mu", "sigmas", "timesteps"}),
        frozenset({"upscale_mode"}),
    ),
    # Of these two diffusers' classes read few options, so that its pipelines cannot use them with
    # most checkpoints; here they take the levels of FlowMatchEuler.
    "FlowMatchHeunDiscreteScheduler": Row(
        flow_match_heun, ("flow",), RISING, CHOICES, frozenset({"mu", "sigmas"}), order=2
    ),
    "LTXEulerAncestralRFScheduler": Row(
        flow_match_ancestral,
        ("flow",),
        {**RISING, "eta": 1.0, "s_noise": 1.0},
        CHOICES,
        frozenset({"mu", "sigmas"}),
    ),
    "EulerDiscreteScheduler": Row(
        euler,
        ("beta",),
        {
            **BETA,
            **ZERO_SNR,
            **SIGMAS,
            "interpolation_type": "linear",
            "timestep_spacing": "linspace",
            "timestep_type": "discrete",
            "final_sigmas_type": "zero",
        },
        {
            **CHOICES,
            "prediction_type": ("epsilon", "sample", "original_sample", "v_prediction"),
            "interpolation_type": ("linear", "log_linear"),
            "timestep_type": ("discrete", "continuous"),
        },
        frozenset({"sigmas", "timesteps"}),
    ),
    "EulerAncestralDiscreteScheduler": Row(
        euler_ancestral,
        ("beta",),
        {**BETA, **ZERO_SNR, "timestep_spacing": "linspace"},
        {**CHOICES, "prediction_type": ("epsilon", "v_prediction")},
    ),
    "HeunDiscreteScheduler": Row(
        heun,
        ("beta",),
        {
            **BETA,
            **SIGMAS,
            **CLIP,
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "timestep_spacing": "linspace",
        },
        {**CHOICES, "beta_schedule": (*BETAS, "exp")},
        frozenset({"timesteps"}),
        order=2,
    ),
    "DDIMScheduler": Row(
        ddim,
        ("beta",),
        {
            **BETA,
            **ZERO_SNR,
            **THRESHOLD,
            **CLIP,
            "clip_sample": True,
            "set_alpha_to_one": True,
            "timestep_spacing": "leading",
        },
        CHOICES,
        frozenset({"eta"}),
    ),
    "DDPMScheduler": Row(
        ddpm,
        ("beta",),
        {
            **BETA,
            **ZERO_SNR,
            **THRESHOLD,
            **CLIP,
            "clip_sample": True,
            "variance_type": "fixed_small",
            "timestep_spacing": "leading",
        },
        {
            **CHOICES,
            "beta_schedule": (*BETAS, "laplace", "sigmoid"),
            "variance_type": FIXED,
        },
        frozenset({"timesteps"}),
    ),
    "PNDMScheduler": Row(
        pndm,
        ("beta",),
        {
            **BETA,
            "skip_prk_steps": False,
            "set_alpha_to_one": False,
            "timestep_spacing": "leading",
        },
        {**CHOICES, "prediction_type": ("epsilon", "v_prediction")},
    ),
    "DPMSolverMultistepScheduler": Row(
        dpmsolver,
        ("beta", "flow"),
        {
            **BETA,
            **ZERO_SNR,
            **THRESHOLD,
            **SIGMAS,
            **FLOW_SIGMAS,
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "euler_at_final": False,
            "use_lu_lambdas": False,
            "lambda_min_clipped": -float("inf"),
            "variance_type": None,
            "timestep_spacing": "linspace",
        },
        {
            **WITH_FLOW,
            "algorithm_type": (
                "dpmsolver++",
                "sde-dpmsolver++",
                "dpmsolver",
                "sde-dpmsolver",
                "deis",
            ),
            "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),
            "variance_type": (None, *FIXED, "fixed_large_log"),
            "time_shift_type": ("exponential",),
        },
        frozenset({"mu", "timesteps"}),
    ),
    "UniPCMultistepScheduler": Row(
        unipc,
        ("beta", "flow"),
        {
            **BETA,
            **ZERO_SNR,
            **THRESHOLD,
            **SIGMAS,
            **FLOW_SIGMAS,
            "predict_x0": True,
            "solver_type": "bh2",
            "disable_corrector": (),
            "solver_p": None,
            "timestep_spacing": "linspace",
            "shift_terminal": None,
        },
        {
            **WITH_FLOW,
            "solver_type": ("bh1", "bh2", "midpoint", "heun", "logrho"),
            "solver_p": (None,),
        },
        frozenset({"mu", "sigmas"}),
    ),
    "LCMScheduler": Row(
        lcm,
        ("beta",),
        DISTILLED,
        CHOICES,
        frozenset({"timesteps", "strength"}),
        frozenset({"timestep_spacing", "steps_offset", "set_alpha_to_one"}),
    ),
    "TCDScheduler": Row(
        tcd,
        ("beta",),
        DISTILLED,
        CHOICES,
        frozenset({"timesteps", "strength", "eta"}),
        frozenset({"timestep_spacing", "steps_offset", "set_alpha_to_one", "timestep_scaling"})
        | frozenset({*THRESHOLD, *CLIP}),
    ),
    "CogVideoXDDIMScheduler": Row(
        cogvideox_ddim,
        ("cogvideox",),
        COGVIDEOX,
        CHOICES,
        unread=frozenset({*CLIP, "sample_max_value"}),
    ),
    "CogVideoXDPMScheduler": Row(
        cogvideox_dpm,
        ("cogvideox",),
        COGVIDEOX,
        CHOICES,
        unread=frozenset({*CLIP, "sample_max_value"}),
    ),
    "EDMEulerScheduler": Row(edm_euler, ("edm",), EDM, EDM_CHOICES),
    "EDMDPMSolverMultistepScheduler": Row(
        edm_dpmsolver,
        ("edm",),
        {
            **EDM,
            **THRESHOLD,
            "solver_order": 2,
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "lower_order_final": True,
            "euler_at_final": False,
        },
        {
            **EDM_CHOICES,
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
