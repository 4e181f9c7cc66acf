"""Branches on sizes that are free in a trace: the answer is PyTorch's at every size, or there is
none until the size is traced."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.sym_node import SymNode

from mlxconv.convert.lower.compile import compile_program
from mlxconv.convert.recipe.reading import parse_recipe
from mlxconv.convert.recipe.recipe import Recipe
from mlxconv.convert.store.add_size import extended
from mlxconv.convert.trace.export import trace
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.executor import Executor
from mlxconv.runtime.program.stored import from_json, to_json

torch.set_num_threads(1)

RECIPE = """
class = "Model"
[dims]
frames = { trace = 8, check = [9] }
rows = { trace = 6, check = [7] }
[tiny]
width = 4
[programs.forward.inputs]
x = { shape = ["frames", "rows", "width"] }
"""


class Model(nn.Module):
    """Scales by one weight whatever `on_sizes` makes of the input."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.on_sizes(x * self.scale)

    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Above(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            x = x + 1
        return x


class Either(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        frames, rows, _ = x.shape
        return x * 2 if frames < 4 or rows < 4 else x


class Loop(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        left = x.shape[0]
        while left > 2:
            x, left = x + 1, left // 2
        return x


class Extremes(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        frames, rows, _ = x.shape
        return x * max(frames, rows) - min(rows, 6)


class Product(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        frames, rows, _ = x.shape
        return x.flip(0) if frames * rows > 30 else x


class Quotient(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        frames, rows, _ = x.shape
        return -x if frames // 2 > rows // 3 else x


class Ratio(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        frames, rows, _ = x.shape
        return -x if frames / rows > 1.25 else x


class Root(Model):
    """A condition that the language of programs cannot say."""

    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        return -x if torch.sym_sqrt(x.shape[0]) > 2.5 else x


class Remainder(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] % 4 else x + 3


class Single(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        return x * 5 if x.shape[0] == 1 else x


class Cut(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        first = x[:6]
        return first / first.shape[0]


class Last(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        last = x[-6:]
        return last / last.shape[0]


class Pieces(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.split(4)
        return pieces[-1] + len(pieces)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] < 12
        return x + 1 if x.shape[0] > 4 else x


class Nested(Model):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.inner = nn.ModuleList(Inner() for _ in range(2))

    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = inner(x)
        return x


class Layout(Model):
    def on_sizes(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            x = x.contiguous()
        if x.numel() > 2**8:
            x = x.contiguous()
        return x.transpose(0, 1).reshape(-1)


# Of each, what its program takes for granted.
MODELS: list[tuple[type[Model], tuple[str, ...]]] = [
    (Above, ("x[0] >= 5",)),
    (Either, ("x[0] >= 4", "x[1] >= 4")),
    (Loop, ("(x[0] // 4) <= 2", "x[0] >= 3", "(x[0] // 2) >= 3")),
    (Extremes, ()),
    (Product, ("x[1]*x[0] >= 31",)),
    (Quotient, ("(x[0] // 2) > (x[1] // 3)",)),
    (Ratio, ("(x[0] / x[1]) > 1.2500000000000000",)),
    (Root, ("x[0] == 8",)),
    (Remainder, ("(x[0] % 4) == 0",)),
    (Single, ("x[0] >= 2",)),
    (Cut, ("x[0] >= 6",)),
    (Last, ("x[0] >= 6",)),
    (Pieces, ("((3 + x[0]) // 4) == 2",)),
    (Nested, ("x[0] <= 11", "x[0] >= 5")),
    (Layout, ()),
]
SIZES = [(f, r) for f in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11) for r in (3, 4, 6, 8)]


def recipe() -> Recipe:
    return parse_recipe(RECIPE, "a test")


class Held:
    """A module's weights, and what a bundle has besides."""

    resident, compute, folder = True, mx.float32, Path("a bundle/model")

    def __init__(self, module: nn.Module) -> None:
        self.values = module.state_dict()
        self.config = {"width": 4, "mlxconv": {"sizes": recipe().sizes_table({"width": 4})}}

    def get(self, name: str) -> mx.array:
        return mx.array(np.array(self.values[name]))


def sides(model: type[Model]) -> tuple[Model, Executor]:
    """The module, and its program after it was written and read."""
    module = model()
    program = from_json(to_json(compile_program(model, {"width": 4}, recipe()).program))
    return module, Executor(program, Held(module))  # type: ignore[arg-type]


def wrong(module: Model, ours: Executor, size: tuple[int, int]) -> bool:
    x = torch.randn(*size, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(x).numpy()
    found = np.array(ours("forward", x=mx.array(x.numpy())))
    return found.shape != expected.shape or float(np.abs(found - expected).max()) > 1e-5


@pytest.mark.parametrize(("model", "assumed"), MODELS)
def test_the_answer_is_right_or_refused(model: type[Model], assumed: tuple[str, ...]) -> None:
    module, ours = sides(model)
    assert ours.program.entries[0].assumptions == assumed
    refused = set()
    for size in SIZES:
        try:
            assert not wrong(module, ours, size), size
        except MlxconvError as error:
            refused.add(size)
            assert "branches on sizes and was traced for " in str(error)
            assert "given x.shape[" in str(error)
            assert "mlxconv add-size 'a bundle' --component model --dim " in str(error)
    assert bool(refused) == bool(assumed) and len(refused) < len(SIZES)


def test_a_recipe_says_which_conditions_make_no_difference() -> None:
    for name, assumed in (("Above.on_sizes", ()), ("Model.forward", ("x[0] >= 5",))):
        same = parse_recipe(f'{RECIPE}[programs.forward]\nalike = ["{name}"]', "a test")
        assert trace(Above, {"width": 4}, same).assumptions == assumed


def test_torch_is_as_it_was() -> None:
    before = torch.SymBool.__bool__, SymNode.guard_int, SymNode.guard_float
    trace(Pieces, {"width": 4}, recipe())
    assert (torch.SymBool.__bool__, SymNode.guard_int, SymNode.guard_float) == before


@pytest.mark.parametrize("model", [model for model, _ in MODELS])
def test_sizes_are_traced_when_they_are_called(model: type[Model]) -> None:
    module, ours = sides(model)
    traced: list[dict[str, int]] = []

    def trace_size(name: str, sizes: dict[str, int]) -> None:
        made = compile_program(model, {"width": 4}, recipe(), choices=[sizes], names=[name])
        ours.program = extended(ours.program, {}, made, Path("a bundle/model")).program
        traced.append(sizes)

    ours.trace_size = trace_size
    for size in SIZES:
        assert not wrong(module, ours, size), size
    again = len(traced)
    assert not any(wrong(module, ours, size) for size in SIZES) and len(traced) == again
