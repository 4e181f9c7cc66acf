"""Schedulers: one linear step, and a table of what its coefficients are."""

from .config import Scheduler, fitting, read_scheduler, scheduler_of, with_class
from .making import begin_of, make_schedule, shift_for
from .schedule import Schedule, denoised, initial_state, model_input, step
from .sigmas import calculate_shift

__all__ = [
    "Schedule",
    "Scheduler",
    "begin_of",
    "calculate_shift",
    "denoised",
    "fitting",
    "initial_state",
    "make_schedule",
    "model_input",
    "read_scheduler",
    "scheduler_of",
    "shift_for",
    "step",
    "with_class",
]
