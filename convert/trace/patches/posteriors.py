"""What encoders return in place of a tensor: distributions, to torch the tensors that make them."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def register_posteriors(module: nn.Module) -> None:
    """Let torch see through the distributions that the module's source file knows.

    Each is what its constructor took: the parameters, or the mean and the logarithm of the
    deviation.
    """
    for cls in list(vars(sys.modules[type(module).__module__]).values()):
        if _is_posterior(cls) and cls not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(cls, _parts, _whole)


def _is_posterior(cls: Any) -> bool:
    return isinstance(cls, type) and hasattr(cls, "mode") and hasattr(cls, "sample")


def _parts(posterior: Any) -> tuple[list[torch.Tensor], type]:
    names = inspect.signature(type(posterior)).parameters
    found = (getattr(posterior, name, None) for name in names)
    return [value for value in found if isinstance(value, torch.Tensor)], type(posterior)


def _whole(parts: Any, cls: type) -> Any:
    return cls(*parts)
