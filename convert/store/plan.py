"""From a component's parameters to what is written for each: precision, layout, and the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from mlxconv.runtime.dtypes import BY_MLX, BY_NAME, SHORT_NAMES
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Parameter, stored_axes

from ..quantize.policy import (
    Decision,
    Policy,
    Precision,
    guard_flush,
    layout,
    quantize,
    quantize_stream,
)
from ..source.checkpoint import Component, StoredTensor
from ..source.floats import KINDS, cast, count_not_finite
from ..source.weight_files import scale_beside
from .writer import Group, Output, Part, array_bytes, pass_through, single

_EXACT = ("int32", "uint8", "bool")
_STORED = (*SHORT_NAMES.values(), *_EXACT)
_INTEGERS = {"int64": "int32", "int16": "int32", "int8": "int32"}
# Bytes read at a time, and worked on at a time, so that they stay in a core's cache.
_READ = 4 << 20
_CHUNK = 1 << 20


@dataclass
class WeightPlan:
    """What a component's weight files will hold.

    not_finite: fills while they are written, with how many values of a parameter are NaN or
    infinite, in the checkpoint or since they were cast.
    """

    groups: list[Group]
    decisions: dict[str, Decision]
    not_finite: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to write."""
        return sum(group.nbytes for group in self.groups)


def make_plan(
    component: Component,
    parameters: Mapping[str, Parameter],
    found: Mapping[str, str],
    policy: Policy,
    method: str,
) -> WeightPlan:
    """Decide every parameter; nothing is read but samples that guard nvfp4.

    `found` maps a parameter's name to the name it is stored under. A tied tensor is written once,
    under each name that a program reads. Groups are in the order of their source files: each file
    is read once, and then no more.
    """
    plan = WeightPlan([], {})
    for name, parameter in parameters.items():
        stored = component.tensors[found[name]]
        _check_kind(name, parameter, stored, component.tensors)
        decision = _decide(name, parameter, stored, policy)
        plan.decisions[name] = decision
        count = _counter(plan.not_finite, name)
        group = _group(name, parameter, stored, decision.precision, method, count)
        plan.groups.append(replace(group, source=stored.file))
    plan.groups.sort(key=lambda group: str(group.source))
    return plan


def _check_kind(
    name: str, parameter: Parameter, stored: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> None:
    """MlxconvError unless the stored numbers are of the kind that the model computes with.

    Integers may be stored as floats, as some checkpoints do: `_converted` checks their values.
    """
    wanted = _INTEGERS.get(parameter.dtype, parameter.dtype)
    if wanted != "compute" and wanted not in _STORED:
        raise MlxconvError(
            f"{name}: the model uses {wanted}; a bundle can store {', '.join(_STORED)}"
        )
    dtype = stored.read_as
    exact = wanted in _EXACT and dtype != mx.complex64
    if exact or mx.issubdtype(dtype, mx.floating):
        return
    kind = "an integer" if wanted in _EXACT else "a float"
    scale = scale_beside(stored.name, tensors)
    why = f"; {scale!r} beside it says that the weights are quantized" if scale else ""
    raise MlxconvError(
        f"{stored.file}: {stored.name!r} is {stored.dtype}, but the model uses it as {kind}{why}; "
        "give the bf16, fp16 or fp32 checkpoint"
    )


def _decide(name: str, parameter: Parameter, stored: StoredTensor, policy: Policy) -> Decision:
    dtype = _INTEGERS.get(parameter.dtype, parameter.dtype)
    decision = policy.decide(name, replace(parameter, dtype=dtype))
    if decision.precision.mode == "nvfp4":
        precision, why = guard_flush(_sample(stored), decision.precision)
        decision = replace(decision, precision=precision, why=why or decision.why)
    return decision


def _sample(stored: StoredTensor, rows: int = 64) -> mx.array:
    """Rows spread over a matrix: four runs, so that a large one is not read for the guard."""
    total = stored.shape[0]
    run = max(1, rows // 4)
    starts = sorted({int(s) for s in np.linspace(0, max(0, total - run), 4)})
    return mx.concatenate([stored.read_rows(s, min(total, s + run)) for s in starts])


def _counter(table: dict[str, int], name: str) -> Callable[[int], None]:
    def count(more: int) -> None:
        if more:
            table[name] = table.get(name, 0) + more

    return count


def _group(
    name: str,
    parameter: Parameter,
    stored: StoredTensor,
    precision: Precision,
    method: str,
    count: Callable[[int], None],
) -> Group:
    if precision.quantized:
        return _quantized(name, stored, precision, method, count)
    code = BY_NAME[precision.dtype].code
    output = Output(name, parameter.stored_shape, code)
    if parameter.kind not in ("conv", "conv_transpose"):
        if code == stored.dtype:
            return pass_through(output, lambda: _checked(stored, count))
        if code in KINDS and stored.dtype in KINDS:
            return pass_through(output, lambda: _cast(stored, code, count))
    return single(output, lambda: _converted(stored, parameter.kind, precision.dtype, count))


def to_stored(value: mx.array, kind: str) -> mx.array:
    """A tensor in PyTorch's layout as the bundle stores it."""
    return value.transpose(stored_axes(kind, value.ndim))


def from_stored(value: mx.array, kind: str) -> mx.array:
    """A tensor of the bundle in PyTorch's layout."""
    axes = stored_axes(kind, value.ndim)
    return value.transpose([axes.index(axis) for axis in range(value.ndim)])


def _read_chunks(stored: StoredTensor) -> Iterator[memoryview]:
    for read in stored.chunks(_READ):
        yield from (read[start : start + _CHUNK] for start in range(0, len(read), _CHUNK))


def _checked(stored: StoredTensor, count: Callable[[int], None]) -> Iterator[memoryview]:
    for chunk in _read_chunks(stored):
        count(count_not_finite(chunk, stored.dtype))
        yield chunk


def _cast(stored: StoredTensor, code: str, count: Callable[[int], None]) -> Iterator[memoryview]:
    """Counted as written: float16 makes infinities of values over 65504."""
    for chunk in _read_chunks(stored):
        made = cast(chunk, stored.dtype, code)
        count(count_not_finite(made, code))
        yield made


def _converted(
    stored: StoredTensor, kind: str, dtype: str, count: Callable[[int], None]
) -> mx.array:
    read = to_stored(stored.read(), kind)
    value = read.astype(BY_NAME[dtype].mlx)
    if dtype in _EXACT and not mx.array_equal(value.astype(read.dtype), read):
        raise MlxconvError(
            f"{stored.file}: {stored.name!r} is {stored.dtype} and has values that are not exact "
            f"in {dtype}, in which the model uses it; check that the weights are of this model"
        )
    count(_array_not_finite(value))
    return value


def _array_not_finite(value: mx.array) -> int:
    return count_not_finite(array_bytes(value), BY_MLX[value.dtype].code)


def _quantized(
    name: str,
    stored: StoredTensor,
    precision: Precision,
    method: str,
    count: Callable[[int], None],
) -> Group:
    module = name.removesuffix(".weight")
    parts = layout(stored.shape, precision)
    outputs = tuple(Output(f"{module}.{key}", *parts[key]) for key in parts)

    def produce() -> Iterable[Part]:
        if stored.dtype in KINDS:
            chunks = _checked(stored, count)
            return quantize_stream(stored.shape, stored.dtype, chunks, precision, method)
        weight = stored.read()
        count(_array_not_finite(weight))
        return quantize(weight, precision, method).tensors().values()

    return Group(outputs, produce, stored.size)
