"""From a class to its program: constants, sizes, parameters of components without a program."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch import nn

from mlxconv.convert.lower.compile import (
    compile_program,
    fixed_dims,
    merge_kinds,
    module_parameters,
)
from mlxconv.convert.recipe.reading import load_recipe, load_recipe_file
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.executor import Executor
from mlxconv.runtime.program.program import Parameter

RECIPE = """
class = "Tabled"
[dims]
batch = { trace = 2, check = [3] }
[programs.forward.inputs]
x = { shape = ["batch", "width"] }
[tiny]
width = 8
"""


class Tabled(nn.Module):
    """Has a table in the default dtype, which `from_pretrained(torch_dtype=bf16)` makes bf16."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.register_buffer("table", torch.linspace(0, 1, width) / 3, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x + self.table)


class Held:
    """Weights from a module, in one precision."""

    resident = True

    def __init__(self, module: nn.Module, made, compute: mx.Dtype) -> None:
        self.state, self.made, self.compute = module.state_dict(), made, compute

    def get(self, name: str) -> mx.array:
        if name in self.made.constants:
            value = mx.array(self.made.constants[name])
            follows = self.made.program.constants[name] == "compute"
            return value.astype(self.compute) if follows else value
        return mx.array(self.state[name].numpy()).astype(self.compute)

    def stack(self, names):
        raise AssertionError("one linear has no siblings")


@pytest.fixture
def tabled(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return compile_program(Tabled, {"width": 8}, load_recipe_file(path))


def test_a_table_in_the_default_dtype_keeps_its_fp32_values(tabled) -> None:
    module = Tabled()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    executor = Executor(tabled.program, Held(module, tabled, mx.float32))
    got = executor("forward", x=mx.array(x.numpy()))
    assert np.abs(np.array(got) - module(x).detach().numpy()).max() < 1e-6


def test_and_follows_the_precision_of_a_bf16_run(tabled) -> None:
    executor = Executor(tabled.program, Held(Tabled(), tabled, mx.bfloat16))
    assert executor("forward", x=mx.zeros((3, 8))).dtype == mx.bfloat16


def test_a_pixel_size_gives_the_dims_that_the_recipe_derives_from_it() -> None:
    recipe = load_recipe("DiTTransformer2DModel")
    assert fixed_dims(recipe, [(256, 256)]) == [{"size": 32}]
    assert fixed_dims(load_recipe("FluxTransformer2DModel"), [(256, 256)]) == [{}]


def test_one_tensor_in_two_layouts_is_refused_by_name() -> None:
    tables = [{"w": Parameter((4, 4, 1, 1), "compute", kind)} for kind in ("conv", "other")]
    with pytest.raises(MlxconvError, match=r"^w: one entry uses it as conv"):
        merge_kinds(tables)


def test_without_a_program_the_owning_module_decides_the_layout() -> None:
    from diffusers import AutoencoderKL

    recipe = load_recipe("AutoencoderKL")
    module, parameters = module_parameters(AutoencoderKL, "diffusers", Path(), recipe.tiny_config())
    assert parameters["encoder.conv_in.weight"].kind == "conv"
    assert parameters["encoder.mid_block.attentions.0.to_q.weight"].kind == "linear"
    assert set(parameters) == set(module.state_dict())


def test_a_fixed_dim_with_listed_values_has_one_program_each() -> None:
    recipe = load_recipe("ZImageTransformer2DModel")
    assert fixed_dims(recipe, []) == [{"batch": 1}, {"batch": 2}]
