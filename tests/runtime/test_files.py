"""What is printed about files."""

from __future__ import annotations

import pytest

from mlxconv.runtime.files import format_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (7_300_000, "7.3 MB"),
     (1_250_000_000, "1.25 GB"), (2**30, "1.07 GB"), (23_800_000_000, "23.80 GB")],
)  # fmt: skip
def test_bytes_are_powers_of_1000(count: int, text: str) -> None:
    assert format_bytes(count) == text
