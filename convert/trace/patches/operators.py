"""The operators that mark a traced graph: `mlxconv::tap`, `enter`, `leave` and `again`.

They are registered once, when this module is first imported, and stay: a graph names them as long
as it lives, and torch 2.13 forbids a second registration under the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.fx.node import _side_effectful_functions

_LIBRARY = torch.library.Library("mlxconv", "DEF")  # type: ignore[no-untyped-call]
_MARKS = (
    "tap(Tensor x, str path, int index) -> Tensor",
    "enter(Tensor x, str call, int index) -> Tensor",
    "leave(Tensor x, str call, int index) -> Tensor",
)
for _schema in (*_MARKS, "again(Tensor[] inputs, str path, str call) -> Tensor[]"):
    _LIBRARY.define(_schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
for _schema in _MARKS:
    _LIBRARY.impl(  # type: ignore[no-untyped-call]
        _schema.partition("(")[0], lambda x, name, index: x.clone(), "CompositeExplicitAutograd"
    )


@torch.library.register_fake("mlxconv::tap", lib=_LIBRARY)  # type: ignore[untyped-decorator]
@torch.library.register_fake("mlxconv::enter", lib=_LIBRARY)  # type: ignore[untyped-decorator]
@torch.library.register_fake("mlxconv::leave", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _mark_fake(x: torch.Tensor, name: str, index: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("mlxconv::again", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _again_fake(inputs: list[torch.Tensor], path: str, call: str) -> list[torch.Tensor]:
    return [output.like(inputs) for output in OUTPUTS[call]]


@dataclass(frozen=True)
class Output:
    """A tensor that a block computes: each size a number, that of an input's axis, or a symbol.

    Inputs of equal calls have the same symbolic sizes, so their outputs have too.
    """

    sizes: tuple[int | torch.SymInt | tuple[int, int], ...]
    dtype: torch.dtype

    def like(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        sizes = [inputs[n[0]].shape[n[1]] if isinstance(n, tuple) else n for n in self.sizes]
        return inputs[0].new_empty(sizes, dtype=self.dtype)


OUTPUTS: dict[str, tuple[Output, ...]] = {}  # of each call that `again` may name


@contextmanager
def marked_outputs() -> Iterator[None]:
    """Inside, torch keeps `leave` nodes that nobody reads, and OUTPUTS may be filled.

    An output that nobody reads of the first block may be read of a later one.
    """
    leave = torch.ops.mlxconv.leave.default
    _side_effectful_functions.add(leave)
    try:
        yield
    finally:
        _side_effectful_functions.discard(leave)
        OUTPUTS.clear()
