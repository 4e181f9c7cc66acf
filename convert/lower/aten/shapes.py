"""Rows: views, joining, repeating and padding."""

import functools
from collections.abc import Sequence

from mlxconv.runtime.program.program import Arg, Ref

from .builder import TABLE, Builder, Lowering, lowers, per_axis, shape_of, size_of, times

# ---- views --------------------------------------------------------------------------------------


@lowers("view", "_unsafe_view", "reshape")
def _reshape(b: Builder, x: Arg, shape: Sequence[Arg]) -> Arg:
    """A -1 is written out where the trace knows the size: MLX cannot infer it for no elements."""
    result = b.result.shape
    sizes = tuple(r if n == -1 and isinstance(r, int) else n for n, r in zip(shape, result))
    return b.emit("reshape", x=x, shape=sizes)


@lowers("view_as", "reshape_as")
def _reshape_as(b: Builder, x: Arg, other: Arg) -> Arg:
    return b.emit("reshape", x=x, shape=shape_of(b, other))


@lowers("flatten.using_ints")
def _flatten(b: Builder, x: Arg, start: int = 0, end: int = -1) -> Arg:
    rank = b.rank(x)
    if rank == 0:
        return b.emit("reshape", x=x, shape=(1,))
    start, end = start % rank, end % rank
    sizes = shape_of(b, x)
    merged = functools.reduce(lambda a, c: times(b, a, c), sizes[start : end + 1])
    return b.emit("reshape", x=x, shape=(*sizes[:start], merged, *sizes[end + 1 :]))


@lowers("unflatten.int")
def _unflatten(b: Builder, x: Arg, dim: int, parts: Sequence[Arg]) -> Arg:
    """A -1 among the parts stands where only one of them is not known."""
    dim %= b.rank(x)
    known = b.result.shape[dim:]
    parts = tuple(r if n == -1 and isinstance(r, int) else n for n, r in zip(parts, known))
    sizes = shape_of(b, x)
    return b.emit("reshape", x=x, shape=(*sizes[:dim], *parts, *sizes[dim + 1 :]))


@lowers("expand", "broadcast_to")
def _expand(b: Builder, x: Arg, shape: Arg, *, implicit: bool = False) -> Arg:
    return b.emit("broadcast", x=x, shape=shape)


@lowers("expand_as")
def _expand_as(b: Builder, x: Arg, other: Arg) -> Arg:
    return b.emit("broadcast", x=x, shape=shape_of(b, other))


@lowers("broadcast_tensors")
def _broadcast_tensors(b: Builder, xs: Sequence[Arg]) -> Arg:
    rank = max(b.rank(x) for x in xs)
    shape: list[Arg] = [1] * rank
    for x in xs:
        for i, size in enumerate(b.value(x).shape, rank - b.rank(x)):
            if not (isinstance(size, int) and size == 1):
                shape[i] = size_of(b, x, i - rank + b.rank(x))
    return tuple(b.emit("broadcast", x=x, shape=tuple(shape)) for x in xs)


@lowers("permute")
def _permute(b: Builder, x: Arg, axes: Arg) -> Arg:
    return b.emit("transpose", x=x, axes=axes)


@lowers("transpose", "swapaxes")
def _transpose(b: Builder, x: Arg, first: int, second: int) -> Arg:
    axes = list(range(b.rank(x)))
    if not axes:
        return x
    axes[first], axes[second] = axes[second], axes[first]
    return b.emit("transpose", x=x, axes=tuple(axes))


@lowers("movedim.int")
def _movedim(b: Builder, x: Arg, source: int, target: int) -> Arg:
    axes = list(range(b.rank(x)))
    axes.insert(target % len(axes), axes.pop(source))
    return b.emit("transpose", x=x, axes=tuple(axes))


@lowers("mT")
def _matrix_transpose(b: Builder, x: Arg) -> Arg:
    return _transpose(b, x, -2, -1)


@lowers("numpy_T")
def _reversed(b: Builder, x: Arg) -> Arg:
    return b.emit("transpose", x=x, axes=tuple(reversed(range(b.rank(x)))))


@lowers("t")
def _t(b: Builder, x: Arg) -> Arg:
    return x if b.rank(x) < 2 else _transpose(b, x, 0, 1)


@lowers("unsqueeze")
def _unsqueeze(b: Builder, x: Arg, dim: int) -> Arg:
    return b.emit("expand_dims", x=x, axis=dim)


@lowers("squeeze")
def _squeeze(b: Builder, x: Arg, dim: Arg = None) -> Arg:
    """What the trace squeezed, by axis: a symbolic axis that happens to be 1 is kept."""
    sizes = b.value(x).shape
    asked = range(len(sizes)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    axes = sorted({int(a) % len(sizes) for a in asked if isinstance(a, int) and sizes})
    ones = tuple(a for a in axes if isinstance(n := sizes[a], int) and n == 1)
    return b.emit("squeeze", x=x, axes=ones) if ones else x


@lowers("diagonal")
def _diagonal(b: Builder, x: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Arg:
    return b.emit("diagonal", x=x, offset=offset, axis1=dim1, axis2=dim2)


# ---- joining ------------------------------------------------------------------------------------


def _joined(b: Builder, xs: Sequence[Arg], axis: int) -> Ref:
    parts = tuple(b.cast(x, b.result.dtype) for x in xs)
    return b.emit("concat", xs=parts, axis=axis)


@lowers("cat", "concat", "concatenate")
def _cat(b: Builder, xs: Sequence[Arg], dim: int = 0) -> Arg:
    return _joined(b, xs, dim)


@lowers("stack")
def _stack(b: Builder, xs: Sequence[Arg], dim: int = 0) -> Arg:
    parts = tuple(b.cast(x, b.result.dtype) for x in xs)
    return b.emit("stack", xs=parts, axis=dim)


@lowers("hstack")
def _hstack(b: Builder, xs: Sequence[Arg]) -> Arg:
    return _joined(b, [_at_least(b, x, 1) for x in xs], 0 if b.rank(xs[0]) < 2 else 1)


@lowers("vstack")
def _vstack(b: Builder, xs: Sequence[Arg]) -> Arg:
    return _joined(b, [_at_least(b, x, 2) for x in xs], 0)


@lowers("dstack")
def _dstack(b: Builder, xs: Sequence[Arg]) -> Arg:
    return _joined(b, [_at_least(b, x, 3) for x in xs], 2)


def _at_least(b: Builder, x: Arg, rank: int) -> Arg:
    """x with as many axes as PyTorch's `atleast_1d`, `_2d`, `_3d` give it."""
    value = b.value(x)
    if value.ndim == 0:
        shape: tuple[Arg, ...] = (1,) * rank
    elif value.ndim == 1 and rank > 1:
        shape = (1, -1, 1)[:rank]
    elif value.ndim == 2 and rank > 2:
        shape = (*shape_of(b, x), 1)
    else:
        return x
    return b.note(b.emit("reshape", x=x, shape=shape), value)


@lowers("pad_sequence")
def _pad_sequence(
    b: Builder,
    xs: Sequence[Arg],
    batch_first: bool = False,
    value: float = 0.0,
    side: str = "right",
) -> Arg:
    sizes = [size_of(b, x, 0) for x in xs]
    longest = sizes[0]
    for size in sizes[1:]:
        longest = b.emit("maximum", a=longest, b=size)
    rows = []
    for x, size in zip(xs, sizes):
        short: Arg = 0 if len(sizes) == 1 else b.emit("sub", a=longest, b=size)
        widths = ((0, short) if side == "right" else (short, 0), *[(0, 0)] * (b.rank(x) - 1))
        rows.append(b.emit("pad", x=x, widths=widths, mode="constant", value=value))
    return b.emit("stack", xs=tuple(rows), axis=0 if batch_first else 1)


# ---- repeating and reordering -------------------------------------------------------------------


@lowers("repeat", "tile")
def _tile(b: Builder, x: Arg, repeats: Arg) -> Arg:
    return b.emit("tile", x=x, repeats=repeats)


@lowers("repeat_interleave.self_int")
def _repeat_interleave(
    b: Builder, x: Arg, repeats: Arg, dim: Arg = None, *, output_size: Arg = None
) -> Arg:
    return b.emit("repeat", x=x, repeats=repeats, axis=dim)


@lowers("repeat_interleave.self_Tensor")
def _repeat_each(
    b: Builder, x: Arg, counts: Arg, dim: Arg = None, *, output_size: Arg = None
) -> Arg:
    return b.emit("repeat_each", x=x, counts=counts, axis=dim)


@lowers("flip")
def _flip(b: Builder, x: Arg, dims: Arg) -> Arg:
    return b.emit("flip", x=x, axes=dims)


def _flip_of(axis: int) -> Lowering:
    def row(b: Builder, x: Arg) -> Arg:
        return b.emit("flip", x=x, axes=(axis,))

    return row


TABLE["flipud"], TABLE["fliplr"] = _flip_of(0), _flip_of(1)


@lowers("rot90")
def _rot90(b: Builder, x: Arg, k: int = 1, dims: tuple[int, int] = (0, 1)) -> Arg:
    first, second = dims
    if k % 4 == 0:
        return x
    if k % 4 == 2:
        return b.emit("flip", x=x, axes=dims)
    flipped = b.emit("flip", x=x, axes=(second if k % 4 == 1 else first,))
    return _transpose(b, b.note(flipped, b.value(x)), first, second)


@lowers("roll")
def _roll(b: Builder, x: Arg, shifts: Arg, dims: Arg = ()) -> Arg:
    return b.emit("roll", x=x, shifts=per_axis(shifts, 1), axes=per_axis(dims, 1) if dims else ())


@lowers("pad", "constant_pad_nd")
def _pad(
    b: Builder, x: Arg, widths: Sequence[Arg], mode: Arg = "constant", value: Arg = None
) -> Arg:
    """`F.pad` names its pairs from the last axis backwards."""
    if not isinstance(mode, str):  # constant_pad_nd(x, widths, value)
        mode, value = "constant", mode
    pairs: list[Arg] = [(0, 0)] * b.rank(x)
    for i in range(len(widths) // 2):
        pairs[-1 - i] = (widths[2 * i], widths[2 * i + 1])
    return b.emit("pad", x=x, widths=tuple(pairs), mode=mode, value=value or 0)


@lowers("meshgrid")
def _meshgrid(b: Builder, xs: Sequence[Arg], *, indexing: str = "ij") -> Arg:
    order = list(range(len(xs)))
    if indexing == "xy" and len(xs) > 1:
        order[0], order[1] = 1, 0
    sizes: list[Arg] = [1] * len(xs)
    for x, axis in zip(xs, order):
        sizes[axis] = size_of(b, x, 0) if b.rank(x) else 1
    grids = []
    for x, axis in zip(xs, order):
        column = tuple(-1 if i == axis else 1 for i in range(len(xs)))
        line = b.emit("reshape", x=x, shape=column)
        grids.append(b.emit("broadcast", x=line, shape=tuple(sizes)))
    return tuple(grids)


def _triangle(op: str) -> Lowering:
    def row(b: Builder, x: Arg, diagonal: int = 0) -> Arg:
        return b.emit(op, x=x, k=diagonal)

    return row


TABLE["triu"], TABLE["tril"] = _triangle("triu"), _triangle("tril")


@lowers("diff")
def _diff(
    b: Builder, x: Arg, n: int = 1, dim: int = -1, prepend: Arg = None, append: Arg = None
) -> Arg:
    ends = tuple(e for e in (prepend, x, append) if e is not None)
    y = x if len(ends) == 1 else b.emit("concat", xs=ends, axis=dim)
    for _ in range(n):
        after = b.emit("slice", x=y, axis=dim, start=1, stop=None, step=1)
        y = b.emit("sub", a=after, b=b.emit("slice", x=y, axis=dim, start=0, stop=-1, step=1))
    return y
