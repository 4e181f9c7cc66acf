"""Repeated blocks are traced once; each later one is a single node of the graph.

The members of a model's module lists mostly differ in nothing but their weights: same classes,
same settings, same shapes. A video autoencoder calls its decoder once per chunk of frames, and all
chunks but the first few are alike. The first such call is traced; where an equal one has like
arguments the graph gets one ``mlxconv.again`` node. The lowering writes the first one's program
nodes again in its place. So the time and the memory of a trace depend on how many *kinds* of blocks
and chunks a model has, not on how deep it is or how long the video.

``enter`` and ``leave`` mark what goes into and comes out of a block that stands for others.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .patches.labels import Label, watched_labels
from .patches.operators import OUTPUTS, Output, marked_outputs


class Unrepeatable(Exception):
    """A block that other modules look into, or that changes its arguments: its path."""


# --- which modules are equal ------------------------------------------------------------------


@dataclass(frozen=True)
class Equals:
    """Members of module lists that do the same with their weights, all but perhaps by a label.

    ``labels`` are attributes, numbers and texts, that differ between them: a layer's index, say.
    They are equal as long as none is read.
    """

    first: str
    paths: tuple[str, ...]
    labels: frozenset[Label]


def equal_members(module: nn.Module) -> list[Equals]:
    """The members of module lists that have equals, grouped."""
    groups: dict[str, list[tuple[str, list[_Setting]]]] = defaultdict(list)
    for path, child in module.named_modules():
        if isinstance(child, nn.ModuleList):
            for name, member in child.named_children():
                if next(member.children(), None) is not None:
                    settings: list[_Setting] = []
                    text = repr(_description(member, {}, settings))
                    digest = hashlib.sha256(text.encode()).hexdigest()
                    groups[digest].append((f"{path}.{name}".lstrip("."), settings))
    return [_equals(found) for found in groups.values() if len(found) > 1]


def chunk_modules(module: nn.Module) -> list[Equals]:
    """Children that a method may call several times, once per chunk: each is equal to itself."""
    return [
        Equals(path, (path,), frozenset())
        for path, child in module.named_children()
        if not isinstance(child, nn.ModuleList) and next(child.children(), None) is not None
    ]


_Setting = tuple[type, str, int | str]


def _equals(found: list[tuple[str, list[_Setting]]]) -> Equals:
    paths, settings = zip(*found)
    labels = {(cls, name) for same in zip(*settings) if len(set(same)) > 1 for cls, name, _ in same}
    return Equals(paths[0], paths, frozenset(labels))


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum)


def _description(value: Any, seen: dict[int, int], settings: list[_Setting] | None = None) -> Any:
    """All that decides what an object does. What is not understood equals only itself.

    Numbers and texts that are attributes go to ``settings``, in order, where that is given.
    """
    if isinstance(value, _NAMED):
        return (type(value).__name__, id(value))
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    inner = functools.partial(_description, seen=seen, settings=settings)
    if isinstance(value, torch.Tensor):
        content = "" if isinstance(value, FakeTensor) else _content(value)
        return (id(type(value)), tuple(value.shape), str(value.dtype), content)
    if isinstance(value, (list, tuple)):
        return (id(type(value)), [inner(item) for item in value])
    if isinstance(value, dict):
        return (id(type(value)), [(inner(k), inner(v)) for k, v in value.items()])
    if isinstance(value, (set, frozenset)):
        return (id(type(value)), sorted(repr(inner(item)) for item in value))
    if isinstance(value, types.MethodType):
        return ("method", id(value.__func__), inner(value.__self__))
    if isinstance(value, functools.partial):
        return ("partial", inner(value.func), inner(value.args), inner(value.keywords))
    if hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
        rest = dict(vars(value))
        for name, item in vars(value).items():
            if settings is not None and type(item) in (int, str):
                settings.append((type(value), name, item))
                rest[name] = type(item)
        return (id(type(value)), [(name, inner(item)) for name, item in rest.items()])
    return ("only", id(value))


def _content(tensor: torch.Tensor) -> str:
    """A digest of its values, also while a trace would make fake tensors of them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


# --- while tracing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A traced call of a block: what its outputs are made of, for later calls like it."""

    name: str
    path: str
    spec: pytree.TreeSpec
    sources: tuple[tuple[str, Any], ...]  # ("input", leaf), ("output", index), ("value", it)
    state: str = ""  # of the module, where the module itself is called again

    def outputs(self, leaves: list[Any], computed: list[torch.Tensor]) -> Any:
        places = {"input": leaves, "output": computed}
        values = [places[kind][at] if kind in places else at for kind, at in self.sources]
        return pytree.tree_unflatten(values, self.spec)


@contextlib.contextmanager
def traced_once(module: nn.Module, apart: set[str] | None) -> Iterator[set[str]]:
    """Inside, blocks equal to one traced before are single nodes.

    Not those equal to the ones at the paths ``apart``, and none where that is None. Gives the
    paths of the blocks for which others stood in, as they are met.
    """
    groups = (
        []
        if apart is None
        else [
            group
            for group in (*equal_members(module), *chunk_modules(module))
            if not apart.intersection(group.paths)
        ]
    )
    trace = _Trace(reads=[])
    root = module.forward

    @functools.wraps(root)
    def forward(*args: Any, **kwargs: Any) -> Any:
        trace.calls.clear()  # export runs the module more than once
        return root(*args, **kwargs)

    members = [
        (path, group, module.get_submodule(path)) for group in groups for path in group.paths
    ]
    changed = [module, *(child for *_, child in members)]
    before = [(child, vars(child).get("forward")) for child in changed]
    labels = {label for group in groups for label in group.labels}
    module.forward = forward
    for path, group, child in members:
        child.forward = _block_forward(child, path, group, trace)
    try:
        with watched_labels(labels, trace.reads), marked_outputs():
            yield trace.met
    finally:
        for child, earlier in before:
            del child.forward
            if earlier is not None:
                child.forward = earlier


@dataclass
class _Trace:
    """What was met so far: calls by what they were given, labels read, blocks written again."""

    reads: list[Label]
    calls: dict[Any, _Call] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)


def _block_forward(child: nn.Module, path: str, group: Equals, trace: _Trace) -> Callable[..., Any]:
    forward, alone = child.forward, len(group.paths) == 1

    @functools.wraps(forward)
    def block_forward(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        leaves, spec = pytree.tree_flatten(given)
        ids = [id(leaf) for leaf in leaves]
        same = tuple(ids.index(i) for i in ids)
        key = (group.first, str(spec), same, tuple(_leaf_key(leaf) for leaf in leaves))
        tensors = [i for i, n in enumerate(same) if i == n and isinstance(leaves[i], torch.Tensor)]
        state = _state(child) if alone else ""
        call = trace.calls.get(key)
        if call is not None and call.state == state and (alone or call.path != path):
            trace.met.add(path)
            inputs = [leaves[i] for i in tensors]
            computed = torch.ops.mlxconv.again(inputs, path, call.name) if call.name else []
            return _returned(given, call.outputs(leaves, computed))
        if call is not None or not tensors:
            return forward(*args, **kwargs)
        name = f"{path}#{len(trace.calls)}"
        entered = dict(zip(tensors, (_enter(leaves[i], name, n) for n, i in enumerate(tensors))))
        inside = [entered.get(n, leaf) for n, leaf in zip(same, leaves)]
        read = len(trace.reads)
        versions = {i: x._version for i, x in entered.items()}
        described = _described(inside)
        args, kwargs = pytree.tree_unflatten(inside, spec)
        output = forward(*args, **kwargs)
        after, form = pytree.tree_flatten((args, kwargs))
        kept = form == spec and all(a is b for a, b in zip(after, inside, strict=True))
        same_values = all(x._version == versions[i] for i, x in entered.items())
        if not (same_values and _described(inside) == described):
            raise Unrepeatable(group.first)
        once = group.labels.intersection(trace.reads[read:]) or (alone and _state(child) != state)
        result = (output, None if kept else (args, kwargs))
        calls = {} if once else trace.calls
        found = _finish(
            result, key, _Call(name, path, spec, (), state), leaves, inside, entered, calls
        )
        return _returned(given, found)

    return block_forward


def _returned(given: Any, result: tuple[Any, Any]) -> Any:
    """A block's output, after what it left in its arguments' lists is put into the caller's."""
    output, arguments = result
    if arguments is not None:
        _put(given, arguments)
    return output


def _put(old: Any, new: Any) -> Any:
    """The new value; a list or dictionary keeps its identity and takes the new contents."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [_put(old[i], item) if i < len(old) else item for i, item in enumerate(new)]
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {key: _put(old.get(key), item) for key, item in new.items()}
        old.clear()
        old.update(merged)
        return old
    if isinstance(old, tuple) and isinstance(new, tuple):
        return tuple(_put(a, b) for a, b in zip(old, new, strict=True))
    return new


def _state(module: nn.Module) -> str:
    """What a module and its children hold besides their weights: a later call may depend on it."""
    return repr(_description(module, {}))


def _described(leaves: list[Any]) -> str:
    """What is in the arguments that are neither tensors nor sizes: a block may write into them."""
    others = [x for x in leaves if not isinstance(x, (torch.Tensor, torch.SymInt))]
    return repr([_description(x, {}) for x in others])


def _enter(x: torch.Tensor, name: str, index: int) -> torch.Tensor:
    return torch.ops.mlxconv.enter(x, name, index)  # type: ignore[no-any-return]


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        with torch._C.DisableTorchFunction():  # no question of the class's own: see kinds.py
            return ("tensor", tuple(str(n) for n in leaf.shape), leaf.dtype)
    if isinstance(leaf, torch.SymInt):
        return ("size", str(leaf.node.expr))
    return repr(_description(leaf, {}))


def _finish(
    output: Any,
    key: Any,
    call: _Call,
    leaves: list[Any],
    inside: list[Any],
    entered: dict[int, torch.Tensor],
    calls: dict[Any, _Call],
) -> Any:
    """The block's output, marked; remembered for later calls of the same arguments' shapes."""
    values, spec = pytree.tree_flatten(output)
    places = {id(leaf): i for i, leaf in enumerate(inside) if isinstance(leaf, torch.Tensor)}
    axes = {
        str(size): (n, axis)
        for n, x in enumerate(entered.values())
        for axis, size in enumerate(x.shape)
        if isinstance(size, torch.SymInt)
    }
    sources: list[tuple[str, Any]] = []
    made: list[Output] = []
    computed: list[torch.Tensor] = []
    twice: dict[int, int] = {}  # the place of an output among `computed`
    repeatable = True
    for value in values:
        if id(value) in twice:
            sources.append(("output", twice[id(value)]))
        elif isinstance(value, torch.Tensor) and id(value) not in places:
            sizes = tuple(n if isinstance(n, int) else axes.get(str(n), n) for n in value.shape)
            sources.append(("output", len(made)))
            twice[id(value)] = len(made)
            made.append(Output(sizes, value.dtype))
            computed.append(torch.ops.mlxconv.leave(value, call.name, len(computed)))
        elif isinstance(value, torch.Tensor):
            sources.append(("input", places[id(value)]))
        else:
            repeatable &= isinstance(value, _PLAIN)
            sources.append(("value", value))
    found = replace(call, name=call.name if computed else "", spec=spec, sources=tuple(sources))
    if repeatable:
        calls[key] = found
        OUTPUTS[call.name] = tuple(made)
    return found.outputs(leaves, computed)


# --- in the graph -----------------------------------------------------------------------------

_MARKS = {
    torch.ops.mlxconv.enter.default: "enter",
    torch.ops.mlxconv.leave.default: "leave",
}


@dataclass(frozen=True)
class Repeated:
    """A traced block that stands for others: the nodes that make its outputs of its inputs."""

    path: str
    enter: dict[int, fx.Node]
    leave: dict[int, fx.Node]
    nodes: frozenset[fx.Node]


def repeated_blocks(graph: fx.Graph, lifted: Mapping[str, str]) -> dict[str, Repeated]:
    """The blocks that ``again`` nodes of the graph name, by call.

    ``lifted`` tells which parameter or constant a placeholder is. Raises Unrepeatable where a
    value made inside a block is read outside other than as its output.
    """
    called = {str(node.args[2]) for node in _again_nodes(graph)}
    marks: dict[str, dict[str, dict[int, fx.Node]]] = {
        call: {"enter": {}, "leave": {}} for call in called
    }
    for node in graph.nodes:
        if node.target in _MARKS and node.args[1] in called:
            marks[node.args[1]][_MARKS[node.target]][node.args[2]] = node
    return {call: _repeated(graph, call, lifted, **found) for call, found in marks.items()}


def chunked(graph: fx.Graph) -> frozenset[str]:
    """The paths of modules that are called once per chunk, alike."""
    calls = ((str(node.args[1]), str(node.args[2])) for node in _again_nodes(graph))
    return frozenset(path for path, call in calls if call.rsplit("#", 1)[0] == path)


def _again_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is torch.ops.mlxconv.again.default]


def _repeated(
    graph: fx.Graph,
    call: str,
    lifted: Mapping[str, str],
    enter: dict[int, fx.Node],
    leave: dict[int, fx.Node],
) -> Repeated:
    path = call.rsplit("#", 1)[0]
    starts, ends = set(enter.values()), set(leave.values())
    wanted: set[fx.Node] = set(ends)
    inside: set[fx.Node] = set(starts)  # what depends on an input of the block
    varying: set[fx.Node] = set(starts)  # the same, or on a tensor of the block's own
    live = {node for node in graph.nodes if node.op == "output"}  # not those that only check sizes
    for node in reversed(graph.nodes):
        if node in wanted and node not in starts:
            wanted.update(node.all_input_nodes)
        if node in live:
            live.update(node.all_input_nodes)
    for node in graph.nodes:
        if node.op == "placeholder" and lifted.get(node.name, "").startswith(f"{path}."):
            varying.add(node)
        before = [n for n in node.all_input_nodes if n not in ends]
        if any(n in varying for n in before):
            varying.add(node)
        if any(n in inside for n in before):
            inside.add(node)
            if node not in wanted and node in live:
                raise Unrepeatable(path)
    owned = wanted & varying
    return Repeated(path, enter, leave, frozenset(n for n in owned if n.op == "call_function"))
