"""Runs a program: binds its weights, evaluates its nodes, compiles, taps intermediate values."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..cache_folders import keep_kernels_private
from ..errors import MlxconvError
from ..ops import on_cpu
from ..program.program import (
    Block,
    Body,
    Entry,
    Program,
    refs,
)
from . import binding
from .bounds import DEEPEST, bounded, depth, flat
from .shells import make_of, shell_of
from .sizes import add_size_command, asked_sizes
from .steps import (
    Lookup,
    Stacked,
    Step,
    evaluator,
    observe,
    observers,
    plan_steps,
    taps_here,
    under,
    weight_keys,
)
from .weights import QuantizedWeight, Weights, arrays_of

COMPILE_MODES = ("off", "block", "program")


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
        self._plans: dict[int, list[Step]] = {}
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
        for key in weight_keys(self.program, entry, "") if self.weights.resident else ():
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
        if self.compile == "program" and not taps and not observers:
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

    def _plan_of(self, body: Body) -> list[Step]:
        key = id(body)
        if key not in self._plans:
            self._plans[key] = plan_steps(body, self.compute)
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
        wanted = taps_here(body, prefix, taps)
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
        step: Step,
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
        self, step: Step, known: dict[str, Any], mine: Sequence[str], batched: bool
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

    def _settle(self, step: Step, values: Mapping[str, Any]) -> None:
        """When streaming: compute a top-level block's outputs, and let its weights go."""
        if self.stream and step.node.op == "call":
            mx.eval([v for n in step.node.out if isinstance(v := values[n], mx.array)])
            self.weights.release()

    def _apply(self, step: Step, args: dict[str, Any], prefix: str) -> Any:
        try:
            return bounded(step.function(**args), args, step.node.op)
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
            isinstance(v, mx.array) and v.dtype == mx.float64 for v in flat(args.values())
        )
        return mx.stream(mx.cpu) if doubles else contextlib.nullcontext()

    def _weight(self, key: str | Stacked) -> Any:
        if isinstance(key, Stacked):
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
        if self.compile == "block" and not (prefix or inner or observers):
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
        deep = depth(self.program, body, {}) > DEEPEST
        return function if deep else mx.compile(function)

    def _call_compiled(
        self, name: str, block: Block, inputs: list[Any], path: str, weight: Lookup
    ) -> tuple[Any, ...]:
        """One compiled function for all instances of a block whose weights are made alike."""
        keys = list(weight_keys(self.program, block, ""))
        held = [weight(key) for key in keys]
        dynamic = [v for v in inputs if isinstance(v, (mx.array, QuantizedWeight))]
        statics = [
            (i, v) for i, v in enumerate(inputs) if not isinstance(v, (mx.array, QuantizedWeight))
        ]
        key = (name, tuple(make_of(h) for h in (*dynamic, *held)), repr(statics))
        if key not in self._compiled:
            shells = [shell_of(h) for h in (*dynamic, *held)]
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
