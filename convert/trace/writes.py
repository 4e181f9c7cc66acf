"""Writes into values, replaced by the values that they leave behind.

`x[:, 0] = y` is traced as a write into a view of `x`. Here it becomes a value: `x` with `y` put
back in its place, for all that reads `x`, or any view of it, from then on. It is what torch's
functionalization does, by the graph alone; the tensors that export kept of the trace tell which
values share memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from .targets import target_name

_ATEN = torch.ops.aten


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into an argument."""
    target = node.target
    is_mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return is_mutable and target is not _ATEN.detach_.default  # which changes no value


def pure(node: fx.Node) -> Any:
    """`add` for `add_`: the operation that gives what this one writes; None if there is none."""
    target: Any = node.target
    schema = target._schema
    into = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    if into != [True, *[False] * (len(into) - 1)] or torch.Tag.inplace_view in target.tags:
        return None
    name = schema.name.split("::")[1]
    packet = getattr(_ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname or "default", None)


# ---- which values share memory ------------------------------------------------------------------


@dataclass(frozen=True)
class Storage:
    """The value that a piece of memory was made for, and all its views with what each is of."""

    root: fx.Node
    views: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def chain(self, node: fx.Node) -> Iterator[fx.Node]:
        """A view, what it is a view of, and so on, without the root."""
        while node is not self.root:
            yield node
            node = self.views[node]


def written(graph: fx.Graph) -> list[Storage] | None:
    """The storages that a graph writes into; None where one is not its own, or not understood."""
    places = {place for node in graph.nodes if writes(node) for place in _memory(node)}
    storages: dict[int, Storage] = {}
    for node in graph.nodes if places else ():
        for place in _memory(node) & places:
            if not _noted(node, place, storages):
                return None
    found = list(storages.values())
    puts = (view for s in found for n in s.views if writes(n) for view in s.chain(n))
    return found if all(writes(view) or _inverse(view) for view in puts) else None


def _memory(node: fx.Node) -> set[int]:
    """Which memory a node's tensors lie in."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {x.untyped_storage()._cdata for x in leaves if isinstance(x, torch.Tensor)}


def _noted(node: fx.Node, place: int, storages: dict[int, Storage]) -> bool:
    """Note a value that lies in a storage; False if that is not the graph's, or it is no view."""
    known = storages.get(place)
    if known is None:
        # Several outputs with memory of their own are known by their `getitem`.
        if not isinstance(node.meta["val"], (tuple, list)):
            storages[place] = Storage(node)
        return node.op == "call_function" and not writes(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or (source is not known.root and source not in known.views):
        return False
    known.views[node] = source
    return len(_memory(node)) == 1


# ---- writes as values ---------------------------------------------------------------------------


def without_writes(exported: ExportedProgram, storages: list[Storage]) -> None:
    """Replace each write into these storages by the values that they have afterwards."""
    versions, graph = _Versions(storages), exported.graph
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            versions.write(node) if writes(node) else versions.update(node)
    for node in reversed(graph.nodes):
        if writes(node):
            graph.erase_node(node)
    leaves = pytree.tree_leaves(graph.output_node().args[0])
    for spec, leaf in zip(exported.graph_signature.output_specs, leaves, strict=True):
        if isinstance(leaf, fx.Node):
            spec.arg.name = leaf.name


class _Versions:
    """The nodes that hold the values of written storages, at one point of the program."""

    def __init__(self, storages: list[Storage]) -> None:
        self.of = {node: s for s in storages for node in (s.root, *s.views)}
        self.count = {s.root: 0 for s in storages}  # writes until now
        self.held: dict[fx.Node, tuple[int, fx.Node]] = {}  # after how many of them, and where

    def update(self, node: fx.Node) -> None:
        """Have a node read what its arguments are now."""
        node.args, node.kwargs = self._read(node, node)
        if node in self.of:
            self._hold(node, node)

    def write(self, node: fx.Node) -> None:
        """Compute what an operation writes, and all that it is a view of with that put back."""
        storage, value = self.of[node], self._result(node)
        made = [(node, value)]
        for view in storage.chain(node):
            source = storage.views[view]
            if not writes(view):
                value = self._put_back(view, value, node)
            made.append((source, value))
        self.count[storage.root] += 1
        for known, value in made:
            self._hold(known, value)

    def _put_back(self, view: fx.Node, value: fx.Node, node: fx.Node) -> fx.Node:
        """What a view is of, after `node` wrote a value to the view."""
        inverse, source = _inverse(view), self.of[view].views[view]
        assert inverse is not None
        target, *args = inverse(view.args, self._now(source, node), value)
        return value if target is None else _call(node, source, target, tuple(args))

    def _now(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node that holds a value as it is now: a view is taken again after a write."""
        if node not in self.of:
            return node
        storage, (version, holder) = self.of[node], self.held[node]
        if version == self.count[storage.root]:
            return holder
        if writes(node):
            again = self._now(storage.views[node], reader)
        else:
            again = _call(reader, node, node.target, *self._read(node, reader))
        self._hold(node, again)
        return again

    def _hold(self, node: fx.Node, holder: fx.Node) -> None:
        self.held[node] = (self.count[self.of[node].root], holder)

    def _read(self, node: fx.Node, reader: fx.Node) -> tuple[Any, Any]:
        read: tuple[Any, Any] = fx.map_arg((node.args, node.kwargs), lambda n: self._now(n, reader))
        return read

    def _result(self, node: fx.Node) -> fx.Node:
        """What is written, in the dtype of what it is written to."""
        (args, kwargs), held = self._read(node, node), node.meta["val"]
        result = _call(node, node, pure(node), args, kwargs)
        values: Any = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
        if all(v.dtype == held.dtype for v in tensors):
            return result
        with held.fake_mode:
            result.meta["val"] = pure(node)(*values[0], **values[1])
        if result.meta["val"].dtype == held.dtype:
            return result
        return _call(node, node, _ATEN.to.dtype, (result, held.dtype))


def _call(
    reader: fx.Node, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None
) -> fx.Node:
    """A node in a reader's module, with a value of the shape and the dtype of another's."""
    made = reader.graph.call_function(target, args, kwargs or {})
    made.meta = {**reader.meta, "val": like.meta["val"]}
    return made


# ---- views put back -----------------------------------------------------------------------------

# Of a view's arguments, what it is a view of, and the value written to it: the operation that
# gives the whole with it put back, and its arguments; none where the value is the whole.
_Inverse = Callable[[tuple[Any, ...], fx.Node, fx.Node], tuple[Any, ...]]


def _slice(args: tuple[Any, ...], whole: fx.Node, part: fx.Node) -> tuple[Any, ...]:
    everything = args[2:] in ((), (0,), (None,), (0, sys.maxsize), (None, sys.maxsize))
    return (None,) if everything else (_ATEN.slice_scatter.default, whole, part, *args[1:])


def _select(args: tuple[Any, ...], whole: fx.Node, part: fx.Node) -> tuple[Any, ...]:
    return (_ATEN.select_scatter.default, whole, part, *args[1:])


def _transpose(args: tuple[Any, ...], whole: fx.Node, part: fx.Node) -> tuple[Any, ...]:
    return (_ATEN.transpose.int, part, *args[1:])


def _permute(args: tuple[Any, ...], whole: fx.Node, part: fx.Node) -> tuple[Any, ...]:
    axes = [axis % len(args[1]) for axis in args[1]]
    return (_ATEN.permute.default, part, [axes.index(i) for i in range(len(axes))])


def _reshaped(args: tuple[Any, ...], whole: fx.Node, part: fx.Node) -> tuple[Any, ...]:
    return (_ATEN.view_as.default, part, whole)


def _same(args: tuple[Any, ...], whole: fx.Node, part: fx.Node) -> tuple[Any, ...]:
    return (None,)


_INVERSES: dict[str, _Inverse] = {
    "slice": _slice,
    "select": _select,
    "transpose": _transpose,
    "permute": _permute,
    **dict.fromkeys("view reshape flatten unflatten squeeze unsqueeze".split(), _reshaped),
    **dict.fromkeys("alias contiguous detach detach_ to".split(), _same),
}


def _inverse(view: fx.Node) -> _Inverse | None:
    """How a view is put back; None if that is not known."""
    return _INVERSES.get(target_name(view.target).rsplit(".", 1)[0])
