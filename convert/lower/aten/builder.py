"""What a row of the lowering is written with: the table, and the builder of program nodes."""

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg, Node, Ref, Weight, substitute
from mlxconv.runtime.program.types import INT, UNKNOWN, Type

from ...trace.repeats import Repeated

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


def row_name(name: str) -> str | None:
    """The row of the table that serves an overload: its own, or its op's."""
    return next((n for n in (name, name.rsplit(".", 1)[0]) if n in TABLE), None)


@dataclass
class Builder:
    """Nodes written so far, and what the current ATen node is."""

    compute: torch.dtype
    symbols: dict[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    taps: dict[str, dict[int, Arg]] = field(default_factory=lambda: defaultdict(dict))
    meta: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    repeated: Mapping[str, Repeated] = field(default_factory=dict)
    chunked: frozenset[str] = frozenset()  # modules that are called once per chunk
    current: fx.Node | None = None
    _origins: list[fx.Node] = field(default_factory=list)
    _entered: dict[str, dict[int, Ref]] = field(default_factory=lambda: defaultdict(dict))
    _left: dict[str, dict[int, Arg]] = field(default_factory=lambda: defaultdict(dict))
    _stands_for: dict[str, Arg] = field(default_factory=dict)
    _count: int = 0

    def emit(self, op: str, **args: Arg) -> Ref:
        """Append a node with one output."""
        return self._append(op, 1, args)[0]

    def emit_many(self, op: str, count: int, **args: Arg) -> tuple[Ref, ...]:
        """Append a node with `count` outputs."""
        return self._append(op, count, args)

    def _append(self, op: str, count: int, args: dict[str, Arg]) -> tuple[Ref, ...]:
        assert self.current is not None
        names = tuple(self._fresh() for _ in range(count))
        self._add(Node(op, names, args, self._module(module_path(self.current))))
        return tuple(Ref(name) for name in names)

    def _module(self, path: str) -> str:
        """The path of a module, with the number of the call where there is one per chunk."""
        first, _, rest = path.partition(".")
        if first not in self.chunked or self.current is None:
            return path
        called = f"{first}@{call_number(self.current, first)}"
        return f"{called}.{rest}" if rest else called

    def _add(self, node: Node) -> None:
        assert self.current is not None
        self.nodes.append(node)
        self._origins.append(self.current)

    def _fresh(self) -> str:
        """A name that neither an input nor another node has."""
        while True:
            name, self._count = f"v{self._count}", self._count + 1
            if name not in self.meta:
                return name

    def enter(self, x: Arg, call: str, index: int) -> Arg:
        """Input `index` of a block that is written again: a name of its own, until `resolve`."""
        if call not in self.repeated:
            return x
        name = self._fresh()
        self.meta[name] = self.value(x)
        self._stands_for[name] = x
        self._entered[call][index] = Ref(name)
        return Ref(name)

    def leave(self, x: Arg, call: str, index: int) -> Arg:
        """Output `index` of a block."""
        self._left[call][index] = x
        return x

    def again(self, inputs: Sequence[Arg], path: str, call: str) -> tuple[Arg, ...]:
        """The nodes of a block once more, for the equal one at `path`: its outputs."""
        block = self.repeated[call]
        values: dict[str, Arg] = {
            ref.name: inputs[index] for index, ref in self._entered[call].items()
        }

        def moved(name: str) -> str:
            inner = name.startswith(f"{block.path}.") or name == block.path
            return path + name[len(block.path) :] if inner else name

        def read(item: Ref | Weight) -> Arg:
            if isinstance(item, Ref):
                if item.name in self._stands_for and item.name not in values:
                    values[item.name] = substitute(self._stands_for[item.name], read)
                return values.get(item.name, item)
            if item.name in self.kinds:
                self.kinds[moved(item.name)] = self.kinds[item.name]
            self.meta[f"@{moved(item.name)}"] = self.meta.get(f"@{item.name}")
            return Weight(moved(item.name))

        for origin, node in list(zip(self._origins, self.nodes)):
            if origin in block.nodes:
                args = {key: substitute(arg, read) for key, arg in node.args.items()}
                out = tuple(self._fresh() for _ in node.out)
                values.update((old, Ref(new)) for old, new in zip(node.out, out))
                self.meta.update((new, self.meta.get(old)) for old, new in zip(node.out, out))
                module = self._module(moved(re.sub(r"@\d+", "", node.module)))
                self._add(Node(node.op, out, args, module))
        for tapped, found in list(self.taps.items()):
            if tapped.startswith(f"{block.path}."):
                self.taps[moved(tapped)] = {i: substitute(x, read) for i, x in found.items()}
        return tuple(substitute(x, read) for _, x in sorted(self._left[call].items()))

    def resolve(self, arg: Arg) -> Arg:
        """`arg` without the names that `enter` gave."""

        def read(item: Ref | Weight) -> Arg:
            known = isinstance(item, Ref) and item.name in self._stands_for
            return substitute(self._stands_for[item.name], read) if known else item

        return substitute(arg, read)

    def dtype_name(self, dtype: torch.dtype) -> str:
        """`compute` for the traced precision, else the dtype's own name."""
        if dtype == self.compute:
            return "compute"
        if dtype not in _DTYPES:
            raise MlxconvError(f"dtype {dtype} is not supported")
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

    def type_of(self, value: Any) -> Type:
        """`compute[batch, tokens, 64]` for a tensor, `int` for a size."""
        if isinstance(value, torch.Tensor):
            sizes = (str(n) if isinstance(n, int) else self.size_name(n) for n in value.shape)
            return Type(self.dtype_name(value.dtype), tuple(sizes))
        return INT if isinstance(value, (int, torch.SymInt)) else UNKNOWN

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
        return self.note(out, known.to(dtype)) if isinstance(known, torch.Tensor) else out

    def note(self, ref: Ref, value: Any) -> Ref:
        """`ref`, remembered to have the shape and dtype of the traced `value`."""
        self.meta[ref.name] = value
        return ref

    def cast_tensor(self, arg: Arg, dtype: torch.dtype) -> Arg:
        """`arg` in `dtype` where it is a tensor; a number stays a number."""
        return self.cast(arg, dtype) if isinstance(self.value(arg), torch.Tensor) else arg


def module_path(node: fx.Node | None) -> str:
    """Dotted path of the module that a node was traced in; empty for the root."""
    stack = (node.meta.get("nn_module_stack") if node is not None else None) or {}
    path = str(next(reversed(list(stack.values())))[0] if stack else "")
    if path.startswith("_empty_nn_module_stack"):  # what run_decompositions writes for the root
        return ""
    return path.removeprefix("L['self']").lstrip(".")


def call_number(node: fx.Node, path: str) -> int:
    """Which call of the module at `path` a node was traced in: torch writes `L__self__decoder@2`
    for the third."""
    stack = node.meta.get("nn_module_stack") or {}
    key = next((key for key, (found, _) in stack.items() if found == path), "")
    number = key.rpartition("@")[2]
    return int(number) if number.isdigit() else 0


def promoted(b: Builder, x: Arg, y: Arg) -> tuple[Arg, Arg]:
    """Both arguments, with PyTorch's promotion made explicit where MLX's differs.

    A 0-d tensor takes the dtype of the other operand within its category (bf16 plus a 0-d fp32
    is bf16); MLX does not tell it from other arrays.
    """
    known = [b.value(a) for a in (x, y)]
    tensors = [v for v in known if isinstance(v, torch.Tensor)]
    if len(tensors) < 2 or (tensors[0].ndim == 0) == (tensors[1].ndim == 0):
        return x, y
    target = torch.result_type(*tensors)
    first, second = (b.cast(a, target) if v.ndim == 0 else a for a, v in zip((x, y), known))
    return first, second


def is_bool(b: Builder, arg: Arg) -> bool:
    """Whether an argument is a boolean tensor."""
    value = b.value(arg)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def is_floating(b: Builder, arg: Arg) -> bool:
    """Whether an argument is a tensor of real or complex floating point numbers."""
    value = b.value(arg)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def shape_of(b: Builder, x: Arg) -> tuple[Arg, ...]:
    """The shape of a value: literal sizes where the trace knows them, `dim` nodes elsewhere."""
    return tuple(size_of(b, x, axis) for axis in range(b.rank(x)))


def size_of(b: Builder, x: Arg, axis: int) -> Arg:
    """One size of a value: a literal where the trace knows it, else a `dim` node."""
    size = b.value(x).shape[axis]
    return size if isinstance(size, int) else b.note(b.emit("dim", x=x, axis=axis), size)


def per_axis(value: Arg, axes: int) -> tuple[Arg, ...]:
    """`value` as one setting an axis; a single one serves all."""
    values = value if isinstance(value, tuple) else (value,)
    return values * axes if len(values) == 1 else values


def int_per_axis(value: Arg, axes: int) -> tuple[int, ...]:
    """`per_axis` of settings that the trace knows as integers."""
    values = per_axis(value, axes)
    if not all(isinstance(v, int) for v in values):
        raise MlxconvError(f"expected integers, found {value!r}")
    return tuple(v for v in values if isinstance(v, int))


def plus(b: Builder, size: Arg, more: Arg) -> Arg:
    """The sum of two sizes."""
    return _size(b, "add", operator.add, size, more)


def times(b: Builder, size: Arg, factor: Arg) -> Arg:
    """The product of two sizes."""
    return _size(b, "mul", operator.mul, size, factor)


def over(b: Builder, size: Arg, divisor: int) -> Arg:
    """A size divided by an integer, rounded down."""
    return _size(b, "floor_div", operator.floordiv, size, divisor)


def _size(b: Builder, op: str, compute: Callable[[Any, Any], Any], x: Arg, y: Arg) -> Arg:
    """A number where both are, else a node that is known to give a size."""
    known = [b.value(size) for size in (x, y)]
    value = None if any(size is None for size in known) else compute(*known)
    return value if isinstance(value, int) else b.note(b.emit(op, a=x, b=y), value)


def out_dtype(b: Builder) -> str:
    """The name of the current result's dtype."""
    return b.dtype_name(b.result.dtype)
