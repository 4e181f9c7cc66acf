"""Runs an entry by stages: what the prompt and the schedule decide, once; then step after step.

The weights that only the earlier stages need are loaded when they are reached, used and freed: the
loop holds the others alone (FLUX.1: 72 % of them, Qwen-Image: 66 %).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..bundle import LoadedComponent
from ..errors import MlxconvError
from ..exec.binding import as_input, at
from ..exec.executor import Executor
from ..program.program import STAGES, Entry, Input
from ..program.stages import split, weights_read
from ..program.types import INT

Values = dict[str, Any]


class Staged:
    """One entry of a component, for a loop. Weights of the loop are read before it, and kept.

    `compile` is that of the loop (see `Executor`). `batched` computes the schedule's part for all
    steps in one operation a node, instead of step by step: equal up to the order of summation.
    `keep` holds the weights of the early parts too, for a caller who comes back at each step; all
    entries of the component then share one copy of what they read.
    """

    def __init__(
        self,
        component: LoadedComponent,
        entry: str = "forward",
        *,
        compile: str = "program",
        batched: bool = True,
        keep: bool = False,
    ) -> None:
        self.component, self.name = component, entry
        self.compile, self.batched, self.keep = compile, batched, keep
        self._parts: dict[int, _Parts] = {}

    def prepare(
        self, inputs: Mapping[str, Any], schedule: Mapping[str, Any] | None = None
    ) -> "Prepared":
        """Compute everything that does not depend on the latents.

        `inputs`: the entry's keyword inputs; of those of stage `step` only the shapes are read.
        `schedule`: inputs of stage `schedule` with a value a step, as (steps, *shape).
        """
        rows = {
            k: v if isinstance(v, mx.array) else mx.array(v) for k, v in (schedule or {}).items()
        }
        if len({len(v) for v in rows.values()}) > 1:
            found = {k: len(v) for k, v in rows.items()}
            raise MlxconvError(f"the schedule's inputs differ in their number of steps: {found}")
        first = {k: v[0] for k, v in rows.items()}
        return self.begin({**inputs, **first}).at(rows)

    def begin(self, inputs: Mapping[str, Any]) -> "Begun":
        """Compute what sizes and the prompt decide; of the schedule and the latents only the shapes
        are read."""
        entry, values = self.component.executor.bind(self.name, inputs)
        return Begun(self._of(entry), values)

    def unstaged(self, inputs: Mapping[str, Any]) -> Any:
        """The entry as a whole, uncompiled, one block's weights in memory at a time."""
        executor = self.component.executor
        weights = executor.weights.again(resident=False)
        return Executor(executor.program, weights, stream=True)(self.name, **inputs)

    def entry_for(self, inputs: Mapping[str, Any]) -> Entry:
        """The component's entry that takes inputs of these sizes."""
        return self.component.executor.bind(self.name, inputs, elements=False)[0]

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights that each stage reads, and `all` of them, as they are held."""
        return self._of(self.component.program.entry(self.name)).weight_bytes

    @property
    def traces(self) -> int:
        """How often the loop's part was traced by `mx.compile`."""
        return sum(parts.loop.traces for parts in self._parts.values())

    def _of(self, entry: Entry) -> "_Parts":
        if id(entry) not in self._parts:
            self._parts[id(entry)] = _Parts(self, entry)
        return self._parts[id(entry)]


class _Parts:
    """An entry by stage: the early parts stream their weights, the loop keeps its own."""

    def __init__(self, staged: Staged, entry: Entry) -> None:
        weights = staged.component.executor.weights
        self.entry, self.batched, keep = entry, staged.batched, staged.keep
        self.program = split(staged.component.program, entry)
        early, loop = (weights if keep else weights.again(resident=kept) for kept in (False, True))
        self.early = Executor(self.program, early, stream=not keep)
        self.loop = Executor(self.program, loop, compile=staged.compile)

    def advance(self, stages: Sequence[str], known: Values, stacked: dict[str, mx.array]) -> None:
        """Run the parts of these stages; what they give is added, `stacked` where it has rows."""
        for part in (e for e in self.program.entries if e.name in stages):
            given = {i.name: known[i.name] for i in part.inputs if i.name not in stacked}
            over = {i.name: stacked[i.name] for i in part.inputs if i.name in stacked}
            fixed, each = self.early.evaluate_over(part, given, over, batched=self.batched)
            known.update(fixed)
            stacked.update(each)
        if self.early.stream:
            self.early.weights.release()

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        names = [set(weights_read(self.program, part)) for part in self.program.entries]
        weights = self.early.weights.again(resident=False)  # looked at, not held
        found = {stage: weights.nbytes(read) for stage, read in zip(STAGES, names)}
        return {**found, "all": weights.nbytes(set().union(*names))}


class Begun:
    """A generation whose prompt is known: `at` makes the loop's model for a schedule."""

    def __init__(self, parts: _Parts, values: Values) -> None:
        self._parts, self._known = parts, dict(values)
        parts.advance(("constant", "prompt"), self._known, {})

    def at(self, schedule: Mapping[str, mx.array]) -> "Prepared":
        """Compute what the schedule decides; its inputs as (steps, *shape), the others as begun."""
        known, stacked = dict(self._known), self._rows(schedule)
        self._parts.advance(("schedule",), known, stacked)
        self._parts.loop.load(self._parts.program.entries[-1])
        return Prepared(self._parts, known, stacked)

    def _rows(self, schedule: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The schedule by input name, each row in the dtype that the entry takes."""
        entry, executor = self._parts.entry, self._parts.early
        known = {i.path: i for i in entry.inputs if i.stage == "schedule"}
        unknown = [path for path in schedule if path not in known]
        if unknown:
            raise MlxconvError(
                f"{executor.program.class_name}.{entry.name}: {', '.join(unknown)} cannot change "
                f"from step to step; {', '.join(known) or 'nothing'} can"
            )
        return {
            known[path].name: mx.stack([as_input(known[path], v, executor.compute) for v in value])
            for path, value in schedule.items()
        }


class Prepared:
    """A loop's model: call it with the number of the step and the inputs of stage `step`."""

    def __init__(self, parts: _Parts, known: Values, stacked: Mapping[str, mx.array]) -> None:
        self._parts, self._part = parts, parts.program.entries[-1]
        own = {i.name: i for i in parts.entry.inputs}
        names = [i.name for i in self._part.inputs]
        moving = [n for n in names if n in own and own[n].stage == "step" and own[n].type != INT]
        self._moving: Sequence[tuple[Input, tuple[int, ...]]] = [
            (own[n], tuple(known[n].shape)) for n in moving
        ]
        fixed = {n: known[n] for n in names if n not in stacked and n not in moving}
        count = min((len(v) for v in stacked.values()), default=1)
        self._rows = [
            {**fixed, **{n: stacked[n][i] for n in names if n in stacked}} for i in range(count)
        ]

    @property
    def steps(self) -> int:
        """How many steps were prepared."""
        return len(self._rows)

    def __call__(self, step: int, **inputs: Any) -> Any:
        """The entry's output at a step, lazily; a tuple where it has several."""
        outputs = self._parts.loop.evaluate(self._part, self._values(step, inputs))
        return outputs[0] if len(outputs) == 1 else outputs

    def tapped(self, step: int, paths: Sequence[str], **inputs: Any) -> dict[str, list[mx.array]]:
        """The values that the modules at these paths return at a step, by path."""
        found: dict[str, list[mx.array]] = {}
        self._parts.loop.evaluate(self._part, self._values(step, inputs), paths, found)
        return found

    def block_paths(self) -> list[str]:
        """Module paths of the loop's blocks whose outputs can be tapped, in order."""
        calls = (str(n.args["prefix"]) for n in self._part.nodes if n.op == "call")
        return [path for path in dict.fromkeys(calls) if path in self._part.taps]

    def _values(self, step: int, inputs: Mapping[str, Any]) -> Values:
        values = dict(self._rows[step])
        loop = self._parts.loop
        for item, shape in self._moving:
            value = as_input(item, at(inputs, item.path), loop.compute)
            if value.shape != shape:
                raise MlxconvError(
                    f"{loop.program.class_name}: {item.path} was prepared for {shape}, given "
                    f"{tuple(value.shape)}; prepare again"
                )
            values[item.name] = value
        return values
