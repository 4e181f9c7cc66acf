"""One picture of many: a row a prompt, a column a way of making them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .scenes import SIDE

_TILE, _GAP, _MARGIN = 3 * SIDE, 16, 28
_TEXT_WIDTH, _HEAD, _LINE, _FOOT = 230, 54, 24, 92
_INK, _FAINT, _PAPER, _WRONG = "#1c1c1e", "#6b6b70", "#ffffff", "#e5484d"


@dataclass(frozen=True)
class Column:
    """A heading, lines below, pictures (count, SIDE, SIDE, 3) in 0 to 1, and which are right."""

    title: str
    figures: list[str]
    pictures: np.ndarray[Any, Any]
    right: list[bool]


def draw_sheet(
    prompts: list[str], columns: list[Column], labels: tuple[str, ...], path: Path
) -> None:
    """Write the pictures of the first prompts as a PNG; wrong ones have a red frame.

    `labels` name the lines below the columns.
    """
    across = _TILE + _GAP
    size = (
        _MARGIN * 2 + _TEXT_WIDTH + len(columns) * across,
        _MARGIN + _HEAD + len(prompts) * across + _FOOT,
    )
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    for row, prompt in enumerate(prompts):
        middle = _MARGIN + _HEAD + row * across + _TILE / 2
        text = "\n".join(textwrap.wrap(prompt, 22))
        pen.multiline_text((_MARGIN, middle), text, _INK, _font(19), "lm", spacing=8)
    below = _MARGIN + _HEAD + len(prompts) * across + 8
    for line, text in enumerate(labels):
        pen.text((_MARGIN, below + line * _LINE), text, _FAINT, _font(19), "lm")
    for i, column in enumerate(columns):
        left = _MARGIN + _TEXT_WIDTH + i * across
        _draw_column(sheet, pen, left, column, len(prompts))
    sheet.save(path)


def _draw_column(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, left: int, column: Column, count: int
) -> None:
    top, middle = _MARGIN + _HEAD, left + _TILE / 2
    pen.text((middle, top - 24), column.title, _INK, _font(24), "mm")
    for picture, right in zip(column.pictures[:count], column.right, strict=False):
        tile = Image.fromarray(np.round(picture * 255).astype(np.uint8))
        if not right:
            pen.rectangle((left - 6, top - 6, left + _TILE + 5, top + _TILE + 5), _WRONG)
        sheet.paste(tile.resize((_TILE, _TILE), Image.Resampling.LANCZOS), (left, top))
        pen.rectangle((left, top, left + _TILE - 1, top + _TILE - 1), outline="#d9d9de")
        top += _TILE + _GAP
    for line, text in enumerate(column.figures):
        ink = _INK if line == 0 else _FAINT
        pen.text((middle, top + 8 + line * _LINE), text, ink, _font(19), "mm")


def _font(size: int) -> Any:
    return ImageFont.load_default(size=size)
