"""Files of a bundle, which may come from anywhere: names stay inside, sizes are bounded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import MlxconvError

MAX_TEXT = 64 << 20  # bytes of a JSON file; the largest program written has 0.4 MB


def is_plain(name: str) -> bool:
    """Whether a name from a file stays in its folder: no path, nothing hidden."""
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\:\0")


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path to write to; `file` appears when the block ends well, or stays as it was.

    MlxconvError names the file that cannot be written.
    """
    partial = file.with_name(f".{file.name}.part")
    try:
        yield partial
        partial.replace(file)
    except OSError as error:
        raise MlxconvError(f"{file}: cannot be written ({error.strerror or error})") from error
    finally:
        partial.unlink(missing_ok=True)


def counted(count: int, what: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def format_bytes(count: float) -> str:
    """1234567 -> 1.2 MB, in powers of 1000; from a gigabyte on with two decimals."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. MlxconvError says what is wrong with it, deep nesting included."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise MlxconvError(f"{path}: is not JSON ({error}); get it again") from error
    if not isinstance(data, dict):
        raise MlxconvError(
            f"{path}: holds a JSON {type(data).__name__}, expected an object; get it again"
        )
    return data


def write_json(path: Path, data: Any) -> None:
    """Indented, with a final newline; keys keep their order."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_text(path: Path) -> str:
    """A text file of at most MAX_TEXT bytes. MlxconvError names it, and what is wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_TEXT:
            raise MlxconvError(f"{path}: has {size} bytes, at most {MAX_TEXT} are read; refused")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MlxconvError(f"{path}: cannot be read ({error.strerror}); copy it again") from error
    except UnicodeDecodeError as error:
        raise MlxconvError(f"{path}: not UTF-8 text ({error}); copy it again") from error
