"""Parameters that hold no data: PyTorch code that reads one gets the bundle's weight.

A module whose methods run in MLX keeps its parameters in this form. Whatever outer code does with
them (embedding lookups, a language-model head, `state_dict()`) sees the weights that MLX computes
with, dequantized; one tensor at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import torch
from torch import nn
from torch.utils import _pytree as pytree

from mlxconv.runtime.bundle import LoadedComponent
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.weights import QuantizedWeight, Weights, weight_map

from ..source.arrays import mlx_to_torch
from ..store.plan import from_stored

CHANGE_FIRST = (
    "change it in a pipeline of diffusers alone, save that (pipe.save_pretrained(FOLDER)) and "
    "convert FOLDER"
)


class StoredWeights:
    """The weights of a bundle's component as PyTorch tensors, read from disk at each look-up."""

    def __init__(self, loaded: LoadedComponent, label: str) -> None:
        self.label, self.parameters = label, loaded.program.parameters
        self.class_name = loaded.program.class_name
        self.folder, self.config = loaded.path, loaded.config
        self.names = frozenset(weight_map(loaded.path))
        self._weights = Weights(
            loaded.path, self.parameters, {}, loaded.config, compute=mx.float32, resident=False
        )

    def read(self, name: str) -> torch.Tensor:
        """A tensor dequantized, in PyTorch's layout."""
        self._weights.release()
        held = self._weights.get(name)
        if isinstance(held, QuantizedWeight):
            return mlx_to_torch(held.dequantized(mx.float32))
        known = self.parameters.get(name)
        return mlx_to_torch(from_stored(held, known.kind if known else "other"))


class BundleParameter(torch.Tensor):
    """One parameter: the shape, dtype and device of the original, the data in the bundle.

    Any operation on it reads the data first, except for a change of dtype or device. Writing to it,
    or to a view of it, raises MlxconvError. read: of a view, what it shows.
    """

    stored: StoredWeights
    name_in_bundle: str
    read: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        stored: StoredWeights,
        name: str,
        like: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        read: torch.Tensor | None = None,
    ) -> BundleParameter:
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        made.stored, made.name_in_bundle, made.read = stored, name, read
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def load(self) -> torch.Tensor:
        """The weight, in this parameter's dtype and on its device."""
        if self.read is not None:
            return self.read
        value = self.stored.read(self.name_in_bundle)
        return value.reshape(self.shape).to(device=self.device, dtype=self.dtype)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if getattr(value, "name_in_bundle", None) != self.name_in_bundle:
            raise self._unchangeable()
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __setitem__(self, *args: Any) -> None:
        raise self._unchangeable()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.read is not None:
            return self.read.clone()
        copied = BundleParameter(self.stored, self.name_in_bundle, self)
        made = (
            nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied
        )
        memo[id(self)] = made
        return cast("BundleParameter", made)

    def _unchangeable(self) -> MlxconvError:
        return MlxconvError(
            f"{self.stored.label}: {self.name_in_bundle} cannot be changed: its data is in the "
            f"bundle; {CHANGE_FIRST}"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """The weight as a NumPy array that cannot be written to."""
        array = self.load().numpy(force=force)
        array.setflags(write=False)
        return array

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.name_in_bundle!r}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for target in _written(func, args, kwargs):
            if isinstance(target, cls):
                raise target._unchangeable()
        first = args[0] if args else None
        if func in _SAME_DATA and isinstance(first, cls) and first.read is None:
            dtype, device = kwargs.get("dtype"), kwargs.get("device")
            return cls(first.stored, first.name_in_bundle, first, dtype, device)
        if func.overloadpacket is torch.ops.aten.to:  # as it comes in inference mode
            return func.decompose(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(cls, cls.load, (args, kwargs))
        found = func(*args, **kwargs)
        if isinstance(first, cls) and any(r.alias_info is not None for r in func._schema.returns):
            stored, name = first.stored, first.name_in_bundle
            view = lambda value: cls(stored, name, value, read=value)  # noqa: E731
            return pytree.tree_map_only(torch.Tensor, view, found)
        return found


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from pytree.tree_leaves(given)


_SAME_DATA = (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)


def give_to_bundle(module: nn.Module, stored: StoredWeights) -> None:
    """Replace the parameters and buffers that the bundle has by `BundleParameter`s, ties
    included."""
    made: dict[int, torch.Tensor] = {}
    everything = named_tensors(module)
    for name, tensor in everything.items():
        if name in stored.names:
            new: torch.Tensor = BundleParameter(stored, name, tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=False)
            made[id(tensor)] = new
    for name, tensor in everything.items():
        if id(tensor) in made:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, made[id(tensor)])
    for owner in module.modules():
        held = (*owner._parameters.values(), *owner._buffers.values())
        if any(isinstance(p, BundleParameter) for p in held):
            owner.register_state_dict_post_hook(_load_state)  # type: ignore[no-untyped-call]


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all of their names: a tied weight has several."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _load_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put real tensors into a state dict; with `keep_vars` the parameters themselves stay."""
    for name in (*module._parameters, *module._buffers):
        value = state.get(prefix + name)
        if isinstance(value, BundleParameter) and not isinstance(value, nn.Parameter):
            state[prefix + name] = value.load()
