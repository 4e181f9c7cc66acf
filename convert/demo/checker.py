"""Does a picture show what its caption says? Colours, shapes, sizes and places, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .scenes import COLOURS, PLACES, RELATIONS, SHAPES, SIDE, Scene, coverage

Array = np.ndarray[Any, Any]

_SPECK = 10  # pixels; smaller regions are not counted
_LIKENESS = 0.75  # least intersection over union with the ideal shape of the same box
_BETWEEN_SIZES = 22.0  # pixels; a smaller box is "small"
_MOVED = 7.0  # pixels from the centre from which a shape is at a side
_NAMES = tuple(COLOURS)
_PALETTE = np.array(list(COLOURS.values()), np.float32)


@dataclass(frozen=True)
class Found:
    """A region of a picture: what it is, the side of its box and its centre in pixels."""

    colour: str
    shape: str | None  # None: like none of SHAPES
    size: str
    centre: tuple[float, float]


def faults(picture: Array, scene: Scene) -> list[str]:
    """What is wrong with the picture (SIDE, SIDE, 3) uint8 of a scene; empty when it is right."""
    background, found = read_picture(picture)
    if background != scene.background:
        return [f"background {background}, not {scene.background}"]
    if len(found) != len(scene.things):
        return [f"{len(found)} shapes, not {len(scene.things)}"]
    orders = [found] if len(found) == 1 else [found, found[::-1]]
    return min((_mismatches(scene, order) for order in orders), key=len)


def read_picture(picture: Array) -> tuple[str, list[Found]]:
    """The background's colour, and every region of another one that is not a speck."""
    distances = np.linalg.norm(picture[:, :, None].astype(np.float32) - _PALETTE, axis=-1)
    nearest = distances.argmin(-1)
    background = int(np.bincount(nearest.ravel()).argmax())
    regions = [r for r in _regions(nearest != background) if r.sum() >= _SPECK]
    found = [_read_region(region, nearest, distances, background) for region in regions]
    return _NAMES[background], found


def _regions(mask: Array) -> list[Array]:
    """The connected regions of a mask, diagonal neighbours included."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(labels, 1)
        rows = np.maximum(np.maximum(padded[:-2], padded[1:-1]), padded[2:])
        spread = np.maximum(np.maximum(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:])
        spread = np.where(mask, spread, 0)
        if np.array_equal(spread, labels):
            return [labels == label for label in np.unique(labels) if label]
        labels = spread


def _read_region(region: Array, nearest: Array, distances: Array, background: int) -> Found:
    colour = int(np.bincount(nearest[region]).argmax())
    mask = region & (distances[..., colour] < distances[..., background])
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        mask, rows, columns = region, np.flatnonzero(region.any(1)), np.flatnonzero(region.any(0))
    left, top, right, bottom = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    wide, high = right - left, bottom - top
    extent = (wide + high) / 2
    pure = (nearest[region] == colour).mean()  # the rest: edges, where two colours mix
    likeness = {shape: _likeness(mask, shape, (left, top, right, bottom)) for shape in SHAPES}
    best = max(likeness, key=lambda shape: likeness[shape])
    whole = likeness[best] >= _LIKENESS and 0.75 < wide / high < 1 / 0.75 and pure > 0.6
    return Found(
        _NAMES[colour],
        best if whole else None,
        "small" if extent < _BETWEEN_SIZES else "large",
        ((left + right) / 2, (top + bottom) / 2),
    )


def _likeness(mask: Array, shape: str, box: tuple[int, int, int, int]) -> float:
    ideal = coverage(shape, box) > 0.5
    return float((mask & ideal).sum() / (mask | ideal).sum())


def _mismatches(scene: Scene, found: list[Found]) -> list[str]:
    wrong = []
    for thing, seen in zip(scene.things, found, strict=True):
        for name in ("colour", "shape", "size"):
            said, is_ = getattr(thing, name), getattr(seen, name)
            if said is not None and said != is_:
                wrong.append(f"{thing}: {name} is {is_}")
    if scene.where is not None and not _placed(scene.where, [seen.centre for seen in found]):
        wrong.append(f"not {scene.where}")
    return wrong


def _placed(where: str, centres: list[tuple[float, float]]) -> bool:
    """Whether one shape is at its place, or two in their relation: mostly along its axis."""
    if len(centres) == 1:
        direction, origin, least = PLACES[where], (SIDE / 2, SIDE / 2), _MOVED
    else:
        direction, origin, least = RELATIONS[where], centres[1], 0.0
    offset = [centres[0][i] - origin[i] for i in (0, 1)]
    if direction == (0, 0):
        return max(map(abs, offset)) < _MOVED
    along = sum(o * d for o, d in zip(offset, direction, strict=True))
    across = sum(abs(o * (1 - abs(d))) for o, d in zip(offset, direction, strict=True))
    return along > max(least, across)
