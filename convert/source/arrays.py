"""Tensors of PyTorch as arrays of MLX and numpy, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import torch

Array = np.ndarray[Any, Any]


def torch_to_numpy(value: torch.Tensor) -> Array:
    """bfloat16 as float32; everything else as it is."""
    value = value.detach()
    array: Array = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    return array


def mlx_to_torch(value: mx.array) -> torch.Tensor:
    """The same values; bfloat16 bit for bit."""
    if value.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(value.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def torch_to_mlx(value: Any) -> Any:
    """Tensors in nested containers as arrays; what is no tensor stays, tuples become lists."""
    if isinstance(value, torch.Tensor):
        array = mx.array(torch_to_numpy(value))
        return array.astype(mx.bfloat16) if value.dtype == torch.bfloat16 else array
    if isinstance(value, Mapping):
        return {k: torch_to_mlx(v) for k, v in value.items()}
    return [torch_to_mlx(v) for v in value] if isinstance(value, (list, tuple)) else value
