"""How much a program may ask for: memory of the machine, stack of MLX's compiler."""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from ..files import format_bytes
from ..program.program import MAX_INT, Body, Program, refs

MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_LARGE, _GROWTH = 1 << 26, 1 << 16  # elements; how often larger than what it is made of
_LAZY = frozenset({"broadcast", "full"})  # without memory of their own


def bounded(results: Any, args: Mapping[str, Any], op: str) -> Any:
    """What an op gave: arrays that the machine can hold, and numbers of 64 bits.

    No model makes a large array of a few elements; a program that is to fill the memory does.
    """
    for result in results if isinstance(results, list) else (results,):
        if isinstance(result, mx.array):
            size = math.prod(result.shape) * result.dtype.size
            if size > MEMORY_BYTES:
                raise ValueError(
                    f"the result has shape {tuple(result.shape)}, {format_bytes(size)}; "
                    f"this machine has {format_bytes(MEMORY_BYTES)}"
                )
            if result.size > _LARGE and op not in _LAZY:
                given = sum(getattr(a, "size", 0) for a in flat(args.values()))
                if result.size > _GROWTH * given:
                    raise ValueError(f"{given} elements make {result.size}")
        elif isinstance(result, int) and abs(result) > MAX_INT:
            raise ValueError("the result is a number beyond 64 bits")
        elif not isinstance(result, (int, float)):
            raise TypeError(f"the result is a {type(result).__name__}")
    return results


def flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


# `mx.compile` walks the graph recursively: at 50,000 primitives one after the other the stack of a
# thread is full. An op is a few of them, a curve such as gelu on a CPU some thirty.
DEEPEST = 8_000
_CURVES = frozenset({"erf", "exp", "gelu", "sigmoid", "silu", "softplus", "tanh"})


def depth(program: Program, body: Body, known: dict[int, int]) -> int:
    """Ops on the longest way through a body, its blocks included; a curve counts as six."""
    if id(body) not in known:
        level: dict[str, int] = {}
        for node in body.nodes:
            before = max((level.get(n, 0) for n in refs(node.args.values())), default=0)
            if node.op == "call":
                inner = depth(program, program.blocks[str(node.args["block"])], known)
            else:
                inner = 6 if node.op in _CURVES else 1
            level.update(dict.fromkeys(node.out, before + inner))
        known[id(body)] = max(level.values(), default=0)
    return known[id(body)]
