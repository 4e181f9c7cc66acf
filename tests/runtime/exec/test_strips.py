"""Decoding in strips of rows gives the same picture, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.runtime.bundle import LoadedComponent, load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.strips import RULES, Strips, evenly
from mlxconv.runtime.generate.pipeline import load
from mlxconv.runtime.generate.tiling import in_strips
from mlxconv.runtime.ops import OPS

from ...conftest import Bundles

SEAM = 0.01 * 2 / 255  # of values in -1 to 1: a hundredth of what 8 bits can show
# Latents with an odd number of rows where the class allows it; what a decoder needs of attention,
# norms over channels, three axes, and shuffled pixels.
LATENTS = {
    "AutoencoderKLFlux2": (1, 32, 13, 6),
    "AutoencoderKLQwenImage": (1, 16, 1, 13, 6),
    "AutoencoderDC": (1, 32, 6, 4),
}


def normal(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def decoded(component: LoadedComponent, shape: tuple[int, ...]) -> mx.array:
    (item,) = component.program.entry("decode").inputs
    channels = int((item.type.dims or ())[1])
    found = component.decode(**{item.path: normal((shape[0], channels, *shape[2:]))})
    values = found[0] if isinstance(found, tuple) else found
    mx.eval(values)
    assert isinstance(values, mx.array)
    return values


@pytest.mark.parametrize("class_name", LATENTS)
def test_strips_of_any_autoencoder_have_no_seams(class_name: str, tmp_path: Path) -> None:
    tiny_checkpoint(load_recipe(class_name), None, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "bundle", "fp32")
    component = load_component(tmp_path / "bundle")
    whole = decoded(component, LATENTS[class_name])
    with in_strips(component, 2**14) as strips:
        cut = decoded(component, LATENTS[class_name])
    assert strips is not None
    assert strips.most > 4
    assert float(mx.abs(whole).max()) > 0.1
    assert float(mx.abs(whole - cut).max()) < SEAM


def peak(component: LoadedComponent, size: int) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    decoded(component, (1, 16, size, size))
    return mx.get_peak_memory() - before


def test_a_strip_needs_a_part_of_the_memory(pipeline_bundle: Bundles) -> None:
    vae = load_component(pipeline_bundle("fp32"), "vae")
    decoded(vae, (1, 16, 2, 2))  # the weights are read
    whole = peak(vae, 32)
    with in_strips(vae, 2**21):
        assert peak(vae, 32) < whole / 4


def test_large_pictures_are_cut_by_themselves_and_that_is_said(pipeline_bundle: Bundles) -> None:
    pipe = load(pipeline_bundle("fp32"), keep=True)
    asked: dict[str, Any] = {"seed": 0, "steps": 1, "width": 96, "height": 64, "tokens": 16}
    whole = pipe("a cat", **asked)
    assert whole.notes == []
    cut = pipe("a cat", **asked, tile=1)
    assert [note[:14] for note in cut.notes] == ["decoded in up "]
    assert np.abs(whole.pixels - cut.pixels).max() < SEAM
    with pytest.raises(MlxconvError, match="tile is 'many': auto, off, or a number of MB"):
        pipe("a cat", **asked, tile="many")


CASES: list[tuple[str, dict[str, Any]]] = [
    ("conv", {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1]}),
    ("conv", {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}),
    ("conv", {"stride": [2, 1], "padding": [0, 2], "dilation": [1, 1]}),
    ("conv", {"stride": [1, 1], "padding": [2, 0], "dilation": [2, 1]}),
    ("group_norm", {"groups": 2}),
    ("pad", {"widths": [[0, 0], [0, 0], [1, 2], [0, 1]]}),
    ("pad", {"widths": [[0, 0], [0, 0], [0, 0], [1, 1]], "mode": "replicate"}),
    ("upsample_nearest", {"sizes": None, "scales": [2.0, 3.0]}),
    ("upsample_nearest", {"sizes": [22, 10], "scales": None}),
    ("reshape", {"shape": [4, -1, 11, 5]}),
    ("transpose", {"axes": [0, 2, 3, 1]}),
    ("broadcast", {"shape": [3, 2, 4, 11, 5]}),
    ("sum", {"axis": [1], "keepdims": True}),
    ("slice", {"axis": 3, "start": 1, "stop": 4}),
]


@pytest.mark.parametrize(("op", "options"), CASES, ids=lambda case: str(case)[:60])
def test_a_rule_gives_what_the_op_gives(op: str, options: dict[str, Any]) -> None:
    x = normal((2, 4, 11, 5))
    extra = {"weight": normal((6, 3, 3, 4), 1)} if op == "conv" else {}
    expected = OPS[op](x=x, **options, **extra)
    for bounds in ([0, 1, 4, 11], evenly(11, 11), evenly(11, 2)):
        strips = Strips((x,), 2).cut(bounds)
        found = RULES[op]({"x": strips, **options, **extra}, strips)
        assert found.shape == expected.shape
        assert float(mx.abs(found.whole() - expected).max()) < 1e-5


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("reshape", {"shape": [2, 4, 55]}),
        ("sum", {"axis": [2], "keepdims": True}),
        ("softmax", {"axis": 2}),
        ("upsample_nearest", {"sizes": [16, 5], "scales": None}),
        ("pad", {"widths": [[0, 0], [0, 0], [1, 1], [0, 0]], "mode": "reflect"}),
    ],
)
def test_what_needs_all_rows_at_once_is_left_to_the_op(op: str, options: dict[str, Any]) -> None:
    strips = Strips((normal((2, 4, 11, 5)),), 2).cut([0, 5, 11])
    assert RULES[op]({"x": strips, **options}, strips) is None
