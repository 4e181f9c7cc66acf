"""Evaluates programs op by op with random weights: slow, plain, and independent of the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch import nn

from mlxconv.convert.lower.lowering import lower
from mlxconv.convert.recipe.examples import example_inputs
from mlxconv.convert.recipe.recipe import Dim, PrecisionRules, ProgramRecipe, Recipe, RecipeInput
from mlxconv.convert.trace.export import trace
from mlxconv.convert.trace.fake_module import merged_config
from mlxconv.runtime.ops import OPS, dtype_of
from mlxconv.runtime.program.program import Arg, Block, Body, Entry, Parameter, Ref, Weight

Lookup = Callable[[str], Any]
Arrays = dict[str, mx.array]


def evaluate(
    entry: Entry,
    weights: Mapping[str, mx.array],
    inputs: Mapping[str, Any],
    compute: str = "float32",
    blocks: Mapping[str, Block] | None = None,
) -> mx.array:
    """The entry's first output."""
    values = {item.name: inputs[item.name] for item in entry.inputs}
    result: mx.array = _run(entry, values, weights.__getitem__, compute, blocks or {})[0]
    return result


def _run(
    body: Body, values: dict[str, Any], weight: Lookup, compute: str, blocks: Mapping[str, Block]
) -> list[Any]:
    def read(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, Weight):
            return weight(arg.name)
        return [read(item) for item in arg] if isinstance(arg, tuple) else arg

    for node in body.nodes:
        args = {key: read(value) for key, value in node.args.items()}
        if args.get("dtype") == "compute":
            args["dtype"] = compute
        if node.op == "call":
            block, under = blocks[args["block"]], _under(weight, args["prefix"])
            bound = dict(zip(block.inputs, args["inputs"], strict=True))
            results: Any = _run(block, bound, under, compute, blocks)
        else:
            results = OPS[node.op](**args)
        results = results if isinstance(results, list) else [results]
        values.update(zip(node.out, results, strict=True))
    return [read(arg) for arg in body.outputs]


def _under(weight: Lookup, prefix: str) -> Lookup:
    return lambda name: weight(f"{prefix}.{name}")


def error(found: mx.array, expected: mx.array) -> float:
    """The largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape
    a, b = (np.array(x.astype(mx.float32)) for x in (found, expected))
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


# ---- weights and inputs -------------------------------------------------------------------------


def random_weights(
    parameters: Mapping[str, Parameter], constants: Mapping[str, Any], compute: str = "float32"
) -> Arrays:
    """Seeded weights, as they are stored, small enough that nothing saturates."""
    random = np.random.default_rng(0)
    made = {}
    for name, parameter in sorted(parameters.items()):
        values = random.normal(size=parameter.shape).astype(np.float32) * 0.1
        dtype = compute if parameter.dtype == "compute" else parameter.dtype
        made[name] = mx.array(_stored(values, parameter.kind)).astype(dtype_of(dtype))
    return {**made, **{name: mx.array(np.array(value)) for name, value in constants.items()}}


def _stored(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    if kind == "conv":
        return np.moveaxis(values, 1, -1)
    return np.moveaxis(values, 0, -1) if kind == "conv_transpose" else values


def arrays_for(entry: Entry, arguments: Mapping[str, Any], compute: str) -> dict[str, Any]:
    """Torch arguments by the names that the entry's inputs have, in their dtypes."""
    return {
        item.name: _array(_at(arguments, item.path), item.type.dtype, compute)
        for item in entry.inputs
    }


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[int(part)] if isinstance(tree, (list, tuple)) else tree[part]
    return tree


def _array(value: Any, dtype: str, compute: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return mx.array(value.numpy()).astype(dtype_of(compute if dtype == "compute" else dtype))


# ---- small modules ------------------------------------------------------------------------------


def recipe_for(cls: type, **shapes: tuple[int | str, ...]) -> Recipe:
    """A recipe of one program whose inputs have these shapes, over the dims batch and tokens."""
    inputs = {
        name: RecipeInput(name, shape, "float32" if name.startswith("table") else "compute")
        for name, shape in shapes.items()
    }
    dims = {"batch": Dim("batch", 2), "tokens": Dim("tokens", 5)}
    programs = {"forward": ProgramRecipe("forward", "forward", inputs)}
    return Recipe(cls.__name__, "tests", (), dims, programs, PrecisionRules(), {}, {}, {})


class Traced:
    """A small module, lowered, with what is needed to run it in torch and as a program."""

    def __init__(
        self,
        cls: type[nn.Module],
        config: Mapping[str, Any],
        recipe: Recipe,
        program: str | None = None,
    ) -> None:
        torch.set_num_threads(1)
        traced = trace(cls, config, recipe, program or "forward")
        lowered = lower(traced)
        self.cls, self.config, self.recipe = cls, dict(config), recipe
        self.entry, self.parameters = lowered.entry, lowered.parameters
        self.constants = {k: v.numpy() for k, v in traced.constants.items()}

    def inputs(self, compute: str, dims: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Example inputs, exact in bf16."""
        config = merged_config(self.cls, self.config)
        made = example_inputs(
            self.recipe, self.entry.name, config, dims, seed=1, dtype=torch.bfloat16
        )
        return arrays_for(self.entry, _to_float(made), compute)

    def weights(self, compute: str) -> Arrays:
        return random_weights(self.parameters, self.constants, compute)

    def run(
        self, entry: Entry, compute: str = "float32", dims: Mapping[str, int] | None = None,
        blocks: Mapping[str, Block] | None = None,
    ) -> mx.array:  # fmt: skip
        """The first output of a form of the entry."""
        weights = self.weights("bfloat16")  # the same values in every precision
        if compute == "float32":
            weights = {
                name: value.astype(mx.float32) if value.dtype == mx.bfloat16 else value
                for name, value in weights.items()
            }
        return evaluate(entry, weights, self.inputs(compute, dims), compute, blocks)


def _to_float(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _to_float(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_to_float(item) for item in tree]
    return tree.float() if isinstance(tree, torch.Tensor) and tree.is_floating_point() else tree
