"""The PyTorch side: checkpoint -> bundle. `mlxconv.convert` is this package and the function."""

import sys
from collections.abc import Callable
from inspect import Signature, signature
from types import FunctionType, ModuleType
from typing import Any


class _Function:
    """The function `convert`, with the package's own names beside: submodules are its attributes.

    No ModuleType, so that `help()` and IDEs show the function and not a list of submodules.
    """

    def __init__(self, package: ModuleType) -> None:
        vars(self).update(vars(package), __name__="mlxconv.convert", __module__="mlxconv")
        self._package = package  # whose globals are these

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("__code__", "__defaults__", "__kwdefaults__", "__annotations__"):
            return getattr(self._function, name)
        raise AttributeError(f"module 'mlxconv.convert' has no attribute {name!r}")

    @property
    def _function(self) -> Callable[..., Any]:
        from .conversion import convert

        return convert

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what `inspect` and `pydoc` ask
        return FunctionType

    @property
    def __signature__(self) -> Signature:
        return signature(self._function)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._function.__doc__


sys.modules[__name__] = _Function(sys.modules[__name__])  # type: ignore[assignment]
