"""Linears over one input (q, k, v; gate and up) become one `linears`: one product, if stacked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from mlxconv.runtime.program.program import Entry, Node, Parameter, Ref, Weight

Key = tuple[str, str, bool]


def fuse_linears(entry: Entry, parameters: Mapping[str, Parameter]) -> Entry:
    """Each group of `linear` of one module's children, over one input, as one node.

    The node stands where the first of them stood; values and taps keep their names.
    """
    groups: dict[Key, list[Node]] = defaultdict(list)
    for node in entry.nodes:
        key = _key(node, parameters)
        if key is not None:
            groups[key].append(node)
    fused = {id(group[0]): _fuse(group) for group in groups.values() if len(group) > 1}
    gone = {id(node) for group in groups.values() for node in group[1:]}
    nodes = [fused.get(id(node), node) for node in entry.nodes if id(node) not in gone]
    return replace(entry, nodes=nodes)


def _key(node: Node, parameters: Mapping[str, Parameter]) -> Key | None:
    """What linears must have in common: the input, the parent module, and a bias or none."""
    if node.op != "linear":
        return None
    x, weight, bias = node.args["x"], node.args["weight"], node.args["bias"]
    if not isinstance(x, Ref) or not isinstance(weight, Weight):
        return None
    if bias is not None and not isinstance(bias, Weight):
        return None
    found = parameters.get(weight.name)
    if found is None or found.kind != "linear":
        return None
    return x.name, node.module.rpartition(".")[0], bias is None


def _fuse(group: list[Node]) -> Node:
    return Node(
        "linears",
        tuple(name for node in group for name in node.out),
        {
            "x": group[0].args["x"],
            "weights": tuple(node.args["weight"] for node in group),
            "biases": tuple(node.args["bias"] for node in group),
        },
        group[0].module.rpartition(".")[0],
        tuple(type for node in group for type in node.types),
    )
