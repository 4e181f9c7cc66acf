"""docs/MODELS.md and the figures behind it are those of the recipes that are here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxconv.convert.measure import PRECISIONS
from mlxconv.convert.real_size import read_rows
from mlxconv.convert.recipe import all_recipes
from mlxconv.convert.supported import supported_models

ROOT = Path(__file__).parent.parent


def test_the_page_is_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "MODELS.md").read_text(encoding="utf-8")
    assert text == supported_models().as_markdown(), (
        "run: mlxconv models --markdown > docs/MODELS.md"
    )


@pytest.mark.parametrize("name", sorted(all_recipes()))
def test_every_configuration_was_measured_and_passed(name: str) -> None:
    rows = json.loads((ROOT / "recipes" / "parity.json").read_text(encoding="utf-8"))["rows"]
    own = [row for row in rows if row["class_name"] == name]
    expected = {(v, q) for v in ("", *all_recipes()[name].tiny_variants) for q in PRECISIONS}
    assert {(row["variant"], row["q"]) for row in own} == expected
    assert all(row["passed"] for row in own)
    assert max(row["rel_l2"] for row in own if row["q"] == "fp32") <= 1e-4


def test_every_published_configuration_was_traced() -> None:
    declared = {(name, real) for name, recipe in all_recipes().items() for real in recipe.real}
    assert {(row["class_name"], row["name"]) for row in read_rows()} == declared


def test_none_took_two_minutes_or_much_memory() -> None:
    slow = [row["name"] for row in read_rows() if row["cpu_seconds"] > 120]
    large = [row["name"] for row in read_rows() if row["peak_gib"] > 1.8]
    assert (slow, large) == ([], [])
