"""What a comparison of whole pipelines changes in diffusers, transformers and torch meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import diffusers
import torch
import transformers
import transformers.dynamic_module_utils as asking

from .replaced import replaced


@contextmanager
def without_remote_code() -> Iterator[None]:
    """Refuse code that a checkpoint carries, where transformers would ask on the terminal.

    A pipeline does not hand `trust_remote_code` on to its tokenizers; without a time to answer in,
    transformers refuses (5.x, `dynamic_module_utils.resolve_trust_remote_code`).
    """
    with replaced((asking, "TIME_OUT_REMOTE_CODE", 0)):
        yield


@contextmanager
def without_bars() -> Iterator[None]:
    """Loading without progress bars, of libraries that show some."""
    found = (diffusers.utils.logging, transformers.utils.logging)
    shown = [library for library in found if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


@contextmanager
def watched_steps(schedulers: Iterable[Any], seen: Callable[[Any], None]) -> Iterator[None]:
    """Inside, `seen` gets what each call of these schedulers' step returns. By class: some
    pipelines copy theirs (diffusers 0.42)."""

    def watching(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            seen(result)
            return result

        return watched

    with replaced(*((cls, "step", watching(cls.step)) for cls in schedulers)):
        yield


@contextmanager
def drawing(draw: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside, noise is drawn by `draw` in place of `torch.randn`, through which pipelines of
    diffusers 0.42 draw all of theirs."""
    with replaced((torch, "randn", draw)):
        yield
