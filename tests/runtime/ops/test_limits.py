"""What a program may ask of MLX, which checks no index and trusts sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.executor import Executor
from mlxconv.runtime.ops import OPS
from mlxconv.runtime.program.program import Entry, Input, Node, Program, Ref, Weight
from mlxconv.runtime.program.stored import validate
from mlxconv.runtime.program.types import parse_type

from ...bundles import PROGRAM, WEIGHTS, change_json, change_tensors, copy
from ...conftest import Bundles

FAR = mx.array([10**9, -(10**9), 2, -1])
X = mx.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
CLAMPED = [2, 0, 2, 2]


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64, mx.uint32])
def test_a_computed_index_stays_in_its_table(dtype: mx.Dtype) -> None:
    far = FAR.astype(dtype)
    rows = [2 if n == 2 or n > 2**30 else r for n, r in zip(np.array(far).tolist(), CLAMPED)]
    expected = np.array(X)[rows]
    np.testing.assert_array_equal(OPS["embedding"](X, far), expected)
    np.testing.assert_array_equal(OPS["take"](X, far, 0), expected)
    np.testing.assert_array_equal(OPS["index"](X, [far]), expected)
    wide = mx.broadcast_to(far[:, None], (4, 2))
    np.testing.assert_array_equal(OPS["take_along"](X, wide, 0), expected)


def test_an_index_of_few_bits_reaches_all_of_a_long_axis() -> None:
    line = mx.arange(1000)
    np.testing.assert_array_equal(OPS["take"](line, mx.array([3, 255], mx.uint8), 0), [3, 255])


def test_what_is_put_beyond_an_axis_lands_on_its_end() -> None:
    far = mx.array([10**9])
    put = OPS["index_put"](X, [far], mx.array([[7.0, 7.0]]))
    along = OPS["put_along"](X, far.reshape(1, 1), mx.array([[7.0]]), 0)
    np.testing.assert_array_equal(put, [[0, 1], [2, 3], [7, 7]])
    np.testing.assert_array_equal(along, [[0, 1], [2, 3], [7, 5]])
    with pytest.raises(ValueError, match="an index of 9 on an axis of 2"):
        OPS["put_along"](X, mx.zeros((1, 9), mx.int32), mx.zeros((1, 9)), 0)


def conv(dtype: mx.Dtype = mx.float32, **options: Any) -> mx.array:
    return OPS["conv"](mx.zeros((1, 1, 3), dtype), mx.zeros((1, 1, 1)), **options)


@pytest.mark.parametrize(
    ("apply", "says"),
    [
        (lambda: OPS["embedding"](X, 3), "index 3 on an axis of 3"),
        (lambda: OPS["select"](X, 1, -3), "index -3 on an axis of 2"),
        (lambda: OPS["take"](X[:0], FAR, 0), "an index on an axis of 0"),
        (lambda: OPS["take"](X, X, 0), "expected whole numbers"),
        (lambda: OPS["split"](X, (1, 2**40), 0), "sizes is 1099511627776"),
        (lambda: OPS["split"](X, (1, 1), 0), "of an axis of 3"),
        (lambda: OPS["floor_div"](mx.array([1]), 0), "division by 0"),
        (lambda: conv(padding=(4096,)), "padding or stride of 4096 for a kernel that reaches 1"),
        (lambda: conv(groups=False), "groups is"),
        (lambda: conv(dtype=mx.int32), "a convolution of"),
        (
            lambda: OPS["upsample_nearest"](mx.zeros((1, 1, 4, 4)), None, [4096, 2.0]),
            r"scales \[4096, 2.0\] make 8192.0 elements of one, more than 1024",
        ),
        (
            lambda: OPS["upsample_linear"](mx.zeros((1, 1, 4)), None, [float("nan")]),
            "make nan elements of one",
        ),
    ],
)
def test_numbers_that_fit_nothing_are_refused(apply: Callable[[], Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError, ZeroDivisionError), match=says):
        apply()


def test_whole_numbers_are_divided_by_anything() -> None:
    a = mx.array([-7, 7, -(2**31), 5], mx.int32)
    b = mx.array([-1, -3, -1, 0], mx.int32)
    assert OPS["floor_div"](a, b)[:2].tolist() == [7, -3]
    assert OPS["mod"](a, b)[:2].tolist() == [0, -2]
    assert OPS["fmod"](a, b)[:2].tolist() == [0, 1]
    assert OPS["trunc_div"](a, b)[:2].tolist() == [7, -2]


def test_attention_over_no_heads_gives_nothing() -> None:
    empty = mx.zeros((1, 0, 3, 4))
    assert OPS["attention"](empty, empty, empty).shape == (1, 0, 3, 4)


# ---- programs -----------------------------------------------------------------------------------


def _program(*nodes: Node) -> Program:
    entry = Entry(list(nodes), (Ref("y"),), inputs=(Input("x", "x", parse_type("float32[n]")),))
    return Program("Hand", [entry])


@pytest.mark.parametrize(
    ("op", "args", "says"),
    [
        ("conv", {"weight": Weight("w"), "groups": 0}, "groups is 0, expected a whole number from"),
        ("conv", {"weight": Weight("w"), "stride": (1, 0)}, "stride is 0"),
        ("conv", {"weight": Weight("w"), "padding": (-1,)}, "padding is -1"),
        ("conv", {"weight": Weight("w"), "dilation": (2**40,)}, "dilation is 1099511627776"),
        ("max_pool", {"kernel": (10**6,)}, "kernel is 1000000"),
        ("group_norm", {"groups": 0}, "groups is 0"),
        ("tile", {"repeats": (-1,)}, "repeats is -1"),
        ("repeat", {"repeats": float("nan")}, "repeats is"),
        ("reshape", {"shape": (-2, 2)}, "shape is -2"),
        ("split_every", {"size": 0}, "size is 0"),
        ("softmax", {"axis": 2**40}, "axis is"),
        ("conv", {}, "takes x, weight, bias"),
        ("softmax", {"temperature": 1}, "takes x, axis, given x, temperature"),
    ],
)
def test_arguments_are_checked_when_a_program_is_loaded(
    op: str, args: dict[str, Any], says: str
) -> None:
    with pytest.raises(MlxconvError, match=f"node {op} y: {says}"):
        validate(_program(Node(op, ("y",), {"x": Ref("x"), **args})))


def test_two_values_of_one_name_are_refused() -> None:
    twice = [Node("neg", ("y",), {"x": Ref("x")})] * 2
    with pytest.raises(MlxconvError, match="gives two values the same name"):
        validate(_program(*twice))


def test_a_size_that_is_computed_is_checked_when_it_is_used(flux_bundle: Bundles) -> None:
    weights = load_component(flux_bundle("fp32")).executor.weights
    nodes = (
        Node("dim", ("n",), {"x": Ref("x"), "axis": 0}),
        Node("sub", ("zero",), {"a": Ref("n"), "b": 4}),
        Node("split_every", ("y",), {"x": Ref("x"), "size": Ref("zero")}),
    )
    with pytest.raises(MlxconvError, match="size is 0, expected a whole number from 1"):
        Executor(_program(*nodes), weights)(x=mx.zeros(4))


def test_a_large_array_is_not_made_of_a_few_elements(flux_bundle: Bundles) -> None:
    weights = load_component(flux_bundle("fp32")).executor.weights
    node = Node("repeat", ("y",), {"x": Ref("x"), "repeats": 10**6})
    with pytest.raises(MlxconvError, match=r"repeat .* 128 elements make 128000000"):
        Executor(_program(node), weights)(x=mx.zeros(128))


@pytest.mark.parametrize("compile", ["program", "off"])
def test_more_than_the_stack_holds_is_not_compiled(compile: str, flux_bundle: Bundles) -> None:
    weights = load_component(flux_bundle("fp32")).executor.weights
    names = ["x", *(f"v{i}" for i in range(9_000)), "y"]
    nodes = [Node("neg", (b,), {"x": Ref(a)}) for a, b in pairwise(names)]
    executor = Executor(_program(*nodes), weights, compile=compile)
    assert executor(x=mx.ones(1)).tolist() == [-1]


# ---- bundles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[[3, 10**6]], [[3, -1]], np.array([[3, 2**32 + 1]])])
def test_a_token_beyond_the_vocabulary_is_an_error(ids: Any, pipeline_bundle: Bundles) -> None:
    encoder = load_component(pipeline_bundle("4bit"), "text_encoder")
    rows = encoder.program.parameters["embeddings.token_embedding.weight"].shape[0]
    says = rf"input_ids has the id {np.max(ids) if np.max(ids) > 3 else -1}; .* has {rows} entries"
    with pytest.raises(MlxconvError, match=says):
        encoder(input_ids=ids)


def test_the_last_token_of_the_vocabulary_is_read(pipeline_bundle: Bundles) -> None:
    encoder = load_component(pipeline_bundle("4bit"), "text_encoder")
    rows = encoder.program.parameters["embeddings.token_embedding.weight"].shape[0]
    mx.eval(encoder(input_ids=[[0, rows - 1]]))


@pytest.fixture
def bundle(flux_bundle: Bundles, tmp_path: Path) -> Path:
    return copy(flux_bundle("4bit"), tmp_path)


def test_a_weight_of_another_shape_than_the_program_says(bundle: Path) -> None:
    def change(arrays: dict[str, mx.array]) -> None:
        arrays["x_embedder.bias"] = mx.zeros((2, 32), mx.bfloat16)

    change_tensors(bundle / "transformer", change)
    with pytest.raises(MlxconvError, match=rf"{WEIGHTS}: x_embedder.bias has shape \(2, 32\)"):
        load_component(bundle).executor.weights.get("x_embedder.bias")


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_a_quantized_weight_whose_parts_do_not_fit(part: str, bundle: Path) -> None:
    name = "transformer_blocks.0.attn.to_q"

    def change(arrays: dict[str, mx.array]) -> None:
        arrays[f"{name}.{part}"] = arrays[f"{name}.{part}"][:-1]

    change_tensors(bundle / "transformer", change)
    with pytest.raises(MlxconvError, match=f"{name}.*has shape .*, the program expects"):
        load_component(bundle).executor.weights.get(f"{name}.weight")


@pytest.mark.parametrize("key", ["group_size", "bits"])
def test_a_quantization_that_mlx_lacks(key: str, bundle: Path) -> None:
    def change(config: Any) -> None:
        config["quantization"][key] = 0

    change_json(bundle / "transformer" / "config.json", change)
    with pytest.raises(MlxconvError, match=r"config.json: .*MLX has no such quantization"):
        load_component(bundle).executor.weights.get("transformer_blocks.0.attn.to_q.weight")


def test_a_size_that_depends_on_a_value_is_not_staged_before_it(bundle: Path) -> None:
    from mlxconv.runtime.program.stages import split

    def change(data: Any) -> None:
        nodes = data["entries"][0]["nodes"]
        dim = next(n for n in nodes if n[0] == "dim")
        nodes.insert(0, ["item", ["axis"], {"x": "%timestep"}, "", []])
        dim[2]["axis"] = "%axis"

    change_json(bundle / "transformer" / PROGRAM, change)
    program = load_component(bundle).program
    constant = split(program, program.entries[0]).entries[0]
    assert "axis" not in {i.name for i in constant.inputs}
