"""Types of values: one parser, one printer."""

from __future__ import annotations

import pytest

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.types import INT, UNKNOWN, Type, parse_type


@pytest.mark.parametrize(
    ("text", "type"),
    [
        ("", UNKNOWN),
        ("int", INT),
        ("float32[]", Type("float32", ())),
        ("compute[batch, 64]", Type("compute", ("batch", "64"))),
        ("bool[Max(1, Min(a, b)), n + 2]", Type("bool", ("Max(1, Min(a, b))", "n + 2"))),
    ],
)
def test_what_is_printed_is_read(text: str, type: Type) -> None:
    assert parse_type(text) == type
    assert str(type) == text


@pytest.mark.parametrize("text", ["float32[3", "[3]", "float32[3]]x"])
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(MlxconvError, match="expected one as float32"):
        parse_type(text)
