"""Errors along a model or a trajectory as inline SVG: a logarithmic axis, values and limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

_HEIGHT, _LEFT, _RIGHT, _TOP = 236, 50, 14, 14
_LINE = 15  # of text under the axis
_LETTER = 6.1  # width of a character, about
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


def log_plot(series: Sequence[Series], label: str, width: int) -> str:
    """An SVG of `width` units, all series on one axis; `label` says what it shows."""
    axes = _Axes(series, width)
    parts = [*axes.drawn(), *(part for one in series for part in _line(one, axes))]
    height = _HEIGHT + axes.rows * _LINE
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


class _Axes:
    """Where values go: decades upwards, points from left to right."""

    def __init__(self, series: Sequence[Series], width: int) -> None:
        self.points = max((s.points for s in series), key=len)
        values = [v for s in series for p in s.points for v in (p.value, p.limit) if _shown(v)]
        exponents = [math.log10(v) for v in values if v] or [0.0]
        self.low, self.high = math.floor(min(exponents)), math.ceil(max(exponents))
        self.high = max(self.high, self.low + 2)
        self.right, self.bottom = width - _RIGHT, _HEIGHT - 20
        self.groups = [(g, len(list(ps))) for g, ps in groupby(self.points, lambda p: p.group)]
        self.places = list(self._placed())
        self.rows = 1 + max(row for _, row in self.places)

    def x(self, i: int) -> float:
        """Of point number i: each has an equal share of the axis."""
        return _LEFT + (i + 0.5) / len(self.points) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        """Zero is drawn at the bottom, what is not finite at the top."""
        exponent = math.log10(value) if value and math.isfinite(value) else self.low
        exponent = exponent if math.isfinite(value) else self.high
        share = (exponent - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - _TOP)

    def drawn(self) -> Iterator[str]:
        """Lines of the decades, and what the points are."""
        every = max(1, math.ceil((self.high - self.low) / 8))
        for exponent in range(self.low, self.high + 1, every):
            y = self.y(10.0**exponent)
            power = str(exponent).translate(_SUPERSCRIPT)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{self.right}"/>'
            where = f'x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end"'
            yield f'<text class="tick" {where}>10{power}</text>'
        start = 0
        for k, (name, count) in enumerate(self.groups):
            yield from self._group(k, name, start, count)
            start += count

    def _placed(self) -> Iterator[tuple[float, int]]:
        """The middle and the row of each group's name: the first row that has room for it."""
        ends: list[float] = []
        start = 0
        for name, count in self.groups:
            half = len(name) * _LETTER / 2
            middle = (self.x(start) + self.x(start + count - 1)) / 2
            middle = min(max(middle, half), self.right + _RIGHT - half)
            free = [row for row, end in enumerate(ends) if end + _LETTER < middle - half]
            row = free[0] if free else len(ends)
            ends[row : row + 1] = [middle + half]
            yield middle, row
            start += count

    def _group(self, k: int, name: str, start: int, count: int) -> Iterator[str]:
        """Indices of a group's first and last point, its name, a line before it."""
        if start:
            before = (self.x(start - 1) + self.x(start)) / 2
            yield f'<path class="grid" d="M{before:.1f} {_TOP}V{self.bottom}"/>'
        for i in sorted({start, start + count - 1}):
            yield self._text(self.x(i), 0, self.points[i].index)
        middle, row = self.places[k]
        yield self._text(middle, 1 + row, name)

    def _text(self, x: float, row: int, text: str) -> str:
        y = self.bottom + 15 + row * _LINE
        return f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _line(series: Series, axes: _Axes) -> Iterator[str]:
    places = [(axes.x(i), axes.y(p.value)) for i, p in enumerate(series.points)]
    limits = [(axes.x(i), axes.y(p.limit)) for i, p in enumerate(series.points) if p.limit]
    if limits:
        half = (axes.right - _LEFT) / len(axes.points) / 2
        steps = "".join(f"M{x - half:.1f} {y:.1f}H{x + half:.1f}" for x, y in limits)
        yield f'<path class="limit" d="{steps}"/>'
    joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path class="line {series.style}" d="M{joined}"/>'
    for (x, y), point in zip(places, series.points):
        told = f"<title>{escape(f'{point.name}: {point.value:.2e}')}</title>"
        if point.passed:
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="3.5"'
            yield f'<circle class="{series.style}" {place}>{told}</circle>'
        else:
            cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
            yield f'<path class="wrong" d="{cross}">{told}</path>'


def _shown(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
