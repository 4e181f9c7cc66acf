"""Which sizes a call asks for, from the shapes of its inputs."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxconv.runtime.exec.sizes import add_size_command, asked_sizes
from mlxconv.runtime.program.program import Entry

VIDEO = ["batch", 3, "4 * latent_frames - 3", "height", "width"]
TABLE = {
    "dims": {"batch": 2, "latent_frames": 2, "height": 8, "rows": 4},
    "shapes": {"encode": {"x": VIDEO}, "decode": {"z": ["batch", "channels", "latent_frames"]}},
    "arguments": {"encode": {"sizes.0.1": "patch * rows"}},
}
CONFIG = {"channels": 4, "patch": 2, "mlxconv": {"sizes": TABLE}}


def entry(name: str, **sizes: int) -> Entry:
    return Entry([], (), name=name, sizes=sizes)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("encode", (1, 3, 81, 16, 16), {"latent_frames": 21}),
        ("encode", (1, 3, 82, 16, 16), {}),  # no number of latent frames gives it
        ("encode", (1, 3, 5, 16, 16), {}),  # the size there is: something else does not fit
        ("decode", (1, 4, 13), {"latent_frames": 13}),
        ("decode", (1, 5, 13), {}),  # other channels than the model's
    ],
)
def test_a_size_is_read_off_the_inputs(
    name: str, shape: tuple[int, ...], wanted: dict[str, int]
) -> None:
    inputs = {"x" if name == "encode" else "z": mx.zeros(shape)}
    assert asked_sizes(CONFIG, entry(name, latent_frames=2), inputs) == wanted


def test_a_size_is_read_off_python_arguments() -> None:
    inputs = {"x": mx.zeros((1, 3, 5, 16, 16)), "sizes": [[3, 12]]}
    assert asked_sizes(CONFIG, entry("encode", rows=4), inputs) == {"rows": 6}


def test_dims_that_decide_what_is_computed_are_asked_for() -> None:
    inputs = {"x": mx.zeros((5, 3, 9, 24, 16))}
    asked = asked_sizes(CONFIG, entry("encode"), inputs, {("x", 2), ("x", 3)})
    assert asked == {"latent_frames": 3, "height": 24}
    assert asked_sizes(CONFIG, entry("encode"), inputs, {("x", 1)}) == {}
    listed = {"x": [mx.zeros((5, 3, 9, 24, 16))]}
    assert asked_sizes(CONFIG, entry("encode"), listed, {("x.0", 0)}) == {"batch": 5}
    numbers = {"x": mx.zeros((5, 3, 9, 24, 16)), "sizes": [[3, 12]]}
    assert asked_sizes(CONFIG, entry("encode"), numbers, {("sizes.0.1", 0)}) == {"rows": 6}


def test_a_bundle_without_the_table_gives_no_size() -> None:
    assert asked_sizes({}, entry("decode", latent_frames=1), {"z": mx.zeros((1, 4, 2))}) == {}


def test_the_command_is_quoted() -> None:
    command = add_size_command(Path("/my bundles/a/vae"), {"latent_frames": 13})
    assert command == "mlxconv add-size '/my bundles/a' --component vae --dim latent_frames=13"
