"""A harness for op tests: a table of torch functions, exported, lowered, interpreted, compared.

Every row is traced once, in bf16, and its program runs twice: `compute` as bf16 against torch in
bf16, and `compute` as fp32 against torch in fp32. Rows are exported many at a time, because
`run_decompositions` takes 0.1 s whatever the graph; a row that breaks is tried again alone.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from mlxconv.convert.lower.lowering import Lowered, lower, target_name
from mlxconv.convert.trace.traced import Traced, TracedInput, TracedParameter
from mlxconv.runtime.ops import OPS, dtype_of
from mlxconv.runtime.program.program import Ref, Weight

BATCH, FREE_BATCH = 40, 4
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 5e-6, "bf16": 2**-7}


@dataclass(frozen=True)
class In:
    """An input: `compute` follows the precision of the run, other kinds are torch dtypes."""

    shape: tuple[int, ...]
    kind: str = "compute"
    values: Any = None
    low: float | None = None
    high: float | None = None
    weight: bool = False

    def tensor(self, seed: int, compute: torch.dtype) -> torch.Tensor:
        """The tensor, exact in bf16 where it is `compute`, so that both runs get the same."""
        if self.values is not None:
            made = torch.tensor(self.values)
        else:
            made = self._random(torch.Generator().manual_seed(seed))
        if self.kind == "compute":
            return made.to(torch.bfloat16).to(compute)
        return made.to(getattr(torch, self.kind))

    def _random(self, generator: torch.Generator) -> torch.Tensor:
        if self.kind.startswith(("int", "uint")):
            low, high = int(self.low or 0), int(6 if self.high is None else self.high)
            return torch.randint(low, high, self.shape, generator=generator)
        if self.kind == "bool":
            return torch.rand(self.shape, generator=generator) < 0.6
        if self.kind == "complex64":
            return torch.randn(*self.shape, dtype=torch.complex64, generator=generator)
        if self.low is not None and self.high is not None:
            unit = torch.rand(self.shape, generator=generator)
            return self.low + (self.high - self.low) * unit
        return torch.randn(self.shape, generator=generator)


def f(*shape: int, low: float | None = None, high: float | None = None) -> In:
    """A random input in the precision of the run: normal, or uniform within bounds."""
    return In(shape, "compute", None, low, high)


def f32(*shape: int) -> In:
    """A random input that is fp32 in both runs."""
    return In(shape, "float32")


def i64(*shape: int, low: int = 0, high: int = 6) -> In:
    """Random integers in [low, high)."""
    return In(shape, "int64", None, low, high)


def flags(*shape: int) -> In:
    """Random booleans."""
    return In(shape, "bool")


def c64(*shape: int) -> In:
    """Random complex numbers."""
    return In(shape, "complex64")


def exact(values: Any, kind: str = "compute") -> In:
    """These values."""
    return In(tuple(torch.tensor(values).shape), kind, values)


def w(*shape: int) -> In:
    """A parameter: stored as the lowering's `Parameter.kind` says."""
    return In(shape, "compute", weight=True)


@dataclass(frozen=True, eq=False)
class Row:
    """`function` of the inputs; `others` are the sizes to run at after a trace of free sizes.

    whole: composite operations are lowered as they were exported.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[In, ...]
    tolerance: float = 1.0
    runs: tuple[str, ...] = ("fp32", "bf16")
    others: tuple[tuple[In, ...], ...] = ()
    whole: bool = False

    def tensors(self, compute: torch.dtype, inputs: tuple[In, ...] | None = None) -> list[Any]:
        return [x.tensor(k + 1, compute) for k, x in enumerate(inputs or self.inputs)]


def row(
    name: str,
    function: Callable[..., Any],
    *inputs: In,
    tolerance: float = 1.0,
    runs: tuple[str, ...] = ("fp32", "bf16"),
) -> Row:
    """A row of fixed sizes. `tolerance` multiplies the usual one."""
    return Row(name, function, inputs, tolerance, runs)


def free(
    name: str,
    function: Callable[..., Any],
    inputs: tuple[In, ...],
    *others: tuple[In, ...],
    tolerance: float = 1.0,
) -> Row:
    """A row traced with every axis free, and run at the sizes of `inputs` and of `others`."""
    return Row(name, function, inputs, tolerance, others=others)


def whole(name: str, function: Callable[..., Any], inputs: tuple[In, ...], *others: In) -> Row:
    """A free row of composite operations; `others` are its inputs at other sizes."""
    return Row(name, function, inputs, others=(others,), whole=True)


class Rows(nn.Module):
    """A module that computes rows: their weights are its parameters."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        super().__init__()
        self.rows = rows
        for r, one in enumerate(rows):
            for k, (spec, tensor) in enumerate(zip(one.inputs, one.tensors(torch.bfloat16))):
                if spec.weight:
                    self.register_parameter(f"w{r}_{k}", nn.Parameter(tensor, requires_grad=False))

    def forward(self, *groups: list[Any]) -> list[list[Any]]:
        results = []
        for r, (one, group) in enumerate(zip(self.rows, groups)):
            given = iter(group)
            args = [
                getattr(self, f"w{r}_{k}") if spec.weight else next(given)
                for k, spec in enumerate(one.inputs)
            ]
            results.append(pytree.tree_leaves(one.function(*args)))
        return results


def given(one: Row, compute: torch.dtype, inputs: tuple[In, ...] | None = None) -> list[Any]:
    """The tensors of a row that are not weights."""
    tensors = one.tensors(compute, inputs)
    return [t for t, spec in zip(tensors, inputs or one.inputs) if not spec.weight]


def trace(
    module: nn.Module, args: tuple[Any, ...], free_sizes: bool = False, whole: bool = False
) -> Traced:
    """`Traced` of any module over positional arguments, as `convert.tracing` would make it."""
    axes = pytree.tree_map(lambda t: dict.fromkeys(range(t.ndim), Dim.AUTO), args)
    exported = torch.export.export(
        module, args, dynamic_shapes=(axes,) if free_sizes else None, strict=False
    )
    if not whole:
        exported = exported.run_decompositions({})
    signature = exported.graph_signature
    parameters = {
        name: TracedParameter(name, tuple(t.shape), "compute")
        for name, t in module.state_dict().items()
    }
    placeholders = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    constants = {n: exported.constants[n] for n in placeholders.values() if n not in parameters}
    inputs = tuple(
        TracedInput(node.name, (k,), "tensor")
        for k, node in enumerate(
            n for n in exported.graph.nodes if n.op == "placeholder" and n.name not in placeholders
        )
    )
    return Traced(
        "Rows", "forward", exported, {}, parameters, constants, placeholders, inputs,
        tuple(str(n) for n in signature.user_outputs), {}, {},
    )  # fmt: skip


@dataclass(frozen=True)
class Program:
    """Rows traced together: their lowering, and what ATen ops each graph had."""

    rows: tuple[Row, ...]
    traced: Traced
    lowered: Lowered
    module: Rows

    def run(self, precision: str, groups: Iterable[list[Any]]) -> list[list[Any]]:
        """Outputs by row."""
        tensors = [t for group in groups for t in group]
        flat = interpret(self.lowered, self.traced, self.module.state_dict(), tensors, precision)
        spec = self.traced.exported.call_spec.out_spec
        return pytree.tree_unflatten(flat, spec)  # type: ignore[no-any-return]


@functools.cache
def program(rows: tuple[Row, ...]) -> Program:
    """Rows traced in bf16 and lowered."""
    module = Rows(rows)
    args = tuple(given(one, torch.bfloat16) for one in rows)
    traced = trace(module, args, any(one.others for one in rows), rows[0].whole)
    return Program(rows, traced, lower(traced), module)


def batches(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    """Rows in the groups that are traced together."""
    rows = list(rows)
    fixed = [r for r in rows if not r.others]
    free_ones = [r for r in rows if r.others and not r.whole]
    composite = [r for r in rows if r.whole]
    for group, size in ((fixed, BATCH), (free_ones, FREE_BATCH), (composite, FREE_BATCH)):
        yield from (tuple(group[k : k + size]) for k in range(0, len(group), size))


@functools.cache
def outcome(rows: tuple[Row, ...], precision: str) -> list[list[Any]] | None:
    """Outputs of all rows at their own sizes, or None where any breaks."""
    try:
        groups = [given(one, PRECISIONS[precision]) for one in rows]
        return program(rows).run(precision, groups)
    except Exception:
        return None


def check(table: tuple[Row, ...], one: Row, precision: str) -> None:
    """Assert that a row's program gives what torch gives, in one precision, at all its sizes."""
    batch = next(group for group in batches(table) if one in group)
    if outcome(batch, precision) is None:
        batch = (one,)
    k, compute = batch.index(one), PRECISIONS[precision]
    together = outcome(batch, precision)
    got = together[k] if together else program(batch).run(precision, [given(one, compute)])[0]
    compare(got, pytree.tree_leaves(one.function(*one.tensors(compute))), one, precision)
    for inputs in one.others:
        groups = [given(r, compute, inputs if r is one else None) for r in batch]
        expected = one.function(*one.tensors(compute, inputs))
        got = program(batch).run(precision, groups)[k]
        compare(got, pytree.tree_leaves(expected), one, precision)


def compare(got: list[Any], expected: list[Any], one: Row, precision: str) -> None:
    """Shapes, dtypes and numbers."""
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs
            continue
        assert isinstance(mine, mx.array), f"{one.name}: {type(mine)}, not an array"
        assert tuple(mine.shape) == tuple(theirs.shape)
        assert mine.dtype == _mlx_dtype(theirs.dtype), f"{one.name}: {mine.dtype}"
        _compare_numbers(mine, theirs, TOLERANCE[precision] * one.tolerance)


def _mlx_dtype(dtype: torch.dtype) -> mx.Dtype:
    name = str(dtype).removeprefix("torch.")
    return dtype_of({"int64": "int32", "int16": "int32", "complex128": "complex64"}.get(name, name))


def _compare_numbers(mine: mx.array, theirs: torch.Tensor, tolerance: float) -> None:
    a = to_numpy(mine)
    b = theirs.float().numpy() if theirs.dtype == torch.bfloat16 else theirs.numpy()
    if b.dtype.kind not in "fc":
        np.testing.assert_array_equal(a, b)
        return
    finite = np.isfinite(b)
    np.testing.assert_array_equal(a[~finite], b[~finite])
    largest = float(np.abs(b[finite]).max(initial=0.0))
    error = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    assert error <= tolerance * largest, f"error {error:.2e} of {largest:.2e}"


def to_numpy(x: mx.array) -> Any:
    """A NumPy array; bf16 as fp32."""
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def to_mlx(x: torch.Tensor) -> mx.array:
    """An MLX array; 64-bit integers as 32-bit."""
    if x.dtype == torch.bfloat16:
        return mx.array(x.float().numpy()).astype(mx.bfloat16)
    if x.dtype == torch.float64:
        return mx.array(x.numpy(), dtype=mx.float64)
    return mx.array(x.contiguous().numpy()).astype(_mlx_dtype(x.dtype))


# ---- a reference interpreter --------------------------------------------------------------------


def interpret(
    lowered: Lowered,
    traced: Traced,
    state: Mapping[str, torch.Tensor],
    tensors: Iterable[Any],
    precision: str,
) -> list[Any]:
    """The entry's outputs, node by node."""
    compute = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    weights = {name: to_mlx(t) for name, t in traced.constants.items()}
    for name, parameter in lowered.parameters.items():
        weights[name] = _stored(to_mlx(state[name]), parameter.kind).astype(dtype_of(compute))
    env = {i.name: to_mlx(t) if isinstance(t, torch.Tensor) else t
           for i, t in zip(lowered.entry.inputs, tensors, strict=True)}  # fmt: skip

    def read(arg: Any) -> Any:
        match arg:
            case Ref(name):
                return env[name]
            case Weight(name):
                return weights[name]
            case tuple():
                return [read(a) for a in arg]
        return arg

    for node in lowered.entry.nodes:
        args = {k: read(v) for k, v in node.args.items()}
        if args.get("dtype") == "compute":
            args["dtype"] = compute
        result = OPS[node.op](**args)
        results = result if isinstance(result, (list, tuple)) else [result]
        env.update(zip(node.out, results, strict=True))
    return [read(a) for a in lowered.entry.outputs]


def _stored(weight: mx.array, kind: str) -> mx.array:
    axes = range(2, weight.ndim)
    if kind == "conv":
        return weight.transpose(0, *axes, 1)
    return weight.transpose(1, *axes, 0) if kind == "conv_transpose" else weight


def aten_names(traced: Traced) -> set[str]:
    """The ops of a graph, as the table names them."""
    return {target_name(n.target) for n in traced.exported.graph.nodes if n.op == "call_function"}
