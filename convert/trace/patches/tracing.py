"""All that is changed in torch and in the traced class's library while a module is traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .conditions import answered
from .lean import lean_nodes, quiet, without_collecting
from .posteriors import posteriors
from .remembered_sizes import remembered_sizes
from .selections import selections
from .symbolic_builtins import symbolic_builtins


@contextmanager
def patched(module: nn.Module, truths: Sequence[bool]) -> Iterator[None]:
    """Inside, the module can be traced with free sizes; truths: see `answered`."""
    with (
        without_collecting(),
        posteriors(module),
        symbolic_builtins(module),
        remembered_sizes(),
        selections(),
        quiet(),
        lean_nodes(),
        answered(truths),
        torch.no_grad(),
    ):
        yield
