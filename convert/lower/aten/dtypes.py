"""Rows: dtypes, copies and complex numbers."""

import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg

from .builder import Builder, Lowering, lowers, shape_of


@lowers("_to_copy", "to", "type_as")
def _to(b: Builder, x: Arg, *args: Arg, **kwargs: Arg) -> Arg:
    return b.cast(x, b.result.dtype)


@lowers("copy")
def _copy(b: Builder, x: Arg, source: Arg) -> Arg:
    y = b.emit("broadcast", x=source, shape=shape_of(b, x))
    return b.cast(b.note(y, b.value(source).expand(b.value(x).shape)), b.result.dtype)


@lowers("clone", "contiguous", "detach", "alias", "detach_", "lift_fresh_copy")
def _same(b: Builder, x: Arg, *args: Arg, **kwargs: Arg) -> Arg:
    return x


@lowers("dropout")
def _dropout(b: Builder, x: Arg, share: float, train: bool) -> Arg:
    if train:
        raise MlxconvError("dropout of a module in training: call module.eval() first")
    return x


@lowers("view.dtype")
def _view_dtype(b: Builder, x: Arg, dtype: torch.dtype) -> Arg:
    have = b.value(x).dtype
    if torch.int64 in (have, dtype) or b.compute in (have, dtype):
        raise MlxconvError(f"the bits of {have} cannot be read as {dtype}: a program stores others")
    if have.itemsize != dtype.itemsize:
        raise MlxconvError(f"{have} viewed as {dtype} is not supported: their widths differ")
    return b.emit("view_bits", x=x, dtype=b.dtype_name(dtype))


@lowers("complex")
def _complex(b: Builder, real: Arg, imag: Arg) -> Arg:
    return b.emit("complex", real=real, imag=imag)


@lowers("view_as_complex")
def _view_as_complex(b: Builder, x: Arg) -> Arg:
    real, imag = (b.emit("select", x=x, axis=-1, index=i) for i in (0, 1))
    return b.emit("complex", real=real, imag=imag)


def _part(op: str) -> Lowering:
    """Programs hold complex128 as complex64, so a part of it has to be widened again."""

    def row(b: Builder, x: Arg) -> Arg:
        if not _is_complex(b, x):
            return x
        y = b.emit(op, x=x)
        dtype = b.result.dtype
        return b.emit("cast", x=y, dtype="float64") if dtype == torch.float64 else y

    return row


def _is_complex(b: Builder, x: Arg) -> bool:
    value = b.value(x)
    return isinstance(value, torch.Tensor) and value.is_complex()


@lowers("view_as_real")
def _view_as_real(b: Builder, x: Arg) -> Arg:
    return b.emit("stack", xs=(_part("real")(b, x), _part("imag")(b, x)), axis=-1)


@lowers("_conj", "_conj_physical")
def _conj(b: Builder, x: Arg) -> Arg:
    return b.emit("conjugate", x=x) if _is_complex(b, x) else x


@lowers("_neg_view")
def _neg_view(b: Builder, x: Arg) -> Arg:
    return b.emit("neg", x=x)


@lowers("angle")
def _angle(b: Builder, x: Arg) -> Arg:
    return b.emit("arctan2", a=b.emit("imag", x=x), b=b.emit("real", x=x))


@lowers("polar")
def _polar(b: Builder, radius: Arg, angle: Arg) -> Arg:
    # float64 angles lose their digits only after the cosine, as in PyTorch's complex128.
    real, imag = (b.emit("mul", a=radius, b=b.emit(f, x=angle)) for f in ("cos", "sin"))
    return b.emit("complex", real=real, imag=imag)
