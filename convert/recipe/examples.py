"""Example inputs of a recipe: seeded values in the shapes that it names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from mlxconv.runtime.program.expressions import Expression as Expression
from mlxconv.runtime.program.expressions import evaluate as evaluate
from mlxconv.runtime.program.expressions import names_in as names_in

if TYPE_CHECKING:
    import torch

from .recipe import Recipe, RecipeInput


def example_inputs(
    recipe: Recipe,
    program: str,
    config: Mapping[str, Any],
    dims: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a program: seeded tensors and the recipe's Python arguments.

    ``dims`` overrides the sizes used for tracing. The same seed gives the same values at every
    ``dtype`` (drawn in fp32, then cast); ``dtype`` (default float32) is that of the inputs
    declared "compute".
    """
    import torch

    entry = recipe.program(program)
    sizes = recipe.trace_dims(config, dims)
    names = {**config, **sizes}
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for spec in entry.inputs.values():
        if not evaluate(spec.when, names):
            continue
        count = 1 if spec.count is None else int(evaluate(spec.count, names))
        tensors = [_example(spec, names, generator, dtype or torch.float32) for _ in range(count)]
        place(made, spec.path, tensors[0] if spec.count is None else tensors)
    made.update({name: argument_value(value, names) for name, value in entry.arguments.items()})
    return made


def place(tree: Any, path: Sequence[str | int], value: Any) -> None:
    """Set ``tree[path[0]][path[1]]...``, making the dictionaries and lists on the way."""
    for part, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(tree, dict):
            tree = tree.setdefault(part, empty)
        else:
            _fill(tree, cast("int", part), empty)
            tree = tree[part]
    if isinstance(tree, list):
        _fill(tree, cast("int", path[-1]), value)
    tree[path[-1]] = value


def _fill(listed: list[Any], index: int, value: Any) -> None:
    """Make a list long enough to have ``index``."""
    listed += [value] * (index + 1 - len(listed))


def argument_value(value: Any, names: Mapping[str, Any]) -> Any:
    """A recipe argument with its expressions evaluated; lists stay lists, tuples tuples."""
    if isinstance(value, (list, tuple)):
        return type(value)(argument_value(item, names) for item in value)
    return evaluate(value, names) if isinstance(value, str) else value


def _example(
    spec: RecipeInput, names: Mapping[str, Any], generator: torch.Generator, compute: torch.dtype
) -> torch.Tensor:
    import torch

    shape = tuple(int(evaluate(size, names)) for size in spec.shape)
    kind = {"compute": compute, "float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
    return _values(spec, shape, generator).to(kind[spec.dtype])


def _values(spec: RecipeInput, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    if spec.value:
        count = math.prod(shape)
        repeated = torch.tensor(spec.value, dtype=torch.float32).repeat(
            count // len(spec.value) + 1
        )
        return repeated[:count].reshape(shape)
    if spec.integers is not None:
        return torch.randint(*spec.integers, shape, generator=generator)
    if spec.mask is not None:
        return _ragged(shape).flip(-1) if spec.mask == "ragged_left" else _ragged(shape)
    return torch.randn(shape, generator=generator)


def _ragged(shape: tuple[int, ...]) -> torch.Tensor:
    """Ones with trailing zeros: none in the first row, a third of the second, two of the third."""
    import torch

    rows, tokens = math.prod(shape[:-1]), shape[-1]
    lengths = torch.tensor([tokens - (row % 3) * (tokens // 3) for row in range(rows)])
    return (torch.arange(tokens) < lengths[:, None]).reshape(shape)
