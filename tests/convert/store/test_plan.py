"""What is written for a parameter: the values of its tensor, counted where they are not finite."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxconv.convert.quantize.policy import Policy, parse_precision
from mlxconv.convert.source.checkpoint import Component, open_checkpoint
from mlxconv.convert.source.floats import cast, count_not_finite
from mlxconv.convert.store.plan import WeightPlan, make_plan
from mlxconv.convert.store.writer import array_bytes, read_back, write_weights
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Parameter

CODES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def every_scale() -> mx.array:
    """Normal, subnormal, huge and halfway float32 values of both signs, and what is not finite."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    bits[:4000] &= np.uint32(0xFFFF8000)  # halfway between two bfloat16
    bits[4000:8000] = (bits[4000:8000] & np.uint32(0x80000FFF)) | np.uint32(0x33000000)
    bits[8000:8006] = (0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0x477FF000)
    return mx.array(bits).view(mx.float32)


@pytest.mark.parametrize("source", CODES)
@pytest.mark.parametrize("target", CODES)
def test_a_cast_is_that_of_mlx(source: str, target: str) -> None:
    values = every_scale().astype(CODES[source])
    result = cast(array_bytes(values), source, target)
    expected = values.astype(CODES[target])
    kind = np.uint32 if target == "F32" else np.uint16
    same = np.frombuffer(result, kind) == np.frombuffer(array_bytes(expected), kind)
    assert (same | np.array(mx.isnan(expected))).all()
    assert count_not_finite(result, target) == int((~mx.isfinite(expected)).sum())


def planned(
    folder: Path, weight: np.ndarray, q: str, kind: str = "linear", dtype: str = "compute",
    **beside: np.ndarray,
) -> WeightPlan:  # fmt: skip
    beside = {f"x.{name}": value for name, value in beside.items()}
    save_file({"x.weight": weight, **beside}, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "Any"}))
    component: Component = next(iter(open_checkpoint(folder).components.values()))
    parameter = Parameter(weight.shape, dtype, kind)
    found = {"x.weight": "x.weight"}
    return make_plan(component, {"x.weight": parameter}, found, Policy(parse_precision(q)), "refit")


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_values_that_overflow_in_float16_are_counted(tmp_path: Path, kind: str) -> None:
    weight = np.ones((4, 64, 1), np.float32)[:, :, 0 if kind == "linear" else slice(None)]
    weight[0, 0], weight[3, 5], weight[2, 1] = 1e5, -7e4, 65504
    plan = planned(tmp_path, np.ascontiguousarray(weight), "fp16", kind)

    write_weights(tmp_path, "out", plan.groups)

    assert plan.not_finite == {"x.weight": 2}
    assert plan.nbytes == 4 * 64 * 2


@pytest.mark.parametrize("q", ["fp32", "bf16", "4bit", "mxfp8"])
def test_what_the_checkpoint_has_of_nan_and_infinity_is_counted(tmp_path: Path, q: str) -> None:
    weight = np.ones((2, 64), np.float32)
    weight[0, 3], weight[1, 60:] = math.nan, -math.inf
    plan = planned(tmp_path, weight, q)

    write_weights(tmp_path, "out", plan.groups)

    assert plan.not_finite == {"x.weight": 5}
    read_back(tmp_path, "out")


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("code", CODES)
def test_each_kind_of_value_that_is_not_finite_is_found(code: str, value: float) -> None:
    largest = {"F32": 3.4028235e38, "F16": 65504.0, "BF16": 3.3895314e38}[code]
    finite = mx.array([0.0, -0.0, largest, -largest]).astype(CODES[code])
    assert count_not_finite(array_bytes(finite), code) == 0
    assert count_not_finite(array_bytes(mx.array([value], CODES[code])), code) == 1


@pytest.mark.parametrize("stored", ["int8", "uint8", "bool", "int16", "int64", "complex64"])
@pytest.mark.parametrize("q", ["bf16", "4bit"])
def test_numbers_of_another_kind_are_no_floats(tmp_path: Path, stored: str, q: str) -> None:
    weight = np.ones((4, 64), stored)
    with pytest.raises(MlxconvError, match=r"'x.weight' is \w+, but the model uses it as a float;"):
        planned(tmp_path, weight, q)


@pytest.mark.parametrize("scale", ["weight_scale", "SCB"])
def test_quantized_integers_are_named_as_such(tmp_path: Path, scale: str) -> None:
    beside = {scale: np.ones((4, 1), np.float32)}
    with pytest.raises(MlxconvError, match=f"'x.{scale}' beside it says .* are quantized"):
        planned(tmp_path, np.ones((4, 64), np.int8), "bf16", **beside)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
@pytest.mark.parametrize("stored", ["int64", "int32", "uint8", "bool", "float16", "float32"])
def test_integers_are_stored_as_the_model_uses_them(
    tmp_path: Path, stored: str, dtype: str
) -> None:
    values = np.array([0, 1, 1, 0]).astype(stored)
    write_weights(tmp_path, "out", planned(tmp_path, values, "4bit", "other", dtype).groups)
    written = mx.load(str(tmp_path / "out.safetensors"))["x.weight"]
    assert written.astype(mx.int32).tolist() == [0, 1, 1, 0]
    assert str(written.dtype) == f"mlx.core.{dtype.replace('int64', 'int32')}"


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([2**31]), "int64"),
        (np.array([0.5], np.float32), "int64"),
        (np.array([math.nan], np.float32), "int32"),
        (np.array([2], np.uint8), "bool"),
        (np.array([-1]), "uint8"),
    ],
)
def test_integers_that_would_change_are_refused(
    tmp_path: Path, values: np.ndarray, dtype: str
) -> None:
    plan = planned(tmp_path, values, "bf16", "other", dtype)
    with pytest.raises(MlxconvError, match=r"'x.weight' is \w+ and has values that are not exact"):
        write_weights(tmp_path, "out", plan.groups)


def test_a_complex_parameter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match=r"x\.weight: the model uses complex64"):
        planned(tmp_path, np.ones((4, 4), np.complex64), "bf16", dtype="complex64")
