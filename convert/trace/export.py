"""A torch module's forward pass as one functional ATen graph, without its weights.

``trace`` exports one program of a recipe, with every free dim symbolic, every module's output
readable through an ``mlxconv.tap`` node, and autocast regions and in-place operations gone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from mlxconv.runtime.errors import MlxconvError

from ..recipe.recipe import Recipe
from .decisions import Decisions
from .functionalize import functional
from .job import Job, dynamic_shapes, job_of, multiples_of
from .patches.multiples import known_multiples
from .patches.tracing import patched
from .repeats import Unrepeatable, traced_once
from .results import traced
from .taps import taps
from .traced import Traced


def trace(
    cls: type[nn.Module],
    config: Mapping[str, Any],
    recipe: Recipe,
    program: str = "forward",
    *,
    dims: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] = lambda name: True,
) -> Traced:
    """Export one program of ``cls`` at the recipe's trace sizes (or ``dims``), free dims symbolic.

    ``dtype`` stands for the compute dtype: bf16, or fp16 where the class itself rounds to bf16.
    ``keep`` says which ATen ops stay; a graph with others is decomposed by torch.

    Raises MlxconvError where torch cannot export: it names the class, torch's reason and the
    source line.
    """
    apart: set[str] | None = set()  # blocks that have to be traced each, None for all
    while True:
        job = job_of(cls, config, recipe, program, dims, dtype)
        decided = Decisions(job.entry.alike)
        with (
            traced_once(job.module, apart) as stood_in,
            taps(job.module),
            patched(job.module, job.entry.truths),
            job.kinds,
            decided.watched(),
        ):
            try:
                return traced(job, functional(_export(job), keep), decided)
            except MlxconvError:
                raise
            except Unrepeatable as found:
                apart = {*(apart or ()), str(found)}
            except Exception as error:
                if not stood_in:
                    raise _refused(cls, program, error) from error
                apart = None  # blocks may need each other: once more, as they are


def _export(job: Job) -> ExportedProgram:
    shapes = dynamic_shapes(job)
    with known_multiples(multiples_of(job)):
        return torch.export.export(job.module, (), job.kwargs, dynamic_shapes=shapes, strict=False)


def _refused(cls: type[nn.Module], program: str, error: Exception) -> MlxconvError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return MlxconvError(
        f"{cls.__name__}.{program} cannot be traced: {reason} (at {_where(error)}). If a size or a "
        "value of an input decides what the class does, declare that dim fixed in its recipe, or "
        "pass another input (no mask, trimmed embeddings)"
    )


def _where(error: BaseException) -> str:
    """The innermost line that is neither torch's nor ours: the traced class's own source."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parents[2])
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(here)]
    if not own:
        return "an unknown line"
    return f"{own[-1].filename.split('site-packages/')[-1]}:{own[-1].lineno}"
