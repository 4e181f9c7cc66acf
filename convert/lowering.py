"""ATen graph -> program nodes: a table of small functions.

`torch.export` gives a functional graph of some 130 distinct ATen ops over the models of diffusers.
Each row of the table writes one of them as ops of `runtime/ops.py`; PyTorch's quirks end here. Ops
without a row are listed with the modules that they come from, all at once.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import Arg, Entry, Input, Node, Parameter, Ref, Weight, weights

from .tracing import Traced

Lowering = Callable[..., Arg]
TABLE: dict[str, Lowering] = {}

_DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int32",  # programs hold ids and positions, never more than 31 bits
    torch.int32: "int32",
    torch.int16: "int32",
    torch.int8: "int32",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex64",
}
# Arguments that say where or how a tensor lies in memory, not what it is.
_PLACEMENT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy"}
_IGNORED = ("_assert", "sym_constrain", "_assert_scalar")


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a row for ATen ops, by `name` (every overload) or `name.overload`."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            TABLE[name] = function
        return function

    return register


def target_name(target: Any) -> str:
    """`linear.default` for an ATen overload, `py.add` for Python's operators, else its path."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target._schema.name.split('::')[1]}.{target._overloadname or 'default'}"
        return name if target.namespace == "aten" else f"{target.namespace}.{name}"
    return f"py.{getattr(target, '__name__', str(target))}"


def find_row(name: str) -> Lowering | None:
    """The row for an overload, or for its op."""
    return TABLE.get(name) or TABLE.get(name.rsplit(".", 1)[0])


@dataclass
class Builder:
    """Nodes written so far, and what the current ATen node is."""

    compute: torch.dtype
    symbols: dict[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    taps: dict[str, dict[int, Arg]] = field(default_factory=lambda: defaultdict(dict))
    meta: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    current: fx.Node | None = None
    _count: int = 0

    def emit(self, op: str, **args: Arg) -> Ref:
        """Append a node with one output."""
        return self._append(op, 1, args)[0]

    def emit_many(self, op: str, count: int, **args: Arg) -> tuple[Ref, ...]:
        """Append a node with `count` outputs."""
        return self._append(op, count, args)

    def _append(self, op: str, count: int, args: dict[str, Arg]) -> tuple[Ref, ...]:
        assert self.current is not None
        names = tuple(f"v{self._count + i}" for i in range(count))
        self._count += count
        self.nodes.append(Node(op, names, args, module_path(self.current)))
        return tuple(Ref(name) for name in names)

    def dtype_name(self, dtype: torch.dtype) -> str:
        """`compute` for the traced precision, else the dtype's own name."""
        if dtype == self.compute:
            return "compute"
        if dtype not in _DTYPES:
            raise MlxconvError(f"{module_path(self.current)}: dtype {dtype} is not supported")
        return _DTYPES[dtype]

    def value(self, arg: Arg) -> Any:
        """The traced (fake) tensor of an argument, or the argument itself."""
        if isinstance(arg, Ref):
            return self.meta.get(arg.name)
        if isinstance(arg, Weight):
            return self.meta.get(f"@{arg.name}")
        return arg

    def rank(self, arg: Arg) -> int:
        """Number of axes of an argument; 0 for numbers."""
        return int(getattr(self.value(arg), "ndim", 0))

    def type_of(self, value: Any) -> str:
        """`compute[batch, tokens, 64]` for a tensor, `int` for a size."""
        if isinstance(value, torch.Tensor):
            sizes = (self.symbols.get(str(n), str(n)) for n in value.shape)
            return f"{self.dtype_name(value.dtype)}[{', '.join(sizes)}]"
        return "int" if isinstance(value, (int, torch.SymInt)) else ""

    @property
    def result(self) -> Any:
        """The traced (fake) result of the current ATen node."""
        assert self.current is not None
        return self.current.meta.get("val")

    def cast(self, arg: Arg, dtype: torch.dtype) -> Arg:
        """`arg` in `dtype`; itself when the trace says that it already is."""
        known = self.value(arg)
        if isinstance(known, torch.Tensor) and known.dtype == dtype:
            return arg
        out = self.emit("cast", x=arg, dtype=self.dtype_name(dtype))
        if isinstance(known, torch.Tensor):
            self.meta[out.name] = known.to(dtype)
        return out


def module_path(node: fx.Node | None) -> str:
    """Dotted path of the module that a node was traced in; empty for the root."""
    stack = (node.meta.get("nn_module_stack") if node is not None else None) or {}
    path = next(reversed(list(stack.values())))[0] if stack else ""
    return str(path).removeprefix("L['self']").lstrip(".")


# ---- the graph ----------------------------------------------------------------------------------


def unsupported(graph: fx.Graph) -> dict[str, list[str]]:
    """ATen ops of the graph that have no row, with the module paths they come from."""
    missing: dict[str, list[str]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and not _is_ignored(node):
            name = target_name(node.target)
            if find_row(name) is None:
                missing[name].append(module_path(node) or "(root)")
    return dict(missing)


def _is_ignored(node: fx.Node) -> bool:
    return target_name(node.target).removeprefix("py.").startswith(_IGNORED)


def _refuse(class_name: str, missing: dict[str, list[str]]) -> None:
    lines = []
    for name, paths in sorted(missing.items()):
        places = sorted(set(paths))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        lines.append(f"  {name}: {', '.join(places[:3])}{more}")
    raise MlxconvError(
        f"{class_name}: no lowering for {len(missing)} operation(s):\n" + "\n".join(lines) + "\n"
        "add a row to convert/lowering.py, or trace another path by the recipe's arguments"
    )


@dataclass(frozen=True)
class Lowered:
    """One entry, and the parameters and constants that it reads."""

    entry: Entry
    parameters: dict[str, Parameter]
    constants: tuple[str, ...]


def lower(traced: Traced, compute: torch.dtype = torch.bfloat16) -> Lowered:
    """One entry from one traced method; `compute` is the precision that it was traced in."""
    graph = traced.exported.graph
    missing = unsupported(graph)
    if missing:
        _refuse(traced.class_name, missing)
    builder = Builder(compute, symbols=dict(traced.symbols))
    builder.kinds = _kinds(graph, traced.placeholders)
    env: dict[str, Arg] = {}
    inputs, literals = _bind_inputs(traced, builder, env)
    outputs: tuple[Arg, ...] = ()
    for node in graph.nodes:
        if node.op == "call_function" and not _is_ignored(node):
            env[node.name] = _lower_node(builder, node, env)
        elif node.op == "output":
            outputs = tuple(_read(a, env) for a in pytree.tree_leaves(node.args[0]))
    _annotate(builder)
    entry = Entry(
        builder.nodes,
        tuple(a for a in outputs if a is not None),
        _tap_names(builder),
        traced.program,
        tuple(inputs),
        dict(traced.fixed),
        literals,
    )
    return Lowered(entry, *_used_weights(builder, traced))


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
    if packet in ("conv1d", "conv2d", "conv3d", "convolution"):
        transposed = packet == "convolution" and bool(user.args[6])
        return "conv_transpose" if transposed else "conv"
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
        env[item.placeholder] = Ref(item.placeholder)
        builder.meta[item.placeholder] = value
        inputs.append(Input(item.placeholder, item.name, builder.type_of(value), item.stage))
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
    row = find_row(target_name(node.target))
    assert row is not None
    try:
        result = row(builder, *args, **kwargs)
    except MlxconvError:
        raise
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
        values = [found[i] for i in sorted(found)]
        if values and all(isinstance(v, Ref) for v in values):
            names[path] = tuple(v.name for v in values if isinstance(v, Ref))
    return names


def _used_weights(builder: Builder, traced: Traced) -> tuple[dict[str, Parameter], tuple[str, ...]]:
    used = sorted({w for node in builder.nodes for w in weights(node.args.values())})
    parameters = {}
    for name in used:
        if name in traced.parameters:
            found = traced.parameters[name]
            kind = builder.kinds.get(name, "other")
            parameters[name] = Parameter(found.shape, found.dtype, kind)
    return parameters, tuple(name for name in used if name not in traced.parameters)


# ---- rows: Python's own operators on sizes ------------------------------------------------------


def _size_row(op: str) -> Lowering:
    def row(b: Builder, *args: Arg) -> Arg:
        names = ("a", "b") if len(args) == 2 else ("x",)
        return b.emit(op, **dict(zip(names, args, strict=True)))

    return row


for _python, _op in {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floor_div",
    operator.truediv: "div",
    operator.mod: "mod",
    operator.pow: "pow",
    operator.neg: "neg",
    math.floor: "size_floor",
    math.ceil: "size_ceil",
    math.trunc: "size_floor",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
    torch.sym_float: "size_float",
    torch.sym_int: "size_floor",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
}.items():
    TABLE[f"py.{_python.__name__}"] = _size_row(_op)
TABLE["py._sym_sqrt"] = TABLE["py.sym_sqrt"] = _size_row("size_sqrt")


@lowers("py.getitem")
def _getitem(b: Builder, xs: Arg, index: int) -> Arg:
    return xs[index] if isinstance(xs, tuple) else b.emit("item_of", xs=xs, index=index)


@lowers("sym_size.int")
def _sym_size(b: Builder, x: Arg, axis: int) -> Arg:
    return b.emit("dim", x=x, axis=axis)


@lowers("sym_numel")
def _sym_numel(b: Builder, x: Arg) -> Arg:
    total: Arg = 1
    for axis in range(b.rank(x)):
        total = b.emit("mul", a=total, b=b.emit("dim", x=x, axis=axis))
    return total


@lowers("mlxconv.tap")
def _tap(b: Builder, x: Arg, path: str, index: int) -> Arg:
    b.taps[path][index] = x
    return x


@lowers("_local_scalar_dense", "item")
def _item(b: Builder, x: Arg) -> Arg:
    return b.emit("item", x=x)


# ---- rows: elementwise --------------------------------------------------------------------------


def _promoted(b: Builder, *args: Arg) -> list[Arg]:
    """Arguments with PyTorch's promotion made explicit where MLX's differs.

    PyTorch lets a 0-d tensor keep the dtype of the other operand within its category; MLX does
    not distinguish it. Integers meeting a wider float kind promote alike in both.
    """
    tensors = [v for a in args if isinstance(v := b.value(a), torch.Tensor)]
    if len(tensors) < 2 or len({t.dtype for t in tensors}) == 1:
        return list(args)
    if all(t.ndim == 0 for t in tensors) or all(t.ndim > 0 for t in tensors):
        return list(args)
    target = tensors[0].dtype
    target = torch.result_type(tensors[0], tensors[1])
    return [
        b.cast(a, target) if isinstance(v := b.value(a), torch.Tensor) and v.ndim == 0 else a
        for a in args
    ]


def _binary(op: str) -> Lowering:
    def row(b: Builder, x: Arg, y: Arg, *, alpha: Arg = 1) -> Arg:
        if alpha != 1:
            y = b.emit("mul", a=y, b=alpha) if not isinstance(y, (int, float)) else y * alpha  # type: ignore[operator]
        x, y = _promoted(b, x, y)
        if op in ("add", "mul", "sub") and _is_bool(b, x) and _is_bool(b, y):
            x = b.cast(x, b.result.dtype)
        return b.emit(op, a=x, b=y)

    return row


def _is_bool(b: Builder, arg: Arg) -> bool:
    value = b.value(arg)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


for _aten, _op in {
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "mul": "mul",
    "multiply": "mul",
    "maximum": "maximum",
    "minimum": "minimum",
    "max.other": "maximum",
    "min.other": "minimum",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "floor_divide": "floor_div",
    "remainder": "mod",
    "atan2": "arctan2",
    "pow.Tensor_Tensor": "pow",
    "pow.Tensor_Scalar": "pow",
}.items():
    TABLE[_aten] = _binary(_op)


@lowers("pow.Scalar")
def _pow_scalar(b: Builder, base: Arg, exponent: Arg) -> Arg:
    return b.emit("pow", a=base, b=b.cast(exponent, b.result.dtype))


@lowers("div", "true_divide")
def _div(b: Builder, x: Arg, y: Arg, *, rounding_mode: str | None = None) -> Arg:
    x, y = _promoted(b, x, y)
    return b.emit(
        {None: "div", "floor": "floor_div", "trunc": "trunc_div"}[rounding_mode], a=x, b=y
    )


@lowers("rsub")
def _rsub(b: Builder, x: Arg, y: Arg, alpha: Arg = 1) -> Arg:
    return _binary("sub")(b, y, x if alpha == 1 else b.emit("mul", a=x, b=alpha))


@lowers("logical_and", "logical_or", "logical_xor", "logical_not")
def _logical(b: Builder, *args: Arg) -> Arg:
    name = target_name(b.current.target).split(".")[0] if b.current else ""
    flags = [b.cast(a, torch.bool) for a in args]
    if name == "logical_not":
        return b.emit("logical_not", x=flags[0])
    if name == "logical_xor":
        return b.emit("ne", a=flags[0], b=flags[1])
    return b.emit(name, a=flags[0], b=flags[1])


@lowers("bitwise_and", "__and__", "bitwise_or", "__or__")
def _bitwise(b: Builder, x: Arg, y: Arg) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    return b.emit("bitwise_and" if "and" in name else "bitwise_or", a=x, b=y)


@lowers("bitwise_not")
def _bitwise_not(b: Builder, x: Arg) -> Arg:
    if _is_bool(b, x):
        return b.emit("logical_not", x=x)
    return b.emit("sub", a=-1, b=x)


_UNARY = {
    "acos": "arccos",
    "asin": "arcsin",
    "atan": "arctan",
    "neg": "neg",
    "erf": "erf",
    "sgn": "sign",
    "absolute": "abs",
    "trunc": "trunc",
    **{
        name: name
        for name in [
            "exp",
            "expm1",
            "log",
            "log1p",
            "log2",
            "sin",
            "cos",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "sqrt",
            "rsqrt",
            "square",
            "abs",
            "floor",
            "ceil",
            "sign",
            "sigmoid",
            "reciprocal",
            "isnan",
            "isinf",
            "isfinite",
            "real",
            "imag",
        ]
    },
}
_FLOATING = {
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "tanh",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "reciprocal",
    "erf",
}


def _unary(op: str) -> Lowering:
    def row(b: Builder, x: Arg) -> Arg:
        value = b.value(x)
        if op in _FLOATING and isinstance(value, torch.Tensor) and not _is_float(value):
            x = b.cast(x, b.result.dtype)
        return b.emit(op, x=x)

    return row


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


for _aten, _op in _UNARY.items():
    TABLE[_aten] = _unary(_op)


@lowers("conj", "_conj", "conj_physical")
def _conj(b: Builder, x: Arg) -> Arg:
    value = b.value(x)
    return b.emit("conjugate", x=x) if value is not None and value.is_complex() else x


@lowers("round")
def _round(b: Builder, x: Arg, *, decimals: int = 0) -> Arg:
    return b.emit("round", x=x, decimals=decimals)


@lowers("silu", "swish")
def _silu(b: Builder, x: Arg) -> Arg:
    return b.emit("silu", x=x)


@lowers("relu")
def _relu(b: Builder, x: Arg) -> Arg:
    return b.emit("relu", x=x)


@lowers("gelu")
def _gelu(b: Builder, x: Arg, *, approximate: str = "none") -> Arg:
    return b.emit("gelu", x=x, approximate=approximate == "tanh")


@lowers("softplus")
def _softplus(b: Builder, x: Arg, beta: Arg = 1, threshold: Arg = 20) -> Arg:
    return b.emit("softplus", x=x, beta=beta, threshold=threshold)


@lowers("leaky_relu")
def _leaky_relu(b: Builder, x: Arg, slope: Arg = 0.01) -> Arg:
    return b.emit("leaky_relu", x=x, slope=slope)


@lowers("elu")
def _elu(b: Builder, x: Arg, alpha: Arg = 1) -> Arg:
    return b.emit("elu", x=x, alpha=alpha)


@lowers("hardswish")
def _hardswish(b: Builder, x: Arg) -> Arg:
    return b.emit("hard_swish", x=x)


@lowers("log_sigmoid")
def _log_sigmoid(b: Builder, x: Arg) -> Arg:
    return b.emit("neg", x=b.emit("softplus", x=b.emit("neg", x=x)))


@lowers("glu")
def _glu(b: Builder, x: Arg, dim: int = -1) -> Arg:
    first, gate = b.emit_many("chunk", 2, x=x, chunks=2, axis=dim)
    return b.emit("mul", a=first, b=b.emit("sigmoid", x=gate))


@lowers("clamp", "clip")
def _clamp(b: Builder, x: Arg, min: Arg = None, max: Arg = None) -> Arg:
    return b.emit("clip", x=x, low=min, high=max)


@lowers("clamp_min")
def _clamp_min(b: Builder, x: Arg, low: Arg) -> Arg:
    return b.emit("clip", x=x, low=low, high=None)


@lowers("clamp_max")
def _clamp_max(b: Builder, x: Arg, high: Arg) -> Arg:
    return b.emit("clip", x=x, low=None, high=high)


@lowers("where")
def _where(b: Builder, condition: Arg, x: Arg = None, y: Arg = None) -> Arg:
    x, y = _promoted(b, x, y)
    if not any(isinstance(b.value(a), torch.Tensor) for a in (x, y)):
        x = b.emit("full", shape=(), value=x, dtype=b.dtype_name(b.result.dtype))
    return b.emit("where", condition=condition, a=x, b=y)


@lowers("masked_fill")
def _masked_fill(b: Builder, x: Arg, mask: Arg, value: Arg) -> Arg:
    if isinstance(b.value(value), torch.Tensor):
        value = b.cast(value, b.result.dtype)
    return b.emit("where", condition=mask, a=value, b=x)


@lowers("nan_to_num")
def _nan_to_num(b: Builder, x: Arg, nan: Arg = None, posinf: Arg = None, neginf: Arg = None) -> Arg:
    return b.emit("nan_to_num", x=x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@lowers("lerp")
def _lerp(b: Builder, x: Arg, end: Arg, weight: Arg) -> Arg:
    return b.emit("add", a=x, b=b.emit("mul", a=b.emit("sub", a=end, b=x), b=weight))


@lowers("addcmul")
def _addcmul(b: Builder, x: Arg, y: Arg, z: Arg, *, value: Arg = 1) -> Arg:
    product = b.emit("mul", a=y, b=z)
    return b.emit("add", a=x, b=product if value == 1 else b.emit("mul", a=product, b=value))


# ---- rows: dtypes and copies --------------------------------------------------------------------


@lowers("to", "_to_copy", "type_as", "copy", "float", "bfloat16", "to.other", "to.dtype")
def _to(b: Builder, x: Arg, *args: Arg, **kwargs: Arg) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    if name == "copy.default":
        x = b.emit("broadcast", x=args[0], shape=_shape(b, x))
        b.meta[x.name] = b.value(args[0])
    return b.cast(x, b.result.dtype)


@lowers(
    "contiguous", "clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "dropout",
    "feature_dropout", "alpha_dropout", "native_dropout", "view_of", "lift", "positive",
)  # fmt: skip
def _same(b: Builder, x: Arg, *args: Arg, **kwargs: Arg) -> Arg:
    return x


def _shape(b: Builder, x: Arg) -> tuple[Arg, ...]:
    """The shape of a value: literal sizes where the trace knows them, `dim` nodes elsewhere."""
    value = b.value(x)
    return tuple(
        int(n) if isinstance(n, int) else b.emit("dim", x=x, axis=i)
        for i, n in enumerate(value.shape)
    )


@lowers("view_as_complex")
def _view_as_complex(b: Builder, x: Arg) -> Arg:
    real = b.emit("select", x=x, axis=-1, index=0)
    return b.emit("complex", real=real, imag=b.emit("select", x=x, axis=-1, index=1))


@lowers("view_as_real")
def _view_as_real(b: Builder, x: Arg) -> Arg:
    return b.emit("stack", xs=(b.emit("real", x=x), b.emit("imag", x=x)), axis=-1)


@lowers("complex")
def _complex(b: Builder, real: Arg, imag: Arg) -> Arg:
    return b.emit("complex", real=real, imag=imag)


@lowers("polar")
def _polar(b: Builder, radius: Arg, angle: Arg) -> Arg:
    # float64 angles lose their digits only after the cosine, as in PyTorch's complex128.
    parts = [b.emit("mul", a=radius, b=b.emit(f, x=angle)) for f in ("cos", "sin")]
    return b.emit("complex", real=parts[0], imag=parts[1])


# ---- rows: products -----------------------------------------------------------------------------


@lowers("linear")
def _linear(b: Builder, x: Arg, weight: Arg, bias: Arg = None) -> Arg:
    return b.emit("linear", x=x, weight=weight, bias=bias)


@lowers("matmul", "bmm", "mm", "mv", "dot")
def _matmul(b: Builder, x: Arg, y: Arg) -> Arg:
    return b.emit("matmul", a=x, b=y)


@lowers("addmm", "baddbmm")
def _addmm(b: Builder, c: Arg, x: Arg, y: Arg, *, beta: Arg = 1, alpha: Arg = 1) -> Arg:
    if beta == 0:
        product = b.emit("matmul", a=x, b=y)
        return product if alpha == 1 else b.emit("mul", a=product, b=alpha)
    return b.emit("addmm", c=c, a=x, b=y, alpha=alpha, beta=beta)


@lowers("outer")
def _outer(b: Builder, x: Arg, y: Arg) -> Arg:
    left = b.emit("expand_dims", x=x, axis=-1)
    return b.emit("mul", a=left, b=b.emit("expand_dims", x=y, axis=0))


@lowers("einsum")
def _einsum(b: Builder, equation: str, operands: Arg, *, path: Arg = None) -> Arg:
    return b.emit("einsum", equation=equation.replace(" ", ""), operands=operands)


@lowers("embedding")
def _embedding(b: Builder, weight: Arg, ids: Arg, *args: Arg) -> Arg:
    return b.emit("embedding", weight=weight, ids=ids)


@lowers("scaled_dot_product_attention")
def _attention(
    b: Builder,
    q: Arg,
    k: Arg,
    v: Arg,
    mask: Arg = None,
    dropout: Arg = 0.0,
    causal: bool = False,
    *,
    scale: Arg = None,
    enable_gqa: bool = False,
) -> Arg:
    return b.emit("attention", q=q, k=k, v=v, mask=mask, scale=scale, causal=causal)


def _convolve(
    b: Builder,
    x: Arg,
    weight: Arg,
    bias: Arg,
    stride: Arg,
    padding: Arg,
    dilation: Arg,
    groups: Arg,
) -> Arg:
    axes = b.rank(weight) - 2
    batched = b.rank(x) == axes + 2
    if not batched:
        x = b.emit("expand_dims", x=x, axis=0)
    if not (isinstance(weight, Weight) and b.kinds.get(weight.name) == "conv"):
        weight = b.emit("transpose", x=weight, axes=(0, *range(2, axes + 2), 1))
    stride, padding, dilation = (_per_axis(v, axes) for v in (stride, padding, dilation))
    y = b.emit("conv", x=x, weight=weight, bias=bias, stride=stride, padding=padding,
               dilation=dilation, groups=groups)  # fmt: skip
    return y if batched else b.emit("squeeze", x=y, axes=(0,))


def _per_axis(value: Arg, axes: int) -> Arg:
    values = value if isinstance(value, tuple) else (value,)
    return values * axes if len(values) == 1 else values


@lowers("conv1d", "conv2d", "conv3d")
def _conv(
    b: Builder,
    x: Arg,
    weight: Arg,
    bias: Arg = None,
    stride: Arg = 1,
    padding: Arg = 0,
    dilation: Arg = 1,
    groups: Arg = 1,
) -> Arg:
    if isinstance(padding, str):
        padding = _named_padding(b, weight, padding, dilation)
    return _convolve(b, x, weight, bias, stride, padding, dilation, groups)


def _named_padding(b: Builder, weight: Arg, padding: str, dilation: Arg) -> Arg:
    kernel = b.value(weight).shape[2:]
    if padding == "valid":
        return 0
    reach = [
        int(d) * (int(k) - 1)  # type: ignore[arg-type]
        for k, d in zip(kernel, _per_axis(dilation, len(kernel)))  # type: ignore[arg-type]
    ]
    if any(r % 2 for r in reach):
        raise MlxconvError(f"padding 'same' with an even kernel {tuple(kernel)} is not supported")
    return tuple(r // 2 for r in reach)


@lowers("convolution")
def _convolution(
    b: Builder,
    x: Arg,
    weight: Arg,
    bias: Arg,
    stride: Arg,
    padding: Arg,
    dilation: Arg,
    transposed: bool,
    output_padding: Arg,
    groups: Arg,
) -> Arg:
    if transposed:
        return _conv_transpose(
            b, x, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return _convolve(b, x, weight, bias, stride, padding, dilation, groups)


@lowers("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    b: Builder,
    x: Arg,
    weight: Arg,
    bias: Arg = None,
    stride: Arg = 1,
    padding: Arg = 0,
    output_padding: Arg = 0,
    groups: Arg = 1,
    dilation: Arg = 1,
) -> Arg:
    axes = b.rank(weight) - 2
    if groups != 1:
        raise MlxconvError("grouped transposed convolution is not supported")
    if not (isinstance(weight, Weight) and b.kinds.get(weight.name) == "conv_transpose"):
        weight = b.emit("transpose", x=weight, axes=(1, *range(2, axes + 2), 0))
    settings = [_per_axis(v, axes) for v in (stride, padding, output_padding, dilation)]
    return b.emit("conv_transpose", x=x, weight=weight, bias=bias, stride=settings[0],
                  padding=settings[1], output_padding=settings[2], groups=groups,
                  dilation=settings[3])  # fmt: skip


# ---- rows: norms --------------------------------------------------------------------------------


def _flat_norm(b: Builder, op: str, x: Arg, shape: Arg, affine: dict[str, Arg], eps: Arg) -> Arg:
    """Norms over several trailing axes become norms over one."""
    count = len(shape)  # type: ignore[arg-type]
    if count == 1:
        return b.emit(op, x=x, **affine, eps=eps)
    full = _shape(b, x)
    flat = b.emit("reshape", x=x, shape=(*full[:-count], -1))
    affine = {
        k: None if v is None else b.emit("reshape", x=v, shape=(-1,)) for k, v in affine.items()
    }
    return b.emit("reshape", x=b.emit(op, x=flat, **affine, eps=eps), shape=full)


@lowers("layer_norm")
def _layer_norm(
    b: Builder, x: Arg, shape: Arg, weight: Arg = None, bias: Arg = None, eps: Arg = 1e-5,
    cudnn: bool = True,
) -> Arg:  # fmt: skip
    return _flat_norm(b, "layer_norm", x, shape, {"weight": weight, "bias": bias}, eps)


@lowers("rms_norm")
def _rms_norm(b: Builder, x: Arg, shape: Arg, weight: Arg = None, eps: Arg = None) -> Arg:
    if eps is None:  # PyTorch accumulates in fp32 and takes fp32's epsilon, also for bf16 input
        eps = torch.finfo(torch.float32).eps
    return _flat_norm(b, "rms_norm", x, shape, {"weight": weight}, eps)


@lowers("group_norm")
def _group_norm(
    b: Builder, x: Arg, groups: int, weight: Arg = None, bias: Arg = None, eps: Arg = 1e-5,
    cudnn: bool = True,
) -> Arg:  # fmt: skip
    return b.emit("group_norm", x=x, groups=groups, weight=weight, bias=bias, eps=eps)


@lowers("batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(b: Builder, x: Arg, weight: Arg, bias: Arg, mean: Arg, var: Arg, *args: Arg) -> Arg:
    eps = args[-2] if len(args) > 2 else args[-1]
    shape = (-1,) + (1,) * (b.rank(x) - 2)

    def per_channel(value: Arg) -> Arg:
        return b.emit("reshape", x=value, shape=shape)

    scale: Arg = b.emit("rsqrt", x=b.emit("add", a=per_channel(var), b=eps))
    y = b.emit("mul", a=b.emit("sub", a=x, b=per_channel(mean)), b=scale)
    if weight is not None:
        y = b.emit("mul", a=y, b=per_channel(weight))
    return y if bias is None else b.emit("add", a=y, b=per_channel(bias))


@lowers("softmax", "_softmax")
def _softmax(b: Builder, x: Arg, dim: int, dtype: Arg = None) -> Arg:
    return b.emit("softmax", x=b.cast(x, b.result.dtype), axis=dim)


# ---- rows: reductions ---------------------------------------------------------------------------


def _reduce(op: str) -> Lowering:
    def row(
        b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False, *, dtype: Arg = None
    ) -> Arg:
        if op in ("sum", "mean", "prod"):
            x = b.cast(x, b.result.dtype)
        if op in ("any", "all"):
            x = b.cast(x, torch.bool)
        axes = None if dim == () else (dim,) if isinstance(dim, int) else dim
        return b.emit(op, x=x, axis=axes, keepdims=keepdim)

    return row


for _aten in ("sum", "mean", "prod", "any", "all", "logsumexp"):
    TABLE[_aten] = _reduce(_aten)
TABLE["amax"], TABLE["amin"] = _reduce("max"), _reduce("min")


def _extreme(op: str) -> Lowering:
    def row(b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False) -> Arg:
        if dim is None:
            return b.emit(op, x=x, axis=None, keepdims=False)
        values = b.emit(op, x=x, axis=(dim,), keepdims=keepdim)
        return (values, b.emit(f"arg{op}", x=x, axis=dim, keepdims=keepdim))

    return row


TABLE["max"], TABLE["min"] = _extreme("max"), _extreme("min")


@lowers("argmax", "argmin")
def _arg_extreme(b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False) -> Arg:
    name = target_name(b.current.target).split(".")[0] if b.current else "argmax"
    return b.emit(name, x=x, axis=dim, keepdims=keepdim)


@lowers("var", "std")
def _var(
    b: Builder, x: Arg, dim: Arg = None, unbiased: Arg = None, keepdim: bool = False, *,
    correction: Arg = 1,
) -> Arg:  # fmt: skip
    if isinstance(unbiased, bool):
        correction = int(unbiased)
    y = b.emit("var", x=x, axis=dim, keepdims=keepdim, ddof=1 if correction is None else correction)
    name = target_name(b.current.target) if b.current else ""
    return b.emit("sqrt", x=y) if name.startswith("std") else y


@lowers("linalg_vector_norm", "norm")
def _vector_norm(
    b: Builder, x: Arg, order: Arg = 2, dim: Arg = None, keepdim: bool = False, *, dtype: Arg = None
) -> Arg:
    if order not in (2, 2.0, 1, 1.0, None):
        raise MlxconvError(f"norm of order {order} is not supported")
    x = b.cast(x, b.result.dtype)
    axes = (dim,) if isinstance(dim, int) else dim
    if order in (1, 1.0):
        return b.emit("sum", x=b.emit("abs", x=x), axis=axes, keepdims=keepdim)
    return b.emit("sqrt", x=b.emit("sum", x=b.emit("square", x=x), axis=axes, keepdims=keepdim))


@lowers("cumsum")
def _cumsum(b: Builder, x: Arg, dim: int, *, dtype: Arg = None) -> Arg:
    return b.emit("cumsum", x=b.cast(x, b.result.dtype), axis=dim)


@lowers("argsort")
def _argsort(b: Builder, x: Arg, dim: Arg = -1, descending: Arg = False, **kwargs: Arg) -> Arg:
    if "stable" in kwargs:  # argsort.stable(x, *, stable, dim, descending)
        dim, descending = kwargs.get("dim", -1), kwargs.get("descending", False)
    return b.emit("argsort", x=x, axis=dim, descending=descending)


@lowers("sort")
def _sort(b: Builder, x: Arg, dim: Arg = -1, descending: Arg = False, **kwargs: Arg) -> Arg:
    order = b.emit("argsort", x=x, axis=dim, descending=descending)
    return (b.emit("take_along", x=x, index=order, axis=dim), order)


@lowers("topk")
def _topk(
    b: Builder, x: Arg, k: Arg, dim: Arg = -1, largest: bool = True, sorted: bool = True
) -> Arg:
    order = b.emit("argsort", x=x, axis=dim, descending=largest)
    best = b.emit("slice", x=order, axis=dim, start=0, stop=k, step=1)
    return (b.emit("take_along", x=x, index=best, axis=dim), best)


# ---- rows: shapes -------------------------------------------------------------------------------


@lowers("reshape", "view", "_unsafe_view", "view_copy", "_reshape_copy")
def _reshape(b: Builder, x: Arg, shape: Arg) -> Arg:
    if isinstance(b.result, torch.Tensor) and not isinstance(shape, tuple):
        return b.cast(x, b.result.dtype)  # view.dtype between equal sizes
    return b.emit("reshape", x=x, shape=shape)


@lowers("reshape_as", "view_as", "expand_as")
def _like(b: Builder, x: Arg, other: Arg) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    op = "broadcast" if name.startswith("expand") else "reshape"
    return b.emit(op, x=x, shape=_shape(b, other))


@lowers("flatten")
def _flatten(b: Builder, x: Arg, start: int = 0, end: int = -1) -> Arg:
    rank = b.rank(x)
    if rank == 0:
        return b.emit("reshape", x=x, shape=(1,))
    start, end = start % rank, end % rank
    if start == end:
        return x
    shape = _shape(b, x)
    return b.emit("reshape", x=x, shape=(*shape[:start], -1, *shape[end + 1 :]))


@lowers("unflatten")
def _unflatten(b: Builder, x: Arg, dim: int, sizes: Arg) -> Arg:
    dim %= b.rank(x)
    shape = _shape(b, x)
    return b.emit("reshape", x=x, shape=(*shape[:dim], *sizes, *shape[dim + 1 :]))  # type: ignore[misc]


@lowers("expand", "broadcast_to", "expand_copy")
def _expand(b: Builder, x: Arg, shape: Arg, *, implicit: bool = False) -> Arg:
    return b.emit("broadcast", x=x, shape=shape)


@lowers("permute", "permute_copy")
def _permute(b: Builder, x: Arg, axes: Arg) -> Arg:
    return b.emit("transpose", x=x, axes=axes)


@lowers("transpose", "swapaxes", "swapdims")
def _transpose(b: Builder, x: Arg, first: int, second: int) -> Arg:
    rank = b.rank(x)
    if rank < 2:
        return x
    axes = list(range(rank))
    axes[first], axes[second] = axes[second], axes[first]
    return b.emit("transpose", x=x, axes=tuple(axes))


@lowers("t", "numpy_T", "mT")
def _t(b: Builder, x: Arg) -> Arg:
    return x if b.rank(x) < 2 else _transpose(b, x, -2, -1)


@lowers("movedim", "moveaxis")
def _movedim(b: Builder, x: Arg, source: Arg, target: Arg) -> Arg:
    rank = b.rank(x)
    sources = source if isinstance(source, tuple) else (source,)
    targets = target if isinstance(target, tuple) else (target,)
    moved = {int(t) % rank: int(s) % rank for s, t in zip(sources, targets)}  # type: ignore[arg-type]
    rest = iter(a for a in range(rank) if a not in moved.values())
    axes = tuple(moved[i] if i in moved else next(rest) for i in range(rank))
    return b.emit("transpose", x=x, axes=axes)


@lowers("unsqueeze", "unsqueeze_copy")
def _unsqueeze(b: Builder, x: Arg, dim: int) -> Arg:
    return b.emit("expand_dims", x=x, axis=dim)


@lowers("squeeze", "squeeze_copy")
def _squeeze(b: Builder, x: Arg, dim: Arg = None) -> Arg:
    """What the trace squeezed, by axis: a symbolic axis that happens to be 1 is kept."""
    value = b.value(x)
    rank = value.ndim
    asked = range(rank) if dim is None else (dim if isinstance(dim, tuple) else (dim,))
    axes = tuple(int(a) % rank for a in asked if rank)  # type: ignore[arg-type]
    ones = tuple(a for a in axes if isinstance(n := value.shape[a], int) and n == 1)
    return b.emit("squeeze", x=x, axes=ones) if ones else x


@lowers("cat", "concat", "concatenate")
def _cat(b: Builder, xs: Arg, dim: int = 0) -> Arg:
    parts = [b.cast(x, b.result.dtype) for x in xs]  # type: ignore[union-attr]
    return b.emit("concat", xs=tuple(parts), axis=dim)


@lowers("stack")
def _stack(b: Builder, xs: Arg, dim: int = 0) -> Arg:
    return b.emit("stack", xs=xs, axis=dim)


@lowers("hstack", "vstack")
def _hv_stack(b: Builder, xs: Sequence[Arg]) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    flat = b.rank(xs[0]) < 2
    if name.startswith("vstack"):
        rows = [b.emit("reshape", x=x, shape=(1, -1)) if flat else x for x in xs]
        return b.emit("concat", xs=tuple(rows), axis=0)
    return b.emit("concat", xs=tuple(xs), axis=0 if flat else 1)


_END = 2**31  # PyTorch writes "to the end" as a huge stop


@lowers("slice", "slice_copy")
def _slice(
    b: Builder, x: Arg, dim: int = 0, start: Arg = None, end: Arg = None, step: Arg = 1
) -> Arg:
    stop = None if isinstance(end, int) and end >= _END else end
    if start in (None, 0) and stop is None and step == 1:
        return x
    return b.emit("slice", x=x, axis=dim, start=start, stop=stop, step=step)


@lowers("narrow")
def _narrow(b: Builder, x: Arg, dim: int, start: Arg, length: Arg) -> Arg:
    stop = start + length if isinstance(start, int) and isinstance(length, int) else None
    stop = b.emit("add", a=start, b=length) if stop is None else stop
    return b.emit("slice", x=x, axis=dim, start=start, stop=stop, step=1)


@lowers("slice_scatter")
def _slice_scatter(
    b: Builder, x: Arg, source: Arg, dim: int = 0, start: Arg = None, end: Arg = None, step: Arg = 1
) -> Arg:
    stop = None if isinstance(end, int) and end >= _END else end
    return b.emit("slice_update", x=x, update=source, axis=dim, start=start, stop=stop, step=step)


@lowers("select_scatter")
def _select_scatter(b: Builder, x: Arg, source: Arg, dim: int, index: int) -> Arg:
    update = b.emit("expand_dims", x=source, axis=dim % b.rank(x))
    stop = None if index == -1 else index + 1
    return b.emit("slice_update", x=x, update=update, axis=dim, start=index, stop=stop, step=1)


@lowers("select", "select_copy")
def _select(b: Builder, x: Arg, dim: int, index: Arg) -> Arg:
    return b.emit("select", x=x, axis=dim, index=index)


def _result_count(b: Builder) -> int:
    return len(b.result)


@lowers("split", "split_copy", "split_with_sizes", "split_with_sizes_copy")
def _split(b: Builder, x: Arg, sizes: Arg, dim: int = 0) -> Arg:
    op, key = ("split", "sizes") if isinstance(sizes, tuple) else ("split_every", "size")
    return b.emit_many(op, _result_count(b), **{"x": x, key: sizes, "axis": dim})


@lowers("chunk", "tensor_split.sections")
def _chunk(b: Builder, x: Arg, chunks: Arg, dim: int = 0) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    if name.startswith("tensor_split"):
        sizes = tuple(int(part.shape[dim]) for part in b.result)
        return b.emit_many("split", len(sizes), x=x, sizes=sizes, axis=dim)
    return b.emit_many("chunk", _result_count(b), x=x, chunks=chunks, axis=dim)


@lowers("unbind", "unbind_copy")
def _unbind(b: Builder, x: Arg, dim: int = 0) -> Arg:
    return b.emit_many("unbind", _result_count(b), x=x, axis=dim)


@lowers("repeat", "tile")
def _tile(b: Builder, x: Arg, repeats: Arg) -> Arg:
    return b.emit("tile", x=x, repeats=repeats)


@lowers("repeat_interleave.self_int")
def _repeat_interleave(
    b: Builder, x: Arg, repeats: Arg, dim: Arg = None, *, output_size: Arg = None
) -> Arg:
    return b.emit("repeat", x=x, repeats=repeats, axis=dim)


@lowers("flip")
def _flip(b: Builder, x: Arg, dims: Arg) -> Arg:
    return b.emit("flip", x=x, axes=dims)


@lowers("roll")
def _roll(b: Builder, x: Arg, shifts: Arg, dims: Arg = ()) -> Arg:
    return b.emit("roll", x=x, shifts=_per_axis(shifts, 1), axes=_per_axis(dims, 1))


@lowers("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
        "replication_pad2d", "replication_pad3d")  # fmt: skip
def _pad(b: Builder, x: Arg, widths: Arg, mode: Arg = None, value: Arg = None) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    if name.startswith("constant_pad"):
        mode, value = "constant", mode
    elif not name.startswith("pad."):
        mode = "reflect" if name.startswith("reflection") else "replicate"
    pairs = [(0, 0)] * b.rank(x)
    for i in range(len(widths) // 2):  # type: ignore[arg-type]
        pairs[-1 - i] = (widths[2 * i], widths[2 * i + 1])  # type: ignore[index]
    return b.emit("pad", x=x, widths=tuple(pairs), mode=mode or "constant", value=value or 0)


@lowers("index_select")
def _index_select(b: Builder, x: Arg, dim: int, index: Arg) -> Arg:
    return b.emit("take", x=x, index=index, axis=dim)


@lowers("gather")
def _gather(b: Builder, x: Arg, dim: int, index: Arg, *, sparse_grad: bool = False) -> Arg:
    return b.emit("take_along", x=x, index=index, axis=dim)


@lowers("take_along_dim")
def _take_along_dim(b: Builder, x: Arg, index: Arg, dim: Arg = None) -> Arg:
    if dim is None:
        x, index, dim = (b.emit("reshape", x=x, shape=(-1,)),
                         b.emit("reshape", x=index, shape=(-1,)), 0)  # fmt: skip
    return b.emit("take_along", x=x, index=index, axis=dim)


def _check_indices(b: Builder, indices: Arg) -> None:
    if any(_is_bool(b, i) for i in indices):  # type: ignore[union-attr]
        raise MlxconvError("indexing by a boolean mask has a data-dependent shape")


@lowers("index.Tensor", "_unsafe_index")
def _index(b: Builder, x: Arg, indices: Arg) -> Arg:
    _check_indices(b, indices)
    return b.emit("index", x=x, indices=indices)


@lowers("index_put", "_index_put_impl")
def _index_put(
    b: Builder, x: Arg, indices: Arg, values: Arg, accumulate: bool = False, unsafe: bool = False
) -> Arg:
    _check_indices(b, indices)
    return b.emit("index_put", x=x, indices=indices, values=values, accumulate=accumulate)


@lowers("triu")
def _triu(b: Builder, x: Arg, diagonal: int = 0) -> Arg:
    return b.emit("triu", x=x, k=diagonal)


@lowers("tril")
def _tril(b: Builder, x: Arg, diagonal: int = 0) -> Arg:
    return b.emit("tril", x=x, k=diagonal)


@lowers("meshgrid")
def _meshgrid(b: Builder, xs: Sequence[Arg], *, indexing: str = "ij") -> Arg:
    count = len(xs)
    order = list(range(count))
    if indexing == "xy" and count > 1:
        order[0], order[1] = 1, 0
    flat = [x if b.rank(x) else b.emit("reshape", x=x, shape=(1,)) for x in xs]
    sizes: list[Arg] = [1] * count
    for x, axis in zip(flat, order):
        sizes[axis] = _shape(b, x)[0] if b.rank(x) else 1
    grids = []
    for x, axis in zip(flat, order):
        shape = tuple(-1 if i == axis else 1 for i in range(count))
        column = b.emit("reshape", x=x, shape=shape)
        grids.append(b.emit("broadcast", x=column, shape=tuple(sizes)))
    return tuple(grids)


@lowers("pixel_shuffle")
def _pixel_shuffle(b: Builder, x: Arg, factor: int) -> Arg:
    *lead, channels, height, width = _shape(b, x)
    n, r = len(lead), factor
    y = b.emit("reshape", x=x, shape=(*lead, channels // (r * r), r, r, height, width))  # type: ignore[operator]
    y = b.emit("transpose", x=y, axes=(*range(n), n, n + 3, n + 1, n + 4, n + 2))
    shape = (*lead, channels // (r * r), _times(b, height, r), _times(b, width, r))  # type: ignore[operator]
    return b.emit("reshape", x=y, shape=shape)


@lowers("pixel_unshuffle")
def _pixel_unshuffle(b: Builder, x: Arg, factor: int) -> Arg:
    *lead, channels, height, width = _shape(b, x)
    n, r = len(lead), factor
    small = [b.emit("floor_div", a=size, b=r) for size in (height, width)]
    y = b.emit("reshape", x=x, shape=(*lead, channels, small[0], r, small[1], r))
    y = b.emit("transpose", x=y, axes=(*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return b.emit("reshape", x=y, shape=(*lead, channels * r * r, small[0], small[1]))  # type: ignore[operator]


def _times(b: Builder, size: Arg, factor: int) -> Arg:
    return size * factor if isinstance(size, int) else b.emit("mul", a=size, b=factor)


@lowers("diff")
def _diff(b: Builder, x: Arg, n: int = 1, dim: int = -1, *args: Arg) -> Arg:
    for _ in range(n):
        after = b.emit("slice", x=x, axis=dim, start=1, stop=None, step=1)
        x = b.emit("sub", a=after, b=b.emit("slice", x=x, axis=dim, start=0, stop=-1, step=1))
    return x


@lowers("unfold")
def _unfold(b: Builder, x: Arg, dim: int, size: int, step: int) -> Arg:
    rank = b.rank(x)
    dim %= rank
    count = _shape_at(b, x, dim)
    starts = b.emit("arange", start=0, stop=_minus(b, count, size - 1), step=step, dtype="int32")
    offsets = b.emit("arange", start=0, stop=size, step=1, dtype="int32")
    column = b.emit("expand_dims", x=starts, axis=-1)
    windows = b.emit("take", x=x, index=b.emit("add", a=column, b=offsets), axis=dim)
    axes = [a for a in range(rank + 1) if a != dim + 1]
    return b.emit("transpose", x=windows, axes=(*axes, dim + 1))


def _shape_at(b: Builder, x: Arg, axis: int) -> Arg:
    size = b.value(x).shape[axis]
    return size if isinstance(size, int) else b.emit("dim", x=x, axis=axis)


def _minus(b: Builder, size: Arg, less: int) -> Arg:
    return size - less if isinstance(size, int) else b.emit("sub", a=size, b=less)


# ---- rows: images -------------------------------------------------------------------------------


@lowers("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec",
        "_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec",
        "_upsample_nearest_exact3d.vec")  # fmt: skip
def _upsample_nearest(b: Builder, x: Arg, sizes: Arg, scales: Arg) -> Arg:
    exact = "exact" in (target_name(b.current.target) if b.current else "")
    return b.emit("upsample_nearest", x=x, sizes=sizes, scales=scales, exact=exact)


@lowers("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def _upsample_linear(b: Builder, x: Arg, sizes: Arg, align_corners: bool, scales: Arg) -> Arg:
    return b.emit("upsample_linear", x=x, sizes=sizes, scales=scales, align_corners=align_corners)


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    b: Builder, x: Arg, kernel: Arg, stride: Arg = (), padding: Arg = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: Arg = None,
) -> Arg:  # fmt: skip
    return _pool(b, "avg_pool", x, kernel, stride, padding, ceil_mode)


@lowers("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    b: Builder, x: Arg, kernel: Arg, stride: Arg = (), padding: Arg = 0, dilation: Arg = 1,
    ceil_mode: bool = False,
) -> Arg:  # fmt: skip
    return _pool(b, "max_pool", x, kernel, stride, padding, ceil_mode)


def _pool(
    b: Builder, op: str, x: Arg, kernel: Arg, stride: Arg, padding: Arg, ceil_mode: bool
) -> Arg:
    if ceil_mode:
        raise MlxconvError("pooling with ceil_mode is not supported")
    axes = int(target_name(b.current.target).split("pool")[1][0]) if b.current else 2
    sizes = [_per_axis(v, axes) if v != () else () for v in (kernel, stride, padding)]
    return b.emit(op, x=x, kernel=sizes[0], stride=sizes[1], padding=sizes[2])


# ---- rows: creation -----------------------------------------------------------------------------


@lowers("arange.default", "arange.start", "arange.start_step")
def _arange(b: Builder, *args: Arg, dtype: Arg = None) -> Arg:
    start, stop = (0, args[0]) if len(args) == 1 else args[:2]
    step = args[2] if len(args) > 2 else 1
    return b.emit("arange", start=start, stop=stop, step=step, dtype=_out_dtype(b))


def _out_dtype(b: Builder) -> str:
    return b.dtype_name(b.result.dtype)


@lowers("linspace")
def _linspace(b: Builder, start: Arg, stop: Arg, steps: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("linspace", start=start, stop=stop, count=steps, dtype=_out_dtype(b))


@lowers("full", "new_full")
def _full(b: Builder, *args: Arg, dtype: Arg = None, **kwargs: Arg) -> Arg:
    shape, value = args[-2:]
    return b.emit("full", shape=shape, value=value, dtype=_out_dtype(b))


@lowers("zeros", "empty", "new_zeros", "new_empty", "empty_permuted", "new_empty_strided")
def _zeros(b: Builder, *args: Arg, dtype: Arg = None, **kwargs: Arg) -> Arg:
    shape = args[0] if isinstance(args[0], tuple) else args[1]
    return b.emit("full", shape=shape, value=0, dtype=_out_dtype(b))


@lowers("ones", "new_ones")
def _ones(b: Builder, *args: Arg, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=args[-1], value=1, dtype=_out_dtype(b))


def _filled(value: int) -> Lowering:
    def row(b: Builder, x: Arg, *, dtype: Arg = None) -> Arg:
        return b.emit("full", shape=_shape(b, x), value=value, dtype=_out_dtype(b))

    return row


TABLE["zeros_like"] = TABLE["empty_like"] = TABLE["zero"] = _filled(0)
TABLE["ones_like"] = _filled(1)


@lowers("full_like", "fill")
def _full_like(b: Builder, x: Arg, value: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=_shape(b, x), value=value, dtype=_out_dtype(b))


@lowers("scalar_tensor")
def _scalar_tensor(b: Builder, value: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=(), value=value, dtype=_out_dtype(b))


@lowers("eye")
def _eye(b: Builder, rows: Arg, columns: Arg = None, *, dtype: Arg = None) -> Arg:
    columns = rows if columns is None else columns
    return b.emit("eye", rows=rows, columns=columns, dtype=_out_dtype(b))


def supported() -> Iterable[str]:
    """Names of the ATen ops and overloads that have a row."""
    return sorted(TABLE)
