"""The schedulers: diffusers' class name -> the function that makes its schedule.

A function's signature lists the options (`options_of`), with the defaults of the constructors of
diffusers 0.42.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .consistency import lcm, scm, tcd
from .ddim import cogvideox_ddim, cogvideox_dpm, ddim, ddpm
from .dpmsolver import dpmsolver
from .edm import edm_dpmsolver, edm_euler
from .euler import euler, euler_ancestral, heun
from .flow_match import flow_match_ancestral, flow_match_euler, flow_match_heun, flow_match_lcm
from .options import Build, Option, options_of
from .pndm import pndm
from .unipc import unipc


@dataclass(frozen=True)
class Row:
    """families: the checkpoints it fits, of `beta`, `flow`, `trig`, `cogvideox` and `edm`.

    accepts: parts of a `Request` beside steps and begin. unread: options that diffusers' class has
    and does not read, with their defaults. order: model calls a step.
    """

    build: Build
    families: tuple[str, ...]
    accepts: tuple[str, ...] = ()
    unread: Mapping[str, Any] = field(default_factory=dict)
    order: int = 1

    @cached_property
    def reads(self) -> Mapping[str, Option]:
        """The options that the function takes."""
        return options_of(self.build)

    @cached_property
    def options(self) -> dict[str, Any]:
        """All options that diffusers' class has, with their defaults."""
        return {**{name: option.default for name, option in self.reads.items()}, **self.unread}


_CLIP = {"clip_sample": False, "clip_sample_range": 1.0}
_COGVIDEOX = {**_CLIP, "clip_sample": True, "sample_max_value": 1.0}
_LCM = {"timestep_spacing": "leading", "steps_offset": 0, "set_alpha_to_one": True}
_THRESHOLD = {
    "thresholding": False,
    "dynamic_thresholding_ratio": 0.995,
    "sample_max_value": 1.0,
}
_TCD = {**_LCM, **_CLIP, **_THRESHOLD, "timestep_scaling": 10.0}

SCHEDULERS: dict[str, Row] = {
    "FlowMatchEulerDiscreteScheduler": Row(
        flow_match_euler, ("flow",), ("mu", "sigmas", "timesteps")
    ),
    "FlowMatchLCMScheduler": Row(
        flow_match_lcm, ("flow",), ("mu", "sigmas", "timesteps"), {"upscale_mode": "bicubic"}
    ),
    # Of these two diffusers' classes read few options, so that its pipelines cannot use them with
    # most checkpoints; here they take the levels of FlowMatchEuler.
    "FlowMatchHeunDiscreteScheduler": Row(flow_match_heun, ("flow",), ("mu", "sigmas"), order=2),
    "LTXEulerAncestralRFScheduler": Row(flow_match_ancestral, ("flow",), ("mu", "sigmas")),
    "EulerDiscreteScheduler": Row(euler, ("beta",), ("sigmas", "timesteps")),
    "EulerAncestralDiscreteScheduler": Row(euler_ancestral, ("beta",)),
    "HeunDiscreteScheduler": Row(heun, ("beta",), ("timesteps",), order=2),
    "DDIMScheduler": Row(ddim, ("beta",), ("eta",)),
    "DDPMScheduler": Row(ddpm, ("beta",), ("timesteps",)),
    "PNDMScheduler": Row(pndm, ("beta",)),
    "DPMSolverMultistepScheduler": Row(dpmsolver, ("beta", "flow"), ("mu", "timesteps")),
    "UniPCMultistepScheduler": Row(unipc, ("beta", "flow"), ("mu", "sigmas")),
    "LCMScheduler": Row(lcm, ("beta",), ("timesteps", "strength"), _LCM),
    "TCDScheduler": Row(tcd, ("beta",), ("timesteps", "strength", "eta"), _TCD),
    "CogVideoXDDIMScheduler": Row(cogvideox_ddim, ("cogvideox",), unread=_COGVIDEOX),
    "CogVideoXDPMScheduler": Row(cogvideox_dpm, ("cogvideox",), unread=_COGVIDEOX),
    "EDMEulerScheduler": Row(edm_euler, ("edm",)),
    "EDMDPMSolverMultistepScheduler": Row(edm_dpmsolver, ("edm",)),
    "SCMScheduler": Row(scm, ("trig",), ("timesteps",)),
}
# Options of classes that are not supported, which diffusers drops when one of these is put in
# their place.
FOREIGN = frozenset({"noise_sampler_seed", "corrector_order"} | {"predictor_order", "tau_func"})
_FAMILY_PARTS = ("FlowMatch", "LTX", "RF", "EDM", "CogVideoX")


def short(name: str, parts: tuple[str, ...] = ()) -> str:
    """A class's name in lower case, without `Scheduler`, `Discrete`, `Multistep` and `parts`."""
    for part in ("Scheduler", "Discrete", "Multistep", *parts):
        name = name.replace(part, "")
    return name.lower()


def class_for(solver: str, family: str) -> str | None:
    """The class for such a checkpoint whose name comes down to the solver's."""
    fitting = (name for name, row in SCHEDULERS.items() if family in row.families)
    return next((name for name in fitting if short(name, _FAMILY_PARTS) == solver), None)
