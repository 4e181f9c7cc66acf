"""``x[mask]`` for a boolean mask, put off until what it is for shows that its size does not matter.

How many elements a mask keeps depends on an input's values, which a traced graph cannot have as a
size. Classes mostly do one of two things with them, of which each has a form of fixed sizes:

- ``x[mask] = f(x[mask])`` is ``where(mask, f(x), x)``, for an ``f`` of each element by itself;
- ``cat([x[a], y[b], x[~a], y[~b]])`` is all of x and y in another order.

And a tensor full of one number, a size perhaps, can be read as a list of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NOT = "_mlxconv_not"  # attribute: the mask that this one is the opposite of
_FULL = "_mlxconv_full"  # attribute: the number that each element is


@dataclass(frozen=True, eq=False)
class _Selection:
    """``x[mask]``, the mask over the first axes of x."""

    x: torch.Tensor
    mask: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(_selected(self), name)

    def __len__(self) -> int:
        return len(_selected(self))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cat", "concat"):
            found = _reordered(*args, **(kwargs or {}))
            if found is not None:
                return found
        numbers = all(isinstance(other, (int, float, torch.dtype)) for other in args[1:])
        if name in _OF_ELEMENTS and not kwargs and isinstance(args[0], cls) and numbers:
            return cls(func(args[0].x, *args[1:]), args[0].mask)
        plain = torch.utils._pytree.tree_map_only(cls, _selected, (tuple(args), kwargs or {}))
        return func(*plain[0], **plain[1])


_OF_ELEMENTS = ("mul", "add", "sub", "div", "neg", "to", "zeros_like")


def _operator(name: str) -> Any:
    def operate(self: _Selection, *others: Any) -> Any:
        return _Selection.__torch_function__(getattr(torch.Tensor, name), (), (self, *others))

    return operate


for _name in _OF_ELEMENTS[:4]:
    for _form in (f"__{_name if _name != 'div' else 'truediv'}__",):
        setattr(_Selection, _form, _operator(_name))
        setattr(_Selection, _form.replace("__", "__i", 1), _operator(_name))
_Selection.to = _operator("to")  # type: ignore[attr-defined]

_get, _set, _invert = (
    getattr(torch.Tensor, name) for name in ("__getitem__", "__setitem__", "__invert__")
)


def _selected(selection: _Selection) -> torch.Tensor:
    """What it stands for, with its size an unknown number."""
    with torch._C.DisableTorchFunction():
        return _get(selection.x, selection.mask)  # type: ignore[no-any-return]


def _reordered(parts: Sequence[Any], dim: int = 0) -> torch.Tensor | None:
    """The parts one after the other, where each mask of one axis comes with its opposite."""
    if dim != 0 or not all(isinstance(p, _Selection) and p.mask.ndim == 1 for p in parts):
        return None
    sides = Counter(_side(part.mask) for part in parts)
    if any(sides[mask, side] != sides[mask, not side] for mask, side in sides):
        return None
    kept = torch.cat([part.mask for part in parts])
    rows = torch.arange(kept.shape[0], device=kept.device)
    order = torch.where(kept, rows, rows + kept.shape[0]).argsort()
    return torch.cat([part.x for part in parts])[order[: kept.shape[0] // 2]]


def _side(mask: torch.Tensor) -> tuple[int, bool]:
    """Which mask it is, or is the opposite of."""
    other = getattr(mask, _NOT, None)
    return (id(mask), True) if other is None else (id(other), False)


class selections(TorchFunctionMode):
    """Inside, indexing by a boolean mask alone is put off."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _get and _is_mask(args[1]):
            return _Selection(*args)
        if func is _set and isinstance(args[2], _Selection):
            return _put(*args)
        if func is torch.Tensor.item and hasattr(args[0], _FULL):
            return getattr(args[0], _FULL)
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.unbind and hasattr(args[0], _FULL):  # by which a list is made
            for item in found:
                setattr(item, _FULL, getattr(args[0], _FULL))
        if func is _invert:
            setattr(found, _NOT, args[0])
        elif func is torch.Tensor.sum and hasattr(args[0], _FULL):
            axis = (kwargs or {}).get("dim", args[1] if len(args) > 1 else None)
            if isinstance(axis, int):
                setattr(found, _FULL, getattr(args[0], _FULL) * args[0].shape[axis])
        elif func is torch.full and len(args) > 1 and isinstance(args[1], (int, torch.SymInt)):
            setattr(found, _FULL, args[1])
        elif _changes(func) and hasattr(args[0], _FULL):
            delattr(args[0], _FULL)
        return found


def _changes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return name.endswith("_")


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim > 0


def _put(x: torch.Tensor, index: Any, selection: _Selection) -> None:
    if selection.mask is not index:
        x[index] = _selected(selection)
        return
    mask = index.reshape(*index.shape, *[1] * (x.ndim - index.ndim))
    x.copy_(torch.where(mask, selection.x, x))
