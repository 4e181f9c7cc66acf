"""The PyTorch side: checkpoint -> bundle. Calling the package converts: `mlxconv.convert(...)`."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`mlxconv.convert` names this package and, in the public API, the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .conversion import convert

        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
