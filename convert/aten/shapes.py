"""Rows: views, joining, repeating, padding and rearranging."""

from collections.abc import Sequence

import torch

from mlxconv.runtime.program import Arg

from .builder import Builder, lowers, minus, per_axis, shape_of, size_of, target_name, times


@lowers("reshape", "view", "_unsafe_view", "view_copy", "_reshape_copy")
def _reshape(b: Builder, x: Arg, shape: Arg) -> Arg:
    if isinstance(b.result, torch.Tensor) and not isinstance(shape, tuple):
        return b.cast(x, b.result.dtype)  # view.dtype between equal sizes
    return b.emit("reshape", x=x, shape=shape)


@lowers("reshape_as", "view_as", "expand_as")
def _like(b: Builder, x: Arg, other: Arg) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    op = "broadcast" if name.startswith("expand") else "reshape"
    return b.emit(op, x=x, shape=shape_of(b, other))


@lowers("flatten")
def _flatten(b: Builder, x: Arg, start: int = 0, end: int = -1) -> Arg:
    rank = b.rank(x)
    if rank == 0:
        return b.emit("reshape", x=x, shape=(1,))
    start, end = start % rank, end % rank
    if start == end:
        return x
    shape = shape_of(b, x)
    return b.emit("reshape", x=x, shape=(*shape[:start], -1, *shape[end + 1 :]))


@lowers("unflatten")
def _unflatten(b: Builder, x: Arg, dim: int, sizes: Arg) -> Arg:
    dim %= b.rank(x)
    shape = shape_of(b, x)
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
    return b.emit("roll", x=x, shifts=per_axis(shifts, 1), axes=per_axis(dims, 1))


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


@lowers("meshgrid")
def _meshgrid(b: Builder, xs: Sequence[Arg], *, indexing: str = "ij") -> Arg:
    count = len(xs)
    order = list(range(count))
    if indexing == "xy" and count > 1:
        order[0], order[1] = 1, 0
    flat = [x if b.rank(x) else b.emit("reshape", x=x, shape=(1,)) for x in xs]
    sizes: list[Arg] = [1] * count
    for x, axis in zip(flat, order):
        sizes[axis] = shape_of(b, x)[0] if b.rank(x) else 1
    grids = []
    for x, axis in zip(flat, order):
        shape = tuple(-1 if i == axis else 1 for i in range(count))
        column = b.emit("reshape", x=x, shape=shape)
        grids.append(b.emit("broadcast", x=column, shape=tuple(sizes)))
    return tuple(grids)


@lowers("pixel_shuffle")
def _pixel_shuffle(b: Builder, x: Arg, factor: int) -> Arg:
    *lead, channels, height, width = shape_of(b, x)
    n, r = len(lead), factor
    y = b.emit("reshape", x=x, shape=(*lead, channels // (r * r), r, r, height, width))  # type: ignore[operator]
    y = b.emit("transpose", x=y, axes=(*range(n), n, n + 3, n + 1, n + 4, n + 2))
    shape = (*lead, channels // (r * r), times(b, height, r), times(b, width, r))  # type: ignore[operator]
    return b.emit("reshape", x=y, shape=shape)


@lowers("pixel_unshuffle")
def _pixel_unshuffle(b: Builder, x: Arg, factor: int) -> Arg:
    *lead, channels, height, width = shape_of(b, x)
    n, r = len(lead), factor
    small = [b.emit("floor_div", a=size, b=r) for size in (height, width)]
    y = b.emit("reshape", x=x, shape=(*lead, channels, small[0], r, small[1], r))
    y = b.emit("transpose", x=y, axes=(*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return b.emit("reshape", x=y, shape=(*lead, channels * r * r, small[0], small[1]))  # type: ignore[operator]


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
    count = size_of(b, x, dim)
    starts = b.emit("arange", start=0, stop=minus(b, count, size - 1), step=step, dtype="int32")
    offsets = b.emit("arange", start=0, stop=size, step=1, dtype="int32")
    column = b.emit("expand_dims", x=starts, axis=-1)
    windows = b.emit("take", x=x, index=b.emit("add", a=column, b=offsets), axis=dim)
    axes = [a for a in range(rank + 1) if a != dim + 1]
    return b.emit("transpose", x=windows, axes=(*axes, dim + 1))
