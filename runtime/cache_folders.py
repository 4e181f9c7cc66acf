"""The user's folders on this machine: caches, and a private one for MLX's compiled kernels."""

import atexit
import ctypes
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

_kept: list[Path] = []  # the folder that this process has chosen
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # where C++ looks for a temporary folder


def cache_folder(name: str) -> Path:
    """A folder of $MLXCONV_CACHE, or of the user's cache folder by the system's convention."""
    if given := os.environ.get("MLXCONV_CACHE"):
        return Path(given).expanduser() / name
    if sys.platform == "darwin":
        return Path("~/Library/Caches/mlxconv").expanduser() / name
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mlxconv" / name


def keep_kernels_private() -> Path | None:
    """Have MLX keep its compiled kernels where nobody else can put one; None where it does.

    MLX loads `mlx/VERSION/cpu/lib*.so` of the temporary folder when it evaluates a compiled
    function; on a shared machine anybody can put a library there first. The folder can be moved by
    TMPDIR alone. It is set in C's environment only: Python's `tempfile` and `os.environ` stay as
    they are.
    """
    if os.name != "posix" or _is_ours(_temporary_folder()):
        return None
    if not _kept:
        _kept.append(_kernel_folder())
        ctypes.CDLL(None).setenv(b"TMPDIR", os.fsencode(_kept[0]), 1)
    _kept[0].mkdir(mode=0o700, parents=True, exist_ok=True)  # caches may be deleted at any time
    return _kept[0]


def unfinished_kernels() -> set[str]:
    """Names of kernels for the CPU that MLX has written and not yet compiled."""
    folder = keep_kernels_private() or _temporary_folder()
    names = {
        suffix: {file.stem.removeprefix("lib") for file in folder.glob(f"mlx/*/cpu/*{suffix}")}
        for suffix in (".cpp", ".so")
    }
    return names[".cpp"] - names[".so"]


def _temporary_folder() -> Path:
    return Path(next((v for k in _TEMPORARY if (v := os.environ.get(k))), "/tmp"))


def _kernel_folder() -> Path:
    """One for each host: kernels are compiled for its processor, and homes may be shared."""
    host = re.sub(r"[^A-Za-z0-9]", "-", platform.node()) or "host"
    folder = cache_folder("kernels") / host
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder):
            folder.chmod(0o700)
            return folder
        reason = "others can write to it, or to a folder above it"
    except OSError as error:
        reason = error.strerror or str(error)
    return _passing_folder(f"{folder}: {reason}")


@cache
def _passing_folder(reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mlxconv-kernels-"))  # of mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warnings.warn(
        f"{reason}; MLX compiles its kernels anew for this process. Set MLXCONV_CACHE to a folder "
        "that only you can write to",
        stacklevel=4,
    )
    return folder


def _is_ours(folder: Path) -> bool:
    """Whether it is this user's folder, no link, that nobody else can write to or replace."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        above = [p.stat() for p in folder.resolve().parents]
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return not found.st_mode & others and all(
        p.st_uid in (0, os.getuid()) and (not p.st_mode & others or p.st_mode & stat.S_ISVTX)
        for p in above
    )
