"""Several products over one input equal the separate ones, however their weights are held."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.exec.weights import Held, Quantization, QuantizedWeight, Stack
from mlxconv.runtime.ops import OPS


def quantized(weight: mx.array, bits: int) -> QuantizedWeight:
    return QuantizedWeight(*mx.quantize(weight, 32, bits), spec=Quantization(32, bits))


def held(kind: str) -> list[Held]:
    mx.random.seed(0)
    dense = [mx.random.normal((rows, 32)) for rows in (3, 5)]
    if kind == "dense":
        return list(dense)
    bits = {"4 bits": (4, 4), "4 and 8 bits": (4, 8)}.get(kind)
    return [quantized(dense[0], 4), dense[1]] if bits is None else [
        quantized(w, b) for w, b in zip(dense, bits)
    ]  # fmt: skip


@pytest.mark.parametrize("weights", ["dense", "4 bits", "4 and 8 bits", "4 bits and dense"])
@pytest.mark.parametrize("biases", ["both", "none", "one", "of two dtypes"])
def test_products_over_one_input_equal_the_separate_ones(weights: str, biases: str) -> None:
    matrices, x = held(weights), mx.random.normal((2, 32))
    first, second = mx.random.normal((3,)), mx.random.normal((5,))
    vectors = {
        "both": [first, second], "none": [None, None], "one": [None, second],
        "of two dtypes": [first.astype(mx.float16), second],
    }[biases]  # fmt: skip
    separate = [
        OPS["linear"](x=x, weight=w, bias=b) for w, b in zip(matrices, vectors, strict=True)
    ]
    together = OPS["linears"](x=x, weights=Stack.of(matrices), biases=Stack.of(vectors))
    for one, other in zip(separate, together, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=1e-5)
