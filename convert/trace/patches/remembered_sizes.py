"""Arithmetic of symbolic sizes, remembered for the time of a trace.

torch computes strides, contiguity and broadcasting of every tensor anew, some hundred expressions
an operation, of the same few sizes; that is a third of a trace's time (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

from .replaced import replaced

_BINARY = "_add _sub _mul _mod _int_floordiv _eq _ne _gt _lt _le _ge _sym_max _sym_min".split()


@contextlib.contextmanager
def remembered_sizes() -> Iterator[None]:
    """Inside, what torch works out of two symbolic sizes is worked out once."""
    results: dict[Any, Any] = {}
    evaluate = SymNode.evaluate

    def once(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(self: SymNode, other: Any) -> Any:
            if not isinstance(other, SymNode) or get_proxy_mode() is not None:
                return function(self, other)
            key = (name, self.shape_env, self._expr, other._expr, self.pytype, other.pytype)
            known = results.get(key)
            if known is None:
                results[key] = known = function(self, other)
                return known
            # One of its own: tracing tells sizes apart by their nodes.
            copied = SymNode.__new__(SymNode)
            copied.__dict__.update(known.__dict__)
            return copied

        return remembered

    def evaluated(self: SymNode, size_oblivious: bool = False) -> Any:
        key = ("evaluate", self.shape_env, self._expr, self.pytype, size_oblivious)
        if key not in results:
            results[key] = evaluate(self, size_oblivious)
        return results[key]

    changes = [(SymNode, name, once(name, getattr(SymNode, name))) for name in _BINARY]
    with replaced(*changes, (SymNode, "evaluate", evaluated)):
        yield
