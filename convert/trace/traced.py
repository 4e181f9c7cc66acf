"""What a trace gives: the graph, and what its placeholders, sizes and outputs stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from .repeats import Repeated


@dataclass(frozen=True)
class TracedParameter:
    """A tensor whose values come from the checkpoint: a parameter or a persistent buffer.

    ``dtype``: "compute" (as the program runs), "float32" (the class keeps it so), or a torch
    integer's name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TracedInput:
    """One leaf of a program's arguments, in the order of the graph's placeholders.

    ``path`` leads to it in the keyword arguments: ``("img_shapes", 0, 0, 1)``. A tensor has
    ``shape``, of integers and expressions over dims; a free Python int has ``shape`` None and
    ``value`` None; a constant has its ``value``, and so has a tensor that the trace takes to be
    full of one number; of bounds on its elements it has a dictionary. ``kinds``: see
    `kinds.py`.
    """

    placeholder: str
    path: tuple[str | int, ...]
    kind: str
    shape: tuple[int | str, ...] | None = None
    dtype: str | None = None
    stage: str = "step"
    value: Any = None
    kinds: str = "own"

    @property
    def name(self) -> str:
        """The path, dotted: ``img_shapes.0.0.1``."""
        return ".".join(str(part) for part in self.path)


@dataclass(frozen=True)
class Tap:
    """A module's output that the graph exposes: ``node`` is output ``index`` of ``path``."""

    path: str
    index: int
    node: str


@dataclass(frozen=True)
class Traced:
    """One program of one class, as torch sees it.

    ``placeholders`` maps a placeholder to the parameter or constant that it stands for.
    ``symbols`` maps the graph's size symbols to recipe expressions. ``fixed`` holds the dims
    whose value is built into the graph, and those asked for that decide what it computes. ``tied``
    maps further names of a parameter to its first.
    """

    class_name: str
    program: str
    exported: ExportedProgram
    config: dict[str, Any]
    parameters: dict[str, TracedParameter]
    constants: dict[str, torch.Tensor]
    placeholders: dict[str, str]
    inputs: tuple[TracedInput, ...]
    outputs: tuple[str, ...]
    symbols: dict[str, str]
    fixed: dict[str, int]
    taps: tuple[Tap, ...] = field(default=())
    repeated: dict[str, Repeated] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16  # that stands for the compute dtype in the graph
    tied: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # what the method takes by position, in its order
    assumptions: tuple[str, ...] = ()  # on the sizes of inputs: see `runtime/program/program.py`
