"""What a row of the lowering is written with: the table, and the builder of program nodes."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import Arg, Node, Ref, Weight

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
            sizes = (str(n) if isinstance(n, int) else self.size_name(n) for n in value.shape)
            return f"{self.dtype_name(value.dtype)}[{', '.join(sizes)}]"
        return "int" if isinstance(value, (int, torch.SymInt)) else ""

    def size_name(self, size: torch.SymInt) -> str:
        """A symbolic size in the recipe's dims: `s3 + s7` becomes `text_tokens + image_tokens`."""
        text = str(size)
        if text in self.symbols:
            return self.symbols[text]
        return re.sub(r"\bs\d+\b", lambda m: self._factor(m[0]), text)

    def _factor(self, symbol: str) -> str:
        name = self.symbols.get(symbol, symbol)
        return name if name.isidentifier() else f"({name})"

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
    path = str(next(reversed(list(stack.values())))[0] if stack else "")
    if path.startswith("_empty_nn_module_stack"):  # what run_decompositions writes for the root
        return ""
    return path.removeprefix("L['self']").lstrip(".")


def promoted(b: Builder, *args: Arg) -> list[Arg]:
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


def is_bool(b: Builder, arg: Arg) -> bool:
    value = b.value(arg)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def shape_of(b: Builder, x: Arg) -> tuple[Arg, ...]:
    """The shape of a value: literal sizes where the trace knows them, `dim` nodes elsewhere."""
    value = b.value(x)
    return tuple(
        int(n) if isinstance(n, int) else b.emit("dim", x=x, axis=i)
        for i, n in enumerate(value.shape)
    )


def size_of(b: Builder, x: Arg, axis: int) -> Arg:
    size = b.value(x).shape[axis]
    return size if isinstance(size, int) else b.emit("dim", x=x, axis=axis)


def per_axis(value: Arg, axes: int) -> Arg:
    values = value if isinstance(value, tuple) else (value,)
    return values * axes if len(values) == 1 else values


def times(b: Builder, size: Arg, factor: int) -> Arg:
    return size * factor if isinstance(size, int) else b.emit("mul", a=size, b=factor)


def minus(b: Builder, size: Arg, less: int) -> Arg:
    return size - less if isinstance(size, int) else b.emit("sub", a=size, b=less)


def out_dtype(b: Builder) -> str:
    return b.dtype_name(b.result.dtype)
