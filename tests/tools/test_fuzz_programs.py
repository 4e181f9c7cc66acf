"""Mutated bundles neither end a process nor fill the memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..shared_programs import shared_programs
from .fuzz_programs import build

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_mutated_bundle_ends_the_process(tmp_path: Path) -> None:
    with shared_programs():
        build(tmp_path)
    command = "-m tests.tools.fuzz_programs --count 1500 --jobs 1 --bundles".split()
    found = subprocess.run(
        [sys.executable, *command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert "'ran'" in found.stdout and "'refused'" in found.stdout
