"""Tensors cut into strips of rows, and what each op does with them: nothing is approximated.

A convolution takes the rows that it needs of the strips around, a group norm its mean and variance
of all strips (Chan, Golub and LeVeque 1983); most other ops go strip by strip. A rule that gives
None has to see the tensor whole.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ..ops import OPS

_SEQUENCES = (list, tuple)  # of values: a stack of weights is neither
Rule = Callable[[dict[str, Any], "Strips"], Any]


@dataclass(frozen=True)
class Strips:
    """A tensor cut along one axis, the first part on top."""

    parts: tuple[mx.array, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.parts[0].ndim

    @property
    def dtype(self) -> mx.Dtype:
        return self.parts[0].dtype

    @property
    def bounds(self) -> list[int]:
        """Where the parts begin, and where the last one ends."""
        found = [0]
        for part in self.parts:
            found.append(found[-1] + part.shape[self.axis])
        return found

    def whole(self) -> mx.array:
        """The tensor in one."""
        return mx.concatenate(list(self.parts), axis=self.axis)

    def rows(self, low: int, high: int) -> mx.array:
        """Rows `low` to `high`, of whatever parts they are in."""
        found = []
        for part, (first, last) in zip(self.parts, pairwise(self.bounds)):
            if first < high and low < last:
                own = max(low, first) - first, min(high, last) - first
                found.append(_rows(part, self.axis, *own))
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=self.axis)

    def cut(self, bounds: Sequence[int]) -> "Strips":
        """The same at other bounds."""
        if list(bounds) == self.bounds:
            return self
        return Strips(tuple(self.rows(a, b) for a, b in pairwise(bounds)), self.axis)


def _rows(x: mx.array, axis: int, low: int, high: int) -> mx.array:
    if (low, high) == (0, x.shape[axis]):
        return x
    return x[(slice(None),) * axis + (slice(low, high),)]


def evenly(rows: int, count: int) -> list[int]:
    """Bounds of `count` strips, none empty."""
    count = max(1, min(count, rows))
    return [rows * i // count for i in range(count + 1)]


def evaluate(made: Any) -> None:
    """Evaluate strips one after the other, so that what each needed is gone before the next."""
    if isinstance(made, Strips):
        for part in made.parts:
            mx.eval(part)


def cut(x: Any, axis: int, bounds: Sequence[int]) -> Strips:
    """A tensor, or strips of it, at these bounds."""
    return (x if isinstance(x, Strips) else Strips((x,), axis)).cut(bounds)


def whole(value: Any) -> Any:
    """The value without strips, also within a list."""
    if type(value) in _SEQUENCES:
        return [whole(item) for item in value]
    return value.whole() if isinstance(value, Strips) else value


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, also those within lists."""
    for value in values:
        if type(value) in _SEQUENCES:
            yield from flat(value)
        else:
            yield value


# ---- rules: an op on strips; None where it has to see the whole ----------------------------------


def _each(op: str, args: Mapping[str, Any], strips: Strips, axis: int | None = None) -> Any:
    """The op on each strip; other values in strips are cut alike. axis: of the rows behind it."""

    alike = {key: _aligned(value, strips.bounds) for key, value in args.items()}
    made = [
        OPS[op](**{key: _part(value, number) for key, value in alike.items()})
        for number in range(len(strips.parts))
    ]
    behind = strips.axis if axis is None else axis
    if isinstance(made[0], list):
        return [Strips(tuple(column), behind) for column in zip(*made)]
    return Strips(tuple(made), behind)


def _aligned(value: Any, bounds: Sequence[int]) -> Any:
    if type(value) in _SEQUENCES:
        return [_aligned(item, bounds) for item in value]
    return value.cut(bounds) if isinstance(value, Strips) else value


def _part(value: Any, number: int) -> Any:
    if type(value) in _SEQUENCES:
        return [_part(item, number) for item in value]
    return value.parts[number] if isinstance(value, Strips) else value


def _pointwise(op: str) -> Rule:
    def rule(args: dict[str, Any], strips: Strips) -> Any:
        rows, behind = strips.shape[strips.axis], strips.ndim - strips.axis
        alike = {}
        for key, value in args.items():
            if isinstance(value, Strips):
                if value.ndim - value.axis != behind or value.shape[value.axis] != rows:
                    return None
            elif isinstance(value, mx.array) and value.ndim >= behind:
                if value.ndim > strips.ndim:
                    return None
                axis = value.ndim - behind
                if value.shape[axis] != 1:
                    value = Strips((value,), axis)
            alike[key] = value
        return _each(op, alike, strips)

    return rule


def _along(op: str, keys: Sequence[str]) -> Rule:
    """An op that works along the axes named by `keys`, and keeps the number of axes."""

    def rule(args: dict[str, Any], strips: Strips) -> Any:
        axes = next((args[key] for key in keys if args.get(key) is not None), None)
        if axes is None or (not args.get("keepdims", True)):
            return None
        axes = axes if isinstance(axes, (list, tuple)) else [axes]
        if strips.axis in {axis % strips.ndim for axis in axes}:
            return None
        return _each(op, args, strips)

    return rule


def _over_last(op: str) -> Rule:
    def rule(args: dict[str, Any], strips: Strips) -> Any:
        lone = sum(isinstance(v, Strips) for v in flat(args.values())) == 1
        return _each(op, args, strips) if lone and strips.axis < strips.ndim - 1 else None

    return rule


def _concat(args: dict[str, Any], strips: Strips) -> Any:
    alike = [x if isinstance(x, Strips) else Strips((x,), strips.axis) for x in args["xs"]]
    axis = args.get("axis", 0) % strips.ndim
    if axis == strips.axis or any(x.axis != strips.axis for x in alike):
        return None
    return _each("concat", {**args, "xs": alike}, strips)


def _transpose(args: dict[str, Any], strips: Strips) -> Any:
    axes = [axis % strips.ndim for axis in args["axes"]]
    return _each("transpose", args, strips, axes.index(strips.axis))


def _reshape(args: dict[str, Any], strips: Strips) -> Any:
    """Where the rows, and what is behind them, stay as they are."""
    old, new = list(strips.shape), [int(size) for size in args["shape"]]
    if -1 in new:
        new[new.index(-1)] = math.prod(old) // -math.prod(new)
    axis = len(new) - (len(old) - strips.axis)
    if axis < 0 or new[axis:] != old[strips.axis :]:
        return None
    return Strips(
        tuple(
            part.reshape(*new[:axis], part.shape[strips.axis], *new[axis + 1 :])
            for part in strips.parts
        ),
        axis,
    )


def _broadcast(args: dict[str, Any], strips: Strips) -> Any:
    sizes = [int(size) for size in args["shape"]]
    axis = len(sizes) - (strips.ndim - strips.axis)
    if sizes[axis] not in (-1, strips.shape[strips.axis]):
        return None
    sizes[axis] = -1
    return _each("broadcast", {**args, "shape": sizes}, strips, axis)


def _pad(args: dict[str, Any], strips: Strips) -> Any:
    widths = [tuple(pair) for pair in args["widths"]]
    before, after = widths[strips.axis]
    plain = args.get("mode", "constant") == "constant" and min(before, after) >= 0
    if (before or after) and not plain:
        return None
    parts, last = [], len(strips.parts) - 1
    for number, part in enumerate(strips.parts):
        own = list(widths)
        own[strips.axis] = (before if number == 0 else 0, after if number == last else 0)
        parts.append(OPS["pad"](**{**args, "x": part, "widths": own}))
    return Strips(tuple(parts), strips.axis)


def _upsample_nearest(args: dict[str, Any], strips: Strips) -> Any:
    sizes, scales = args.get("sizes"), args.get("scales") or ()
    count = len(scales if sizes is None else sizes)
    at, rows = strips.axis - (strips.ndim - count), strips.shape[strips.axis]
    if at < 0:
        return None
    factor = sizes[at] / rows if sizes is not None else scales[at]
    if factor != int(factor):
        return None
    parts = []
    for part in strips.parts:
        own = None if sizes is None else list(sizes)
        if own is not None:
            own[at] = part.shape[strips.axis] * int(factor)
        parts.append(OPS["upsample_nearest"](**{**args, "x": part, "sizes": own}))
    return Strips(tuple(parts), strips.axis)


def _conv(args: dict[str, Any], strips: Strips) -> Any:
    """Each strip with the rows that it needs of its neighbours, zeros beyond the border."""
    x, axis = args["x"], strips.axis
    if x is not strips or axis < 2:
        return None
    at, rows = axis - 2, strips.shape[axis]
    stride, dilation = args["stride"][at], args["dilation"][at]
    padding, reach = args["padding"][at], dilation * (args["weight"].shape[1 + at] - 1) + 1
    made = (rows + 2 * padding - reach) // stride + 1
    inner = [*args["padding"]]
    inner[at] = 0
    bounds = sorted({bound * made // rows for bound in strips.bounds})
    parts = []
    for low, high in pairwise(bounds):
        first, last = low * stride - padding, (high - 1) * stride - padding + reach
        part = strips.rows(max(first, 0), min(last, rows))
        if first < 0 or last > rows:
            widths = [(0, 0)] * part.ndim
            widths[axis] = (max(0, -first), max(0, last - rows))
            part = mx.pad(part, widths)
        parts.append(OPS["conv"](**{**args, "x": part, "padding": inner}))
    return Strips(tuple(parts), axis)


def _group_norm(args: dict[str, Any], strips: Strips) -> Any:
    """Mean and squared distances of each group, strip by strip, put together."""
    if strips.axis < 2:
        return None
    batch, channels, groups = *strips.shape[:2], args["groups"]
    evaluate(strips)
    counts, means, squares = [], [], []
    for part in strips.parts:
        flat = part.reshape(batch, groups, -1).astype(mx.float32)
        mean = OPS["mean"](flat, axis=-1, keepdims=True)
        square = OPS["sum"](mx.square(flat - mean), axis=-1, keepdims=True)
        mx.eval(mean, square)
        counts.append(flat.shape[-1])
        means.append(mean)
        squares.append(square)
    total = sum(counts)
    mean = _sum(m * (n / total) for m, n in zip(means, counts))
    apart = _sum(n * mx.square(m - mean) for m, n in zip(means, counts))
    scale = mx.rsqrt((_sum(squares) + apart) / total + args.get("eps", 1e-5))
    per_channel = (batch, channels) + (1,) * (strips.ndim - 2)

    def spread(value: mx.array) -> mx.array:
        return mx.repeat(value, channels // groups, axis=1).reshape(per_channel)

    mean, scale = spread(mean), spread(scale)
    weight, bias = args.get("weight"), args.get("bias")
    own = (1, *per_channel[1:])
    if weight is not None:
        scale = scale * weight.reshape(own)
    shift = mx.zeros(own) if bias is None else bias.reshape(own)
    parts = (((p.astype(mx.float32) - mean) * scale + shift).astype(p.dtype) for p in strips.parts)
    return Strips(tuple(parts), strips.axis)


def _sum(values: Iterable[mx.array]) -> mx.array:
    return reduce(operator.add, values)


_POINTWISE = (
    "abs",
    "add",
    "cast",
    "clip",
    "cos",
    "div",
    "elu",
    "exp",
    "gelu",
    "hard_swish",
    "leaky_relu",
    "maximum",
    "minimum",
    "mul",
    "neg",
    "pow",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "square",
    "sub",
    "tanh",
    "where",
)
RULES: dict[str, Rule] = {
    "broadcast": _broadcast,
    "concat": _concat,
    "conv": _conv,
    "group_norm": _group_norm,
    "pad": _pad,
    "reshape": _reshape,
    "transpose": _transpose,
    "upsample_nearest": _upsample_nearest,
    **{op: _pointwise(op) for op in _POINTWISE},
    **{op: _over_last(op) for op in ("layer_norm", "linear", "linears", "rms_norm")},
    **{
        op: _along(op, ("axis",))
        for op in (
            "chunk",
            "max",
            "mean",
            "min",
            "repeat",
            "slice",
            "softmax",
            "split",
            "split_every",
            "sum",
            "var",
        )
    },
}
RULES["dim"] = lambda args, strips: strips.shape[args["axis"]]
