"""Programs of the tiny models, traced once for all tests and workers that do not test tracing."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxconv.convert.lower import compile as programs
from mlxconv.convert.lower.compile import Compiled

FOLDER = "MLXCONV_TESTS_PROGRAMS"  # the variable that names it
_LIBRARIES = ("(<class 'diffusers.", "(<class 'transformers.")


class _Shared(dict[str, Compiled]):
    """What `compile_program` remembers, in files. Its keys tell class, configuration and recipe."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _file(self, key: str) -> Path:
        return self.folder / hashlib.sha256(key.encode()).hexdigest()

    def __len__(self) -> int:
        return 0  # so that nothing is dropped

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._file(str(key)).exists()

    def __getitem__(self, key: str) -> Compiled:
        if not super().__contains__(key):
            super().__setitem__(key, pickle.loads(self._file(key).read_bytes()))
        return super().__getitem__(key)

    def __setitem__(self, key: str, made: Compiled) -> None:
        super().__setitem__(key, made)
        if key.startswith(_LIBRARIES):
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                pickle.dump(made, file)
            Path(file.name).replace(self._file(key))


@contextmanager
def shared_programs() -> Iterator[None]:
    """Conversions inside take the programs that others left, and leave theirs."""
    shared = _MADE.setdefault(os.environ[FOLDER], _Shared(Path(os.environ[FOLDER])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_RECENT", shared)
        yield


_MADE: dict[str, _Shared] = {}
