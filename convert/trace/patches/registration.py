"""Modules built without memory: what their constructors register becomes fake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from .replaced import replaced


@contextlib.contextmanager
def fake_registration(
    parameter: Callable[[nn.Parameter | None], nn.Parameter | None],
    buffer: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Inside, what modules register as parameters and persistent buffers goes through these.

    torch 2.13's own hook for buffers does not say whether one is persistent.
    """
    register, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def fake_parameter(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(self, name, parameter(value))

    def fake_buffer(
        self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        made = buffer(tensor) if persistent and tensor is not None else tensor
        register_buffer(self, name, made, persistent)

    with replaced(
        (nn.Module, "register_parameter", fake_parameter),
        (nn.Module, "register_buffer", fake_buffer),
    ):
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype, as `from_pretrained(torch_dtype=...)` sets it while it constructs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
