"""Rows: products, attention and convolutions."""

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg, Weight, stored_axes

from .builder import Builder, int_per_axis, lowers, per_axis


@lowers("linear")
def _linear(b: Builder, x: Arg, weight: Arg, bias: Arg = None) -> Arg:
    return b.emit("linear", x=x, weight=weight, bias=bias)


@lowers("matmul", "bmm", "mm", "mv", "dot")
def _matmul(b: Builder, x: Arg, y: Arg) -> Arg:
    return b.emit("matmul", a=x, b=y)


@lowers("addmm", "baddbmm")
def _addmm(b: Builder, c: Arg, x: Arg, y: Arg, *, beta: Arg = 1, alpha: Arg = 1) -> Arg:
    if beta == 0:
        product = b.emit("matmul", a=x, b=y)
        return product if alpha == 1 else b.emit("mul", a=product, b=alpha)
    return b.emit("addmm", c=c, a=x, b=y, alpha=alpha, beta=beta)


@lowers("linalg_qr")
def _qr(b: Builder, x: Arg, mode: str = "reduced") -> Arg:
    if mode != "reduced":
        raise MlxconvError(f"QR decomposition with mode {mode!r}")
    return b.emit_many("qr", 2, x=x)


@lowers("outer")
def _outer(b: Builder, x: Arg, y: Arg) -> Arg:
    left = b.emit("expand_dims", x=x, axis=-1)
    return b.emit("mul", a=left, b=b.emit("expand_dims", x=y, axis=0))


@lowers("einsum")
def _einsum(b: Builder, equation: str, operands: Arg, *, path: Arg = None) -> Arg:
    return b.emit("einsum", equation=equation.replace(" ", ""), operands=operands)


@lowers("embedding")
def _embedding(b: Builder, weight: Arg, ids: Arg, *args: Arg) -> Arg:
    return b.emit("embedding", weight=weight, ids=ids)


@lowers("scaled_dot_product_attention")
def _attention(
    b: Builder,
    q: Arg,
    k: Arg,
    v: Arg,
    mask: Arg = None,
    dropout: Arg = 0.0,
    causal: bool = False,
    *,
    scale: Arg = None,
    enable_gqa: bool = False,
) -> Arg:
    return b.emit("attention", q=q, k=k, v=v, mask=mask, scale=scale, causal=causal)


def _convolve(b: Builder, op: str, x: Arg, weight: Arg, bias: Arg, settings: dict[str, Arg]) -> Arg:
    axes = b.rank(weight) - 2
    batched = b.rank(x) == axes + 2
    if not batched:
        x = b.emit("expand_dims", x=x, axis=0)
    if not (isinstance(weight, Weight) and b.kinds.get(weight.name) == op):
        weight = b.emit("transpose", x=weight, axes=stored_axes(op, axes + 2))
    settings = {k: v if k == "groups" else per_axis(v, axes) for k, v in settings.items()}
    y = b.emit(op, x=x, weight=weight, bias=bias, **settings)
    return y if batched else b.emit("squeeze", x=y, axes=(0,))


@lowers("conv1d", "conv2d", "conv3d")
def _conv(
    b: Builder,
    x: Arg,
    weight: Arg,
    bias: Arg = None,
    stride: Arg = 1,
    padding: Arg = 0,
    dilation: Arg = 1,
    groups: Arg = 1,
) -> Arg:
    if padding == "same":
        x, padding = _same_padding(b, x, weight, dilation)
    elif padding == "valid":
        padding = 0
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _convolve(b, "conv", x, weight, bias, settings)


def _same_padding(b: Builder, x: Arg, weight: Arg, dilation: Arg) -> tuple[Arg, Arg]:
    """x and what is left to pad: an even kernel needs one more after than before."""
    kernel = b.value(weight).shape[2:]
    reach = [int(d) * (int(k) - 1) for k, d in zip(kernel, int_per_axis(dilation, len(kernel)))]
    if any(r % 2 for r in reach):
        plain = [(0, 0)] * (b.rank(x) - len(reach))
        widths = (*plain, *((0, r % 2) for r in reach))
        padded = b.emit("pad", x=x, widths=widths, mode="constant", value=0)
        x = b.note(padded, b.value(x))
    return x, tuple(r // 2 for r in reach)


@lowers("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    b: Builder,
    x: Arg,
    weight: Arg,
    bias: Arg = None,
    stride: Arg = 1,
    padding: Arg = 0,
    output_padding: Arg = 0,
    groups: Arg = 1,
    dilation: Arg = 1,
) -> Arg:
    settings = {
        "stride": stride,
        "padding": padding,
        "output_padding": output_padding,
        "groups": groups,
        "dilation": dilation,
    }
    return _convolve(b, "conv_transpose", x, weight, bias, settings)
