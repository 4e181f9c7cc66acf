"""What tracing found out about a component, kept between runs in the user's cache folder.

An entry is an .npz file: the program's constants, and one JSON text with all else. It is data, and
read as a bundle from anywhere is: what is not whole and valid is traced again. Deleting the folder
is always safe.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from mlxconv.runtime import cache_folders
from mlxconv.runtime.program.program import Parameter
from mlxconv.runtime.program.stored import from_json, to_json

from .compile import Compiled

MAX_BYTES = 256 << 20  # of all entries; the oldest go first
_FORMAT = 1
_TRACERS = ("torch", "diffusers", "transformers")
_PACKAGES = ("mlxconv", "mlx", *_TRACERS, "safetensors")


@dataclass(frozen=True)
class Analysis:
    """What a conversion needs of a component's class, so that the class need not be imported.

    `compiled` is None for a component without a program; `parameters` and `tied` are as in
    `Compiled`. `derived`: the text of a derived recipe. `note`, `warnings`: for the report.
    """

    config: dict[str, Any]
    compiled: Compiled | None
    parameters: dict[str, Parameter]
    tied: dict[str, str]
    derived: str = ""
    note: str = ""
    warnings: list[str] = field(default_factory=list)


def versions() -> dict[str, str]:
    """Versions of the packages that decide what a conversion gives."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def unpatched() -> bool:
    """Whether the classes that an entry depends on are unchanged in this process."""
    return not any(name in sys.modules for name in _TRACERS)


def cache_folder() -> Path:
    """Of the entries, in the user's cache folder."""
    return cache_folders.cache_folder("programs")


def entry_key(**facts: Any) -> str | None:
    """The name of the entry for these facts and the software at hand.

    None where the software can change without its version: an editable installation of a tracer.
    """
    origins = {}
    for name in _TRACERS:
        try:
            origin = distribution(name).read_text("direct_url.json") or ""
        except PackageNotFoundError:
            continue
        if '"editable": true' in origin:
            return None
        origins[name] = origin
    everything = {
        "format": _FORMAT,
        "facts": facts,
        "versions": versions() | {"numpy": np.__version__},
        "origins": origins,
        "source": _source_digest(),
        "machine": [platform.system(), platform.machine()],
        "environment": {k: v for k, v in os.environ.items() if _steers(k)},
    }
    text = json.dumps(everything, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _steers(variable: str) -> bool:
    """Whether an environment variable may change what the tracers do."""
    theirs = ("DIFFUSERS_", "TRANSFORMERS_", "TORCH_", "TORCHDYNAMO_", "PYTORCH_")
    return variable.startswith(theirs) and not variable.endswith(("_VERBOSITY", "_CACHE", "_HOME"))


@cache
def _source_digest() -> str:
    """Of this package's own code: an entry of another state of it may be wrong."""
    digest = hashlib.sha256()
    package = Path(str(files("mlxconv")))
    for folder in ("convert", "runtime"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


# ---- entries ------------------------------------------------------------------------------------


def read_entry(key: str) -> Analysis | None:
    """The entry, or None where there is none that is whole and valid."""
    file = cache_folder() / f"{key}.npz"
    try:
        if file.stat().st_size > MAX_BYTES:
            return None
        with np.load(file, allow_pickle=False) as arrays:  # zip: every member has a CRC-32
            data = json.loads(arrays["analysis"].tobytes())
            constants = {name: arrays[f"{i}"] for i, name in enumerate(data["constants"])}
        found = _decode(data, constants)
        os.utime(file)
    except Exception:  # MlxconvError, and what numpy, zipfile and json raise for damaged files
        return None
    return found


def write_entry(key: str, analysis: Analysis) -> None:
    """Keep an entry, and drop the oldest beyond MAX_BYTES. OSError where that cannot be done."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    compiled = analysis.compiled
    constants = {} if compiled is None else compiled.constants
    text = np.frombuffer(json.dumps(_encode(analysis)).encode(), np.uint8)
    packed = io.BytesIO()
    arrays = {f"{i}": value for i, value in enumerate(constants.values())}
    np.savez(packed, allow_pickle=False, analysis=text, **arrays)
    if packed.tell() > MAX_BYTES:
        return
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as partial:
        try:
            partial.write(packed.getbuffer())
            partial.close()
            Path(partial.name).replace(folder / f"{key}.npz")
        except BaseException:
            Path(partial.name).unlink(missing_ok=True)
            raise
    _trim(folder)


def _trim(folder: Path) -> None:
    """Other processes may do the same: what is gone already is no error."""
    found = []
    for file in (*folder.glob("*.npz"), *folder.glob("*.tmp")):
        with suppress(FileNotFoundError):
            status = file.stat()
            found.append((status.st_mtime_ns, status.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= MAX_BYTES:
            break
        file.unlink(missing_ok=True)
        total -= size


def _encode(analysis: Analysis) -> dict[str, Any]:
    compiled = analysis.compiled
    return {
        "config": analysis.config,
        "program": None if compiled is None else to_json(compiled.program),
        "constants": [] if compiled is None else list(compiled.constants),
        "parameters": {n: [p.shape, p.dtype, p.kind] for n, p in analysis.parameters.items()},
        "tied": analysis.tied,
        "derived": analysis.derived,
        "note": analysis.note,
        "warnings": analysis.warnings,
    }


def _decode(data: Mapping[str, Any], constants: dict[str, Any]) -> Analysis:
    parameters = {
        name: Parameter(tuple(int(n) for n in shape), str(dtype), str(kind))
        for name, (shape, dtype, kind) in data["parameters"].items()
    }
    tied = {str(name): str(first) for name, first in data["tied"].items()}
    compiled = None
    if data["program"] is not None:
        program = from_json(data["program"], "a cached program")
        if program.constants.keys() != constants.keys():
            raise ValueError("constants of another program")
        compiled = Compiled(program, constants, parameters, tied)
    return Analysis(
        dict(data["config"]),
        compiled,
        parameters,
        tied,
        str(data["derived"]),
        str(data["note"]),
        [str(text) for text in data["warnings"]],
    )
