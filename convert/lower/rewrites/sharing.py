"""Removes unused nodes, nodes computed twice, and sizes read from several places."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from mlxconv.runtime.program.program import STAGES, Arg, Entry, Node, Ref, refs
from mlxconv.runtime.program.types import INT, UNKNOWN, Type

from .graph import rename, rename_taps


def drop_dead(entry: Entry) -> Entry:
    """The entry without nodes that no output needs, and taps of values that are gone."""
    wanted = set(refs(entry.outputs))
    kept: list[Node] = []
    for node in reversed(entry.nodes):
        if wanted.intersection(node.out):
            wanted.update(refs(node.args.values()))
            kept.append(node)
    known = {name for node in kept for name in node.out} | {i.name for i in entry.inputs}
    taps = {path: names for path, names in entry.taps.items() if known.issuperset(names)}
    return replace(entry, nodes=kept[::-1], taps=taps)


# ---- sizes --------------------------------------------------------------------------------------


def share_sizes(entry: Entry) -> Entry:
    """Sizes that follow from the inputs' are computed from those, once, before anything else.

    Blocks then take them from outside, all in the same way, whichever value they read them from.
    """
    sizes = _Sizes(entry)
    types = {item.name: item.type for item in entry.inputs}
    types.update((n, t) for node in entry.nodes for n, t in zip(node.out, node.types))
    names: dict[str, Arg] = {}
    nodes: list[Node] = []
    for node in entry.nodes:
        found = sizes.find(_size_text(node, types)) if node.op == "dim" else None
        if found is not None:
            names[node.out[0]] = found
            continue
        args = {key: rename(value, names) for key, value in node.args.items()}
        nodes.append(replace(node, args=args))
    outputs = tuple(rename(arg, names) for arg in entry.outputs)
    taps = rename_taps(entry.taps, names)
    return replace(entry, nodes=sizes.nodes + nodes, outputs=outputs, taps=taps)


_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floor_div"}


class _Sizes:
    """Sizes known from the inputs, by their text, and the nodes that compute them."""

    def __init__(self, entry: Entry) -> None:
        self.nodes: list[Node] = []
        self._taken = {name for node in entry.nodes for name in node.out}
        self._taken.update(item.name for item in entry.inputs)
        self._known: dict[str, Arg | None] = {
            item.name: Ref(item.name) for item in entry.inputs if item.type == INT
        }
        for text, item, axis in _input_sizes(entry):
            if text not in self._known:
                self._known[text] = self._add("dim", text, x=Ref(item), axis=axis)

    def find(self, text: str) -> Arg | None:
        """The size written `text`; None if it does not follow from the inputs."""
        if text not in self._known:
            try:
                self._known[text] = self._build(ast.parse(text, mode="eval").body)
            except (SyntaxError, _UnknownError):
                self._known[text] = None
        return self._known[text]

    def _build(self, tree: ast.expr) -> Arg:
        text = ast.unparse(tree)
        if isinstance(tree, ast.Constant) and type(tree.value) is int:
            return tree.value
        known = self._known.get(text)
        if known is None and isinstance(tree, ast.BinOp) and type(tree.op) in _ARITHMETIC:
            a, b = self._build(tree.left), self._build(tree.right)
            known = self._known[text] = self._add(_ARITHMETIC[type(tree.op)], text, a=a, b=b)
        if known is None:
            raise _UnknownError
        return known

    def _add(self, op: str, text: str, **args: Arg) -> Arg:
        name = _size_name(text)
        if len(name) > _LONGEST or not name.isidentifier() or name in self._taken:
            name = f"r_size{len(self.nodes)}"
        self._taken.add(name)
        self.nodes.append(Node(op, (name,), args, "", (INT,)))
        return Ref(name)


_LONGEST = 30
_WORDS = {"//": "_over_", "*": "_by_", "+": "_plus_", "-": "_minus_"}


def _size_name(text: str) -> str:
    """`text_tokens + 8` -> `text_tokens_plus_8`."""
    for sign, word in _WORDS.items():
        text = text.replace(sign, word)
    return re.sub(r"[\s()]", "", text)


class _UnknownError(Exception):
    """A size that the inputs do not give."""


def _input_sizes(entry: Entry) -> Iterable[tuple[str, str, int]]:
    """(size, input, axis), inputs that are known early first: what reads only sizes stays early."""
    for item in sorted(entry.inputs, key=lambda item: STAGES.index(item.stage)):
        for axis, text in enumerate(item.type.dims or ()):
            if not text.isdigit():
                yield text, item.name, axis


def _size_text(node: Node, types: dict[str, Type]) -> str:
    x, axis = node.args["x"], node.args["axis"]
    dims = types.get(x.name, UNKNOWN).dims if isinstance(x, Ref) else None
    return dims[axis] if dims is not None and isinstance(axis, int) else ""


def lift_sizes(entry: Entry) -> Entry:
    """Size arithmetic on outer sizes belongs to the common parent of those who read it.

    The trace computes a size once, inside the first module that needs it.
    """
    owners = {item.name: "" for item in entry.inputs}
    nodes = []
    for node, parent in zip(entry.nodes, _parents(entry.nodes)):
        inside = list_member(node.module, parent)
        if inside and not _reads_inside(node.args, owners, inside):
            node = replace(node, module=parent)
        owners.update(dict.fromkeys(node.out, node.module))
        nodes.append(node)
    return replace(entry, nodes=nodes)


def _parents(nodes: Sequence[Node]) -> list[str]:
    """The module of each node; for a size the common parent of all who read it, or a size of it."""
    readers: dict[str, list[str]] = defaultdict(list)
    found = []
    for node in reversed(nodes):
        parent = node.module
        if node.types == (INT,):
            parent = reduce(common_parent, readers[node.out[0]], node.module)
        for name in refs(node.args.values()):
            readers[name].append(parent)
        found.append(parent)
    return found[::-1]


# ---- computed twice -----------------------------------------------------------------------------


def share_common(entry: Entry) -> Entry:
    """One node where several have the same op and arguments; their common parent owns it."""
    seen: dict[str, list[Node]] = {}
    owners: dict[str, str] = {item.name: "" for item in entry.inputs}
    names: dict[str, Arg] = {}
    nodes: list[Node] = []
    for node in entry.nodes:
        args = {key: rename(value, names) for key, value in node.args.items()}
        key = _key(node, args)
        twin = next((one for one in seen.get(key, ()) if _may_share(one, node, args, owners)), None)
        if twin is None:
            node = replace(node, args=args)
            seen.setdefault(key, []).append(node)
            nodes.append(node)
            owners.update(dict.fromkeys(node.out, node.module))
            continue
        twin.module = common_parent(twin.module, node.module)
        owners.update(dict.fromkeys(twin.out, twin.module))
        names.update((old, Ref(new)) for old, new in zip(node.out, twin.out, strict=True))
    outputs = tuple(rename(arg, names) for arg in entry.outputs)
    return replace(entry, nodes=nodes, outputs=outputs, taps=rename_taps(entry.taps, names))


def _key(node: Node, args: dict[str, Arg]) -> str:
    """Equal for nodes that compute the same."""
    given = [f"{name}={value!r}" for name, value in args.items()]
    if node.types == (INT,) and node.op in ("add", "mul"):
        given = sorted(repr(value) for value in args.values())
    return f"{node.op} {len(node.out)} {given}"


def common_parent(first: str, second: str) -> str:
    """The longest path that both begin with."""
    parts = []
    for one, other in zip(first.split("."), second.split(".")):
        if one != other:
            break
        parts.append(one)
    return ".".join(parts)


def _may_share(twin: Node, node: Node, args: dict[str, Arg], owners: dict[str, str]) -> bool:
    """Not across two members of a list, when what they read is made in the first of them.

    The shared node would then read from the middle of one block and be read by it: no block could
    be written as one call.
    """
    inside = list_member(twin.module, common_parent(twin.module, node.module))
    return not inside or not _reads_inside(args, owners, inside)


def _reads_inside(args: Mapping[str, Arg], owners: Mapping[str, str], path: str) -> bool:
    """Whether an argument was computed in the module at `path`, or below."""
    return any(f"{owners.get(n, '')}.".startswith(f"{path}.") for n in refs(args.values()))


def list_member(path: str, parent: str) -> str:
    """The first member of a list that `path` is in, below `parent`; empty if none.

    The calls of a module that is called once per chunk, `decoder@3`, are members too.
    """
    parts, start = path.split("."), len(parent.split(".")) if parent else 0
    for i in range(start, len(parts)):
        if parts[i].isdigit() or "@" in parts[i]:
            return ".".join(parts[: i + 1])
    return ""


# ---- names --------------------------------------------------------------------------------------


_MADE_UP = re.compile(r"[vr]\d+|r_size\d+")


def number(entry: Entry) -> Entry:
    """Values named v0, v1, ... in order; sizes named by what they are keep their names."""
    given = {item.name for item in entry.inputs}
    names: dict[str, Arg] = {}
    count = 0
    for node in entry.nodes:
        for name in node.out:
            if node.types == (INT,) and not _MADE_UP.fullmatch(name):
                given.add(name)
                continue
            while f"v{count}" in given:
                count += 1
            names[name] = Ref(f"v{count}")
            count += 1
    nodes = [
        replace(
            node,
            out=tuple(_text(names.get(name, Ref(name))) for name in node.out),
            args={key: rename(value, names) for key, value in node.args.items()},
        )
        for node in entry.nodes
    ]
    outputs = tuple(rename(arg, names) for arg in entry.outputs)
    return replace(entry, nodes=nodes, outputs=outputs, taps=rename_taps(entry.taps, names))


def _text(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name
