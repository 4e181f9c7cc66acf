"""Affine quantization in MLX's layout: w is about scale * code + bias, group by group.

The work is done over blocks of groups that stay in a core's cache. That costs less CPU time than
`mx.quantize` on CPU, and needs no compiler (as `mx.compile` does there). Passes over all weights
are torch's where that takes half of numpy's time (a row that is broadcast, a product and a sum at
once); what there is one of a group is numpy's. Both work on the same memory. The "rtn" result is
bit-identical to `mx.quantize` on CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..trace.patches.threads import one_thread

Array = NDArray[Any]
Floats = NDArray[np.float32]

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
METHODS = ("rtn", "refit", "search")

# Elements a block: its buffers stay in a core's second-level cache.
_BLOCK = 3 << 16
# Adding it to a float32 of at most 2**22 rounds that to nearest, ties to even, and leaves the
# integer in the low bits.
_MAGIC = 1.5 * 2**23
_MAGIC_BITS = int(np.float32(_MAGIC).view(np.int32))
_EPSILON = np.float32(1e-7)
# Shares of the range that "search" also starts from.
_CLIPS = (np.float32(0.95), np.float32(0.87), np.float32(0.8))


def quantize_affine(
    pieces: Iterable[Array],
    scales: Array,
    biases: Array,
    *,
    bits: int,
    group: int,
    dtype: str,
    method: str,
) -> Iterator[Array]:
    """Quantize a weight (rows, width): gives its codes as they are made, fills the rest in place.

    pieces: the weight row-major, cut anywhere between groups; bfloat16 as its uint16 bits.
    scales, biases: one a group, in order, as their bits in `dtype` (uint16 for the 16-bit ones,
    float32 for float32). Gives codes uint32 (groups, group * bits / 32), in one reused buffer:
    they are valid until the next are asked for.
    """
    rounding, work, done = _ROUNDINGS[dtype], Workspace(group), 0
    words = np.empty((work.groups, group * bits // 32), np.uint32)
    with np.errstate(all="ignore"), one_thread():
        for source in blocks(pieces, group):
            work.load(source)
            exact = _dtype_name(source) == dtype
            if method == "rtn" and not exact:
                work.weight[...] = rounding.nearest(work.weight)
            edges = _edges(work, bits, rounding, exact)
            work.center(edges[1])
            if method == "rtn":
                fit = rounding.nearest(edges[0]), edges[1]
                work.divide(edges[0])
            else:
                fit = _best(work, edges, bits, rounding, method)
                work.scale(fit)
            block = slice(done, done + len(source))
            scales[block], biases[block] = (rounding.bits(part) for part in fit)
            np.copyto(words[: len(source)], pack(work.integers(fit, bits), bits, _MAGIC_BITS))
            done = block.stop
            yield words[: len(source)]


def _dtype_name(weight: Array) -> str:
    return "bfloat16" if weight.dtype == np.uint16 else weight.dtype.name


def blocks(pieces: Iterable[Array], group: int) -> Iterator[Array]:
    """The groups (count, group) in order, as many at a time as fit the workspace."""
    step = _block_groups(group)
    for piece in pieces:
        groups = piece.reshape(-1, group)
        yield from (groups[start : start + step] for start in range(0, len(groups), step))


def _block_groups(group: int) -> int:
    # Not a power of two: transposing into rows so far apart would hit one cache set 64 times.
    return _BLOCK // group + 16


# ------------------------------------------------------------------------------ storage rounding


@dataclass(frozen=True)
class _Rounding:
    """float32 values as a storage dtype holds them.

    nearest: ties to even. away: the next value away from zero, unless exact. bits: of values that
    are rounded already.
    """

    nearest: Callable[[Floats], Floats]
    away: Callable[[Floats], Floats]
    bits: Callable[[Floats], Array]


def _bfloat_nearest(values: Floats) -> Floats:
    rounded: Floats = _tensor(values).bfloat16().float().numpy()
    return rounded


def _bfloat_away(values: Floats) -> Floats:
    rounded = (values.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def _bfloat_bits(values: Floats) -> Array:
    return np.ascontiguousarray(values, "<f4").view("<u2")[1::2]


def _half_nearest(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _half_away(values: Floats) -> Floats:
    half = values.astype(np.float16)
    short = np.abs(half.astype(np.float32)) < np.abs(values)
    further = np.nextafter(half, np.copysign(np.float16(np.inf), half))
    return np.where(short, further, half).astype(np.float32)


def _half_bits(values: Floats) -> Array:
    return values.astype(np.float16).view(np.uint16)


def _same(values: Floats) -> Floats:
    return values


_ROUNDINGS = {
    "bfloat16": _Rounding(_bfloat_nearest, _bfloat_away, _bfloat_bits),
    "float16": _Rounding(_half_nearest, _half_away, _half_bits),
    "float32": _Rounding(_same, _same, _same),
}


# ------------------------------------------------------------------------------------- one block


class Workspace:
    """Buffers of one block, (group, groups): a group is a column, so that what is done to every
    group is one operation on long contiguous rows. groups: the most that a block has; `tensors`:
    weight, scaled and codes as torch's.
    """

    def __init__(self, group: int) -> None:
        self.groups = _block_groups(group)
        # Aligned, as numpy's are not: that halves the time of a pass.
        size = group * self.groups
        self._buffers = [_torch().empty(size).numpy() for _ in range(3)]
        self._shape(group, self.groups)

    def _shape(self, group: int, groups: int) -> None:
        self.weight, self.scaled, self.codes = (
            buffer[: group * groups].reshape(group, groups) for buffer in self._buffers
        )
        self.pairs = self.scaled[: group // 2].view(np.uint32)
        self.tensors = _tensor(self.weight), _tensor(self.scaled), _tensor(self.codes)

    def load(self, source: Array) -> None:
        """Transpose (groups, group), bfloat16 as its uint16 bits, into `weight`.

        Of bfloat16, `pairs` are two weights each, in the memory of `scaled`.
        """
        groups, group = source.shape
        if self.weight.shape != (group, groups):
            self._shape(group, groups)
        if source.dtype != np.uint16:
            np.copyto(self.weight, source.T)
            return
        # Two at a time: transposing 4-byte items costs half of what 2-byte ones do.
        np.copyto(self.pairs, source.view(np.uint32).T)
        bits = self.weight.view(np.uint32)
        np.left_shift(self.pairs, np.uint32(16), out=bits[::2])
        np.bitwise_and(self.pairs, np.uint32(0xFFFF0000), out=bits[1::2])

    def center(self, origin: Floats) -> None:
        """Subtract `origin` (groups,) from `weight`: what follows sees small numbers only."""
        self._origin = origin
        self.tensors[0].sub_(_tensor(origin))

    def divide(self, scale: Floats) -> None:
        """`scaled` = weight / scale, as `mx.quantize` computes it."""
        weight, scaled, _ = self.tensors
        _torch().div(weight, _tensor(scale), out=scaled)

    def scale(self, fit: "_Fit") -> None:
        """`scaled` = (weight + origin - bias) / scale to a few last bits, in less time."""
        weight, scaled, _ = self.tensors
        inverse = np.reciprocal(fit[0])
        shift = (self._origin - fit[1]) * inverse
        _torch().addcmul(_tensor(shift), weight, _tensor(inverse), out=scaled)

    def encode(self, fit: "_Fit", bits: int) -> None:
        """`scaled` = the nearest codes."""
        self.scale(fit)
        self.tensors[1].round_().clamp_(0, 2**bits - 1)

    def error(self, fit: "_Fit", bits: int) -> Floats:
        """Squared error (groups,) with the nearest codes, which are left in `codes`."""
        self.scale(fit)
        _, scaled, codes = self.tensors
        _torch().round(scaled, out=codes).clamp_(0, 2**bits - 1)
        residuals = scaled.sub_(codes).numpy()
        squares: Floats = np.einsum("ij,ij->j", residuals, residuals)
        return squares * fit[0] * fit[0]

    def integers(self, fit: "_Fit", bits: int) -> NDArray[np.uint32]:
        """`scaled` rounded to codes and added to _MAGIC_BITS; 0 in groups of NaN or infinity.

        (group, groups), in place of `scaled`.
        """
        if not np.isfinite(fit[0] @ fit[1]):
            np.nan_to_num(self.scaled, copy=False, nan=0)
        self.tensors[1].clamp_(0, 2**bits - 1).add_(_MAGIC)
        made: NDArray[np.uint32] = self.scaled.view(np.uint32)
        return made


def _torch() -> Any:
    import torch  # only when something is quantized: it takes a second

    return torch


def _tensor(array: Array) -> Any:
    """The same memory as torch's; uint32 as int32."""
    return _torch().from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array)


# Scale and bias of each group, (groups,) both.
_Fit = tuple[Floats, Floats]


def _edges(work: Workspace, bits: int, rounding: _Rounding, exact: bool) -> _Fit:
    """MLX's scale, not rounded yet, and bias (`quantize` in mlx/backend/cpu/quantized.cpp, 0.32).

    The bias is the group's edge of larger magnitude, and the scale makes zero a code. exact: the
    weight is stored as it is, so its edges need no rounding.
    """
    low, high = work.weight.min(axis=0), work.weight.max(axis=0)
    if not exact:
        low, high = rounding.nearest(low), rounding.nearest(high)
    below = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / np.float32(2**bits - 1), _EPSILON)
    scale = np.where(below, scale, -scale)
    edge = np.where(below, low, high)
    zero = np.rint(edge / scale)
    return np.where(zero != 0, edge / zero, scale), np.where(zero != 0, edge, np.float32(0))


def _best(work: Workspace, edges: _Fit, bits: int, rounding: _Rounding, method: str) -> _Fit:
    """Scale and bias as they are stored, for the least squared error of each group."""
    if method == "refit" and bits <= 4:
        return _refit(work, edges, bits, rounding)
    fits = _candidates(work, edges, bits, rounding, method)
    best = next(fits)
    least = work.error(best, bits)
    for fit in fits:
        error = work.error(fit, bits)
        better = error < least
        best = np.where(better, fit[0], best[0]), np.where(better, fit[1], best[1])
        least = np.where(better, error, least)
    return best


def _refit(work: Workspace, edges: _Fit, bits: int, rounding: _Rounding) -> _Fit:
    """Least squares from what `mx.quantize` stores, where that is better with the same codes.

    Encoding again can only improve on these, so that errors need not be compared. At 5 bit and more
    that would pass over groups which are better with other codes only.
    """
    scale, bias = start = rounding.nearest(edges[0]), edges[1]
    work.encode(start, bits)
    weights, codes, _ = work.tensors
    sums = _Sums.of(weights, codes)
    fitted = sums.least_squares(bias, rounding)
    better = (sums.change(start, fitted) < 0) & (fitted[0] != 0)
    return np.where(better, fitted[0], scale), np.where(better, fitted[1], bias)


def _candidates(
    work: Workspace, edges: _Fit, bits: int, rounding: _Rounding, method: str
) -> Iterator[_Fit]:
    """Fits to try. Each is encoded before the next is asked for: least squares start from it.

    The first is what `mx.quantize` stores, so no group ends worse. At 8 bit what hurts is the
    rounding of the scale, not its value: rounded away from zero it never clips the far edge. Below
    that the value counts, and least squares find a better one.
    """
    scale, bias = edges
    thorough = method == "search"
    starts = [((rounding.nearest(scale), bias), 3 if thorough else int(bits < 8))]
    if bits == 8 or thorough:
        starts.append(((rounding.away(scale), bias), 0))
    if thorough and bits < 8:
        starts += [((rounding.nearest(scale * c), rounding.nearest(bias * c)), 2) for c in _CLIPS]
    weights, _, codes = work.tensors
    for fit, refits in starts:
        yield fit
        for _ in range(refits):
            fit = _Sums.of(weights, codes).least_squares(bias, rounding)
            yield fit


@dataclass(frozen=True)
class _Sums:
    """Sums (groups,) over each group's centered weights and codes, and their products."""

    count: np.float32
    weights: Floats
    codes: Floats
    squares: Floats
    products: Floats

    @staticmethod
    def of(weights: Any, codes: Any) -> "_Sums":
        """Of tensors (group, groups)."""
        return _Sums(
            np.float32(len(codes)),
            weights.sum(0).numpy(),
            codes.sum(0).numpy(),
            np.einsum("ij,ij->j", codes, codes),
            np.einsum("ij,ij->j", codes, weights),
        )

    def least_squares(self, origin: Floats, rounding: _Rounding) -> _Fit:
        """Scale and bias fitted to the codes, rounded; origin: what the weights are centered by."""
        code, weight = self.codes / self.count, self.weights / self.count
        spread = self.squares - self.codes * code
        scale = rounding.nearest((self.products - self.codes * weight) / spread)
        # With the scale as it was rounded, the line still has to pass through the means.
        return scale, rounding.nearest(origin + weight - scale * code)

    def change(self, start: _Fit, fit: _Fit) -> Floats:
        """What the squared error gains from `start`, whose bias centers the weights, to `fit`."""
        shift = fit[1] - start[1]
        by_scale = (fit[0] - start[0]) * ((fit[0] + start[0]) * self.squares - 2 * self.products)
        by_bias = shift * (shift * self.count + 2 * (fit[0] * self.codes - self.weights))
        gain: Floats = by_scale + by_bias
        return gain


def pack(codes: NDArray[np.uint32], bits: int, offset: int = 0) -> NDArray[np.uint32]:
    """Codes (group, groups), each plus `offset`, to words (groups, group * bits / 32).

    The words are an LSB-first bit stream. Overwrites `codes`: neighbours are merged in place until
    a field no longer fits into a word twice, then the fields are laid into words, across their
    borders for 3, 5 and 6 bit.
    """
    group, groups = codes.shape
    fields, wide = codes, bits
    while 2 * wide <= 32:
        upper, fields = fields[1::2], fields[::2]
        merged = _tensor(fields).add_(_tensor(upper), alpha=1 << wide)
        if offset:
            merged.sub_(_signed(offset * (1 + (1 << wide))))
            offset = 0
        wide *= 2
    if wide == 32:
        return fields.T
    words = np.zeros((group * bits // 32, groups), np.uint32)
    for index, field in enumerate(fields):
        word, shift = divmod(index * wide, 32)
        words[word] |= field << np.uint32(shift)
        if shift + wide > 32:
            words[word + 1] |= field >> np.uint32(32 - shift)
    return words.T


def _signed(value: int) -> int:
    """The int32 of the same lowest 32 bits."""
    return (value + 2**31) % 2**32 - 2**31
