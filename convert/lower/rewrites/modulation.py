"""Modulation vectors (adaLN): a new axis for all parts at once, instead of one for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from mlxconv.runtime.program.program import Arg, Entry, Node, Ref, refs
from mlxconv.runtime.program.types import UNKNOWN, Type

from .graph import rename, rename_taps

_SPLITS = ("split", "split_every", "chunk")


def expand_before_split(entry: Entry) -> Entry:
    """`[expand_dims(part) for part in split(x)]` -> `split(expand_dims(x))`.

    Only where nothing else reads the parts. Six modulation vectors then cost one new axis.
    """
    users: dict[str, list[Node]] = defaultdict(list)
    for node in entry.nodes:
        for name in refs(node.args.values()):
            users[name].append(node)
    kept = set(refs(entry.outputs))
    names: dict[str, Arg] = {}
    types = {n: t for node in entry.nodes for n, t in zip(node.out, node.types)}
    nodes: list[Node] = []
    for node in entry.nodes:
        axis = None if kept.intersection(node.out) else _new_axis(node, users)
        if axis is not None:
            for part in node.out:
                names.update((user.out[0], Ref(part)) for user in users[part])
            nodes += _expanded(node, axis, types)
        elif not names.keys() >= set(node.out):
            nodes.append(node)
    nodes = [
        replace(node, args={k: rename(v, names) for k, v in node.args.items()}) for node in nodes
    ]
    outputs = tuple(rename(arg, names) for arg in entry.outputs)
    return replace(entry, nodes=nodes, outputs=outputs, taps=rename_taps(entry.taps, names))


def _new_axis(node: Node, users: dict[str, list[Node]]) -> int | None:
    """The axis, counted from the front, that all users of all parts add; None if they differ."""
    rank = len(node.types[0].dims or ()) if node.types else 0
    if node.op not in _SPLITS or rank == 0 or not isinstance(node.args["axis"], int):
        return None
    readers = [user for part in node.out for user in users[part]]
    if not readers or any(user.op != "expand_dims" for user in readers):
        return None
    axes = {axis % (rank + 1) for user in readers if isinstance(axis := user.args["axis"], int)}
    return axes.pop() if len(axes) == 1 else None


def _expanded(node: Node, axis: int, types: Mapping[str, Type]) -> list[Node]:
    name = f"{node.out[0]}_whole"
    dims = node.types[0].dims or ()
    own = int(str(node.args["axis"])) % len(dims)
    x = node.args["x"]
    type = _with_axis(types.get(x.name, UNKNOWN) if isinstance(x, Ref) else UNKNOWN, axis)
    whole = Node("expand_dims", (name,), {"x": x, "axis": axis}, node.module, (type,))
    args = {**node.args, "x": Ref(name), "axis": own + (axis <= own)}
    return [whole, replace(node, args=args, types=tuple(_with_axis(t, axis) for t in node.types))]


def _with_axis(type: Type, axis: int) -> Type:
    if type.dims is None:
        return UNKNOWN
    return Type(type.dtype, (*type.dims[:axis], "1", *type.dims[axis:]))
