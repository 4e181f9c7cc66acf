"""A body's nodes, ready to run: functions, arguments, what each is last to read, what it taps."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ops import OPS
from ..program.program import Arg, Body, Node, Program, Ref, Weight, refs, walk

Lookup = Callable[[Any], Any]
Observer = Callable[[Node, str, Mapping[str, Any], Any], None]
observers: list[Observer] = []


@contextlib.contextmanager
def observed(by: Observer) -> Iterator[None]:
    """While it lasts, `by(node, block path, arguments, result)` sees each node that is applied.

    Nothing is compiled meanwhile: compiled functions apply their nodes only when they are traced.
    """
    observers.append(by)
    try:
        yield
    finally:
        observers.remove(by)


def observe(node: Node, prefix: str, args: Mapping[str, Any], results: Any) -> None:
    """Show a node that was applied to whoever observes."""
    for by in observers:
        by(node, prefix, args, results)


@dataclass(slots=True)
class Step:
    """One node, ready to run: its function, its arguments, and the values it is last to read."""

    node: Node
    function: Callable[..., Any]
    arguments: dict[str, Callable[[Mapping[str, Any], Lookup], Any]]
    drop: tuple[str, ...]


@dataclass(frozen=True)
class Stacked:
    """Look-up key of a stack of weights."""

    names: tuple[str | None, ...]


def evaluator(arg: Arg, compute: str) -> Callable[[Mapping[str, Any], Lookup], Any]:
    match arg:
        case Ref(name):
            return lambda values, weight: values[name]
        case Weight(name):
            return lambda values, weight: weight(name)
        case tuple() if any(isinstance(a, (Ref, Weight)) for a in walk(arg)):
            parts = [evaluator(a, compute) for a in arg]
            return lambda values, weight: [part(values, weight) for part in parts]
        case _:
            return lambda values, weight: arg


def stack_key(arg: Arg) -> Stacked | None:
    """The names in a tuple of weights (None where there is none), or None if it is not one."""
    if not isinstance(arg, tuple) or not all(a is None or isinstance(a, Weight) for a in arg):
        return None
    return Stacked(tuple(a.name if isinstance(a, Weight) else None for a in arg))


def _arguments(node: Node, compute: str) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for key, arg in node.args.items():
        stack = stack_key(arg) if node.op == "linears" and key != "x" else None
        if stack is not None:
            built[key] = lambda values, weight, stack=stack: weight(stack)
        elif key == "dtype" and arg == "compute":
            built[key] = lambda values, weight: compute
        else:
            built[key] = evaluator(arg, compute)
    return built


def plan_steps(body: Body, compute: str) -> list[Step]:
    last: dict[str, int] = {}
    for i, node in enumerate(body.nodes):
        last.update(dict.fromkeys(node.out, i))
        last.update(dict.fromkeys(refs(node.args.values()), i))
    for name in refs(body.outputs):
        last.pop(name, None)
    drops: dict[int, list[str]] = {}
    for name, i in last.items():
        drops.setdefault(i, []).append(name)
    return [
        Step(
            node,
            OPS.get(node.op, _not_an_op),
            _arguments(node, compute),
            tuple(drops.get(i, ())),
        )
        for i, node in enumerate(body.nodes)
    ]


def _not_an_op(**_: Any) -> Any:
    raise AssertionError("calls are run by the executor")


def under(weight: Lookup, prefix: str) -> Lookup:
    """The look-up of a block: names relative to `prefix` of the caller's look-up."""

    def lookup(key: str | Stacked) -> Any:
        if isinstance(key, Stacked):
            return weight(Stacked(tuple(n and f"{prefix}.{n}" for n in key.names)))
        return weight(f"{prefix}.{key}")

    return lookup


def taps_here(body: Body, prefix: str, taps: Sequence[str]) -> dict[str, list[str]]:
    """Wanted paths of this body, by the value after which all of their values are known."""
    order = {name: i for i, node in enumerate(body.nodes) for name in node.out}
    wanted: dict[str, list[str]] = {}
    for path in taps:
        relative = path.removeprefix(prefix).lstrip(".") if prefix else path
        names = [n for n in body.taps.get(relative, ()) if n in order]
        if names:
            node = body.nodes[max(order[n] for n in names)]
            wanted.setdefault(node.out[-1], []).append(path)
    return wanted


def weight_keys(program: Program, body: Body, prefix: str) -> Iterable[Any]:
    """Look-up keys of the weights a block reads, with those of the blocks it calls."""
    for node in body.nodes:
        if node.op == "call":
            inner = program.blocks[str(node.args["block"])]
            yield from weight_keys(program, inner, f"{prefix}{node.args['prefix']}.")
        for key, arg in node.args.items():
            stack = stack_key(arg) if node.op == "linears" and key != "x" else None
            if stack is not None:
                yield Stacked(tuple(n and prefix + n for n in stack.names))
            else:
                yield from (prefix + a.name for a in walk(arg) if isinstance(a, Weight))
