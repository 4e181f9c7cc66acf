"""Small equalities: casts that cancel, shapes that change nothing, arithmetic on known sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable

from mlxconv.runtime.program.program import Arg, Node, Ref
from mlxconv.runtime.program.types import INT

from .graph import WIDER, Rewriter, Rules, is_last

# ---- casts --------------------------------------------------------------------------------------


def cast_to_own_dtype(rewriter: Rewriter, node: Node) -> Arg:
    """cast(x) where x has that dtype already."""
    x = node.args["x"]
    return x if rewriter.dtype(x) == node.args["dtype"] else None


def cast_of_cast(rewriter: Rewriter, node: Node) -> Arg:
    """cast(cast(x)) where the cast between loses nothing: compute to float32 and back."""
    inner = rewriter.node_of(node.args["x"], "cast")
    if inner is None:
        return None
    x = inner.args["x"]
    if inner.args["dtype"] not in WIDER.get(rewriter.dtype(x), ()):
        return None
    return rewriter.cast(x, str(node.args["dtype"]))


# ---- arithmetic ---------------------------------------------------------------------------------

_FOLD: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floor_div": operator.floordiv,
    "mod": operator.mod,
    "maximum": max,
    "minimum": min,
}


def fold_sizes(rewriter: Rewriter, node: Node) -> Arg:
    """Arithmetic on two known sizes."""
    a, b = node.args["a"], node.args["b"]
    if type(a) is not int or type(b) is not int or (b == 0 and node.op in ("floor_div", "mod")):
        return None
    return _FOLD[node.op](a, b)


def neutral(rewriter: Rewriter, node: Node) -> Arg:
    """x * 1, x / 1, x + 0, x - 0 where that changes no dtype."""
    a, b = node.args["a"], node.args["b"]
    element = 1 if node.op in ("mul", "div", "floor_div") else 0
    for x, other in ((a, b), (b, a)) if node.op in ("add", "mul") else ((a, b),):
        type_ = rewriter.type_of(x)
        if type(other) not in (int, float) or other != element or not isinstance(x, Ref):
            continue
        if node.op == "floor_div" and type_ != INT:
            continue
        if type_ and type_ == rewriter.type_of(Ref(node.out[0])):
            return x
    return None


def square(rewriter: Rewriter, node: Node) -> Arg:
    """x ** 2 and x * x -> square(x)."""
    a, b = node.args["a"], node.args["b"]
    if rewriter.dims(a) is None or isinstance(a, (int, float)):
        return None
    if (node.op == "pow" and type(b) in (int, float) and b == 2) or (node.op == "mul" and a == b):
        return rewriter.emit("square", rewriter.type_of(Ref(node.out[0])), x=a)
    return None


# ---- shapes -------------------------------------------------------------------------------------


def known_dim(rewriter: Rewriter, node: Node) -> Arg:
    """The size of an axis that every run has the same."""
    dims, axis = rewriter.dims(node.args["x"]), node.args["axis"]
    if dims is None or not isinstance(axis, int) or not dims[axis].isdigit():
        return None
    return int(dims[axis])


def same_shape(rewriter: Rewriter, node: Node) -> Arg:
    """A reshape or broadcast to the shape that x has."""
    x = node.args["x"]
    own = rewriter.type_of(x)
    return x if own and own == rewriter.type_of(Ref(node.out[0])) else None


def identity_transpose(rewriter: Rewriter, node: Node) -> Arg:
    """Axes in the order they are in."""
    axes = node.args["axes"]
    return node.args["x"] if axes == tuple(range(len(axes))) else None  # type: ignore[arg-type]


def transpose_of_transpose(rewriter: Rewriter, node: Node) -> Arg:
    """Two permutations -> one."""
    inner = rewriter.node_of(node.args["x"], "transpose")
    if inner is None:
        return None
    first, second = inner.args["axes"], node.args["axes"]
    assert isinstance(first, tuple) and isinstance(second, tuple)
    axes = tuple(first[i] for i in second if isinstance(i, int))
    type = rewriter.type_of(Ref(node.out[0]))
    return rewriter.emit("transpose", type, x=inner.args["x"], axes=axes)


def one_part(rewriter: Rewriter, node: Node) -> Arg:
    """The concatenation of one array."""
    xs = node.args["xs"]
    return xs[0] if isinstance(xs, tuple) and len(xs) == 1 else None


def slice_of_concat(rewriter: Rewriter, node: Node) -> Arg:
    """The slice that is one of the arrays that were joined."""
    joined = rewriter.node_of(node.args["x"], "concat")
    dims = rewriter.dims(node.args["x"])
    if joined is None or not dims or not dims[-1].isdigit() or node.args["step"] != 1:
        return None
    if not all(is_last(one.args["axis"], len(dims)) for one in (joined, node)):
        return None
    wanted = slice(node.args["start"], node.args["stop"]).indices(int(dims[-1]))
    begin = 0
    for part in joined.args["xs"] if isinstance(joined.args["xs"], tuple) else ():
        size = (rewriter.dims(part) or ("",))[-1]
        if not size.isdigit():
            return None
        if wanted[:2] == (begin, begin + int(size)):
            return part
        begin += int(size)
    return None


def tile_once(rewriter: Rewriter, node: Node) -> Arg:
    """One copy along each axis."""
    repeats, x = node.args["repeats"], node.args["x"]
    dims = rewriter.dims(x)
    ones = isinstance(repeats, tuple) and all(type(n) is int and n == 1 for n in repeats)
    return x if ones and dims is not None and len(dims) == len(repeats) else None  # type: ignore[arg-type]


def reshape_of_reshape(rewriter: Rewriter, node: Node) -> Arg:
    """Only the last shape matters."""
    inner = rewriter.node_of(node.args["x"], "reshape")
    if inner is None:
        return None
    type = rewriter.type_of(Ref(node.out[0]))
    return rewriter.emit("reshape", type, x=inner.args["x"], shape=node.args["shape"])


CLEANUP: Rules = {
    "cast": (cast_to_own_dtype, cast_of_cast),
    "add": (fold_sizes, neutral),
    "sub": (fold_sizes, neutral),
    "mul": (fold_sizes, neutral, square),
    "pow": (square,),
    "div": (neutral,),
    "floor_div": (fold_sizes, neutral),
    "mod": (fold_sizes,),
    "maximum": (fold_sizes,),
    "minimum": (fold_sizes,),
    "dim": (known_dim,),
    "reshape": (same_shape,),
    "broadcast": (same_shape,),
    "transpose": (identity_transpose, transpose_of_transpose),
    "concat": (one_part,),
    "slice": (slice_of_concat,),
    "tile": (tile_once,),
}
# Last: the patterns of the other rewrites tell axes apart by the reshapes between.
LATE: Rules = {"reshape": (reshape_of_reshape,)}
