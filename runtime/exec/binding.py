"""Keyword arguments of a torch forward -> the values an entry of a program takes."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import MlxconvError
from ..ops import dtype_of
from ..program.expressions import axes_in, evaluate
from ..program.program import Arg, Body, Entry, Input, Program, Weight, refs
from ..program.types import INT, Type


def bind(
    program: Program, name: str, inputs: Mapping[str, Any], compute: str
) -> tuple[Entry, dict[str, Any]]:
    """The entry `name` that takes these inputs, and its values by input name.

    `compute`: dtype of the inputs that follow it. MlxconvError says which input does not fit, and
    what sizes there are.
    """
    entry, values = choose(program, name, inputs, compute)
    _check_ids(program, entry, inputs)
    _check_elements(program.class_name, entry, values)
    return entry, values


def choose(
    program: Program, name: str, inputs: Mapping[str, Any], compute: str
) -> tuple[Entry, dict[str, Any]]:
    """As `bind`, without looking at the elements of arrays."""
    entries = [e for e in program.entries if e.name == name] or [program.entry(name)]
    reasons: list[_WrongSize] = []
    for entry in entries:
        try:
            _check_keywords(program.class_name, entry, inputs)
            values = {i.name: as_input(i, at(inputs, i.path), compute) for i in entry.inputs}
            _check_leaves(entry, inputs)
            _check_literals(entry, inputs)
            _check_siblings(program.class_name, entry, values)
            _check_assumptions(entry, values)
            return entry, values
        except _WrongSize as error:
            reasons.append(error)
    message = f"{program.class_name}.{name}: {reasons[0]}."
    axes = frozenset[tuple[str, int]]().union(*(reason.axes for reason in reasons))
    if not axes and not any(e.sizes for e in entries):
        raise NotTaken(message)
    have = "; ".join(str(e.sizes) for e in entries if e.sizes)
    raise NoSuchSize(f"{message} Sizes in this bundle: {have}." if have else message, axes)


class NotTaken(MlxconvError):
    """No entry was traced for such inputs; one may be."""


class _WrongSize(NotTaken):
    """The inputs do not fit this entry; another one may. `axes`: those of inputs, by path and
    axis, whose sizes an assumption is about."""

    def __init__(self, message: str, axes: frozenset[tuple[str, int]] = frozenset()) -> None:
        super().__init__(message)
        self.axes = axes


class NoSuchSize(_WrongSize):
    """No entry takes inputs of these sizes."""


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def _check_keywords(class_name: str, entry: Entry, inputs: Mapping[str, Any]) -> None:
    tensors = list(dict.fromkeys(i.path.split(".")[0] for i in entry.inputs))
    fixed = {path.split(".")[0] for path in entry.literals}
    unknown = [
        k for k, v in inputs.items() if k not in tensors and k not in fixed and not _is_nothing(v)
    ]
    if unknown:
        raise NotTaken(
            f"{class_name}.{entry.name}: traced without {', '.join(unknown)}; it takes "
            f"{', '.join(tensors)}. Another recipe can trace it with them (--recipe FILE)."
        )
    missing = [k for k in tensors if inputs.get(k) is None]
    if missing:
        raise NotTaken(f"{class_name}.{entry.name}: missing input {', '.join(missing)}")


def _check_leaves(entry: Entry, inputs: Mapping[str, Any]) -> None:
    """Dictionaries and lists hold nothing that the program would pass over.

    Of a list that says the same of each sample, such as `img_shapes`, one item is enough.
    """
    known = {i.path for i in entry.inputs} | set(entry.literals)
    for name, value in inputs.items():
        first = value[:1] if isinstance(value, (list, tuple)) and _repeats(value) else value
        extra = list(_leaf_paths(first, name, known))
        if extra:
            raise _WrongSize(f"traced without {', '.join(extra[:3])}")


def _repeats(items: list[Any] | tuple[Any, ...]) -> bool:
    plain = not any(isinstance(leaf, (mx.array, np.ndarray)) for leaf in _leaves(items))
    return plain and all(item == items[0] for item in items)


def _leaves(value: Any) -> Iterator[Any]:
    items = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, list, tuple)):
        yield value
        return
    for item in items:
        yield from _leaves(item)


def _leaf_paths(value: Any, path: str, known: set[str]) -> Iterator[str]:
    """Paths of what is not None; an array that stands for a list is taken apart."""
    if path in known or value is None:
        return
    items: Any
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)) or getattr(value, "ndim", None):
        items = enumerate(value)
    else:
        yield path
        return
    for key, item in items:
        yield from _leaf_paths(item, f"{path}.{key}", known)


def _check_literals(entry: Entry, inputs: Mapping[str, Any]) -> None:
    tensors = {i.path for i in entry.inputs}
    for path, value in entry.literals.items():
        given = at(inputs, path, value)
        if path != "return_dict" and path not in tensors and not _equal(given, value):
            raise _WrongSize(f"{path} was traced as {value!r}, given {given!r:.80}")


def _equal(given: Any, value: Any) -> bool:
    if isinstance(given, (mx.array, np.ndarray)):
        return given.size == 1 and bool(given.item() == value)
    return bool(given == value)


def _check_elements(class_name: str, entry: Entry, values: Mapping[str, Any]) -> None:
    """The elements of inputs are what the trace took them to be."""
    for item in entry.inputs:
        if item.path not in entry.literals:
            continue
        value, given = entry.literals[item.path], values[item.name]
        where = f"{class_name}.{entry.name}: {item.path} was traced"
        if isinstance(value, Mapping):
            largest: Any = mx.max(given).item()
            if largest >= value.get("below", math.inf) or largest < value.get("reaches", -math.inf):
                words = {"below": "below", "reaches": "at least"}
                bounds = " and ".join(f"{words[how]} {n}" for how, n in value.items())
                raise NotTaken(f"{where} for a largest element of {bounds}, not {largest}")
            continue
        others: Any = mx.sum(given != value).item()
        if others:
            raise NotTaken(
                f"{where} as {value} throughout, and {others} of the {given.size} elements given "
                "are not; for a mask, remove the padding and call it with one prompt at a time"
            )


def _check_siblings(class_name: str, entry: Entry, values: Mapping[str, Any]) -> None:
    """The items of a list were traced with one shape for all."""
    first: dict[tuple[str, Type], Input] = {}
    for item in entry.inputs:
        parent, _, last = item.path.rpartition(".")
        if not last.isdigit() or item.type == INT:
            continue
        other = first.setdefault((parent, item.type), item)
        if values[other.name].shape != values[item.name].shape:
            shapes = [f"{i.path} {tuple(values[i.name].shape)}" for i in (other, item)]
            raise NotTaken(
                f"{class_name}.{entry.name}: {' and '.join(shapes)} differ; pad them to one "
                "length, or call it with one sample at a time"
            )


def _check_assumptions(entry: Entry, values: Mapping[str, Any]) -> None:
    """The class does for these sizes what it did for those traced."""
    paths = {item.name: item.path for item in entry.inputs}
    sizes = {name: getattr(value, "shape", value) for name, value in values.items()}

    def worded(text: str) -> str:
        named = re.sub(r"[A-Za-z_]\w*", lambda found: paths.get(found[0], found[0]), text)
        return re.sub(r"\[(\d+)\]", r".shape[\1]", named)

    for text in entry.assumptions:
        if not evaluate(text, sizes):
            read = sorted(axes_in(text))
            axes = (name if sizes[name] is values[name] else f"{name}[{n}]" for name, n in read)
            given = ", ".join(f"{worded(one)} = {evaluate(one, sizes)}" for one in axes)
            raise _WrongSize(
                f"the class branches on sizes and was traced for {worded(text)}; given {given}",
                frozenset((paths[name], axis) for name, axis in read),
            )


# Ops whose elements are those of their arguments.
_KEEPS_VALUES = frozenset(
    {
        "broadcast",
        "cast",
        "concat",
        "expand_dims",
        "flip",
        "index",
        "repeat",
        "reshape",
        "roll",
        "select",
        "slice",
        "squeeze",
        "stack",
        "take",
        "tile",
        "transpose",
        "where",
    }
)


def rows_by_input(program: Program, entry: Entry) -> dict[str, int]:
    """How many rows the tables have that inputs choose from, unchanged: a vocabulary's size."""
    found: dict[str, int] = {}
    whole = (
        i.name
        for i in entry.inputs
        if i.type.dims is not None and i.type.dtype in ("int32", "int64")
    )
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
    """The input in the dtype that the program takes. Kinds are cast across only where that gives
    what PyTorch gives."""
    if item.type == INT:
        return _integer(item, value)
    dtype, sizes = item.type.dtype, item.type.dims or ()
    array = value if isinstance(value, mx.array) else mx.array(np.asarray(value))
    wrong = len(sizes) != array.ndim or any(
        s.isdigit() and int(s) != n for s, n in zip(sizes, array.shape)
    )
    if wrong:
        expected = f"[{', '.join(sizes)}]"
        raise _WrongSize(f"input {item.path} has shape {tuple(array.shape)}, expected {expected}")
    target = dtype_of(compute if dtype == "compute" else dtype)
    given, wanted = _kind(array.dtype), _kind(target)
    if given == wanted:
        return array.astype(target)
    alike = {"any": ("bool", "integer", "float"), "count": ("bool", "integer")}.get(item.kinds, ())
    if not {given, wanted} <= set(alike):
        raise NotTaken(
            f"input {item.path} is {given}, and was traced as {wanted}, which may mean something "
            f"else; pass it as {_name(target)}, or trace it as {given} (--recipe FILE)"
        )
    if item.kinds == "any" and wanted != "float":
        return array  # the program itself casts it before anything else
    cast = array.astype(target)
    if not mx.array_equal(cast.astype(array.dtype), array):
        raise MlxconvError(f"input {item.path} has numbers that {_name(target)} cannot hold")
    return cast


def _integer(item: Input, value: Any) -> int:
    scalar = isinstance(value, (mx.array, np.ndarray)) and value.ndim == 0
    single = value.item() if scalar else value
    if isinstance(single, (bool, np.bool_)) or not isinstance(single, (int, np.integer)):
        raise MlxconvError(f"input {item.path} is {value!r:.80}, expected an integer")
    return int(single)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _kind(dtype: mx.Dtype) -> str:
    if dtype == mx.bool_:
        return "bool"
    categories = {"integer": mx.integer, "float": mx.floating}
    return next((k for k, of in categories.items() if mx.issubdtype(dtype, of)), "complex")
