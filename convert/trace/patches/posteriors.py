"""What encoders return in place of a tensor: distributions, to torch the tensors that make them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@contextmanager
def posteriors(module: nn.Module) -> Iterator[None]:
    """Inside, torch sees through the distributions that the module's source file knows.

    Each is what its constructor took: the parameters, or the mean and the logarithm of the
    deviation. torch 2.13 has no public way to take a registration back; only the Python registry is
    used, which is the one that `torch.export` reads.
    """
    found = [c for c in _posteriors(type(module).__module__) if c not in pytree.SUPPORTED_NODES]
    try:
        for cls in found:
            name = f"mlxconv.{cls.__module__}.{cls.__qualname__}"
            pytree._private_register_pytree_node(cls, _parts, _whole, serialized_type_name=name)
        yield
    finally:
        for cls in found:
            pytree._deregister_pytree_node(cls)


@functools.cache
def _posteriors(module: str) -> tuple[type, ...]:
    return tuple({cls: None for cls in vars(sys.modules[module]).values() if _is_posterior(cls)})


def _is_posterior(cls: Any) -> bool:
    return isinstance(cls, type) and hasattr(cls, "mode") and hasattr(cls, "sample")


def _parts(posterior: Any) -> tuple[list[torch.Tensor], type]:
    names = inspect.signature(type(posterior)).parameters
    found = (getattr(posterior, name, None) for name in names)
    return [value for value in found if isinstance(value, torch.Tensor)], type(posterior)


def _whole(parts: Any, cls: type) -> Any:
    return cls(*parts)
