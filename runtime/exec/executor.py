"""Runs a program: binds its weights, evaluates its nodes, compiles, taps intermediate values."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache_folders import keep_kernels_private
from ..errors import MlxconvError
from ..files import format_bytes
from ..ops import OPS, on_cpu
from ..program.program import (
    MAX_INT,
    Arg,
    Block,
    Body,
    Entry,
    Node,
    Program,
    Ref,
    Weight,
    refs,
    walk,
)
from . import binding
from .sizes import add_size_command, asked_sizes
from .weights import Held, QuantizedWeight, Stack, Weights, arrays_of, rebuild, spec_of

COMPILE_MODES = ("off", "block", "program")
Lookup = Callable[[Any], Any]
Observer = Callable[[Node, str, Mapping[str, Any], Any], None]
_observers: list[Observer] = []


@contextlib.contextmanager
def observed(by: Observer) -> Iterator[None]:
    """While it lasts, `by(node, block path, arguments, result)` sees each node that is applied.

    Nothing is compiled meanwhile: compiled functions apply their nodes only when they are traced.
    """
    _observers.append(by)
    try:
        yield
    finally:
        _observers.remove(by)


def observe(node: Node, prefix: str, args: Mapping[str, Any], results: Any) -> None:
    """Show a node that was applied to whoever observes."""
    for by in _observers:
        by(node, prefix, args, results)


@dataclass(slots=True)
class _Step:
    """One node, ready to run: its function, its arguments, and the values it is last to read."""

    node: Node
    function: Callable[..., Any]
    arguments: dict[str, Callable[[Mapping[str, Any], Lookup], Any]]
    drop: tuple[str, ...]


@dataclass(frozen=True)
class _Stacked:
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


def _stack_key(arg: Arg) -> _Stacked | None:
    """The names in a tuple of weights (None where there is none), or None if it is not one."""
    if not isinstance(arg, tuple) or not all(a is None or isinstance(a, Weight) for a in arg):
        return None
    return _Stacked(tuple(a.name if isinstance(a, Weight) else None for a in arg))


def _arguments(node: Node, compute: str) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for key, arg in node.args.items():
        stack = _stack_key(arg) if node.op == "linears" and key != "x" else None
        if stack is not None:
            built[key] = lambda values, weight, stack=stack: weight(stack)
        elif key == "dtype" and arg == "compute":
            built[key] = lambda values, weight: compute
        else:
            built[key] = evaluator(arg, compute)
    return built


def _plan(body: Body, compute: str) -> list[_Step]:
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
        _Step(
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

    def lookup(key: str | _Stacked) -> Any:
        if isinstance(key, _Stacked):
            return weight(_Stacked(tuple(n and f"{prefix}.{n}" for n in key.names)))
        return weight(f"{prefix}.{key}")

    return lookup


class Executor:
    """A program with its weights, callable for any size it was traced for.

    `compile`: "off" builds the MLX graph anew at each call; "block" compiles each distinct block
    once; "program" compiles the whole entry. `stream` reads each top-level block's weights when
    it is reached and lets them go behind it, so that a model larger than memory still runs.
    """

    def __init__(
        self, program: Program, weights: Weights, *, compile: str = "off", stream: bool = False
    ) -> None:
        keep_kernels_private()
        if compile not in COMPILE_MODES:
            raise MlxconvError(f"compile={compile!r}: choose one of {', '.join(COMPILE_MODES)}")
        if stream and (compile == "program" or weights.resident):
            raise MlxconvError("streaming needs weights that are not resident, and no compile")
        self.program, self.weights = program, weights
        self.compile, self.stream = compile, stream
        self.compute = str(weights.compute).removeprefix("mlx.core.")
        self.trace_size: Callable[[str, dict[str, int]], None] | None = None
        self._plans: dict[int, list[_Step]] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.traces = 0  # of whole entries by mx.compile: one for each set of shapes
        self._double = any(
            n.args.get("dtype") == "float64" or any(t.dtype == "float64" for t in n.types)
            for b in program.bodies()
            for n in b.nodes
        )

    def __call__(self, entry: str = "forward", /, **inputs: Any) -> Any:
        """Run one entry on keyword inputs; one array, or a tuple of its outputs."""
        outputs = self.run(entry, inputs)[0]
        return outputs[0] if len(outputs) == 1 else outputs

    def run(
        self, entry: str, inputs: Mapping[str, Any], taps: Iterable[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, list[Any]]]:
        """Outputs, and for each module path of `taps` the values that the module returned."""
        chosen, values = self.bind(entry, inputs)
        wanted = list(taps)
        found: dict[str, list[Any]] = {}
        outputs = self.evaluate(chosen, values, wanted, found)
        missing = [path for path in wanted if path not in found]
        if missing:
            raise MlxconvError(
                f"{self.program.class_name}: no value is known at {', '.join(missing[:5])}; "
                "`mlxconv inspect BUNDLE --program COMPONENT` shows the modules of each block"
            )
        return outputs, found

    def load(self, entry: Entry) -> None:
        """Read the weights of an entry now, and keep them, if they are to be resident."""
        for key in _weight_keys(self.program, entry, "") if self.weights.resident else ():
            self._weight(key)

    def bind(
        self, entry: str, inputs: Mapping[str, Any], *, elements: bool = True
    ) -> tuple[Entry, dict[str, Any]]:
        """The entry that takes inputs of these sizes, and the values of its inputs by name.

        A size that the program lacks is traced by `trace_size` where that is set. elements: whether
        those of arrays are checked too.
        """
        bind = binding.bind if elements else binding.choose
        traced: dict[str, int] = {}
        while True:
            try:
                return bind(self.program, entry, inputs, self.compute)
            except binding.NoSuchSize as error:
                first = self.program.entry(entry)
                asked = asked_sizes(self.weights.config, first, inputs, error.axes)
                if not asked or self.trace_size is None or asked.keys() <= traced.keys():
                    command = add_size_command(self.weights.folder, traced | asked)
                    hint = f" Add this one with `{command}`." if asked else ""
                    if error.axes and not asked:
                        hint = " A recipe of your own can trace these sizes (--recipe FILE)."
                    raise binding.NotTaken(f"{error}{hint}") from None
                traced |= asked
                self.trace_size(entry, traced)

    def evaluate(
        self,
        entry: Entry,
        values: Mapping[str, Any],
        taps: Sequence[str] = (),
        found: dict[str, list[Any]] | None = None,
    ) -> tuple[Any, ...]:
        """Outputs of an entry of this program for values by name, unchecked, lazily.

        `found` gets the values at the module paths of `taps`, which are never compiled.
        """
        if self.compile == "program" and not taps and not _observers:
            return self._run_compiled(entry, dict(values))
        return self._run(entry, dict(values), self._weight, "", taps, found)

    def evaluate_over(
        self,
        entry: Entry,
        values: Mapping[str, Any],
        stacked: Mapping[str, mx.array],
        *,
        batched: bool = True,
    ) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """What an entry gives for every row of `stacked`, evaluated: the outputs that no row
        decides, and the others (rows, ...), by name.

        Node by node for all rows, so that a weight is read once; `batched`: in one operation.
        """
        known, each = {**values, **stacked}, set(stacked)
        for step in self._plan_of(entry):
            mine = sorted(set(refs(step.node.args.values())) & each)
            if mine:
                self._step_over(step, known, mine, batched)
                each.update(n for n in step.node.out if isinstance(known[n], mx.array))
            else:
                self._step(step, known, self._weight, "", (), None)
            self._settle(step, known)
            for name in step.drop:
                known.pop(name, None)
        outputs = list(refs(entry.outputs))
        mx.eval([known[n] for n in outputs if isinstance(known[n], mx.array)])
        return (
            {n: known[n] for n in outputs if n not in each},
            {n: known[n] for n in outputs if n in each},
        )

    def block_paths(self, entry: str = "forward") -> list[str]:
        """Module paths of the top-level blocks, in order of computation."""
        body = self.program.entry(entry)
        return [str(n.args["prefix"]) for n in body.nodes if n.op == "call"]

    # ---- evaluation ----

    def _plan_of(self, body: Body) -> list[_Step]:
        key = id(body)
        if key not in self._plans:
            self._plans[key] = _plan(body, self.compute)
        return self._plans[key]

    def _run(
        self,
        body: Body,
        values: dict[str, Any],
        weight: Lookup,
        prefix: str,
        taps: Sequence[str] = (),
        found: dict[str, list[Any]] | None = None,
    ) -> tuple[Any, ...]:
        wanted = _taps_here(body, prefix, taps)
        for step in self._plan_of(body):
            self._step(step, values, weight, prefix, taps, found)
            if not prefix:
                self._settle(step, values)
            for path in wanted.get(step.node.out[-1] if step.node.out else "", ()):
                assert found is not None
                names = body.taps[path.removeprefix(prefix).lstrip(".")]
                found[path] = [values[n] for n in names]
            if not wanted:
                for name in step.drop:
                    values.pop(name, None)
        return tuple(evaluator(a, self.compute)(values, weight) for a in body.outputs)

    def _step(
        self,
        step: _Step,
        values: dict[str, Any],
        weight: Lookup,
        prefix: str,
        taps: Sequence[str],
        found: dict[str, list[Any]] | None,
    ) -> None:
        node = step.node
        args = {key: get(values, weight) for key, get in step.arguments.items()}
        if node.op == "call":
            results: Any = self._call(args, weight, prefix, taps, found)
            values.update(zip(node.out, results, strict=True))
            return
        with self._stream_for(args):
            results = self._apply(step, args, prefix)
        if len(step.node.out) != (len(results) if isinstance(results, list) else 1):
            raise MlxconvError(
                f"{self.program.class_name}: node {node.op} at {node.module} names "
                f"{len(node.out)} results; convert the component again"
            )
        observe(node, prefix, args, results)
        if len(node.out) == 1:
            values[node.out[0]] = results if not isinstance(results, list) else results[0]
        else:
            values.update(zip(node.out, results, strict=True))

    def _step_over(
        self, step: _Step, known: dict[str, Any], mine: Sequence[str], batched: bool
    ) -> None:
        """One node for each row of the values `mine`; its results get an axis of rows."""

        def once(*row: mx.array) -> list[Any]:
            values = {**known, **dict(zip(mine, row))}
            self._step(step, values, self._weight, "", (), None)
            return [values[name] for name in step.node.out]

        columns = [known[name] for name in mine]
        if batched:
            try:
                known.update(zip(step.node.out, mx.vmap(once)(*columns), strict=True))
                return
            except (MlxconvError, ValueError, RuntimeError):
                pass  # not every operation of MLX can be mapped; what fails below is an error
        rows = [once(*row) for row in zip(*columns, strict=True)]
        for name, column in zip(step.node.out, zip(*rows)):
            known[name] = mx.stack(list(column)) if isinstance(column[0], mx.array) else column[0]

    def _settle(self, step: _Step, values: Mapping[str, Any]) -> None:
        """When streaming: compute a top-level block's outputs, and let its weights go."""
        if self.stream and step.node.op == "call":
            mx.eval([v for n in step.node.out if isinstance(v := values[n], mx.array)])
            self.weights.release()

    def _apply(self, step: _Step, args: dict[str, Any], prefix: str) -> Any:
        try:
            return _bounded(step.function(**args), args, step.node.op)
        except MlxconvError:
            raise
        except Exception as error:  # of whatever kind: the arguments come from a file
            shapes = {k: getattr(v, "shape", v) for k, v in args.items()}
            where = ".".join(p for p in (prefix, step.node.module) if p)
            raise MlxconvError(
                f"{self.program.class_name}: node {step.node.op} at {where or '(root)'} failed: "
                f"{error} (arguments {shapes!r:.300})"
            ) from error

    def _stream_for(self, args: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """float64 exists on MLX's CPU only; everything else runs on the default device."""
        if not self._double or on_cpu():
            return contextlib.nullcontext()
        doubles = args.get("dtype") == "float64" or any(
            isinstance(v, mx.array) and v.dtype == mx.float64 for v in _flat(args.values())
        )
        return mx.stream(mx.cpu) if doubles else contextlib.nullcontext()

    def _weight(self, key: str | _Stacked) -> Any:
        if isinstance(key, _Stacked):
            return self.weights.stack(key.names)
        return self.weights.get(key)

    def _call(
        self,
        args: dict[str, Any],
        weight: Lookup,
        prefix: str,
        taps: Sequence[str],
        found: dict[str, list[Any]] | None,
    ) -> tuple[Any, ...]:
        block = self.program.blocks[args["block"]]
        path = ".".join(p for p in (prefix, args["prefix"]) if p)
        weight = under(weight, args["prefix"])
        inputs = list(args["inputs"])
        inner = [t for t in taps if t.startswith(f"{path}.")]
        if self.compile == "block" and not (prefix or inner or _observers):
            outputs = self._call_compiled(args["block"], block, inputs, path, weight)
        else:
            values = dict(zip(block.inputs, inputs, strict=True))
            outputs = self._run(block, values, weight, path, inner, found)
        return outputs

    # ---- compiled ----

    def _run_compiled(self, entry: Entry, values: dict[str, Any]) -> tuple[Any, ...]:
        arrays = {k: v for k, v in values.items() if isinstance(v, mx.array)}
        sizes = {k: v for k, v in values.items() if k not in arrays}
        names = list(arrays)
        key = (id(entry), tuple(names), tuple(sizes.items()))
        if key not in self._compiled:

            def whole(*flat: mx.array) -> tuple[Any, ...]:
                self.traces += 1
                bound = {**dict(zip(names, flat, strict=True)), **sizes}
                return self._run(entry, bound, self._weight, "")

            self._compiled[key] = self._compile(entry, whole)
        return tuple(self._compiled[key](*arrays.values()))

    def _compile(self, body: Body, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` compiled; as it is where more operations follow each other, in a video decoder
        of many frames, than MLX's compiler has stack for."""
        deep = _depth(self.program, body, {}) > _DEEPEST
        return function if deep else mx.compile(function)

    def _call_compiled(
        self, name: str, block: Block, inputs: list[Any], path: str, weight: Lookup
    ) -> tuple[Any, ...]:
        """One compiled function for all instances of a block whose weights are made alike."""
        keys = list(_weight_keys(self.program, block, ""))
        held = [weight(key) for key in keys]
        dynamic = [v for v in inputs if isinstance(v, (mx.array, QuantizedWeight))]
        statics = [
            (i, v) for i, v in enumerate(inputs) if not isinstance(v, (mx.array, QuantizedWeight))
        ]
        key = (name, tuple(_make(h) for h in (*dynamic, *held)), repr(statics))
        if key not in self._compiled:
            shells = [_shell(h) for h in (*dynamic, *held)]
            function = self._block_function(block, keys, shells, dict(statics), path)
            self._compiled[key] = self._compile(block, function)
        return tuple(self._compiled[key](*(a for h in (*dynamic, *held) for a in arrays_of(h))))

    def _block_function(
        self, block: Block, keys: list[Any], shells: list[Any], statics: dict[int, Any], path: str
    ) -> Callable[..., Any]:
        """The block on arrays alone: its inputs, then its weights, in the order of `shells`.

        Only the make of the weights is kept: holding an example's arrays would keep them in memory.
        """

        def function(*flat: mx.array) -> tuple[Any, ...]:
            rest, rebuilt = list(flat), []
            for shell in shells:
                item, rest = shell(rest)
                rebuilt.append(item)
            count = len(block.inputs) - len(statics)
            dynamic = iter(rebuilt[:count])
            names = enumerate(block.inputs)
            values = {n: statics[i] if i in statics else next(dynamic) for i, n in names}
            held = dict(zip(keys, rebuilt[count:], strict=True))
            return self._run(block, values, held.__getitem__, path)

        return function


# `mx.compile` walks the graph recursively: at 50,000 primitives one after the other the stack of a
# thread is full. An op is a few of them, a curve such as gelu on a CPU some thirty.
_DEEPEST = 8_000
_CURVES = frozenset({"erf", "exp", "gelu", "sigmoid", "silu", "softplus", "tanh"})


def _depth(program: Program, body: Body, known: dict[int, int]) -> int:
    """Ops on the longest way through a body, its blocks included; a curve counts as six."""
    if id(body) not in known:
        level: dict[str, int] = {}
        for node in body.nodes:
            before = max((level.get(n, 0) for n in refs(node.args.values())), default=0)
            if node.op == "call":
                inner = _depth(program, program.blocks[str(node.args["block"])], known)
            else:
                inner = 6 if node.op in _CURVES else 1
            level.update(dict.fromkeys(node.out, before + inner))
        known[id(body)] = max(level.values(), default=0)
    return known[id(body)]


MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_LARGE, _GROWTH = 1 << 26, 1 << 16  # elements; how often larger than what it is made of
_LAZY = frozenset({"broadcast", "full"})  # without memory of their own


def _bounded(results: Any, args: Mapping[str, Any], op: str) -> Any:
    """What an op gave: arrays that the machine can hold, and numbers of 64 bits.

    No model makes a large array of a few elements; a program that is to fill the memory does.
    """
    for result in results if isinstance(results, list) else (results,):
        if isinstance(result, mx.array):
            size = math.prod(result.shape) * result.dtype.size
            if size > MEMORY_BYTES:
                raise ValueError(
                    f"the result has shape {tuple(result.shape)}, {format_bytes(size)}; "
                    f"this machine has {format_bytes(MEMORY_BYTES)}"
                )
            if result.size > _LARGE and op not in _LAZY:
                given = sum(getattr(a, "size", 0) for a in _flat(args.values()))
                if result.size > _GROWTH * given:
                    raise ValueError(f"{given} elements make {result.size}")
        elif isinstance(result, int) and abs(result) > MAX_INT:
            raise ValueError("the result is a number beyond 64 bits")
        elif not isinstance(result, (int, float)):
            raise TypeError(f"the result is a {type(result).__name__}")
    return results


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _taps_here(body: Body, prefix: str, taps: Sequence[str]) -> dict[str, list[str]]:
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


def _weight_keys(program: Program, body: Body, prefix: str) -> Iterable[Any]:
    """Look-up keys of the weights a block reads, with those of the blocks it calls."""
    for node in body.nodes:
        if node.op == "call":
            inner = program.blocks[str(node.args["block"])]
            yield from _weight_keys(program, inner, f"{prefix}{node.args['prefix']}.")
        for key, arg in node.args.items():
            stack = _stack_key(arg) if node.op == "linears" and key != "x" else None
            if stack is not None:
                yield _Stacked(tuple(n and prefix + n for n in stack.names))
            else:
                yield from (prefix + a.name for a in walk(arg) if isinstance(a, Weight))


def _make(held: Any) -> Any:
    if isinstance(held, Stack):
        whole = None if held.stacked is None else spec_of(held.stacked)
        return ("stack", held.stacked is None, whole, *(h is not None and _make(h) for h in held))
    return (spec_of(held), [a.dtype for a in arrays_of(held)].__repr__())


def _shell(held: Any) -> Callable[[list[mx.array]], tuple[Any, list[mx.array]]]:
    """A function that rebuilds a weight of this make from the front of a list of arrays."""
    if isinstance(held, Stack) and held.stacked is not None:
        inner, bounds, count = _shell(held.stacked), held.bounds, len(held)

        def stacked(arrays: list[mx.array]) -> tuple[Any, list[mx.array]]:
            stack = Stack((None,) * count)
            stack.bounds = bounds
            stack.stacked, rest = inner(arrays)
            return stack, rest

        return stacked
    if isinstance(held, Stack):
        shells = [None if h is None else _shell(h) for h in held]

        def separate(arrays: list[mx.array]) -> tuple[Any, list[mx.array]]:
            items = []
            for shell in shells:
                item, arrays = (None, arrays) if shell is None else shell(arrays)
                items.append(item)
            return Stack(items), arrays

        return separate
    count, make = len(arrays_of(held)), _bare(held)
    return lambda arrays: (rebuild(make, arrays[:count]), arrays[count:])


def _bare(held: Held) -> Held:
    """A stand-in with the same spec and no data."""
    empty = mx.zeros(())
    return empty if isinstance(held, mx.array) else rebuild(held, [empty] * len(held.arrays()))
