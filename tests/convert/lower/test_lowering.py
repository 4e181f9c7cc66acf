"""The lowering as a whole: what is covered, what is refused, and what an entry says."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlxconv.convert.lower.aten.builder import row_name
from mlxconv.convert.lower.lowering import Lowered, lower, supported
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.ops import OPS
from mlxconv.runtime.program.types import Type

from . import (
    test_lowering_elementwise,
    test_lowering_images,
    test_lowering_products,
    test_lowering_reductions,
    test_lowering_shapes,
)
from .lowering_cases import aten_names, batches, interpret, program, to_numpy, trace

pytestmark = pytest.mark.xdist_group("lowering")  # tables are traced once

TABLES = [
    test_lowering_elementwise.ROWS,
    test_lowering_images.ROWS,
    test_lowering_products.ROWS,
    test_lowering_reductions.ROWS,
    test_lowering_shapes.ROWS,
]
TESTED_HERE = {f"mlxconv.{mark}" for mark in ("tap", "enter", "leave", "again")}
REWRITTEN = {"linears", "modulated_norm", "rotary"}  # tests/runtime/ops/test_ops.py has these


class Holder(nn.Module):
    """A module whose one child does the work: nodes then have a module path."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, *args: torch.Tensor) -> Any:
        return self.child(*args)


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def lowered(function: Any, *args: torch.Tensor) -> Lowered:
    """The lowering of a function held as `child`."""
    return lower(trace(Holder(Function(function)), args))


@pytest.mark.slow
def test_every_row_of_the_lowering_is_tested() -> None:
    graphs = [program(batch).traced for table in TABLES for batch in batches(table)]
    tested = {row_name(name) for traced in graphs for name in aten_names(traced)}
    assert set(supported()) - tested == TESTED_HERE


def test_every_op_is_reached_or_tested_by_itself() -> None:
    programs = [program(batch) for table in TABLES for batch in batches(table)]
    reached = {node.op for one in programs for node in one.lowered.entry.nodes}
    assert set(OPS) - reached == REWRITTEN


def test_unknown_operations_are_listed_together_with_their_modules() -> None:
    with pytest.raises(MlxconvError) as caught:
        lowered(lambda x: torch.linalg.inv(torch.fft.fft(x).real), torch.ones(2, 2))
    message = str(caught.value)
    assert "fft_fft.default: child" in message and "linalg_inv.default: child" in message


def test_an_operation_that_a_row_refuses_is_named_with_its_module() -> None:
    with pytest.raises(MlxconvError, match=r"child: .*max_pool2d.*dilation"):
        lowered(lambda x: F.max_pool2d(x, 2, dilation=2), torch.ones(1, 1, 8, 8))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: F.avg_pool2d(x, 2, 2, 1, ceil_mode=True), "ceil_mode"),
        (lambda x: F.avg_pool2d(x, 2, divisor_override=3), "divisor_override"),
        (lambda x: F.fold(F.unfold(x, 2), (5, 5), 2), "col2im"),
        (lambda x: F.unfold(x[0], 2), "unbatched"),
        (lambda x: torch.linalg.vector_norm(x, 0), "order 0"),
        (lambda x: x.view(torch.int16), "bits"),
        (lambda x: F.interpolate(x, size=(9, 9), mode="bilinear", antialias=True,
                                 align_corners=True), "align_corners"),
        (lambda x: torch.rand_like(x), "rand_like"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(MlxconvError, match=reason):
        lowered(function, torch.ones(1, 1, 5, 5, dtype=torch.bfloat16))


def test_a_boolean_index_is_refused() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x[mask].sum()

    with pytest.raises(MlxconvError, match="boolean mask"):
        lower(trace(Masked(), (torch.ones(3), torch.ones(3, dtype=torch.bool))))


def test_a_cast_to_the_traced_precision_is_a_cast_to_compute() -> None:
    entry = lowered(lambda x: x.float().to(torch.bfloat16), torch.ones(2).bfloat16()).entry
    assert [node.args["dtype"] for node in entry.nodes] == ["float32", "compute"]


def test_nodes_carry_module_and_type() -> None:
    (node,) = lowered(lambda x: x + 1, torch.ones(2, 3).bfloat16()).entry.nodes
    assert (node.module, node.types) == ("child", (Type("compute", ("2", "3")),))


def test_the_kind_of_a_parameter_is_its_use() -> None:
    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.conv = nn.Conv1d(4, 4, 1)
            self.up = nn.ConvTranspose1d(4, 4, 1)
            self.both = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(self.conv(self.linear(x)))
            return F.linear(y, self.both) + self.both

    parameters = lower(trace(Used(), (torch.ones(1, 4, 4),)), torch.float32).parameters
    assert {n: p.kind for n, p in parameters.items() if not n.endswith("bias")} == {
        "linear.weight": "linear", "conv.weight": "conv", "up.weight": "conv_transpose",
        "both": "other",
    }  # fmt: skip


def test_a_mutated_input_is_no_output() -> None:
    traced = trace(Function(lambda x: x.add_(1) * 2), (torch.ones(2),))
    result = lower(traced, torch.float32)
    (out,) = interpret(result, traced, {}, [torch.ones(2)], "fp32")
    assert to_numpy(out).tolist() == [4.0, 4.0]


def test_names_of_values_do_not_meet_names_of_inputs() -> None:
    class Named(nn.Module):
        def forward(self, v0: torch.Tensor, v1: torch.Tensor) -> torch.Tensor:
            return (v0 + 1) * (v1 + 2) + v0

    traced = trace(Named(), (torch.ones(2), torch.ones(2)))
    (out,) = interpret(lower(traced), traced, {}, [torch.ones(2), torch.ones(2)], "fp32")
    assert to_numpy(out).tolist() == [7.0, 7.0]


def test_taps_name_the_outputs_of_modules() -> None:
    def tapped(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mlxconv.tap(x * 2, "child", 0) + 1  # type: ignore[no-any-return]

    entry = lowered(tapped, torch.ones(2)).entry
    assert entry.taps == {"child": entry.nodes[0].out}
