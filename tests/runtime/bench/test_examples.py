"""Example inputs: sizes from pixels and by name, and values that a program takes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxconv.runtime.bench.examples import Sizes, entry_at, make_example, text_sizes
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Entry, Input, Program
from mlxconv.runtime.program.types import parse_type

LATENTS = Input(
    "hidden_states", "hidden_states", parse_type("compute[batch, height * width, 4]"), "step"
)
TIME = Input("timestep", "timestep", parse_type("float32[batch]"), "schedule")
ROWS = Input("img_shapes_0_1", "img_shapes.0.1", parse_type("int"), "step")
MASK = Input("mask", "attention_mask", parse_type("bool[batch, text_tokens]"), "prompt")
TABLE = {
    "dims": {"batch": 2, "height": 6, "width": 4, "text_tokens": 11},
    "pixels": {"height": "H // 16", "width": "W // 16", "text_tokens": 77},
    "arguments": {"forward": {"img_shapes.0.1": "height"}},
}
CONFIG = {"mlxconv": {"sizes": TABLE}}


def program(*sizes: dict[str, int]) -> Program:
    inputs = (LATENTS, TIME, ROWS, MASK)
    entries = [
        Entry([], (), {}, "forward", inputs, one, {"img_shapes.0.0": 1}) for one in sizes or ({},)
    ]
    return Program("Made", entries)


def dims_of(sizes: Sizes, config: dict[str, Any] = CONFIG, **fixed: int) -> dict[str, int]:
    return entry_at(program(fixed), config, "forward", sizes)[1]


def test_pixels_decide_the_dims() -> None:
    dims = dims_of(Sizes(pixels=(128, 64)))
    assert dims == {"batch": 1, "height": 4, "width": 8, "text_tokens": 77}


def test_a_dim_by_name_goes_before_pixels() -> None:
    dims = dims_of(Sizes((128, 64), {"text_tokens": 5}, batch=3))
    assert dims == {"batch": 3, "height": 4, "width": 8, "text_tokens": 5}


def test_a_size_that_is_built_in_is_kept_where_no_other_is_asked_for() -> None:
    assert dims_of(Sizes(), height=6, width=6)["height"] == 6


def test_the_entry_of_the_batch_asked_for_is_taken() -> None:
    made = program({"batch": 1}, {"batch": 2})
    assert entry_at(made, CONFIG, "forward", Sizes(batch=2))[0].sizes == {"batch": 2}


@pytest.mark.parametrize(
    ("sizes", "config", "message"),
    [
        (Sizes(dims={"depth": 3}), CONFIG, "no dim depth; it has batch, height"),
        (Sizes(pixels=(8, 8)), CONFIG, "8x8 pixels are too few"),
        (Sizes(pixels=(64, 64)), {}, "use --dim NAME=SIZE with batch, height, text_tokens, width"),
        (Sizes(dims={"height": 2}), {}, "no size is known for img_shapes_0_1, text_tokens, width"),
    ],
)
def test_a_size_that_does_not_exist_is_named(
    sizes: Sizes, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(MlxconvError, match=message):
        dims_of(sizes, config)


def test_inputs_are_nested_as_their_paths_say() -> None:
    made = make_example(program(), CONFIG, sizes=Sizes((64, 96)), steps=3, compute="bfloat16")
    assert made.inputs["img_shapes"] == [[1, 6]]
    assert made.inputs["hidden_states"].shape == (1, 24, 4)
    assert made.inputs["hidden_states"].dtype == mx.bfloat16
    assert bool(mx.all(made.inputs["attention_mask"]))
    assert made.moving == ("hidden_states",)


def test_timesteps_fall() -> None:
    rows = make_example(program(), CONFIG, steps=3).schedule["timestep"]
    assert rows.shape == (3, 1)
    assert rows[0].item() > rows[1].item() > rows[2].item()


def test_one_seed_gives_the_same_values_at_every_precision() -> None:
    wide, narrow = (
        make_example(program(), CONFIG, compute=compute).latents()
        for compute in ("float32", "float16")
    )
    assert mx.array_equal(wide.astype(mx.float16), narrow)


def test_other_latents_take_the_place_of_the_first() -> None:
    made = make_example(program(), CONFIG)
    other = mx.zeros_like(made.latents())
    assert made.moved(other)["hidden_states"] is other


def test_a_text_encoder_gets_no_more_tokens_than_it_has_places() -> None:
    assert text_sizes({"max_position_embeddings": 77}, 512, 1).dims == {"text_tokens": 77}
