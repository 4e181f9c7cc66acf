"""Rows: resampling, pooling and windows."""

import math
from collections.abc import Sequence

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg, Ref

from .builder import (
    TABLE,
    Builder,
    Lowering,
    int_per_axis,
    lowers,
    over,
    per_axis,
    plus,
    shape_of,
    size_of,
    times,
)


def _nearest(exact: bool) -> Lowering:
    def row(b: Builder, x: Arg, sizes: Arg, scales: Arg) -> Arg:
        return b.emit("upsample_nearest", x=x, sizes=sizes, scales=scales, exact=exact)

    return row


for _axes in "123":
    TABLE[f"upsample_nearest{_axes}d.vec"] = _nearest(False)
    TABLE[f"_upsample_nearest_exact{_axes}d.vec"] = _nearest(True)


def _smooth(op: str, antialias: bool) -> Lowering:
    def row(b: Builder, x: Arg, sizes: Arg, align_corners: bool, scales: Arg) -> Arg:
        if antialias and align_corners:
            raise MlxconvError("antialiased resampling with align_corners is not supported")
        return b.emit(
            op, x=x, sizes=sizes, scales=scales, align_corners=align_corners, antialias=antialias
        )

    return row


for _name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"):
    TABLE[f"{_name}.vec"] = _smooth("upsample_linear", False)
TABLE["_upsample_bilinear2d_aa.vec"] = _smooth("upsample_linear", True)
TABLE["upsample_bicubic2d.vec"] = _smooth("upsample_cubic", False)
TABLE["_upsample_bicubic2d_aa.vec"] = _smooth("upsample_cubic", True)


# ---- pooling ------------------------------------------------------------------------------------


def _pooling(
    b: Builder, axes: int, kernel: Arg, stride: Arg, padding: Arg
) -> dict[str, tuple[int, ...]]:
    """Settings one an axis."""
    width = int_per_axis(kernel, axes)
    step = int_per_axis(stride, axes) if stride else width
    return {"kernel": width, "stride": step, "padding": int_per_axis(padding, axes)}


def _beyond(b: Builder, x: Arg, settings: dict[str, tuple[int, ...]]) -> tuple[Arg, ...]:
    """How far the last windows of `ceil_mode` reach beyond x, one an axis; nothing if none does."""
    axes = len(settings["kernel"])
    more: list[Arg] = []
    for axis, (k, s, p) in enumerate(zip(*settings.values()), b.rank(x) - axes):
        size = b.value(x).shape[axis]
        if isinstance(size, int):
            more.append((k - size - 2 * p) % s)
        else:
            rest = b.emit("sub", a=k - 2 * p, b=size_of(b, x, axis))
            more.append(b.emit("mod", a=rest, b=s))
    if not any(isinstance(m, Ref) or m for m in more):
        return ()
    if any(p or s > k for k, s, p in zip(*settings.values())):
        raise MlxconvError("pooling with ceil_mode, and padding or gaps, is not supported")
    return tuple(more)


def _extended(b: Builder, x: Arg, more: tuple[Arg, ...], value: float) -> Ref:
    widths = (*((0, 0) for _ in range(b.rank(x) - len(more))), *((0, m) for m in more))
    return b.emit("pad", x=x, widths=widths, mode="constant", value=value)


def _avg_pool(axes: int) -> Lowering:
    def row(
        b: Builder,
        x: Arg,
        kernel: Arg,
        stride: Arg = (),
        padding: Arg = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor: Arg = None,
    ) -> Arg:
        settings = _pooling(b, axes, kernel, stride, padding)
        if divisor is not None:
            raise MlxconvError("pooling with divisor_override is not supported")
        more = _beyond(b, x, settings) if ceil_mode else ()
        y = b.emit("avg_pool", x=_extended(b, x, more, 0) if more else x, **settings)
        if not more and (count_include_pad or not any(settings["padding"])):
            return y
        sizes = shape_of(b, x)[-axes:]
        ones = b.emit("full", shape=sizes, value=1, dtype=b.dtype_name(b.result.dtype))
        if more:
            value = b.value(x)
            ones = _extended(b, b.note(ones, value.new_empty(value.shape[-axes:])), more, 0)
        return b.emit("div", a=y, b=b.emit("avg_pool", x=ones, **settings))

    return row


def _max_pool(axes: int) -> Lowering:
    def row(
        b: Builder,
        x: Arg,
        kernel: Arg,
        stride: Arg = (),
        padding: Arg = 0,
        dilation: Arg = 1,
        ceil_mode: bool = False,
    ) -> Arg:
        if set(int_per_axis(dilation, axes)) != {1}:
            raise MlxconvError("pooling with dilation is not supported")
        settings = _pooling(b, axes, kernel, stride, padding)
        more = _beyond(b, x, settings) if ceil_mode else ()
        y = _extended(b, x, more, -math.inf) if more else x
        return b.emit("max_pool", x=y, **settings)

    return row


def _adaptive_pool(axes: int) -> Lowering:
    def row(b: Builder, x: Arg, sizes: Arg) -> Arg:
        return b.emit("adaptive_avg_pool", x=x, sizes=per_axis(sizes, axes))

    return row


for _count in (1, 2, 3):
    TABLE[f"avg_pool{_count}d"] = _avg_pool(_count)
    TABLE[f"max_pool{_count}d"] = _max_pool(_count)
    TABLE[f"adaptive_avg_pool{_count}d"] = _adaptive_pool(_count)


# ---- windows and pixels -------------------------------------------------------------------------


def _windows(b: Builder, x: Arg, axis: int, size: int, step: int, dilation: int = 1) -> Ref:
    """x with `axis` replaced by two: windows, and the elements of each."""
    reach = dilation * (size - 1)
    stop = plus(b, size_of(b, x, axis), -reach)
    starts = b.emit("arange", start=0, stop=stop, step=step, dtype="int32")
    offsets = b.emit("arange", start=0, stop=reach + 1, step=dilation, dtype="int32")
    index = b.emit("add", a=b.emit("expand_dims", x=starts, axis=-1), b=offsets)
    return b.emit("take", x=x, index=index, axis=axis)


@lowers("unfold")
def _unfold(b: Builder, x: Arg, dim: int, size: int, step: int) -> Arg:
    rank = b.rank(x)
    dim %= rank
    axes = [a for a in range(rank + 1) if a != dim + 1]
    return b.emit("transpose", x=_windows(b, x, dim, size, step), axes=(*axes, dim + 1))


@lowers("im2col")
def _im2col(b: Builder, x: Arg, kernel: Arg, dilation: Arg, padding: Arg, stride: Arg) -> Arg:
    """F.unfold: x (batch, channels, height, width) -> (batch, channels * kernel, windows)."""
    if b.rank(x) != 4:
        raise MlxconvError("F.unfold of an unbatched image is not supported")
    batch, channels = (size_of(b, x, axis) for axis in (0, 1))
    kernels, dilations, edges, steps = (
        int_per_axis(v, 2) for v in (kernel, dilation, padding, stride)
    )
    widths = ((0, 0), (0, 0), *((p, p) for p in edges))
    padded = b.emit("pad", x=x, widths=widths, mode="constant", value=0)
    value = b.value(x)
    padded_sizes = [s + 2 * p for s, p in zip(value.shape[2:], edges)]
    b.note(padded, value.new_empty(*value.shape[:2], *padded_sizes))
    # Width first: the axes before it stay where they are.
    wide = _windows(b, padded, 3, kernels[1], steps[1], dilations[1])
    y = _windows(b, b.note(wide, b.value(padded)), 2, kernels[0], steps[0], dilations[0])
    y = b.emit("transpose", x=y, axes=(0, 1, 3, 5, 2, 4))
    return b.emit("reshape", x=y, shape=(batch, times(b, channels, kernels[0] * kernels[1]), -1))


def _spread(b: Builder, x: Arg, sizes: Sequence[Arg], axes: tuple[int, ...], lead: int) -> Arg:
    """x seen as `sizes`, its axes after `lead` reordered."""
    y = b.emit("reshape", x=x, shape=tuple(sizes))
    return b.emit("transpose", x=y, axes=(*range(lead), *(lead + a for a in axes)))


@lowers("pixel_shuffle")
def _pixel_shuffle(b: Builder, x: Arg, factor: int) -> Arg:
    *lead, channels, height, width = shape_of(b, x)
    n, fewer = len(lead), over(b, channels, factor * factor)
    y = _spread(b, x, (*lead, fewer, factor, factor, height, width), (0, 3, 1, 4, 2), n)
    shape = (*lead, fewer, times(b, height, factor), times(b, width, factor))
    return b.emit("reshape", x=y, shape=shape)


@lowers("pixel_unshuffle")
def _pixel_unshuffle(b: Builder, x: Arg, factor: int) -> Arg:
    *lead, channels, height, width = shape_of(b, x)
    n, (high, wide) = len(lead), (over(b, size, factor) for size in (height, width))
    y = _spread(b, x, (*lead, channels, high, factor, wide, factor), (0, 2, 4, 1, 3), n)
    return b.emit("reshape", x=y, shape=(*lead, times(b, channels, factor * factor), high, wide))


@lowers("channel_shuffle")
def _channel_shuffle(b: Builder, x: Arg, groups: int) -> Arg:
    batch, channels, *sizes = shape_of(b, x)
    y = b.emit("reshape", x=x, shape=(batch, groups, over(b, channels, groups), *sizes))
    y = b.emit("transpose", x=y, axes=(0, 2, 1, *range(3, b.rank(x) + 1)))
    return b.emit("reshape", x=y, shape=(batch, channels, *sizes))
