"""What torch does beside tracing, switched off: it costs time, or prints what an error says."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from .replaced import replaced


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, and no logged tracebacks of operations that do not fit: the error that is raised
    says it in a line (torch 2.13)."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with warnings.catch_warnings(), replaced((logger, "disabled", True)):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def lean_nodes() -> Iterator[None]:
    """torch notes of a node what is read here, remembers no operation, and writes no Python for a
    graph that nobody calls.

    A fifth of the time goes into Python's stack and the memory layout of each value, and into
    looking up operations that differ in their symbolic sizes (torch 2.13).
    """
    with (
        replaced(
            (torch.fx.config, "do_not_emit_stack_traces", True),
            (proxy_tensor, "_extract_tensor_metadata", lambda value: None),
        ),
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        _use_lazy_graph_module(True),
    ):
        yield


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection, which costs a tenth of a trace's time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
