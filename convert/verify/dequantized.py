"""A bundle's weights as PyTorch tensors: dequantized in float32, in PyTorch's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch

from mlxconv.runtime.exec.weights import QuantizedWeight, Weights
from mlxconv.runtime.program.program import Program

from ..source.arrays import mlx_to_torch
from ..store.plan import from_stored


class _Lazy(Mapping[str, torch.Tensor]):
    """Reads each tensor when it is asked for."""

    def __init__(self, weights: Weights, program: Program) -> None:
        self.weights, self.program = weights, program
        self._read: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self.program.parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._read:  # weights that are not resident are given once
            self.weights.release()
            self._read.clear()
        self._read.add(name)
        held = self.weights.get(name)
        if isinstance(held, QuantizedWeight):
            return mlx_to_torch(held.dequantized(mx.float32))
        dense = from_stored(held, self.program.parameters[name].kind)
        if mx.issubdtype(dense.dtype, mx.floating):
            dense = dense.astype(mx.float32)
        return mlx_to_torch(dense)

    def __iter__(self) -> Iterator[str]:
        return iter(self.program.parameters)

    def __len__(self) -> int:
        return len(self.program.parameters)


def dequantized_tensors(
    folder: Path, program: Program, config: dict[str, Any]
) -> Mapping[str, torch.Tensor]:
    """Every parameter of the program by diffusers' name, float32, in PyTorch's layout."""
    weights = Weights(folder, program.parameters, {}, config, compute=mx.float32, resident=False)
    return _Lazy(weights, program)
