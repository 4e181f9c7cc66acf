"""Blocks traced once: the program is that of every block traced, whatever blocks do."""

from __future__ import annotations

import types

import diffusers
import mlx.core as mx
import numpy as np
import pytest
import torch
from torch import nn

from mlxconv.convert.lower import compile
from mlxconv.convert.lower.compile import compile_program
from mlxconv.convert.lower.lowering import lower
from mlxconv.convert.recipe.reading import load_recipe, load_recipe_file
from mlxconv.convert.recipe.recipe import Recipe
from mlxconv.convert.trace import repeats
from mlxconv.convert.trace.export import trace
from mlxconv.convert.trace.fake_module import build_module
from mlxconv.runtime.exec.executor import Executor
from mlxconv.runtime.program.stored import to_json

torch.set_num_threads(1)

RECIPE = """
class = "{name}"
[dims]
batch = {{ trace = 2, check = [3] }}
tokens = {{ trace = 5, check = [4] }}
[programs.forward.inputs]
x = {{ shape = ["batch", "tokens", "width"] }}
[tiny]
width = 8
"""


class Block(nn.Module):
    """A gated product, with a table of its own."""

    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.inner = nn.ModuleList(Gate(width) for _ in range(2))
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate in self.inner:
            x = gate(x)
        return x + torch.tanh(self.proj(x)) * self.table


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.proj(x))


class Model(nn.Module):
    """Three blocks, one after the other."""

    block: type[nn.Module] = Block

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(width, i) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Settings(Model):
    class block(Block):
        """Differs from its siblings by a number that it holds."""

        def __init__(self, width: int, index: int) -> None:
            super().__init__(width, index)
            self.scale = 1.0 + index

        def forward(self, x):
            return super().forward(x) * self.scale


class Labels(Model):
    class block(Block):
        """Knows its place, and makes no use of it."""

        index = -1

        def __init__(self, width: int, index: int) -> None:
            super().__init__(width, index)
            self.index = index
            self.name = f"block {index}"


class Places(Model):
    class block(Labels.block):
        """Computes with its place."""

        def forward(self, x):
            return super().forward(x) * (self.index + 1)


class Tables(Model):
    class block(Block):
        """Differs from its siblings by the values of its table."""

        def __init__(self, width: int, index: int) -> None:
            super().__init__(width, index)
            self.table.mul_(index + 1)


class Indices(Model):
    """Passes each block a number, which a block computes with."""

    class block(Block):
        def forward(self, x, index):
            return super().forward(x) * (index // 2 + 1)

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x, index)
        return x


class Peeking(Model):
    """Reads what a block left in an attribute."""

    class block(Block):
        def forward(self, x):
            self.kept = torch.cos(x)
            return super().forward(x)

    def forward(self, x):
        return super().forward(x) + sum(block.kept for block in self.blocks)


class InPlace(Model):
    """Blocks change what they are given, and return nothing."""

    class block(Block):
        def forward(self, x):
            x.add_(super().forward(x))

    def forward(self, x):
        x = x.clone()
        for block in self.blocks:
            block(x)
        return x


class Caching(Model):
    """Blocks leave tensors in a dictionary that they are given; the model reads them."""

    class block(Block):
        def forward(self, x, cache):
            cache[len(cache)] = torch.cos(x)
            return super().forward(x)

    def forward(self, x):
        cache = {}
        for block in self.blocks:
            x = block(x, cache)
        return x + sum(cache.values())


class Noting(Model):
    """Blocks leave tensors in an object that they are given; the model reads them."""

    class block(Block):
        def forward(self, x, notes):
            notes.total = notes.total + torch.cos(x)
            return super().forward(x)

    def forward(self, x):
        notes = types.SimpleNamespace(total=0)
        for block in self.blocks:
            x = block(x, notes)
        return x + notes.total


class Choosing(Model):
    """Blocks take the rows that a mask names: torch checks how many those are."""

    class block(Block):
        def forward(self, x, mask):
            rows = torch.nonzero(mask).flatten()
            chosen = torch.softmax(x[:, rows], dim=1)
            padded = torch.nn.functional.pad(chosen, (0, 0, 0, x.shape[1] - chosen.shape[1]))
            return super().forward(x) + padded

    def forward(self, x):
        mask = torch.arange(x.shape[1]) % 2 == 0
        for block in self.blocks:
            x = block(x, mask)
        return x


class Growing(Model):
    """Blocks give sizes that no input of theirs has."""

    class block(Block):
        def forward(self, x):
            return torch.cat([super().forward(x), x], dim=1)


class Streams(Model):
    """Tuples in and out, one tensor twice, one passed through, one None, one by name."""

    class block(Block):
        def forward(self, pair, *, other, none=None):
            x, y = pair
            z = super().forward(x)
            return (z + y if x is y else z - y), other, none

    def forward(self, x):
        other = torch.sin(x)
        for block in self.blocks:
            x, other, _ = block((x, x), other=other)
        for block in self.blocks:
            x, other, _ = block((x, other), other=other)
        return x * other


class Skips(Model):
    """Blocks return one tensor twice; the model writes into it and reads it again later."""

    class block(Block):
        def forward(self, x):
            x = super().forward(x)
            return x, (x,)

    def forward(self, x):
        skips = ()
        for block in self.blocks:
            x, more = block(x)
            x += 1
            skips += more
        return x * sum(skips)


class Passing(Model):
    """A tensor of the first block is used by its parent too."""

    def forward(self, x):
        return super().forward(x) @ self.blocks[0].proj.weight


class Chunks(nn.Module):
    """Calls its decoder once per chunk, with what the call before left in a list."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(2, 0)

        def forward(self, x, cache, index):
            before, cache[index[0]] = cache[index[0]], x
            index[0] += 1
            return self.block(x) if before is None else self.block(x) + torch.tanh(before)

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.decoder = type(self).Decoder()

    def forward(self, x):
        cache = [None]
        return torch.cat([self.decoder(chunk, cache, [0]) for chunk in x.chunk(4, -1)], -1)


class Returned(Chunks):
    """Hands on what its decoder returns; the first part of it is never read."""

    class Decoder(Chunks.Decoder):
        def forward(self, x, cache):
            y = self.block(x) if cache is None else self.block(x) + torch.tanh(cache["x"])
            return y, {"unread": x + 1, "x": x * 2}

    def forward(self, x):
        cache, made = None, []
        for chunk in x.chunk(4, -1):
            y, cache = self.decoder(chunk, cache)
            made.append(y)
        return torch.cat(made, -1)


class Counting(Chunks):
    """A decoder that knows how often it was called."""

    class Decoder(Chunks.Decoder):
        def forward(self, x, cache, index):
            self.calls = getattr(self, "calls", 0) % 4 + 1
            return super().forward(x, cache, index) * self.calls


# How many blocks of the three are traced once, and how often the others are written again.
MODELS = {
    Model: 2,
    Settings: 0,
    Labels: 2,
    Places: 0,
    Tables: 0,
    Indices: 0,
    Peeking: 0,
    InPlace: 0,
    Choosing: 2,
    Caching: 0,
    Noting: 0,
    Growing: 0,
    Streams: 4,
    Skips: 2,
    Passing: 2,
    Chunks: 2,
    Returned: 2,
    Counting: 0,
}


class Held:
    """A module's weights, in fp32."""

    resident, compute = True, mx.float32

    def __init__(self, module: nn.Module, constants) -> None:
        self.values = {**module.state_dict(), **constants}

    def get(self, name: str) -> mx.array:
        return mx.array(np.array(self.values[name]))

    def stack(self, names):
        from mlxconv.runtime.exec.weights import Stack

        return Stack.of(None if name is None else self.get(name) for name in names)


def recipe_of(cls: type, tmp_path) -> Recipe:
    path = tmp_path / f"{cls.__name__}.toml"
    path.write_text(RECIPE.format(name=cls.__name__))
    return load_recipe_file(path)


def count(this, *, outermost: bool) -> int:
    nodes = this.exported.graph.nodes
    again = [n for n in nodes if n.target is torch.ops.mlxconv.again.default]
    return len([n for n in again if ("inner" not in n.args[1]) == outermost])


@pytest.mark.parametrize("cls", MODELS)
def test_the_program_computes_what_the_module_does(cls, tmp_path):
    torch.manual_seed(0)
    module, recipe = cls().eval(), recipe_of(cls, tmp_path)
    made = compile_program(cls, {"width": 8}, recipe)
    executor = Executor(made.program, Held(module, made.constants))
    for size in ((2, 5), (3, 4)):
        x = torch.randn(*size, 8)
        with torch.no_grad():
            expected = module(x).numpy()
        ours = executor("forward", x=mx.array(x.numpy()))
        np.testing.assert_allclose(np.array(ours), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cls", MODELS)
def test_only_equal_blocks_are_written_again(cls, tmp_path):
    this = trace(cls, {"width": 8}, recipe_of(cls, tmp_path))
    assert count(this, outermost=True) == MODELS[cls]
    lower(this)


def test_a_deeper_model_has_a_graph_as_small(tmp_path):
    recipe = recipe_of(Model, tmp_path)

    def computed(depth: int) -> int:
        graph = trace(Model, {"width": 8, "depth": depth}, recipe).exported.graph
        return len([n for n in graph.nodes if "aten" in str(n.target)])

    assert computed(2) == computed(9)


def test_equal_chunks_call_one_block(tmp_path):
    program = compile_program(Chunks, {"width": 8}, recipe_of(Chunks, tmp_path)).program
    called = [str(n.args["block"]) for n in program.entries[0].nodes if n.op == "call"]
    assert len(called) == 4 and called[1] == called[2]


def test_forwards_are_put_back(tmp_path):
    module, _ = build_module(Model, {"width": 8})
    with repeats.traced_once(module, set()):
        assert "forward" in vars(module.blocks[1])
    assert "forward" not in vars(module) and "forward" not in vars(module.blocks[1])


def test_labels_are_put_back():
    module, _ = build_module(Labels, {"width": 8})
    with repeats.traced_once(module, set()):
        assert module.blocks[2].index == 2
        assert type(vars(Labels.block)["index"]) is not int
    assert vars(Labels.block)["index"] == -1 and "name" not in vars(Labels.block)
    assert module.blocks[2].index == 2


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SanaTransformer2DModel"])
def test_a_program_is_that_of_every_block_traced(name, monkeypatch):
    recipe, cls = load_recipe(name), getattr(diffusers, name)
    once = compile_program(cls, recipe.tiny, recipe)
    monkeypatch.setattr(compile, "_RECENT", {})
    monkeypatch.setattr(repeats, "equal_members", lambda module: [])
    each = compile_program(cls, recipe.tiny, recipe)
    assert to_json(once.program) == to_json(each.program)
    assert once.parameters == each.parameters
