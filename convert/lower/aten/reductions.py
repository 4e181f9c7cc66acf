"""Rows: reductions, running sums and sorting."""

import torch

from mlxconv.runtime.program.program import Arg, Ref

from .builder import TABLE, Builder, Lowering, is_bool, lowers


def _axes(dim: Arg) -> Arg:
    """PyTorch's `dim` as axes: none named means all."""
    return None if dim == () else (dim,) if isinstance(dim, int) else dim


def _reduce(op: str, dtype: torch.dtype | None = None) -> Lowering:
    """A row that casts to `dtype`, or to the result's."""

    def row(b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False, **kwargs: Arg) -> Arg:
        x = b.cast(x, dtype or b.result.dtype)
        return b.emit(op, x=x, axis=_axes(dim), keepdims=keepdim)

    return row


TABLE.update({name: _reduce(name) for name in ("sum", "mean", "prod", "logsumexp")})
TABLE["any"], TABLE["all"] = _reduce("any", torch.bool), _reduce("all", torch.bool)
TABLE["amax"], TABLE["amin"] = _reduce("max"), _reduce("min")


@lowers("count_nonzero")
def _count_nonzero(b: Builder, x: Arg, dim: Arg = None) -> Arg:
    flags = b.cast(x, torch.bool)
    return b.emit("sum", x=b.cast(flags, torch.int64), axis=_axes(dim), keepdims=False)


def _extreme(op: str) -> Lowering:
    """max and min: of everything, or of an axis together with the indices."""

    def row(b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False) -> Arg:
        if dim is None:
            return b.emit(op, x=x, axis=None, keepdims=False)
        values = b.emit(op, x=x, axis=(dim,), keepdims=keepdim)
        return (values, b.emit(f"arg{op}", x=_sortable(b, x), axis=dim, keepdims=keepdim))

    return row


def _arg_extreme(op: str) -> Lowering:
    def row(b: Builder, x: Arg, dim: Arg = None, keepdim: bool = False) -> Arg:
        return b.emit(op, x=_sortable(b, x), axis=dim, keepdims=keepdim)

    return row


def _sortable(b: Builder, x: Arg) -> Arg:
    """Booleans as integers."""
    return b.cast(x, torch.int32) if is_bool(b, x) else x


TABLE["max"], TABLE["min"] = _extreme("max"), _extreme("min")
TABLE["argmax"], TABLE["argmin"] = _arg_extreme("argmax"), _arg_extreme("argmin")


@lowers("aminmax")
def _aminmax(b: Builder, x: Arg, *, dim: Arg = None, keepdim: bool = False) -> Arg:
    over = {"axis": _axes(dim), "keepdims": keepdim}
    return (b.emit("min", x=x, **over), b.emit("max", x=x, **over))


def _variance(b: Builder, x: Arg, dim: Arg, correction: Arg, keepdim: Arg) -> Ref:
    ddof = 1 if correction is None else correction
    return b.emit("var", x=x, axis=_axes(dim), keepdims=keepdim, ddof=ddof)


def _of_variance(root: bool, mean: bool) -> Lowering:
    """var, std, var_mean, std_mean, in the overloads `correction`, `dim` and `default`."""

    def row(
        b: Builder,
        x: Arg,
        dim: Arg = None,
        unbiased: Arg = None,
        keepdim: Arg = False,
        *,
        correction: Arg = 1,
    ) -> Arg:
        if isinstance(dim, bool):  # var.default(x, unbiased)
            dim, unbiased = None, dim
        if isinstance(unbiased, bool):
            correction = int(unbiased)
        y = _variance(b, x, dim, correction, keepdim)
        y = b.emit("sqrt", x=y) if root else y
        if not mean:
            return y
        return (y, b.emit("mean", x=x, axis=_axes(dim), keepdims=keepdim))

    return row


TABLE["var"], TABLE["std"] = _of_variance(False, False), _of_variance(True, False)
TABLE["var_mean"], TABLE["std_mean"] = _of_variance(False, True), _of_variance(True, True)


def _running(op: str) -> Lowering:
    def row(b: Builder, x: Arg, dim: int, *, dtype: Arg = None) -> Arg:
        return b.emit(op, x=b.cast(x, b.result.dtype), axis=dim)

    return row


TABLE["cumsum"], TABLE["cumprod"] = _running("cumsum"), _running("cumprod")


@lowers("argsort")
def _argsort(
    b: Builder, x: Arg, dim: Arg = -1, descending: Arg = False, *, stable: Arg = False
) -> Arg:
    return b.emit("argsort", x=_sortable(b, x), axis=dim, descending=descending)


@lowers("sort")
def _sort(
    b: Builder, x: Arg, dim: Arg = -1, descending: Arg = False, *, stable: Arg = False
) -> Arg:
    order = _argsort(b, x, dim, descending)
    return (b.emit("take_along", x=x, index=order, axis=dim), order)


@lowers("topk")
def _topk(
    b: Builder, x: Arg, k: Arg, dim: Arg = -1, largest: bool = True, sorted: bool = True
) -> Arg:
    order = _argsort(b, x, dim, largest)
    best = b.emit("slice", x=order, axis=dim, start=0, stop=k, step=1)
    return (b.emit("take_along", x=x, index=best, axis=dim), best)


def _rank_among(b: Builder, borders: Arg, x: Arg, right: bool) -> Arg:
    """How many of the sorted borders (..., n) lie below each x (..., m)."""
    column = b.emit("expand_dims", x=x, axis=-1)
    row = b.emit("expand_dims", x=borders, axis=-2) if b.rank(borders) > 1 else borders
    below = b.emit("le" if right else "lt", a=row, b=column)
    return b.emit("sum", x=b.emit("cast", x=below, dtype="int32"), axis=(-1,), keepdims=False)


@lowers("bucketize")
def _bucketize(
    b: Builder, x: Arg, borders: Arg, *, out_int32: bool = False, right: bool = False
) -> Arg:
    return _rank_among(b, borders, x, right)


@lowers("searchsorted")
def _searchsorted(
    b: Builder,
    borders: Arg,
    x: Arg,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Arg = None,
) -> Arg:
    return _rank_among(b, borders, x, right or side == "right")
