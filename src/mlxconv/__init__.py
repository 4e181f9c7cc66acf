"""mlxconv converts diffusers models, not only their weights, to MLX, and proves parity.

`convert`, `verify`, `inspect` and `into_diffusers` need the extra `mlxconv[convert]`; all else
runs without PyTorch. Names are imported when they are first used: `import mlxconv` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .convert.conversion import convert as convert
    from .convert.inspection import inspect as inspect
    from .convert.into_diffusers import into_diffusers as into_diffusers
    from .convert.parity import ParityReport as ParityReport
    from .convert.parity import verify as verify
    from .convert.report import ConvertReport as ConvertReport
    from .runtime.bundle import load_component as load_component
    from .runtime.denoise import LoopSettings as LoopSettings
    from .runtime.denoise import denoise as denoise
    from .runtime.errors import MlxconvError as MlxconvError
    from .runtime.guidance import Guidance as Guidance
    from .runtime.guidance import Guided as Guided
    from .runtime.pipeline import Pipeline as Pipeline
    from .runtime.pipeline import load as load
    from .runtime.schedulers import make_schedule as make_schedule
    from .runtime.schedulers import read_scheduler as read_scheduler
    from .runtime.staging import Staged as Staged

_WHERE = {
    "ConvertReport": ".convert.report",
    "Guidance": ".runtime.guidance",
    "Guided": ".runtime.guidance",
    "LoopSettings": ".runtime.denoise",
    "MlxconvError": ".runtime.errors",
    "ParityReport": ".convert.parity",
    "Pipeline": ".runtime.pipeline",
    "Staged": ".runtime.staging",
    "denoise": ".runtime.denoise",
    "inspect": ".convert.inspection",
    "into_diffusers": ".convert.into_diffusers",
    "load": ".runtime.pipeline",
    "load_component": ".runtime.bundle",
    "make_schedule": ".runtime.schedulers",
    "read_scheduler": ".runtime.schedulers",
    "verify": ".convert.parity",
}
__all__ = [
    "ConvertReport",
    "Guidance",
    "Guided",
    "LoopSettings",
    "MlxconvError",
    "ParityReport",
    "Pipeline",
    "Staged",
    "__version__",
    "convert",
    "denoise",
    "inspect",
    "into_diffusers",
    "load",
    "load_component",
    "make_schedule",
    "read_scheduler",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "convert":  # the package is callable: see its __init__
        return import_module(".convert", __name__)
    if name in _WHERE:
        return getattr(import_module(_WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
