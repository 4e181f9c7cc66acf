"""A torch module without its weights: the shapes of all, the values of its own tables.

A 20 B model takes no memory. dtypes are those that ``from_pretrained(torch_dtype=...)`` gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, ValuesView
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mlxconv.runtime.errors import MlxconvError

from ..source.model_class import CannotBuild, constructing
from .patches.registration import default_dtype, fake_registration

MAX_PARAMETERS = 20_000  # tensors; a large mixture of experts has 6,000


class TooLarge(MlxconvError):
    """More than can be built in seconds."""


def merged_config(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the constructor's defaults filled in, and without diffusers' private keys."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return {**defaults, **{k: v for k, v in config.items() if not k.startswith("_")}}


def build_module(
    cls: type[nn.Module], config: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, FakeTensorMode]:
    """An eval-mode module with fake parameters and persistent buffers; its other tensors are real.

    dtypes are those of ``from_pretrained(torch_dtype=dtype)`` (diffusers 0.42 ``ModelMixin``):
    the default dtype is ``dtype`` during construction; floating parameters and persistent buffers
    are cast, but for ``_keep_in_fp32_modules``; other buffers and plain attributes are as built.
    transformers keeps those for float16 alone, and ``_keep_in_fp32_modules_strict`` always.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]))
    with _registering_fakes(mode), default_dtype(dtype), torch.no_grad():
        module = _without_tables(cls, config, mode) or _construct(cls, config)
    lenient = hasattr(cls, "config_class") and dtype != torch.float16
    kept = getattr(module, f"_keep_in_fp32_modules{'_strict' if lenient else ''}", None) or []
    _cast(module, mode, dtype, [kept] if isinstance(kept, str) else list(kept))
    return module.eval(), mode


def _without_tables(
    cls: type[nn.Module], config: Mapping[str, Any], mode: FakeTensorMode
) -> nn.Module | None:
    """The module if none of its tensors is built by its class; what it computes costs no memory.

    A class may compute gigabytes for a buffer that the checkpoint has.
    """
    try:
        with mode:
            module = cls.from_config(dict(config))  # type: ignore[attr-defined]
    except TooLarge as error:
        raise CannotBuild(cls.__name__, str(error)) from None
    except Exception:  # a constructor may read values, which fake tensors do not have
        return None
    return None if _has_tables(module) else module


def _has_tables(module: nn.Module) -> bool:
    """Whether any tensor is neither a parameter nor a persistent buffer."""

    def holds(value: Any, depth: int = 0) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, nn.Module) or depth > 3:
            return False
        items = value.values() if isinstance(value, dict) else value
        if isinstance(items, (list, tuple, set, ValuesView)):
            return any(holds(item, depth + 1) for item in items)
        return hasattr(value, "__dict__") and holds(vars(value), depth + 1)

    registered = ("_parameters", "_buffers", "_modules")
    return any(
        child._non_persistent_buffers_set
        or any(holds(v) for k, v in vars(child).items() if k not in registered)
        for child in module.modules()
    )


def _construct(cls: type[nn.Module], config: Mapping[str, Any]) -> nn.Module:
    """Without initial values, which cost as much time as a trace and may read those before."""
    from transformers.initialization import no_init_weights

    with constructing(cls), no_init_weights():
        if hasattr(cls, "from_config"):
            return cls.from_config(dict(config))  # type: ignore[no-any-return]
        if hasattr(cls, "config_class"):
            return _of_transformers(cls, config)
        return cls(**{key: value for key, value in config.items() if not key.startswith("_")})


def _of_transformers(cls: Any, config: Mapping[str, Any]) -> nn.Module:
    module: nn.Module = cls(cls.config_class.from_dict(dict(config)))
    module.tie_weights()  # type: ignore[operator]
    return module


def _registering_fakes(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Every parameter and persistent buffer registered inside becomes a fake tensor."""
    count = 0

    def parameter(value: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal count
        count += 1
        if count > MAX_PARAMETERS:
            raise TooLarge(
                f"its configuration asks for more than {MAX_PARAMETERS} parameters, as no model has"
            )
        if value is None or isinstance(value, FakeTensor):  # a tied one stays the same
            return value
        return nn.Parameter(_fake(mode, value), requires_grad=False)

    return fake_registration(parameter, lambda buffer: _fake(mode, buffer))


def _fake(
    mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype)


def _cast(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype, kept: list[str]) -> None:
    """Floating fakes to ``dtype``, or fp32 where a whole component of the name is in ``kept``."""
    made: dict[int, torch.Tensor] = {}
    for path, child in module.named_modules():
        for name in [
            *child._parameters,
            *(set(child._buffers) - child._non_persistent_buffers_set),
        ]:
            old = getattr(child, name)
            if old is None or not old.is_floating_point():
                continue
            parts = [*path.split("."), name]
            new = torch.float32 if any(part in kept for part in parts) else dtype
            if id(old) not in made:
                fresh = _fake(mode, old, new)
                made[id(old)] = (
                    nn.Parameter(fresh, requires_grad=False) if name in child._parameters else fresh
                )
            setattr(child, name, made[id(old)])


class Untouchable:
    """Stands for an argument; whatever is done with it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)

    def __bool__(self) -> bool:
        raise TypeError("an argument was read")
