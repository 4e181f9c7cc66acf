"""Ops that rewrites write and lowering does not, and what all ops promise."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.ops import OPS, dtype_of


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    key = mx.random.key(sum(shape))
    return mx.random.normal(shape, key=key).astype(dtype)


def close(a: mx.array, b: mx.array, tolerance: float = 1e-6) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_allclose(
        np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)), tolerance, tolerance
    )


# ---- rotary -------------------------------------------------------------------------------------


def turned(x: mx.array, angle: mx.array) -> mx.array:
    """Pairs of neighbours (..., width / 2, 2) as complex numbers, turned."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * (mx.cos(angle) + 1j * mx.sin(angle))
    return mx.stack([mx.real(z), mx.imag(z)], axis=-1).reshape(x.shape)


def test_rotary_turns_neighbours() -> None:
    x, angle = normal(2, 3, 5, 8), normal(5, 4)
    close(OPS["rotary"](x, mx.cos(angle), mx.sin(angle), True), turned(x, angle))


def test_rotary_turns_halves() -> None:
    x, angle = normal(2, 3, 5, 8), normal(5, 4)
    neighbours = x.reshape(2, 3, 5, 2, 4).swapaxes(-1, -2).reshape(x.shape)
    expected = turned(neighbours, angle).reshape(2, 3, 5, 4, 2).swapaxes(-1, -2).reshape(x.shape)
    close(OPS["rotary"](x, mx.cos(angle), mx.sin(angle), False), expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_takes_one_angle_an_element(interleaved: bool) -> None:
    x, angle = normal(2, 5, 8), normal(5, 4)
    wide = mx.repeat(angle, 2, -1) if interleaved else mx.concatenate([angle, angle], -1)
    close(
        OPS["rotary"](x, mx.cos(wide), mx.sin(wide), interleaved),
        OPS["rotary"](x, mx.cos(angle), mx.sin(angle), interleaved),
    )


# ---- modulated_norm -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 8), (2, 5, 8), (8,)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_modulated_norm_is_a_norm_scaled_and_shifted(
    shape: tuple[int, ...], dtype: mx.Dtype
) -> None:
    x, scale, shift = normal(2, 5, 8, dtype=dtype), normal(*shape, dtype=dtype), normal(*shape)
    shift = shift.astype(dtype)
    wide = x.astype(mx.float32)
    mean, var = mx.mean(wide, -1, keepdims=True), mx.var(wide, -1, keepdims=True)
    expected = (wide - mean) * mx.rsqrt(var + 1e-6) * scale + shift
    tolerance = 1e-5 if dtype == mx.float32 else 2e-2
    close(OPS["modulated_norm"](x, scale, shift, 1e-6), expected.astype(dtype), tolerance)


def test_modulated_norm_needs_no_shift() -> None:
    x, scale = normal(2, 5, 8), normal(2, 1, 8)
    expected = OPS["layer_norm"](x, eps=1e-6) * scale
    close(OPS["modulated_norm"](x, scale, eps=1e-6), expected)


# ---- linears ------------------------------------------------------------------------------------


def test_linears_are_several_linear() -> None:
    x, weights, biases = normal(2, 8), [normal(4, 8), normal(6, 8)], [normal(4), None]
    results = OPS["linears"](x, weights, biases)
    for result, w, b in zip(results, weights, biases):
        close(result, OPS["linear"](x, w, b))


# ---- numbers and sizes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "result"),
    [
        ("add", (2, 3), 5),
        ("div", (7, 2), 3.5),
        ("floor_div", (-7, 2), -4),
        ("mod", (-7, 4), 1),
        ("pow", (9, 0.5), 3.0),
        ("maximum", (2, 3), 3),
        ("minimum", (2, 3), 2),
        ("trunc", (-2.5,), -2),
        ("size_ceil", (2.1,), 3),
        ("size_floor", (2.9,), 2),
        ("size_round", (2.5,), 2),
        ("size_float", (2,), 2.0),
        ("neg", (2,), -2),
        ("eq", (2, 2), True),
    ],
)
def test_sizes_stay_python_numbers(op: str, args: tuple[float, ...], result: float) -> None:
    value = OPS[op](*args)
    assert value == result and type(value) is type(result)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_a_number_is_not_rounded_before_it_meets_bf16(op: str) -> None:
    x = mx.array([1.0, 3.0, 200.0], mx.bfloat16)
    expected = OPS[op](x.astype(mx.float32), 0.18215).astype(mx.bfloat16)
    assert mx.array_equal(OPS[op](x, 0.18215), expected)


def test_an_exact_number_meets_bf16_without_a_cast() -> None:
    assert OPS["mul"](mx.array([1.5], mx.bfloat16), 1000.0).item() == 1504.0


def test_exp_keeps_the_last_digit_of_timestep_frequencies() -> None:
    x = (-math.log(10000) * np.linspace(0, 1, 129)).astype(np.float32)
    error = np.array(OPS["exp"](mx.array(x))) / np.exp(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 1.5e-7


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sin_and_cos_of_float64_reduce_large_angles(name: str) -> None:
    x = np.linspace(-5000, 5000, 999)
    with mx.stream(mx.cpu):
        result = np.array(OPS[name](mx.array(x, mx.float64)))
    assert np.abs(result - getattr(np, name)(x)).max() < 1e-7


# ---- what all ops promise -----------------------------------------------------------------------


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(MlxconvError, match="float8"):
        dtype_of("float8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "bool"])
def test_creation_gives_the_dtype_asked_for(dtype: str) -> None:
    with mx.stream(mx.cpu):
        made = [
            OPS["full"]((2,), 1, dtype), OPS["arange"](0, 2, 1, dtype),
            OPS["linspace"](0, 1, 2, dtype), OPS["eye"](2, 2, dtype),
            OPS["cast"](mx.array([0, 1]), dtype),
        ]  # fmt: skip
    assert {array.dtype for array in made} == {dtype_of(dtype)}


def test_full_of_float64_keeps_its_digits() -> None:
    with mx.stream(mx.cpu):
        assert np.array(OPS["full"]((1,), 0.1, "float64"))[0] == 0.1


def test_a_padded_axis_may_have_one_element() -> None:
    padded = OPS["pad"](mx.ones((1, 1)), ((0, 0), (2, 1)), "replicate")
    assert padded.tolist() == [[1.0] * 4]
