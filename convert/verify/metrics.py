"""Numbers of a comparison: running sums, the metrics made of them, and one row of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxconv.runtime.errors import MlxconvError

Array = np.ndarray[Any, Any]
QUANTIZATION_ERROR = "quantization error, reported only"
EXACT_DB = 400.0  # `sqnr_db` of equal values, which have no finite one


_PIECE = 1 << 16  # elements at a time: in cache, and few enough for sums in float32
_SMALL = 1e-10  # of values in float32, whose differences' squares must not vanish


@dataclass
class Sums:
    """Running sums over pairs of arrays: everything the metrics need."""

    difference: float = 0.0
    reference: float = 0.0
    product: float = 0.0
    other: float = 0.0
    max_abs: float = 0.0
    max_reference: float = 0.0
    not_finite: str = ""  # where the first NaN or infinity is
    constant: bool = False  # the references hold one number each: equality proves nothing

    @property
    def finite(self) -> bool:
        """Whether all values were finite, on both sides."""
        return not self.not_finite

    def add(self, a: Any, b: Any, name: str = "") -> None:
        """Compare `a` with the reference `b`, arrays of one shape; a piece at a time."""
        shape = np.shape(b)
        a, b = np.asarray(a).ravel(), np.asarray(b).ravel()
        narrow = a.dtype == b.dtype == np.float32
        for start in range(0, a.size, _PIECE):
            x, y = (v[start : start + _PIECE] for v in (a, b))
            # Values whose squares leave the range of float32, or are not finite, need more.
            if not (narrow and _largest(y) > _SMALL and self._add(x, y)):
                self._find_not_finite({"result": x, "reference": y}, start, shape, name)
                with np.errstate(all="ignore"):
                    self._add(x.astype(np.float64), y.astype(np.float64), last=True)

    def add_equal(self, a: Any) -> None:
        """As `add(a, a)`, in a fraction of the time: for values already known to be equal."""
        a = np.asarray(a).ravel()
        for start in range(0, a.size, _PIECE):
            piece = a[start : start + _PIECE].astype(np.float32)
            square = float(piece @ piece)
            if not math.isfinite(square) or square < _SMALL:
                self.add(piece, piece)
                continue
            self.reference += square
            self.other += square
            self.product += square
            self.max_reference = max(self.max_reference, _largest(piece))

    def _add(self, a: Any, b: Any, *, last: bool = False) -> bool:
        """Add the sums of one piece; not where they overflow, unless it is the `last` way."""
        with np.errstate(all="ignore"):
            gap = a - b
            sums = [float(x @ y) for x, y in ((gap, gap), (b, b), (a, a), (a, b))]
        if not (last or all(map(math.isfinite, sums))):
            return False
        self.difference += sums[0]
        self.reference += sums[1]
        self.other += sums[2]
        self.product += sums[3]
        self.max_abs = max(self.max_abs, _largest(gap)) if self.finite else math.inf
        self.max_reference = max(self.max_reference, _largest(b))
        return True

    def _find_not_finite(
        self, sides: dict[str, Array], start: int, shape: tuple[int, ...], name: str
    ) -> None:
        for side, values in sides.items():
            bad = np.flatnonzero(~np.isfinite(values))
            if self.finite and bad.size:
                at = [int(i) for i in np.unravel_index(start + bad[0], shape)]
                self.not_finite = " ".join(filter(None, (f"in the {side}", name, f"at {at}")))

    @property
    def rel_l2(self) -> float:
        """||a-b|| / ||b||; ||a|| where the reference is zero; infinite unless both are finite."""
        if not self.finite:
            return math.inf
        if not self.reference:
            return math.sqrt(self.other)
        return math.sqrt(self.difference / self.reference)

    @property
    def max_rel(self) -> float:
        """max|a-b| / max|b|; max|a| where the reference is zero."""
        return self.max_abs / self.max_reference if self.max_reference else self.max_abs

    @property
    def cosine(self) -> float:
        """The cosine of the angle between a and b; 1 where both are zero."""
        lengths = math.sqrt(self.reference * self.other)
        return self.product / lengths if lengths else float(self.difference == 0)

    @property
    def sqnr_db(self) -> float:
        """-20 log10(rel_l2), at most EXACT_DB."""
        error = self.rel_l2
        if error == math.inf or math.isnan(error):
            return -math.inf
        return -20 * math.log10(error) if error else EXACT_DB


def _largest(values: Any) -> float:
    """max|values|."""
    return float(max(values.max(), -values.min()))


def compare(results: Iterable[Any], references: Iterable[Any]) -> Sums:
    """Sums over all outputs. MlxconvError when their number or shapes differ."""
    results, references = list(results), list(references)
    shapes = [tuple(np.shape(a)) for a in results], [tuple(np.shape(b)) for b in references]
    if shapes[0] != shapes[1]:
        raise MlxconvError(f"outputs have shapes {shapes[0]}, diffusers gives {shapes[1]}")
    sums = Sums()
    for number, (a, b) in enumerate(zip(results, references)):
        sums.add(to_numpy(a), b, f"(output {number + 1})" if len(references) > 1 else "")
    varying = [b for b in map(np.asarray, references) if b.dtype.kind == "f" and b.size > 1]
    sums.constant = bool(varying) and all(b.min() == b.max() for b in varying)
    return sums


def decibels(value: float, unit: str = "") -> str:
    """For people: EXACT_DB stands for equal values."""
    return "exact" if value >= EXACT_DB else f"{value:.1f}{unit}"


def to_numpy(value: Any) -> Array:
    """An MLX array as NumPy; bfloat16 as float32."""
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        value = value.astype(mx.float32)
    return np.asarray(value)


@dataclass(frozen=True)
class Row:
    """One measured comparison. `threshold` is on `rel_l2`; None: judged otherwise (see `note`)."""

    tier: str
    component: str
    name: str
    max_abs: float
    max_rel: float
    rel_l2: float
    cosine: float
    sqnr_db: float
    threshold: float | None
    reference: str
    passed: bool
    note: str = ""
    psnr_db: float | None = None  # of pictures, whose values are in 0 to 1

    @property
    def judged(self) -> bool:
        """False for the quantization error, which is reported but not judged."""
        return not self.note.startswith(QUANTIZATION_ERROR)


def psnr_db(sums: Sums, count: int) -> float:
    """Peak signal-to-noise ratio of `count` values in 0 to 1, at most EXACT_DB."""
    if not (sums.finite and math.isfinite(sums.difference)):
        return -math.inf
    return -10 * math.log10(sums.difference / count) if sums.difference else EXACT_DB


def make_row(
    tier: str,
    component: str,
    name: str,
    sums: Sums,
    threshold: float | None,
    reference: str,
    *,
    passed: bool | None = None,
    note: str = "",
) -> Row:
    """The row of these sums, judged by `threshold` unless `passed` says how it was judged."""
    if passed is None:
        passed = sums.rel_l2 <= (threshold or 0.0)
    if not sums.finite:
        where = f"NaN or infinity {sums.not_finite}"
        note = note if where in note else ", ".join(filter(None, (note, where)))
    return Row(
        tier,
        component,
        name,
        sums.max_abs,
        sums.max_rel,
        sums.rel_l2,
        sums.cosine,
        sums.sqnr_db,
        threshold,
        reference,
        bool(passed) and sums.finite,
        note,
    )
