"""What `torch.export` gives, without operations that write into their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .aten.builder import is_ignored, row_name, target_name


def functional(exported: ExportedProgram) -> ExportedProgram:
    """The program as the lowering takes it.

    Three graphs in four are functional as they were exported, once composite operations such as
    `flatten` have rows. torch traces the others twice more, which costs as much as the export.
    """
    if all(_is_plain(node) for node in exported.graph.nodes):
        exported.graph.eliminate_dead_code()
        return exported
    decomposed: ExportedProgram = exported.run_decompositions({})
    return decomposed


def _is_plain(node: fx.Node) -> bool:
    """Whether a node writes nowhere, and the lowering takes it as it is."""
    target: Any = node.target
    if node.op != "call_function":
        return True
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        return False
    return is_ignored(node) or row_name(target_name(target)) is not None
