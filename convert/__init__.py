"""The PyTorch side: checkpoint -> bundle. Calling the package converts: `mlxconv.convert(...)`."""

import sys
from collections.abc import Callable
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`mlxconv.convert` names this package and, in the public API, the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Callable[..., Any]:
        from .conversion import convert

        return convert

    @property
    def __signature__(self) -> Signature:
        return signature(self._function)

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # what help() shows
        return f"convert{self.__signature__}\n\n{self._function.__doc__}"


sys.modules[__name__].__class__ = _Callable
