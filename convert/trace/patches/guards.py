"""What torch decides by a size while it traces (2.13: `SymBool.__bool__`, `SymNode.guard_*`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.sym_node import SymNode

from .replaced import replaced


@contextlib.contextmanager
def watched_guards(
    asked: Callable[[FrameType, SymNode, bool], None], became: Callable[[SymNode, Any], None]
) -> Iterator[None]:
    """Inside, `asked` gets each answered condition with the frame that asks, and `became` each
    size that is made a number. torch.export keeps neither for sizes that stay free."""
    truth: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def decided(self: torch.SymBool) -> bool:
        answer = truth(self)
        asked(sys._getframe(1), self.node, answer)
        return answer

    def watched(guard: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(node: SymNode, file: str, line: int) -> Any:
            answer = guard(node, file, line)
            became(node, answer)
            return answer

        return guarded

    with replaced(
        (torch.SymBool, "__bool__", decided),
        (SymNode, "guard_int", watched(SymNode.guard_int)),
        (SymNode, "guard_float", watched(SymNode.guard_float)),
    ):
        yield
