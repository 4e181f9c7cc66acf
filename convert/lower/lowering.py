"""ATen graph -> program nodes: a table of small functions.

`torch.export` gives a functional graph of some 130 distinct ATen ops over the models of diffusers.
Each row of the table writes one of them as ops of `runtime/ops/`; PyTorch's quirks end here. Ops
without a row are listed with the modules that they come from, all at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg, Entry, Input, Parameter, Ref, Weight, weights

from ..trace.repeats import chunked
from ..trace.targets import is_ignored, target_name
from ..trace.traced import Traced
from .aten.builder import TABLE, Builder, Lowering, lowers, module_path, row_name

__all__ = [
    "TABLE",
    "Builder",
    "Lowered",
    "Lowering",
    "has_row",
    "lower",
    "lowers",
    "supported",
    "target_name",
]

# Arguments that say where or how a tensor lies in memory, not what it is.
_PLACEMENT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy"}


def supported() -> Iterable[str]:
    """Names of the ATen ops and overloads that have a row."""
    return sorted(TABLE)


def has_row(name: str) -> bool:
    """Whether an ATen op or overload has a row."""
    return row_name(name) is not None


def unsupported(graph: fx.Graph) -> dict[str, list[str]]:
    """ATen ops of the graph that have no row, with the module paths they come from."""
    missing: dict[str, list[str]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and not is_ignored(node):
            name = target_name(node.target)
            if not has_row(name):
                missing[name].append(module_path(node) or "(root)")
    return dict(missing)


def _refuse(class_name: str, missing: dict[str, list[str]]) -> None:
    lines = []
    for name, paths in sorted(missing.items()):
        places = sorted(set(paths))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        lines.append(f"  {name}: {', '.join(places[:3])}{more}")
    raise MlxconvError(
        f"{class_name}: no lowering for {len(missing)} operation(s):\n" + "\n".join(lines) + "\n"
        "add a row to convert/lower/aten, or trace another path through the recipe's arguments"
    )


@dataclass(frozen=True)
class Lowered:
    """One entry, and the parameters and constants that it reads."""

    entry: Entry
    parameters: dict[str, Parameter]
    constants: tuple[str, ...]


def lower(traced: Traced, compute: torch.dtype | None = None) -> Lowered:
    """One entry from one traced method; `compute` is the precision that it was traced in."""
    compute = compute or traced.dtype
    graph = traced.exported.graph
    missing = unsupported(graph)
    if missing:
        _refuse(traced.class_name, missing)
    builder = Builder(
        compute,
        symbols=dict(traced.symbols),
        repeated=traced.repeated,
        chunked=chunked(graph),
    )
    builder.kinds = _kinds(graph, traced.placeholders)
    env: dict[str, Arg] = {}
    inputs, literals = _bind_inputs(traced, builder, env)
    outputs: tuple[Arg, ...] = ()
    for node in graph.nodes:
        if node.op == "call_function" and not is_ignored(node):
            env[node.name] = _lower_node(builder, node, env)
        elif node.op == "output":
            outputs = _user_outputs(traced, node, env)
    _annotate(builder)
    for written in builder.nodes:
        written.args = {key: builder.resolve(arg) for key, arg in written.args.items()}
    entry = Entry(
        builder.nodes,
        tuple(builder.resolve(arg) for arg in outputs),
        _tap_names(builder),
        traced.program,
        tuple(inputs),
        dict(traced.fixed),
        literals,
        traced.arguments,
        traced.assumptions,
    )
    return Lowered(entry, *_used_weights(entry, builder.kinds, traced))


def _user_outputs(traced: Traced, node: fx.Node, env: Mapping[str, Arg]) -> tuple[Arg, ...]:
    """What the method returns, without the inputs and buffers that it changed on the way."""
    specs = traced.exported.graph_signature.output_specs
    leaves = pytree.tree_leaves(node.args[0])
    values = (
        _read(leaf, env)
        for leaf, spec in zip(leaves, specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    )
    return tuple(value for value in values if value is not None)


def _kinds(graph: fx.Graph, lifted: Mapping[str, str]) -> dict[str, str]:
    """How each lifted tensor is used: only as a linear weight, only by convolutions, or otherwise.

    By use and not by rank or module type: a 4-D tensor may be a gamma, a 3-D one an expert.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in lifted:
            for user in node.users:
                kinds[lifted[node.name]].add(_kind_of_use(node, user))
    return {name: found.pop() if len(found) == 1 else "other" for name, found in kinds.items()}


def _kind_of_use(node: fx.Node, user: fx.Node) -> str:
    if user.op != "call_function" or len(user.args) < 2 or user.args[1] is not node:
        return "other"
    packet = target_name(user.target).rsplit(".", 1)[0]
    if packet == "linear":
        return "linear"
    if packet in ("conv1d", "conv2d", "conv3d"):
        return "conv"
    return "conv_transpose" if packet.startswith("conv_transpose") else "other"


def _bind_inputs(
    traced: Traced, builder: Builder, env: dict[str, Arg]
) -> tuple[list[Input], dict[str, Any]]:
    values = {
        n.name: n.meta.get("val") for n in traced.exported.graph.nodes if n.op == "placeholder"
    }
    for placeholder, name in traced.placeholders.items():
        env[placeholder] = Weight(name)
        builder.meta[f"@{name}"] = values.get(placeholder)
    inputs, literals = [], {}
    for item in traced.inputs:
        value = values[item.placeholder]
        if item.kind == "constant":
            env[item.placeholder] = value
            literals[item.name] = value
            continue
        if item.value is not None:
            literals[item.name] = item.value
        env[item.placeholder] = Ref(item.placeholder)
        builder.meta[item.placeholder] = value
        type_ = builder.type_of(value)
        inputs.append(Input(item.placeholder, item.name, type_, item.stage, item.kinds))
    return inputs, literals


def _read(arg: Any, env: Mapping[str, Arg]) -> Any:
    if isinstance(arg, fx.Node):
        return env[arg.name]
    if isinstance(arg, (list, tuple)):
        return tuple(_read(item, env) for item in arg)
    return arg


def _lower_node(builder: Builder, node: fx.Node, env: Mapping[str, Arg]) -> Arg:
    builder.current = node
    args = [_read(a, env) for a in node.args]
    kwargs = {k: _read(v, env) for k, v in node.kwargs.items() if k not in _PLACEMENT}
    name = row_name(target_name(node.target))
    assert name is not None
    try:
        result = TABLE[name](builder, *args, **kwargs)
    except Exception as error:
        raise MlxconvError(
            f"{module_path(node) or '(root)'}: cannot lower {target_name(node.target)} "
            f"with {args!r:.200} {kwargs!r:.100}: {error}"
        ) from error
    _remember(builder, result, node.meta.get("val"))
    return result


def _remember(builder: Builder, result: Arg, value: Any) -> None:
    if isinstance(result, Ref):
        builder.meta.setdefault(result.name, value)
    elif isinstance(result, tuple) and isinstance(value, (tuple, list)):
        for item, part in zip(result, value, strict=False):
            _remember(builder, item, part)


def _annotate(builder: Builder) -> None:
    for node in builder.nodes:
        node.types = tuple(builder.type_of(builder.meta.get(name)) for name in node.out)


def _tap_names(builder: Builder) -> dict[str, tuple[str, ...]]:
    names = {}
    for path, found in builder.taps.items():
        values = [builder.resolve(found[i]) for i in sorted(found)]
        if values and all(isinstance(v, Ref) for v in values):
            names[path] = tuple(v.name for v in values if isinstance(v, Ref))
    return names


def _used_weights(
    entry: Entry, kinds: Mapping[str, str], traced: Traced
) -> tuple[dict[str, Parameter], tuple[str, ...]]:
    args = [*entry.outputs, *(arg for node in entry.nodes for arg in node.args.values())]
    used = sorted(set(weights(args)))
    parameters = {
        name: Parameter(found.shape, found.dtype, kinds.get(name, "other"))
        for name in used
        if (found := traced.parameters.get(name))
    }
    return parameters, tuple(name for name in used if name not in parameters)
