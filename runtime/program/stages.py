"""Binding times: an entry in up to four parts, each run as often as it must be.

`constant` depends on weights and sizes alone, `prompt` on the prompt, `schedule` on the timestep
too, `step` on the latents. A value is of the latest stage among its inputs (binding time, Jones,
Gomard and Sestoft 1993, chapter 4). Blocks are split as well, so that a modulation deep inside one
is computed before the loop. Nothing here knows a model: it reads programs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .program import (
    STAGES,
    Arg,
    Block,
    Body,
    Entry,
    Input,
    Node,
    Program,
    Ref,
    Weight,
    latest_stage,
    refs,
    substitute,
    weights,
)
from .types import INT, UNKNOWN, Type

STEP = len(STAGES) - 1
# They make small values large; where only a later stage reads the result, it is made there.
_GROWING = frozenset({"broadcast", "full", "repeat", "tile"})
_VIEWS = frozenset({"expand_dims", "reshape", "select", "slice", "split", "squeeze", "transpose"})


def split(program: Program, entry: Entry) -> Program:
    """The entry as four, named as `STAGES`, with the blocks that they need.

    Each takes the inputs it reads, and by name the values that earlier parts give. The last one's
    outputs are the entry's; those of the others are the values that later parts read.
    """
    splitter = _Splitter(program)
    entries = splitter.entries(entry)
    return Program(
        program.class_name, entries, splitter.blocks, program.parameters, program.constants
    )


def input_stages(entry: Entry) -> dict[str, int]:
    """When each input is known, by index into `STAGES`. Sizes are known before anything else."""
    return {i.name: 0 if i.type == INT else STAGES.index(i.stage) for i in entry.inputs}


def value_stages(program: Program, entry: Entry) -> dict[str, int]:
    """When each value of the entry itself is known, by index into `STAGES`."""
    known = input_stages(entry)
    return _Splitter(program).sort(entry, known, frozenset(known)).found


def weights_by_stage(program: Program, entry: Entry) -> list[set[str]]:
    """For each of `STAGES`, the weights that its part of the entry reads."""
    parts = split(program, entry)
    return [set(weights_read(parts, part)) for part in parts.entries]


def weights_read(program: Program, body: Body, prefix: str = "") -> Iterable[str]:
    """Names of all weights that a body reads, in the blocks it calls too."""
    for node in body.nodes:
        if node.op == "call":
            block = program.blocks[str(node.args["block"])]
            yield from weights_read(program, block, f"{prefix}{node.args['prefix']}.")
        yield from (prefix + name for name in weights(node.args.values()))
    yield from (prefix + name for name in weights(body.outputs))


def shares(program: Program) -> dict[str, float]:
    """Share of the parameters that each stage is the last to read, over all entries."""
    latest: dict[str, int] = {}
    for entry in program.entries:
        for stage, names in enumerate(weights_by_stage(program, entry)):
            latest.update({name: max(stage, latest.get(name, 0)) for name in names})
    sizes = {name: math.prod(p.shape) for name, p in program.parameters.items()}
    total = sum(sizes.get(name, 0) for name in latest) or 1
    held = [0] * len(STAGES)
    for name, stage in latest.items():
        held[stage] += sizes.get(name, 0)
    return {stage: count / total for stage, count in zip(STAGES, held)}


# ---- when each value is known ----------------------------------------------------------------


@dataclass
class _Sorted:
    """A body whose nodes have stages, and whose calls are already calls of one stage each."""

    placed: list[tuple[int, Node]]
    stages: dict[str, int]
    outputs: tuple[Arg, ...]
    taps: dict[str, tuple[Arg, ...]]
    found: dict[str, int]  # of the values as the body was written


@dataclass(frozen=True)
class _Part:
    """A block's nodes of one stage: its name, what it reads of the whole block, what it gives."""

    block: str
    reads: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass
class _Pieces:
    """A block by stage. `outputs` are the block's, in values of its parts or its inputs."""

    parts: dict[int, _Part]
    outputs: tuple[Arg, ...]
    inner: _Sorted


@dataclass
class _Splitter:
    program: Program
    blocks: dict[str, Block] = field(default_factory=dict)
    _pieces: dict[tuple[str, tuple[int, ...]], _Pieces] = field(default_factory=dict)

    def entries(self, entry: Entry) -> list[Entry]:
        """One entry a stage."""
        known = input_stages(entry)
        body = self.sort(entry, known, frozenset(known))
        own = {i.name: i for i in entry.inputs}
        types = {n: t for _, node in body.placed for n, t in zip(node.out, node.types)}
        made = []
        for stage, name in enumerate(STAGES):
            nodes, reads, gives = _cut(body, stage)
            outputs = body.outputs if stage == STEP else tuple(Ref(n) for n in gives)
            if stage == STEP:
                reads = _unique([*reads, *(n for n in refs(outputs) if n not in _made(nodes))])
            inputs = [
                own.get(n) or Input(n, n, types.get(n, UNKNOWN), _stage(body, n)) for n in reads
            ]
            taps = _taps(body, nodes)
            made.append(Entry(nodes, outputs, taps, name, tuple(inputs), entry.sizes, {}))
        return made

    def sort(self, body: Body, known: Mapping[str, int], shaped: frozenset[str]) -> _Sorted:
        """`shaped`: inputs whose shapes are known from the start, so that their sizes are."""
        stages, alias = dict(known), dict[str, Arg]()
        placed: list[tuple[int, Node]] = []
        for number, node in enumerate(body.nodes):
            args = {k: _renamed(v, alias) for k, v in node.args.items()}
            node = Node(node.op, node.out, args, node.module, node.types)
            if node.op == "call":
                called = self._call(node, stages, f"c{number}")
                alias.update(called.alias)
                new = called.nodes
            else:
                new = [(_stage_of(node, stages, shaped), node)]
            placed += new
            stages.update({out: stage for stage, each in new for out in each.out})
        outputs = tuple(_renamed(arg, alias) for arg in body.outputs)
        written = (out for node in body.nodes for out in node.out)
        taps = {p: tuple(_renamed(Ref(n), alias) for n in names) for p, names in body.taps.items()}
        first = {out: latest_stage((_renamed(Ref(out), alias),), stages) for out in written}
        found = _Sorted(placed, stages, outputs, taps, first)
        _put_off(found)
        return found

    def _call(self, node: Node, stages: Mapping[str, int], label: str) -> "_Called":
        """A call as one for each stage of its block."""
        name, given = str(node.args["block"]), node.args["inputs"]
        assert isinstance(given, tuple)
        pieces = self._split(name, tuple(latest_stage((arg,), stages) for arg in given))
        outer: dict[str, Arg] = dict(zip(self.program.blocks[name].inputs, given))
        nodes = []
        for stage, part in sorted(pieces.parts.items()):
            out = tuple(f"{label}.{inner}" for inner in part.gives)
            inputs = tuple(outer[inner] for inner in part.reads)
            args: dict[str, Arg] = {
                "block": part.block,
                "prefix": node.args["prefix"],
                "inputs": inputs,
            }
            types = {n: t for _, each in pieces.inner.placed for n, t in zip(each.out, each.types)}
            kinds = tuple(types.get(inner, UNKNOWN) for inner in part.gives)
            nodes.append((stage, Node("call", out, args, node.module, kinds)))
            outer.update({inner: Ref(n) for inner, n in zip(part.gives, out)})
        values = (_renamed(arg, outer) for arg in pieces.outputs)
        return _Called(nodes, dict(zip(node.out, values)))

    def _split(self, name: str, stages: tuple[int, ...]) -> _Pieces:
        """A block whose inputs are known at `stages`; each way of splitting it is made once."""
        key = (name, stages)
        if key not in self._pieces:
            block = self.program.blocks[name]
            body = self.sort(block, dict(zip(block.inputs, stages)), frozenset())
            number = sum(other == name for other, _ in self._pieces)
            parts = {}
            for stage, suffix in enumerate(STAGES):
                nodes, reads, gives = _cut(body, stage)
                if not nodes:
                    continue
                label = f"{name}.{suffix}" + (f".{number}" if number else "")
                outputs = tuple(Ref(n) for n in gives)
                self.blocks[label] = Block(nodes, outputs, _taps(body, nodes), tuple(reads))
                parts[stage] = _Part(label, tuple(reads), tuple(gives))
            self._pieces[key] = _Pieces(parts, body.outputs, body)
        return self._pieces[key]


@dataclass(frozen=True)
class _Called:
    """The calls that stand for one, and what they make of its outputs."""

    nodes: list[tuple[int, Node]]
    alias: dict[str, Arg]


def _stage_of(node: Node, stages: Mapping[str, int], shaped: frozenset[str]) -> int:
    x = node.args.get("x")
    if node.op == "dim" and isinstance(x, Ref) and x.name in shaped:
        return latest_stage((node.args.get("axis"),), stages)
    return latest_stage(node.args.values(), stages)


def _stage(body: _Sorted, name: str) -> str:
    return STAGES[body.stages[name]]


def _renamed(arg: Arg, names: Mapping[str, Arg]) -> Arg:
    return substitute(arg, lambda i: names.get(i.name, i) if isinstance(i, Ref) else i)


def _put_off(body: _Sorted) -> None:
    """Move what only makes a value larger to the first stage that reads it.

    So is a part of a weight, such as one expert of a stack: held apart it would be a copy.
    """
    parts = _parts_of_weights(body)
    needed: dict[str, int] = dict.fromkeys(refs(body.outputs), -1)
    for number in range(len(body.placed) - 1, -1, -1):
        stage, node = body.placed[number]
        later = min((needed.get(out, -1) for out in node.out), default=-1)
        if later > stage and (node.op in _GROWING or parts.issuperset(node.out)):
            body.placed[number] = (later, node)
            body.stages.update(dict.fromkeys(node.out, later))
            stage = later
        for name in refs(node.args.values()):
            needed[name] = min(stage, needed.get(name, stage))


def _parts_of_weights(body: _Sorted) -> set[str]:
    """Views of weights that are the same at every size; a table cut to an image's size is not."""
    found: set[str] = set()
    for _, node in body.placed:
        x = node.args.get("x")
        of_weight = isinstance(x, Weight) or (isinstance(x, Ref) and x.name in found)
        if node.op in _VIEWS and of_weight and all(map(_is_static, node.types)):
            found.update(node.out)
    return found


def _is_static(type: Type) -> bool:
    """Whether a type names its sizes as numbers: `compute[128, 64]`."""
    return bool(type.dims) and all(size.isdigit() for size in type.dims or ())


# ---- cutting ---------------------------------------------------------------------------------


def _cut(body: _Sorted, stage: int) -> tuple[list[Node], list[str], list[str]]:
    """The nodes of a stage, the values that they take from elsewhere, and those they give away."""
    nodes = [node for at, node in body.placed if at == stage]
    own = _made(nodes)
    reads = [n for node in nodes for n in refs(node.args.values()) if n not in own]
    others = [n for at, node in body.placed if at != stage for n in refs(node.args.values())]
    wanted = {*others, *refs(body.outputs)}
    return nodes, _unique(reads), [n for n in own if n in wanted]


def _made(nodes: Sequence[Node]) -> dict[str, None]:
    return dict.fromkeys(out for node in nodes for out in node.out)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _taps(body: _Sorted, nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """The taps of a body whose values these nodes make."""
    own = _made(nodes)
    return {
        path: tuple(a.name for a in args if isinstance(a, Ref))
        for path, args in body.taps.items()
        if all(isinstance(a, Ref) and a.name in own for a in args)
    }
