"""Ways of computing the same that the field disagrees on: what `bench --ablate` puts in for an op.

Each is a change to one process: it edits the table of ops, or the component's program. Nothing
here runs in a generation.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx

from ..bundle import LoadedComponent
from ..errors import MlxconvError
from ..exec.executor import Executor
from ..ops import OPS, elementwise
from ..ops.norms import _per_half
from ..program.program import Arg, Block, Body, Entry, Node, Program, refs
from ..program.types import UNKNOWN

_Body = TypeVar("_Body", bound=Body)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> mx.array:
    """Two products and a softmax; q (..., heads, tokens, width), as the op `attention`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if k.shape[-3] != q.shape[-3]:
        k, v = (mx.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = (q * scale) @ mx.swapaxes(k, -1, -2)
    if causal:
        mask = mx.tri(q.shape[-2], k.shape[-2], dtype=mx.float32) > 0
    if mask is not None and mask.dtype == mx.bool_:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    elif mask is not None:
        scores = scores + mask
    return mx.softmax(scores, axis=-1, precise=True) @ v


def rms_norm(x: mx.array, weight: mx.array | None = None, eps: float = 1e-6) -> mx.array:
    """As the op `rms_norm`, written out in fp32."""
    wide = x.astype(mx.float32)
    y = (wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return y if weight is None else y * weight


def modulated_norm(
    x: mx.array, scale: mx.array, shift: mx.array | None = None, eps: float = 1e-5
) -> mx.array:
    """As the op `modulated_norm`: mean and variance written out, then scale, then shift."""
    wide = x.astype(mx.float32)
    centred = wide - mx.mean(wide, axis=-1, keepdims=True)
    y = centred * mx.rsqrt(mx.mean(mx.square(centred), axis=-1, keepdims=True) + eps)
    y = y.astype(x.dtype) * scale
    return y if shift is None else y + shift


def rotary(x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool) -> mx.array:
    """As the op `rotary`, the way diffusers writes it: x cos + rotated(x) sin, full width."""
    half = x.shape[-1] // 2
    if interleaved:
        ca, cb, sa, sb = _per_half(cos, sin, half, slice(0, None, 2), slice(1, None, 2))
        pairs = x.reshape(*x.shape[:-1], half, 2)
        turned = mx.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
        wide = (*ca.shape[:-1], x.shape[-1])
        c = mx.stack([ca, cb], axis=-1).reshape(wide)
        s = mx.stack([sa, sb], axis=-1).reshape(wide)
    else:
        ca, cb, sa, sb = _per_half(cos, sin, half, slice(0, half), slice(half, None))
        turned = mx.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        c, s = mx.concatenate([ca, cb], axis=-1), mx.concatenate([sa, sb], axis=-1)
    return x * c + turned * s


MANUAL: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "rms_norm": rms_norm,
    "modulated_norm": modulated_norm,
    "rotary": rotary,
}
ELEMENTWISE = sorted(
    name for name, function in OPS.items() if function.__module__ == elementwise.__name__
)
CHANGES = (*MANUAL, "linears", "elementwise")


def apply_change(component: LoadedComponent, change: str) -> LoadedComponent:
    """The component with one of `CHANGES`; the op set's are for the rest of the process.

    An op's name: written out by hand. `linears`: products over one input stay apart.
    `elementwise`: each such op is compiled for itself.
    """
    if change in MANUAL:
        OPS[change] = MANUAL[change]
        return component
    if change == "elementwise":
        OPS.update({name: compiled(OPS[name]) for name in ELEMENTWISE})
        return component
    if change == "linears":
        return _with_program(component, apart(component.program))
    raise MlxconvError(f"unknown change {change!r}; known: {', '.join(CHANGES)}")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The op under `mx.compile` where its arguments are arrays and numbers; sizes stay as is."""
    made: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(function)
    def call(**args: Any) -> Any:
        arrays = {k: v for k, v in args.items() if isinstance(v, mx.array)}
        others = {k: v for k, v in args.items() if k not in arrays}
        if not arrays:
            return function(**args)
        key = (tuple(arrays), repr(others))
        if key not in made:
            made[key] = mx.compile(lambda *values: function(**dict(zip(arrays, values)), **others))
        return made[key](*arrays.values())

    return call


def uses(program: Program, change: str) -> bool:
    """Whether a change would change anything."""
    ops = {node.op for body in program.bodies() for node in body.nodes}
    return bool(ops & set(ELEMENTWISE)) if change == "elementwise" else change in ops


# ---- programs -----------------------------------------------------------------------------------


def apart(program: Program) -> Program:
    """The program with each `linears` as one `linear` a weight."""
    blocks = {name: _apart(block) for name, block in program.blocks.items()}
    return replace(program, entries=[_apart(e) for e in program.entries], blocks=blocks)


def _apart(body: _Body) -> _Body:
    nodes = [new for node in body.nodes for new in _separate(node)]
    return replace(body, nodes=nodes)


def _separate(node: Node) -> list[Node]:
    if node.op != "linears":
        return [node]
    held, biases = node.args["weights"], node.args["biases"]
    assert isinstance(held, tuple)
    assert isinstance(biases, tuple)
    types = node.types or (UNKNOWN,) * len(node.out)
    made = []
    for out, type_, weight, bias in zip(node.out, types, held, biases, strict=True):
        args: dict[str, Arg] = {"x": node.args["x"], "weight": weight, "bias": bias}
        made.append(Node("linear", (out,), args, node.module, (type_,)))
    return made


def with_ids_in_the_loop(component: LoadedComponent) -> LoadedComponent:
    """The component whose rotary tables are computed at each step: their inputs are the step's."""
    program = component.program
    entries = []
    for entry in program.entries:
        ids = table_inputs(program, entry)
        inputs = tuple(replace(i, stage="step") if i.name in ids else i for i in entry.inputs)
        entries.append(replace(entry, inputs=inputs))
    return _with_program(component, replace(program, entries=entries))


def table_inputs(program: Program, entry: Entry) -> set[str]:
    """The inputs that decide rotary tables alone: positions, from which cos and sin are made."""
    made = {out: node for node in entry.nodes for out in node.out}
    tables = _rotary_arguments(program, entry)
    seen: set[str] = set()
    todo = list(tables)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += refs(made[name].args.values()) if name in made else ()
    return {i.name for i in entry.inputs if i.name in seen and i.stage == "prompt"}


def _rotary_arguments(program: Program, body: Body) -> set[str]:
    """Values of a body, its inputs too, that become a `rotary`'s cos or sin, here or in blocks."""
    found: set[str] = set()
    for node in body.nodes:
        if node.op == "rotary":
            found.update(refs([node.args["cos"], node.args["sin"]]))
        elif node.op == "call":
            block = program.blocks[str(node.args["block"])]
            given = node.args["inputs"]
            assert isinstance(given, tuple)
            inner = _reached(block, _rotary_arguments(program, block))
            for name, arg in zip(block.inputs, given, strict=True):
                found.update(refs([arg]) if name in inner else ())
    return found


def _reached(block: Block, names: set[str]) -> set[str]:
    """Inputs of a block from which these of its values are made."""
    found = set(names)
    for node in reversed(block.nodes):
        if found & set(node.out) and node.op != "call":
            found.update(refs(node.args.values()))
    return found & set(block.inputs)


def _with_program(component: LoadedComponent, program: Program) -> LoadedComponent:
    old = component.executor
    executor = Executor(program, old.weights.again(resident=True), compile=old.compile)
    return LoadedComponent(component.path, component.config, executor)
