"""What torch.export gave, as a `Traced`: each placeholder and size by what it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.sizes import dims_of
from mlxconv.runtime.program.expressions import axes_in

from ..recipe.recipe import names_in
from ..source.keys import tied_weights
from .decisions import Decisions, assumptions, holds
from .job import Job
from .repeats import repeated_blocks
from .traced import Tap, Traced, TracedInput, TracedParameter


def traced(job: Job, exported: ExportedProgram, decided: Decisions) -> Traced:
    """The program of a job, with what was decided of its sizes while it was traced."""
    signature = exported.graph_signature
    tied = tied_weights(job.module)
    parameters = _parameters(job, tied)
    placeholders = {
        **{node: tied.get(n, n) for node, n in signature.inputs_to_parameters.items()},
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    repeated = repeated_blocks(exported.graph, placeholders)
    used = {n.name for n in exported.graph.nodes if n.op == "placeholder" and n.users}
    later = tuple(
        f"{node.args[1]}."
        for node in exported.graph.nodes
        if node.target is torch.ops.mlxconv.again.default
    )
    constants = {
        name: _constant(job, exported, name)
        for node, name in placeholders.items()
        if name not in parameters and (node in used or name.startswith(later))
    }
    inputs = _inputs(job, exported, set(placeholders))
    assumed = assumptions(decided, exported.graph, inputs)
    return Traced(
        class_name=type(job.module).__name__,
        program=job.entry.name,
        exported=exported,
        config=job.config,
        parameters=parameters,
        constants=constants,
        placeholders=placeholders,
        inputs=inputs,
        outputs=_outputs(exported),
        symbols=_symbols(job, exported, inputs),
        fixed=_fixed(job, exported, inputs, assumed),
        taps=tuple(
            Tap(str(node.args[1]), int(node.args[2]), node.name)
            for node in exported.graph.nodes
            if node.target is torch.ops.mlxconv.tap.default
        ),
        repeated=repeated,
        tied=tied,
        dtype=job.dtype,
        arguments=job.arguments,
        assumptions=assumed,
    )


def _parameters(job: Job, tied: Mapping[str, str]) -> dict[str, TracedParameter]:
    def name_of(dtype: torch.dtype) -> str:
        return "compute" if dtype == job.dtype else str(dtype).removeprefix("torch.")

    return {
        name: TracedParameter(name, tuple(tensor.shape), name_of(tensor.dtype))
        for name, tensor in job.module.state_dict(keep_vars=True).items()
        if name not in tied
    }


def _constant(job: Job, exported: ExportedProgram, name: str) -> torch.Tensor:
    value = exported.constants.get(name, exported.state_dict.get(name))
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        raise MlxconvError(
            f"constant {name!r} of {type(job.module).__name__} has no value: {value!r}"
        )
    return value.detach()


def _inputs(job: Job, exported: ExportedProgram, known: set[str]) -> tuple[TracedInput, ...]:
    """The graph's own placeholders, matched in order with the leaves of the keyword arguments."""
    nodes = [n for n in exported.graph.nodes if n.op == "placeholder" and n.name not in known]
    order = exported.call_spec.in_spec.child(1).context
    leaves = pytree.tree_flatten_with_path({name: job.kwargs[name] for name in order})[0]
    return tuple(
        _input(job, node, tuple(_key(part) for part in path), value)
        for node, (path, value) in zip(nodes, leaves, strict=True)
    )


def _key(part: Any) -> str | int:
    return part.key if isinstance(part, pytree.MappingKey) else part.idx  # type: ignore[no-any-return]


def _input(job: Job, node: Node, path: tuple[str | int, ...], value: Any) -> TracedInput:
    specs = {spec.path: spec for spec in job.entry.inputs.values()}
    spec = next((spec for start, spec in specs.items() if path[: len(start)] == start), None)
    if spec is not None:
        return TracedInput(
            node.name,
            path,
            "tensor",
            shape=tuple(job.size(size) for size in spec.shape),
            dtype=spec.dtype,
            stage=spec.stage,
            value=job.assumed(spec),
            kinds=job.kinds.kinds_of(path),
        )
    if _symbolic(node.meta["val"]):
        expression = pytree.tree_leaves(_at(job.entry.arguments[str(path[0])], path[1:]))[0]
        return TracedInput(node.name, path, "int", shape=(expression,))
    return TracedInput(node.name, path, "constant", stage="constant", value=value)


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _outputs(exported: ExportedProgram) -> tuple[str, ...]:
    return tuple(str(name) for name in exported.graph_signature.user_outputs)


def _sizes(
    exported: ExportedProgram, inputs: tuple[TracedInput, ...]
) -> Iterator[tuple[str, int | torch.SymInt]]:
    """Each recipe expression among the inputs, with the size that the graph has for it."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    for item in inputs:
        value = nodes[item.placeholder].meta["val"]
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for expression, size in zip(item.shape or (), sizes):
            if isinstance(expression, str):
                yield expression, size


def _symbolic(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _symbols(
    job: Job, exported: ExportedProgram, inputs: tuple[TracedInput, ...]
) -> dict[str, str]:
    symbols = {}
    for text, size in _sizes(exported, inputs):
        if not _symbolic(size):
            continue
        symbols[str(size)] = text
        if known := job.multiple(text):
            by, dim = known
            symbols.setdefault(str(size // by), dim)
    return symbols


def _fixed(
    job: Job,
    exported: ExportedProgram,
    inputs: tuple[TracedInput, ...],
    assumed: tuple[str, ...],
) -> dict[str, int]:
    """The dims that the program reads and whose value, or range, is built into the graph."""
    used = {n for text, _ in _sizes(exported, inputs) for n in names_in(text)}
    built_in = {
        name
        for expression, size in _sizes(exported, inputs)
        if not _symbolic(size)
        for name in names_in(expression)
    }
    for name, value in job.entry.arguments.items():
        if not any(item.kind == "int" and item.path[0] == name for item in inputs):
            built_in.update(*(names_in(leaf) for leaf in pytree.tree_leaves(value)))
    for name in (used & set(job.dims)) - built_in:
        checks = job.recipe.dims[name].check
        if not all(holds(assumed, inputs, job.inputs({name: size})) for size in checks):
            built_in.add(name)
    paths = {item.placeholder: item.name for item in inputs}
    read = {(paths[name], axis) for text in assumed for name, axis in axes_in(text)}
    built_in |= job.asked & dims_of(job.recipe.sizes_table(job.config), job.entry.name, read)
    return {name: size for name, size in job.dims.items() if name in built_in}
