"""The forms of rotary embedding that PyTorch code has, as the one op `rotary`.

All of them turn pairs (a, b) of the last axis: even = a cos - b sin, odd = b cos + a sin. They
differ in which elements are pairs (neighbours, or the two halves) and in how they say it: by a
rotated copy of x, by complex numbers, by 2x2 matrices, or by both lines, put together.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxconv.runtime.program.program import Arg, Node, Ref
from mlxconv.runtime.program.types import INT, Type

from .graph import Rewriter, Rules, is_last, match
from .pairs import Pair, find_pair, range_of


@dataclass(frozen=True, slots=True)
class Turn:
    """even = a cos - b sin, odd = b cos2 + a sin2."""

    pair: Pair
    cos: Arg
    sin: Arg
    cos2: Arg
    sin2: Arg


# ---- by a rotated copy --------------------------------------------------------------------------


def rotated_copy(rewriter: Rewriter, node: Node) -> Arg:
    """x cos + rotated(x) sin, where rotated(x) has (-b, a) in the place of (a, b)."""
    bound = match(rewriter, node, ("add", ("mul", "$x", "$cos"), ("mul", "$turned", "$sin")))
    if bound is None:
        return None
    for x, cos in ((bound["x"], bound["cos"]), (bound["cos"], bound["x"])):
        for turned, sin in ((bound["turned"], bound["sin"]), (bound["sin"], bound["turned"])):
            for one in ((x, cos, turned, sin), (turned, sin, x, cos)):
                found = _from_copy(rewriter, node, *one)
                if found is not None:
                    return found
    return None


def _from_copy(rewriter: Rewriter, node: Node, x: Arg, cos: Arg, turned: Arg, sin: Arg) -> Arg:
    pair = _rotated(rewriter, turned)
    dims = rewriter.dims(x)
    if pair is None or rewriter.bare(pair.x) != rewriter.bare(x) or not dims:
        return None
    tables = [rewriter.dims(table) for table in (cos, sin)]
    if any(not table or table[-1] != dims[-1] for table in tables):
        return None
    if rewriter.dtype(x) != rewriter.dtype(turned):
        return None
    return _emit(rewriter, node, x, cos, sin, pair.interleaved)


def _rotated(rewriter: Rewriter, turned: Arg) -> Pair | None:
    """The pairs of x, if `turned` holds (-b, a) where x holds (a, b)."""
    joined = _joined(rewriter, rewriter.node_of(rewriter.bare(turned)))
    if joined is None:
        return None
    minus, a, interleaved = joined
    negated = rewriter.node_of(minus, "neg")
    if negated is None:
        return None
    pair = find_pair(rewriter, a, negated.args["x"])
    return pair if pair is not None and pair.interleaved == interleaved else None


def _joined(rewriter: Rewriter, node: Node | None) -> tuple[Arg, Arg, bool] | None:
    """(even, odd, interleaved) of a value that was put together from the two."""
    if node is None:
        return None
    if node.op == "concat" and len(xs := _items(node.args["xs"])) == 2:
        dims = rewriter.dims(xs[0])
        last = dims is not None and is_last(node.args["axis"], len(dims))
        return (xs[0], xs[1], False) if last and dims == rewriter.dims(xs[1]) else None
    if node.op != "reshape":
        return None
    stack = rewriter.node_of(node.args["x"], "stack")
    if stack is None or len(xs := _items(stack.args["xs"])) != 2:
        return None
    before, after = rewriter.dims(Ref(stack.out[0])), rewriter.dims(Ref(node.out[0]))
    if before is None or after is None or len(before) != len(after) + 1:
        return None
    axis = stack.args["axis"]
    if before[:-2] != after[:-1] or not isinstance(axis, int):
        return None
    if axis % len(before) == len(before) - 1:
        return xs[0], xs[1], True
    return (xs[0], xs[1], False) if axis % len(before) == len(before) - 2 else None


def _items(arg: Arg) -> tuple[Arg, ...]:
    return arg if isinstance(arg, tuple) else ()


# ---- by both lines, put together ----------------------------------------------------------------


def two_lines(rewriter: Rewriter, node: Node) -> Arg:
    """join(a cos - b sin, b cos + a sin), the pairs joined as they were taken apart."""
    joined = _joined(rewriter, node)
    if joined is None:
        return None
    turn = _turn(rewriter, joined[0], joined[1])
    if turn is None or turn.pair.interleaved != joined[2]:
        return None
    return _emit_turn(rewriter, node, turn)


def two_updates(rewriter: Rewriter, node: Node) -> Arg:
    """out[..., 0::2] = a cos - b sin; out[..., 1::2] = a sin + b cos (Wan)."""
    inner = rewriter.node_of(node.args["x"], "slice_update")
    dims = rewriter.dims(Ref(node.out[0]))
    if inner is None or not dims or not dims[-1].isdigit():
        return None
    if not all(is_last(one.args["axis"], len(dims)) for one in (inner, node)):
        return None
    width = int(dims[-1])
    ranges = [range_of(one, width) for one in (inner, node)]
    if ranges != [range(0, width, 2), range(1, width, 2)]:
        return None
    even, odd = (_unbroadcast(rewriter, one.args["update"]) for one in (inner, node))
    turn = _turn(rewriter, even, odd)
    return _emit_turn(rewriter, node, turn) if turn is not None and turn.pair.interleaved else None


def _unbroadcast(rewriter: Rewriter, arg: Arg) -> Arg:
    """The value before a broadcast to its own shape, and casts around it."""
    inner = rewriter.bare(arg)
    node = rewriter.node_of(inner, "broadcast")
    if node is not None and rewriter.dims(node.args["x"]) == rewriter.dims(inner):
        return node.args["x"]
    return inner


def _turn(rewriter: Rewriter, even: Arg, odd: Arg) -> Turn | None:
    even_node, odd_node = rewriter.node_of(even, "sub"), rewriter.node_of(odd, "add")
    if even_node is None or odd_node is None:
        return None
    lines = [_products(rewriter, node) for node in (even_node, odd_node)]
    for a, cos in lines[0][0]:
        for b, sin in lines[0][1]:
            pair = find_pair(rewriter, a, b)
            if pair is not None:
                return _second_line(rewriter, pair, cos, sin, lines[1])
    return None


def _second_line(
    rewriter: Rewriter, pair: Pair, cos: Arg, sin: Arg, products: list[list[tuple[Arg, Arg]]]
) -> Turn | None:
    tables: dict[str, Arg] = {}
    for choices in products:
        for element, table in choices:
            for name, own in (("sin", pair.a), ("cos", pair.b)):
                if rewriter.bare(element) == rewriter.bare(own):
                    tables[name] = table
    if len(tables) != 2:
        return None
    return Turn(pair, cos, sin, tables["cos"], tables["sin"])


def _products(rewriter: Rewriter, node: Node) -> list[list[tuple[Arg, Arg]]]:
    """For both terms, the two ways to read its product as (element, table)."""
    terms = []
    for key in ("a", "b"):
        product = rewriter.node_of(rewriter.bare(node.args[key]), "mul")
        args = (product.args["a"], product.args["b"]) if product is not None else ()
        terms.append([(args[0], args[1]), (args[1], args[0])] if args else [])
    return terms


def _emit_turn(rewriter: Rewriter, node: Node, turn: Turn) -> Arg:
    half = rewriter.dims(turn.pair.a)
    tables = (turn.cos, turn.sin, turn.cos2, turn.sin2)
    if not half or any((rewriter.dims(table) or ("",))[-1] != half[-1] for table in tables):
        return None
    cos, sin = turn.cos, turn.sin
    if (turn.cos, turn.sin) != (turn.cos2, turn.sin2):
        cos = _both(rewriter, turn.cos, turn.cos2, turn.pair.interleaved)
        sin = _both(rewriter, turn.sin, turn.sin2, turn.pair.interleaved)
    return _emit(rewriter, node, turn.pair.x, cos, sin, turn.pair.interleaved)


def _both(rewriter: Rewriter, first: Arg, second: Arg, interleaved: bool) -> Arg:
    """One table of an angle an element from two tables of an angle a pair."""
    dims, dtype = rewriter.dims(first) or (), rewriter.dtype(first)
    whole = Type(dtype, (*dims[:-1], str(2 * int(dims[-1]))))
    if not interleaved:
        return rewriter.emit("concat", whole, xs=(first, second), axis=-1)
    stacked = rewriter.emit("stack", Type(dtype, (*dims, "2")), xs=(first, second), axis=-1)
    return rewriter.emit("reshape", whole, x=stacked, shape=_flat_shape(rewriter, first, dims))


def _flat_shape(rewriter: Rewriter, arg: Arg, dims: tuple[str, ...]) -> tuple[Arg, ...]:
    """The shape of a table with twice as many last elements."""
    sizes: list[Arg] = [
        int(n) if n.isdigit() else rewriter.emit("dim", INT, x=arg, axis=i)
        for i, n in enumerate(dims[:-1])
    ]
    return (*sizes, 2 * int(dims[-1]))


# ---- by complex numbers -------------------------------------------------------------------------


def complex_product(rewriter: Rewriter, node: Node) -> Arg:
    """view_as_real(view_as_complex(x) * table): the table's parts are cos and sin."""
    stack = rewriter.node_of(node.args["x"], "stack")
    if stack is None or _joined(rewriter, node) is None:
        return None
    parts = [rewriter.node_of(item) for item in _items(stack.args["xs"])]
    if [part.op for part in parts if part is not None] != ["real", "imag"]:
        return None
    products = [part.args["x"] for part in parts if part is not None]
    product = rewriter.node_of(products[0], "mul")
    if product is None or products[0] != products[1]:
        return None
    for x, table in (("a", "b"), ("b", "a")):
        found = _from_complex(rewriter, node, product.args[x], product.args[table])
        if found is not None:
            return found
    return None


def _from_complex(rewriter: Rewriter, node: Node, turned: Arg, table: Arg) -> Arg:
    made = rewriter.node_of(turned, "complex")
    if made is None:
        return None
    pair = find_pair(rewriter, made.args["real"], made.args["imag"])
    dims, half = rewriter.dims(table), rewriter.dims(turned)
    if pair is None or not pair.interleaved or not dims or not half or dims[-1] != half[-1]:
        return None
    type = Type("float32", dims)
    cos = rewriter.emit("real", type, x=table)
    sin = rewriter.emit("imag", type, x=table)
    return _emit(rewriter, node, pair.x, cos, sin, True)


# ---- by 2x2 matrices ----------------------------------------------------------------------------


def matrix_columns(rewriter: Rewriter, node: Node) -> Arg:
    """table[..., 0] * x[..., 0] + table[..., 1] * x[..., 1], with x as (..., n, 1, 2)."""
    add = rewriter.node_of(node.args["x"], "add")
    if add is None:
        return None
    terms = [_column(rewriter, add.args[key]) for key in ("a", "b")]
    if terms[0] is None or terms[1] is None or terms[0][:2] != terms[1][:2]:
        return None
    x, table, first = terms[0]
    return _from_matrix(rewriter, node, x, table) if {first, terms[1][2]} == {0, 1} else None


def _column(rewriter: Rewriter, term: Arg) -> tuple[Arg, Arg, int] | None:
    """(x as pairs, table, column) of one product."""
    product = rewriter.node_of(term, "mul")
    if product is None:
        return None
    picks = [rewriter.node_of(product.args[key], "select") for key in ("a", "b")]
    if picks[0] is None or picks[1] is None:
        return None
    index = picks[0].args["index"]
    if index not in (0, 1) or picks[1].args["index"] != index:
        return None
    for x, table in ((picks[0], picks[1]), (picks[1], picks[0])):
        ranks = [len(rewriter.dims(pick.args["x"]) or ()) for pick in (x, table)]
        last = is_last(x.args["axis"], ranks[0]) and is_last(table.args["axis"], ranks[1])
        if last and _as_columns(rewriter, x.args["x"]) is not None:
            return x.args["x"], table.args["x"], int(str(index))
    return None


def matrix_sum(rewriter: Rewriter, node: Node) -> Arg:
    """(table * x).sum(-1), with x as (..., n, 1, 2) (Kandinsky 5)."""
    total = rewriter.node_of(node.args["x"], "sum")
    product = rewriter.node_of(total.args["x"], "mul") if total is not None else None
    if total is None or product is None or total.args["keepdims"]:
        return None
    dims = rewriter.dims(total.args["x"])
    if not dims or not is_last(total.args["axis"], len(dims)):
        return None
    for x, table in (("a", "b"), ("b", "a")):
        if _as_columns(rewriter, product.args[x]) is not None:
            return _from_matrix(rewriter, node, product.args[x], product.args[table])
    return None


def _as_columns(rewriter: Rewriter, arg: Arg) -> Arg:
    """x, if `arg` is x reshaped to (..., n, 1, 2); a cast in between is put on x."""
    node = rewriter.node_of(rewriter.bare(arg), "reshape")
    if node is None:
        return None
    before, after = rewriter.dims(node.args["x"]), rewriter.dims(Ref(node.out[0]))
    if before is None or after is None or after[-2:] != ("1", "2"):
        return None
    return node.args["x"] if after[:-3] == before[:-1] else None


def _from_matrix(rewriter: Rewriter, node: Node, columns: Arg, table: Arg) -> Arg:
    x, dims = _as_columns(rewriter, columns), rewriter.dims(table)
    half = rewriter.dims(columns)
    if x is None or not dims or not half or dims[-3:] != (half[-3], "2", "2"):
        return None
    if rewriter.dims(x) != rewriter.dims(Ref(node.out[0])):
        return None

    def entry(row: int, column: int) -> Arg:
        dtype = rewriter.dtype(table)
        type = Type(dtype, dims[:-1])
        part = rewriter.emit("select", type, x=table, axis=-1, index=column)
        return rewriter.emit("select", Type(dtype, dims[:-2]), x=part, axis=-1, index=row)

    minus = Type(rewriter.dtype(table), dims[:-2])
    cos = _both(rewriter, entry(0, 0), entry(1, 1), True)
    sin = _both(rewriter, rewriter.emit("neg", minus, x=entry(0, 1)), entry(1, 0), True)
    return _emit(rewriter, node, rewriter.cast(x, rewriter.dtype(columns)), cos, sin, True)


def _emit(rewriter: Rewriter, node: Node, x: Arg, cos: Arg, sin: Arg, interleaved: bool) -> Arg:
    """The op, in the precision of x times the tables, cast to what the node gave."""
    out = Ref(node.out[0])
    wide = "float32" if "float32" in (rewriter.dtype(x), rewriter.dtype(cos)) else rewriter.dtype(x)
    dims = rewriter.dims(out) or ()
    made = rewriter.emit("rotary", Type(wide, dims), x=x, cos=cos, sin=sin, interleaved=interleaved)
    return rewriter.cast(made, rewriter.dtype(out))


def uncast_input(rewriter: Rewriter, node: Node) -> Arg:
    """rotary(cast(x)) -> rotary(x): float32 tables widen x inside the product already."""
    cast = rewriter.node_of(node.args["x"], "cast")
    if (
        cast is None
        or cast.args["dtype"] != "float32"
        or rewriter.dtype(cast.args["x"]) != "compute"
    ):
        return None
    if any(rewriter.dtype(node.args[key]) != "float32" for key in ("cos", "sin")):
        return None
    type = rewriter.type_of(Ref(node.out[0]))
    return rewriter.emit("rotary", type, **{**node.args, "x": cast.args["x"]})


ROTARY: Rules = {
    "rotary": (uncast_input,),
    "add": (rotated_copy,),
    "concat": (two_lines,),
    "slice_update": (two_updates,),
    "reshape": (complex_product, two_lines, matrix_columns, matrix_sum),
}
