"""Rows: slices, pieces, gathering and replacing by index."""

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import Arg

from .builder import Builder, is_bool, lowers, target_name

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
    if any(is_bool(b, i) for i in indices):  # type: ignore[union-attr]
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
