"""Repeated modules are written once: members of module lists become calls of shared blocks.

`transformer_blocks.0` and `transformer_blocks.1` are the same nodes with other weights. Each
becomes one `call` with its path as the prefix of its weights. So does each call of a module that is
called once per chunk. Members of lists inside a block are blocks in turn. Equal blocks are shared,
also between entries.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mlxconv.runtime.program.program import (
    Arg,
    Block,
    Body,
    Entry,
    Node,
    Program,
    Ref,
    Weight,
    refs,
    substitute,
)
from mlxconv.runtime.program.types import UNKNOWN, Type

from .rewrites.sharing import list_member, number

SMALLEST = 8  # nodes: a call of fewer is longer to read than the nodes
_NUMBERED = re.compile(r"[vir]\d+")
_CALL = re.compile(r"@\d+")  # of a module that is called once per chunk: `decoder@3`
BodyT = TypeVar("BodyT", bound=Body)


def outline(entries: Sequence[Entry]) -> tuple[list[Entry], dict[str, Block]]:
    """The entries with members of module lists as calls, and the blocks that are called.

    A block has the nodes of one member, its values named v0, v1, ..., its weights relative to the
    member's path. What it reads from outside are its inputs; what is read of it, its outputs.
    """
    library = _Library()
    outlined = [_outline(entry, library) for entry in entries]
    done = 0
    while done < len(library.blocks):  # blocks found on the way are outlined in turn
        name = list(library.blocks)[done]
        library.blocks[name] = _outline(library.blocks[name], library)
        done += 1
    library.annotate()
    _name_inputs(outlined, library.blocks)
    return [number(entry) for entry in outlined], library.blocks


def merged(known: Program, more: Program) -> tuple[list[Entry], dict[str, Block]]:
    """All entries of two programs of one component, and their blocks: equal ones are shared."""
    library = _Library()
    for name, block in known.blocks.items():
        library.put(name, block)
    names: dict[str, str] = {}

    def placed(body: BodyT) -> BodyT:
        return replace(body, nodes=[moved(n) if n.op == "call" else n for n in body.nodes])

    def moved(node: Node) -> Node:
        called = str(node.args["block"])
        if called not in names:
            block = placed(more.blocks[called])
            names[called] = library.add(re.sub(r"_\d+$", "", called), block)
        return replace(node, args={**node.args, "block": names[called]})

    entries = [placed(entry) for entry in more.entries]
    library.annotate()
    return [*known.entries, *entries], library.blocks


# ---- one member ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Member:
    """One member of a module list: its path, its nodes, and which values are read of it."""

    prefix: str
    nodes: list[Node]
    outputs: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return _CALL.sub("", self.prefix)


@dataclass(slots=True)
class _Naming:
    """Names inside a block for what the member calls otherwise, in order of first use."""

    prefix: str  # of the member's nodes
    path: str  # of its weights
    values: dict[str, str] = field(default_factory=dict)
    inputs: dict[Ref | Weight, str] = field(default_factory=dict)

    def read(self, item: Ref | Weight) -> Arg:
        if isinstance(item, Ref) and item.name in self.values:
            return Ref(self.values[item.name])
        if isinstance(item, Weight) and item.name.startswith(f"{self.path}."):
            return Weight(item.name.removeprefix(f"{self.path}."))
        return Ref(self.inputs.setdefault(item, f"i{len(self.inputs)}"))

    def node(self, node: Node) -> Node:
        args = {key: substitute(value, self.read) for key, value in node.args.items()}
        for name in node.out:
            self.values[name] = f"v{len(self.values)}"
        out = tuple(self.values[name] for name in node.out)
        module = node.module.removeprefix(self.prefix).lstrip(".")
        return Node(node.op, out, args, module, node.types)


def _extract(member: _Member, taps: Mapping[str, tuple[str, ...]]) -> tuple[Block, tuple[Arg, ...]]:
    """The member as a block, and what its call passes for the block's inputs."""
    naming = _Naming(member.prefix, member.path)
    nodes = [naming.node(node) for node in member.nodes]
    inner = {
        path.removeprefix(f"{member.path}."): tuple(naming.values[name] for name in names)
        for path, names in taps.items()
        if path.startswith(f"{member.path}.") and all(name in naming.values for name in names)
    }
    outputs = tuple(Ref(naming.values[name]) for name in member.outputs)
    return Block(nodes, outputs, inner, tuple(naming.inputs.values())), tuple(naming.inputs)


# ---- one body -----------------------------------------------------------------------------------


def _outline(body: BodyT, library: _Library) -> BodyT:
    """The body with its list members as calls."""
    members = _members(body)
    units = _order(body.nodes, members)
    while not isinstance(units, list):
        members = {prefix: m for prefix, m in members.items() if prefix not in units}
        units = _order(body.nodes, members)
    _find_outputs(body, members.values())
    nodes: list[Node] = []
    for unit in units:
        if isinstance(unit, Node):
            nodes.append(unit)
        else:
            nodes.append(_call(unit, body.taps, library))
    for node in nodes:
        node.module = _CALL.sub("", node.module)
    return replace(body, nodes=nodes, taps=_outer_taps(body, members))


def _members(body: Body) -> dict[str, _Member]:
    found: dict[str, _Member] = {}
    for node in body.nodes:
        prefix = list_member(node.module, "")
        if prefix:
            found.setdefault(prefix, _Member(prefix, [])).nodes.append(node)
    return {prefix: m for prefix, m in found.items() if len(m.nodes) >= SMALLEST}


def _find_outputs(body: Body, members: Iterable[_Member]) -> None:
    """Values of each member that others read, or that its own tap names, in order of definition."""
    owner = {name: m.prefix for m in members for node in m.nodes for name in node.out}
    read: dict[str, set[str]] = defaultdict(set)
    for name in refs(body.outputs):
        read[owner.get(name, "")].add(name)
    for node in body.nodes:
        own = owner.get(node.out[0], "") if node.out else ""
        for name in refs(node.args.values()):
            if owner.get(name, "") != own:
                read[owner.get(name, "")].add(name)
    for member in members:
        wanted = read[member.prefix].union(body.taps.get(member.path, ()))
        member.outputs = [name for node in member.nodes for name in node.out if name in wanted]


def _call(member: _Member, taps: Mapping[str, tuple[str, ...]], library: _Library) -> Node:
    block, inputs = _extract(member, taps)
    types = {name: type for node in member.nodes for name, type in zip(node.out, node.types)}
    return Node(
        "call",
        tuple(member.outputs),
        {"block": library.add(member.path, block), "prefix": member.path, "inputs": inputs},
        member.path,
        tuple(types[name] for name in member.outputs),
    )


def _outer_taps(body: Body, members: Mapping[str, _Member]) -> dict[str, tuple[str, ...]]:
    """Taps of values that are still computed here: not inside of a member, or outputs of one."""
    hidden = {name for m in members.values() for node in m.nodes for name in node.out}
    shown = {name for m in members.values() for name in m.outputs}
    inner = {p for p in body.taps if any(p.startswith(f"{m.path}.") for m in members.values())}
    return {
        path: names
        for path, names in body.taps.items()
        if not hidden.intersection(names) or (path not in inner and shown.issuperset(names))
    }


# ---- order --------------------------------------------------------------------------------------


def _order(
    nodes: Sequence[Node], members: Mapping[str, _Member]
) -> list[Node | _Member] | set[str]:
    """Nodes and whole members so that each reads only what came before; or, where a member is read
    by a node that it reads from in turn, the prefixes of such members."""
    units, deps = _units(nodes, members)
    waiting = [len(found) for found in deps]
    users: list[list[int]] = [[] for _ in units]
    for i, found in enumerate(deps):
        for j in found:
            users[j].append(i)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in users[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    if len(order) == len(units):
        return [units[i] for i in order]
    return _on_cycles(units, deps, set(range(len(units))) - set(order))


def _units(
    nodes: Sequence[Node], members: Mapping[str, _Member]
) -> tuple[list[Node | _Member], list[set[int]]]:
    """Members and other nodes in order of their first node, and which units each one reads."""
    units: list[Node | _Member] = []
    index: dict[str, int] = {}
    made: dict[str, int] = {}
    unit_of: list[int] = []
    for node in nodes:
        prefix = list_member(node.module, "")
        if prefix in members:
            if prefix not in index:
                index[prefix] = len(units)
                units.append(members[prefix])
            unit_of.append(index[prefix])
        else:
            unit_of.append(len(units))
            units.append(node)
        made.update(dict.fromkeys(node.out, unit_of[-1]))
    deps: list[set[int]] = [set() for _ in units]
    for node, unit in zip(nodes, unit_of):
        found = {made[name] for name in refs(node.args.values()) if name in made}
        deps[unit].update(found - {unit})
    return units, deps


def _on_cycles(units: list[Node | _Member], deps: list[set[int]], left: set[int]) -> set[str]:
    """Prefixes of the members among `left` that others of `left` still read from."""
    while True:
        read = {j for i in left for j in deps[i]} & left
        if read == left:
            return {unit.prefix for i in left if isinstance(unit := units[i], _Member)}
        left = read


# ---- shared blocks ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Library:
    """Blocks by what they compute, regardless of the paths of their modules."""

    blocks: dict[str, Block] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    types: dict[str, dict[str, Type]] = field(default_factory=dict)

    def add(self, prefix: str, block: Block) -> str:
        """The name of the block that does the same, written under a new name if there is none."""
        key = _key(block)
        if key in self.names:
            name = self.names[key]
            same = self.blocks[name]
            self.blocks[name] = replace(same, taps={**same.taps, **block.taps})
            types = {n: t for node in block.nodes for n, t in zip(node.out, node.types)}
            known = self.types[name]
            known.update({n: _common_type(known[n], t) for n, t in types.items()})
            return name
        name = self._free_name("_".join(p for p in prefix.split(".") if not p.isdigit()))
        self.put(name, block)
        return name

    def put(self, name: str, block: Block) -> None:
        """A block under a name that is free."""
        self.names.setdefault(_key(block), name)
        self.blocks[name] = block
        self.types[name] = {n: t for node in block.nodes for n, t in zip(node.out, node.types)}

    def _free_name(self, wanted: str) -> str:
        name, count = wanted, 0
        while name in self.blocks:
            count += 1
            name = f"{wanted}_{count}"
        return name

    def annotate(self) -> None:
        """Types that hold for all members that share a block."""
        for name, block in self.blocks.items():
            known = self.types[name]
            nodes = [
                replace(node, types=tuple(known.get(n, UNKNOWN) for n in node.out))
                for node in block.nodes
            ]
            self.blocks[name] = replace(block, nodes=nodes)


def _key(block: Block) -> str:
    """All that makes two blocks the same: operations, arguments, modules, dtypes; not sizes."""
    nodes = [
        (node.op, node.out, node.args, node.module, [t.dtype for t in node.types])
        for node in block.nodes
    ]
    return repr((nodes, block.outputs, block.inputs))


def _common_type(one: Type, other: Type) -> Type:
    """`compute[batch, 64]` and `compute[batch, 128]` -> `compute[batch, ?]`."""
    if one == other:
        return one
    if one.dims is None or other.dims is None or len(one.dims) != len(other.dims):
        return UNKNOWN
    return Type(one.dtype, tuple(a if a == b else "?" for a, b in zip(one.dims, other.dims)))


def _name_inputs(entries: Sequence[Entry], blocks: dict[str, Block]) -> None:
    """Inputs that every call passes by the same telling name take it: `image_tokens`."""
    passed: dict[str, list[tuple[Arg, ...]]] = defaultdict(list)

    def note(body: Body) -> None:
        for node in body.nodes:
            if node.op == "call" and isinstance(inputs := node.args["inputs"], tuple):
                passed[str(node.args["block"])].append(inputs)

    for entry in entries:
        note(entry)
    for name, block in list(blocks.items()):  # callers come before the blocks that they call
        names = {
            own: common.name
            for own, *given in zip(block.inputs, *passed[name])
            if isinstance(common := given[0], Ref)
            and not _NUMBERED.fullmatch(common.name)
            and all(item == common for item in given)
        }
        blocks[name] = _rename_inputs(block, names)
        note(blocks[name])


def _rename_inputs(block: Block, names: Mapping[str, str]) -> Block:
    def rename(item: Ref | Weight) -> Arg:
        return Ref(names.get(item.name, item.name)) if isinstance(item, Ref) else item

    return replace(
        block,
        nodes=[
            replace(node, args={k: substitute(v, rename) for k, v in node.args.items()})
            for node in block.nodes
        ],
        outputs=tuple(substitute(arg, rename) for arg in block.outputs),
        inputs=tuple(names.get(name, name) for name in block.inputs),
    )
