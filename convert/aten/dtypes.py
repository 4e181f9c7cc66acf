"""Rows: dtypes, copies and complex numbers."""

from mlxconv.runtime.program import Arg

from .builder import Builder, lowers, shape_of, target_name


@lowers("to", "_to_copy", "type_as", "copy", "float", "bfloat16", "to.other", "to.dtype")
def _to(b: Builder, x: Arg, *args: Arg, **kwargs: Arg) -> Arg:
    name = target_name(b.current.target) if b.current else ""
    if name == "copy.default":
        x = b.emit("broadcast", x=args[0], shape=shape_of(b, x))
        b.meta[x.name] = b.value(args[0])
    return b.cast(x, b.result.dtype)


@lowers(
    "contiguous", "clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "dropout",
    "feature_dropout", "alpha_dropout", "native_dropout", "view_of", "lift", "positive",
)  # fmt: skip
def _same(b: Builder, x: Arg, *args: Arg, **kwargs: Arg) -> Arg:
    return x


@lowers("view_as_complex")
def _view_as_complex(b: Builder, x: Arg) -> Arg:
    real = b.emit("select", x=x, axis=-1, index=0)
    return b.emit("complex", real=real, imag=b.emit("select", x=x, axis=-1, index=1))


@lowers("view_as_real")
def _view_as_real(b: Builder, x: Arg) -> Arg:
    return b.emit("stack", xs=(b.emit("real", x=x), b.emit("imag", x=x)), axis=-1)


@lowers("complex")
def _complex(b: Builder, real: Arg, imag: Arg) -> Arg:
    return b.emit("complex", real=real, imag=imag)


@lowers("polar")
def _polar(b: Builder, radius: Arg, angle: Arg) -> Arg:
    # float64 angles lose their digits only after the cosine, as in PyTorch's complex128.
    parts = [b.emit("mul", a=radius, b=b.emit(f, x=angle)) for f in ("cos", "sin")]
    return b.emit("complex", real=parts[0], imag=parts[1])
