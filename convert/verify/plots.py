"""Errors along a model or a trajectory as inline SVG: a logarithmic axis, values and limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from ..templates import render

_HEIGHT, _RIGHT = 236, 14
_LETTER = 6.1  # width of a character, about
_FILTERS = {"place": "{:.1f}".format}
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Point:
    """One measured value. group and index: what is under the axis; limit: None where unjudged."""

    name: str
    group: str
    index: str
    value: float
    limit: float | None
    passed: bool


@dataclass(frozen=True)
class Series:
    """Points in order, joined by a line. style: a class of the page's style sheet."""

    label: str
    style: str
    points: Sequence[Point]

    @property
    def limited(self) -> bool:
        """Whether any of its points is judged."""
        return any(point.limit for point in self.points)


def log_plot(series: Sequence[Series], label: str, width: int) -> Markup:
    """An SVG of `width` units, all series on one axis; `label` says what it shows."""
    axes = _Axes(series, width)
    return Markup(render("verify/plot.svg.jinja", _FILTERS, axes=axes, series=series, label=label))


class _Axes:
    """Where values go: decades upwards, points from left to right."""

    left, top, line_height = 50, 14, 15

    def __init__(self, series: Sequence[Series], width: int) -> None:
        self.points = max((s.points for s in series), key=len)
        values = [v for s in series for p in s.points for v in (p.value, p.limit or 0.0)]
        exponents = [math.log10(v) for v in values if v and math.isfinite(v)] or [0.0]
        self.low, self.high = math.floor(min(exponents)), math.ceil(max(exponents))
        self.high = max(self.high, self.low + 2)
        self.width, self.right, self.bottom = width, width - _RIGHT, _HEIGHT - 20
        self.half = (self.right - self.left) / len(self.points) / 2
        self.groups = [(g, len(list(ps))) for g, ps in groupby(self.points, lambda p: p.group)]
        self.names = list(self._names())
        self.height = _HEIGHT + (1 + max(row for _, row, _ in self.names)) * self.line_height

    def x(self, i: int) -> float:
        """Of point number i: each has an equal share of the axis."""
        return self.left + (2 * i + 1) * self.half

    def y(self, value: float) -> float:
        """Zero is drawn at the bottom, what is not finite at the top."""
        exponent = math.log10(value) if value and math.isfinite(value) else self.low
        exponent = exponent if math.isfinite(value) else self.high
        share = (exponent - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)

    def places(self, points: Sequence[Point]) -> Iterator[tuple[float, float, Point]]:
        """The points of a series, each with its place."""
        yield from ((self.x(i), self.y(point.value), point) for i, point in enumerate(points))

    def decades(self) -> Iterator[tuple[float, str]]:
        """The heights of the decades' lines, and their exponents as superscripts."""
        every = max(1, math.ceil((self.high - self.low) / 8))
        for exponent in range(self.low, self.high + 1, every):
            yield self.y(10.0**exponent), str(exponent).translate(_SUPERSCRIPT)

    def _starts(self) -> Iterator[tuple[str, int, int]]:
        """Each group's name, and the numbers of its first and last point."""
        start = 0
        for name, count in self.groups:
            yield name, start, start + count - 1
            start += count

    def borders(self) -> Iterator[float]:
        """Where the lines between groups are."""
        yield from (self.x(first) - self.half for _, first, _ in self._starts() if first)

    def texts(self) -> Iterator[tuple[float, int, str]]:
        """What is under the axis: middle, row and text; indices of each group's ends, its name."""
        for _, first, last in self._starts():
            yield from ((self.x(i), 0, self.points[i].index) for i in sorted({first, last}))
        yield from ((middle, 1 + row, name) for middle, row, name in self.names)

    def _names(self) -> Iterator[tuple[float, int, str]]:
        """The middle and the row of each group's name: the first row that has room for it."""
        ends: list[float] = []
        for name, first, last in self._starts():
            half = len(name) * _LETTER / 2
            middle = (self.x(first) + self.x(last)) / 2
            middle = min(max(middle, half), self.width - half)
            free = [row for row, end in enumerate(ends) if end + _LETTER < middle - half]
            row = free[0] if free else len(ends)
            ends[row : row + 1] = [middle + half]
            yield middle, row, name
