"""Norms: RMSNorm written out, casts around norms, and modulated LayerNorm (adaLN)."""

from __future__ import annotations

from mlxconv.runtime.program.program import Arg, Node, Ref

from .graph import WIDER, Rewriter, Rules, is_last, match

_RMS = ("mul", "$x", ("rsqrt", ("add", ("mean", ("square", "$squared"), "$axis", True), "$eps")))


def rms_norm(rewriter: Rewriter, node: Node) -> Arg:
    """x * rsqrt(mean(x^2) + eps), in the precision that the square was taken in.

    diffusers 0.42 `RMSNorm`, transformers 5 `T5LayerNorm`, `LlamaRMSNorm`, `Gemma2RMSNorm`.
    """
    bound = match(rewriter, node, _RMS)
    if bound is None:
        return None
    squared, eps = bound["squared"], bound["eps"]
    dims = rewriter.dims(squared)
    if dims is None or not isinstance(eps, float) or not is_last(bound["axis"], len(dims)):
        return None
    if rewriter.bare(bound["x"]) != rewriter.bare(squared):
        return None
    out = rewriter.emit("rms_norm", rewriter.type_of(squared), x=squared, weight=None, eps=eps)
    return rewriter.cast(out, rewriter.dtype(Ref(node.out[0])))


def weigh_rms_norm(rewriter: Rewriter, node: Node) -> Arg:
    """rms_norm(x) * weight, where both have one dtype, or the norm the wider one."""
    for normed, weight in ((node.args["a"], node.args["b"]), (node.args["b"], node.args["a"])):
        norm = rewriter.node_of(normed, "rms_norm")
        dims, width = rewriter.dims(normed), rewriter.dims(weight)
        if norm is None or norm.args["weight"] is not None or not dims or width != dims[-1:]:
            continue
        dtype = rewriter.dtype(normed)
        if dtype not in (rewriter.dtype(weight), *WIDER.get(rewriter.dtype(weight), ())):
            continue
        return rewriter.emit(
            "rms_norm",
            rewriter.type_of(normed),
            x=norm.args["x"],
            weight=rewriter.cast(weight, dtype),
            eps=norm.args["eps"],
        )
    return None


def uncast_norm(rewriter: Rewriter, node: Node) -> Arg:
    """cast(norm(cast(x))) -> norm(x): norms without weights compute in fp32 and round once."""
    norm = rewriter.node_of(node.args["x"], "rms_norm", "layer_norm")
    if norm is None or norm.args["weight"] is not None or norm.args.get("bias") is not None:
        return None
    inner = rewriter.node_of(norm.args["x"], "cast")
    if inner is None or inner.args["dtype"] != "float32" or node.args["dtype"] != "compute":
        return None
    if rewriter.dtype(inner.args["x"]) != "compute":
        return None
    return rewriter.emit(
        norm.op, rewriter.type_of(inner.args["x"]), **{**norm.args, "x": inner.args["x"]}
    )


def scale_layer_norm(rewriter: Rewriter, node: Node) -> Arg:
    """layer_norm(x) * scale -> modulated_norm(x, scale), for a scale that broadcasts to x."""
    for normed, scale in ((node.args["a"], node.args["b"]), (node.args["b"], node.args["a"])):
        norm = rewriter.node_of(normed, "layer_norm")
        if norm is None or norm.args["weight"] is not None or norm.args["bias"] is not None:
            continue
        if not _modulates(rewriter, scale, normed):
            continue
        return rewriter.emit(
            "modulated_norm",
            rewriter.type_of(normed),
            x=norm.args["x"],
            scale=rewriter.cast(scale, rewriter.dtype(normed)),
            shift=None,
            eps=norm.args["eps"],
        )
    return None


def shift_layer_norm(rewriter: Rewriter, node: Node) -> Arg:
    """modulated_norm(x, scale) + shift -> modulated_norm(x, scale, shift), for shift like scale."""
    for normed, shift in ((node.args["a"], node.args["b"]), (node.args["b"], node.args["a"])):
        norm = rewriter.node_of(normed, "modulated_norm")
        if norm is None or norm.args["shift"] is not None:
            continue
        if rewriter.dims(shift) != rewriter.dims(norm.args["scale"]):
            continue
        if not _modulates(rewriter, shift, normed):
            continue
        dtype = rewriter.dtype(normed)
        return rewriter.emit(
            "modulated_norm",
            rewriter.type_of(normed),
            **{**norm.args, "shift": rewriter.cast(shift, dtype)},
        )
    return None


def _modulates(rewriter: Rewriter, value: Arg, normed: Arg) -> bool:
    """Whether a value broadcasts to a norm's result, feature by feature, without widening it."""
    dims, own = rewriter.dims(normed), rewriter.dims(value)
    if not dims or not own or own[-1] != dims[-1] or len(own) > len(dims):
        return False
    if any(n not in ("1", m) for n, m in zip(own[::-1], dims[::-1])):
        return False
    dtype = rewriter.dtype(normed)
    return dtype in (rewriter.dtype(value), *WIDER.get(rewriter.dtype(value), ()))


NORMS: Rules = {
    "mul": (rms_norm, weigh_rms_norm, scale_layer_norm),
    "add": (shift_layer_norm,),
    "cast": (uncast_norm,),
}
