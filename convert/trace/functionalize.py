"""What `torch.export` gives, without operations that write into their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .targets import is_ignored, target_name
from .writes import pure, without_writes, writes, written


def functional(exported: ExportedProgram, keep: Callable[[str], bool]) -> ExportedProgram:
    """The program as the lowering takes it; `keep` says which ATen ops that are.

    Nearly all graphs are, once composite operations such as `flatten` have rows, regions in which
    autocast does nothing are part of the rest, and writes into the graph's own values are taken
    out. torch traces the others twice more, which costs as much as the export.
    """
    _inline_regions(exported)
    storages = written(exported.graph)
    if storages is None or not all(_is_kept(node, keep) for node in exported.graph.nodes):
        decomposed: ExportedProgram = exported.run_decompositions({})
        return decomposed
    without_writes(exported, storages)
    exported.graph.eliminate_dead_code()
    return exported


def _is_kept(node: fx.Node, keep: Callable[[str], bool]) -> bool:
    """Whether the lowering takes a node, or what it gives where it writes, as it is."""
    if node.op != "call_function" or is_ignored(node):
        return True
    target = pure(node) if writes(node) else node.target
    return target is not None and keep(target_name(target))


def _inline_regions(exported: ExportedProgram) -> None:
    """Put the nodes of regions whose context changes nothing in the place of the regions."""
    regions = {
        torch.ops.higher_order.wrap_with_autocast: 4,  # device type, dtype, enabled, cache
        torch.ops.higher_order.wrap_with_set_grad_enabled: 1,
    }
    graph = exported.graph
    for node in list(graph.nodes):
        settings: Any = regions.get(node.target)
        if settings is None or (settings == 4 and node.args[2] and node.args[0] == "cpu"):
            continue
        body, *inputs = node.args[settings:]
        inner = getattr(exported.graph_module, body.target).graph
        _inline(node, inner, inputs)
    exported.graph_module.recompile()


def _inline(node: fx.Node, inner: fx.Graph, inputs: list[Any]) -> None:
    """Put a graph in the place of the node that calls it."""
    places = [n for n in inner.nodes if n.op == "placeholder"]
    with node.graph.inserting_before(node):
        outputs: Any = node.graph.graph_copy(inner, dict(zip(places, inputs, strict=True)))
    for user in list(node.users):
        index: Any = user.args[1]
        user.replace_all_uses_with(outputs[index])
        node.graph.erase_node(user)
    node.graph.erase_node(node)
