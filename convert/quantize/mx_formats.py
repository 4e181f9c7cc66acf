"""mxfp4, mxfp8 and nvfp4, bit-identical to `mx.quantize` on CPU, at a twentieth of its time there.

A bfloat16 has 65,536 values, so what MLX makes of each is looked up: the scale of a group by its
largest magnitude, the code of a weight by its quotient with the scale. Groups that these formats do
not reach (NaN, infinity, next to nothing) are left to MLX.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..source.floats import to_bfloat
from .affine import Workspace, blocks, pack

Array = NDArray[Any]
Words = NDArray[np.uint32]

# Mode -> (bits, group).
MX_FORMATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}

# Largest magnitudes of a group, as bfloat16 bits, between which nothing under- or overflows: from
# 2**-111 to the largest finite one, or to what nvfp4 reaches (448 * 6).
_LEAST, _MOST = 0x0800, {"mxfp4": 0x7F7F, "mxfp8": 0x7F7F, "nvfp4": 0x4528}
_MAGNITUDES = np.uint32(0x7FFF7FFF)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize_mx(pieces: Iterable[Array], scales: Array, mode: str) -> Iterator[Words]:
    """Quantize a weight (rows, width): gives its codes as they are made, fills `scales` in place.

    pieces: the weight row-major, cut anywhere between groups; bfloat16 as its uint16 bits, other
    floats are rounded to it. scales: one byte a group, in order. Gives codes uint32
    (groups, group * bits / 32), in one reused buffer: valid until the next are asked for.
    """
    bits, group = MX_FORMATS[mode]
    work, done = Workspace(group), 0
    words = np.empty((work.groups, group * bits // 32), np.uint32)
    for source in blocks(pieces, group):
        block = words[: len(source)]
        scales[done : done + len(source)] = _quantize_block(work, source, block, mode)
        done += len(source)
        yield block


def _quantize_block(work: Workspace, source: Array, words: Words, mode: str) -> Array:
    """Scales (groups,) of the source (groups, group), whose codes go into `words`."""
    bits = source if source.dtype == np.uint16 else to_bfloat(source.astype(np.float32))
    work.load(bits)
    quotients, made = work.scaled.view(np.uint32), work.codes.view(np.uint32)
    largest = _largest(work.pairs, made[: len(work.pairs)])
    codes, values = _scale_tables(mode)
    with np.errstate(all="ignore"):
        np.divide(work.weight, values[largest], out=work.scaled)
    if mode == "nvfp4":  # the others divide by powers of two: there is nothing to round
        _round(quotients, made)
    np.right_shift(quotients, np.uint32(16), out=quotients)
    np.take(_code_table(mode), quotients, out=made, mode="clip")
    np.copyto(words, pack(made, MX_FORMATS[mode][0]))
    scales = codes[largest]
    odd = np.flatnonzero((largest != 0) & (largest < _LEAST) | (largest > _MOST[mode]))
    if len(odd):
        words[odd], scales[odd] = _by_mlx(bits[odd], mode)
    return scales


def _round(values: Words, spare: Words) -> None:
    """float32 bits so that their upper half is the nearest bfloat16, ties to even; in place."""
    np.right_shift(values, np.uint32(16), out=spare)
    np.bitwise_and(spare, np.uint32(1), out=spare)
    np.add(values, spare, out=values)
    np.add(values, np.uint32(0x7FFF), out=values)


def _largest(pairs: Words, spare: Words) -> NDArray[np.uint16]:
    """The largest magnitude of each group, as bfloat16 bits: they order as the values do."""
    halves = np.bitwise_and(pairs, _MAGNITUDES, out=spare).view(np.uint16).max(axis=0)
    largest: NDArray[np.uint16] = halves.reshape(-1, 2).max(axis=1)
    return largest


def _by_mlx(weight: Array, mode: str) -> tuple[Words, Array]:
    """Codes (groups, words) and scales (groups,) of bfloat16 bits (groups, group)."""
    bits, group = MX_FORMATS[mode]
    # mx.quantize takes values by 32, which may be two groups.
    even = np.concatenate([weight, weight[: len(weight) % 2]])
    made = mx.quantize(mx.array(even).view(mx.bfloat16), group, bits, mode, stream=mx.cpu)
    count = len(weight)
    return np.asarray(made[0])[:count], np.asarray(made[1]).reshape(-1)[:count]


@cache
def _scale_tables(mode: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The scale's byte, and its value, by the bits of a group's largest magnitude (32768,)."""
    sample = np.zeros((1 << 15, MX_FORMATS[mode][1]), np.uint16)
    sample[:, 0] = np.arange(1 << 15)
    # In parts: on CPU mx.quantize needs some 80 bytes a value.
    codes = np.concatenate([_by_mlx(part, mode)[1] for part in np.split(sample, 8)])
    if mode == "nvfp4":
        return codes, np.array(mx.from_fp8(mx.array(codes), mx.float32, stream=mx.cpu))
    # 2**(code - 127), which float32 writes with the same exponent bits.
    return codes, (codes.astype(np.uint32) << np.uint32(23)).view(np.float32)


@cache
def _code_table(mode: str) -> Words:
    """The code of each bfloat16, by its bits (65536,)."""
    values = mx.arange(1 << 16, dtype=mx.uint32).astype(mx.uint16).view(mx.bfloat16)
    with mx.stream(mx.cpu):
        if mode == "mxfp8":
            return np.array(mx.to_fp8(values)).astype(np.uint32)
        table = mx.array([*_E2M1, *(-value for value in _E2M1)], mx.bfloat16)
        return np.array(mx.argmin(mx.abs(values[:, None] - table), axis=-1))
