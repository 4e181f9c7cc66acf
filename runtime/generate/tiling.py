"""Large pictures decoded in strips of rows: the same values in a fraction of the memory.

A convolution whose work would not fit is computed strip by strip, each evaluated before the next
is begun, and attention by parts of its queries. There are no seams to blend: see `strips`. What has
no rule there is computed whole, and cut again by the next convolution.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ..bundle import LoadedComponent
from ..errors import ArgumentError
from ..exec.executor import Executor
from ..exec.steps import Lookup, evaluator, observe, under
from ..exec.strips import RULES, Strips, cut, evaluate, evenly, flat, whole
from ..ops.products import attention
from ..program.program import Body

DEFAULT_WORK = 256_000_000  # bytes that one strip of one convolution may need


class StripExecutor(Executor):
    """An executor that cuts what needs more than `work` bytes at once. It never compiles."""

    def __init__(self, executor: Executor, work: int) -> None:
        super().__init__(executor.program, executor.weights)
        self.work = work
        self.most = 1  # strips of one convolution, in any run

    def _run(
        self,
        body: Body,
        values: dict[str, Any],
        weight: Lookup,
        prefix: str,
        taps: Sequence[str] = (),
        found: dict[str, list[Any]] | None = None,
    ) -> tuple[Any, ...]:
        if taps:
            return super()._run(body, values, weight, prefix, taps, found)
        made: Any = None
        settled: Any = None  # the last convolution: evaluated once nothing holds what it read
        for step in self._plan_of(body):
            evaluate(settled)
            made = settled = None
            args = {key: get(values, weight) for key, get in step.arguments.items()}
            for name in step.drop:  # before the work: a caller would hold them through a block
                values.pop(name, None)
            if step.node.op == "call":
                made = self._called(args, weight, prefix)
            else:
                made = self._applied(step, args, prefix)
                observe(step.node, prefix, args, made)
                settled = made if step.node.op == "conv" else None
                del args
            several = isinstance(made, (list, tuple))
            values.update(zip(step.node.out, made if several else [made], strict=True))
        evaluate(settled)
        outputs = [evaluator(arg, self.compute)(values, weight) for arg in body.outputs]
        return tuple(outputs) if prefix else tuple(whole(value) for value in outputs)

    def _called(self, args: dict[str, Any], weight: Lookup, prefix: str) -> tuple[Any, ...]:
        block, inner = self.program.blocks[args["block"]], args["prefix"]
        path = ".".join(part for part in (prefix, inner) if part)
        values = dict(zip(block.inputs, args.pop("inputs"), strict=True))
        return self._run(block, values, under(weight, inner), path)

    def _applied(self, step: Any, args: dict[str, Any], prefix: str) -> Any:
        if step.node.op == "attention":
            return self._attention(args)
        if step.node.op == "conv":
            args["x"] = self._fitting(args)
        with self._stream_for(args):
            return self._in_strips(step, args, prefix)

    def _in_strips(self, step: Any, args: dict[str, Any], prefix: str) -> Any:
        strips = next((v for v in flat(args.values()) if isinstance(v, Strips)), None)
        rule = None if strips is None else RULES.get(step.node.op)
        if strips is not None:
            self.most = max(self.most, len(strips.parts))
            made = None if rule is None else rule(args, strips)
            if made is not None:
                return made
            args = {key: whole(value) for key, value in args.items()}
        return self._apply(step, args, prefix)

    def _fitting(self, args: Mapping[str, Any]) -> Any:
        """The input of a convolution in strips that each need at most `work` bytes."""
        x, weight = args["x"], args["weight"]
        if x.ndim < 4 or not isinstance(weight, mx.array):
            return x
        axis, taps = x.ndim - 2, math.prod(weight.shape[1:])
        out = math.prod(x.shape[2:]) / math.prod(args["stride"])
        needed = x.shape[0] * out * (taps + weight.shape[0]) * x.dtype.size
        count = math.ceil(needed / self.work)
        if isinstance(x, Strips):
            if x.axis != axis:
                x = x.whole()
            elif len(x.parts) >= count:
                return x
        return x if count <= 1 else cut(x, axis, evenly(x.shape[axis], count))

    def _attention(self, args: dict[str, Any]) -> Any:
        """By parts of the queries, where the scores (batch, heads, queries, keys) are too many."""
        args = {key: whole(value) for key, value in args.items()}
        q, keys = args["q"], args["k"].shape[-2]
        needed = math.prod(q.shape[:-1]) * keys * 4
        count = math.ceil(needed / self.work)
        if count <= 1 or args.get("mask") is not None or args.get("causal"):
            return attention(**args)
        bounds, parts = evenly(q.shape[-2], count), []
        for low, high in pairwise(bounds):
            parts.append(attention(**{**args, "q": q[..., low:high, :]}))
            mx.eval(parts[-1])
        return mx.concatenate(parts, axis=-2)


@contextmanager
def in_strips(component: LoadedComponent, work: int) -> Iterator[StripExecutor | None]:
    """While it lasts, a component runs in strips of so many bytes at most; 0: as it is."""
    if not work:
        yield None
        return
    plain = component.executor
    component.executor = strips = StripExecutor(plain, work)
    try:
        yield strips
    finally:
        component.executor = plain


def work_of(tile: str | int) -> int:
    """Bytes that a strip may need: by `auto`, `off` (0), or a number of MB."""
    if tile in ("auto", "off"):
        return DEFAULT_WORK if tile == "auto" else 0
    if not str(tile).isdecimal() or not int(tile):
        raise ArgumentError(f"tile is {tile!r}: auto, off, or a number of MB, at least 1")
    return int(tile) * 1_000_000
