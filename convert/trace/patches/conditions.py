"""Branches on the values of tensors, which a traced graph cannot have: a recipe says their way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def answered(truths: Sequence[bool]) -> Iterator[None]:
    """Inside, conditions on the values of tensors are what the recipe says, one after the other."""
    truth, answers = torch.Tensor.__bool__, iter(truths)

    def answer(self: torch.Tensor) -> bool:
        known = next(answers, None) if type(self) is not torch.Tensor else None
        return truth(self) if known is None else known

    torch.Tensor.__bool__ = answer  # type: ignore
    try:
        yield
    finally:
        del torch.Tensor.__bool__
