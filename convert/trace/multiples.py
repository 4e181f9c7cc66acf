"""Sizes that a recipe declares as multiples, known to torch as such.

torch.export has an opaque symbol ``s`` for each free axis. Where a recipe's shape is a number times
a dim, ``32 * rows``, it becomes ``32 * r`` before anything is traced: halved five times by
convolutions it is ``r``, not ``(s - 1) // 32 + 1``. DC-AE's trace takes half the time.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..recipe.recipe import Expression, evaluate, names_in


def multiple(
    expression: Expression, free: Collection[str], names: Mapping[str, Any]
) -> tuple[int, str] | None:
    """``(32, "rows")`` for ``32 * rows``: a product of one free dim and a number above 1.

    ``names`` has the values of all but the free dims. None for any other expression.
    """
    factors = list(_factors(ast.parse(str(expression), mode="eval").body))
    dims = [factor for factor in factors if names_in(factor) & set(free)]
    if len(dims) != 1 or dims[0] not in free:
        return None
    factors.remove(dims[0])
    by = math.prod(int(evaluate(factor, names)) for factor in factors)
    return (by, dims[0]) if by > 1 else None


def _factors(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    else:
        yield ast.unparse(node)
