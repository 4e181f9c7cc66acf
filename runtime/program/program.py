"""A program: a component's forward pass as MLX operations, as data.

A node applies one op of the closed set in `ops.py`. Its arguments are values (`Ref`), weights
(`Weight`), Python literals, or tuples of these. Repeated modules are written once, as a `Block`,
and called with a weight prefix. Sizes are plain integers that flow like any other value.

`stored` reads and writes it as JSON.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import MlxconvError
from .expressions import axes_in
from .types import Type

FORMAT = "mlxconv-program"
VERSION = 2
PROGRAM_FILE = "program.json"
CONSTANTS_FILE = "constants.safetensors"
STAGES = ("constant", "prompt", "schedule", "step")

# A bundle may come from anywhere: what it asks for is bounded, fifty times above the largest
# program traced (2,209 nodes).
MAX_NODES = 100_000  # as written
MAX_RUN = 500_000  # as run, each block as often as it is called
MAX_DEPTH = 16  # of an argument, tuples within tuples
MAX_INT = 2**63
MAX_TEXT = 1000  # of an assumption


@dataclass(frozen=True, slots=True)
class Ref:
    """A value computed earlier in the same body, or one of its inputs."""

    name: str


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the weight files. Inside a block the name is relative to the call's prefix."""

    name: str


Leaf = None | bool | int | float | str | Ref | Weight
Arg: TypeAlias = "Leaf | tuple[Arg, ...]"


@dataclass(slots=True)
class Node:
    """`out = op(**args)`; `module` is the path of the module traced, `types` are one per output."""

    op: str
    out: tuple[str, ...]
    args: dict[str, Arg]
    module: str = ""
    types: tuple[Type, ...] = ()


@dataclass(slots=True)
class Body:
    """Nodes in order. `taps` names the values that are each module's outputs, by module path."""

    nodes: list[Node]
    outputs: tuple[Arg, ...]
    taps: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Block(Body):
    """A body shared by several modules; `inputs` are bound by position at each call."""

    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Input:
    """An input of an entry: the dotted path of its keyword (`img_shapes.0.0.1`), type and stage.

    `kinds`: "any" where the class casts booleans, integers and floats before it computes with them,
    so that equal numbers do the same; "count" where booleans and integers do; else "own".
    """

    name: str
    path: str
    type: Type
    stage: str = "step"
    kinds: str = "own"


@dataclass(slots=True)
class Entry(Body):
    """One traced method (`forward`, `decode`, ...), for any size or for the fixed `sizes` named.

    `arguments`: what the method takes by position, in its order, whether traced or not.
    `literals`: what the trace took other arguments to be, by path; of an input, the number that
    fills it, or what its largest element is {"below": n} or {"reaches": n}.
    `assumptions`: conditions on the sizes of inputs that the trace decided, by input name and axis:
    `hidden_states[1] > 4`.
    """

    name: str = "forward"
    inputs: tuple[Input, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    literals: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def axes(self) -> frozenset[tuple[str, int]]:
        """What the assumptions are about: inputs, by path, and the axes read of them."""
        paths = {item.name: item.path for item in self.inputs}
        read = (axis for text in self.assumptions for axis in axes_in(text))
        return frozenset((paths[name], axis) for name, axis in read)


def stored_axes(kind: str, rank: int) -> tuple[int, ...]:
    """PyTorch's axis at each axis of a stored weight: convolutions are channels-last."""
    if rank < 2 or kind not in ("conv", "conv_transpose"):
        return tuple(range(rank))
    out, channels = (0, 1) if kind == "conv" else (1, 0)
    return (out, *range(2, rank), channels)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight the program reads. `shape` is PyTorch's; `dtype` is `compute` or a dtype's name.

    `kind` says how it is stored: `linear` (out, in), may be quantized; `conv` channels-last
    (out, *kernel, in); `conv_transpose` (in, out, *kernel) as (out, *kernel, in); `other` as is.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the bundle: convolutions are channels-last (out, *kernel, in)."""
        return tuple(self.shape[axis] for axis in stored_axes(self.kind, len(self.shape)))


@dataclass(slots=True)
class Program:
    """All entries of one component, the blocks they share, and the weights they read."""

    class_name: str
    entries: list[Entry]
    blocks: dict[str, Block] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)

    def entry(self, name: str, sizes: Mapping[str, int] | None = None) -> Entry:
        """The entry `name` whose fixed sizes agree with `sizes`; MlxconvError lists what exists."""
        named = [e for e in self.entries if e.name == name]
        if not named:
            have = ", ".join(sorted({e.name for e in self.entries}))
            raise MlxconvError(f"{self.class_name}: no program named {name!r}; it has: {have}")
        for entry in named:
            if all((sizes or {}).get(k, v) == v for k, v in entry.sizes.items()):
                return entry
        have = "; ".join(str(e.sizes) for e in named)
        dims = " ".join(f"--dim {k}={v}" for k, v in (sizes or {}).items() if k in named[0].sizes)
        raise MlxconvError(
            f"{self.class_name}: no program for {dict(sizes or {})}; it has: {have}. "
            f"Add one with `mlxconv add-size BUNDLE --component NAME {dims}`."
        )

    def bodies(self) -> Iterator[Body]:
        """Every body: entries first, then blocks."""
        yield from self.entries
        yield from self.blocks.values()

    def count_nodes(self) -> int:
        """Nodes as written (each block once)."""
        return sum(len(body.nodes) for body in self.bodies())


def walk(arg: Arg) -> Iterator[Arg]:
    """`arg` and everything inside it."""
    yield arg
    if isinstance(arg, tuple):
        for item in arg:
            yield from walk(item)


def refs(args: Iterable[Arg]) -> Iterator[str]:
    """Names of the values that `args` read."""
    for arg in args:
        for item in walk(arg):
            if isinstance(item, Ref):
                yield item.name


def weights(args: Iterable[Arg]) -> Iterator[str]:
    """Names of the weights that `args` read."""
    for arg in args:
        for item in walk(arg):
            if isinstance(item, Weight):
                yield item.name


def latest_stage(args: Iterable[Arg], stages: Mapping[str, int]) -> int:
    """When all of the arguments are known, by index into `STAGES`."""
    return max((stages.get(name, 0) for name in refs(args)), default=0)


def substitute(arg: Arg, replace: Callable[[Ref | Weight], Arg]) -> Arg:
    """`arg` with every Ref and Weight replaced by what `replace` gives for it."""
    if isinstance(arg, tuple):
        return tuple(substitute(item, replace) for item in arg)
    if isinstance(arg, (Ref, Weight)):
        return replace(arg)
    return arg
