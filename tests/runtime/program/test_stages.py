"""What share of the weights each stage is the last to read, also inside blocks."""

from __future__ import annotations

import pytest

from mlxconv.runtime.program.program import (
    Block,
    Entry,
    Input,
    Node,
    Parameter,
    Program,
    Ref,
    Weight,
)
from mlxconv.runtime.program.stages import shares, split, value_stages, weights_by_stage
from mlxconv.runtime.program.stored import validate
from mlxconv.runtime.program.types import INT, parse_type


def linear(out: str, x: str, weight: str) -> Node:
    return Node("linear", (out,), {"x": Ref(x), "weight": Weight(weight)})


@pytest.fixture
def program() -> Program:
    """A block whose first output follows the time alone; a table that nothing decides."""
    block = Block(
        [
            linear("v0", "i1", "modulation"),
            linear("v1", "i0", "mlp"),
            Node("add", ("v2",), {"a": Ref("v1"), "b": Ref("v0")}),
        ],
        (Ref("v0"), Ref("v2")),
        inputs=("i0", "i1"),
    )
    call = Node(
        "call",
        ("a", "b"),
        {"block": "block", "prefix": "layers.0", "inputs": (Ref("x"), Ref("t"))},
    )
    entry = Entry(
        [call, linear("c", "a", "after_time"), linear("d", "b", "after_all"),
         Node("abs", ("e",), {"x": Weight("table")}), linear("f", "p", "text")],
        (Ref("c"), Ref("d"), Ref("e"), Ref("f")),
        inputs=(
            Input("x", "x", parse_type("compute[1]")),
            Input("t", "t", parse_type("compute[1]"), "schedule"),
            Input("p", "p", parse_type("compute[1]"), "prompt"),
        ),
    )  # fmt: skip
    names = ["layers.0.modulation", "layers.0.mlp", "after_time", "after_all", "table", "text"]
    parameters = {name: Parameter((2, 2 + i), "compute", "linear") for i, name in enumerate(names)}
    return Program("Model", [entry], {"block": block}, parameters)


def test_a_weight_is_of_the_latest_stage_that_reads_it(program: Program) -> None:
    assert weights_by_stage(program, program.entries[0]) == [
        {"table"},
        {"text"},
        {"layers.0.modulation", "after_time"},
        {"layers.0.mlp", "after_all"},
    ]


def test_a_call_becomes_one_for_each_stage_of_its_block(program: Program) -> None:
    parts = split(program, program.entries[0])
    validate(parts)
    calls = [[n.args["block"] for n in e.nodes if n.op == "call"] for e in parts.entries]
    assert calls == [[], [], ["block.schedule"], ["block.step"]]


def test_sizes_of_the_latents_are_known_first(program: Program) -> None:
    entry = program.entries[0]
    entry.nodes.append(Node("dim", ("n",), {"x": Ref("x"), "axis": 0}, "", (INT,)))
    entry.nodes.append(Node("reshape", ("r",), {"x": Ref("t"), "shape": (Ref("n"),)}))
    assert value_stages(program, entry)["n"] == 0
    assert value_stages(program, entry)["r"] == 2


def test_a_broadcast_is_made_by_its_reader(program: Program) -> None:
    """A row of modulation is small; repeated for each token it would not be."""
    entry = program.entries[0]
    entry.nodes.append(Node("broadcast", ("wide",), {"x": Ref("b"), "shape": (5, 1)}))
    entry.nodes.append(Node("broadcast", ("early",), {"x": Ref("t"), "shape": (5, 1)}))
    entry.nodes.append(Node("add", ("sum",), {"a": Ref("wide"), "b": Ref("early")}))
    step = split(program, entry).entries[3]
    assert "early" in {out for node in step.nodes for out in node.out}


def test_shares_are_of_all_that_is_read(program: Program) -> None:
    found = shares(program)
    assert sum(found.values()) == pytest.approx(1)
    total = sum(2 * n for n in range(2, 8))
    assert found["prompt"] == pytest.approx(2 * 7 / total)
    assert found["constant"] == pytest.approx(2 * 6 / total)
    assert found["schedule"] == pytest.approx((2 * 2 + 2 * 4) / total)


@pytest.mark.parametrize(("shape", "reader"), [("compute[2, 4]", 3), ("compute[tokens, 4]", 0)])
def test_one_of_a_stack_of_weights_stays_with_its_reader(
    program: Program, shape: str, reader: int
) -> None:
    """Apart, an expert would be a copy; a table that is cut to a size is smaller than it was."""
    entry = program.entries[0]
    taken = {"x": Weight("stack"), "axis": 0, "index": 1}
    entry.nodes.append(Node("select", ("one",), taken, "", (parse_type(shape),)))
    turned = {"x": Ref("one"), "axes": (1, 0)}
    entry.nodes.append(Node("transpose", ("t",), turned, "", (parse_type(shape),)))
    entry.nodes.append(Node("matmul", ("y",), {"a": Ref("b"), "b": Ref("t")}))
    entry.outputs = (*entry.outputs, Ref("y"))
    stages = weights_by_stage(program, entry)
    assert ["stack" in names for names in stages].index(True) == reader
