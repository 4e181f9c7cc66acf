"""Each rewrite on an entry of a few nodes: what it writes, and what it must leave alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.convert.lower.rewrites import rewrite
from mlxconv.convert.lower.rewrites.sharing import (
    common_parent,
    drop_dead,
    share_common,
    share_sizes,
)
from mlxconv.runtime.program.program import Arg, Entry, Input, Node, Parameter, Ref, Weight
from mlxconv.runtime.program.types import parse_type

from ..trace.evaluation import error, evaluate

X = Input("x", "x", parse_type("compute[batch, tokens, 8]"))
WIDE = Input("x", "x", parse_type("float32[batch, tokens, 8]"))
LINEAR = {name: Parameter((4, 8), "compute", "linear") for name in "abc"}


def node(out: str, op: str, type: str = "", /, module: str = "", **args: Arg) -> Node:
    return Node(op, tuple(out.split()), args, module, tuple(map(parse_type, type.split(";"))))


def entry(*nodes: Node, inputs: tuple[Input, ...] = (X,), **fields: Any) -> Entry:
    outputs = fields.pop("outputs", (Ref(nodes[-1].out[0]),))
    return Entry(list(nodes), outputs, inputs=inputs, **fields)


def ops(found: Entry) -> list[str]:
    return [node.op for node in found.nodes]


def rewritten(found: Entry, parameters: Mapping[str, Parameter] | None = None) -> list[str]:
    return ops(rewrite(found, parameters or {}))


def array(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(0).normal(size=shape).astype(np.float32))


# ---- nodes that nobody reads, or that are there twice -------------------------------------------


def test_dead_nodes_go_and_their_taps_with_them() -> None:
    found = drop_dead(
        entry(
            node("a", "exp", x=Ref("x")),
            node("b", "sin", x=Ref("x")),
            outputs=(Ref("b"),),
            taps={"first": ("a",), "second": ("b",)},
        )
    )
    assert ops(found) == ["sin"]
    assert found.taps == {"second": ("b",)}


def test_equal_nodes_become_one_of_their_common_parent() -> None:
    found = share_common(
        entry(
            node("a", "exp", module="blocks.0.attn", x=Ref("x")),
            node("b", "exp", module="blocks.1.attn", x=Ref("x")),
            node("c", "add", a=Ref("a"), b=Ref("b")),
            taps={"blocks.1.attn": ("b",)},
        )
    )
    assert [n.module for n in found.nodes] == ["blocks", ""]
    assert found.nodes[1].args == {"a": Ref("a"), "b": Ref("a")}
    assert found.taps == {"blocks.1.attn": ("a",)}


def test_what_one_block_computes_is_not_shared_with_the_next() -> None:
    found = share_common(
        entry(
            node("h", "exp", module="blocks.0", x=Ref("x")),
            node("a", "sin", module="blocks.0", x=Ref("h")),
            node("b", "sin", module="blocks.1", x=Ref("h")),
            node("c", "add", a=Ref("a"), b=Ref("b")),
        )
    )
    assert ops(found) == ["exp", "sin", "sin", "add"]


def test_a_number_and_a_flag_of_equal_value_are_different_arguments() -> None:
    found = share_common(
        entry(
            node("a", "mul", a=Ref("x"), b=1),
            node("b", "mul", a=Ref("x"), b=1.0),
            node("c", "add", a=Ref("a"), b=Ref("b")),
        )
    )
    assert ops(found) == ["mul", "mul", "add"]


@pytest.mark.parametrize(
    ("first", "second", "parent"),
    [("a.0.x", "a.0.y", "a.0"), ("a.0", "a.0.y", "a.0"), ("a.0", "a.10", "a"), ("a", "b", "")],
)
def test_common_parent(first: str, second: str, parent: str) -> None:
    assert common_parent(first, second) == parent


# ---- sizes --------------------------------------------------------------------------------------


def test_sizes_of_inner_values_are_computed_from_the_inputs() -> None:
    found = share_sizes(
        entry(
            node("y", "exp", "compute[tokens + 8, 4]", x=Ref("x")),
            node("n", "dim", "int", x=Ref("y"), axis=0),
            node("z", "reshape", "", x=Ref("x"), shape=(Ref("n"), -1)),
        )
    )
    last = found.nodes[-1].args["shape"]
    assert last == (Ref("tokens_plus_8"), -1)
    assert "dim" not in ops(found)[3:]


def test_a_size_comes_from_the_input_that_is_known_first() -> None:
    late, early = X, Input("ids", "ids", parse_type("int32[batch]"), "prompt")
    found = share_sizes(
        entry(
            node("n", "dim", "int", x=Ref("x"), axis=0),
            node("y", "full", "float32[batch]", shape=(Ref("n"),), value=0, dtype="float32"),
            inputs=(late, early),
        )
    )
    batch = next(n for n in found.nodes if n.out == ("batch",))
    assert batch.args["x"] == Ref("ids")


# ---- small equalities ---------------------------------------------------------------------------


def test_a_cast_to_fp32_and_back_cancels() -> None:
    wide = node("a", "cast", "float32[batch, tokens, 8]", x=Ref("x"), dtype="float32")
    back = node("b", "cast", "compute[batch, tokens, 8]", x=Ref("a"), dtype="compute")
    assert rewritten(entry(wide, back, node("y", "exp", x=Ref("b")))) == ["exp"]


def test_a_cast_that_rounds_stays() -> None:
    narrow = node("a", "cast", "compute[batch, tokens, 8]", x=Ref("x"), dtype="compute")
    back = node("b", "cast", "float32[batch, tokens, 8]", x=Ref("a"), dtype="float32")
    found = entry(narrow, back, node("y", "exp", x=Ref("b")), inputs=(WIDE,))
    assert rewritten(found) == ["cast", "cast", "exp"]


SAME = "compute[batch, tokens, 8]"
TURNED = "compute[batch, 8, tokens]"


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a", "mul", SAME, a=Ref("x"), b=1)],
        [node("a", "add", SAME, a=0, b=Ref("x"))],
        [node("a", "reshape", SAME, x=Ref("x"), shape=(-1, 5, 8))],
        [node("a", "transpose", SAME, x=Ref("x"), axes=(0, 1, 2))],
        [
            node("t", "transpose", TURNED, x=Ref("x"), axes=(0, 2, 1)),
            node("a", "transpose", SAME, x=Ref("t"), axes=(0, 2, 1)),
        ],
        [node("a", "concat", SAME, xs=(Ref("x"),), axis=0)],
        [node("a", "tile", SAME, x=Ref("x"), repeats=(1, 1, 1))],
        [
            node("j", "concat", "compute[batch, tokens, 16]", xs=(Ref("x"), Ref("x")), axis=-1),
            node("a", "slice", SAME, x=Ref("j"), axis=2, start=8, stop=None, step=1),
        ],
    ],
    ids=lambda nodes: nodes[-1].op,
)
def test_what_changes_nothing_goes(nodes: list[Node]) -> None:
    assert rewritten(entry(*nodes, node("y", "exp", SAME, x=Ref("a")))) == ["exp"]


def test_a_product_with_one_that_widens_stays() -> None:
    found = entry(node("a", "mul", "float32[batch, tokens, 8]", a=Ref("x"), b=1))
    assert rewritten(found) == ["mul"]


def test_of_two_reshapes_the_last_matters() -> None:
    found = rewrite(
        entry(
            node("a", "reshape", "compute[n, 4]", x=Ref("x"), shape=(-1, 4)),
            node("b", "reshape", "compute[m, 2]", x=Ref("a"), shape=(-1, 2)),
        ),
        {},
    )
    assert [n.args for n in found.nodes] == [{"x": Ref("x"), "shape": (-1, 2)}]


def test_known_sizes_are_folded() -> None:
    found = rewrite(
        entry(
            node("a", "mul", "int", a=6, b=4),
            node("b", "floor_div", "int", a=Ref("a"), b=3),
            node("y", "reshape", "", x=Ref("x"), shape=(Ref("b"), -1)),
        ),
        {},
    )
    assert [n.args.get("shape") for n in found.nodes] == [(8, -1)]


# ---- norms --------------------------------------------------------------------------------------


def _rms(eps: Arg = 1e-6, axis: int = -1) -> list[Node]:
    one = "float32[batch, tokens, 1]"
    return [
        node("s", "pow", str(WIDE.type), a=Ref("x"), b=2),
        node("m", "mean", one, x=Ref("s"), axis=(axis,), keepdims=True),
        node("e", "add", one, a=Ref("m"), b=eps),
        node("r", "rsqrt", one, x=Ref("e")),
        node("y", "mul", str(WIDE.type), a=Ref("r"), b=Ref("x")),
    ]


def test_a_mean_over_another_axis_is_no_rms_norm() -> None:
    assert "rms_norm" in rewritten(entry(*_rms(), inputs=(WIDE,)))
    assert "rms_norm" not in rewritten(entry(*_rms(axis=1), inputs=(WIDE,)))


def test_a_weight_that_is_not_one_a_feature_stays_outside() -> None:
    for shape, wanted in (((8,), ["rms_norm"]), ((1,), ["rms_norm", "mul"])):
        weight = {"w": Parameter(shape, "float32", "other")}
        found = entry(
            *_rms(), node("z", "mul", str(WIDE.type), a=Ref("y"), b=Weight("w")), inputs=(WIDE,)
        )
        assert rewritten(found, weight) == wanted


def test_a_residual_is_not_taken_for_a_shift() -> None:
    found = entry(
        node("n", "layer_norm", str(WIDE.type), x=Ref("x"), weight=None, bias=None, eps=1e-6),
        node("y", "mul", str(WIDE.type), a=Ref("n"), b=Ref("scale")),
        node("z", "add", str(WIDE.type), a=Ref("y"), b=Ref("x")),
        inputs=(WIDE, Input("scale", "scale", parse_type("float32[batch, 1, 8]"))),
    )
    assert rewritten(found) == ["modulated_norm", "add"]


# ---- rotary -------------------------------------------------------------------------------------


def test_turning_the_other_way_is_not_rotary() -> None:
    """(b, -a) instead of (-b, a) turns by the negative angle."""
    half = "float32[batch, tokens, 4]"
    wide = parse_type("float32[tokens, 8]")
    table = Input("cos", "cos", wide), Input("sin", "sin", wide)
    found = entry(
        node("a b", "chunk", f"{half};{half}", x=Ref("x"), chunks=2, axis=-1),
        node("n", "neg", half, x=Ref("a")),
        node("t", "concat", str(WIDE.type), xs=(Ref("b"), Ref("n")), axis=-1),
        node("c", "mul", str(WIDE.type), a=Ref("x"), b=Ref("cos")),
        node("s", "mul", str(WIDE.type), a=Ref("t"), b=Ref("sin")),
        node("y", "add", str(WIDE.type), a=Ref("c"), b=Ref("s")),
        inputs=(WIDE, *table),
    )
    assert "rotary" not in rewritten(found)


# ---- projections and modulation -----------------------------------------------------------------


def test_siblings_over_one_input_become_linears_and_cousins_do_not() -> None:
    def linear(out: str, module: str, weight: str) -> Node:
        return node(
            out, "linear", "compute[batch, tokens, 4]", module, x=Ref("x"),
            weight=Weight(weight), bias=None,
        )  # fmt: skip

    found = rewrite(
        entry(
            linear("q", "attn.q", "a"),
            linear("k", "attn.k", "b"),
            linear("m", "mlp.up", "c"),
            node("y", "concat", "", xs=(Ref("q"), Ref("k"), Ref("m")), axis=-1),
            taps={"attn.q": ("q",), "attn.k": ("k",)},
        ),
        LINEAR,
    )
    assert ops(found) == ["linears", "linear", "concat"]
    assert found.nodes[0].module == "attn"
    assert found.taps == {"attn.q": ("v0",), "attn.k": ("v1",)}


def test_a_new_axis_for_each_part_becomes_one_before_the_split() -> None:
    part, wide = "float32[batch, 4]", "float32[batch, 1, 4]"
    before = entry(
        node("a b", "split_every", f"{part};{part}", x=Ref("x"), size=4, axis=1),
        node("c", "expand_dims", wide, x=Ref("a"), axis=1),
        node("d", "expand_dims", wide, x=Ref("b"), axis=1),
        node("y", "sub", wide, a=Ref("c"), b=Ref("d")),
        inputs=(Input("x", "x", parse_type("float32[batch, 8]")),),
    )
    after = rewrite(before, {})
    assert ops(after) == ["expand_dims", "split_every", "sub"]
    inputs = {"x": array(3, 8)}
    assert error(evaluate(after, {}, inputs), evaluate(before, {}, inputs)) == 0


# ---- the whole ----------------------------------------------------------------------------------


def test_the_entry_given_is_not_changed() -> None:
    before = entry(*_rms(), inputs=(WIDE,))
    kept = copy.deepcopy(before)
    rewrite(before, {})
    assert before == kept
