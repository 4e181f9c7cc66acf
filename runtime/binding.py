"""Keyword arguments of a torch forward -> the values an entry of a program takes."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import MlxconvError
from .ops import dtype_of
from .program import Arg, Body, Entry, Input, Program, Weight, refs


def bind(
    program: Program, name: str, inputs: Mapping[str, Any], compute: str
) -> tuple[Entry, dict[str, Any]]:
    """The entry `name` that takes inputs of these sizes, and its values by input name.

    `compute`: dtype of the inputs that follow it. MlxconvError says which input does not fit, and
    what sizes there are.
    """
    entries = [e for e in program.entries if e.name == name] or [program.entry(name)]
    reasons = []
    for entry in entries:
        try:
            _check_keywords(program.class_name, entry, inputs)
            values = {i.name: as_input(i, at(inputs, i.path), compute) for i in entry.inputs}
            _check_ids(program, entry, inputs)
            _check_siblings(program.class_name, entry, values)
            return entry, values
        except _WrongSize as error:
            reasons.append(str(error))
    message = f"{program.class_name}.{name}: {reasons[0]}."
    if not any(e.sizes for e in entries):
        raise MlxconvError(message)
    have = "; ".join(str(e.sizes) for e in entries)
    raise NoSuchSize(f"{message} Sizes in this bundle: {have}.")


class NoSuchSize(MlxconvError):
    """No entry takes inputs of these sizes; one may be traced."""


class _WrongSize(MlxconvError):
    """The inputs do not fit this entry; another one may."""


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def _check_keywords(class_name: str, entry: Entry, inputs: Mapping[str, Any]) -> None:
    tensors = list(dict.fromkeys(i.path.split(".")[0] for i in entry.inputs))
    fixed = {path.split(".")[0] for path in entry.literals}
    unknown = [
        k for k, v in inputs.items() if k not in tensors and k not in fixed and not _is_nothing(v)
    ]
    if unknown:
        raise MlxconvError(
            f"{class_name}.{entry.name}: traced without {', '.join(unknown)}; it takes "
            f"{', '.join(tensors)}. Another recipe can trace it with them (--recipe FILE)."
        )
    missing = [k for k in tensors if inputs.get(k) is None]
    if missing:
        raise MlxconvError(f"{class_name}.{entry.name}: missing input {', '.join(missing)}")
    for path, value in entry.literals.items():
        given = at(inputs, path, value)
        if (
            path != "return_dict"
            and not isinstance(given, (mx.array, np.ndarray))
            and given != value
        ):
            raise _WrongSize(f"{path} was traced as {value!r}, given {given!r}")


def _check_siblings(class_name: str, entry: Entry, values: Mapping[str, Any]) -> None:
    """The items of a list were traced with one shape for all."""
    first: dict[tuple[str, str], Input] = {}
    for item in entry.inputs:
        parent, _, last = item.path.rpartition(".")
        if not last.isdigit() or item.type == "int":
            continue
        other = first.setdefault((parent, item.type), item)
        if values[other.name].shape != values[item.name].shape:
            shapes = [f"{i.path} {tuple(values[i.name].shape)}" for i in (other, item)]
            raise MlxconvError(
                f"{class_name}.{entry.name}: {' and '.join(shapes)} differ; pad them to one "
                "length, or call it with one sample at a time"
            )


# Ops whose elements are those of their arguments.
_KEEPS_VALUES = frozenset(
    {"broadcast", "cast", "concat", "expand_dims", "flip", "index", "repeat", "reshape", "roll",
     "select", "slice", "squeeze", "stack", "take", "tile", "transpose", "where"}
)  # fmt: skip


def rows_by_input(program: Program, entry: Entry) -> dict[str, int]:
    """How many rows the tables have that inputs choose from, unchanged: a vocabulary's size."""
    found: dict[str, int] = {}
    whole = (i.name for i in entry.inputs if i.type.startswith(("int32[", "int64[")))
    arrays = {name: frozenset((name,)) for name in whole}
    _trace_ids(program, entry, "", arrays, found)
    return found


def _trace_ids(
    program: Program,
    body: Body,
    prefix: str,
    sources: dict[str, frozenset[str]],
    found: dict[str, int],
) -> list[frozenset[str]]:
    """`sources`: the inputs whose elements are those of a value. Returns those of the outputs."""

    def of(arg: Arg) -> frozenset[str]:
        return frozenset().union(*(sources.get(name, ()) for name in refs((arg,))))

    for node in body.nodes:
        if node.op == "call":
            given = node.args["inputs"]
            assert isinstance(given, tuple)
            if any(map(of, given)):
                block = program.blocks[str(node.args["block"])]
                inner = dict(zip(block.inputs, map(of, given)))
                path = f"{prefix}{node.args['prefix']}."
                sources.update(zip(node.out, _trace_ids(program, block, path, inner, found)))
        elif node.op == "embedding" and isinstance(table := node.args["weight"], Weight):
            parameter = program.parameters.get(prefix + table.name)
            if parameter is not None:
                rows = dict.fromkeys(of(node.args["ids"]), parameter.shape[0])
                found.update({n: min(size, found.get(n, size)) for n, size in rows.items()})
        elif node.op in _KEEPS_VALUES:
            parts = tuple(v for key, v in node.args.items() if key in ("x", "xs", "a", "b"))
            sources.update(dict.fromkeys(node.out, of(parts)))
    return [of(arg) for arg in body.outputs]


def _check_ids(program: Program, entry: Entry, inputs: Mapping[str, Any]) -> None:
    """MlxconvError for a token beyond the vocabulary: MLX would read whatever lies there."""
    paths = {i.name: i.path for i in entry.inputs}
    for name, rows in rows_by_input(program, entry).items():
        given = at(inputs, paths[name])
        ids = np.array(given.astype(mx.int64) if isinstance(given, mx.array) else given)
        wrong = ids[(ids < 0) | (ids >= rows)]
        if wrong.size:
            raise MlxconvError(
                f"{program.class_name}.{entry.name}: {paths[name]} has the id {wrong.max()}; "
                f"the vocabulary has {rows} entries, 0 to {rows - 1}"
            )


_ABSENT = object()


def at(inputs: Mapping[str, Any], path: str, default: Any = _ABSENT) -> Any:
    value: Any = inputs
    for part in path.split("."):
        try:
            value = value[part] if isinstance(value, Mapping) else value[int(part)]
        except (KeyError, IndexError, TypeError, ValueError):
            if default is not _ABSENT:
                return default
            raise _WrongSize(f"input {path} is missing") from None
    return value


def as_input(item: Input, value: Any, compute: str) -> Any:
    if item.type == "int":
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise MlxconvError(f"input {item.path}: expected a whole number ({error})") from error
    dtype, _, shape = item.type.rstrip("]").partition("[")
    array = value if isinstance(value, mx.array) else mx.array(np.asarray(value))
    sizes = [s.strip() for s in shape.split(",") if s.strip()]
    wrong = len(sizes) != array.ndim or any(
        s.isdigit() and int(s) != n for s, n in zip(sizes, array.shape)
    )
    if wrong:
        raise _WrongSize(f"input {item.path} has shape {tuple(array.shape)}, expected [{shape}]")
    return array.astype(dtype_of(compute if dtype == "compute" else dtype))
