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
    from .convert.into_diffusers.replace import into_diffusers as into_diffusers
    from .convert.report import ConvertReport as ConvertReport
    from .convert.verify.verify import ParityReport as ParityReport
    from .convert.verify.verify import verify as verify
    from .runtime.bundle import load_component as load_component
    from .runtime.errors import MlxconvError as MlxconvError
    from .runtime.generate.denoise import LoopSettings as LoopSettings
    from .runtime.generate.denoise import denoise as denoise
    from .runtime.generate.guidance import Guidance as Guidance
    from .runtime.generate.guidance import Guided as Guided
    from .runtime.generate.pipeline import Pipeline as Pipeline
    from .runtime.generate.pipeline import load as load
    from .runtime.generate.staging import Staged as Staged
    from .runtime.schedulers import make_schedule as make_schedule
    from .runtime.schedulers import read_scheduler as read_scheduler

_WHERE = {
    "ConvertReport": ".convert.report",
    "Guidance": ".runtime.generate.guidance",
    "Guided": ".runtime.generate.guidance",
    "LoopSettings": ".runtime.generate.denoise",
    "MlxconvError": ".runtime.errors",
    "ParityReport": ".convert.verify.verify",
    "Pipeline": ".runtime.generate.pipeline",
    "Staged": ".runtime.generate.staging",
    "denoise": ".runtime.generate.denoise",
    "inspect": ".convert.inspection",
    "into_diffusers": ".convert.into_diffusers.replace",
    "load": ".runtime.generate.pipeline",
    "load_component": ".runtime.bundle",
    "make_schedule": ".runtime.schedulers",
    "read_scheduler": ".runtime.schedulers",
    "verify": ".convert.verify.verify",
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
