"""What `bench --ablate` puts in for an op gives what the op gives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.bench.examples import Sizes, make_example
from mlxconv.runtime.bench.unfusing import (
    ELEMENTWISE,
    MANUAL,
    apart,
    apply_change,
    compiled,
    table_inputs,
    uses,
    with_ids_in_the_loop,
)
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.ops import OPS

from ...conftest import Bundles

RANDOM = np.random.default_rng(0)


def noise(*shape: int) -> mx.array:
    return mx.array(RANDOM.standard_normal(shape, dtype=np.float32))


HEADS = {"q": noise(1, 4, 5, 8), "k": noise(1, 2, 7, 8), "v": noise(1, 2, 7, 8)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("attention", HEADS),
    "boolean mask": ("attention", {**HEADS, "mask": mx.array([[True] * 5 + [False] * 2])}),
    "added mask": ("attention", {**HEADS, "mask": noise(1, 1, 5, 7)}),
    "causal": ("attention", {**HEADS, "causal": True, "scale": 0.5}),
    "weight": ("rms_norm", {"x": noise(3, 8), "weight": noise(8), "eps": 1e-5}),
    "no weight": ("rms_norm", {"x": noise(3, 8)}),
    "shift": ("modulated_norm", {"x": noise(2, 3, 8), "scale": noise(2, 1, 8), "shift": noise(8)}),
    "no shift": ("modulated_norm", {"x": noise(2, 3, 8), "scale": noise(8)}),
    "pairs": ("rotary", {"x": noise(2, 3, 8), "cos": noise(3, 4), "sin": noise(3, 4),
                         "interleaved": True}),
    "halves": ("rotary", {"x": noise(2, 3, 8), "cos": noise(3, 8), "sin": noise(3, 8),
                          "interleaved": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_op_written_out_gives_the_same(case: str) -> None:
    op, args = CASES[case]
    np.testing.assert_allclose(MANUAL[op](**args), OPS[op](**args), rtol=1e-5, atol=1e-6)


def test_an_op_compiled_for_itself_gives_the_same() -> None:
    args = {"x": noise(3, 4), "approximate": True}
    np.testing.assert_allclose(compiled(OPS["gelu"])(**args), OPS["gelu"](**args), rtol=1e-5)


def test_sizes_stay_integers() -> None:
    assert compiled(OPS["add"])(a=2, b=3) == 5


def test_elementwise_ops_are_not_products() -> None:
    assert {"add", "mul", "gelu"} <= set(ELEMENTWISE)
    assert not {"linear", "attention", "rms_norm", "reshape"} & set(ELEMENTWISE)


def test_separate_products_give_what_one_gives(flux_bundle: Bundles) -> None:
    component = load_component(flux_bundle("fp32"), "transformer")
    example = make_example(component.program, component.config, sizes=Sizes(pixels=(64, 64)))
    separate = apply_change(component, "linears")
    assert uses(component.program, "linears")
    assert not uses(separate.program, "linears")
    given = example.at_step(0)
    np.testing.assert_allclose(separate(**given), component(**given), rtol=1e-4, atol=1e-5)


def test_a_program_without_the_op_stays_as_it_is(flux_bundle: Bundles) -> None:
    separate = apart(load_component(flux_bundle("fp32"), "transformer").program)
    assert apart(separate) == separate


def test_positions_decide_the_rotary_tables(flux_bundle: Bundles) -> None:
    component = load_component(flux_bundle("fp32"), "transformer")
    entry = component.program.entry("forward")
    assert table_inputs(component.program, entry) == {"img_ids", "txt_ids"}
    moved = with_ids_in_the_loop(component).program.entry("forward")
    stages = {i.name: i.stage for i in moved.inputs}
    assert stages["img_ids"] == "step"
    assert stages["encoder_hidden_states"] == "prompt"
