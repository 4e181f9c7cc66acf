"""Modules whose outputs a traced graph exposes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .patches import operators as operators  # registers `mlxconv::tap`


@contextlib.contextmanager
def taps(module: nn.Module) -> Iterator[None]:
    """Inside, each submodule's output tensors pass through the identity ``mlxconv::tap``."""
    handles = [
        child.register_forward_hook(_tap_hook(path))
        for path, child in module.named_modules(remove_duplicate=False)
        if path
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tap_hook(path: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        seen = {id(arg) for arg in args}
        leaves, spec = pytree.tree_flatten(output)
        # A module that returns its input (dropout, identity) has nothing of its own to read.
        # One that it returns twice stays one: a write into it shows in both places.
        tapped: dict[int, torch.Tensor] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                before = tapped.get(id(leaf), leaf)
                tapped[id(leaf)] = torch.ops.mlxconv.tap(before, path, index)
        return pytree.tree_unflatten([tapped.get(id(leaf), leaf) for leaf in leaves], spec)

    return hook
