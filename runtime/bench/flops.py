"""Arithmetic of a step: what its products multiply and add, and the same as plain GEMMs."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..bundle import LoadedComponent
from ..exec.executor import Executor
from ..exec.steps import observed
from ..program.program import Node, refs
from ..program.stages import split
from .examples import Example

_LONG_ENOUGH = 2e-3  # seconds, beside which calling MLX takes none
_HELD = 64 << 20  # bytes of results held at a time

Gemm = tuple[int, int, int, int]  # batch, M, K, N: (batch, M, K) by (batch, K, N)


@dataclass
class Products:
    """Products seen by an observer: how often each shape, and by which op."""

    gemms: Counter[Gemm] = field(default_factory=Counter)
    by_op: Counter[str] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Floating point operations: 2 M N K of each product."""
        return sum(flops_of(gemm) * count for gemm, count in self.gemms.items())

    def see(self, node: Node, path: str, args: Mapping[str, Any], result: Any) -> None:
        """Count one applied node (see `Executor`)."""
        for gemm in gemms_of(node.op, args, result):
            self.gemms[gemm] += 1
            self.by_op[node.op] += flops_of(gemm)


def step_products(component: LoadedComponent, example: Example, *, staged: bool) -> Products:
    """The products of one step, or of the whole entry; nothing is computed.

    `staged`: without those that prompt and schedule decide (see `Staged`).
    """
    program, found = component.program, Products()
    weights = component.executor.weights.again(resident=False)
    _, known = component.executor.bind(example.entry.name, example.at_step(0))
    if not staged:
        with observed(found.see):
            Executor(program, weights).evaluate(example.entry, known)
        return found
    parts = split(program, example.entry)
    executor = Executor(parts, weights)
    for part in parts.entries[:-1]:
        values = executor.evaluate(part, {i.name: known[i.name] for i in part.inputs})
        known.update(zip(refs(part.outputs), values, strict=True))
    with observed(found.see):
        last = parts.entries[-1]
        executor.evaluate(last, {i.name: known[i.name] for i in last.inputs})
    return found


def gemm_seconds(products: Products, dtype: mx.Dtype, repeats: int = 3) -> float:
    """Least time of the same products as plain `mx.matmul`, in this process."""
    return sum(_gemm(gemm, dtype, repeats) * count for gemm, count in products.gemms.items())


def _gemm(gemm: Gemm, dtype: mx.Dtype, repeats: int) -> float:
    """Seconds of one product, in the faster layout of its weights.

    Small ones are evaluated many at once: alone, the call would take longer than the product, and
    a step would seem to be faster than its products.
    """
    batch, m, k, n = gemm
    a = mx.random.normal((batch, m, k)).astype(dtype)
    plain = mx.random.normal((batch, k, n)).astype(dtype)
    stored = mx.contiguous(plain.swapaxes(1, 2)).swapaxes(1, 2)  # (N, K), as weights are
    mx.eval(a @ plain, a @ stored)
    most = max(1, _HELD // max(1, batch * m * n * a.itemsize))
    return min(_seconds_of(a, b, most) for b in (plain, stored) * repeats)


def _seconds_of(a: mx.array, b: mx.array, most: int) -> float:
    """Seconds of a @ b: the mean of as many at once as take a while, at most `most`."""
    together = 1
    while True:
        began = time.perf_counter()
        mx.eval([a @ b for _ in range(together)])
        seconds = time.perf_counter() - began
        if seconds >= _LONG_ENOUGH or together >= most:
            return seconds / together
        together = min(most, 4 * together)


def flops_of(gemm: Gemm) -> int:
    return 2 * math.prod(gemm)


def gemms_of(op: str, args: Mapping[str, Any], result: Any) -> list[Gemm]:
    """The products of one node, as (batch, M, K, N)."""
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    if op in ("linear", "linears"):
        return _linear(args["x"], outputs)
    if op == "attention":
        return _attention(args["q"], args["k"], args["v"])
    if op == "matmul":
        return _matmul(*[v for v in args.values() if isinstance(v, mx.array)][:2])
    if op == "addmm":
        return _matmul(args["a"], args["b"])
    if op in ("conv", "conv_transpose"):
        return _conv(op, args, outputs[0])
    return []


def _linear(x: mx.array, outputs: list[mx.array]) -> list[Gemm]:
    rows = math.prod(x.shape[:-1])
    return [(1, rows, x.shape[-1], sum(y.shape[-1] for y in outputs))]


def _attention(q: mx.array, k: mx.array, v: mx.array) -> list[Gemm]:
    batch = math.prod(q.shape[:-2])
    queries, width, keys = q.shape[-2], q.shape[-1], k.shape[-2]
    return [(batch, queries, width, keys), (batch, queries, keys, v.shape[-1])]


def _matmul(a: mx.array, b: mx.array) -> list[Gemm]:
    if a.ndim < 2 or b.ndim < 2:
        return []
    if b.ndim == 2:
        return [(1, math.prod(a.shape[:-1]), a.shape[-1], b.shape[-1])]
    batch = max(math.prod(a.shape[:-2]), math.prod(b.shape[:-2]))
    return [(batch, a.shape[-2], a.shape[-1], b.shape[-1])]


def _conv(op: str, args: Mapping[str, Any], result: mx.array) -> list[Gemm]:
    """As the product over unfolded patches: each output place reads a kernel of inputs."""
    weight, groups = args["weight"], int(args.get("groups", 1) or 1)
    places = args["x"] if op == "conv_transpose" else result
    rows = places.shape[0] * math.prod(places.shape[2:])
    inner, outer = weight.size // weight.shape[0], weight.shape[0]
    return [(groups, rows, inner, max(1, outer // groups))]
