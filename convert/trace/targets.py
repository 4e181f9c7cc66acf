"""Names of what the nodes of a traced graph call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def target_name(target: Any) -> str:
    """`linear.default` for an ATen overload, `py.add` for Python's operators, else its path."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target._schema.name.split('::')[1]}.{target._overloadname or 'default'}"
        return name if target.namespace == "aten" else f"{target.namespace}.{name}"
    return f"py.{getattr(target, '__name__', str(target))}"


_IGNORED = ("_assert", "sym_constrain")


def is_ignored(node: fx.Node) -> bool:
    """Whether a node only checks a condition, which a program does not."""
    return target_name(node.target).removeprefix("py.").startswith(_IGNORED)
