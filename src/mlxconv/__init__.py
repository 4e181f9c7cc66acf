"""mlxconv converts diffusers models, not only their weights, to MLX, and proves parity.

`convert`, `verify` and `inspect` need the extra `mlxconv[convert]`; `load_component` runs without
PyTorch. Names are imported when they are first used, so that `import mlxconv` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .convert.conversion import convert as convert
    from .convert.inspection import inspect as inspect
    from .convert.parity import ParityReport as ParityReport
    from .convert.parity import verify as verify
    from .convert.report import ConvertReport as ConvertReport
    from .runtime.bundle import load_component as load_component
    from .runtime.errors import MlxconvError as MlxconvError

_WHERE = {
    "ConvertReport": ".convert.report",
    "MlxconvError": ".runtime.errors",
    "ParityReport": ".convert.parity",
    "inspect": ".convert.inspection",
    "load_component": ".runtime.bundle",
    "verify": ".convert.parity",
}
__all__ = [
    "ConvertReport",
    "MlxconvError",
    "ParityReport",
    "__version__",
    "convert",
    "inspect",
    "load_component",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "convert":  # the package is callable: see its __init__
        return import_module(".convert", __name__)
    if name in _WHERE:
        return getattr(import_module(_WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
