"""What a rewrite is written with: the rewriter, types of values, and patterns.

A rule looks at one node whose arguments are already rewritten, and may look back at the nodes that
made them. It returns what to read instead of the node's outputs, or None to leave it alone. Nodes
that are no longer read are dropped afterwards, so a rule never deletes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlxconv.runtime.program.program import Arg, Entry, Node, Parameter, Ref, Weight, substitute
from mlxconv.runtime.program.types import UNKNOWN, Type

Rule = Callable[["Rewriter", Node], "Arg"]
Rules = Mapping[str, Sequence[Rule]]
Bound = dict[str, Arg]
Pattern = object  # `match` says which ones

# Dtypes that hold every value of the key exactly. `compute` is bfloat16, float16 or float32.
WIDER = {
    "compute": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
    "bool": ("uint8", "int32", "float16", "bfloat16", "compute", "float32", "float64"),
    "uint8": ("int32", "float32", "float64"),
    "int32": ("float64",),
}


@dataclass(slots=True)
class Rewriter:
    """The nodes written so far, who made each value, and what values were replaced by."""

    parameters: Mapping[str, Parameter]
    types: dict[str, Type]
    nodes: list[Node] = field(default_factory=list)
    producers: dict[str, Node] = field(default_factory=dict)
    replaced: dict[str, Arg] = field(default_factory=dict)
    module: str = ""
    _made: int = 0

    def emit(self, op: str, type: Type = UNKNOWN, **args: Arg) -> Ref:
        """Append a node with one output, of the module that is being rewritten."""
        self._made += 1
        while f"r{self._made}" in self.types:
            self._made += 1
        name = f"r{self._made}"
        self.types[name] = type
        self.write(Node(op, (name,), args, self.module, (type,)))
        return Ref(name)

    def write(self, node: Node) -> None:
        """Append a node as it is."""
        self.nodes.append(node)
        for name in node.out:
            self.producers[name] = node

    def node_of(self, arg: Arg, *ops: str) -> Node | None:
        """The node that made a value, if its op is one of `ops` (any, when none are named)."""
        node = self.producers.get(arg.name) if isinstance(arg, Ref) else None
        return node if node is not None and (not ops or node.op in ops) else None

    def type_of(self, arg: Arg) -> Type:
        """`float32[batch, 64]`; UNKNOWN when it is not known."""
        if isinstance(arg, Ref):
            return self.types.get(arg.name, UNKNOWN)
        if isinstance(arg, Weight) and arg.name in self.parameters:
            found = self.parameters[arg.name]
            return Type(found.dtype, tuple(map(str, found.shape)))
        return UNKNOWN

    def dtype(self, arg: Arg) -> str:
        """The dtype of a value; empty when it is not known, or not an array."""
        type = self.type_of(arg)
        return "" if type.dims is None else type.dtype

    def dims(self, arg: Arg) -> tuple[str, ...] | None:
        """The sizes of a value as text; None when they are not known."""
        return self.type_of(arg).dims

    def bare(self, arg: Arg) -> Arg:
        """What `arg` was before casts."""
        while (node := self.node_of(arg, "cast")) is not None:
            arg = node.args["x"]
        return arg

    def cast(self, arg: Arg, dtype: str) -> Arg:
        """`arg` in `dtype`."""
        found = self.dtype(arg)
        if found == dtype:
            return arg
        return self.emit("cast", replace(self.type_of(arg), dtype=dtype), x=arg, dtype=dtype)


def is_last(axis: Arg, rank: int) -> bool:
    """Whether an axis argument (a number, or a tuple of one) is the last of `rank` axes."""
    if isinstance(axis, tuple):
        return len(axis) == 1 and is_last(axis[0], rank)
    return isinstance(axis, int) and axis in (-1, rank - 1)


# ---- one pass -----------------------------------------------------------------------------------


def apply(rules: Rules, entry: Entry, parameters: Mapping[str, Parameter]) -> tuple[Entry, bool]:
    """The entry with the first rule that fires applied to each node, and whether one did."""
    types = {item.name: item.type for item in entry.inputs}
    for node in entry.nodes:
        types.update(zip(node.out, node.types))
    rewriter = Rewriter(parameters, types)
    fired = False
    for node in entry.nodes:
        node = _read(rewriter, node)
        rewriter.module = node.module
        result = _first(rules.get(node.op, ()), rewriter, node)
        if result is None:
            rewriter.write(node)
            continue
        fired = True
        results = result if isinstance(result, tuple) else (result,)
        rewriter.replaced.update(zip(node.out, results, strict=True))
    return _close(rewriter, entry), fired


def _first(rules: Sequence[Rule], rewriter: Rewriter, node: Node) -> Arg:
    for rule in rules:
        result = rule(rewriter, node)
        if result is not None:
            return result
    return None


def _read(rewriter: Rewriter, node: Node) -> Node:
    """The node with the current names of what it reads."""
    if not rewriter.replaced:
        return replace(node, args=dict(node.args))
    args = {key: rename(value, rewriter.replaced) for key, value in node.args.items()}
    return replace(node, args=args)


def rename(arg: Arg, names: Mapping[str, Arg]) -> Arg:
    """`arg` with values replaced."""
    return substitute(
        arg, lambda item: names.get(item.name, item) if isinstance(item, Ref) else item
    )


def _close(rewriter: Rewriter, entry: Entry) -> Entry:
    outputs = tuple(rename(arg, rewriter.replaced) for arg in entry.outputs)
    return replace(
        entry,
        nodes=rewriter.nodes,
        outputs=outputs,
        taps=rename_taps(entry.taps, rewriter.replaced),
    )


def rename_taps(
    taps: Mapping[str, tuple[str, ...]], names: Mapping[str, Arg]
) -> dict[str, tuple[str, ...]]:
    """Taps of the values that replaced those named; a tap of a number or weight is dropped."""
    renamed = {}
    for path, values in taps.items():
        found = [names.get(value, Ref(value)) for value in values]
        if all(isinstance(item, Ref) for item in found):
            renamed[path] = tuple(item.name for item in found if isinstance(item, Ref))
    return renamed


# ---- patterns -----------------------------------------------------------------------------------

_COMMUTATIVE = {"add", "mul"}


def match(rewriter: Rewriter, node: Node, pattern: tuple[Pattern, ...]) -> Bound | None:
    """The values that a pattern captures, or None. Casts between the nodes are looked through.

    A pattern is `"$name"`, which captures any argument (the same one, casts apart, each time it
    occurs); `...`, any argument; a tuple, an op with its arguments in order (add and mul in both
    orders; arguments past the last pattern are free); or a literal.
    """
    if node.op != pattern[0]:
        return None
    return next(_matches_node(rewriter, node, pattern[1:], {}), None)


def _matches(rewriter: Rewriter, arg: Arg, pattern: Pattern, bound: Bound) -> Iterator[Bound]:
    if pattern is ...:
        yield bound
    elif isinstance(pattern, str) and pattern[:1] == "$":
        known = bound.get(pattern[1:])
        if pattern[1:] not in bound:
            yield {**bound, pattern[1:]: arg}
        elif rewriter.bare(known) == rewriter.bare(arg):
            yield bound
    elif isinstance(pattern, tuple):
        node = rewriter.node_of(rewriter.bare(arg), str(pattern[0]))
        if node is not None:
            yield from _matches_node(rewriter, node, pattern[1:], bound)
    elif type(arg) is type(pattern) and arg == pattern:
        yield bound


def _matches_node(
    rewriter: Rewriter, node: Node, patterns: tuple[Pattern, ...], bound: Bound
) -> Iterator[Bound]:
    args = list(node.args.values())
    orders = [args, args[::-1]] if node.op in _COMMUTATIVE else [args]
    for order in orders:
        yield from _matches_all(rewriter, order, patterns, bound)


def _matches_all(
    rewriter: Rewriter, args: Sequence[Arg], patterns: tuple[Pattern, ...], bound: Bound
) -> Iterator[Bound]:
    if not patterns:
        yield bound
    elif args:
        for found in _matches(rewriter, args[0], patterns[0], bound):
            yield from _matches_all(rewriter, args[1:], patterns[1:], found)
