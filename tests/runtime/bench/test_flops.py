"""Arithmetic of a step: which products each op is, and how many operations they take."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxconv.runtime.bench.examples import Sizes, make_example
from mlxconv.runtime.bench.flops import Gemm, Products, gemm_seconds, gemms_of, step_products
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.ops import OPS

from ...conftest import Bundles

PRODUCTS = {
    "linear": ({"x": (2, 5, 8), "weight": (3, 8)}, [(1, 10, 8, 3)]),
    "attention": (
        {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 7, 8)},
        [(8, 5, 8, 7), (8, 5, 7, 8)],
    ),
    "matmul": ({"a": (3, 5, 8), "b": (3, 8, 2)}, [(3, 5, 8, 2)]),
    "conv": (
        {"x": (2, 4, 6, 6), "weight": (8, 3, 3, 4), "stride": (1, 1), "padding": (1, 1)},
        [(1, 72, 36, 8)],
    ),
    "add": ({"a": (3,), "b": (3,)}, []),
}


@pytest.mark.parametrize("op", PRODUCTS)
def test_an_op_is_counted_as_its_products(op: str) -> None:
    shapes, expected = PRODUCTS[op]
    settings = ("stride", "padding")
    args: dict[str, Any] = {k: v if k in settings else mx.zeros(v) for k, v in shapes.items()}
    if op in ("matmul", "conv"):
        args = {**args, **({"dilation": (1, 1)} if op == "conv" else {})}
    assert gemms_of(op, args, OPS[op](**args)) == expected


def test_a_product_is_two_operations_a_multiplication() -> None:
    gemm: Gemm = (2, 3, 5, 7)
    products = Products()
    products.gemms[gemm] = 3
    assert products.flops == 3 * 2 * 2 * 3 * 5 * 7


def test_a_staged_step_has_fewer_products_than_the_whole_entry(flux_bundle: Bundles) -> None:
    component = load_component(flux_bundle("fp32"), "transformer")
    example = make_example(component.program, component.config, sizes=Sizes(pixels=(64, 64)))
    staged, whole = (step_products(component, example, staged=s) for s in (True, False))
    assert 0 < staged.flops < whole.flops
    assert component.executor.weights.resident_bytes() == 0  # nothing was computed


def test_small_products_are_timed_without_what_calling_them_takes() -> None:
    """Sixteen rows at once take less than sixteen evaluations of one."""
    from time import perf_counter

    a, b = mx.ones((1, 4, 4)), mx.ones((1, 4, 4))
    mx.eval(a @ b)
    began = perf_counter()
    for _ in range(200):
        mx.eval(a @ b)
    alone = (perf_counter() - began) / 200
    products = Products()
    products.gemms[(1, 4, 4, 4)] = 1
    assert gemm_seconds(products, mx.float32) < alone / 2


def test_the_same_products_are_timed() -> None:
    products = Products()
    products.gemms[(1, 4, 4, 4)] = 2
    assert gemm_seconds(products, mx.float32, repeats=1) > 0
