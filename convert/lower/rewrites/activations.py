"""Activations that are written out, and attention over repeated heads."""

from __future__ import annotations

import math

from mlxconv.runtime.program.program import Arg, Node, Ref

from .graph import Rewriter, Rules, match

_INNER = ("add", "$x", ("mul", ("pow", "$x", "$three"), "$cubic"))
_GELU = (
    "mul",
    ("mul", "$x", "$half"),
    ("add", ("tanh", ("mul", _INNER, "$slope")), "$one"),
)
_GELU_NUMBERS = {
    "half": 0.5,
    "one": 1.0,
    "three": 3.0,
    "cubic": 0.044715,
    "slope": math.sqrt(2 / math.pi),
}


def gelu_tanh(rewriter: Rewriter, node: Node) -> Arg:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): transformers 5 `NewGELUActivation` (T5)."""
    bound = match(rewriter, node, _GELU)
    if bound is None:
        return None
    for name, wanted in _GELU_NUMBERS.items():
        found = bound[name]
        if not isinstance(found, (int, float)) or abs(found - wanted) > 1e-9:
            return None
    type = rewriter.type_of(Ref(node.out[0]))
    return rewriter.emit("gelu", type, x=bound["x"], approximate=True)


def silu(rewriter: Rewriter, node: Node) -> Arg:
    """x * sigmoid(x)."""
    for x, gate in ((node.args["a"], node.args["b"]), (node.args["b"], node.args["a"])):
        sigmoid = rewriter.node_of(gate, "sigmoid")
        if sigmoid is not None and sigmoid.args["x"] == x:
            return rewriter.emit("silu", rewriter.type_of(Ref(node.out[0])), x=x)
    return None


def grouped_heads(rewriter: Rewriter, node: Node) -> Arg:
    """attention(q, repeat(k), repeat(v)) -> attention(q, k, v): the op repeats heads by itself.

    transformers 5 `repeat_kv`, diffusers' `repeat_interleave` over heads.
    """
    pairs = [_before_repeat(rewriter, node.args[key]) for key in ("k", "v")]
    if pairs[0] is None or pairs[1] is None or pairs[0][1] != pairs[1][1]:
        return None
    type = rewriter.type_of(Ref(node.out[0]))
    args = {**node.args, "k": pairs[0][0], "v": pairs[1][0]}
    return rewriter.emit("attention", type, **args)


def _before_repeat(rewriter: Rewriter, arg: Arg) -> tuple[Arg, int] | None:
    """(k, n) where `arg` (batch, n * heads, tokens, width) has each head of k n times in a row."""
    repeated = rewriter.node_of(arg, "repeat")
    rank = len(rewriter.dims(arg) or ())
    if repeated is not None and rank == 4 and repeated.args["axis"] in (1, -3):
        count = repeated.args["repeats"]
        return (repeated.args["x"], count) if isinstance(count, int) else None
    reshaped = rewriter.node_of(arg, "reshape")
    spread = reshaped and rewriter.node_of(reshaped.args["x"], "broadcast")
    added = spread and rewriter.node_of(spread.args["x"], "expand_dims")
    if not spread or not added or rank != 4 or added.args["axis"] not in (2, -3):
        return None
    before, wide = rewriter.dims(added.args["x"]), rewriter.dims(Ref(spread.out[0]))
    after = rewriter.dims(arg)
    if before is None or wide is None or after is None or not wide[2].isdigit():
        return None
    if not before[1].isdigit() or (*before[:2], *before[2:]) != (*wide[:2], *wide[3:]):
        return None
    count = int(wide[2])
    if after != (before[0], str(int(before[1]) * count), *before[2:]):
        return None
    return added.args["x"], count


ACTIVATIONS: Rules = {
    "mul": (gelu_tanh, silu),
    "attention": (grouped_heads,),
}
