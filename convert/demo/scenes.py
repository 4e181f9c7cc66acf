"""Captioned pictures: one or two plain shapes on a plain background, drawn from a seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64  # pixels of a picture's side
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (245, 210, 40),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross")
EXTENTS = {"small": (16.0, 19.0), "large": (25.0, 28.0)}  # side of the bounding box, pixels
PLACES = {
    "in the centre": (0, 0),
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
}  # of one shape: the direction of its centre from the picture's
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}

_FINE = 4  # a picture is drawn this many times larger and reduced
_MARGIN = 2.0  # pixels between a shape and the border
_GAP = 5.0  # pixels between two shapes
_AWAY = 15.5  # pixels of a shape's centre from the picture's
_TREMBLE = 1.0  # pixels that a shape is moved by lot, each way
_HELD_OUT = 40  # one caption in so many is never trained on

Array = np.ndarray[Any, Any]
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class Thing:
    """A shape as a caption names it. `size` None: either size."""

    colour: str
    shape: str
    size: str | None = None

    def __str__(self) -> str:
        return " ".join(word for word in ("a", self.size, self.colour, self.shape) if word)


@dataclass(frozen=True)
class Scene:
    """What a caption says. `where`: a key of PLACES or None (anywhere); of RELATIONS for two."""

    background: str
    things: tuple[Thing, ...]
    where: str | None

    @property
    def caption(self) -> str:
        """Such as "a red circle on blue, left of a small green square"."""
        first = f"{self.things[0]} on {self.background}"
        return ", ".join(
            (first, " ".join(map(str, (self.where, *self.things[1:])))) if self.where else (first,)
        )


def coverage(shape: str, box: Box) -> Array:
    """The share of each pixel (SIDE, SIDE) that the shape filling `box` covers, 0 to 1."""
    left, top, right, bottom = (edge * _FINE for edge in box)
    mask = Image.new("L", (SIDE * _FINE, SIDE * _FINE))
    pen = ImageDraw.Draw(mask)
    if shape == "circle":
        pen.ellipse((left, top, right - 1, bottom - 1), fill=255)
    elif shape == "square":
        pen.rectangle((left, top, right - 1, bottom - 1), fill=255)
    elif shape == "triangle":
        pen.polygon([((left + right) / 2, top), (right - 1, bottom - 1), (left, bottom - 1)], 255)
    else:
        wide, high = (right - left) / 3, (bottom - top) / 3
        pen.rectangle((left + wide, top, right - wide - 1, bottom - 1), fill=255)
        pen.rectangle((left, top + high, right - 1, bottom - high - 1), fill=255)
    return np.asarray(mask.reduce(_FINE), np.float32) / 255


def draw(scene: Scene, rng: np.random.Generator, loose: bool = False) -> Array:
    """A picture of the scene (SIDE, SIDE, 3) uint8; what is not said by lot.

    There are few positions and sizes, moved by a pixel or so; `loose`: any that fit the caption.
    """
    layout = _loose_layout if loose else _layout
    picture = np.broadcast_to(_colour(scene.background), (SIDE, SIDE, 3))
    for thing, box in zip(scene.things, layout(scene, rng), strict=True):
        share = coverage(thing.shape, box)[..., None]
        picture = picture * (1 - share) + _colour(thing.colour) * share
    return np.round(picture).astype(np.uint8)


def _colour(name: str) -> Array:
    return np.array(COLOURS[name], np.float32)


def _box(x: float, y: float, extent: float) -> Box:
    return x - extent / 2, y - extent / 2, x + extent / 2, y + extent / 2


def _place(where: str | None, rng: np.random.Generator) -> tuple[int, int]:
    """The direction of a single shape, by lot where none is said."""
    return list(PLACES.values())[rng.integers(len(PLACES))] if where is None else PLACES[where]


def _size(said: str | None, rng: np.random.Generator) -> tuple[float, float]:
    return EXTENTS[said or ("small", "large")[rng.integers(2)]]


# ---- few positions and sizes --------------------------------------------------------------------


def _layout(scene: Scene, rng: np.random.Generator) -> list[Box]:
    extents = [sum(_size(thing.size, rng)) / 2 for thing in scene.things]
    if len(scene.things) == 1:
        directions = [_place(scene.where, rng)]
    else:
        assert scene.where is not None
        x, y = RELATIONS[scene.where]
        directions = [(x, y), (-x, -y)]
    moved = rng.uniform(-_TREMBLE, _TREMBLE, (len(extents), 2))
    centres = SIDE / 2 + _AWAY * np.array(directions) + moved
    return [_box(x, y, extent) for (x, y), extent in zip(centres.tolist(), extents, strict=True)]


# ---- any that fit -------------------------------------------------------------------------------


def _loose_layout(scene: Scene, rng: np.random.Generator) -> list[Box]:
    extents = [float(rng.uniform(*_size(thing.size, rng))) for thing in scene.things]
    if len(scene.things) == 1:
        centres = [_single_centre(scene.where, extents[0], rng)]
    else:
        assert scene.where is not None
        centres = _pair_centres(RELATIONS[scene.where], extents, rng)
    return [_box(x, y, extent) for (x, y), extent in zip(centres, extents, strict=True)]


def _single_centre(
    where: str | None, extent: float, rng: np.random.Generator
) -> tuple[float, float]:
    """One shape: towards a side by 11 to 16 pixels, across that by 4 at most."""
    direction = _place(where, rng)
    free = SIDE / 2 - _MARGIN - extent / 2
    away = min(rng.uniform(11, 16), free)
    x, y = (SIDE / 2 + away * along + rng.uniform(-4, 4) * (1 - abs(along)) for along in direction)
    return float(x), float(y)


def _pair_centres(
    direction: tuple[int, int], extents: list[float], rng: np.random.Generator
) -> list[tuple[float, float]]:
    """Two shapes side by side along `direction`, shifted across it by 5 pixels at most each."""
    order = (0, 1) if sum(direction) < 0 else (1, 0)  # which of the two comes first along the axis
    free = SIDE - 2 * _MARGIN - _GAP - sum(extents)
    before, between, _ = rng.dirichlet((2, 1, 2)) * free
    along = [0.0, 0.0]
    along[order[0]] = _MARGIN + before + extents[order[0]] / 2
    along[order[1]] = _MARGIN + before + extents[order[0]] + _GAP + between + extents[order[1]] / 2
    across = [SIDE / 2 + float(rng.uniform(-5, 5)) for _ in extents]
    pairs = zip(along, across, strict=True)
    return [(a, c) if direction[0] else (c, a) for a, c in pairs]


# ---- scenes -------------------------------------------------------------------------------------


def random_scene(rng: np.random.Generator) -> Scene:
    """A scene by lot: one shape in three cases of ten, else two; a third of the sizes unnamed."""
    background = _choice(tuple(COLOURS), rng)
    count = 1 if rng.random() < 0.3 else 2
    things = tuple(_random_thing(background, rng) for _ in range(count))
    where = _choice((*PLACES, None), rng) if count == 1 else _choice(tuple(RELATIONS), rng)
    return Scene(background, things, where)


def _random_thing(background: str, rng: np.random.Generator) -> Thing:
    colour = _choice(tuple(c for c in COLOURS if c != background), rng)
    return Thing(colour, _choice(SHAPES, rng), _choice((None, *EXTENTS), rng))


def _choice(options: tuple[Any, ...], rng: np.random.Generator) -> Any:
    return options[rng.integers(len(options))]


def is_held_out(scene: Scene) -> bool:
    """Whether the caption is kept from training: one in 40, by its hash without size words."""
    plain = replace(scene, things=tuple(replace(thing, size=None) for thing in scene.things))
    digest = hashlib.sha256(plain.caption.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT == 0


def training_scene(rng: np.random.Generator) -> Scene:
    """A scene by lot that is not held out."""
    while True:
        scene = random_scene(rng)
        if not is_held_out(scene):
            return scene


def held_out_scenes(count: int = 200) -> list[Scene]:
    """The first `count` of a fixed list of scenes that training never draws, all different."""
    rng, found = np.random.default_rng(2026), dict[str, Scene]()
    while len(found) < count:
        scene = random_scene(rng)
        if is_held_out(scene):
            found.setdefault(scene.caption, scene)
    return list(found.values())
