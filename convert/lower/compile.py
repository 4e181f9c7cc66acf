"""A component's program: every entry of its recipe traced, lowered, rewritten, and outlined."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Arg, Entry, Parameter, Program, Ref, Weight, substitute
from mlxconv.runtime.program.stored import validate

from ..recipe.recipe import Recipe, evaluate
from ..source.model_class import constructing, named_config

if TYPE_CHECKING:
    import torch

    from ..trace.traced import Traced

Size = tuple[int, int]  # pixels, width and height


@dataclass(frozen=True)
class Compiled:
    """A program, the values of its constants, and every tensor that the module owns.

    `parameters` has those that no entry reads too (kind `other` unless the module says more);
    `tied` their further names, each with the first.
    """

    program: Program
    constants: dict[str, np.ndarray[Any, Any]]
    parameters: dict[str, Parameter]
    tied: dict[str, str] = field(default_factory=dict)


def compile_program(
    cls: type,
    config: Mapping[str, Any],
    recipe: Recipe,
    sizes: Sequence[Size] = (),
    choices: Sequence[Mapping[str, int]] = (),
    names: Sequence[str] = (),
) -> Compiled:
    """Trace the entries that the recipe gives for this configuration; no weight is read.

    `sizes` matter to classes that fix their image size: one entry for each. `choices` of fixed
    dims are traced in place of those that the recipe and `sizes` make; of `names` alone, if any.
    The last few results are kept: converting one checkpoint to several precisions traces it once.
    """
    key = repr((cls, sorted(config.items()), recipe, sizes, choices, names))
    if key not in _RECENT:
        while len(_RECENT) >= _KEPT:
            _RECENT.pop(next(iter(_RECENT)))
        with _without_leftovers():
            known = names or recipe.programs_for({**_defaults(cls, config), **config})
            _RECENT[key] = _compile(
                cls, config, recipe, known, choices or fixed_dims(recipe, sizes)
            )
    return _RECENT[key]


@contextlib.contextmanager
def _without_leftovers() -> Iterator[None]:
    """Afterwards the memory of a trace, which is full of cycles, is free again.

    What was there before is not looked through: with torch's modules loaded that takes a second.
    """
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if ours:
            gc.unfreeze()


_RECENT: dict[str, Compiled] = {}
_KEPT = 8


def _compile(
    cls: type,
    config: Mapping[str, Any],
    recipe: Recipe,
    names: Sequence[str],
    choices: Sequence[Mapping[str, int]],
) -> Compiled:
    from ..trace.export import trace
    from .lowering import Lowered, has_row, lower
    from .outline import outline
    from .rewrites import rewrite

    lowered: list[Lowered] = []
    owned: dict[str, Parameter] = {}
    tied: dict[str, str] = {}
    constants: dict[str, tuple[torch.Tensor, bool]] = {}
    for name in names:
        for dims in choices:
            traced: Traced = trace(cls, config, recipe, name, dims=dims, keep=has_row)
            found = lower(traced)
            entry = rewrite(found.entry, found.parameters)
            own = _constants(traced, found.constants, cls, config)
            lowered.append(replace(found, entry=_merge_constants(entry, own, constants)))
            owned = {
                p.name: Parameter(p.shape, p.dtype, "other") for p in traced.parameters.values()
            }
            tied = traced.tied
            del traced
    if not lowered:
        raise MlxconvError(f"{recipe.class_name}: its recipe has no program for this config.json")
    entries, blocks = outline([found.entry for found in lowered])
    used = merge_kinds(found.parameters for found in lowered)
    values = {name: _numpy(value) for name, (value, _) in constants.items()}
    listed = {
        name: "compute" if follows else str(values[name].dtype)
        for name, (_, follows) in constants.items()
    }
    program = Program(recipe.class_name, entries, blocks, used, listed)
    validate(program, recipe.class_name)
    return Compiled(program, values, {**owned, **used}, tied)


def _merge_constants(
    entry: Entry,
    found: Mapping[str, tuple[torch.Tensor, bool]],
    known: dict[str, tuple[torch.Tensor, bool]],
) -> Entry:
    """Add an entry's constants to those known; one of another entry's name and other values gets
    a name of its own, in the entry too."""
    renamed: dict[str, str] = {}
    for name, (value, follows) in found.items():
        new, number = name, 1
        while new in known and not _same(known[new][0], value):
            new, number = f"{name}.{number}", number + 1
        known[new] = (value, follows)
        if new != name:
            renamed[name] = new

    return with_constants(entry, renamed) if renamed else entry


def with_constants(entry: Entry, names: Mapping[str, str]) -> Entry:
    """An entry that reads constants by other names."""

    def read(item: Ref | Weight) -> Arg:
        return Weight(names.get(item.name, item.name)) if isinstance(item, Weight) else item

    nodes = [
        replace(node, args={key: substitute(arg, read) for key, arg in node.args.items()})
        for node in entry.nodes
    ]
    outputs = tuple(substitute(arg, read) for arg in entry.outputs)
    return replace(entry, nodes=nodes, outputs=outputs)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def _defaults(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    from ..trace.fake_module import merged_config

    return merged_config(cls, config)


def _constants(
    traced: Traced, names: Sequence[str], cls: type, config: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, bool]]:
    """Values, and whether each follows the precision of the run.

    A table that the class builds in the default dtype was built in the traced precision; its
    values are taken from the module built in fp32, and rounded when a bf16 bundle is loaded.
    """
    import torch

    from ..trace.fake_module import build_module

    found = {name: (traced.constants[name], False) for name in names}
    low = [name for name in names if traced.constants[name].dtype == traced.dtype]
    if not low:
        return found
    exact, _ = build_module(cls, config, dtype=torch.float32)
    for name in low:
        value = _attribute(exact, name)
        found[name] = (traced.constants[name] if value is None else value, True)
    return found


def _attribute(module: torch.nn.Module, path: str) -> torch.Tensor | None:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if type(value).__name__ in ("Tensor", "Parameter") else None


def fixed_dims(recipe: Recipe, sizes: Sequence[Size]) -> list[dict[str, int]]:
    """Every choice of fixed dims to trace: the recipe's values, times the pixel sizes asked for.

    One empty choice where nothing is fixed to several values.
    """
    pixels: list[dict[str, int]] = [{}]
    fixed = recipe.fixed_sizes()
    if fixed and sizes:
        pixels = [
            {
                dim: int(evaluate(expression, {"W": width, "H": height}))
                for dim, expression in fixed.items()
            }
            for width, height in sizes
        ]
    listed = [d for d in recipe.dims.values() if d.values and d.name not in pixels[0]]
    choices = product(*([(d.name, value) for value in d.values] for d in listed))
    return [{**dict(choice), **size} for choice in choices for size in pixels]


def merge_kinds(tables: Iterable[Mapping[str, Parameter]]) -> dict[str, Parameter]:
    """Parameters of all entries; one that entries use in different ways must be stored plainly.

    Raises MlxconvError for that: their conversions to a layout would contradict each other.
    """
    merged: dict[str, Parameter] = {}
    for table in tables:
        for name, parameter in table.items():
            known = merged.setdefault(name, parameter)
            if known.kind != parameter.kind:
                raise MlxconvError(
                    f"{name}: one entry uses it as {known.kind}, another as {parameter.kind}; "
                    "convert them from recipes of their own (--recipe FILE)"
                )
    return dict(sorted(merged.items()))


def _numpy(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """A constant as MLX takes it: 64-bit integers and complex128 narrowed, bfloat16 as float32."""
    import torch

    narrow = {
        torch.int64: torch.int32,
        torch.complex128: torch.complex64,
        torch.bfloat16: torch.float32,
    }
    array: np.ndarray[Any, Any] = value.to(narrow.get(value.dtype, value.dtype)).numpy()
    return np.ascontiguousarray(array)


def module_parameters(
    cls: type, library: str, path: Path, config: Mapping[str, Any]
) -> tuple[torch.nn.Module, dict[str, Parameter]]:
    """The module without its weights, and its tensors; each kind is that of the owning module.

    For components that are converted without a program.
    """
    import torch

    if library == "transformers":
        with torch.device("meta"), named_config(path), constructing(cls):
            config_class = cls.config_class  # type: ignore[attr-defined]
            made = cls(
                config_class.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            )
    else:
        from ..trace.fake_module import build_module

        with named_config(path):
            made, _ = build_module(cls, config)
    owners = {}
    for name, module in made.named_modules():
        owners[f"{name}.weight".lstrip(".")] = _kind_of_module(module)
    state = made.state_dict(keep_vars=True)
    return made, {
        name: Parameter(tuple(value.shape), _dtype_name(value), owners.get(name, "other"))
        for name, value in state.items()
    }


def _kind_of_module(module: torch.nn.Module) -> str:
    from torch.nn.modules import conv

    if isinstance(module, conv._ConvTransposeNd):
        return "conv_transpose"
    if isinstance(module, conv._ConvNd):
        return "conv" if module.weight.ndim == len(module.kernel_size) + 2 else "other"
    return "linear" if type(module).__name__.endswith("Linear") else "other"


def _dtype_name(value: torch.Tensor) -> str:
    return "compute" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
