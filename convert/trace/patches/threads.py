"""How many threads torch computes with (2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_SMALL = 50_000_000  # parameters; below this torch is fastest on one thread


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: short computations are not worth sharing, and waiting threads spin."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def threads_for(parameters: int) -> Iterator[None]:
    """torch on one thread where a model has few parameters, else as it is set."""
    if parameters >= _SMALL:
        yield
        return
    with one_thread():
        yield
