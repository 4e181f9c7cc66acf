"""Branches on the values of tensors, and rows sorted by masks: what `trace` makes of them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from mlxconv.convert.recipe.reading import parse_recipe
from mlxconv.convert.recipe.recipe import Recipe
from mlxconv.convert.trace.export import trace

RECIPE = """
class = "Sorting"
[dims]
words = { trace = 6, check = [5] }
glyphs = { trace = 4, check = [7] }
[programs.forward]
truths = [TRUTH]
[programs.forward.inputs]
x = { shape = ["words", "width"] }
keep = { shape = ["words"], dtype = "bool" }
y = { shape = ["glyphs", "width"] }
keep_y = { shape = ["glyphs"], dtype = "bool" }
[tiny]
width = 3
"""


class Sorting(nn.Module):
    """Puts what the masks keep first, and zeros for what they drop."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(
        self, x: torch.Tensor, keep: torch.Tensor, y: torch.Tensor, keep_y: torch.Tensor
    ) -> torch.Tensor:
        if torch.all(x == 0):
            x = x + 1
        kept = [y[keep_y], x[keep]]
        rest = [torch.zeros_like(y[~keep_y]), x[~keep]]
        return torch.cat([*kept, *rest], dim=0) * self.scale


def recipe(truth: str = "false") -> Recipe:
    return parse_recipe(re.sub("TRUTH", truth, RECIPE), "a test")


@pytest.mark.parametrize("answer", [False, True])
@pytest.mark.parametrize("sizes", [(6, 4), (5, 7)])
def test_rows_are_sorted_at_every_size(sizes: tuple[int, int], answer: bool) -> None:
    graph = trace(Sorting, {"width": 3}, recipe(str(answer).lower()), dtype=torch.float32)
    assert graph.fixed == {}
    words, glyphs = sizes
    x, y = torch.randn(words, 3) * (not answer), torch.randn(glyphs, 3)
    keep, keep_y = torch.rand(words) < 0.5, torch.rand(glyphs) < 0.5
    flat = [torch.ones(3), x, keep, y, keep_y]
    (got,) = torch.fx.Interpreter(graph.exported.graph_module).run(*flat)
    assert torch.equal(got, Sorting()(x, keep, y, keep_y))


def test_torch_is_as_it_was() -> None:
    trace(Sorting, {"width": 3}, recipe())
    assert {"__getitem__", "__invert__", "__bool__", "data"}.isdisjoint(vars(torch.Tensor))
    assert not hasattr(torch.SymFloat, "sqrt")
    assert torch.ones(3)[torch.tensor([True, False, True])].shape == (2,)
