"""EDM: a preconditioned network over levels of its own, without betas.

arXiv 2206.00364, table 1; diffusers 0.42.1 EDMEulerScheduler and EDMDPMSolverMultistepScheduler
(Playground 2.5, Cosmos 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import MlxconvError
from .dpmsolver import Levels, Solver, solved
from .predictions import NoiseOrV, Threshold
from .schedule import Array, Path, Request, Schedule, assemble, basis
from .sigmas import FinalSigma, exponential, karras


@dataclass(frozen=True)
class Edm:
    num_train_timesteps: int = 1000
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float = 0.5
    sigma_schedule: Literal["karras", "exponential"] = "karras"
    rho: float = 7.0
    prediction_type: NoiseOrV = "epsilon"
    final_sigmas_type: FinalSigma = "zero"

    def levels(self, steps: int) -> Array:
        """Levels (steps + 1,), rounded to float32 as diffusers keeps them."""
        if self.sigma_schedule == "karras":
            sigmas = karras(self.sigma_max, self.sigma_min, steps, self.rho)
        else:
            sigmas = exponential(self.sigma_max, self.sigma_min, steps)
        last = self.sigma_min if self.final_sigmas_type == "sigma_min" else 0.0
        return np.append(sigmas, last).astype(np.float32).astype(np.float64)

    def path(self, request: Request) -> Path:
        """The model is called with log(sigma) / 4, and its output is preconditioned."""
        sigmas, spread = self.levels(request.steps)[request.begin :], self.sigma_data
        at = sigmas[:-1]
        norm = np.sqrt(at**2 + spread**2)
        sign = -1 if self.prediction_type == "v_prediction" else 1
        return Path(
            np.float32(0.25) * np.log(at.astype(np.float32)),
            sigmas,
            (1.0, sigmas[0]),
            (spread**2 / norm**2, sign * at * spread / norm),
            initial_noise=np.sqrt(self.sigma_max**2 + 1),
            input_scale=1 / norm,
        )


def edm_euler(request: Request, *, edm: Edm) -> Schedule:
    path = edm.path(request)
    x, _, _, clean, _ = basis(0)
    pairs = zip(path.sigmas, path.sigmas[1:])
    return assemble(path, [[x + (after - s) / s * (x - clean)] for s, after in pairs])


def edm_dpmsolver(
    request: Request,
    *,
    edm: Edm,
    solver: Solver,
    limits: Threshold,
    algorithm_type: Literal["dpmsolver++", "sde-dpmsolver++"] = "dpmsolver++",
) -> Schedule:
    """DPM-Solver++ where latents are `clean + sigma * noise`."""
    if algorithm_type == "sde-dpmsolver++" and solver.solver_order == 3:
        raise MlxconvError("sde-dpmsolver++ of EDM has solver_order 1 or 2; found 3")
    sigmas = edm.levels(request.steps)
    levels = Levels(sigmas, np.ones_like(sigmas), sigmas, -np.log(sigmas))
    at = basis(solver.solver_order - 1)
    quantities = [at.denoised] * request.steps
    updates = solved(algorithm_type, solver, levels, quantities, request.begin)
    stochastic = algorithm_type.startswith("sde")
    return assemble(edm.path(request), updates, draws=stochastic, limit=limits.limit())
