"""Rows: resampling and pooling."""

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import Arg

from .builder import Builder, lowers, per_axis, target_name


@lowers("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec",
        "_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec",
        "_upsample_nearest_exact3d.vec")  # fmt: skip
def _upsample_nearest(b: Builder, x: Arg, sizes: Arg, scales: Arg) -> Arg:
    exact = "exact" in (target_name(b.current.target) if b.current else "")
    return b.emit("upsample_nearest", x=x, sizes=sizes, scales=scales, exact=exact)


@lowers("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def _upsample_linear(b: Builder, x: Arg, sizes: Arg, align_corners: bool, scales: Arg) -> Arg:
    return b.emit("upsample_linear", x=x, sizes=sizes, scales=scales, align_corners=align_corners)


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    b: Builder, x: Arg, kernel: Arg, stride: Arg = (), padding: Arg = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: Arg = None,
) -> Arg:  # fmt: skip
    return _pool(b, "avg_pool", x, kernel, stride, padding, ceil_mode)


@lowers("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    b: Builder, x: Arg, kernel: Arg, stride: Arg = (), padding: Arg = 0, dilation: Arg = 1,
    ceil_mode: bool = False,
) -> Arg:  # fmt: skip
    return _pool(b, "max_pool", x, kernel, stride, padding, ceil_mode)


def _pool(
    b: Builder, op: str, x: Arg, kernel: Arg, stride: Arg, padding: Arg, ceil_mode: bool
) -> Arg:
    if ceil_mode:
        raise MlxconvError("pooling with ceil_mode is not supported")
    axes = int(target_name(b.current.target).split("pool")[1][0]) if b.current else 2
    sizes = [per_axis(v, axes) if v != () else () for v in (kernel, stride, padding)]
    return b.emit(op, x=x, kernel=sizes[0], stride=sizes[1], padding=sizes[2])
