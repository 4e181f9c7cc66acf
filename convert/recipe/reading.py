"""Recipes read from TOML and checked: each mistake names its key."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.expressions import Expression as Expression
from mlxconv.runtime.program.expressions import evaluate as evaluate
from mlxconv.runtime.program.expressions import names_in as names_in

if TYPE_CHECKING:
    pass

from .recipe import (
    DTYPES,
    MASKS,
    RECIPE_FILE,
    STAGES,
    Dim,
    PrecisionRules,
    ProgramRecipe,
    Recipe,
    RecipeInput,
)

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
