"""Writes taken out of a graph: what is left computes what the writes did, and writes nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from mlxconv.convert.lower.lowering import has_row
from mlxconv.convert.trace.functionalize import functional
from mlxconv.convert.trace.writes import writes

torch.set_num_threads(1)
Function = Callable[[torch.Tensor], Any]


class Module(nn.Module):
    """A function of x (rows, columns), and a buffer that it may write into."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x) if self.function in OWN else self.function(x, self.table)


def exported(function: Callable[..., Any]) -> ExportedProgram:
    free = ({0: Dim.AUTO, 1: Dim.AUTO},)
    with torch.no_grad():
        return torch.export.export(
            Module(function), (torch.ones(3, 8),), dynamic_shapes=free, strict=False
        )


def view_taken_before(x):
    y = x * 2
    view = y[1:]
    y += 1
    return y, view * 3


def view_taken_after(x):
    y = x * 2
    y += 1
    return y[0] * y


def read_before_is_not_moved(x):
    y = x * 2
    before = y[0] * 1
    y[0] = 7
    return y, before


def a_view_of_a_view(x):
    y = torch.zeros_like(x)
    rows = y[1:]
    rows[:, 2:4] = x[1:, 2:4]
    return y, rows


def overlapping_slices(x):
    y = x * 2
    first, second = y[:, 0:4], y[:, 2:6]
    first *= 10
    second += 1
    return y, first, second


def every_other(x):
    y = torch.empty_like(x)
    y[..., 0::2] = x[..., 0::2]
    y[..., 1::2] = -x[..., 1::2]
    return y


def selected(x):
    y = x * 2
    y[:, 0] = 1
    y[:, -1] = x[:, 0]
    return y


def through_other_axes(x):
    y = x * 2
    turned = y.transpose(0, 1).unsqueeze(1)
    turned[2:4, :, 1:].mul_(5)
    swapped = y[None].permute(2, 0, 1)
    swapped[1].add_(3)
    return y, turned


def through_other_shapes(x):
    y = x * 2
    y.reshape(-1)[1:3] = 0
    y.view(x.shape[0], 2, -1)[:, 1].mul_(2)
    return y


def expanded_and_read(x):
    y = x[0] * 2
    wide = y.expand(3, -1)
    y += 1
    return wide * 2


def pieces_read(x):
    y = x * 2
    first, second = y.chunk(2, dim=1)
    y.sub_(1)
    return first - second, torch.relu_(second * 1)


def of_another_dtype(x):
    y = torch.zeros(x.shape, dtype=torch.bfloat16)
    y[1:] = x[1:]
    y.mul_(x).add_(x, alpha=2)
    return y


def masked(x):
    y = x * 2
    y[x > 0.3] = 0
    y.masked_fill_(x < 0.1, -1.0).clamp_(max=1)
    return y


def at_indices(x):
    y = x * 2
    y[torch.tensor([0, 1])] = x[0]
    return y


def many_outputs(x):
    y, index = torch.max(x, dim=0)
    y += 1
    return y, index


def through_pieces(x):
    y = x * 2
    y.chunk(2, dim=1)[1].mul_(3)
    return y


def an_input(x):
    x += 1
    return x * 2


def a_view_of_an_input(x):
    x[1:].mul_(2)
    return x + 1


def a_buffer(x, table):
    table += 1
    return x[:, :4] + table


UNDERSTOOD = [
    view_taken_before, view_taken_after, read_before_is_not_moved, a_view_of_a_view,
    overlapping_slices, every_other, selected, through_other_axes, through_other_shapes,
    expanded_and_read, pieces_read, of_another_dtype, masked, at_indices, many_outputs,
]  # fmt: skip
LEFT_TO_TORCH = [through_pieces, an_input, a_view_of_an_input, a_buffer]
OWN = {*UNDERSTOOD, *LEFT_TO_TORCH} - {a_buffer}


@pytest.mark.parametrize("function", UNDERSTOOD)
def test_the_graph_gives_what_the_writes_left(function, monkeypatch):
    program = exported(function)
    monkeypatch.setattr(ExportedProgram, "run_decompositions", None)
    program = functional(program, has_row)
    assert not any(writes(node) for node in program.graph.nodes)
    for rows, columns in ((3, 8), (5, 12)):
        x = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
        expected = function(x.clone())
        found = torch.fx.Interpreter(program.graph_module).run(*lifted(program), x.clone())
        torch.testing.assert_close(tuple(found), as_tuple(expected), rtol=0, atol=0)


def lifted(program: ExportedProgram) -> list[Any]:
    """The values of the placeholders that are no inputs."""
    specs = program.graph_signature.input_specs
    known = {**program.state_dict, **program.constants}
    return [known[spec.target] for spec in specs if spec.target is not None]


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("function", UNDERSTOOD)
def test_outputs_keep_their_names(function):
    program = functional(exported(function), has_row)
    (outputs,) = program.graph.output_node().args
    assert [node.name for node in outputs] == list(program.graph_signature.user_outputs)


@pytest.mark.parametrize("function", LEFT_TO_TORCH)
def test_a_write_that_is_not_understood_is_left_to_torch(function, monkeypatch):
    program, left = exported(function), []
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda this, table: left.append(this)
    )
    functional(program, has_row)
    assert left == [program]


def test_a_region_without_autocast_is_part_of_the_rest(monkeypatch):
    class Region(nn.Module):
        def forward(self, x):
            with torch.autocast("cuda", enabled=False):
                y = x.float() * 2
                y += 1
            return y * 3

    program = torch.export.export(Region(), (torch.ones(3, 8),), strict=False)
    monkeypatch.setattr(ExportedProgram, "run_decompositions", None)
    program = functional(program, has_row)
    names = [node.target for node in program.graph.nodes if node.op == "call_function"]
    aten = torch.ops.aten
    assert names[-3:] == [aten.mul.Tensor, aten.add.Tensor, aten.mul.Tensor]
