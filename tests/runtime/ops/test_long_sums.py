"""Long sums in fp32: as exact on a CPU as in float64, and the same function as MLX's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.exec import strips
from mlxconv.runtime.ops import OPS, long_sums

Array = np.ndarray[Any, Any]
MANY = 1 << 20
BAR = 2e-6  # MLX's own functions are at 4e-6 to 5e-4 with these values


def relative(found: mx.array, exact: Any) -> float:
    gap = np.asarray(found, np.float64) - exact
    assert gap.shape == np.shape(exact)
    return float(np.linalg.norm(gap) / np.linalg.norm(exact))


def values(*shape: int) -> Array:
    """Positive on the whole, as squares and weights are: small ones are lost beside a large sum."""
    return (np.random.default_rng(0).standard_normal(shape) + 2).astype(np.float32)


def exact_softmax(x: Array) -> Array:
    grown = np.exp(x)
    return np.asarray(grown / grown.sum(axis=-1, keepdims=True))


def normalized(x: Array) -> Array:
    gap = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(gap / np.sqrt((gap**2).mean(axis=-1, keepdims=True) + 1e-5))


REFERENCES: dict[str, tuple[dict[str, Any], Callable[[Array], Any]]] = {
    "sum": ({"axis": -1}, lambda x: x.sum(-1)),
    "mean": ({"axis": [1], "keepdims": True}, lambda x: x.mean(-1, keepdims=True)),
    "var": ({"axis": [0, 1]}, lambda x: x.var(ddof=1)),
    "cumsum": ({"axis": 1}, lambda x: x.cumsum(-1)),
    "softmax": ({}, exact_softmax),
    "layer_norm": ({}, normalized),
    "rms_norm": ({}, lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)),
    "group_norm": ({"groups": 2}, lambda x: normalized(x.reshape(1, 2, -1)).reshape(x.shape)),
}


@pytest.mark.parametrize("op", REFERENCES)
def test_a_reduction_over_a_million_values_keeps_its_digits(op: str) -> None:
    options, reference = REFERENCES[op]
    x = values(1, 4, 512, 1024) if op == "group_norm" else values(2, MANY)
    assert relative(OPS[op](mx.array(x), **options), reference(x.astype(np.float64))) < BAR


def test_logsumexp_over_a_million_values() -> None:
    x = values(1, MANY)
    found = np.exp(np.asarray(OPS["logsumexp"](mx.array(x), axis=1), np.float64) - 16)
    exact = np.exp(x.astype(np.float64) - 16).sum(axis=1)
    assert abs(found / exact - 1) < 16 * BAR  # one rounding of 16.4 in fp32 is 1e-6 here


def test_products_over_many_values_keep_their_digits() -> None:
    a, b = np.full((2, 65536), 0.1, np.float32), np.full((65536, 2), 0.3, np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert relative(OPS["matmul"](mx.array(a), mx.array(b)), exact) < 1e-5  # 5e-4 in one sum


def test_attention_over_many_equal_keys_keeps_its_digits() -> None:
    """Equal weights and values round alike, always to the same side, as a flat sky's do."""
    q, k, v = values(1, 1, 4, 8), values(1, 1, 1, 8), values(1, 1, 1, 8)
    k, v = (np.broadcast_to(x, (1, 1, 16384, 8)) for x in (k, v))
    found = OPS["attention"](*(mx.array(x) for x in (q, k, v)))
    assert relative(found, np.broadcast_to(v[:, :, :1], found.shape)) < 1e-5  # 1e-4 in one sum


@pytest.mark.parametrize("shape", [(2, 3, 5003), (5003, 3, 2), (2, 4999, 3), (90, 2, 90)])
@pytest.mark.parametrize("axis", [None, 0, -1, [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("keepdims", [True, False])
def test_any_axes_give_what_numpy_gives(shape: tuple[int, ...], axis: Any, keepdims: bool) -> None:
    x = values(*shape)
    wide, axes = x.astype(np.float64), tuple(axis) if isinstance(axis, list) else axis
    for op, reference in {"sum": np.sum, "mean": np.mean, "var": np.var}.items():
        options = {"ddof": 0} if op == "var" else {}
        found = OPS[op](mx.array(x), axis=axis, keepdims=keepdims, **options)
        assert relative(found, reference(wide, axis=axes, keepdims=keepdims)) < BAR


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_running_sums_along_any_axis(axis: int) -> None:
    x = values(*(4999 if a == axis else 3 for a in range(3)))
    found = OPS["cumsum"](mx.array(x), axis=axis)
    assert relative(found, x.astype(np.float64).cumsum(axis)) < BAR


def test_infinite_and_masked_values_do_what_they_do_in_short_sums() -> None:
    x = np.full((3, 5000), -np.inf, np.float32)
    x[1, 7], x[2, 3] = 2.0, np.nan
    for op in ("softmax", "logsumexp"):
        options = {"axis": -1}
        short = np.asarray(OPS[op](mx.array(x[:, :20]), **options))
        long = np.asarray(OPS[op](mx.array(x), **options))
        np.testing.assert_array_equal(long[:, :20] if op == "softmax" else long, short)


def masks(queries: int, keys: int) -> dict[str, Any]:
    flags = np.random.default_rng(1).random((queries, keys)) > 0.5
    flags[0, :] = False
    flags[0, -1:] = True
    added = np.where(flags, 0.5, -np.inf).astype(np.float32)
    return {
        "none": None, "causal": "causal", "flags": mx.array(flags), "added": mx.array(added),
        "by batch": mx.array(np.stack([flags, ~flags])[:, None]),
        "by head": mx.array(np.stack([added] * 4)[None]),
        "over all keys": mx.array(np.ones((queries, 1), np.float32)),
    }  # fmt: skip


@pytest.mark.parametrize("mask", masks(1, 1))
def test_attention_in_blocks_is_attention(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = mx.array(values(2, 4, 30, 8)), mx.array(values(2, 2, 30, 8)[..., ::-1].copy())
    v = mx.array(values(2, 2, 30, 5))
    given = masks(30, 30)[mask]
    whole = long_sums.attention(q, k, v, 0.3, given)
    monkeypatch.setattr(long_sums, "LONG", 16)
    monkeypatch.setattr(long_sums, "_BLOCK", 7)

    def blocks(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return long_sums.attention(q, k, v, 0.3, given)

    found = (mx.compile(blocks) if mask == "flags" else blocks)(q, k, v)
    assert relative(found, np.asarray(whole, np.float64)) < BAR


def test_a_group_norm_in_strips_keeps_its_digits() -> None:
    x = values(1, 2, 1024, 1024)
    cut = strips.cut(mx.array(x), 2, strips.evenly(1024, 2))
    found = strips.RULES["group_norm"]({"x": cut, "groups": 1}, cut).whole()
    exact = normalized(x.astype(np.float64).reshape(1, 1, -1)).reshape(x.shape)
    assert relative(found, exact) < BAR


def test_elsewhere_mlx_adds_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of Metal and CUDA add in trees; half precision is widened before."""
    assert long_sums.is_long(mx.zeros(1), 5000)
    assert not long_sums.is_long(mx.zeros(1), 4096)
    assert not long_sums.is_long(mx.zeros(1, mx.int32), 5000)
    monkeypatch.setattr(long_sums, "on_cpu", lambda: False)
    assert not long_sums.is_long(mx.zeros(1), 5000)
