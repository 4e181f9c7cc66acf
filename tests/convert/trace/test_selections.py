"""Boolean masks: the same values as torch's, and no size that depends on them in a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mlxconv.convert.trace.patches.selections import selections

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(100.0, 108.0).reshape(4, 2)
A = torch.tensor([True, False, True, True, False, False])
B = torch.tensor([False, True, True, False])


def scaled(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[a] *= 0.5
    return x


def shifted(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[a] = (x[a].to(torch.float64) + 1).to(torch.float32)
    return x


def joined(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[b], x[a], y[~b], x[~a]], dim=0)


def joined_masks(
    x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return torch.cat([b[b], a[a], b[~b], a[~a]])


def cut(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[b], x[a]])


def summed(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x[a].sum() + torch.exp(y[b] * 0.01).sum() + len(x[~a])


Function = Callable[..., torch.Tensor]


@pytest.mark.parametrize("function", [scaled, shifted, joined, joined_masks, cut, summed])
def test_the_values_are_torchs(function: Function) -> None:
    expected = function(X, A, Y, B)
    with selections():
        got = function(X, A, Y, B)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("function", [scaled, shifted, joined, joined_masks])
def test_a_graph_has_no_size_that_depends_on_a_mask(function: Function) -> None:
    class Module(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return function(*inputs)

    with selections():
        graph = torch.export.export(Module(), (X, A, Y, B), strict=False).graph
    sizes = [str(getattr(n.meta.get("val"), "shape", "")) for n in graph.nodes]
    assert [size for size in sizes if "u" in size] == []


def test_a_tensor_full_of_a_size_is_a_list_of_it() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            changed = torch.full((2,), 3)
            changed[0] = 1
            assert changed.shape == (2,)
            return torch.cat(x.split(torch.full((2,), x.shape[0] // 2).tolist())[::-1])

    with selections():
        free = {"x": {0: torch.export.Dim.AUTO}}
        program = torch.export.export(Module(), (X,), dynamic_shapes=free, strict=False)
        listed = torch.full((3,), 2)
        listed[1] = 5
        assert listed.tolist() == [2, 5, 2]
    sizes = [str(getattr(n.meta.get("val"), "shape", "")) for n in program.graph.nodes]
    assert [size for size in sizes if "u" in size] == []
    torch.testing.assert_close(program.module()(X[:4]), X[:4].roll(2, 0))
