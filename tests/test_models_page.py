"""docs/MODELS.md and the figures behind it are those of the recipes that are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxconv.convert.catalog.figures import PRECISIONS
from mlxconv.convert.catalog.supported import Supported, real_sizes, supported_models
from mlxconv.convert.recipe.reading import load_recipe, recipe_names

from .tools.real_size import published

ROOT = Path(__file__).parent.parent


def test_the_page_is_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "MODELS.md").read_text(encoding="utf-8")
    assert text == supported_models().as_markdown(), (
        "run: mlxconv models --markdown > docs/MODELS.md"
    )


MODELS = supported_models().models


@pytest.mark.parametrize("model", MODELS, ids=[m.class_name for m in MODELS])
def test_every_configuration_was_measured_and_passed(model: Supported) -> None:
    variants = ("", *load_recipe(model.class_name).tiny_variants)
    expected = {(variant, q) for variant in variants for q in PRECISIONS}
    assert {(row["variant"], row["q"]) for row in model.parity} == expected
    assert all(row["passed"] for row in model.parity)
    assert max(row["rel_l2"] for row in model.parity if row["q"] == "fp32") <= 1e-4


def test_every_published_configuration_was_traced() -> None:
    declared = {(name, model) for name, models in published().items() for model in models}
    assert set(published()) <= set(recipe_names())
    assert {(row["class_name"], row["name"]) for row in real_sizes()} == declared


def test_none_took_two_minutes_or_much_memory() -> None:
    slow = [row["name"] for row in real_sizes() if row["cpu_seconds"] > 120]
    large = [row["name"] for row in real_sizes() if row["peak_gib"] > 1.5]
    assert (slow, large) == ([], [])
