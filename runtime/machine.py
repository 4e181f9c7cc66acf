"""What a figure was measured on: chip, versions, and the matrix library on Linux."""

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .ops import on_cpu


def find_mkl() -> str | None:
    """MKL's one library, where `pip install mkl` puts it; MLX's own fp32 product is 27 times
    slower on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    found = sorted(Path(sys.prefix).glob("lib/libmkl_rt.so*"))
    return str(found[-1]) if found else None


def environment() -> dict[str, str]:
    """Of a process that measures: MKL preloaded where there is one."""
    mkl = find_mkl()
    added = {"LD_PRELOAD": mkl, "MKL_INTERFACE_LAYER": "LP64"} if mkl else {}
    return {**os.environ, **added}


def chip() -> str:
    """The processor's name and the number of its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = named[0] if named else platform.processor() or platform.machine()
    if not on_cpu():
        name = str(mx.device_info().get("device_name", name))
    return f"{name}, {os.cpu_count()} cores"


def peak_rss_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def described() -> dict[str, Any]:
    """Chip, system, backend and versions, for a report.

    tf32: whether MLX may round the factors of fp32 products to TF32, on GPUs that have it.
    """
    mkl = find_mkl()
    return {
        "chip": chip(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": "cpu" if on_cpu() else "gpu",
        "tf32": os.environ.get("MLX_ENABLE_TF32", "1") != "0",
        "blas": Path(mkl).name if mkl else "mlx",
        "versions": {
            name: found for name in ("mlxconv", "mlx", "numpy") if (found := _version(name))
        }
        | {"python": platform.python_version()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
