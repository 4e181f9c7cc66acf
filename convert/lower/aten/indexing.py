"""Rows: slices, pieces, gathering and replacing by index."""

from collections.abc import Sequence

import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg, Ref

from .builder import TABLE, Builder, Lowering, is_bool, lowers, over, plus, shape_of, size_of

_END = 2**31  # PyTorch writes "to the end" as a huge stop

# ---- slices and pieces --------------------------------------------------------------------------


def _stop(end: Arg) -> Arg:
    return None if isinstance(end, int) and end >= _END else end


@lowers("slice")
def _slice(
    b: Builder, x: Arg, dim: int = 0, start: Arg = None, end: Arg = None, step: Arg = 1
) -> Arg:
    stop = _stop(end)
    if start in (None, 0) and stop is None and step == 1:
        return x
    return b.emit("slice", x=x, axis=dim, start=start, stop=stop, step=step)


@lowers("slice_scatter")
def _slice_scatter(
    b: Builder, x: Arg, source: Arg, dim: int = 0, start: Arg = None, end: Arg = None, step: Arg = 1
) -> Arg:
    return b.emit(
        "slice_update", x=x, update=source, axis=dim, start=start, stop=_stop(end), step=step
    )


@lowers("select")
def _select(b: Builder, x: Arg, dim: int, index: Arg) -> Arg:
    return b.emit("select", x=x, axis=dim, index=index)


@lowers("select_scatter")
def _select_scatter(b: Builder, x: Arg, source: Arg, dim: int, index: Arg) -> Arg:
    update = b.emit("expand_dims", x=source, axis=dim)
    stop = None if index == -1 else plus(b, index, 1)
    return b.emit("slice_update", x=x, update=update, axis=dim, start=index, stop=stop, step=1)


def _pieces(b: Builder, op: str, **args: Arg) -> Arg:
    return b.emit_many(op, len(b.result), **args)


@lowers("split", "split_with_sizes", "unsafe_split")
def _split(b: Builder, x: Arg, sizes: Arg, dim: int = 0) -> Arg:
    if isinstance(sizes, tuple):
        return _pieces(b, "split", x=x, sizes=sizes, axis=dim)
    return _pieces(b, "split_every", x=x, size=sizes, axis=dim)


@lowers("chunk", "unsafe_chunk")
def _chunk(b: Builder, x: Arg, count: int, dim: int = 0) -> Arg:
    size = over(b, plus(b, size_of(b, x, dim), count - 1), count)
    return _pieces(b, "split_every", x=x, size=size, axis=dim)


@lowers("unbind")
def _unbind(b: Builder, x: Arg, dim: int = 0) -> Arg:
    return _pieces(b, "unbind", x=x, axis=dim)


# ---- gathering ----------------------------------------------------------------------------------


@lowers("index_select")
def _index_select(b: Builder, x: Arg, dim: int, index: Arg) -> Arg:
    flat = index if b.rank(index) else b.emit("reshape", x=index, shape=(1,))
    return b.emit("take", x=x, index=flat, axis=dim)


@lowers("gather")
def _gather(b: Builder, x: Arg, dim: int, index: Arg, *, sparse_grad: bool = False) -> Arg:
    return b.emit("take_along", x=x, index=index, axis=dim)


@lowers("take_along_dim")
def _take_along_dim(b: Builder, x: Arg, index: Arg, dim: Arg = None) -> Arg:
    if not isinstance(dim, int):
        x, index = (b.emit("reshape", x=a, shape=(-1,)) for a in (x, index))
        return b.emit("take_along", x=x, index=index, axis=0)
    dim %= b.rank(x)
    x, index = _broadcast_except(b, x, index, dim), _broadcast_except(b, index, x, dim)
    return b.emit("take_along", x=x, index=index, axis=dim)


def _broadcast_except(b: Builder, x: Arg, other: Arg, dim: int) -> Arg:
    """x with its axes of size 1 as large as those of `other`, but for `dim`."""
    ones = [isinstance(n, int) and n == 1 for n in b.value(x).shape]
    shape = tuple(size_of(b, other, i) if one and i != dim else -1 for i, one in enumerate(ones))
    return x if set(shape) == {-1} else b.emit("broadcast", x=x, shape=shape)


def _refuse_masks(b: Builder, indices: Sequence[Arg]) -> None:
    if any(is_bool(b, i) for i in indices):
        raise MlxconvError(
            "indexing by a boolean mask has a data-dependent shape; pass no mask, or patch the "
            "method in the recipe"
        )


@lowers("nonzero")
def _nonzero(b: Builder, x: Arg) -> Arg:
    return b.emit("nonzero", x=x)


@lowers("index")
def _index(b: Builder, x: Arg, indices: Sequence[Arg]) -> Arg:
    _refuse_masks(b, indices)
    return b.emit("index", x=x, indices=tuple(indices))


# ---- replacing ----------------------------------------------------------------------------------


@lowers("index_put")
def _index_put(
    b: Builder, x: Arg, indices: Sequence[Arg], values: Arg, accumulate: bool = False
) -> Arg:
    mask = indices[0]
    if len(indices) == 1 and is_bool(b, mask) and not accumulate:
        return _mask_put(b, x, mask, values)
    _refuse_masks(b, indices)
    return _put(b, x, indices, values, accumulate)


def _mask_put(b: Builder, x: Arg, mask: Arg, values: Arg) -> Arg:
    """x[mask] = values, where all that is written has one shape: `where` with the mask widened."""
    trailing = b.rank(x) - b.rank(mask)
    if b.rank(values) > trailing:
        raise MlxconvError("a value for each element of a boolean mask is data-dependent")
    wide = b.emit("reshape", x=mask, shape=(*shape_of(b, mask), *[1] * trailing))
    return b.emit("where", condition=wide, a=b.cast_tensor(values, b.result.dtype), b=x)


def _put(b: Builder, x: Arg, indices: Sequence[Arg], values: Arg, accumulate: bool) -> Ref:
    return b.emit("index_put", x=x, indices=tuple(indices), values=values, accumulate=accumulate)


def _along(b: Builder, x: Arg, dim: int, index: Arg) -> tuple[Arg, ...]:
    return (*[None] * (dim % b.rank(x)), index)


@lowers("index_add")
def _index_add(b: Builder, x: Arg, dim: int, index: Arg, source: Arg, *, alpha: Arg = 1) -> Arg:
    source = source if alpha == 1 else b.emit("mul", a=source, b=alpha)
    return _put(b, x, _along(b, x, dim, index), source, True)


@lowers("index_copy")
def _index_copy(b: Builder, x: Arg, dim: int, index: Arg, source: Arg) -> Arg:
    return _put(b, x, _along(b, x, dim, index), source, False)


@lowers("index_fill")
def _index_fill(b: Builder, x: Arg, dim: int, index: Arg, value: Arg) -> Arg:
    filled = b.emit("full", shape=(), value=value, dtype=b.dtype_name(b.result.dtype))
    return _put(b, x, _along(b, x, dim, index), filled, False)


def _scatter(accumulate: bool) -> Lowering:
    def row(b: Builder, x: Arg, dim: int, index: Arg, source: Arg) -> Arg:
        if not isinstance(b.value(source), torch.Tensor):
            source = b.emit("full", shape=(), value=source, dtype=b.dtype_name(b.result.dtype))
        return b.emit("put_along", x=x, index=index, values=source, axis=dim, accumulate=accumulate)

    return row


TABLE["scatter.src"] = TABLE["scatter.value"] = _scatter(False)
TABLE["scatter_add"] = _scatter(True)


@lowers("masked_scatter")
def _masked_scatter(b: Builder, x: Arg, mask: Arg, source: Arg) -> Arg:
    """Elements of x where mask, in order, replaced by those of source."""
    shape = shape_of(b, x)
    wide = b.emit("broadcast", x=mask, shape=shape)
    flat = b.emit("cast", x=b.emit("reshape", x=wide, shape=(-1,)), dtype="int32")
    order = b.emit("sub", a=b.emit("cumsum", x=flat, axis=0), b=1)
    order = b.emit("clip", x=order, low=0, high=None)
    line = b.emit("reshape", x=source, shape=(-1,))
    picked = b.emit("reshape", x=b.emit("take", x=line, index=order, axis=0), shape=shape)
    return b.emit("where", condition=wide, a=picked, b=x)
