"""Affine quantization in MLX's layout, in numpy: w is about scale * code + bias, group by group.

The work is done over blocks of groups that stay in a core's cache. That costs less CPU time than
`mx.quantize` on CPU, needs no compiler (as `mx.compile` does there), and gives the same bytes on
every machine. The "rtn" result is bit-identical to `mx.quantize` on CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
METHODS = ("rtn", "refit", "search")

# Elements a block: its buffers stay in a core's second-level cache.
_BLOCK = 1 << 18
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
    with np.errstate(all="ignore"):
        for source in blocks(pieces, group):
            work.load(source)
            exact = _dtype_name(source) == dtype
            if method == "rtn" and not exact:
                work.weight[...] = rounding.nearest(work.weight)
            fit = _fit(work, bits, rounding, method, exact)
            block = slice(done, done + len(source))
            scales[block], biases[block] = (rounding.bits(part) for part in fit)
            np.copyto(words[: len(source)], pack(_integers(work, fit), bits))
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
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))


def _bfloat_away(values: Floats) -> Floats:
    rounded = (values.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def _bfloat_bits(values: Floats) -> Array:
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


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
    group is one operation on long contiguous rows. groups: the most that a block has.
    """

    def __init__(self, group: int) -> None:
        self.groups = _block_groups(group)
        size = group * self.groups
        self._buffers = [np.empty(size // 2, np.uint32), *np.empty((3, size), np.float32)]
        self.pairs, self.weight, self.scaled, self.codes = self._buffers

    def load(self, source: Array) -> None:
        """Transpose (groups, group), bfloat16 as its uint16 bits, into `weight`."""
        groups, group = source.shape
        heights = (group // 2, group, group, group)
        self.pairs, self.weight, self.scaled, self.codes = (
            buffer[: height * groups].reshape(height, groups)
            for buffer, height in zip(self._buffers, heights)
        )
        if source.dtype != np.uint16:
            np.copyto(self.weight, source.T)
            return
        # Two at a time: transposing 4-byte items costs half of what 2-byte ones do.
        np.copyto(self.pairs, source.view(np.uint32).T)
        bits = self.weight.view(np.uint32)
        np.left_shift(self.pairs, np.uint32(16), out=bits[::2])
        np.bitwise_and(self.pairs, np.uint32(0xFFFF0000), out=bits[1::2])

    def encode(self, fit: "_Fit", bits: int) -> None:
        """`scaled` = (weight - bias) / scale, and `codes` = the nearest code to it."""
        scale, bias = fit
        np.subtract(self.weight, bias, out=self.scaled)
        np.divide(self.scaled, scale, out=self.scaled)
        np.rint(self.scaled, out=self.codes)
        np.clip(self.codes, 0, 2**bits - 1, out=self.codes)

    def error(self, fit: "_Fit") -> Floats:
        """Squared error (groups,) of the codes; `scaled` becomes the residual, in codes."""
        self.subtract_codes()
        squares: Floats = np.einsum("ij,ij->j", self.scaled, self.scaled)
        return squares * fit[0] * fit[0]

    def subtract_codes(self) -> None:
        """`scaled` becomes the residual, in codes."""
        np.subtract(self.scaled, self.codes, out=self.scaled)


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


def _fit(work: Workspace, bits: int, rounding: _Rounding, method: str, exact: bool) -> _Fit:
    """Choose scale and bias, as they are stored, leaving their codes in the workspace."""
    edges = _edges(work, bits, rounding, exact)
    if method == "rtn":
        work.encode(edges, bits)
        return rounding.nearest(edges[0]), edges[1]
    if method == "refit" and bits <= 4:
        return _refit(work, edges, bits, rounding)
    return _compare(work, _candidates(work, edges, bits, rounding, method), bits)


def _refit(work: Workspace, edges: _Fit, bits: int, rounding: _Rounding) -> _Fit:
    """Least squares from what `mx.quantize` stores, where that is better with the same codes.

    Encoding again can only improve on these, so that errors need not be compared. At 5 bit and more
    that would pass over groups which are better with other codes only.
    """
    scale, bias = start = rounding.nearest(edges[0]), edges[1]
    work.encode(start, bits)
    work.subtract_codes()
    sums = _Sums.of(work)
    fitted = sums.least_squares(start, rounding)
    better = (sums.change(start, fitted) < 0) & (fitted[0] != 0)
    best = np.where(better, fitted[0], scale), np.where(better, fitted[1], bias)
    work.encode(best, bits)
    return best


def _compare(work: Workspace, fits: Iterator[_Fit], bits: int) -> _Fit:
    """Encode with each fit, and again with the best of each group, by its squared error."""
    best = next(fits)
    work.encode(best, bits)
    least = work.error(best)
    for fit in fits:
        work.encode(fit, bits)
        error = work.error(fit)
        better = error < least
        best = np.where(better, fit[0], best[0]), np.where(better, fit[1], best[1])
        least = np.where(better, error, least)
    work.encode(best, bits)
    return best


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
    for fit, refits in starts:
        yield fit
        for _ in range(refits):
            fit = _Sums.of(work).least_squares(fit, rounding)
            yield fit


@dataclass(frozen=True)
class _Sums:
    """Sums (groups,) over each group's codes and residuals (in codes), and their products."""

    count: np.float32
    codes: Floats
    residuals: Floats
    squares: Floats
    products: Floats

    @staticmethod
    def of(work: Workspace) -> "_Sums":
        """From a workspace whose `scaled` is the residual."""
        return _Sums(
            np.float32(len(work.codes)),
            work.codes.sum(axis=0),
            work.scaled.sum(axis=0),
            np.einsum("ij,ij->j", work.codes, work.codes),
            np.einsum("ij,ij->j", work.codes, work.scaled),
        )

    def least_squares(self, fit: _Fit, rounding: _Rounding) -> _Fit:
        """Scale and bias fitted to the codes, rounded: residual = shift + tilt * code.

        Regressing the residual instead of the weight keeps float32 sums accurate.
        """
        scale, bias = fit
        mean, shift = self.codes / self.count, self.residuals / self.count
        spread = self.squares - self.codes * mean
        tilt = (self.products - self.codes * shift) / spread
        fitted = rounding.nearest(scale * (1 + tilt))
        # With the scale as it was rounded, the line still has to pass through the means.
        return fitted, rounding.nearest(bias + scale * (mean + shift) - fitted * mean)

    def change(self, fit: _Fit, other: _Fit) -> Floats:
        """What the squared error gains, in squared codes, when `other` replaces the fit.

        The residual becomes residual + tilt * code + shift.
        """
        tilt, shift = (fit[0] - other[0]) / fit[0], (fit[1] - other[1]) / fit[0]
        by_tilt = tilt * (tilt * self.squares + 2 * (self.products + shift * self.codes))
        gain: Floats = by_tilt + shift * (shift * self.count + 2 * self.residuals)
        return gain


def _integers(work: Workspace, fit: _Fit) -> NDArray[np.uint32]:
    """The codes as uint32 (group, groups); 0 in groups of NaN or infinity."""
    if not np.isfinite(fit[0]).all() or not np.isfinite(fit[1]).all():
        np.nan_to_num(work.codes, copy=False, nan=0)
    # int32 first: the direct cast to uint32 is twice as slow. `scaled` is free by now.
    np.copyto(work.scaled.view(np.int32), work.codes, casting="unsafe")
    integers: NDArray[np.uint32] = work.scaled.view(np.uint32)
    return integers


def pack(codes: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Codes (group, groups) to words (groups, group * bits / 32): an LSB-first bit stream.

    Overwrites `codes`: neighbours are merged in place until a field no longer fits into a word
    twice, then the fields are laid into words, across their borders for 3, 5 and 6 bit.
    """
    group, groups = codes.shape
    fields, wide = codes, bits
    while 2 * wide <= 32:
        upper = fields[1::2]
        np.left_shift(upper, np.uint32(wide), out=upper)
        np.bitwise_or(fields[::2], upper, out=fields[::2])
        fields, wide = fields[::2], 2 * wide
    if wide == 32:
        return fields.T
    words = np.zeros((group * bits // 32, groups), np.uint32)
    for index, field in enumerate(fields):
        word, shift = divmod(index * wide, 32)
        words[word] |= field << np.uint32(shift)
        if shift + wide > 32:
            words[word + 1] |= field >> np.uint32(32 - shift)
    return words.T
