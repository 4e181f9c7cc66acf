"""Outlining: members of lists become calls of shared blocks, and the results are bit-identical."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import diffusers
import mlx.core as mx
import numpy as np
import pytest

from mlxconv.convert.lower.outline import merged, outline
from mlxconv.convert.lower.rewrites import rewrite
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.convert.trace.fake_module import merged_config
from mlxconv.runtime.program.program import (
    Arg,
    Block,
    Entry,
    Input,
    Node,
    Parameter,
    Program,
    Ref,
    Weight,
)
from mlxconv.runtime.program.stored import from_json, to_json, validate
from mlxconv.runtime.program.types import parse_type

from ..trace.evaluation import Arrays, Traced, evaluate

pytestmark = pytest.mark.xdist_group("outline")

TYPE = parse_type("compute[batch, 8]")
X = Input("x", "x", TYPE)


def chain(prefix: str, start: str, op: str = "sin", count: int = 8) -> list[Node]:
    """`count` nodes of one module: a product with its weight, then one op again and again."""
    names = [f"{prefix}_{i}" for i in range(count)]
    first = Node("mul", (names[0],), {"a": Ref(start), "b": Weight(f"{prefix}.w")}, prefix, (TYPE,))
    rest = [
        Node(op, (name,), {"x": Ref(before)}, f"{prefix}.act", (TYPE,))
        for before, name in pairwise(names)
    ]
    return [first, *rest]


def last(nodes: list[Node]) -> str:
    return nodes[-1].out[0]


def entry_of(nodes: list[Node], **taps: tuple[str, ...]) -> Entry:
    return Entry(nodes, (Ref(last(nodes)),), taps, inputs=(X,))


def program(entries: list[Entry], blocks: dict[str, Block]) -> Program:
    made = Program("Test", entries, blocks)
    validate(made)
    assert to_json(from_json(to_json(made))) == to_json(made)
    return made


def weights(*names: str) -> Arrays:
    return {name: mx.array(np.linspace(0.5, i + 1, 8)) for i, name in enumerate(names)}


def same(before: Entry, after: Entry, blocks: dict[str, Block], arrays: Arrays) -> bool:
    inputs = {"x": mx.array(np.linspace(-1, 1, 16).reshape(2, 8))}
    one, other = evaluate(before, arrays, inputs), evaluate(after, arrays, inputs, blocks=blocks)
    return bool(mx.array_equal(one, other))


def test_equal_members_become_calls_of_one_block() -> None:
    first = chain("blocks.0", "x")
    second = chain("blocks.1", last(first))
    before = entry_of(first + second)
    (after,), blocks = outline([before])
    program([after], blocks)
    assert [(n.op, n.args["block"], n.args["prefix"]) for n in after.nodes] == [
        ("call", "blocks", "blocks.0"),
        ("call", "blocks", "blocks.1"),
    ]
    assert blocks["blocks"].nodes[0].args == {"a": Ref("i0"), "b": Weight("w")}
    assert same(before, after, blocks, weights("blocks.0.w", "blocks.1.w"))


def test_members_that_differ_are_blocks_of_their_own() -> None:
    first = chain("blocks.0", "x")
    second = chain("blocks.1", last(first), "cos")
    (after,), blocks = outline([entry_of(first + second)])
    assert list(blocks) == ["blocks", "blocks_1"]
    assert [n.args["block"] for n in after.nodes] == ["blocks", "blocks_1"]


def test_short_members_stay_where_they_are() -> None:
    (after,), blocks = outline([entry_of(chain("blocks.0", "x", count=7))])
    assert not blocks
    assert len(after.nodes) == 7


def test_entries_share_blocks() -> None:
    entries, blocks = outline([entry_of(chain("blocks.0", "x")), entry_of(chain("layers.3", "x"))])
    assert list(blocks) == ["blocks"]
    assert [e.nodes[0].args["prefix"] for e in entries] == ["blocks.0", "layers.3"]


def test_lists_within_members_are_blocks_within_blocks() -> None:
    inner = [n for i in range(2) for n in chain(f"down.0.resnets.{i}", "x")]
    join: dict[str, Arg] = {"a": Ref(inner[7].out[0]), "b": Ref(inner[15].out[0])}
    nodes = [*inner, Node("add", ("y",), join, "down.0", (TYPE,))]
    before = entry_of(nodes)
    (after,), blocks = outline([before])
    program([after], blocks)
    assert [n.args.get("prefix") for n in blocks["down"].nodes] == ["resnets.0", "resnets.1", None]
    names = ("down.0.resnets.0.w", "down.0.resnets.1.w")
    assert same(before, after, blocks, weights(*names))


def test_a_weight_of_another_module_is_passed_to_the_block() -> None:
    nodes = chain("blocks.0", "x")
    nodes[0].args["b"] = Weight("shared.w")
    before = entry_of(nodes)
    (after,), blocks = outline([before])
    assert after.nodes[0].args["inputs"] == (Ref("x"), Weight("shared.w"))
    assert same(before, after, blocks, weights("shared.w"))


def test_taps_below_a_member_move_into_its_block() -> None:
    nodes = chain("blocks.0", "x")
    taps = {"blocks.0": (last(nodes),), "blocks.0.act": (nodes[3].out[0],), "root": ("x",)}
    (after,), blocks = outline([entry_of(nodes, **taps)])
    assert after.taps == {"blocks.0": after.nodes[0].out, "root": ("x",)}
    assert blocks["blocks"].taps == {"act": ("v3",)}


def test_a_node_that_a_member_waits_for_goes_before_its_call() -> None:
    first = chain("blocks.0", "x")
    outer = Node("exp", ("outer",), {"x": Ref("x")}, "", (TYPE,))
    second = chain("blocks.1", last(first))
    second[4].args["x"] = Ref("outer")
    before = entry_of([*first, *second[:2], outer, *second[2:]])
    (after,), blocks = outline([before])
    program([after], blocks)
    assert [n.op for n in after.nodes] == ["call", "exp", "call"]
    assert same(before, after, blocks, weights("blocks.0.w", "blocks.1.w"))


def test_a_member_that_reads_what_was_made_of_it_stays_inline() -> None:
    nodes = chain("blocks.0", "x")
    outer = Node("exp", ("outer",), {"x": Ref(nodes[1].out[0])}, "", (TYPE,))
    nodes[4].args["x"] = Ref("outer")
    second = chain("blocks.1", last(nodes))
    before = entry_of([*nodes[:3], outer, *nodes[3:], *second])
    (after,), blocks = outline([before])
    program([after], blocks)
    assert Counter(n.op for n in after.nodes)["call"] == 1
    assert same(before, after, blocks, weights("blocks.0.w", "blocks.1.w"))


# ---- real classes -------------------------------------------------------------------------------

CLASSES = {
    ("FluxTransformer2DModel", None): 3,  # the last single block returns image tokens only
    ("SD3Transformer2DModel", "sd35_medium"): 2,  # dual attention in two blocks, not in the last
}


@cache
def traced(name: str, variant: str | None) -> tuple[Traced, Entry]:
    recipe = load_recipe(name)
    config = recipe.tiny_config(variant)
    cls = getattr(diffusers, name)
    (method, *_) = recipe.programs_for(merged_config(cls, config))
    found = Traced(cls, config, recipe, method)
    return found, rewrite(found.entry, found.parameters)


@pytest.mark.parametrize(("name", "variant"), CLASSES)
def test_real_classes_have_few_blocks(name: str, variant: str | None) -> None:
    case, flat = traced(name, variant)
    entries, blocks = outline([flat])
    made = program(entries, blocks)
    assert len(blocks) == CLASSES[name, variant]
    assert made.count_nodes() < 0.6 * len(case.entry.nodes)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "variant"), CLASSES)
def test_real_classes_give_the_same_numbers(name: str, variant: str | None, compute: str) -> None:
    case, flat = traced(name, variant)
    (after,), blocks = outline([flat])
    inlined, called = case.run(flat, compute), case.run(after, compute, blocks=blocks)
    assert mx.array_equal(inlined, called)
    assert mx.allclose(case.run(case.entry, compute), called, rtol=1e-5, atol=1e-5)


def test_a_model_as_deep_as_flux_takes_seconds() -> None:
    """57 blocks of 130 nodes: rewriting and outlining are linear in them."""
    nodes: list[Node] = []
    parameters = {}
    for i in range(57):
        prefix = f"blocks.{i}"
        parameters[f"{prefix}.w"] = Parameter((8,), "compute", "other")
        nodes += chain(prefix, last(nodes) if nodes else "x", count=130)
    begin = time.perf_counter()
    entries, blocks = outline([rewrite(entry_of(nodes), parameters)])
    assert time.perf_counter() - begin < 8
    assert (len(blocks), len(entries[0].nodes)) == (1, 57)


def test_no_pass_changes_what_it_is_given() -> None:
    nodes = [n for i in range(3) for n in chain(f"blocks.{i}", "x")]
    flat = entry_of(nodes)
    before = repr(flat)
    (after,), blocks = outline([flat])
    assert repr(flat) == before
    known = program([after], blocks)
    wider = [replace(node, types=(parse_type("compute[batch, 9]"),)) for node in nodes]
    before, other = repr(known), program(*outline([entry_of(wider)]))
    merged(known, replace(other, entries=[replace(other.entries[0], sizes={"n": 2})]))
    assert repr(known) == before
