"""Rows: arrays from nothing."""

from mlxconv.runtime.program import Arg

from .builder import TABLE, Builder, Lowering, lowers, out_dtype, shape_of


@lowers("arange.default", "arange.start", "arange.start_step")
def _arange(b: Builder, *args: Arg, dtype: Arg = None) -> Arg:
    start, stop = (0, args[0]) if len(args) == 1 else args[:2]
    step = args[2] if len(args) > 2 else 1
    return b.emit("arange", start=start, stop=stop, step=step, dtype=out_dtype(b))


@lowers("linspace")
def _linspace(b: Builder, start: Arg, stop: Arg, steps: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("linspace", start=start, stop=stop, count=steps, dtype=out_dtype(b))


@lowers("full", "new_full")
def _full(b: Builder, *args: Arg, dtype: Arg = None, **kwargs: Arg) -> Arg:
    shape, value = args[-2:]
    return b.emit("full", shape=shape, value=value, dtype=out_dtype(b))


@lowers("zeros", "empty", "new_zeros", "new_empty", "empty_permuted", "new_empty_strided")
def _zeros(b: Builder, *args: Arg, dtype: Arg = None, **kwargs: Arg) -> Arg:
    shape = args[0] if isinstance(args[0], tuple) else args[1]
    return b.emit("full", shape=shape, value=0, dtype=out_dtype(b))


@lowers("ones", "new_ones")
def _ones(b: Builder, *args: Arg, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=args[-1], value=1, dtype=out_dtype(b))


def _filled(value: int) -> Lowering:
    def row(b: Builder, x: Arg, *, dtype: Arg = None) -> Arg:
        return b.emit("full", shape=shape_of(b, x), value=value, dtype=out_dtype(b))

    return row


TABLE["zeros_like"] = TABLE["empty_like"] = TABLE["zero"] = _filled(0)
TABLE["ones_like"] = _filled(1)


@lowers("full_like", "fill")
def _full_like(b: Builder, x: Arg, value: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=shape_of(b, x), value=value, dtype=out_dtype(b))


@lowers("scalar_tensor")
def _scalar_tensor(b: Builder, value: Arg, *, dtype: Arg = None) -> Arg:
    return b.emit("full", shape=(), value=value, dtype=out_dtype(b))


@lowers("eye")
def _eye(b: Builder, rows: Arg, columns: Arg = None, *, dtype: Arg = None) -> Arg:
    columns = rows if columns is None else columns
    return b.emit("eye", rows=rows, columns=columns, dtype=out_dtype(b))
