"""How the other side of `bench --against` is run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxconv.runtime.bench.bench import Settings
from mlxconv.runtime.bundle import is_bundle, open_bundle
from mlxconv.runtime.errors import ArgumentError, MlxconvError

MFLUX_CLASSES = ("FluxTransformer2DModel", "QwenImageTransformer2DModel")
# Run by name and by path, each in a process of its own; the second by mflux's interpreter.
DIFFUSERS = "mlxconv.convert.peers.diffusers_peer"
MFLUX = Path(__file__).with_name("mflux_peer.py")


def peer_command(settings: Settings, about: dict[str, Any], folder: Path) -> list[str]:
    """The command of one repetition by `settings.against`; it reads the inputs that ours wrote.

    about: of the bundle's denoiser. folder: of inputs and outputs. Raises MlxconvError where a
    setting that the peer needs is missing, or it does not have the class.
    """
    if settings.guidance != "none":
        raise ArgumentError("--against compares single predictions, so it needs --guidance none")
    source = _source(settings)
    job = {
        **asdict(settings.job()),
        "dtype": about["dtype"],
        "source": str(source),
        "class": about["class"],
        "output": f"{folder}/peer.npy",
        "inputs": f"{folder}/inputs.npz",
        "height": (settings.pixels or (512, 512))[1],
        "width": (settings.pixels or (512, 512))[0],
    }
    if settings.against.startswith("diffusers"):
        job["compiled"] = settings.against == "diffusers-compiled"
        return [sys.executable, "-m", DIFFUSERS, json.dumps(job)]
    return _mflux(settings, about, job)


def _mflux(settings: Settings, about: dict[str, Any], job: dict[str, Any]) -> list[str]:
    if about["class"] not in MFLUX_CLASSES:
        raise MlxconvError(
            f"--against mflux covers {', '.join(MFLUX_CLASSES)}, not {about['class']}"
        )
    if settings.mflux_python is None:
        raise ArgumentError(
            "--against mflux needs --mflux-python, the interpreter of an environment with mflux"
        )
    check = [settings.mflux_python, "-c", "import mflux"]
    try:
        found = subprocess.run(check, capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise MlxconvError(f"{settings.mflux_python}: cannot be run ({error.strerror})") from error
    if not found:
        raise MlxconvError(
            f"{settings.mflux_python}: mflux is not installed there; `pip install mflux`"
        )
    return [settings.mflux_python, str(MFLUX), json.dumps(job)]


def _source(settings: Settings) -> Path:
    """The folder of the component's checkpoint, by default of the one that the bundle records."""
    root = settings.source
    if root is None:
        known = is_bundle(settings.bundle)
        recorded = open_bundle(settings.bundle).manifest.get("source") if known else None
        root = Path(str(recorded))
        if not (root.is_absolute() and root.is_dir()):
            made = f"; the bundle was made from {recorded}" if recorded else ""
            raise MlxconvError(
                f"--against {settings.against} needs --source, the checkpoint's folder{made}"
            )
    folder = root / (settings.component or "")
    source = folder if folder.is_dir() else root
    if not (source / "config.json").is_file():
        raise MlxconvError(f"{source}: no config.json; --source is the checkpoint it came from")
    return source
