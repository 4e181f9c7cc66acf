"""Which elements of the last axis a rotary embedding turns together: neighbours, or the halves."""

from __future__ import annotations

from dataclasses import dataclass

from mlxconv.runtime.program.program import Arg, Node, Ref

from .graph import Rewriter, is_last


@dataclass(frozen=True, slots=True)
class Pair:
    """The two elements of the pairs of `x`."""

    x: Arg
    a: Arg
    b: Arg
    interleaved: bool


def find_pair(rewriter: Rewriter, a: Arg, b: Arg) -> Pair | None:
    """The value whose pairs' first elements are `a` and second `b`, casts apart."""
    casts = [rewriter.node_of(item, "cast") for item in (a, b)]
    first, second = rewriter.node_of(rewriter.bare(a)), rewriter.node_of(rewriter.bare(b))
    if first is None or second is None or (casts[0] is None) != (casts[1] is None):
        return None
    bare = rewriter.bare(a), rewriter.bare(b)
    found = _parts(rewriter, first, second, *bare) or _slices(rewriter, first, second, *bare)
    if found is None or casts[0] is None or casts[1] is None:
        return found
    if casts[0].args["dtype"] != casts[1].args["dtype"]:
        return None
    return Pair(rewriter.cast(found.x, str(casts[0].args["dtype"])), a, b, found.interleaved)


def _parts(rewriter: Rewriter, first: Node, second: Node, a: Arg, b: Arg) -> Pair | None:
    """Both outputs of one node, or `select` 0 and 1 of one value."""
    if first is second and first.out == tuple(_name(item) for item in (a, b)):
        rank = len(rewriter.dims(first.args["x"]) or ())
        if first.op == "unbind":
            return _unfolded(rewriter, first.args["x"], first.args["axis"], a, b)
        if first.op in ("chunk", "split", "split_every") and is_last(first.args["axis"], rank):
            same = rewriter.dims(a) == rewriter.dims(b)
            return Pair(first.args["x"], a, b, False) if same else None
    if first.op != "select" or {**first.args, "index": 1} != second.args:
        return None
    if second.op != "select" or first.args["index"] != 0:
        return None
    return _unfolded(rewriter, first.args["x"], first.args["axis"], a, b)


def _name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


def _unfolded(rewriter: Rewriter, folded: Arg, axis: Arg, a: Arg, b: Arg) -> Pair | None:
    """x reshaped to (..., n, 2) or (..., 2, n), taken apart along the axis of two."""
    node = rewriter.node_of(folded, "reshape")
    if node is None or not isinstance(axis, int):
        return None
    x, shape = node.args["x"], node.args["shape"]
    before, after = rewriter.dims(x), rewriter.dims(folded)
    if before is None or after is None or not isinstance(shape, tuple):
        return None
    axis %= len(after)
    if len(after) != len(before) + 1 or after[:-2] != before[:-1] or after[axis] != "2":
        return None
    if axis == len(after) - 1:
        return Pair(x, a, b, True)
    return Pair(x, a, b, False) if axis == len(after) - 2 else None


def _slices(rewriter: Rewriter, first: Node, second: Node, a: Arg, b: Arg) -> Pair | None:
    """x[..., 0::2] and x[..., 1::2], or x[..., :h] and x[..., h:]."""
    if first.op != "slice" or second.op != "slice" or first.args["x"] != second.args["x"]:
        return None
    x, dims = first.args["x"], rewriter.dims(first.args["x"])
    if not dims or not dims[-1].isdigit():
        return None
    if not all(is_last(node.args["axis"], len(dims)) for node in (first, second)):
        return None
    width = int(dims[-1])
    taken = [range_of(node, width) for node in (first, second)]
    if taken == [range(0, width, 2), range(1, width, 2)]:
        return Pair(x, a, b, True)
    if taken == [range(width // 2), range(width // 2, width)]:
        return Pair(x, a, b, False)
    return None


def range_of(node: Node, width: int) -> range | None:
    bounds: list[int | None] = []
    for key in ("start", "stop", "step"):
        bound = node.args[key]
        if bound is not None and not isinstance(bound, int):
            return None
        bounds.append(bound)
    return range(width)[slice(*bounds)]
