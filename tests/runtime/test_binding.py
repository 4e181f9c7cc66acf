"""Keyword arguments become an entry's values, or an error that names what does not fit."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxconv.runtime.binding import bind
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import Entry, Input, Program

LIST = Entry(
    [], (),
    inputs=(
        Input("a", "prompts.0", "compute[tokens, 4]"),
        Input("b", "prompts.1", "compute[tokens, 4]"),
    ),
)  # fmt: skip


def test_the_items_of_a_list_have_one_shape() -> None:
    program = Program("Model", [LIST])
    same = {"prompts": [mx.zeros((3, 4)), mx.ones((3, 4))]}
    assert bind(program, "forward", same, "float32")[1]["b"].shape == (3, 4)
    other = {"prompts": [mx.zeros((3, 4)), mx.ones((5, 4))]}
    with pytest.raises(MlxconvError, match=r"0 \(3, 4\) and prompts.1 \(5, 4\) differ"):
        bind(program, "forward", other, "float32")
