"""Products by quantized weights as a GPU computes them: `mx.quantized_matmul`, on a CPU here.

On a CPU the runtime dequantizes instead (`QuantizedWeight.product`); the other way is forced.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.convert.quantize.policy import (
    AFFINE_GROUPS,
    Precision,
    parse_precision,
    precision_names,
    quantize,
)
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.exec import weights
from mlxconv.runtime.exec.weights import Held, Quantization, QuantizedWeight, Stack
from mlxconv.runtime.ops import OPS

from ...conftest import Bundles

WIDTH = 256
# In bf16 MLX's CPU kernel rounds the running sum at each of WIDTH products; Metal's does not.
LIMITS = {mx.float32: 1e-6, mx.bfloat16: 2**-8 * WIDTH**0.5 / 2}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products take the way of a GPU from here on; the mode of each is noted."""
    noted: list[str] = []
    original = mx.quantized_matmul

    def quantized_matmul(*args: Any, **options: Any) -> mx.array:
        noted.append(options["mode"])
        return original(*args, **options)

    monkeypatch.setattr(weights, "on_cpu", lambda: False)
    monkeypatch.setattr(mx, "quantized_matmul", quantized_matmul)
    return noted


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def held(spec: Precision, rows: int, dtype: mx.Dtype, seed: int = 0) -> QuantizedWeight:
    """A weight as a bundle stores it and as `Weights` reads it for activations of `dtype`."""
    made = quantize(normal(rows, WIDTH, seed=seed), spec)
    affine = spec.mode == "affine"
    scales = made.scales.astype(dtype) if affine else made.scales
    biases = None if made.biases is None else made.biases.astype(dtype)
    assert spec.group_size is not None and spec.bits is not None and spec.mode is not None
    own = Quantization(spec.group_size, spec.bits, spec.mode)
    return QuantizedWeight(made.weight, scales, biases, own)


def formats() -> list[Precision]:
    """Every format that `convert` stores, at every group size that it takes."""
    named = [parse_precision(name) for name in precision_names()]
    affine = {spec.bits for spec in named if spec.mode == "affine"}
    groups = [Precision("bfloat16", "affine", b, g) for b in affine for g in AFFINE_GROUPS]
    return groups + [spec for spec in named if spec.quantized and spec.mode != "affine"]


def relative(found: mx.array, exact: mx.array) -> float:
    gap = mx.linalg.norm(found.astype(mx.float32) - exact) / mx.linalg.norm(exact)
    return float(gap)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("spec", formats(), ids=str)
def test_a_quantized_product_is_that_of_the_dequantized_weight(
    spec: Precision, dtype: mx.Dtype, products: list[str]
) -> None:
    weight, bias = held(spec, 48, dtype), normal(48, seed=3).astype(dtype)
    x = normal(2, 3, WIDTH, seed=1).astype(dtype)
    exact = x.astype(mx.float32) @ weight.dequantized(mx.float32).T
    found = OPS["linear"](x=x, weight=weight, bias=None)
    assert products == [spec.mode]
    assert (found.shape, found.dtype) == ((2, 3, 48), dtype)
    assert relative(found, exact) < LIMITS[dtype]
    both = OPS["linear"](x=x, weight=weight, bias=bias)
    assert both.dtype == dtype
    assert relative(both, exact + bias) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", ["4bit", "3bit", "mxfp4", "mxfp8", "nvfp4"])
def test_stacked_siblings_are_one_quantized_product(
    name: str, dtype: mx.Dtype, products: list[str]
) -> None:
    apart: list[Held] = [held(parse_precision(name), rows, dtype, rows) for rows in (16, 40)]
    x = normal(5, WIDTH, seed=1).astype(dtype)
    biases = [normal(40, seed=4).astype(dtype)[:16], normal(40, seed=4).astype(dtype)]
    together = OPS["linears"](x=x, weights=Stack.of(apart), biases=Stack.of(biases))
    assert len(products) == 1
    for found, weight, bias in zip(together, apart, biases, strict=True):
        assert isinstance(weight, QuantizedWeight)
        exact = x.astype(mx.float32) @ weight.dequantized(mx.float32).T + bias
        assert relative(found, exact) < LIMITS[dtype]


@pytest.mark.parametrize(("q", "compile", "dtype"), [
    ("4bit", "off", mx.float32), ("4bit", "block", mx.bfloat16), ("mxfp8", "off", mx.bfloat16),
    ("nvfp4", "block", mx.float32),
])  # fmt: skip
def test_a_whole_transformer_by_quantized_products(
    q: str, compile: str, dtype: mx.Dtype, flux_bundle: Bundles, products: list[str]
) -> None:
    """Against the way of a CPU, which `verify` compares with diffusers."""
    inputs = {
        "hidden_states": normal(1, 6, 16), "encoder_hidden_states": normal(1, 5, 64, seed=1),
        "pooled_projections": normal(1, 32, seed=2), "timestep": mx.array([0.5]),
        "img_ids": mx.zeros((6, 3)), "txt_ids": mx.zeros((5, 3)), "guidance": mx.array([4.0]),
    }  # fmt: skip
    name = str(dtype).removeprefix("mlx.core.")
    by_gpu = load_component(flux_bundle(q), dtype=name, compile=compile)
    wanted = {item.path for item in by_gpu.program.entry("forward").inputs}
    given = {name: value for name, value in inputs.items() if name in wanted}
    (found,) = _arrays(by_gpu(**given))
    assert len(products) > 8
    products.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "on_cpu", lambda: True)
        (exact,) = _arrays(load_component(flux_bundle(q), dtype=name)(**given))
        mx.eval(exact)
    assert products == []
    assert found.dtype == exact.dtype == dtype
    assert relative(found, exact) < {mx.float32: 1e-5, mx.bfloat16: 0.05}[dtype]


def _arrays(made: Any) -> tuple[mx.array, ...]:
    made = made if isinstance(made, tuple) else (made,)
    mx.eval(made)
    return made
