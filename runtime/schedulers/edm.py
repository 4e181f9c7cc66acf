"""EDM: a preconditioned network over levels of its own, without betas.

arXiv 2206.00364, table 1; diffusers 0.42.1 EDMEulerScheduler and EDMDPMSolverMultistepScheduler
(Playground 2.5, Cosmos 1).
"""

from __future__ import annotations

import numpy as np

from ..errors import MlxconvError
from .dpmsolver import solved
from .multistep import Levels
from .request import Options, Request
from .schedule import Array, Path, Schedule, assemble, basis
from .sigmas import exponential, karras


def edm_euler(options: Options, request: Request) -> Schedule:
    path = _path(options, request)
    x, _, _, clean, _ = basis(0)
    pairs = zip(path.sigmas, path.sigmas[1:])
    return assemble(path, [[x + (after - s) / s * (x - clean)] for s, after in pairs])


def edm_dpmsolver(options: Options, request: Request) -> Schedule:
    """DPM-Solver++ where latents are `clean + sigma * noise`."""
    kind = options["algorithm_type"]
    if kind == "sde-dpmsolver++" and options["solver_order"] == 3:
        raise MlxconvError("sde-dpmsolver++ of EDM has solver_order 1 or 2; found 3")
    sigmas = _sigmas(options, request)
    levels = Levels(sigmas, np.ones_like(sigmas), sigmas, -np.log(sigmas))
    return solved(kind, options, levels, _path(options, request), request.begin)


def _sigmas(options: Options, request: Request) -> Array:
    """Levels (steps + 1,), rounded to float32 as diffusers keeps them."""
    largest, smallest = options["sigma_max"], options["sigma_min"]
    if options["sigma_schedule"] == "karras":
        sigmas = karras(largest, smallest, request.steps, options["rho"])
    else:
        sigmas = exponential(largest, smallest, request.steps)
    last = smallest if options["final_sigmas_type"] == "sigma_min" else 0.0
    return np.append(sigmas, last).astype(np.float32).astype(np.float64)


def _path(options: Options, request: Request) -> Path:
    """The model is called with log(sigma) / 4, and its output is preconditioned."""
    sigmas, spread = _sigmas(options, request)[request.begin :], options["sigma_data"]
    at = sigmas[:-1]
    norm = np.sqrt(at**2 + spread**2)
    sign = -1 if options["prediction_type"] == "v_prediction" else 1
    return Path(
        np.float32(0.25) * np.log(at.astype(np.float32)),
        sigmas,
        (1.0, sigmas[0]),
        (spread**2 / norm**2, sign * at * spread / norm),
        initial_noise=np.sqrt(options["sigma_max"] ** 2 + 1),
        input_scale=1 / norm,
    )
