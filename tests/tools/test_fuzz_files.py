"""Damaged checkpoints and bundles are answered with a sentence: a short run of the fuzzer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .fuzz_files import fuzz, quick, subjects


def test_what_is_damaged_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded; `python -m tests.tools.fuzz_files` runs the other commands and more of these."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base, began = subjects(tmp_path), time.process_time()
    counts, finds = fuzz(base, quick(150), seed=13)
    assert not finds, "\n".join(map(str, finds))
    assert counts["said"] > 10 and counts["exit 0"] > 5
    assert time.process_time() - began < 20
