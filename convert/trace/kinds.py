"""Inputs that a class takes as numbers: a boolean, an integer or a float of one value do the same.

True of an input whose elements are only moved until they are cast, as in `timestep.float()` or
`mask.to(hidden_states.dtype)`. Anything else may depend on the kind: `~mask` means one thing for
booleans and another for integers, and attention reads a boolean mask as what may be seen, but adds
a float one to the scores. A sum counts booleans as it adds integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Path = tuple[str | int, ...]

_GIVEN = "_mlxconv_given"  # attribute: paths of the inputs whose elements a tensor holds

_ONES = "_mlxconv_ones"  # attribute: paths of the inputs whose dtype these ones have

_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})
_MOVES = _JOINS | frozenset(
    """__getitem__ broadcast_to chunk clone contiguous cpu detach enter expand flatten flip movedim
    narrow permute repeat repeat_interleave reshape roll select split squeeze t tap tile to
    transpose unbind unflatten unsqueeze view""".split()
)
_CASTS = frozenset("bfloat16 bool byte char double float half int long short to type_as".split())
_MEASURES = frozenset(
    "__len__ again dim get_device is_contiguous numel size storage_offset stride".split()
)
_OF_KIND = frozenset("dtype itemsize nbytes".split())  # attributes that differ between kinds


class KindsRead(TorchFunctionMode):
    """Inside, collects the paths of the inputs whose kind the traced code may depend on.

    `counted`: of those, at most, on whether they are floats.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: frozenset[Path] = frozenset()
        self.counted: frozenset[Path] = frozenset()
        self._dtype_read: frozenset[Path] = frozenset()  # of inputs, just before

    def kinds_of(self, path: Path) -> str:
        """What `runtime/program/program.py` calls the kinds of an input."""
        if path in self.asked | self._dtype_read:
            return "own"
        return "count" if path in self.counted else "any"

    def given(self, kwargs: Mapping[str, Any]) -> None:
        """Watch the tensors among these arguments."""
        for path, leaf in pytree.tree_flatten_with_path(dict(kwargs))[0]:
            if isinstance(leaf, torch.Tensor):
                keys: list[Any] = [getattr(p, "key", getattr(p, "idx", None)) for p in path]
                setattr(leaf, _GIVEN, frozenset({tuple(keys)}))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [x for x in _tensors((args, kwargs)) if hasattr(x, _GIVEN)]
        name = _name(func)
        if name != "__get__":
            self._after_dtype(name, kwargs or {}, found)
        if not given or name in _MEASURES or _is_shape(func, found):
            return found
        paths = frozenset[Path]().union(*(getattr(x, _GIVEN) for x in given))
        if _reads(func, "dtype") and not self._dtype_read:
            self._dtype_read = paths
            return found
        if name in ("mul", "__mul__") and any(getattr(x, _ONES, None) == paths for x in args):
            setattr(found, _GIVEN, paths)
            return found
        first = _tensors(args[:1]) if name in _JOINS else args[:1]
        alone = [*map(id, first)] == [*map(id, given)]
        rest = pytree.tree_leaves((args[1:], kwargs))
        cast = any(isinstance(x, (torch.dtype, torch.Tensor)) for x in rest)
        if alone and name in _CASTS and (cast or name != "to"):
            # A cast to the dtype it has already gives the tensor itself.
            return torch.Tensor.detach(found) if found is args[0] else found
        moved = _tensors(found)
        if alone and name == "sum":  # given a dtype, it casts before it adds
            self.counted |= frozenset() if cast else paths
            return found
        if not (alone and name in _MOVES and moved and not cast):
            self.asked |= paths
            return found
        for tensor in moved:
            setattr(tensor, _GIVEN, paths)
        return found

    def _after_dtype(self, name: str, kwargs: Mapping[str, Any], found: Any) -> None:
        """An input's dtype says nothing where it is only that of ones to multiply the input by:
        `timestep * torch.ones(batch, dtype=timestep.dtype)`."""
        read, self._dtype_read = self._dtype_read, frozenset()
        if read and name in ("ones", "ones_like") and "dtype" in kwargs:
            setattr(found, _ONES, read)
        else:
            self.asked |= read


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).rpartition("::")[2].partition(".")[0]


def _reads(func: Any, attribute: str) -> bool:
    return getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ == attribute


def _is_shape(func: Any, found: Any) -> bool:
    """Whether an attribute was read that does not depend on the kind."""
    if getattr(func, "__name__", "") != "__get__" or isinstance(found, torch.Tensor):
        return False
    return func.__self__.__name__ not in _OF_KIND
