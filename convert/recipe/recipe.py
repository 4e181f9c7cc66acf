"""Recipes: what a class takes, which sizes are free, what stays precise. Data only, from TOML.

A recipe never holds Python. Its shapes are small arithmetic expressions over named dims and the
keys of the component's configuration (`runtime/program/expressions.py`).
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.expressions import Expression as Expression
from mlxconv.runtime.program.expressions import evaluate as evaluate
from mlxconv.runtime.program.expressions import names_in as names_in

if TYPE_CHECKING:
    import torch

Stage = Literal["constant", "prompt", "schedule", "step"]
DType = Literal["compute", "float32", "int64", "bool"]
STAGES = ("constant", "prompt", "schedule", "step")
DTYPES = ("compute", "float32", "int64", "bool")
MASKS = ("ragged", "ragged_left")
RECIPE_FILE = "recipe.toml"  # in a bundle, where the recipe is not one of ours


# --- the recipe -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dim:
    """A named size: ``trace`` for tracing, ``check`` afterwards.

    ``fixed``: the class builds it in, so there is one program a value: those of ``values``, else
    the one traced.
    """

    name: str
    trace: Expression
    check: tuple[int, ...] = ()
    fixed: bool = False
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class RecipeInput:
    """One tensor (or list of tensors) that a program takes, and how to make a plausible one.

    A dot in ``name`` puts it into a dictionary, or at a place of a list where a number follows:
    ``added_cond_kwargs.resolution``, ``visual_rope_pos.0``.

    ``shape`` holds expressions. Values: seeded normal floats, or ``value`` (a number, or
    numbers repeated along the flattened tensor), or ``integers`` (low, high) with high
    excluded, or ``mask = "ragged"`` (row i keeps fewer leading ones; "ragged_left": fewer
    trailing ones). ``count`` makes it a list of that many. ``when`` drops it where the expression
    is false. ``known``: a program has the ``value`` built in, as a mask of ones where nothing is
    padded. ``below``, ``reaches``: what ``truths`` take for granted: that the largest element is
    below a number, or at least that.
    """

    name: str
    shape: tuple[Expression, ...]
    dtype: DType = "compute"
    stage: Stage = "step"
    value: tuple[float, ...] = ()
    integers: tuple[int, int] | None = None
    mask: str | None = None
    count: Expression | None = None
    when: Expression | bool = True
    known: bool = False
    below: Expression | None = None
    reaches: Expression | None = None

    @property
    def path(self) -> tuple[str | int, ...]:
        """Where it goes among the keyword arguments: the name, split at its dots."""
        return tuple(int(part) if part.isdigit() else part for part in self.name.split("."))


@dataclass(frozen=True)
class ProgramRecipe:
    """One entry point of a class: the traced method, its inputs, and its other arguments.

    ``method`` is a path: a method, or a submodule (``model``) whose forward is called.
    """

    name: str
    method: str
    inputs: Mapping[str, RecipeInput]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    when: Expression | bool = True
    truths: tuple[bool, ...] = ()  # of the conditions on tensors' values, in their order
    alike: tuple[str, ...] = ()  # functions whose conditions on sizes change how, not what

    def callable(self, module: torch.nn.Module) -> Callable[..., Any]:
        """What the program is traced from; of a submodule its call, so that hooks run."""
        found: Any = operator.attrgetter(self.method)(module)
        if not hasattr(found, "forward"):
            return cast("Callable[..., Any]", found)

        @functools.wraps(found.forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

        return call


@dataclass(frozen=True)
class PrecisionRules:
    """Anchored globs on module names: kept at the compute dtype; adaLN, 8 bit at the least."""

    keep: tuple[str, ...] = ()
    modulation: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What mlxconv needs to know about a class to trace it."""

    class_name: str
    library: str
    pipelines: tuple[str, ...]
    dims: Mapping[str, Dim]
    programs: Mapping[str, ProgramRecipe]
    precision: PrecisionRules
    tiny: Mapping[str, Any]
    tiny_variants: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, Expression]
    unused: tuple[str, ...] = ()  # globs: tensors that the class has and its forward drops

    def program(self, name: str) -> ProgramRecipe:
        """The program of that name; MlxconvError names those that exist."""
        if name not in self.programs:
            raise MlxconvError(
                f"{self.class_name} has no program {name!r}, only {', '.join(self.programs)}"
            )
        return self.programs[name]

    def programs_for(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The programs that a component with this (merged) configuration has."""
        return tuple(n for n, program in self.programs.items() if evaluate(program.when, config))

    def tiny_config(self, variant: str | None = None) -> dict[str, Any]:
        """Constructor arguments of a model small enough to test with."""
        if variant is not None and variant not in self.tiny_variants:
            raise MlxconvError(f"{self.class_name} has no tiny variant {variant!r}")
        return {**self.tiny, **(self.tiny_variants[variant] if variant else {})}

    def trace_dims(
        self, config: Mapping[str, Any], dims: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Every dim's size: the recipe's for tracing, or what ``dims`` asks for."""
        unknown = sorted(set(dims or {}) - set(self.dims))
        if unknown:
            raise MlxconvError(
                f"{self.class_name} has no dim {', '.join(unknown)}, only {', '.join(self.dims)}"
            )
        sizes = {name: int(evaluate(dim.trace, config)) for name, dim in self.dims.items()}
        return {**sizes, **(dims or {})}

    def fixed_sizes(self) -> dict[str, Expression]:
        """Of the sizes that pixels decide, those that the class builds in."""
        return {name: text for name, text in self.sizes.items() if self.dims[name].fixed}

    def sizes_table(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a bundle keeps of the sizes (`runtime/bench/examples.py` reads it).

        `dims`: each one's size for tracing; `pixels`: the expressions over W and H; `arguments`:
        for each program the expressions of its Python arguments, by dotted path; `shapes`: those of
        its inputs.
        """
        arguments = {
            name: dict(_expressions(dict(self.programs[name].arguments), ""))
            for name in self.programs_for(config)
        }
        shapes = {
            name: {path: list(spec.shape) for path, spec in self.programs[name].inputs.items()}
            for name in arguments
        }
        return {
            "dims": self.trace_dims(config),
            "pixels": dict(self.sizes),
            "arguments": {name: found for name, found in arguments.items() if found},
            "shapes": shapes,
        }


def _expressions(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The strings inside a recipe's argument, each with its dotted path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _expressions(item, f"{path}.{key}".lstrip("."))


# --- reading ----------------------------------------------------------------------------------

_TOP = {
    "class",
    "library",
    "pipelines",
    "dims",
    "programs",
    "precision",
    "tiny",
    "tiny_variants",
    "sizes",
    "unused",
}
_DIM = {"trace", "check", "fixed", "values"}
_PROGRAM = {"method", "inputs", "arguments", "when", "truths", "alike"}
_BOUNDS = ("below", "reaches")
_INPUT = {
    "shape",
    "dtype",
    "stage",
    "value",
    "integers",
    "mask",
    "count",
    "when",
    "known",
    "below",
    "reaches",
}


@dataclass(frozen=True)
class _Reader:
    """Checks one TOML file; every complaint names the file and the key."""

    source: str

    def fail(self, key: str, message: str) -> MlxconvError:
        return MlxconvError(f"{self.source}: {key}: {message}")

    def table(self, data: Any, key: str, allowed: set[str] | None = None) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise self.fail(key, f"expected a table, found {data!r}")
        for name in data if allowed is not None else ():
            if name not in cast("set[str]", allowed):
                known = ", ".join(sorted(cast("set[str]", allowed)))
                raise self.fail(f"{key}.{name}".lstrip("."), f"unknown key; known here: {known}")
        return data

    def typed(self, data: Any, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        if not isinstance(data, kind) or (isinstance(data, bool) and kind in (int, (int, float))):
            raise self.fail(key, f"expected {what}, found {data!r}")
        return data

    def listed(
        self, data: Any, key: str, kind: type | tuple[type, ...], what: str
    ) -> tuple[Any, ...]:
        self.typed(data, key, list, f"a list of {what}")
        return tuple(self.typed(item, key, kind, what) for item in data)

    def one_of(self, data: Any, key: str, choices: tuple[str, ...]) -> Any:
        if data not in choices:
            raise self.fail(key, f"expected one of {', '.join(choices)}, found {data!r}")
        return data

    def expression(self, data: Any, key: str, names: set[str] | None) -> Any:
        """An expression, parsed; ``names`` is what it may read (None: unknown, so not checked)."""
        self.typed(data, key, (str, int, bool), "an expression")
        try:
            used = names_in(data)
        except MlxconvError as error:
            raise self.fail(key, str(error)) from error
        for name in sorted(used - names) if names is not None else ():
            near = difflib.get_close_matches(name, list(names or ()), 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise self.fail(key, f"unknown name {name!r}, neither a dim nor a key of [tiny]{hint}")
        return data


def _read(data: dict[str, Any], source: str) -> Recipe:
    read = _Reader(source)
    read.table(data, "", _TOP)
    for required in ("class", "dims", "programs"):
        if required not in data:
            raise read.fail(required, "missing")
    tiny = read.table(data.get("tiny", {}), "tiny")
    variants = read.table(data.get("tiny_variants", {}), "tiny_variants")
    config_names = set(tiny).union(
        *(read.table(v, f"tiny_variants.{k}") for k, v in variants.items())
    )
    dims = _dims(read, data["dims"], config_names if tiny else None)
    names = config_names | set(dims) if tiny else None
    programs = read.table(data["programs"], "programs")
    precision = read.table(data.get("precision", {}), "precision", {"keep", "modulation"})
    sizes = read.table(data.get("sizes", {}), "sizes", set(dims))
    return Recipe(
        class_name=read.typed(data["class"], "class", str, "a class name"),
        library=read.typed(data.get("library", "diffusers"), "library", str, "a library's name"),
        pipelines=read.listed(data.get("pipelines", []), "pipelines", str, "pipeline names"),
        dims=dims,
        programs={name: _program(read, name, program, names) for name, program in programs.items()},
        precision=PrecisionRules(
            **{k: read.listed(v, f"precision.{k}", str, "patterns") for k, v in precision.items()}
        ),
        tiny=tiny,
        tiny_variants=variants,
        sizes={
            k: read.expression(v, f"sizes.{k}", names and (names | {"H", "W"}))
            for k, v in sizes.items()
        },
        unused=read.listed(data.get("unused", []), "unused", str, "patterns"),
    )


def _dims(read: _Reader, data: Any, config_names: set[str] | None) -> dict[str, Dim]:
    dims = {}
    for name, entry in read.table(data, "dims").items():
        key = f"dims.{name}"
        read.table(entry, key, _DIM)
        if "trace" not in entry:
            raise read.fail(f"{key}.trace", "missing")
        dims[name] = Dim(
            name,
            trace=read.expression(entry["trace"], f"{key}.trace", config_names),
            check=read.listed(entry.get("check", []), f"{key}.check", int, "integers"),
            fixed=read.typed(entry.get("fixed", False), f"{key}.fixed", bool, "true or false"),
            values=read.listed(entry.get("values", []), f"{key}.values", int, "integers"),
        )
        if dims[name].values and not dims[name].fixed:
            raise read.fail(f"{key}.values", "only a fixed dim has one program per value")
    return dims


def _program(read: _Reader, name: str, data: Any, names: set[str] | None) -> ProgramRecipe:
    key = f"programs.{name}"
    read.table(data, key, _PROGRAM)
    inputs = read.table(data.get("inputs", {}), f"{key}.inputs")
    arguments = read.table(data.get("arguments", {}), f"{key}.arguments")
    both = sorted(set(inputs) & set(arguments))
    if both:
        raise read.fail(f"{key}.arguments.{both[0]}", "is an input already")
    for argument, value in arguments.items():
        for text in _strings(value):
            read.expression(text, f"{key}.arguments.{argument}", names)
    return ProgramRecipe(
        name,
        method=read.typed(data.get("method", "forward"), f"{key}.method", str, "a method's name"),
        inputs={k: _input(read, k, v, f"{key}.inputs.{k}", names) for k, v in inputs.items()},
        arguments=arguments,
        when=read.expression(data.get("when", True), f"{key}.when", names),
        truths=read.listed(data.get("truths", []), f"{key}.truths", bool, "true or false"),
        alike=read.listed(data.get("alike", []), f"{key}.alike", str, "names of functions"),
    )


def _input(read: _Reader, name: str, data: Any, key: str, names: set[str] | None) -> RecipeInput:
    read.table(data, key, _INPUT)
    if "shape" not in data:
        raise read.fail(f"{key}.shape", "missing")
    if len({"value", "integers", "mask"} & set(data)) > 1:
        raise read.fail(key, "has more than one of value, integers, mask")
    value = data.get("value", [])
    if data.get("known") and type(value) is not int:
        raise read.fail(f"{key}.known", "needs a value, one integer")
    integers = data.get("integers")
    return RecipeInput(
        name,
        shape=tuple(
            read.expression(size, f"{key}.shape", names)
            for size in read.listed(data["shape"], f"{key}.shape", (str, int), "expressions")
        ),
        dtype=read.one_of(data.get("dtype", "compute"), f"{key}.dtype", DTYPES),
        stage=read.one_of(data.get("stage", "step"), f"{key}.stage", STAGES),
        value=read.listed(
            value if isinstance(value, list) else [value], f"{key}.value", (int, float), "numbers"
        ),
        integers=None if integers is None else _pair(read, integers, f"{key}.integers"),
        mask=read.one_of(data["mask"], f"{key}.mask", MASKS) if "mask" in data else None,
        count=read.expression(data["count"], f"{key}.count", names) if "count" in data else None,
        when=read.expression(data.get("when", True), f"{key}.when", names),
        known=read.typed(data.get("known", False), f"{key}.known", bool, "true or false"),
        **{k: read.expression(data[k], f"{key}.{k}", names) for k in _BOUNDS if k in data},
    )


def _pair(read: _Reader, data: Any, key: str) -> tuple[int, int]:
    pair = read.listed(data, key, int, "integers")
    if len(pair) != 2 or pair[0] >= pair[1]:
        raise read.fail(key, f"expected [low, high] with low < high, found {data!r}")
    return pair[0], pair[1]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def load_recipe_file(path: str | Path) -> Recipe:
    """The recipe in a TOML file. MlxconvError names the file and the key that is wrong."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MlxconvError(f"cannot read recipe {path}: {reason}") from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, source: str) -> Recipe:
    """The recipe in a TOML text; ``source`` is what errors call it."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MlxconvError(f"{source}: not valid TOML: {error}") from error
    return _read(data, source)


def bundle_recipe(folder: Path, class_name: str) -> Recipe:
    """The recipe that a bundle's component was converted by: its own, or the shipped one."""
    own = folder / RECIPE_FILE
    return load_recipe_file(own) if own.is_file() else load_recipe(class_name)


@functools.lru_cache
def load_recipe(class_name: str) -> Recipe:
    """The recipe that ships for a class, by the class's name."""
    known = recipe_names()
    if class_name not in known:
        near = difflib.get_close_matches(class_name, known, 3, 0.5)
        hint = f" (close: {', '.join(near)})" if near else ""
        raise MlxconvError(
            f"no recipe for class {class_name!r}{hint}: add a recipe TOML "
            "(see docs/ADDING_A_MODEL.md), or pass --recipe FILE"
        )
    path = files("mlxconv").joinpath("recipes", f"{class_name}.toml")
    return parse_recipe(path.read_text(encoding="utf-8"), f"recipes/{class_name}.toml")


@functools.lru_cache
def recipe_names() -> tuple[str, ...]:
    """The classes that have a recipe, without reading any."""
    folder = files("mlxconv").joinpath("recipes")
    return tuple(sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".toml")))


def all_recipes() -> dict[str, Recipe]:
    """Every recipe that ships, by class name."""
    return {name: load_recipe(name) for name in recipe_names()}


# --- example inputs ---------------------------------------------------------------------------


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
